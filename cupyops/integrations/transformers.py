"""Hugging Face's transformers: the attention, a `Trainer`'s callback, and the layers of its kernel mapping.

`cupyops.swap(model)` needs none of it: it finds models of transformers by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nn._swap import Swap, swap
from ..nn._swap.hugging_face import ATTENTION, register
from ..ops._gelu import gelu
from ..ops._rms_norm import rms_norm
from ..ops._silu import silu

__all__ = ["ATTENTION", "callback", "layers", "register"]


class RMSNorm(torch.nn.Module):
    """The forward of transformers' "RMSNorm" layers by `cupyops.rms_norm`, of which it has `weight` and `variance_epsilon`.

    Example:
        >>> norm = cupyops.integrations.transformers.RMSNorm()
        >>> norm.weight, norm.variance_epsilon = torch.nn.Parameter(torch.ones(2)), 1e-6
        >>> norm(torch.tensor([[3.0, 3.0]])).detach()
        tensor([[1.0000, 1.0000]])
    """

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype is self.weight.dtype or torch.is_autocast_enabled(hidden_states.device.type):
            return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
        wide = hidden_states.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * rstd).to(hidden_states.dtype)


class SiLU(torch.nn.Module):
    """The forward of transformers' "SiLU" layers, by `cupyops.silu`.

    Example:
        >>> cupyops.integrations.transformers.SiLU()(torch.zeros(2))
        tensor([0., 0.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return silu(input)


class GELU(torch.nn.Module):
    """The forward of transformers' "GeLU" layers, by `cupyops.gelu`.

    Example:
        >>> cupyops.integrations.transformers.GELU()(torch.zeros(2))
        tensor([0., 0.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input)


class GELUTanh(torch.nn.Module):
    """The forward of transformers' "GeluTanh", "NewGELU" and "FastGELU" layers, by `cupyops.gelu`.

    Example:
        >>> cupyops.integrations.transformers.GELUTanh()(torch.zeros(2))
        tensor([0., 0.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate="tanh")


LAYERS: dict[str, type[torch.nn.Module]] = {
    "RMSNorm": RMSNorm,
    "SiLU": SiLU,
    "GeLU": GELU,
    "GeluTanh": GELUTanh,
    "NewGELU": GELUTanh,
    "FastGELU": GELUTanh,
}


def callback(**options: Any) -> Any:
    """A callback that has a `Trainer`'s model run operators of cupyops while it trains: `Trainer(callbacks=[callback()])`.

    Args:
        options: `only`, `skip` and `exact`, as of `cupyops.swap`.

    Returns:
        transformers.TrainerCallback: it swaps the model when training begins and undoes it when it ends; `.swap` is what
        was done.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    Example:
        >>> cupyops.integrations.transformers.callback(skip=torch.nn.Linear)  # doctest: +SKIP
    """
    from transformers import TrainerCallback  # type: ignore[import-not-found]

    class Swapped(TrainerCallback):  # type: ignore[misc]
        swap: Swap | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            self.swap = swap(model, **options)

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if self.swap is not None:
                self.swap.undo()

    return Swapped()
