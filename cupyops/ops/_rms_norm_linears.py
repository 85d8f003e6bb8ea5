"""rms_norm_linears, rms_norm_gated_linear: an RMS norm and the linear layers behind it, of few rows in one launch.

Gradients are those of the reference. Who calls these knows what it gives; where no kernel serves, PyTorch's functions run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from .._dispatch import few_rows
from .._dispatch.activations import FUNCTIONS, REFERENCES
from .._dispatch.epilogues import GATED_LINEAR, GATES
from .._dispatch.forms import Forms, Launch
from .._dispatch.linear import PRODUCT, launch_together, rows_of
from .._dispatch.rows import is_symbolic
from .._operator.floating import operator
from .._util.strides import is_dry

_NOT_CHOSEN = "few rows of bf16 and fp32, of weights that are not small, have kernels with a norm in front"


@operator("cupyops::rms_norm_linears")
def _rms_norm_linears(
    x: Tensor, norm: Tensor, eps: float, weights: list[Tensor], biases: list[Tensor | None]
) -> list[Tensor]:
    normalised = F.rms_norm(x, (x.shape[-1],), norm, eps)
    return [F.linear(normalised, weight, bias) for weight, bias in zip(weights, biases)]


@_rms_norm_linears.forward
def forward(x, norm, eps, weights, biases):
    results = [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]
    biases = [bias if bias is None else bias.contiguous() for bias in biases]
    if not is_dry(x):
        _run(_launch(PRODUCT, x, weights), x, norm, eps, weights, biases, results)
    return results, ()


@_rms_norm_linears.unsupported
def unsupported(x, norm, eps, weights, biases):
    return _why_not(PRODUCT, x, norm, weights, biases)


@_rms_norm_linears.interface
def rms_norm_linears(
    input: Tensor, norm: Tensor, eps: float, weights: list[Tensor], biases: list[Tensor | None]
) -> list[Tensor]:
    """Linear layers of one input after an RMS norm, rms_norm(input) @ weight.T + bias for each weight; nothing is checked.

    Args:
        input: (..., in_features).
        norm: (in_features,), the weight of the norm.
        eps: what is added to the mean of the squares.
        weights: at least one, each (out_features, in_features).
        biases: as many, each (out_features,) or None.
    """
    return _rms_norm_linears(input, norm, eps, weights, biases)


@operator("cupyops::rms_norm_gated_linear")
def _rms_norm_gated_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, weight_up: Tensor, activation: str
) -> Tensor:
    normalised = F.rms_norm(x, (x.shape[-1],), norm, eps)
    return REFERENCES[activation](F.linear(normalised, weight)) * F.linear(normalised, weight_up)


@_rms_norm_gated_linear.forward
def gated_forward(x, norm, eps, weight, weight_up, activation):
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if not is_dry(x):
        weights, function = (weight.contiguous(), weight_up.contiguous()), FUNCTIONS.index(GATES[activation])
        _run(_launch(GATED_LINEAR, x, weights), x, norm, eps, weights, [None], [y], function)
    return y, ()


@_rms_norm_gated_linear.unsupported
def gated_unsupported(x, norm, eps, weight, weight_up, activation):
    return _why_not(GATED_LINEAR, x, norm, (weight, weight_up), ())


@_rms_norm_gated_linear.interface
def rms_norm_gated_linear(
    input: Tensor, norm: Tensor, eps: float, weight: Tensor, weight_up: Tensor, activation: str = "silu"
) -> Tensor:
    """f(rms_norm(input) @ weight.T) * (rms_norm(input) @ weight_up.T), for an activation f; nothing is checked.

    Args:
        input: (..., in_features).
        norm: (in_features,), the weight of the norm.
        eps: what is added to the mean of the squares.
        weight: of the gate, (features, in_features).
        weight_up: of what the gate is multiplied by, of the shape of `weight`.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    return _rms_norm_gated_linear(input, norm, eps, weight, weight_up, activation)


def _launch(forms: Forms, x: Tensor, weights: Sequence[Tensor]) -> Launch | None:
    """The launch of all that is behind the norm; None where that is not the chosen form, or has no kernel with a norm."""
    k = x.shape[-1]
    shape, stride = (math.prod(x.shape[:-1]), k), x.stride() if x.dim() == 2 else (k, 1)
    of = weights[:1] if forms is GATED_LINEAR else weights
    return launch_together(forms, shape, stride, x.dtype, x.device, of, norm=True)


def _why_not(
    forms: Forms, x: Tensor, norm: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> str | None:
    if is_symbolic(*x.shape, *(size for weight in weights for size in weight.shape)):
        return "sizes that are not known"
    if any(one is not None and one.dtype is not x.dtype for one in (norm, *weights, *biases)):
        return "other dtypes than that of the input"
    return None if _launch(forms, x, weights) is not None else _NOT_CHOSEN


def _run(
    launch: Launch | None,
    x: Tensor,
    norm: Tensor,
    eps: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    results: Sequence[Tensor],
    function: int = 0,
) -> None:
    assert launch is not None
    x, norm, *weights = (few_rows.whole(one) for one in (rows_of(x), norm.contiguous(), *weights))
    few_rows.run(launch, x, weights, biases, results, function=function, norm=norm, eps=eps)
