"""The form of attention's backward on Hopper's tensor cores that passes once (cuda_src/attention/once_wgmma.cuh)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..core.forms import Launch
from ..core.gpu import Gpu
from . import attention
from .wgmma import CELLS, L2, MOST, ROWS, SPARE, box_map, line, why_not_by_tma


class Shape(NamedTuple):
    """Template values of a kernel: width of a row of q and k, and of v; keys that a block owns; queries of a panel."""

    d: int
    values: int
    tile: int
    panel: int

    def bulk(self, bounds: int) -> bool:
        """Return True if TMA adds from one stage of shared memory; else each thread adds from registers."""
        return (self.d, bounds) == (128, 0)

    def stages(self, bulk: bool) -> int:
        """Number of stages of the shared-memory ring."""
        return min(3, (MOST - ROWS - self.held(bulk)) // self.stage)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Values of BOUNDS that have kernels; where not all have one, that of a window serves."""
        return attention.BOUNDS if self.d in (64, 128) else attention.BOUNDS[-1:]

    @property
    def stage(self) -> int:
        """Bytes of a panel of queries and one of their gradients."""
        return self.panel * (line(self.d) + line(self.values))

    def held(self, bulk: bool) -> int:
        """Bytes: two tiles, dS twice, or dS and P, what TMA adds."""
        return self.tile * (line(self.d) + line(self.values) + 2 * self.panel * 2) + bulk * 2 * 4 * SUMS

    def shared(self, bulk: bool) -> int:
        """Bytes: with the ring, lse2 and delta, the barriers."""
        return self.held(bulk) + self.stages(bulk) * self.stage + ROWS + SPARE


SHAPES = (  # narrower ones first
    Shape(64, 64, 128, 128),
    Shape(96, 96, 128, 64),
    Shape(128, 128, 128, 64),
    Shape(192, 128, 128, 64),
    Shape(256, 256, 64, 64),
)
# By D, and by bounds: from how many queries and keys on it was measured as a tenth faster than two passes.
FASTER = {
    64: (512, 512, 1024),
    96: (512, 1024, 2048),
    128: (1024, 1024, 4096),
    192: (16384, 4096, math.inf),
    256: (512, 1024, 2048),
}
VARIANT_FASTER = {64: 1024, 128: 4096}  # the same of scores, masks and dropout, by D
SUMS = 64 * 64  # of grad_q, that a warpgroup adds at a time


def shape_of(p: attention.Problem) -> Shape | None:
    """The narrowest that has room for the rows of a problem, None where none has."""
    return next((one for one in SHAPES if p.width <= one.d and p.value_width <= one.values), None)


def _kind(p: attention.Problem) -> int:
    """Number of bounds of a problem, for rows of any width."""
    return 2 if p.low is not None else 1 if p.high is not None else 0


def _share(p: attention.Problem, shape: Shape) -> int:
    """Number of heads of a group that one block processes; blocks that share the other heads add their sums in memory."""
    if shape.d <= 128:
        return p.group
    return 2 if p.group % 2 == 0 else 1  # of so many the last tiles would keep the GPU waiting


