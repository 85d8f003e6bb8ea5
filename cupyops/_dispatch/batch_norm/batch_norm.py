"""The forms of batch_norm: how a channel's elements lie, and which threads reduce them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.forms import Forms
from ..core.gpu import Gpu, gpu
from ..core.images import contiguous, gradient_like, is_there
from . import nchw, nhwc
from .arguments import dense, is_wide
from .problem import Backward, BatchNormForm, Forward, Problem
from .problem import problem_of as problem_of
from .problem import too_large as too_large

FORWARD = Forms(
    "batch_norm",
    "forward",
    [nhwc.NhwcClusterForward(), nhwc.NhwcTwoPassForward(), nchw.NchwClusterForward(), nchw.NchwTwoPassForward()],
)
BACKWARD = Forms(
    "batch_norm",
    "backward",
    [
        nhwc.NhwcClusterBackward(),
        nhwc.NhwcInline(),
        nhwc.NhwcTwoPassBackward(),
        nchw.NchwClusterBackward(),
        nchw.NchwTwoPassBackward(),
    ],
)
INFERENCE = Forms("batch_norm", "inference", [nhwc.NhwcInference(), nchw.NchwInference()])
INFERENCE_BACKWARD = Forms(
    "batch_norm", "inference_backward", [nhwc.NhwcInferenceBackward(), nchw.NchwInferenceBackward()]
)


def gradients(
    forms: Forms[Problem],
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Sequence[Tensor | None],
    eps: float,
    needs_grad: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """grad_x, grad_weight and grad_bias; `statistics` are mean, rstd, running_mean and running_var."""
    x = dense(x)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grads = gradient_like(weight, needs_grad.weight, x), gradient_like(bias, needs_grad.bias, x)
    if is_there(x):
        weight, mean, rstd, running_mean, running_var = contiguous(weight, *statistics)
        wide = is_wide(x, weight, bias, running_mean, running_var)
        of = Backward(grad_y, x, weight, mean, rstd, running_mean, running_var, grad_x, *grads, wide, eps)
        run(forms, problem_of(x, grad_y, grad_x, grad_x=grad_x is not None), gpu(x.device), of)
    return grad_x, *grads


def run(forms: Forms[Problem], problem: Problem, gpu: Gpu, of: Forward | Backward) -> None:
    """Compute a problem by the form that is chosen for it."""
    form = forms.choose(problem, gpu)
    assert isinstance(form, BatchNormForm)
    form.run(problem, gpu, of)
