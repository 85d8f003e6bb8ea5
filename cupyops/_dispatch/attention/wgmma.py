"""Forms of attention on Hopper's tensor cores (cuda_src/attention_wgmma.cu). TMA reads and writes by tensor maps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._kernel.launch.tensor_map import segment_map, tensor_map
from ..core.forms import Launch
from ..core.gpu import Gpu
from .attention import BOUNDS, HALF, TILE, WIDE, Backward, Blocks, Forward, Parts, Problem, attention_bwd_prepare

PANEL = 64  # elements of a row, that TMA copies at once: as long as the swizzle
SPARE = 2048  # bytes of shared memory for barriers, and to begin at a multiple of 1024
MOST = 227 * 1024 - SPARE  # bytes that a block of a Hopper GPU can have besides
ROWS = 4096  # bytes for lse2 and delta of the panels of backward
STAGES = 4  # at most: more hide nothing more


class Shape(NamedTuple):
    """Template values of a forward kernel: width of a row of q and k, and of v; keys of a panel; consumer warpgroups."""

    d: int
    values: int
    keys: int
    consumers: int

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return 64 * self.consumers

    @property
    def tiles(self) -> int:
        """Bytes of tiles of queries: two where there is room."""
        return self.rows * line(self.d) * (2 if self.d <= 128 else 1)

    @property
    def panels(self) -> int:
        """Bytes of a panel of keys and one of values."""
        return self.keys * (line(self.d) + line(self.values))

    @property
    def stages(self) -> int:
        """Number of stages of the shared-memory ring."""
        return min(STAGES, (MOST - self.tiles) // self.panels)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Values of BOUNDS that have kernels; where not all have one, that of a window serves."""
        return BOUNDS if self.d in (64, 128) else BOUNDS[-1:]


def line(d: int) -> int:
    """Bytes of a row in whole panels of TMA."""
    return ceil_div(d, PANEL) * PANEL * 2


FORWARD = (  # narrower ones first
    Shape(64, 64, 128, 3),
    Shape(96, 96, 128, 2),
    Shape(128, 128, 128, 2),
    Shape(192, 128, 128, 2),
    Shape(256, 256, 80, 2),
)


