"""The forms of batch_norm_act: those of batch_norm, whose passes do what follows it too (cuda_src/batch_norm_act*.cu).

They take whole vectors alone. Everything else, and on a GPU what is not measured to be faster, PyTorch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import Kernel
from ..._util.strides import suggested_format
from ..core.forms import Form, Forms, Library
from ..core.gpu import Gpu, gpu
from ..core.images import spatial
from ..core.library import FASTER
from ..core.rows import is_symbolic
from ..reduce import segments
from . import nchw, nhwc
from .problem import DEFINE, HALF_AND_FLOAT, Backward, BatchNormForm, Forward, Problem, too_large

MEASURED_FROM = 3_000_000  # elements


def _kernel(file: str, name: str) -> Kernel:
    return Kernel(f"{file}.cu", f"batch_norm_act_{name}<T>", T=HALF_AND_FLOAT, define=DEFINE)


class Whole(BatchNormForm):
    """A form of batch_norm, where all runs are whole vectors."""

    columns = False  # whether the runs are rows of columns, else planes

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := super().why_not(problem, gpu):
            return reason
        if problem.itemsize == 8:
            return "there are no kernels for fp64"
        if self.columns:
            whole = nhwc.columns_of(problem)[1].aligned
        else:
            whole = segments.is_whole(problem.segments[2], problem.itemsize, problem.aligned)
        return None if whole else "runs of channels are not whole vectors"


class NchwClusterForward(Whole, nchw.NchwClusterForward):
    kernel = _kernel("batch_norm_act", "fwd_nchw_cluster")


class NchwTwoPassForward(Whole, nchw.NchwTwoPassForward):
    summary = "blocks share a channel; two passes"
    kernel = _kernel("batch_norm_act", "fwd_nchw")


class NchwInference(Whole, nchw.NchwInference):
    summary = "blocks share a channel"
    kernel = NchwTwoPassForward.kernel


class NchwClusterBackward(Whole, nchw.NchwClusterBackward):
    kernel = _kernel("batch_norm_act", "bwd_nchw_cluster")


class NchwTwoPassBackward(Whole, nchw.NchwTwoPassBackward):
    summary = NchwTwoPassForward.summary
    first = _kernel("batch_norm_act", "bwd_nchw_partials")
    second = _kernel("batch_norm_act", "bwd_nchw")


class NhwcClusterForward(Whole, nhwc.NhwcClusterForward):
    columns = True
    kernel = _kernel("batch_norm_act_nhwc", "fwd_nhwc_cluster")


class NhwcTwoPassForward(Whole, nhwc.NhwcTwoPassForward):
    columns = True
    kernel = _kernel("batch_norm_act_nhwc", "fwd_nhwc")


class NhwcInference(Whole, nhwc.NhwcInference):
    columns = True
    kernel = NhwcTwoPassForward.kernel


class NhwcClusterBackward(Whole, nhwc.NhwcClusterBackward):
    columns = True
    kernel = _kernel("batch_norm_act_nhwc", "bwd_nhwc_cluster")


class NhwcTwoPassBackward(Whole, nhwc.NhwcTwoPassBackward):
    columns = True
    first = _kernel("batch_norm_act_nhwc", "bwd_nhwc_partials")
    second = _kernel("batch_norm_act_nhwc", "bwd_nhwc")


class NhwcInline(Whole, nhwc.NhwcInline):
    columns = True
    first = NhwcTwoPassBackward.first
    second = _kernel("batch_norm_act_nhwc", "bwd_nhwc_inline")


class Apart(Form[Problem]):
    """PyTorch's batch_norm, sum and relu.

    Args:
        faster: why the kernels are faster, None where they are not measured to be; left out, it is the last form of a list,
            for what nothing else computes.
    """

    def __init__(self, faster: Callable[[Problem, Gpu], str | None] | None = None) -> None:
        self._faster, last = faster, faster is None
        self.name = "apart" if last else "pytorch"
        when = "where runs are not whole vectors" if last else "where no kernel that does it all is measured as faster"
        self.summary = f"PyTorch's batch_norm, sum and relu, {when}"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        return None if self._faster is None or gpu.library else "kernels of ours alone are to run, as in the simulator"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        return None if self._faster is None else self._faster(problem, gpu)

    def launch(self, problem: Problem, gpu: Gpu) -> Library:
        """Nothing of its own."""
        return Library(self.name)


def _measured(problem: Problem, gpu: Gpu) -> str | None:
    """Return why one fused pass in training is faster than PyTorch's functions; None where that is not measured.

    On an H100, bf16, ResNet-50's sizes: 1.2 to 2.0 times the functions apart, of which batch_norm is ours, and in
    channels_last 1.6 to 2.4 times PyTorch's own.
    """
    elements = problem.images * problem.channels * problem.pixels
    if gpu.capability != 9 or problem.itemsize != 2 or elements < MEASURED_FROM:
        return None
    return "one pass for all is measured to be faster"


FORWARD = Forms(
    "batch_norm_act",
    "forward",
    [
        Apart(_measured),
        NhwcClusterForward(),
        NhwcTwoPassForward(),
        NchwClusterForward(),
        NchwTwoPassForward(),
        Apart(),
    ],
)
BACKWARD = Forms(
    "batch_norm_act",
    "backward",
    [NhwcClusterBackward(), NhwcInline(), NhwcTwoPassBackward(), NchwClusterBackward(), NchwTwoPassBackward()],
)
INFERENCE = Forms(
    "batch_norm_act", "inference", [Apart(lambda problem, gpu: None), NhwcInference(), NchwInference(), Apart()]
)


def problem_of(x: Tensor, grad_x: bool = True) -> Problem:
    """Problem of `x`, dense or not, whose tensors will all begin at 16 bytes."""
    pixels = spatial(x)
    nhwc = pixels == 1 or (not x.is_contiguous() and suggested_format(x) is not torch.contiguous_format)
    return Problem(x.shape[0], x.shape[1], pixels, x.element_size(), nhwc, True, grad_x)


_described: dict[Any, tuple[str | None, Problem]] = {}  # by sizes, strides and dtype
_MOST = 1024


def why_apart(x: Tensor, training: bool) -> str | None:
    """Return why no fused kernel computes `x`, or None."""
    if is_symbolic(*x.shape) or not x.numel():
        return "sizes are not known, or 0"
    of = x.shape, x.stride(), x.dtype
    if (found := _described.get(of)) is None:  # this is asked at every call of a module
        if len(_described) >= _MOST:
            _described.clear()
        found = _described[of] = too_large(x), problem_of(x)
    reason, problem = found
    if reason is not None:
        return reason
    form = (FORWARD if training else INFERENCE).choose(problem, gpu(x.device))
    if not isinstance(form, Apart):
        return None
    return FASTER if gpu(x.device).library and form.name == "pytorch" else form.summary


def run(forms: Forms[Problem], problem: Problem, device: torch.device, of: Forward | Backward) -> None:
    """Compute a problem by the form that is chosen for it."""
    card: Any = gpu(device)
    form = forms.choose(problem, card)
    assert isinstance(form, BatchNormForm)
    form.run(problem, card, of)
