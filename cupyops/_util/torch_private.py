"""What recorded plans use of PyTorch that is not public, each name with what it is for.

Tried with PyTorch 2.11 to 2.13. Where a name is missing, `available` is False and every call is made the plain way; what has
a public twin falls back to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

TRIED = "2.11 to 2.13"


def _found(*path: str) -> Any:
    value: Any = torch._C
    for name in path:
        value = getattr(value, name, None)
    return value


_TensorGuards = _found("_dynamo", "guards", "TensorGuards")
_empty_strided_cuda = _found("_dynamo", "guards", "_empty_strided_cuda")
_modes: Any = getattr(torch.overrides, "_get_current_function_mode_stack", None)

function_mode_enabled: Callable[[], bool] = _found("_is_torch_function_mode_enabled")
"""Whether a torch-function mode is open in this thread."""
functorch_active: Callable[[], bool] = _found("_are_functorch_transforms_active")
"""Whether a transform of torch.func is under way in this thread."""
is_functorch_wrapped: Callable[[Tensor], bool] = _found("_functorch", "is_functorch_wrapped_tensor")
"""Whether a tensor is one that a transform of torch.func has made."""
is_jit_tracing: Callable[[], bool] = _found("_is_tracing")
"""Whether torch.jit.trace, or torch.onnx.export(dynamo=False), records in this thread."""
dispatch_modes: Callable[[], int] = _found("_len_torch_dispatch_stack")
"""How many dispatch modes are open in this thread."""
deterministic: Callable[[], bool] = _found("_get_deterministic_algorithms")
"""Whether PyTorch is asked for deterministic algorithms."""
saved_tensors_hooks: Callable[[bool], Any] = _found("_autograd", "_top_saved_tensors_default_hooks")
"""The pair of hooks that tensors saved for backward go through, or None; True: also those that tracing ignores."""
keeps_graph: Callable[[], bool] = _found("_autograd", "_get_current_graph_task_keep_graph")
"""Whether the backward under way keeps the graph; True outside of one."""
without_function_modes: Any = _found("DisableTorchFunction")
"""A context manager, inside which no torch-function mode and no subclass sees anything."""

available = hasattr(forward_ad, "_current_level") and None not in (
    *(_TensorGuards, _modes, function_mode_enabled, functorch_active, dispatch_modes, deterministic),
    *(saved_tensors_hooks, keeps_graph, without_function_modes),
)


def tensor_guard(examples: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether they are as these, and different objects.

    It compares the Python type, the dispatch keys (so autocast, torch.func, dispatch modes, inference, conjugate and
    negative bits, sparse and nested layouts), dtype, device index, requires_grad, sizes and strides. It holds no example.
    """
    guards = _TensorGuards(*examples, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check


def empty_strided(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]:
    """`empty_strided(size, strides, dtype)` on `device`, which for CUDA is to be the current one.

    Where PyTorch is asked for deterministic algorithms now, it fills what is allocated, as PyTorch does.
    """
    if device.type == "cuda" and _empty_strided_cuda is not None and not deterministic():
        found: Callable[..., Tensor] = _empty_strided_cuda
        return found
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def ask_when_missing(namespace: str, names: Sequence[str], register: Callable[[], Any]) -> None:
    """Have `register()` called when one of these names is asked of `torch.ops.<namespace>` and is not there."""
    if _Namespace is None:
        register()
        return
    found = getattr(torch.ops, namespace)
    if not isinstance(found, _Namespace):
        lazy = _Namespace(namespace)
        lazy.__dict__.update(found.__dict__)
        setattr(torch.ops, namespace, lazy)
        found = lazy
    found.__dict__.setdefault("_cupyops_waiting", {}).update(dict.fromkeys(names, register))


def _namespace() -> Any:
    base: Any = getattr(torch._ops, "_OpNamespace", None)
    if base is None:
        return None

    class Namespace(base):  # type: ignore[misc, valid-type]
        """`torch.ops.<name>`, some of whose operators are registered when they are asked for."""

        def __getattr__(self, op_name: str) -> Any:
            if (register := self.__dict__.get("_cupyops_waiting", {}).pop(op_name, None)) is not None:
                register()
            return super().__getattr__(op_name)

    Namespace.__module__ = base.__module__  # of which the names of operators are made
    return Namespace


_Namespace: Any = _namespace()


def opaque_modes() -> bool:
    """Whether a torch-function mode is open that may change what functions give.

    One that says of itself that it is `transparent` does not, nor does the default device for functions that are told one.
    """
    return any(not (isinstance(mode, DeviceContext) or getattr(mode, "transparent", False)) for mode in _modes())


def forward_mode() -> bool:
    """Whether a level of forward-mode AD is open."""
    return int(forward_ad._current_level) >= 0


def forget_signature(function: Any) -> None:
    """`function` has another code than before: torch.compile is not to bind arguments by what it has read of the old one."""
    functions = sys.modules.get("torch._dynamo.variables.functions")
    known = getattr(functions, "_spec_cache", None)
    if known is not None:
        known.pop(function, None)
