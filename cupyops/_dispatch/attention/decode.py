"""Forms of decode_attention: a few queries of each sequence against a cache (cuda_src/decode_attention.cu)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..._kernel.kernel import Kernel, ceil_div
from ..._kernel.launch.executors import executors
from ..._util.strides import aligned, is_dry
from ..core import library
from ..core.forms import Form, Forms, Launch, Library
from ..core.gpu import Gpu, gpu
from ..core.library import ByPyTorch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDTHS = (64, 128, 256)  # of a row, that there are kernels for; narrower ones are read as if zeros followed
STEP = 16  # keys that a warp has at a time, which lie in one block of a paged cache
_WARPS = {4: 4, 16: 4, 32: 8}  # of a block, by its rows
_MOST_SPLITS = 128
# As measured on an H200: warps of a multiprocessor that keep its share of the memory busy; and, in steps of a warp, what a
# wave of blocks and the second kernel cost. Of 56 problems the choice takes 1.2% more than the best one, in the mean.
_WARPS_THAT_FILL, _WAVE, _COMBINE = 9.2, 1.0, 3.0
# By width and rows of a block: steps that a warp asks for ahead, and blocks of a multiprocessor; the first whose shared
# memory there is.
_TUNED = {
    (64, 4): ((2, 2),),
    (128, 4): ((2, 2),),
    (256, 4): ((2, 2),),
    (64, 16): ((2, 4),),
    (128, 16): ((3, 2),),
    (256, 16): ((3, 1), (1, 1)),
    (64, 32): ((3, 1),),
    (128, 32): ((2, 1), (1, 1)),
}


def _is_tuned(D: int, WARPS: int, STAGES: int, BLOCKS: int, ROWS: int = 4, **_: Any) -> bool:
    return _WARPS[ROWS] == WARPS and (STAGES, BLOCKS) in _TUNED.get((D, ROWS), ())


decode_attention_fwd_mma = Kernel(
    "decode_attention.cu",
    "decode_attention_fwd_mma<T, D, ROWS, WARPS, STAGES, BLOCKS, MASKED>",
    T=DTYPES[:2],
    D=WIDTHS,
    ROWS=(16, 32),
    WARPS=(4, 8),
    STAGES=(1, 2, 3),
    BLOCKS=(1, 2, 3, 4),
    MASKED=(False, True),
    where=_is_tuned,
)
decode_attention_fwd_fma = Kernel(
    "decode_attention.cu",
    "decode_attention_fwd_fma<T, D, WARPS, STAGES, BLOCKS, MASKED>",
    T=DTYPES[2:],
    D=WIDTHS,
    WARPS=(4,),
    STAGES=(2,),
    BLOCKS=(2,),
    MASKED=(False, True),
    where=_is_tuned,
)
decode_attention_combine = Kernel("decode_attention.cu", "decode_attention_combine<T>", T=DTYPES)


class Problem(NamedTuple):
    """Sizes, and strides in elements of (batch, row, head); `block_size` is 0 where the cache is not paged.

    rows: of the cache of a sequence, at most; window: how many keys before its own a query sees, -1 for all. mask: its
    strides of (batch, query), None where there is none. whole: all rows are seen, of caches that are not paged, by scores as
    they are, and no lse is wanted: PyTorch's attention computes that.
    """

    batches: int
    queries: int
    heads: int
    kv_heads: int
    width: int
    rows: int
    window: int
    block_size: int
    blocks: int
    table_row: int
    dtype: torch.dtype
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    mask: tuple[int, int] | None = None
    whole: bool = False

    @property
    def d(self) -> int:
        """The width that kernels are made for."""
        return next(width for width in WIDTHS if self.width <= width)

    @property
    def shared_rows(self) -> int:
        """Rows of a sequence that share a head of the keys."""
        return self.queries * (self.heads // self.kv_heads)

    def sizes(self, splits: int) -> Any:
        """`struct Sizes`."""
        counts = self.batches, self.queries, self.heads, self.kv_heads, self.heads // self.kv_heads, self.width
        paged = self.block_size or 1, self.blocks, self.table_row
        return np.array((*counts, self.rows, self.window, splits, *paged), dtype=np.int32)


class Splits(NamedTuple):
    """Number of parts that keys are divided into, and the launch that adds them up."""

    splits: int
    combine: Launch[None]


class Decode(Form[Problem]):
    """Blocks with the same rows share the keys of a sequence among them; each reads its part once for all its rows.

    Args:
        name: of the form.
        kernel: which.
        tile: rows of a block, all of one head of the keys.
        dtypes: that the kernel takes.
    """

    def __init__(self, name: str, kernel: Kernel, tile: int, dtypes: tuple[torch.dtype, ...]) -> None:
        self.name, self.kernel, self.tile, self.dtypes = name, kernel, tile, dtypes
        self.warps = _WARPS[tile]
        if tile == 32:
            self.measured = "77 us, and 86 by 16 rows, where 64 heads share one of the keys, on an H200"
        self.by_mma = kernel is decode_attention_fwd_mma
        by = "MMA" if self.by_mma else "FMA"
        self.summary = f"a block owns {tile} rows that share a head of the keys, and a part of the keys; by {by}"

    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels: the one that reads the cache, and the one that combines its parts."""
        return self.kernel, decode_attention_combine

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Each has dtypes and widths of its own."""
        if problem.dtype not in self.dtypes:
            return f"it is not for {problem.dtype}"
        return (
            None if (problem.d, self.tile) in _TUNED else f"{self.tile} rows of {problem.d} are too much for registers"
        )

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """More than two blocks of 16 rows that read the same keys take longer than blocks of 32."""
        if self.tile <= 16 or problem.shared_rows > 32:
            return None
        return f"{problem.shared_rows} rows share a head of the keys, no more than 32"

    def units(self, p: Problem) -> int:
        """Number of blocks of each split."""
        return ceil_div(p.shared_rows, self.tile) * p.kv_heads * p.batches

    def tuning(self, d: int, gpu: Gpu) -> tuple[int, int, int]:
        """Steps that a warp asks for ahead, blocks of a multiprocessor, and bytes of shared memory."""
        found = [(*tuned, self._shared(d, tuned[0])) for tuned in _TUNED[d, self.tile]]
        return next((one for one in found if one[2] <= gpu.shared), found[-1])

    def _shared(self, d: int, stages: int) -> int:
        """Bytes of shared memory; what warps add up lies in the place of all else afterwards."""
        warps = self.warps
        if not self.by_mma:  # panels of 4 KiB
            return max(stages * warps * 2 * 4096, (2 * warps + 1 + 2 * d) * self.tile * 4)
        rows = self.tile * d * 2 if self.tile * d > 16 * 128 else 0  # of q, which are in registers else
        return max(stages * warps * 2 * STEP * d * 2 + rows, (2 * warps + 1 + 2 * (d + 8)) * self.tile * 4)

    def splits(self, p: Problem, gpu: Gpu) -> int:
        """Least number of splits that is expected to take at most 3% more than the best one."""
        keys = p.rows if p.window < 0 else min(p.rows, p.window + p.queries)
        steps = ceil_div(keys, STEP)
        most = max(1, min(_MOST_SPLITS, steps // self.warps))
        times = [self._time(p, gpu, steps, splits) for splits in range(1, most + 1)]
        return next(n for n, time in enumerate(times, 1) if time <= 1.03 * min(times))

    def _time(self, p: Problem, gpu: Gpu, steps: int, splits: int) -> float:
        """Time in steps of 64 elements a row: that of the slowest warp, in each wave of blocks, and what a wave costs."""
        slowest, blocks = ceil_div(steps, splits * self.warps) * p.d / 64, splits * self.units(p)

        def wave(blocks: int) -> float:
            warps = ceil_div(blocks, gpu.multiprocessors) * self.warps
            return _WAVE + slowest * max(1.0, warps / _WARPS_THAT_FILL) if blocks else 0

        at_once = gpu.multiprocessors * self.tuning(p.d, gpu)[1]
        return blocks // at_once * wave(at_once) + wave(blocks % at_once) + _COMBINE * (splits > 1)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A block for each split of each tile of rows; `extra` has what adds up the splits, where there are several."""
        p, splits = problem, self.splits(problem, gpu)
        rows = p.batches * p.queries * p.heads
        lanes = p.d // 4
        stages, blocks, shared = self.tuning(p.d, gpu)
        strides = p.q, p.k, p.v, (*(p.mask or (0, 0)), 0)
        combine: Launch[None] = Launch(
            decode_attention_combine,
            rows,
            ceil_div(min(256, lanes * splits), 32) * 32,
            template={"T": p.dtype},
            overlap=True,
            args=(rows, p.width, splits, lanes),
        )
        return Launch(
            self.kernel,
            splits * self.units(p),
            32 * self.warps,
            shared,
            {"T": p.dtype, "D": p.d, "WARPS": self.warps, "STAGES": stages, "BLOCKS": blocks}
            | ({"ROWS": self.tile} if self.by_mma else {})
            | {"MASKED": p.mask is not None},
            extra=Splits(splits, combine),
            args=(*(np.array(stride, dtype=np.int64) for stride in strides), p.sizes(splits)),
        )


