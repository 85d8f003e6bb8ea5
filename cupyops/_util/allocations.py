"""A mode that sees what Python code allocates, in backward functions too; what C++ code allocates is not seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from . import torch_private

EMPTY = frozenset(
    (
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.empty_permuted,
        Tensor.new_empty,
        Tensor.new_empty_strided,
    )
)
FILLED = frozenset(
    (
        torch.zeros,
        torch.zeros_like,
        torch.ones,
        torch.ones_like,
        torch.full,
        torch.full_like,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
    )
)
_BACKWARD = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))


class Allocations(TorchFunctionMode):
    """Hands each tensor that is allocated while it is open to `changed`, and the caller what that gives."""

    wanted: frozenset[Any] = EMPTY | FILLED
    ours = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():
            torch_private.trace_without_our_modes()
        kwargs = kwargs or {}
        if func in _BACKWARD:
            with mock.patch.object(
                torch.autograd, torch_private.RUN_BACKWARD, self._within(torch_private.run_backward())
            ):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if (
            func not in self.wanted
            or kwargs.get("out") is not None
            or kwargs.get("pin_memory")
            or not _is_plain(result)
        ):
            return result
        return self.changed(result, func)

    def _within(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` with this mode open, which PyTorch closes before it calls `func`: backward functions allocate too."""

        def runs(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        return runs

    def changed(self, fresh: Tensor, by: Any) -> Tensor:
        """Return the tensor that the caller gets in the place of `fresh`, which `by` has made."""
        raise NotImplementedError


def _is_plain(result: Any) -> bool:
    """Return True for a tensor with memory of its own on the CPU or a GPU."""
    if type(result) is not Tensor or result.layout != torch.strided or not result.numel():
        return False
    if torch_private.functorch_active() or torch_private.dispatch_modes():
        return False
    return result.device.type in ("cpu", "cuda")
