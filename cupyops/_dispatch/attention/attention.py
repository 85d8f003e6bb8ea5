"""Forms of attention for half types: a problem, and how mma.sync computes it (cuda_src/attention.cu).

The tensors of a problem are (batch, heads, rows, width), in memory in any order that leaves rows contiguous. `readable`
makes them such as kernels read them; what kernels write lies as what it goes with.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._util.strides import aligned
from ..core.forms import Form, Launch
from ..core.gpu import Gpu, gpu

HALF = (torch.float16, torch.bfloat16)
WIDTHS = (64, 128, 256)  # of a row, that there are kernels for; narrower ones are read as if zeros followed
WIDE = WIDTHS[-1]  # by mma.sync alone, and always with bounds: so wide a row takes the registers of two
BOUNDS = (0, 1, 2)
TILE = 128  # rows that a block owns, of every form
VECTOR = 8  # elements
CELL = 64, 64  # of a map, for MMA: narrower panels count as what they lie in
BLOCK = 256  # threads of a block that prepares
_MOST_ROWS = 1 << 30
_MOST_BLOCKS = 2**31 - 1
_FAR = 1 << 29  # no bound of a sequence is farther
_RESERVED = 1024  # bytes of shared memory that each block takes besides


class ForwardTile(NamedTuple):
    """Template values of a forward kernel: row width `d`, keys of a panel, and `rows`, 1/16 of the queries that a warp owns.

    stages: 2 where panels of keys and values arrive during all of the one before, 1 where they do in turns.
    """

    d: int
    panel: int
    rows: int
    warps: int
    stages: int

    @property
    def shared(self) -> int:
        """Bytes: the tile, and two panels of each stage."""
        return (TILE + 2 * self.stages * self.panel) * self.d * 2

    def blocks(self, gpu: Gpu) -> int:
        """Number of blocks that fit on a multiprocessor, limited by registers and shared memory."""
        return min(8 // self.warps, gpu.shared_total // (self.shared + _RESERVED))


FORWARD_TILES = (  # narrower ones first, and of one width the faster
    ForwardTile(64, 64, 2, 4, 2),
    ForwardTile(96, 64, 2, 4, 1),
    ForwardTile(128, 64, 2, 4, 2),
    ForwardTile(128, 64, 2, 4, 1),
    ForwardTile(WIDE, 64, 1, 8, 1),
    ForwardTile(WIDE, 32, 1, 8, 1),
)

attention_fwd_mma = Kernel(
    "attention.cu",
    "attention_fwd_mma<T, D, BN, M, WARPS, STAGES, BOUNDS>",
    T=HALF,
    D=(64, 96, 128, WIDE),
    BN=(64, 32),
    M=(2, 1),
    WARPS=(4, 8),
    STAGES=(2, 1),
    BOUNDS=BOUNDS,
    where=lambda D, BN, M, WARPS, STAGES, BOUNDS, **_: (
        ForwardTile(D, BN, M, WARPS, STAGES) in FORWARD_TILES and (D < WIDE or BOUNDS == 2)
    ),
)
attention_bwd_prepare = Kernel("attention.cu", "attention_bwd_prepare<T, LANES>", T=HALF, LANES=(8, 16, 32))
attention_bwd_mma = Kernel(
    "attention.cu",
    "attention_bwd_mma<T, D, BN, WARPS, KEYS, BOUNDS>",
    T=HALF,
    D=WIDTHS,
    BN=(64, 32, 16),
    WARPS=(8, 4),
    KEYS=(True, False),
    BOUNDS=BOUNDS,
    where=lambda D, BN, WARPS, BOUNDS, **_: (
        (D, BN, WARPS) in ((64, 64, 8), (128, 64, 8), (128, 32, 8)) or (D, BN, WARPS, BOUNDS) == (WIDE, 16, 4, 2)
    ),
)


attention_bwd_collect = Kernel("attention.cu", "attention_bwd_collect<T>", T=HALF)
attention_clear = Kernel("attention.cu", "attention_clear<I>", I=(torch.int32, torch.int64))


class Blocks(NamedTuple):
    """Tile sizes of a launch, from which a map of a mask is made (map.py).

    rows, panel: of one side, that it owns, and of the other, that pass at a time. keys: it owns keys. cell: queries and keys
    that a map tells no further apart.
    """

    rows: int
    panel: int
    keys: bool
    cell: tuple[int, int]


class Parts(NamedTuple):
    """Form that runs a launch, and what it needs besides.

    packed: of sequences. draws: blocks draw tiles one after the other. map: lists of the panels that a mask leaves. queries,
    values: launches of other roles, backward. collects: what rounds the sums of one pass, of `columns` columns.
    """

    form: Any
    blocks: Blocks
    packed: bool = False
    draws: bool = False
    map: Tensor | None = None
    prepare: Launch[None] | None = None
    queries: Launch[Any] | None = None
    values: Launch[Any] | None = None
    collects: tuple[Launch[None], ...] = ()
    columns: int = 0
    share: int = 1  # heads of a group that a block has, of one pass

    @property
    def launches(self) -> list[Launch[Any]]:
        """The other launches."""
        return [one for one in (self.prepare, self.queries, self.values, *self.collects) if one is not None]


class Problem(NamedTuple):
    """Sizes, strides in elements of (batch, head, row), and which keys a query sees.

    low, high: query i sees the keys from i + low to i + high; None where there is no such bound. grads: the strides of the
    gradients of q, k and v, in backward. tokens: the queries of packed sequences together, of which there are `batches`; the
    longest has so many queries and keys. Else None. value_width: of the rows of v and y; width, of those of q and k.
    in_order: why gradients are to be summed in a fixed order, empty where they need not be.
    """

    batches: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    low: int | None
    high: int | None
    dtype: torch.dtype
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    y: tuple[int, int, int]
    grads: tuple[tuple[int, int, int], ...] = ()
    tokens: int | None = None
    value_width: int = 0
    in_order: str = ""

    @property
    def d(self) -> int:
        """The width that kernels are made for."""
        return next(width for width in WIDTHS if max(self.width, self.value_width) <= width)

    @property
    def group(self) -> int:
        """Heads of the queries that share one of the keys."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def bounds(self) -> int:
        """Number of bounds that the kernels check: their template parameter BOUNDS."""
        if self.d == WIDE:
            return 2
        return 2 if self.low is not None else 1 if self.high is not None else 0

    def sizes(self, padded: int = 0, section: int = 1) -> Any:
        """`struct Sizes`."""
        none = max(self.queries, self.keys) if self.tokens is None else _FAR
        low = -none if self.low is None else self.low
        high = none if self.high is None else self.high
        counts = self.heads, self.group, self.batches, self.queries, self.keys
        return np.array((*counts, low, high, self.width, padded, section, self.value_width), dtype=np.int32)


