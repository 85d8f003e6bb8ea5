"""The forms of forward of layer_norm, rms_norm and add_rms_norm."""

from __future__ import annotations

from ..core.forms import Form, Forms, Launch
from ..core.gpu import Gpu
from ..core.rows import PACKS, SMALL_ROWS, WIDEST, Share
from . import forms

PIPELINED_ROWS = 2  # that a block takes at least: one is read while the other is reduced
PIPELINED_THREADS = 256  # of a row, at least: of shorter rows, other blocks' are read meanwhile
PIPELINED_BLOCKS = 16  # for each multiprocessor, at least: only then do blocks take several rows

fwd_thread_per_row = forms.kernel("norm_fwd_thread_per_row<T, CENTRED>", **forms.EACH)
fwd_sub_warp = forms.kernel("norm_fwd_sub_warp<T, CENTRED>", **forms.EACH)
fwd_block = forms.kernel(
    "norm_fwd_block<T, CENTRED, INPUTS, K, ALIGNED>",
    **forms.EACH,
    INPUTS=(1, 2),
    K=PACKS,
    ALIGNED=forms.BOTH,
    where=lambda CENTRED, INPUTS, K, ALIGNED: forms.is_block(K, ALIGNED) and not (CENTRED and INPUTS == 2),
)
fwd_shared_memory = forms.kernel("norm_fwd_shared_memory<T, CENTRED>", **forms.EACH)
fwd_two_pass = forms.kernel("norm_fwd_two_pass<T>", **forms.ALL)
fwd_shift = forms.kernel("norm_fwd_shift<T>", **forms.NARROW)


class _ThreadPerRow(forms.ThreadPerRow):
    uses = (fwd_thread_per_row,)

    def shared(self, problem: forms.Problem) -> int:
        return SMALL_ROWS * problem.row * problem.operator.inputs + forms.padded(2 * problem.size * problem.acc)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        grid = forms.blocks_for(problem.rows, SMALL_ROWS, gpu)
        template = {"CENTRED": problem.operator.centred}
        return Launch(fwd_thread_per_row, grid, (SMALL_ROWS, 1), self.shared(problem), template)


class _SubWarp(forms.SubWarp):
    uses = (fwd_sub_warp,)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        grid, block = self.blocks(problem, gpu, forms.FORWARD_ROWS)
        return Launch(fwd_sub_warp, grid, block, template={"CENTRED": problem.operator.centred})


class _Block(forms.Shared):
    name = "block"
    summary = "the threads of a block share a row, in registers, or in shared memory for rms_norm of aligned rows"
    uses = (fwd_block, fwd_shift)

    def why_not(self, problem: forms.Problem, gpu: Gpu) -> str | None:
        if not self.share(problem, gpu).packs:
            return f"a row needs more than {self.most(problem, gpu)} threads"
        return super().why_not(problem, gpu)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        return self.of_stages(problem, gpu, 1)

    def of_stages(self, problem: forms.Problem, gpu: Gpu, stages: int) -> Launch:
        """The launch; with two stages a block takes several rows. It overlaps the launch that shifts the parameters."""
        division = self.share(problem, gpu)
        vectors = division.packs * division.threads * division.rows
        return Launch(
            fwd_block,
            forms.blocks_for(problem.rows, (PIPELINED_ROWS if stages == 2 else 1) * division.rows, gpu),
            division.block,
            stages * self.vector(problem) * vectors,
            {
                "CENTRED": problem.operator.centred,
                "INPUTS": problem.operator.inputs,
                "K": division.packs,
                "ALIGNED": problem.aligned,
            },
            overlap=problem.parameters and not problem.aligned,
            named={"stages": stages},
        )

    def vector(self, problem: forms.Problem) -> int:
        """Bytes of shared memory for a vector of a row: none for rows in registers."""
        return 16 * problem.operator.inputs if problem.aligned and not problem.operator.centred else 0

    def most(self, problem: forms.Problem, gpu: Gpu) -> int:
        """Threads of a row, at most."""
        most = forms.CENTRED_HALF_THREADS if problem.operator.centred and problem.itemsize == 2 else WIDEST
        if not (vector := self.vector(problem)):
            return most
        return min(most, (gpu.shared - forms.RESERVED) // (vector * forms.VECTORS) // forms.WARP * forms.WARP)

    def share(self, problem: forms.Problem, gpu: Gpu) -> Share:
        """The threads of a row."""
        return forms.share_row(problem, self.most(problem, gpu), 128)


class _Pipelined(_Block):
    name = "pipelined"
    summary = "as block, in shared memory; a block takes several rows, and reads one while it reduces another"

    def why_not(self, problem: forms.Problem, gpu: Gpu) -> str | None:
        if not self.vector(problem):
            return "rows are in registers" if problem.aligned else "rows begin off 16-byte boundaries"
        if reason := super().why_not(problem, gpu):
            return reason
        fits = self.of_stages(problem, gpu, 2).shared <= gpu.shared - forms.RESERVED
        return None if fits else "two rows do not fit into shared memory"

    def why_slower(self, problem: forms.Problem, gpu: Gpu) -> str | None:
        division = self.share(problem, gpu)
        if division.threads < PIPELINED_THREADS:
            return f"a row has fewer than {PIPELINED_THREADS} threads: other blocks read meanwhile"
        enough = PIPELINED_ROWS * PIPELINED_BLOCKS * gpu.multiprocessors * division.rows
        return f"there are fewer than {enough} rows" if problem.rows < enough else None

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        return self.of_stages(problem, gpu, 2)


class _SharedMemory(forms.Shared):
    name = "shared_memory"
    summary = "the threads of a block share a row, in shared memory"
    uses = (fwd_shared_memory, fwd_shift)

    def why_not(self, problem: forms.Problem, gpu: Gpu) -> str | None:
        if forms.RESERVED + problem.row // 16 * 16 > gpu.shared:
            return "a row does not fit into shared memory"
        return super().why_not(problem, gpu)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        return Launch(
            fwd_shared_memory,
            forms.blocks_for(problem.rows, 1, gpu),
            (forms.SHARED_MEMORY_THREADS, 1),
            problem.row // 16 * 16,
            {"CENTRED": problem.operator.centred},
            overlap=problem.parameters and not problem.aligned,
        )


class _TwoPass(Form[forms.Problem]):
    name = "two_pass"
    summary = "the threads of a block share a row of any length, and read it twice"
    uses = (fwd_two_pass,)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        return Launch(fwd_two_pass, forms.blocks_for(problem.rows, 1, gpu), forms.two_pass_threads(problem))


BLOCK = _Block()
FORWARD = Forms("norm", "forward", [_ThreadPerRow(), _SubWarp(), _Pipelined(), BLOCK, _SharedMemory(), _TwoPass()])