def _why_ours(problem: Problem, gpu: Gpu) -> str | None:
    if not problem.whole:
        return "it takes whole caches, scores as they are, and one query"
    if problem.dtype not in DTYPES[:2]:
        return "its attention of float32 has a copy of the keys for each head"
    if gpu.capability == 9 and problem.d > 128:
        return "rows of more than 128 elements are as fast here, by up to 1.16 on an H100"
    return None


FORWARD = Forms(
    "decode_attention",
    "forward",
    [
        ByPyTorch(_why_ours),
        Decode("mma_32", decode_attention_fwd_mma, 32, DTYPES[:2]),
        Decode("mma", decode_attention_fwd_mma, 16, DTYPES[:2]),
        Decode("fma", decode_attention_fwd_fma, 4, DTYPES[2:]),
    ],
)


def why_not(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, scale: float | None, gpu: Gpu) -> str | None:
    """Return why no kernel serves these tensors, or None. Looks at metadata alone."""
    if q.dtype not in DTYPES:
        return f"no kernel for {q.dtype}"
    if 0 < gpu.capability < 8:
        return "its kernels need compute capability 8.0"
    width = q.shape[3]
    if v.shape[3] != width:
        return "values are of another width than keys"
    if width % 8 or not 0 < width <= WIDTHS[-1]:
        return f"head_dim {width} is no multiple of 8 up to {WIDTHS[-1]}"
    if scale is not None and not 0 < scale < math.inf:
        return f"scale {scale}"
    if not (q.numel() and k.numel()):
        return "no rows"
    rows = k.shape[1] * (1 if block_table is None else block_table.shape[1])
    if block_table is not None and (k.shape[1] % STEP or not rows):
        return f"blocks of {k.shape[1]} rows, no multiple of {STEP}"
    if max(rows, k.shape[0]) >= 1 << 30 or q.shape[:3].numel() > 1 << 28:
        return "too many rows"
    return None