def problem(q: Tensor, k: Tensor, v: Tensor, y: Tensor, low: int | None, high: int | None) -> Problem:
    """The problem of forward, of tensors as `readable` gives them; bounds that bound nothing are left out."""
    (batches, heads, queries, width), kv_heads, keys = q.shape, k.shape[1], k.shape[2]
    low = None if low is None or queries - 1 + low <= 0 else min(low, keys)
    high = None if high is None or high >= keys - 1 else max(high, -queries)
    counts = batches, heads, kv_heads, queries, keys, width
    strides = _strides(q), _strides(k), _strides(v), _strides(y)
    return Problem(*counts, low, high, q.dtype, *strides, value_width=v.shape[3])


def packed(p: Problem, sequences: int, queries: int, keys: int, low: int | None, high: int | None) -> Problem:
    """Problem of packed sequences, from that of all their tokens as one; `queries` and `keys` are the longest sequence's."""
    low, high = (None if bound is None else max(-_FAR, min(bound, _FAR)) for bound in (low, high))
    return p._replace(batches=sequences, queries=queries, keys=keys, low=low, high=high, tokens=p.queries)


def with_gradients(p: Problem, *grads: Tensor | None) -> Problem:
    """The problem of backward; of a gradient that is not needed strides are 0."""
    return p._replace(grads=tuple((0, 0, 0) if grad is None else _strides(grad) for grad in grads))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and row; 0 for a dimension of size 1."""
    batch, head, row = (stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride()[:3]))
    return batch, head, row


def alike(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors of one shape have the same strides and contiguous rows."""
    return _strides(x) == _strides(y) and x.stride(3) == y.stride(3) == 1


