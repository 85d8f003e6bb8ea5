"""batch_norm_act: batch_norm, a residual that is added to it, and relu."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.batch_norm import act as forms
from .._dispatch.batch_norm import batch_norm
from .._dispatch.batch_norm.arguments import PARAMETERS, check, check_residual, dense, is_wide
from .._dispatch.batch_norm.batch_norm import Backward, Forward
from .._dispatch.batch_norm.mask import following, in_steps, kept, passed, whole
from .._dispatch.core import shardings
from .._dispatch.core.images import accumulator, contiguous, gradient_like, is_there
from .._dispatch.gemm.linear import wants_gradient
from .._operator.floating import operator
from .._util import arguments


@operator(
    "cupyops::batch_norm_act",
    updates=("running_mean", "running_var"),
    mixed=(*PARAMETERS, "moments", "counts"),
    sharding=shardings.batch_norm_act,
)
def _batch_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
    keep: bool = True,
    moments: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    y = torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    return _add_and_activate(y, residual, relu)


def _add_and_activate(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y = y if residual is None else y + residual
    return torch.relu(y) if relu else y


@_batch_norm_act.forward
def forward(x, weight, bias, residual, running_mean, running_var, momentum, eps, relu, keep, moments, counts):
    x = whole(dense(x))
    y = torch.empty_like(x)
    mean, rstd = (x.new_empty(x.shape[1], dtype=accumulator(x.dtype)) for _ in range(2))
    then = following(residual, relu, keep, y)
    if is_there(x):
        weight, bias, new_mean, new_var = contiguous(weight, bias, running_mean, running_var)
        wide = is_wide(x, weight, bias, new_mean, new_var)
        given = None if moments is None else (moments, counts)
        of = Forward(x, weight, bias, y, mean, rstd, new_mean, new_var, wide, momentum, eps, then, given)
        problem = forms.problem_of(x)._replace(measured=given is not None)
        forms.run(forms.FORWARD, problem, x.device, of)
        for given, new in ((running_mean, new_mean), (running_var, new_var)):
            if new is not given:
                given.copy_(new)
    return y, (mean, rstd, *kept(then))


OF_BATCH_NORM = ("x", "weight", "bias")  # whose gradients need more than the mask


@_batch_norm_act.backward(reads={"x": OF_BATCH_NORM, "weight": OF_BATCH_NORM, "bias": ()})
def backward(saved, grad_y, x, weight, bias, eps, needs_grad):
    mean, rstd, *mask = saved
    if not (needs_grad.x or needs_grad.weight or needs_grad.bias):
        return None, None, None, passed(grad_y, *mask) if mask else grad_y
    x, grad_y = whole(dense(x)), whole(grad_y)
    grad_x, grad_z = torch.empty_like(x) if needs_grad.x else None, None if mask else grad_y
    parameters = gradient_like(weight, needs_grad.weight, x), gradient_like(bias, needs_grad.bias, x)
    if needs_grad.residual and mask:  # the pass that writes grad_x writes it too
        grad_z = torch.empty_like(x) if needs_grad.x else passed(grad_y, *mask)
    if is_there(x):
        gate = (*mask, grad_z if needs_grad.x else None) if mask else ()
        given = grad_y, x, *contiguous(weight), mean, rstd, None, None, grad_x, *parameters
        of = Backward(*given, is_wide(x, weight, bias), eps, gate)
        problem = forms.problem_of(x, needs_grad.x)
        forms.run(forms.BACKWARD if mask else batch_norm.BACKWARD, problem, x.device, of)
    return grad_x, *parameters, grad_z


@_batch_norm_act.reference_backward
def reference_backward(saved, grad_y, x, weight, bias, eps):
    return in_steps(grad_y, saved[2:], x, weight, bias, eps)


@_batch_norm_act.unsupported
def unsupported(x, weight, bias, residual, running_mean, running_var, momentum, eps, relu, keep, moments, counts):
    return forms.why_apart(x, training=True)


@operator("cupyops::batch_norm_act_inference", mixed=PARAMETERS, sharding=shardings.batch_norm_act_inference)
def _batch_norm_act_inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
    relu: bool,
    keep: bool = True,
) -> Tensor:
    mean, var = running_mean.detach(), running_var.detach()
    return _add_and_activate(
        torch.nn.functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps), residual, relu
    )


@_batch_norm_act_inference.forward
def forward_inference(x, weight, bias, residual, running_mean, running_var, eps, relu, keep):
    x = whole(dense(x))
    y = torch.empty_like(x)
    then = following(residual, relu, keep, y)
    if is_there(x):
        weight, bias, running_mean, running_var = contiguous(weight, bias, running_mean, running_var)
        wide = is_wide(x, running_mean)
        of = Forward(x, weight, bias, y, None, None, running_mean, running_var, wide, 0.0, eps, then)
        forms.run(forms.INFERENCE, forms.problem_of(x), x.device, of)
    return y, kept(then)


@_batch_norm_act_inference.backward(reads={"x": OF_BATCH_NORM, "weight": OF_BATCH_NORM, "bias": ()})
def backward_inference(saved, grad_y, x, weight, bias, running_mean, running_var, eps, needs_grad):
    """Run the backward pass of relu, then those of batch_norm."""
    grad_z = passed(grad_y, *saved) if saved else grad_y
    if not (needs_grad.x or needs_grad.weight or needs_grad.bias):
        return None, None, None, grad_z
    statistics = None, None, running_mean, running_var
    given = grad_z, x, weight, bias, statistics, eps, needs_grad
    return *batch_norm.gradients(batch_norm.INFERENCE_BACKWARD, *given), grad_z


@_batch_norm_act_inference.reference_backward
def reference_backward_inference(saved, grad_y, x, weight, bias, running_mean, running_var, eps):
    return in_steps(grad_y, saved, x, weight, bias, eps, running_mean, running_var)


@_batch_norm_act_inference.unsupported
def unsupported_inference(x, weight, bias, residual, running_mean, running_var, eps, relu, keep):
    return forms.why_apart(x, training=False)


@_batch_norm_act.interface
def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str | None = "relu",
    residual: Tensor | None = None,
) -> Tensor:
    """relu(batch_norm(input) + residual), in the passes over memory that batch_norm alone takes, each way.

    Backward needs a bit for each element beside what batch_norm's needs, and neither the residual nor the result. Where
    runs of channels are not whole 16-byte vectors, in fp64, inside torch.compile, which joins sum and relu with what follows
    them, and on a GPU where it is not measured to be faster, these are PyTorch's functions, with what they keep.

    Args:
        input, running_mean, running_var, weight, bias, training, momentum, eps: as in `cupyops.batch_norm`.
        activation: "relu", or None for the sum alone.
        residual: of the shape, dtype and device of `input`, or None.

    Returns:
        Tensor of the shape, dtype and memory format of `input`. It is rounded once, at the end; NaN stays NaN. With running
        statistics the gradient with `create_graph=True` is a function of the gradient that arrives, and where PyTorch has
        zeros for its derivative by `input`, there is none.

    Raises:
        InputError: as `batch_norm`; `activation` is unknown; `residual` is unlike `input`.

    Example:
        >>> x = torch.tensor([[1.0, 5.0], [3.0, 9.0]])
        >>> cupyops.batch_norm_act(x, None, None, training=True, residual=torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        tensor([[0.0000, 1.0000],
                [2.0000, 1.0000]])
    """
    arguments.floating("input", input)
    check(input, weight, bias, running_mean, running_var, bool(training), momentum, eps)
    if activation not in ("relu", None):
        arguments.fail("activation", activation, "'relu' or None")
    if residual is not None:
        check_residual(input, residual)
    relu = activation is not None
    if torch.compiler.is_dynamo_compiling():
        y = torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        return _add_and_activate(y, residual, relu)
    keep = relu and wants_gradient(input, weight, bias, residual)
    numbers = (float(momentum), float(eps)) if training else (float(eps),)
    function = _batch_norm_act if training else _batch_norm_act_inference
    return function(input, weight, bias, residual, running_mean, running_var, *numbers, relu, keep)
