"""Normalizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._kernel.kernel import HALF
from .._util import arguments, observed
from ..ops._add_rms_norm import add_rms_norm
from ..ops._batch_norm import batch_norm
from ..ops._batch_norm_act import batch_norm_act
from ..ops._group_norm import group_norm, group_norm_alike
from ..ops._layer_norm import layer_norm
from ..ops._rms_norm import rms_norm
from .twin import Twin, parameter

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class BatchNorm1d(Twin, torch.nn.BatchNorm1d):
    """Normalisation of each channel of (n, channels), (n, channels, l); as `torch.nn.BatchNorm1d`, by `cupyops.batch_norm`.

    Example:
        >>> cupyops.nn.BatchNorm1d(3)(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """

    def forward(self, input: Tensor) -> Tensor:
        return over_batch(self, input)


class BatchNorm2d(Twin, torch.nn.BatchNorm2d):
    """Normalisation of each channel of (n, channels, h, w); as `torch.nn.BatchNorm2d`, by `cupyops.batch_norm`.

    Example:
        >>> cupyops.nn.BatchNorm2d(3)(torch.zeros(2, 3, 4, 5)).shape
        torch.Size([2, 3, 4, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        return over_batch(self, input)


class BatchNorm3d(Twin, torch.nn.BatchNorm3d):
    """Normalisation of each channel of (n, channels, d, h, w); as `torch.nn.BatchNorm3d`, by `cupyops.batch_norm`.

    Example:
        >>> cupyops.nn.BatchNorm3d(3)(torch.zeros(2, 3, 4, 5, 6)).shape
        torch.Size([2, 3, 4, 5, 6])
    """

    def forward(self, input: Tensor) -> Tensor:
        return over_batch(self, input)


class BatchNormAct2d(Twin, torch.nn.BatchNorm2d):
    """relu(batch_norm(input) + residual), by `cupyops.batch_norm_act`; `torch.nn.BatchNorm2d`, and its state, otherwise.

    What stands behind a convolution in ResNets, in the passes over memory that the normalisation alone takes.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as of `torch.nn.BatchNorm2d`.
        activation: "relu", or None for the sum alone.

    Raises:
        InputError: `activation` is unknown.

    Example:
        >>> norm = cupyops.nn.BatchNormAct2d(3)
        >>> x, residual = torch.randn(2, 3, 4, 5), torch.ones(2, 3, 4, 5)
        >>> norm(x, residual).min() >= 0, norm(x).shape
        (tensor(True), torch.Size([2, 3, 4, 5]))
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = "relu",
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        arguments.choice("activation", activation, ("relu", None))
        self.activation = activation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        more = () if residual is None else (residual,)
        return over_batch(self, input, *more, function=batch_norm_act, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


class GroupNorm(Twin, torch.nn.GroupNorm):
    """Normalisation over groups of the channels of each image; as `torch.nn.GroupNorm`, by `cupyops.group_norm`.

    The result has the memory format of the input, on a GPU too, where PyTorch's is contiguous: a convolution of
    channels_last reads it as it lies.

    Example:
        >>> cupyops.nn.GroupNorm(2, 6)(torch.zeros(2, 6, 4, 5)).shape
        torch.Size([2, 6, 4, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        if type(input) is not Tensor or observed.is_left_to_compilers(input):  # a subclass, or a stand-in that traces
            return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        if input.is_cuda and input.dtype in HALF and torch.is_autocast_enabled("cuda"):
            # what autocast would cast and the kernels would lay out anew, at once; channels_last they read as it lies
            last = _LAST.get(input.dim())
            keeps = last is not None and input.is_contiguous(memory_format=last)
            memory = torch.preserve_format if keeps else torch.contiguous_format
            input = input.to(torch.float32, memory_format=memory)
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return group_norm_alike(input, self.num_groups, weight, bias, self.eps)  # type: ignore[no-any-return]


class LayerNorm(Twin, torch.nn.LayerNorm):
    """(x - mean) * rstd * weight + bias over the last dimensions; as `torch.nn.LayerNorm`, by `cupyops.layer_norm`.

    Example:
        >>> cupyops.nn.LayerNorm(4)(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        return layer_norm(input, self.normalized_shape, parameter(self, "weight"), parameter(self, "bias"), self.eps)


class RMSNorm(Twin, torch.nn.RMSNorm):
    """x * rstd * weight over the last dimensions; as `torch.nn.RMSNorm`, by `cupyops.rms_norm`.

    Example:
        >>> cupyops.nn.RMSNorm(4)(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        return rms_norm(input, self.normalized_shape, parameter(self, "weight"), self.eps)


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


def over_batch(module: Any, input: Any, *residual: Any, function: Any = batch_norm, **more: Any) -> Tensor:
    """The batch's statistics in training and where none are kept; the kept ones follow in training."""
    if type(input) is not Tensor and (node := module._cupyops_leaf(input, *residual)) is not None:
        return node  # type: ignore[no-any-return]
    module._check_input_dim(input)
    if residual:
        more["residual"] = residual[0]
    momentum = 0.0 if module.momentum is None else module.momentum
    mean, var, count = (_buffer(module, name) for name in ("running_mean", "running_var", "num_batches_tracked"))
    if module.training and module.track_running_stats and count is not None:
        count.add_(1)
        if module.momentum is None:  # the mean of all batches so far
            momentum = 1.0 / float(count)
    training = module.training or (mean is None and var is None)
    if module.training and not module.track_running_stats:
        mean = var = None
    weight, bias = parameter(module, "weight"), parameter(module, "bias")
    return function(input, mean, var, weight, bias, training, momentum, module.eps, **more)  # type: ignore[no-any-return]


def _buffer(module: torch.nn.Module, name: str) -> Any:
    """A buffer, where it is one, without a search for an attribute of the name."""
    buffers = module._buffers
    return buffers[name] if name in buffers else getattr(module, name)
