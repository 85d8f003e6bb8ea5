"""Normalizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._add_rms_norm import add_rms_norm
from ..ops._batch_norm import batch_norm
from ..ops._group_norm import group_norm
from ..ops._layer_norm import layer_norm
from ..ops._rms_norm import rms_norm


class BatchNorm1d(torch.nn.BatchNorm1d):
    """Normalisation of each channel of (n, channels), (n, channels, l); as `torch.nn.BatchNorm1d`, by `cupyops.batch_norm`.

    Example:
        >>> cupyops.nn.BatchNorm1d(3)(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """

    def forward(self, input: Tensor) -> Tensor:
        return _over_batch(self, input)


class BatchNorm2d(torch.nn.BatchNorm2d):
    """Normalisation of each channel of (n, channels, h, w); as `torch.nn.BatchNorm2d`, by `cupyops.batch_norm`.

    Example:
        >>> cupyops.nn.BatchNorm2d(3)(torch.zeros(2, 3, 4, 5)).shape
        torch.Size([2, 3, 4, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        return _over_batch(self, input)


class BatchNorm3d(torch.nn.BatchNorm3d):
    """Normalisation of each channel of (n, channels, d, h, w); as `torch.nn.BatchNorm3d`, by `cupyops.batch_norm`.

    Example:
        >>> cupyops.nn.BatchNorm3d(3)(torch.zeros(2, 3, 4, 5, 6)).shape
        torch.Size([2, 3, 4, 5, 6])
    """

    def forward(self, input: Tensor) -> Tensor:
        return _over_batch(self, input)


class GroupNorm(torch.nn.GroupNorm):
    """Normalisation over groups of the channels of each image; as `torch.nn.GroupNorm`, by `cupyops.group_norm`.

    Example:
        >>> cupyops.nn.GroupNorm(2, 6)(torch.zeros(2, 6, 4, 5)).shape
        torch.Size([2, 6, 4, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class LayerNorm(torch.nn.LayerNorm):
    """(x - mean) * rstd * weight + bias over the last dimensions; as `torch.nn.LayerNorm`, by `cupyops.layer_norm`.

    Example:
        >>> cupyops.nn.LayerNorm(4)(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """x * rstd * weight over the last dimensions; as `torch.nn.RMSNorm`, by `cupyops.rms_norm`.

    Example:
        >>> cupyops.nn.RMSNorm(4)(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        return rms_norm(input, self.normalized_shape, self.weight, self.eps)


class AddRMSNorm(torch.nn.RMSNorm):
    """A residual connection and the norm behind it, by `cupyops.add_rms_norm`; constructor and state of `torch.nn.RMSNorm`.

    Returns:
        `(y, summed)`: the normalised sum of `input` and `residual`, and the sum, which is the next residual.

    Example:
        >>> y, summed = cupyops.nn.AddRMSNorm(4)(torch.ones(2, 4), torch.ones(2, 4))
        >>> summed[0]
        tensor([2., 2., 2., 2.])
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm(input, residual, self.normalized_shape, self.weight, self.eps)


def _over_batch(module: torch.nn.modules.batchnorm._BatchNorm, input: Any) -> Tensor:
    """The batch's statistics in training and where none are kept; the kept ones follow in training."""
    if isinstance(input, torch.fx.Proxy):  # torch.fx does not look into PyTorch's module either
        tracer = input.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(module), (input,), {})  # type: ignore
    module._check_input_dim(input)
    momentum = 0.0 if module.momentum is None else module.momentum
    if module.training and module.track_running_stats and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:  # the mean of all batches so far
            momentum = 1.0 / float(module.num_batches_tracked)
    mean, var = module.running_mean, module.running_var
    training = module.training or (mean is None and var is None)
    if module.training and not module.track_running_stats:
        mean = var = None
    return batch_norm(input, mean, var, module.weight, module.bias, training, momentum, module.eps)
