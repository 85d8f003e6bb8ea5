"""The form of attention's backward on Hopper's tensor cores that passes once (cuda_src/attention/once_wgmma.cuh)."""

from __future__ import annotations

import math

import numpy as np

from .._kernel.kernel import Kernel, ceil_div
from .attention import BOUNDS, HALF, TILE, WIDE, Backward, Blocks, Gradients, Problem, attention_bwd_prepare, empty
from .attention_wgmma import CELLS, L2, ROWS, SPARE, TOO_WIDE, box_map, why_not_by_tma
from .forms import Launch
from .gpu import Gpu

PANEL = {64: 128, 128: 64}  # by D: queries that pass at a time
# By D and bounds: from how many queries and keys on it was measured as a tenth faster than two passes, which are taken else.
FASTER = {(64, 0): 512, (64, 1): 512, (128, 0): 1024, (128, 1): 1024, (64, 2): 1024, (128, 2): 4096}
VARIANT_FASTER = {64: 1024, 128: 4096}  # the same of scores, masks and dropout, by D
SUMS = 64 * 64  # of grad_q, that a warpgroup adds at a time


def _bulk(d: int, bounds: int) -> bool:
    """Whether TMA adds, from shared memory that is one stage; else each thread does, from registers."""
    return (d, bounds) == (128, 0)


def _stages(bulk: bool) -> int:
    return 2 if bulk else 3


attention_bwd_once_wgmma = Kernel(
    "attention_wgmma.cu",
    "attention_bwd_once_wgmma<T, D, BN, STAGES, BULK, BOUNDS>",
    arch="sm_90a",
    T=HALF,
    D=(64, 128),
    BN=(64, 128),
    STAGES=(2, 3),
    BULK=(False, True),
    BOUNDS=BOUNDS,
    where=lambda D, BN, STAGES, BULK, BOUNDS, **_: (
        (PANEL[D], _bulk(D, BOUNDS), _stages(_bulk(D, BOUNDS))) == (BN, BULK, STAGES)
    ),
)
attention_bwd_collect = Kernel("attention_wgmma.cu", "attention_bwd_collect<T, D>", arch="sm_90a", T=HALF, D=(64, 128))


class OnePass(Backward):
    """A block owns keys, by which panels of queries pass; what it adds to the gradient of the queries, it adds in memory."""

    name = "wgmma_once"
    summary = "a block owns 128 keys, by which queries pass, and adds to their gradient in fp32, in no order"
    measured = "1.1 to 1.25 times as fast as two passes from 1,024 rows on, on an H100"

    def kernels(self) -> tuple[Kernel, ...]:
        """What prepares, the pass, and what rounds the sums."""
        return attention_bwd_prepare, attention_bwd_once_wgmma, attention_bwd_collect

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """On Hopper alone, for what TMA can read; what it adds up is of whole batches."""
        if problem.tokens is not None:
            return "of packed sequences the order is fixed"
        return TOO_WIDE if problem.d == WIDE else why_not_by_tma(problem, gpu, self.shared(problem))

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """Where two passes are as fast they are taken, whose bits are the same every time."""
        p = problem
        least = FASTER.get((p.d, p.bounds), math.inf)
        return p.in_order or ("two passes are about as fast" if min(p.queries, p.keys) < least else None)

    def shared(self, p: Problem) -> int:
        """Bytes: two tiles, the ring of two panels each, dS twice, what TMA adds, lse2 and delta, the barriers."""
        panel, bulk = PANEL[p.d], _bulk(p.d, p.bounds)
        read = 2 * TILE * p.d * 2 + 2 * _stages(bulk) * panel * p.d * 2
        return read + 2 * TILE * panel * 2 + bulk * 2 * 4 * SUMS + ROWS + SPARE

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """That of the pass; `extra` has what prepares, and what rounds the sums."""
        p, padded, bulk = problem, self.padded(problem), _bulk(problem.d, problem.bounds)
        section = max(1, L2 // (p.width * 4 * p.queries * p.group)) if p.bounds else 1
        fixed = {"BN": PANEL[p.d], "STAGES": _stages(bulk), "BULK": bulk, "BOUNDS": p.bounds}
        sums = p.batches * p.heads * padded * p.d // SUMS
        collect = Launch(
            attention_bwd_collect,
            sums,
            128,
            template={"T": p.dtype, "D": p.d},
            args=(np.array(p.grads[0], dtype=np.int64), p.sizes(padded)),
        )
        return Launch(
            attention_bwd_once_wgmma,
            ceil_div(p.keys, TILE) * p.kv_heads * p.batches,
            3 * 128,
            self.shared(p),
            {"T": p.dtype, "D": p.d, **fixed},
            extra={
                "form": self,
                "prepare": self.prepare(p),
                "collect": collect,
                "blocks": Blocks(TILE, PANEL[p.d], True, CELLS[p.d]),
            },
            args=(p.sizes(padded, min(section, p.batches * p.kv_heads)),),
        )

    def run(self, p: Problem, launch: Launch, of: Gradients) -> None:
        """Three launches; gradients that are not wanted are computed all the same."""
        padded = self.padded(p)
        lse2, delta = of.lse.new_empty((2, *of.lse.shape[:2], padded))
        sums = of.lse.new_empty((*of.lse.shape[:2], padded, p.d))
        launch.extra["prepare"](of.y, of.grad_y, of.lse, of.grad_lse, delta, lse2, sums)
        given = *(box_map(x, TILE) for x in (of.k, of.v)), *(box_map(x, PANEL[p.d]) for x in (of.q, of.grad_y))
        found = empty(of.k) if of.grad_k is None else of.grad_k, empty(of.v) if of.grad_v is None else of.grad_v
        launch(*given, *(box_map(x, 64, written=True) for x in found), lse2, delta, sums, of.scale)
        if of.grad_q is not None:
            launch.extra["collect"](sums, of.grad_q, of.scale)