def _readable(x: Tensor) -> Tensor:
    """`x`, or a copy of it, whose rows are contiguous and begin at multiples of 16 bytes."""
    whole = all(stride * x.itemsize % 16 == 0 for size, stride in zip(x.shape[:3], x.stride()[:3]) if size > 1)
    return x if whole and x.stride(3) == 1 and aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _strides(x: Tensor) -> tuple[int, int, int]:
    batch, row, head, _ = x.stride()
    return batch, row, head


def by_pytorch(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor | None:
    """Attend to whole caches with one query by PyTorch's own function, where that is the chosen form; else return None."""
    if q.dtype not in DTYPES[:2] or q.shape[1] != 1 or not q.numel() * k.numel():
        return None
    if not q.is_cuda and q.device.type not in executors:
        return None
    if (
        any(type(x) is not Tensor or is_dry(x) for x in (q, k, v))
        or v.shape[3] != q.shape[3]
        or q.shape[3] > WIDTHS[-1]
    ):
        return None
    if not isinstance(FORWARD.plan(_problem(q, k, v, whole=True), gpu(q.device)), Library):
        return None
    y = torch.empty(())

    def attend() -> None:
        nonlocal y
        heads, keys, values = (x.transpose(1, 2) for x in (q, k, v))
        shared = q.shape[2] > k.shape[2]
        y = F.scaled_dot_product_attention(heads, keys, values, scale=scale, enable_gqa=shared).transpose(1, 2)

    library.call("torch.nn.functional.scaled_dot_product_attention", q, attend)
    return y.contiguous() if y.dim() else torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    table: Tensor | None = None,
    mask: Tensor | None = None,
    whole: bool = False,
) -> Problem:
    block_size, blocks, table_row = (0, 0, 0) if table is None else (k.shape[1], k.shape[0], table.shape[1])
    return Problem(
        batches=q.shape[0],
        queries=q.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        width=q.shape[3],
        rows=table_row * block_size if block_size else k.shape[1],
        window=-1 if window is None else min(window, 1 << 30),
        block_size=block_size,
        blocks=blocks,
        table_row=table_row,
        dtype=q.dtype,
        q=_strides(q),
        k=_strides(k),
        v=_strides(v),
        mask=None if mask is None else (mask.stride(0), mask.stride(1)),
        whole=whole,
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lengths: Tensor | None,
    block_table: Tensor | None,
    mask: Tensor | None,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """(y, lse), contiguous."""
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if is_dry(q):
        return y, lse
    q, k, v = (_readable(x) for x in (q, k, v))
    lengths, table = (None if x is None else _of_32_bits(x).contiguous() for x in (kv_lengths, block_table))
    if mask is not None and mask.stride(2) != 1:
        mask = mask.contiguous()
    launch = FORWARD.launch(_problem(q, k, v, window, table, mask), gpu(q.device))
    splits, combine = launch.extra
    given = q, k, v, lengths, table, mask, y, lse
    if splits == 1:
        launch(*given, None, None, scale, softcap or 0.0)
        return y, lse
    partial_y = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    launch(*given, partial_y, partial_lse, scale, softcap or 0.0)
    combine(partial_y, partial_lse, y, lse)
    return y, lse


def _of_32_bits(x: Tensor) -> Tensor:
    """Convert integers to 32 bits as the kernels read them; larger ones are clamped, and stay out of range."""
    return x if x.dtype is torch.int32 else x.clamp(-(2**31), 2**31 - 1).to(torch.int32)