def _section(p: attention.Problem, shape: Shape, share: int) -> int:
    """Number of (batch, heads of a block) pairs processed side by side: a power of two, chosen by measurement."""
    if _kind(p) == 0:
        return 1
    held = L2 * (4 if shape.d > 128 else 1 if share == 1 else 2 if shape.d == 64 else 4)
    most = min(16, held // ((p.width + p.value_width) * 2 * p.queries * share), p.batches * p.heads // share)
    return 1 << max(0, most.bit_length() - 1)


def _is_once(D: int, DV: int, TILE: int, BN: int, STAGES: int, BULK: bool, BOUNDS: int, **_: Any) -> bool:
    shape = Shape(D, DV, TILE, BN)
    there_is = shape in SHAPES and BOUNDS in shape.bounds
    return there_is and shape.bulk(BOUNDS) == BULK and shape.stages(BULK) == STAGES


attention_bwd_once_wgmma = Kernel(
    "attention_wgmma.cu",
    "attention_bwd_once_wgmma<T, D, DV, TILE, BN, STAGES, BULK, BOUNDS>",
    arch="sm_90a",
    T=attention.HALF,
    D=(64, 96, 128, 192, 256),
    DV=(64, 96, 128, 256),
    TILE=(64, 128),
    BN=(64, 128),
    STAGES=(2, 3),
    BULK=(False, True),
    BOUNDS=attention.BOUNDS,
    where=_is_once,
)


class OnePass(attention.Backward):
    """A block owns keys, by which panels of queries pass; what it adds to the gradient of the queries, it adds in memory."""

    name = "wgmma_once"
    summary = "a block owns 128 keys, or 64 of wide rows; queries pass, to whose gradient it adds in fp32, in no order"
    measured = "1.1 to 1.25 times as fast as two passes from 1,024 rows on, on an H100"
    uses = (attention.attention_bwd_prepare, attention_bwd_once_wgmma, attention.attention_bwd_collect)

    def why_not(self, problem: attention.Problem, gpu: Gpu) -> str | None:
        """Require Hopper, tensors that TMA can read, and whole batches, of which the sums are."""
        if problem.tokens is not None:
            return "the order of sums is fixed for packed sequences"
        shape = shape_of(problem)
        if shape is None:
            return "rows are too wide"
        return why_not_by_tma(problem, gpu, shape.shared(shape.bulk(problem.bounds)))

    def why_slower(self, problem: attention.Problem, gpu: Gpu) -> str | None:
        """Prefer two passes where they are as fast, since their bits are the same every time."""
        p, shape = problem, shape_of(problem)
        least = math.inf if shape is None else FASTER[shape.d][_kind(p)]
        return p.in_order or ("two passes are about as fast" if min(p.queries, p.keys) < least else None)

    def launch(self, problem: attention.Problem, gpu: Gpu) -> Launch[attention.Parts]:
        """Launch of the pass; `extra` has the launches of the preparation and of the rounding of the sums."""
        p, padded, shape = problem, self.padded(problem), shape_of(problem)
        assert shape is not None
        bounds = p.bounds if p.bounds in shape.bounds else shape.bounds[-1]
        bulk = shape.bulk(bounds)
        share = _share(p, shape)
        whole = ceil_div(p.keys, attention.TILE) * attention.TILE
        of_keys = p._replace(heads=p.kv_heads, queries=p.keys)
        collects = (
            attention.collect(p, p.grads[0], shape.d, padded),
            attention.collect(of_keys, p.grads[1], shape.d, whole),
            attention.collect(of_keys._replace(width=p.value_width), p.grads[2], shape.values, whole),
        )
        fixed = {"TILE": shape.tile, "BN": shape.panel, "STAGES": shape.stages(bulk), "BULK": bulk, "BOUNDS": bounds}
        return Launch(
            attention_bwd_once_wgmma,
            ceil_div(p.keys, shape.tile) * p.heads // share * p.batches,
            3 * 128,
            shape.shared(bulk),
            {"T": p.dtype, "D": shape.d, "DV": shape.values, **fixed},
            extra=attention.Parts(
                self,
                attention.Blocks(shape.tile, shape.panel, True, CELLS[p.d]),
                prepare=self.prepare(p),
                collects=collects,
                share=share,
            ),
            args=(p.sizes(padded, _section(p, shape, share)),),
        )

    def run(self, p: attention.Problem, launch: Launch[attention.Parts], of: attention.Gradients) -> Tensor | None:
        """Three launches; gradients that are not wanted are computed all the same."""
        padded, shape, share = self.padded(p), shape_of(p), launch.extra.share
        assert shape is not None
        columns, of_values, heads = 64 * ceil_div(shape.d, 64), 64 * ceil_div(shape.values, 64), of.lse.shape[:2]
        sums = of.lse.new_empty((*heads, padded, columns))
        lse2, delta, of_sinks = self.run_prepare(p, launch, of, sums, columns)
        shared = None
        if share < p.group:
            rows = p.batches * p.kv_heads * ceil_div(p.keys, attention.TILE) * attention.TILE
            shared = of.lse.new_zeros(rows * (columns + of_values))
        given = *(box_map(x, shape.tile) for x in (of.k, of.v)), *(box_map(x, shape.panel) for x in (of.q, of.grad_y))
        found = (
            attention.empty(of.k) if of.grad_k is None else of.grad_k,
            attention.empty(of.v) if of.grad_v is None else of.grad_v,
        )
        launch(*given, *(box_map(x, 64, written=True) for x in found), lse2, delta, sums, shared, share, of.scale)
        of_queries, of_keys, last = launch.extra.collects
        if of.grad_q is not None:
            of_queries(sums, of.grad_q, of.scale)
        if shared is not None:
            of_keys(shared, found[0], of.scale)
            last(shared[rows * columns :], found[1], 1.0)
        return of_sinks
