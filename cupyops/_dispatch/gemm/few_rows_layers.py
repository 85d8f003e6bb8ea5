"""Linear layers of one matrix of few rows in one launch, with an RMS norm in front or without: calls of compiled graphs.

A graph has them where `is_served` holds. Run otherwise, as on the CPU outside the simulator, they are PyTorch's functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from ..._kernel.launch.executors import executors
from ..._util.strides import is_dry
from ..core.forms import Forms, Launch
from ..elementwise.activations import FUNCTIONS, REFERENCES
from . import few_rows
from .epilogues import GATED_LINEAR, GATES
from .linear import PRODUCT, launch_together


def is_served(x: Tensor, norm: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Return True if `linears` is one launch."""
    return _launch(PRODUCT, x, norm, weights, biases) is not None


def is_gate_served(x: Tensor, norm: Tensor | None, weight: Tensor, weight_up: Tensor) -> bool:
    """Return True if `gated_linear` is one launch."""
    return _launch(GATED_LINEAR, x, norm, [weight], [weight_up]) is not None


def linears(
    x: Tensor, norm: Tensor | None, eps: float, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """x @ weight.T + bias for each weight, of x or of rms_norm(x) with the weight `norm`."""
    launch = _launch(PRODUCT, x, norm, weights, biases)
    if launch is None:
        return [F.linear(_normalised(x, norm, eps), weight, bias) for weight, bias in zip(weights, biases)]
    results = [x.new_empty((x.shape[0], weight.shape[0])) for weight in weights]
    _run(launch, x, norm, eps, weights, [None if bias is None else bias.contiguous() for bias in biases], results)
    return results


def gated_linear(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, weight_up: Tensor, activation: str
) -> list[Tensor]:
    """f(x @ weight.T) * (x @ weight_up.T) for an activation f, of x or of rms_norm(x) with the weight `norm`."""
    launch = _launch(GATED_LINEAR, x, norm, [weight], [weight_up])
    if launch is None:
        x = _normalised(x, norm, eps)
        return [REFERENCES[activation](F.linear(x, weight)) * F.linear(x, weight_up)]
    y = x.new_empty((x.shape[0], weight.shape[0]))
    weights = weight.contiguous(), weight_up.contiguous()
    _run(launch, x, norm, eps, weights, [None], [y], FUNCTIONS.index(GATES[activation]))
    return [y]


def _launch(
    forms: Forms, x: Tensor, norm: Tensor | None, weights: Sequence[Tensor], others: Sequence[Tensor | None]
) -> Launch | None:
    if not x.is_cuda and x.device.type not in executors:
        return None
    if any(one is not None and one.dtype is not x.dtype for one in (norm, *weights, *others)):
        return None
    return launch_together(forms, x.shape, x.stride(), x.dtype, x.device, weights, norm=norm is not None)


def _normalised(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return x if norm is None else F.rms_norm(x, (x.shape[-1],), norm, eps)


def _run(
    launch: Launch,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    results: Sequence[Tensor],
    function: int = 0,
) -> None:
    if is_dry(x):
        return
    x, *weights = (few_rows.whole(one) for one in (x, *weights))
    norm = None if norm is None else few_rows.whole(norm.contiguous())
    few_rows.run(launch, x, weights, biases, results, function=function, norm=norm, eps=eps)
