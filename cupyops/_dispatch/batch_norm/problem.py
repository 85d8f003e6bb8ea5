"""Problems by which batch_norm's forms are chosen, and the tensors that they read and write."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..._util.strides import aligned
from ..core import column_tiles
from ..core.column_tiles import Matrix
from ..core.forms import Form
from ..core.gpu import Gpu
from ..core.images import spatial
from ..reduce import segments

HALF_AND_FLOAT = tuple(dtype for dtype in FLOATING if dtype.itemsize < 8)
FINALIZERS = (8, 32)  # the block of a kernel that combines partials: channels, and threads for each

DEFINE = {
    "SEGMENT_THREADS": segments.THREADS,
    "CLUSTER_THREADS": segments.CLUSTER_THREADS,
    "MAX_CLUSTER": segments.CLUSTER,
    "COLUMN_THREADS": column_tiles.THREADS,
    "CLUSTER_VECTORS": column_tiles.CLUSTER_VECTORS[-1],
    "NHWC_BLOCKS": column_tiles.BLOCKS[True],
    "NHWC_BLOCKS_UNALIGNED": column_tiles.BLOCKS[False],
    "FINALIZE_CHANNELS": FINALIZERS[0],
    "FINALIZE_THREADS": FINALIZERS[1],
}

batch_norm_bwd_finalize = Kernel("batch_norm.cu", "batch_norm_bwd_finalize<T>", T=FLOATING, define=DEFINE)


class Problem(NamedTuple):
    """Sizes and flags by which a form is chosen."""

    images: int
    channels: int
    pixels: int
    itemsize: int
    nhwc: bool  # channels lie side by side
    aligned: bool  # every tensor begins at 16 bytes
    grad_x: bool = True  # wanted of backward
    measured: bool = False  # the moments of x are there

    @property
    def segments(self) -> tuple[int, int, int, int, bool]:
        """Channels as strided segments: how many, runs of each, elements of a run; side by side, of one element each."""
        runs = (self.images * self.pixels, 1) if self.nhwc else (self.images, self.pixels)
        return self.channels, *runs, self.itemsize, self.aligned

    @property
    def matrix(self) -> Matrix:
        """Channels as columns: of the pixels, or, where planes lie one after the other, each of all pixels."""
        if self.nhwc:
            return Matrix(self.images * self.pixels, self.channels, self.channels, 1)
        return Matrix(self.images, self.channels * self.pixels, self.channels, self.pixels)


def problem_of(x: Tensor, *others: Tensor | None, grad_x: bool = True) -> Problem:
    """Problem of a dense `x` and of other tensors of its layout."""
    pixels = spatial(x)
    nhwc = pixels == 1 or not x.is_contiguous()
    at_16_bytes = all(aligned(tensor) for tensor in (x, *others) if tensor is not None)
    return Problem(x.shape[0], x.shape[1], pixels, x.element_size(), nhwc, at_16_bytes, grad_x)


def too_large(x: Tensor) -> str | None:
    """Return why no kernel computes `x`, or None."""
    pixels, itemsize = spatial(x), x.element_size()
    runs_of_one = itemsize == 8 and (pixels == 1 or not x.is_contiguous())
    vectors = pixels if runs_of_one else segments.vectors_of(pixels, itemsize, False) if pixels > 1 else 0
    return "2^31 vectors of a channel" if x.shape[0] * vectors >= segments.MOST_VECTORS else None


class Forward(NamedTuple):
    """Tensors and options of forward: contiguous, except x and y, which are dense and laid out alike.

    In training mean and rstd are outputs, in inference they are None. `wide`: the parameters are float32 beside a half type.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    y: Tensor
    mean: Tensor | None
    rstd: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    wide: bool
    momentum: float
    eps: float
    then: tuple[Any, ...] = ()  # of batch_norm_act: residual, mask, relu
    moments: tuple[Tensor, Tensor] | None = None  # of parts of x, and how many rows each has

    @property
    def statistics(self) -> tuple[Tensor | None, ...]:
        return self[4:8]


class Backward(NamedTuple):
    """Tensors and options of backward.

    In training mean and rstd are given, in inference running_mean and running_var. Gradients that are not wanted are None.
    """

    grad_y: Tensor
    x: Tensor
    weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    grad_x: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    wide: bool
    eps: float
    gate: tuple[Any, ...] = ()  # of batch_norm_act: mask, grad_z

    @property
    def statistics(self) -> tuple[Tensor | None, ...]:
        return self[3:7]

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        return self[7:10]

    @property
    def of_parameters(self) -> bool:
        """True if a gradient of a parameter is wanted."""
        return self.grad_weight is not None or self.grad_bias is not None


class BatchNormForm(Form[Problem]):
    """A form that launches one kernel or several: `launch` gives the one that writes y, or grad_x where it is wanted."""

    def run(self, problem: Problem, gpu: Gpu, of: Any) -> None:
        """Launch it on a `Forward` or a `Backward`."""
        raise NotImplementedError


def finalize(
    of: Backward, partials: Tensor, columns: int, count: int, steps: tuple[int, int], gradient: Tensor | None = None
) -> None:
    """The gradients of the parameters, of `count` partials for each of a channel's `columns`, which lie `steps` apart; and
    `gradient`, from which grad_x follows in training."""
    channels = of.x.shape[1]
    given = (None, None, None) if gradient is None else (of.weight, of.mean, of.rstd)
    launch = batch_norm_bwd_finalize[ceil_div(channels, FINALIZERS[0]), FINALIZERS]
    sizes = channels, of.x.numel() // channels, columns, count
    launch(partials, *given, gradient, of.grad_weight, of.grad_bias, *sizes, *steps, of.wide, T=of.x.dtype)