def readable(x: Tensor) -> Tensor:
    """`x`, or a copy of it, whose rows are contiguous and begin at whole vectors."""
    whole = all(stride % VECTOR == 0 for size, stride in zip(x.shape[:3], x.stride()[:3]) if size > 1)
    if whole and (x.stride(3) == 1 or x.shape[3] == 1) and aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def empty(like: Tensor) -> Tensor:
    """Return an output tensor: dense, in the order of dimensions of `like` where that leaves rows contiguous."""
    found = torch.empty_like(like)
    return found if found.stride(3) == 1 else torch.empty_like(like, memory_format=torch.contiguous_format)


def clear(x: Tensor, starts: Tensor, longest: int, lse: Tensor | None = None, sinks: Tensor | None = None) -> None:
    """Rows of `x`, (1, heads, tokens, width), that no packed sequence has become zeros, and -inf in lse, or the sink."""
    _, heads, tokens, width = x.shape
    if not x.numel():
        return
    of = np.array([stride // VECTOR for stride in _strides(x)], dtype=np.int64)
    sizes = np.array((tokens, heads, width // VECTOR, starts.shape[0] - 1, longest), dtype=np.int32)
    attention_clear[2 * gpu(x.device).multiprocessors, BLOCK](
        starts.contiguous(), x, lse, sinks, of, sizes, I=starts.dtype
    )


def empty_result(q: Tensor, v: Tensor) -> Tensor:
    """Return the output: like `empty` of q, with rows as wide as those of v."""
    if q.shape[3] == v.shape[3]:
        return empty(q)
    order = sorted(range(3), key=lambda dim: q.stride(dim), reverse=True)
    shape = [q.shape[dim] for dim in order]
    return q.new_empty((*shape, v.shape[3])).permute(*(order.index(dim) for dim in range(3)), 3)


def scale_of(q: Tensor, scale: float | None) -> float:
    """The scale of the scores: 1 / sqrt(width) where none is given."""
    return q.shape[-1] ** -0.5 if scale is None and q.shape[-1] else scale or 0.0


def why_not(q: Tensor, k: Tensor, v: Tensor, scale: float | None, gpu: Gpu) -> str | None:
    """Return why no kernel serves these tensors of four dimensions, or None. Looks at metadata alone."""
    if q.dtype not in HALF:
        return f"no kernel for {q.dtype}"
    if 0 < gpu.capability < 8:
        return "its kernels need compute capability 8.0"
    for width in (q.shape[3], v.shape[3]):
        if width % VECTOR or not 0 < width <= WIDTHS[-1]:
            return f"head_dim {width} is no multiple of {VECTOR} up to {WIDTHS[-1]}"
    if scale is not None and not 0 < scale < math.inf:
        return f"scale {scale}"
    batches, heads, queries = q.shape[:3]
    keys = k.shape[2]
    if max(queries, keys) >= _MOST_ROWS or batches * heads * ceil_div(max(queries, keys, 1), TILE) * 8 > _MOST_BLOCKS:
        return "over 2^31 - 1 blocks"
    return None


def taken(x: Tensor) -> Tensor:
    """`x`, or a copy of it where its rows begin elsewhere than PyTorch's fused kernels take for granted."""
    vector = max(1, 16 // x.element_size())
    if not x.is_cuda or x.dim() < 2 or x.shape[-1] % vector or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return x
    if aligned(x) and all(stride % vector == 0 for size, stride in zip(x.shape[:-1], x.stride()) if size > 1):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def taken_mask(mask: Tensor) -> Tensor:
    """`mask`, or a copy in which keys lie side by side, where they do not: for such PyTorch holds all scores in memory.

    transformers makes one where it builds a mask of queries alone, which is expanded over the keys. Of dimensions that it is
    expanded over besides, the copy has one: PyTorch would fill them all with numbers for a mask of bools.
    """
    if mask.device.type == "cpu" or mask.dim() < 2 or mask.shape[-1] <= 1 or mask.stride(-1) == 1:
        return mask
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    return mask.clone(memory_format=torch.contiguous_format)


class Gradients(NamedTuple):
    """Tensors that backward reads and writes; the gradients of queries, keys and values may be None.

    sinks: of each head, in fp32, where their gradient is needed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    lse: Tensor
    grad_y: Tensor
    grad_lse: Tensor | None
    grad_q: Tensor | None
    grad_k: Tensor | None
    grad_v: Tensor | None
    scale: float
    sinks: Tensor | None


class Forward(Form[Problem]):
    """A way to compute y and the log-sum-exp of each row; the `extra` of its launch has it, to be run."""

    def run(
        self,
        launch: Launch[Parts],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        scale: float,
    ) -> None:
        """Run a launch of this form."""
        launch(q, k, v, y, lse, sinks, scale)


def section_of(p: Problem, gpu: Gpu, heads: int, rows: int, group: int = 1) -> int:
    """Number of heads processed together so that `rows` rows for each `group` of them fit into a quarter of L2."""
    held = gpu.l2 // 4 // max(1, rows * (p.width + p.value_width) * 2)
    return max(1, min(max(1, held) * group, heads * p.batches))


class MmaForward(Forward):
    """A block owns a tile of queries, by which panels of keys and values pass."""

    name = "mma"
    summary = "a block owns 128 queries, by which panels of 64 keys pass, or 32 where wide rows leave no room, by MMA"
    uses = (attention_fwd_mma,)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch[Parts]:
        """A block for each tile of each head."""
        p, tile = problem, self.tile(problem, gpu)
        section = section_of(p, gpu, p.heads, p.keys, p.group)
        return Launch(
            attention_fwd_mma,
            ceil_div(p.queries, TILE) * p.heads * p.batches,
            32 * tile.warps,
            tile.shared,
            {
                "T": p.dtype,
                "D": tile.d,
                "BN": tile.panel,
                "M": tile.rows,
                "WARPS": tile.warps,
                "STAGES": tile.stages,
                "BOUNDS": p.bounds,
            },
            extra=Parts(self, Blocks(TILE, tile.panel, False, CELL)),
            args=(
                *(np.array(stride, dtype=np.int64) for stride in (p.q, p.k, p.v, p.y)),
                p.sizes(p.tokens or 0, section),
            ),
        )

    def tile(self, p: Problem, gpu: Gpu) -> ForwardTile:
        """Return the narrowest tile that holds a row; of several, the first with the most blocks on a multiprocessor."""
        room = max(p.width, p.value_width)
        least = next(one.d for one in FORWARD_TILES if room <= one.d)
        fit = [one for one in FORWARD_TILES if one.d == least and one.shared <= gpu.shared]
        return max(fit, key=lambda one: one.blocks(gpu))


class Backward(Form[Problem]):
    """A way to compute the gradients: rows are prepared, then each role that is wanted has a launch of its own.

    The launch of the whole is that of the keys' role, with the form and the other launches as `extra`.
    """

    def padded(self, p: Problem) -> int:
        """Rows of lse2 and delta of a head; of packed sequences the last tile may begin anywhere."""
        return ceil_div(p.queries if p.tokens is None else p.tokens + TILE, TILE) * TILE

    def launch(self, problem: Problem, gpu: Gpu) -> Launch[Parts]:
        """Launch of the keys' role; `extra` has the launches of the queries' role and of the preparation."""
        keys, queries = self.role(problem, gpu, True), self.role(problem, gpu, False)
        return replace(keys, extra=keys.extra._replace(queries=queries, prepare=self.prepare(problem)))

    def prepare(self, p: Problem) -> Launch[None]:
        """A few threads for each row."""
        lanes, padded = p.d // VECTOR, self.padded(p)
        p = p if p.tokens is None else p._replace(batches=1, queries=p.tokens)
        blocks = ceil_div(p.batches * p.heads * padded * lanes, BLOCK)
        template = {"T": p.dtype, "LANES": lanes}
        return Launch(
            attention_bwd_prepare,
            blocks,
            BLOCK,
            template=template,
            args=(np.array(p.y, dtype=np.int64), p.sizes(padded)),
        )

    def role(self, p: Problem, gpu: Gpu, keys: bool) -> Launch[Parts]:
        """The launch of one role."""
        raise NotImplementedError

    def run_prepare(
        self, p: Problem, launch: Launch[Parts], of: Gradients, sums: Tensor | None, columns: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Launch the preparation; return lse2 and delta of each row, and what it adds to the gradient of its sink."""
        found = of.lse.new_empty((2 + (of.sinks is not None), *of.lse.shape[:2], self.padded(p)))
        lse2, delta, *of_sinks = found
        given = of.y, of.grad_y, of.lse, of.grad_lse, of.sinks, *(of_sinks or [None])
        assert launch.extra.prepare is not None
        launch.extra.prepare(*given, delta, lse2, sums, columns)
        return lse2, delta, *(of_sinks or [None])

    def run(self, p: Problem, launch: Launch[Parts], of: Gradients) -> Tensor | None:
        """Launch the roles that are wanted; return what each row adds to the gradient of its sink."""
        lse2, delta, of_sinks = self.run_prepare(p, launch, of, None, 0)
        if of.grad_k is not None and of.grad_v is not None:
            self.run_role(launch, (of.k, of.v, of.q, of.grad_y, of.grad_k, of.grad_v), lse2, delta, of.scale)
        if of.grad_q is not None and launch.extra.queries is not None:
            six = (of.q, of.grad_y, of.k, of.v, of.grad_q, None)
            self.run_role(launch.extra.queries, six, lse2, delta, of.scale)
        return of_sinks

    def run_role(self, launch: Launch[Parts], six: tuple[Any, ...], lse2: Tensor, delta: Tensor, scale: float) -> None:
        """Launch one role on six tensors: those that a block owns, those that pass, and the gradients written."""
        launch(*six, lse2, delta, scale)


def collect(p: Problem, to: tuple[int, ...], columns: int, padded: int) -> Launch[None]:
    """Launch that rounds the sums of `columns` columns for each of the `padded` rows of the heads of `p` (sums.cuh)."""
    across = ceil_div(columns, 64)
    blocks = p.batches * p.heads * padded // 64 * across
    args = across, np.array(to, dtype=np.int64), p.sizes(padded)
    return Launch(attention_bwd_collect, blocks, 128, template={"T": p.dtype}, args=args)


class MmaBackward(Backward):
    """A block owns rows of one side, by which panels of the other side pass."""

    uses = (attention_bwd_prepare, attention_bwd_mma)

    def __init__(self, panel: int) -> None:
        self.panel, self.name = panel, f"mma_{panel}"
        self.tile = TILE // 2 if panel == 16 else TILE
        self.summary = (
            f"a block owns {self.tile} keys, or queries, by which panels of {panel} of the others pass, by MMA"
        )

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Panels of 64 wide rows are too much for some cards."""
        if problem.d not in {64: (64, 128), 32: (128,), 16: (WIDE,)}[self.panel]:
            return "it is for rows of another width"
        shared = self.shared(problem)
        return f"it takes {shared} bytes of shared memory" if shared > gpu.shared else None

    def shared(self, p: Problem) -> int:
        """Bytes: two tiles, and two panels twice."""
        return (2 * self.tile + 4 * self.panel) * p.d * 2

    def role(self, p: Problem, gpu: Gpu, keys: bool) -> Launch[Parts]:
        """Launch of one role, with a block for each tile of rows that it owns and each head."""
        grad_q, grad_k, grad_v = p.grads
        six = (p.k, p.v, p.q, p.y, grad_k, grad_v) if keys else (p.q, p.y, p.k, p.v, grad_q, grad_q)
        rows, heads = (p.keys, p.kv_heads) if keys else (p.queries, p.heads)
        passing = (p.queries * p.group,) if keys else (p.keys, p.group)
        section = section_of(p, gpu, heads, *passing)
        return Launch(
            attention_bwd_mma,
            ceil_div(rows, self.tile) * heads * p.batches,
            2 * self.tile,
            self.shared(p),
            {"T": p.dtype, "D": p.d, "BN": self.panel, "WARPS": self.tile // 16, "KEYS": keys, "BOUNDS": p.bounds},
            extra=Parts(self, Blocks(self.tile, self.panel, keys, CELL)),
            args=(np.array(six, dtype=np.int64).ravel(), p.sizes(self.padded(p), section)),
        )
