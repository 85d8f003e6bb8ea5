"""The form of attention's backward on Hopper's tensor cores that passes once (cuda_src/attention/once_wgmma.cuh)."""

from __future__ import annotations


import numpy as np

from .._kernel.kernel import Kernel, ceil_div
from .attention import BOUNDS, HALF, TILE, WIDE, Backward, Blocks, Gradients, Problem, attention_bwd_prepare, empty
from .attention_wgmma import CELLS, L2, ROWS, SPARE, TOO_WIDE, box_map, why_not_by_tma
from .forms import Launch
from .gpu import Gpu

PANEL = 64  # queries that pass at a time
STAGES = {64: 4, 128: 3}  # by D
# By D and whether there are bounds: from how many queries and keys on it is faster than two passes, as measured.
FASTER: dict[tuple[int, bool], int] = {}
SUMS = 64 * 64  # of grad_q, that a warpgroup adds at a time

attention_bwd_once_wgmma = Kernel(
    "attention_wgmma.cu",
    "attention_bwd_once_wgmma<T, D, BN, STAGES, BULK, EXACT, BOUNDS>",
    arch="sm_90a",
    T=HALF,
    D=(64, 128),
    BN=(PANEL,),
    STAGES=(4, 3),
    BULK=(False,),
    EXACT=(True,),
    BOUNDS=BOUNDS,
    where=lambda D, **of: of["STAGES"] == STAGES[D],
)
attention_bwd_collect = Kernel("attention_wgmma.cu", "attention_bwd_collect<T, D>", arch="sm_90a", T=HALF, D=(64, 128))


class OnePass(Backward):
    """A block owns keys, by which panels of queries pass; what it adds to the gradient of the queries, it adds in memory.

    Args:
        stages: panels in flight; by default as many as fit.
        bulk: TMA adds, from shared memory; else each thread does, from registers.
        exact: dS is made of P as it was before it was rounded.
        panel: queries that pass at a time.
    """

    name = "wgmma_once"
    summary = "a block owns 128 keys, by which queries pass, and adds to their gradient in fp32, in no order"

    def __init__(self, stages: int = 0, bulk: bool = False, exact: bool = True, panel: int = PANEL) -> None:
        self.of_d = {d: stages or most for d, most in STAGES.items()}
        self.bulk, self.exact, self.panel = bulk, exact, panel

    def kernels(self) -> tuple[Kernel, ...]:
        """What prepares, the pass, and what rounds the sums."""
        return attention_bwd_prepare, attention_bwd_once_wgmma, attention_bwd_collect

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """On Hopper alone, for what TMA can read."""
        return TOO_WIDE if problem.d == WIDE else why_not_by_tma(problem, gpu, self.shared(problem.d))

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """Where gradients are not all needed, two passes leave out what is not; and their bits are the same every time."""
        p = problem
        if p.same_bits:
            return "its bits differ from run to run"
        if p.some_grads:
            return "not all gradients are needed"
        least = FASTER.get((p.d, bool(p.bounds)))
        return "two passes are as fast" if least is None or min(p.queries, p.keys) < least else None

    def shared(self, d: int) -> int:
        """Bytes: two tiles, the ring of two panels each, dS twice, what TMA adds, lse2 and delta, the barriers."""
        read = 2 * TILE * d * 2 + 2 * self.of_d[d] * self.panel * d * 2
        return read + 2 * TILE * self.panel * 2 + self.bulk * 2 * 4 * SUMS + ROWS + SPARE

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """That of the pass; `extra` has what prepares, and what rounds the sums."""
        p, padded = problem, self.padded(problem)
        section = max(1, L2 // (p.width * 4 * p.queries * p.group)) if p.bounds else 1
        fixed = {"BN": self.panel, "STAGES": self.of_d[p.d], "BULK": self.bulk, "EXACT": self.exact, "BOUNDS": p.bounds}
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
                "blocks": Blocks(TILE, self.panel, True, CELLS[p.d]),
            },
            args=(p.sizes(padded, min(section, p.batches * p.kv_heads)),),
        )

    def run(self, p: Problem, launch: Launch, of: Gradients) -> None:
        """Three launches; gradients that are not wanted are computed all the same."""
        padded = self.padded(p)
        lse2, delta = of.lse.new_empty((2, *of.lse.shape[:2], padded))
        sums = of.lse.new_empty((*of.lse.shape[:2], padded, p.d))
        launch.extra["prepare"](of.y, of.grad_y, of.lse, of.grad_lse, delta, lse2, sums)
        given = *(box_map(x, TILE) for x in (of.k, of.v)), *(box_map(x, self.panel) for x in (of.q, of.grad_y))
        found = empty(of.k) if of.grad_k is None else of.grad_k, empty(of.v) if of.grad_v is None else of.grad_v
        launch(*given, *(box_map(x, 64, written=True) for x in found), lse2, delta, sums, of.scale)
        if of.grad_q is not None:
            launch.extra["collect"](sums, of.grad_q, of.scale)
