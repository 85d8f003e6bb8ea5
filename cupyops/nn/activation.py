"""Activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch.core import library
from ..ops._bias_gelu import bias_gelu
from ..ops._geglu import geglu
from ..ops._gelu import gelu
from ..ops._log_softmax import log_softmax
from ..ops._relu import relu
from ..ops._silu import silu
from ..ops._softmax import softmax
from ..ops._swiglu import swiglu
from .twin import Twin

# Elements at most of which relu, gelu and silu are PyTorch's own, whose calls take the host less time. On an H200 2^20 of
# bfloat16 take 5.44, 5.42 and 5.28 us by kernels of ours and 5.41, 5.60 and 5.63 by PyTorch's, and in backward 5.25, 6.06
# and 6.05 beside 5.79, 6.72 and 6.48; a call of relu without a gradient takes the host 9.3 us beside 7.4, with one 15.2
# beside 9.3.
SMALL = 2**20


def is_small(x: Any) -> bool:
    """Return True for a tensor of which PyTorch's own relu, gelu and silu take less time, and may be called at once."""
    return type(x) is Tensor and library.at_once(x) and x.numel() <= SMALL


class ReLU(Twin, torch.nn.ReLU):
    """max(x, 0); as `torch.nn.ReLU`, by `cupyops.relu`.

    Example:
        >>> cupyops.nn.ReLU()(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        if is_small(input):
            return torch.relu_(input) if self.inplace else torch.relu(input)
        return relu(input, self.inplace)


class GELU(Twin, torch.nn.GELU):
    """Gaussian error linear unit, exact or by tanh; as `torch.nn.GELU`, by `cupyops.gelu`.

    Example:
        >>> cupyops.nn.GELU("tanh")(torch.zeros(2))
        tensor([0., 0.])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        if is_small(input):
            return torch.nn.functional.gelu(input, approximate=self.approximate)
        return gelu(input, self.approximate)


class SiLU(Twin, torch.nn.SiLU):
    """x * sigmoid(x); as `torch.nn.SiLU`, by `cupyops.silu`.

    Example:
        >>> cupyops.nn.SiLU()(torch.zeros(2))
        tensor([0., 0.])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        if is_small(input):
            return torch.nn.functional.silu(input, self.inplace)
        return silu(input, self.inplace)


class Softmax(Twin, torch.nn.Softmax):
    """exp(x) / sum(exp(x)) along a dimension; as `torch.nn.Softmax`, by `cupyops.softmax`.

    Example:
        >>> cupyops.nn.Softmax(dim=1)(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        return softmax(input, self.dim)


class LogSoftmax(Twin, torch.nn.LogSoftmax):
    """log(softmax(x)) along a dimension; as `torch.nn.LogSoftmax`, by `cupyops.log_softmax`.

    Example:
        >>> cupyops.nn.LogSoftmax(dim=1)(torch.zeros(1, 2))
        tensor([[-0.6931, -0.6931]])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        return log_softmax(input, self.dim)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up, by `cupyops.swiglu`: of two tensors, or of the halves of one. torch.nn has none.

    Example:
        >>> cupyops.nn.SwiGLU()(torch.ones(1, 4))
        tensor([[0.7311, 0.7311]])
    """

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return swiglu(gate, up)


class GEGLU(torch.nn.Module):
    """gelu(gate) * up, by `cupyops.geglu`: of two tensors, or of the halves of one. torch.nn has none.

    Args:
        approximate: `"none"` or `"tanh"`, as in `GELU`.

    Example:
        >>> cupyops.nn.GEGLU()(torch.ones(1, 4))
        tensor([[0.8413, 0.8413]])
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class BiasGELU(torch.nn.Module):
    """gelu(input + bias) with a learnable bias for each feature, by `cupyops.bias_gelu`. torch.nn has none.

    Args:
        features: the size of the last dimension of the input.
        approximate: `"none"` or `"tanh"`, as in `GELU`.
        device, dtype: of the bias.

    Attributes:
        bias: (features,); 0 to begin with.

    Example:
        >>> cupyops.nn.BiasGELU(2)(torch.ones(1, 2)).detach()
        tensor([[0.8413, 0.8413]])
    """

    def __init__(
        self, features: int, approximate: str = "none", device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.features, self.approximate = features, approximate
        self.bias = torch.nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Bias 0: gelu alone."""
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return bias_gelu(input, self.bias, self.approximate)

    def extra_repr(self) -> str:
        return f"{self.features}, approximate={self.approximate!r}"