class Roles(NamedTuple):
    """Template values of backward's kernels: width of a row of q and k, and of v; rows of a panel in either role."""

    d: int
    values: int
    of_queries: int
    of_keys: int

    def parts(self, keys: bool) -> tuple[int, ...]:
        """Return the parts of a role; for the widest rows the keys' role has a kernel for each of its results."""
        return (OF_KEYS, OF_VALUES) if keys and self.values == WIDE else (ALL,)

    def panel(self, keys: bool, part: int) -> int:
        """Rows of a panel."""
        return VALUES if part == OF_VALUES else self.of_keys if keys else self.of_queries

    def owned(self, part: int) -> int:
        """Bytes of the rows that a block owns."""
        return TILE * (line(self.d) + (0 if part == OF_VALUES else line(self.values)))

    def stage(self, keys: bool, part: int) -> int:
        """Bytes of two panels."""
        return self.panel(keys, part) * (line(self.d) + line(self.values))

    def stages(self, keys: bool, part: int) -> int:
        """Number of stages of the shared-memory ring."""
        return min(STAGES, (MOST - ROWS - self.owned(part)) // self.stage(keys, part))

    def shared(self, keys: bool, part: int) -> int:
        """Bytes: what is owned, the ring of two panels each, lse2 and delta of their rows, the barriers."""
        return self.owned(part) + self.stages(keys, part) * self.stage(keys, part) + ROWS + SPARE

    @property
    def bounds(self) -> tuple[int, ...]:
        """Values of BOUNDS that have kernels; a bound that a problem lacks is set far away."""
        return (0, 2) if self.d <= 128 else (2,)


BACKWARD = Roles(64, 64, 128, 96), Roles(128, 128, 96, 64), Roles(192, 128, 64, 32), Roles(WIDE, WIDE, 32, 32)
ALL, OF_KEYS, OF_VALUES = range(3)  # Part of the CUDA
VALUES = 64  # rows of a panel of the keys' role, where it is of values alone
# cells of a map, in backward: queries and keys that divide tiles and panels of both roles
CELLS = {64: (32, 128), 128: (64, 32), WIDE: (32, 32)}


def shape_of(p: Problem) -> Shape:
    """The narrowest that has room for the rows of a problem."""
    return next(one for one in FORWARD if p.width <= one.d and p.value_width <= one.values)


def roles_of(p: Problem) -> Roles:
    """The narrowest that have room for the rows of a problem."""
    return next(one for one in BACKWARD if p.width <= one.d and p.value_width <= one.values)


def _is_backward(D: int, DV: int, BN: int, STAGES: int, KEYS: bool, PART: int, BOUNDS: int, **_: Any) -> bool:
    roles = next((one for one in BACKWARD if one[:2] == (D, DV)), None)
    if roles is None or PART not in roles.parts(KEYS) or BOUNDS not in roles.bounds:
        return False
    return (roles.panel(KEYS, PART), roles.stages(KEYS, PART)) == (BN, STAGES)


attention_fwd_wgmma = Kernel(
    "attention_wgmma.cu",
    "attention_fwd_wgmma<T, D, DV, BN, CONSUMERS, STAGES, BOUNDS>",
    arch="sm_90a",
    T=HALF,
    D=(64, 96, 128, 192, 256),
    DV=(64, 96, 128, 256),
    BN=(128, 80),
    CONSUMERS=(2, 3),
    STAGES=(2, 4),
    BOUNDS=BOUNDS,
    where=lambda D, DV, BN, CONSUMERS, STAGES, BOUNDS, **_: any(
        (*one, one.stages) == (D, DV, BN, CONSUMERS, STAGES) and BOUNDS in one.bounds for one in FORWARD
    ),
)
attention_bwd_wgmma = Kernel(
    "attention_wgmma.cu",
    "attention_bwd_wgmma<T, D, DV, BN, STAGES, KEYS, PART, BOUNDS>",
    arch="sm_90a",
    T=HALF,
    D=(64, 128, 192, WIDE),
    DV=(64, 128, WIDE),
    BN=(32, 64, 96, 128),
    STAGES=(2, 3, 4),
    KEYS=(True, False),
    PART=(ALL, OF_KEYS, OF_VALUES),
    BOUNDS=BOUNDS,
    where=_is_backward,
)

# bytes of keys and values, or of what passes, that are to stay in L2 while heads are worked on side by side
L2, _L2_LONG, _LONG = 8 << 20, 32 << 20, 2048


def why_not_by_tma(p: Problem, gpu: Gpu, shared: int) -> str | None:
    """Return why a form cannot move a problem by TMA, or compute it by wgmma in `shared` bytes of shared memory, or None."""
    if gpu.capability != 9:
        return "wgmma is of compute capability 9.0"
    if gpu.shared < shared:
        return f"it takes {shared} bytes of shared memory"
    if not (p.batches and p.heads and p.queries and p.keys):
        return "TMA reads nothing of no elements"
    batches = p.batches if p.tokens is None else 1
    sizes = (batches, p.heads, p.queries), *[(batches, p.kv_heads, p.keys)] * 2
    strides = [stride for of, all_of in zip(sizes, (p.q, p.k, p.v)) for size, stride in zip(of, all_of) if size > 1]
    if not all(0 < stride < 1 << 38 for stride in strides):
        return "TMA takes no tensor that is expanded"
    return None


def box_map(x: Tensor, rows: int, written: bool = False, packed: bool = False) -> Any:
    """Return the tensor map by which TMA copies a panel of `rows` rows at a time."""
    if packed:
        return segment_map(x, (rows, PANEL), swizzle=128, written=written)
    return tensor_map(x, (1, 1, rows, PANEL), swizzle=128, written=written)


class WgmmaForward(Forward):
    """A persistent block takes tile after tile of queries, by which panels of keys and values pass."""

    name = "wgmma"
    summary = "a persistent block owns 128 or 192 queries at a time; panels of keys pass, by WGMMA and TMA"
    uses = (attention_fwd_wgmma,)

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Require Hopper, and tensors that TMA can read."""
        return why_not_by_tma(problem, gpu, self.shared(shape_of(problem)))

    def shared(self, shape: Shape) -> int:
        """Bytes: tiles, in whose place results leave, the ring of panels, the barriers."""
        return shape.tiles + shape.stages * shape.panels + SPARE

    def launch(self, problem: Problem, gpu: Gpu) -> Launch[Parts]:
        """Launch as many blocks as run at once; where tiles differ in length, the blocks draw them one after the other."""
        p, shape = problem, shape_of(problem)
        tiles = ceil_div(p.queries, shape.rows) * p.heads * p.batches
        blocks, bounded = min(tiles, gpu.multiprocessors), p.low is not None or p.high is not None
        held = (_L2_LONG if p.keys >= _LONG else L2) // (p.keys * (p.width + p.value_width) * 2)
        section = max(1, held) * p.group if bounded else 1
        bounds = p.bounds if p.bounds in shape.bounds else shape.bounds[-1]
        fixed = {"BN": shape.keys, "CONSUMERS": shape.consumers, "STAGES": shape.stages, "BOUNDS": bounds}
        return Launch(
            attention_fwd_wgmma,
            blocks,
            128 * (shape.consumers + 1),
            self.shared(shape),
            {"T": p.dtype, "D": shape.d, "DV": shape.values, **fixed},
            extra=Parts(
                self,
                Blocks(shape.rows, shape.keys, False, (64, shape.keys)),
                packed=p.tokens is not None,
                draws=(bounded or p.tokens is not None) and tiles > blocks,
            ),
            args=(np.array(p.y, dtype=np.int64), p.sizes(p.tokens or 0, min(section, p.heads * p.batches))),
        )

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
        """Launch with a counter of tiles for this call alone, so that streams and graphs side by side share none."""
        keys, consumers = launch.template["BN"], launch.template["CONSUMERS"]
        draws = launch.extra.draws or launch.extra.map is not None  # by a map tiles differ too
        counter = torch.zeros(1, dtype=torch.int32, device=q.device) if draws else None
        packed = launch.extra.packed
        maps = (*(box_map(x, rows, packed=packed) for x, rows in ((q, 64 * consumers), (k, keys), (v, keys))),)
        maps = *maps, box_map(y, 64, written=True, packed=packed)
        launch(*maps, y, lse, sinks, counter, scale)


class WgmmaBackward(Backward):
    """A block owns rows of one side, by which panels of the other side pass."""

    name = "wgmma"
    summary = "a block owns 128 keys, or queries, by which panels of the others pass, by WGMMA and TMA"
    uses = (attention_bwd_prepare, attention_bwd_wgmma)

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Require Hopper, and tensors that TMA can read."""
        roles = roles_of(problem)
        return why_not_by_tma(problem, gpu, max(roles.shared(keys, ALL) for keys in (False, True)))

    def launch(self, problem: Problem, gpu: Gpu) -> Launch[Parts]:
        """Launch of the keys' role; `extra` has the queries' role, the preparation and, for wide rows, the values' part."""
        found = super().launch(problem, gpu)
        if len(roles_of(problem).parts(True)) == 1:
            return found
        return replace(found, extra=found.extra._replace(values=self.role(problem, gpu, True, OF_VALUES)))

    def padded(self, p: Problem) -> int:
        """Whole tiles, and whole panels; of packed sequences the last ones may begin anywhere."""
        unit = math.lcm(TILE, roles_of(p).of_keys)
        return ceil_div(p.queries if p.tokens is None else p.tokens + unit, unit) * unit

    def role(self, p: Problem, gpu: Gpu, keys: bool, part: int = ALL) -> Launch[Parts]:
        """Launch of one role: a block for each tile that it owns and each head; wide rows have a part for each result."""
        roles = roles_of(p)
        part = max(part, roles.parts(keys)[0])
        panel = roles.panel(keys, part)
        rows, heads = (p.keys, p.kv_heads) if keys else (p.queries, p.heads)
        held = L2 // (p.width * 4)
        if not p.bounds:
            section = 1
        elif keys:
            section = max(1, held // (p.queries * p.group))
        else:
            section = max(1, held // p.keys) * p.group
        fixed = {"BN": panel, "STAGES": roles.stages(keys, part), "KEYS": keys, "PART": part}
        bounds = p.bounds if p.bounds in roles.bounds else roles.bounds[-1]
        return Launch(
            attention_bwd_wgmma,
            ceil_div(rows, TILE) * heads * p.batches,
            3 * 128,
            roles.shared(keys, part),
            {"T": p.dtype, "D": roles.d, "DV": roles.values, **fixed, "BOUNDS": bounds},
            extra=Parts(self, Blocks(TILE, panel, keys, CELLS[p.d]), packed=p.tokens is not None),
            args=(p.sizes(self.padded(p), min(section, p.batches * heads)),),
        )

    def run_role(self, launch: Launch[Parts], six: tuple[Any, ...], lse2: Tensor, delta: Tensor, scale: float) -> None:
        """Launch a role with tensor maps; the queries' role has one result, whose map stands for both."""
        panel, packed = launch.template["BN"], launch.extra.packed
        first, second = (None if y is None else box_map(y, 64, True, packed) for y in six[4:])
        owned = (box_map(x, TILE, packed=packed) for x in six[:2])
        passing = (box_map(x, panel, packed=packed) for x in six[2:4])
        launch(*owned, *passing, first, first if second is None else second, lse2, delta, scale)
        if launch.extra.values is not None:
            self.run_role(launch.extra.values, six, lse2, delta, scale)
