"""The form of attention's backward on Hopper's tensor cores that passes once (cuda_src/attention/once_wgmma.cuh)."""

from __future__ import annotations


import numpy as np

from .._kernel.kernel import Kernel, ceil_div
from .attention import BOUNDS, HALF, TILE, WIDE, Backward, Blocks, Gradients, Problem, attention_bwd_prepare, empty
from .attention_wgmma import CELLS, L2, ROWS, SPARE, TOO_WIDE, box_map, why_not_by_tma
from .forms import Launch
from .gpu import Gpu

PANEL = {64: 128, 128: 64}  # by D: queries that pass at a time
STAGES = 3
SUMS = 64 * 64  # of grad_q, that a warpgroup adds at a time

attention_bwd_once_wgmma = Kernel(
    "attention_wgmma.cu",
    "attention_bwd_once_wgmma<T, D, BN, STAGES, BULK, EXACT, BOUNDS>",
    arch="sm_90a",
    T=HALF,
    D=(64, 128),
    BN=(128, 64),
    STAGES=(3, 2),
    BULK=(False, True),
    EXACT=(True, False),
    BOUNDS=BOUNDS,
    where=lambda D, BN, STAGES, BULK, EXACT, **_: PANEL[D] == BN and (STAGES, BULK, EXACT) == (3, False, True),
)
attention_bwd_collect = Kernel("attention_wgmma.cu", "attention_bwd_collect<T, D>", arch="sm_90a", T=HALF, D=(64, 128))


class OnePass(Backward):
    """A block owns keys, by which panels of queries pass; what it adds to the gradient of the queries, it adds in memory.

    Args:
        stages: panels in flight.
        bulk: TMA adds, from shared memory; else each thread does, from registers.
        exact: dS is made of P as it was before it was rounded.
    """

    name = "wgmma_once"
    summary = "a block owns 128 keys, by which queries pass, and adds to their gradient in fp32, in no order"

    def __init__(self, stages: int = STAGES, bulk: bool = False, exact: bool = True, panel: int = 0) -> None:
        self.stages, self.bulk, self.exact, self.panel = stages, bulk, exact, panel

    def kernels(self) -> tuple[Kernel, ...]:
        """What prepares, the pass, and what rounds the sums."""
        return attention_bwd_prepare, attention_bwd_once_wgmma, attention_bwd_collect

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """On Hopper alone, for what TMA can read."""
        return TOO_WIDE if problem.d == WIDE else why_not_by_tma(problem, gpu, self.shared(problem.d))

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """It is not chosen where the bits are to be the same every time, nor where not all gradients are needed."""
        if problem.same_bits:
            return "the same bits are to come every time"
        return "two passes are as fast"

    def shared(self, d: int) -> int:
        """Bytes: two tiles, the ring of two panels each, dS twice, what TMA adds, lse2 and delta, the barriers."""
        panel = self.panel or PANEL[d]
        read = 2 * TILE * d * 2 + 2 * self.stages * panel * d * 2
        return read + 2 * TILE * panel * 2 + self.bulk * 2 * 4 * SUMS + ROWS + SPARE

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """That of the pass; `extra` has what prepares, and what rounds the sums."""
        p, padded, panel = problem, self.padded(problem), self.panel or PANEL[problem.d]
        section = max(1, L2 // (p.width * 4 * p.queries * p.group)) if p.bounds else 1
        fixed = {"BN": panel, "STAGES": self.stages, "BULK": self.bulk, "EXACT": self.exact, "BOUNDS": p.bounds}
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
            self.shared(p.d),
            {"T": p.dtype, "D": p.d, **fixed},
            extra={
                "form": self,
                "prepare": self.prepare(p),
                "collect": collect,
                "blocks": Blocks(TILE, panel, True, CELLS[p.d]),
            },
            args=(p.sizes(padded, min(section, p.batches * p.kv_heads)),),
        )

    def run(self, p: Problem, launch: Launch, of: Gradients) -> None:
        """Three launches; gradients that are not wanted are computed all the same."""
        padded, panel = self.padded(p), self.panel or PANEL[p.d]
        lse2, delta = of.lse.new_empty((2, *of.lse.shape[:2], padded))
        sums = of.lse.new_empty((*of.lse.shape[:2], padded, p.d))
        launch.extra["prepare"](of.y, of.grad_y, of.lse, of.grad_lse, delta, lse2, sums)
        given = *(box_map(x, TILE) for x in (of.k, of.v)), *(box_map(x, panel) for x in (of.q, of.grad_y))
        found = empty(of.k) if of.grad_k is None else of.grad_k, empty(of.v) if of.grad_v is None else of.grad_v
        launch(*given, *(box_map(x, 64, written=True) for x in found), lse2, delta, sums, of.scale)
        if of.grad_q is not None:
            launch.extra["collect"](sums, of.grad_q, of.scale)
