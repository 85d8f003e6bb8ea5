"""The form of attention's backward by mma.sync that passes once (cuda_src/attention/once_mma.cuh)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..core.forms import Launch
from ..core.gpu import Gpu
from . import attention

PAIRS = 4  # of warps, of which one has grad_k of some keys, and one grad_v
THREADS = 64 * PAIRS


class Shape(NamedTuple):
    """Template values of a kernel: elements of a row, queries of a panel, and `keys`, 1/16 of the keys that a pair owns."""

    d: int
    panel: int
    keys: int

    @property
    def tile(self) -> int:
        """Keys of a block."""
        return 16 * PAIRS * self.keys

    @property
    def shared(self) -> int:
        """Bytes: two tiles, two stages, each of two panels with lse2 and delta, dS twice, and half of P in fp32."""
        stage = 2 * self.panel * (2 * self.d + 4)
        return 4 * self.tile * self.d + 2 * stage + 3 * self.tile * self.panel * 2


# Narrower ones first, and of one width the faster, which take more shared memory.
SHAPES = (
    *(Shape(64, 128, 2), Shape(64, 64, 2), Shape(64, 32, 2), Shape(96, 64, 2)),
    *(Shape(128, 64, 2), Shape(128, 32, 2), Shape(256, 64, 1), Shape(256, 32, 1)),
)
FASTER, WITH_WINDOW = 512, 1024  # queries and keys, from which on it was measured as a tenth faster than two passes

attention_bwd_once_mma = Kernel(
    "attention.cu",
    "attention_bwd_once_mma<T, D, BN, M>",
    T=attention.HALF,
    D=(64, 96, 128, 256),
    BN=(128, 64, 32),
    M=(2, 1),
    where=lambda D, BN, M, **_: (D, BN, M) in SHAPES,
)


def shape_of(p: attention.Problem, gpu: Gpu) -> Shape | None:
    """The first that has room for the rows of a problem, and for which a GPU has the shared memory."""
    room = max(p.width, p.value_width)
    least = next((one.d for one in SHAPES if room <= one.d), 0)
    return next((one for one in SHAPES if one.d == least and one.shared <= gpu.shared), None)


class MmaOnce(attention.Backward):
    """A block owns keys, by which panels of queries pass; what it adds to the gradient of the queries, it adds in memory."""

    name = "mma_once"
    summary = (
        "a block owns 128 keys, or 64 of wide rows; queries pass by, to whose gradient it adds in fp32, in no order"
    )
    measured = "1.1 to 2.3 times as fast as two passes from 512 rows on, on an H100"
    uses = (attention.attention_bwd_prepare, attention_bwd_once_mma, attention.attention_bwd_collect)

    def why_not(self, problem: attention.Problem, gpu: Gpu) -> str | None:
        """Refuse packed sequences, since sums are of whole batches, and rows too wide for shared memory."""
        if problem.tokens is not None:
            return "the order of sums is fixed for packed sequences"
        if shape_of(problem, gpu) is None:
            return f"it takes more than {gpu.shared} bytes of shared memory"
        return None

    def why_slower(self, problem: attention.Problem, gpu: Gpu) -> str | None:
        """Prefer two passes where they are as fast, since their bits are the same every time."""
        p = problem
        least = FASTER if p.low is None else WITH_WINDOW
        return p.in_order or ("two passes are about as fast" if min(p.queries, p.keys) < least else None)

    def launch(self, problem: attention.Problem, gpu: Gpu) -> Launch[attention.Parts]:
        """Launch of the pass; `extra` has the launches of the preparation and of the rounding of the sums."""
        p, padded, shape = problem, self.padded(problem), shape_of(problem, gpu)
        assert shape is not None
        grad_q, grad_k, grad_v = p.grads
        if not any(grad_k):  # not wanted: it is computed all the same, into memory of its own
            grad_k = p.kv_heads * p.keys * p.width, p.keys * p.width, p.width
        if not any(grad_v):
            grad_v = p.kv_heads * p.keys * p.value_width, p.keys * p.value_width, p.value_width
        six = p.k, p.v, p.q, p.y, grad_k, grad_v
        return Launch(
            attention_bwd_once_mma,
            ceil_div(p.keys, shape.tile) * p.kv_heads * p.batches,
            THREADS,
            shape.shared,
            {"T": p.dtype, "D": shape.d, "BN": shape.panel, "M": shape.keys},
            extra=attention.Parts(
                self,
                attention.Blocks(shape.tile, shape.panel, True, attention.CELL),
                prepare=self.prepare(p),
                collects=(attention.collect(p, grad_q, shape.d, padded),),
                columns=64 * ceil_div(shape.d, 64),
            ),
            args=(
                np.array(six, dtype=np.int64).ravel(),
                p.sizes(padded, attention.section_of(p, gpu, p.kv_heads, p.queries * p.group)),
            ),
        )

    def run(self, p: attention.Problem, launch: Launch[attention.Parts], of: attention.Gradients) -> Tensor | None:
        """Three launches; gradients that are not wanted are computed all the same."""
        columns, heads = launch.extra.columns, of.lse.shape[:2]
        sums = of.lse.new_empty((*heads, self.padded(p), columns))
        lse2, delta, of_sinks = self.run_prepare(p, launch, of, sums, columns)
        wanted = (of.k, of.grad_k), (of.v, of.grad_v)
        found = [x.new_empty(x.shape) if grad is None else grad for x, grad in wanted]
        launch(of.k, of.v, of.q, of.grad_y, *found, lse2, delta, sums, of.scale)
        if of.grad_q is not None:
            launch.extra.collects[0](sums, of.grad_q, of.scale)
        return of_sinks
