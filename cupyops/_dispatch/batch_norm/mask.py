"""The mask that batch_norm_act keeps for backward: a bit for each element of y, in a byte for each 16-byte vector of it.

Its bytes are one row, of shape (1, bytes), where y has its channels last: that is all that tells, where x is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._kernel.kernel import ceil_div
from ..._util.strides import aligned, restride
from ..core.images import is_there
from ..elementwise.activations import relu_bwd
from ..elementwise.elementwise import by_vectors


def whole(tensor: Tensor) -> Tensor:
    """The tensor at a 16-byte boundary."""
    return tensor if aligned(tensor) else tensor.clone()


def following(residual: Tensor | None, relu: bool, keep: bool, y: Tensor) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return what follows the normalisation: the residual with y's strides, a mask to fill if it is kept, and relu."""
    if residual is not None:
        residual = whole(restride(residual, y.stride()))
    vectors = ceil_div(y.numel(), 16 // y.element_size())
    shape = (vectors,) if y.is_contiguous() else (1, vectors)
    return residual, torch.empty(shape, dtype=torch.uint8, device=y.device) if keep else None, relu


def kept(then: tuple[Tensor | None, Tensor | None, bool]) -> tuple[Tensor, ...]:
    """The mask of `following`, to be saved."""
    return () if then[1] is None else (then[1],)


def passed(grad_y: Tensor, mask: Tensor) -> Tensor:
    """Compute grad_z by relu's kernel, which takes such a mask too."""
    grad_z = torch.empty_like(grad_y)
    if is_there(grad_y):
        relu_bwd[by_vectors(grad_z)](grad_y, None, mask, grad_z, grad_z.numel(), T=grad_z.dtype)
    return grad_z


def unpacked(mask: Tensor, x: Tensor) -> Tensor:
    """A mask as a tensor of bool, which is laid out as y is."""
    width = 16 // x.element_size()
    bits = mask.unsqueeze(-1) >> torch.arange(width, dtype=torch.uint8, device=mask.device) & 1
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    form = torch.contiguous_format if mask.dim() == 1 else last
    strides = torch.empty(x.shape, memory_format=form, device="meta").stride()
    return torch.as_strided(bits.flatten()[: x.numel()].bool(), x.shape, strides)


def in_steps(
    grad_y: Tensor,
    mask: Sequence[Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and residual by functions of PyTorch; without running statistics in training."""
    wide, over = torch.promote_types(x.dtype, torch.float32), (0, *range(2, x.dim()))

    def of_channels(values: Tensor) -> Tensor:
        return values.to(wide).reshape(-1, *[1] * (x.dim() - 2))

    mean = x.to(wide).mean(over, keepdim=True) if running_mean is None else of_channels(running_mean)
    centred = x.to(wide) - mean
    var = centred.square().mean(over, keepdim=True) if running_var is None else of_channels(running_var)
    rstd = (var + eps).rsqrt()
    grad_z = torch.where(unpacked(mask[0], x), grad_y, 0) if mask else grad_y
    grad, xhat = grad_z.to(wide), centred * rstd
    parameters = (grad * xhat).sum(over), grad.sum(over)
    if weight is not None:
        grad = grad * of_channels(weight)
    if running_mean is None:
        grad = grad - grad.mean(over, keepdim=True) - xhat * (grad * xhat).mean(over, keepdim=True)
    of = [None if one is None else gradient.to(one.dtype) for one, gradient in zip((weight, bias), parameters)]
    return (grad * rstd).to(x.dtype), *of, grad_z
