"""Decompositions for AOTAutograd: PyTorch's own, without those of operators that a rule lowers whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

from .patterns.resampling import decomposed, decomposed_backward

aten = torch.ops.aten

NAMES = """
    _batch_norm_with_update _batch_norm_with_update_functional _fused_rms_norm _fused_rms_norm_backward _log_softmax
    _log_softmax_backward_data _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _softmax _softmax_backward_data addcdiv addcmul batch_norm_backward
    binary_cross_entropy binary_cross_entropy_with_logits chunk deg2rad elu elu_backward frac glu glu_backward
    hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward huber_loss isfinite l1_loss
    leaky_relu leaky_relu_backward lerp log_sigmoid_backward log_sigmoid_forward logit logsumexp masked_fill mish
    mish_backward mse_loss mse_loss_backward nansum native_batch_norm native_batch_norm_backward native_dropout_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward new_ones new_zeros
    nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward norm rad2deg rms_norm rsub select_backward
    silu_ slice_backward smooth_l1_loss smooth_l1_loss_backward softplus softplus_backward stack std std_mean tril triu
    unbind unsafe_chunk unsafe_split xlogy zero_
"""

BIAS_APART = ("cuda",)  # devices where the bias of a convolution has a kernel of its own in eager too


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Overload -> its decomposition."""
    table = dict(get_decompositions([getattr(aten, name) for name in NAMES.split() if hasattr(aten, name)]))
    table[aten.detach.default] = _detach
    table[aten.roll.default] = _roll
    table[aten.convolution.default] = _convolution
    table[aten.convolution_backward.default] = _convolution_backward
    table[torch.ops.cupyops.interpolate.default] = decomposed
    table[torch.ops.cupyops.interpolate_backward.default] = decomposed_backward
    return table


def _detach(x: torch.Tensor) -> Any:
    """An alias: the partitioner takes a detach for the end of what it may compute again."""
    return aten.alias.default(x) if isinstance(x, torch._subclasses.FakeTensor) else NotImplemented


def _roll(x: torch.Tensor, shifts: list[int], dims: list[int] | tuple[()] = ()) -> torch.Tensor:
    """Two slices in the other order, which fuse with what reads them; of no dimension, of all elements in a row."""
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    y = x
    for shift, dim in zip(shifts, dims):
        size = x.shape[dim]
        begin = size - shift % size if size else 0
        if 0 < begin < size:
            y = torch.cat([y.narrow(dim, begin, size - begin), y.narrow(dim, 0, begin)], dim)
    return x.clone() if y is x else y


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *geometry: Any) -> Any:
    """The bias apart, which cuDNN's caller adds by a kernel of its own: here it is part of what follows."""
    if bias is None or x.device.type not in BIAS_APART:
        return NotImplemented
    return aten.convolution.default(x, weight, None, *geometry) + bias.view(-1, *(1,) * (x.dim() - 2))


def _convolution_backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *rest: Any
) -> Any:
    """The gradient of the bias apart: a sum that joins other sums of the same tensor."""
    *geometry, mask = rest
    if not mask[2] or x.device.type not in BIAS_APART:
        return NotImplemented
    grad_bias = grad_y.sum([d for d in range(grad_y.dim()) if d != 1])
    if not any(mask[:2]):
        return None, None, grad_bias
    found = aten.convolution_backward.default(grad_y, x, weight, None, *geometry, [*mask[:2], False])
    return found[0], found[1], grad_bias
