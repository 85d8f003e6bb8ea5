"""The conditions under which a plan is replayed, as lines of its function: metadata, numbers, modes, an author's globals."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import executors
from ..._util import torch_private
from .codegen import OURS, Writer
from .constants import MISS, freeze

_SINGLE = (torch.dtype, torch.memory_format, torch.layout)
_IMMUTABLE = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


def alike(value: Any, other: Any) -> bool:
    """Return True if two values are of one type and equal; objects not compared by value must be the same object."""
    if value is other:
        return True
    return type(value) is type(other) and _is_simple(value) and freeze(value) == freeze(other)


def miss_if(writer: Writer, condition: str) -> None:
    """The plan is left where the condition holds."""
    writer.line(f"if {condition}: return {writer.name(MISS)}")


def values(writer: Writer, names: Sequence[str], args: Sequence[Any]) -> None:
    """Write the condition that arguments other than tensors are what they were."""
    for name, value in zip(names, args):
        if not isinstance(value, Tensor):
            miss_if(writer, _differs(writer, name, value))


def tensors(writer: Writer, names: Sequence[str], args: Sequence[Any]) -> None:
    """Write the condition that tensors have the same metadata, and that those that were one object are one again."""
    unique: dict[int, str] = {}
    examples = []
    for name, value in zip(names, args):
        if not isinstance(value, Tensor):
            continue
        if id(value) in unique:
            miss_if(writer, f"{name} is not {unique[id(value)]}")
        else:
            unique[id(value)] = name
            examples.append(value)
    check = writer.name(torch_private.tensor_guard(examples))
    miss_if(writer, f"not {check}({', '.join(unique.values())})")
    if any(one.requires_grad for one in examples):
        enabled = torch.is_grad_enabled()
        miss_if(writer, f"{writer.name(torch.is_grad_enabled)}() is not {enabled}")


def surroundings(writer: Writer, device: torch.device, default_dtype: bool) -> None:
    """Write conditions that settings of the thread and the process, as far as they matter, are what they were."""
    modes(writer)
    asked = f"{writer.name(torch_private.deterministic)}() is not {torch_private.deterministic()}"
    miss_if(writer, f"{writer.name(torch_private.forward_ad)}.{torch_private.LEVEL} >= 0 or {asked}")
    if default_dtype:
        miss_if(writer, f"{writer.name(torch.get_default_dtype)}() is not {writer.name(torch.get_default_dtype())}")
    if torch.is_autocast_enabled(device.type):
        kind, asked = writer.name(device.type), writer.name(torch.get_autocast_dtype)
        miss_if(writer, f"{asked}({kind}) is not {writer.name(torch.get_autocast_dtype(device.type))}")
    executor(writer, device)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        miss_if(writer, f"{writer.name(torch_private.current_device)}() != {device.index}")


def modes(writer: Writer) -> None:
    """Write the condition that no torch-function mode is open that may change what functions give."""
    enabled, opaque = writer.name(torch_private.function_mode_enabled), writer.name(torch_private.opaque_modes)
    miss_if(writer, f"{enabled}() and {opaque}()")


def executor(writer: Writer, device: torch.device) -> None:
    """Write the condition that kernels on the device still have the executor they had; a GPU has but one."""
    if device.type != "cuda":
        known = writer.name(executors.get(device.type))
        miss_if(writer, f"{writer.name(executors)}.get({writer.name(device.type)}) is not {known}")


def globals_of(writer: Writer, authors: Sequence[Any]) -> dict[str, Any] | None:
    """Write the condition that the globals and closure cells that authors' functions name are what they were."""
    scope: dict[str, Any] | None = None
    for author in authors:
        function = getattr(author, "__wrapped__", author)
        if not isinstance(function, types.FunctionType):
            continue
        scope = function.__globals__ if scope is None else scope
        names = sorted({name for name in _names(function.__code__) if name in function.__globals__})
        inside = function.__globals__ is scope
        for name in names:
            value = function.__globals__[name]
            found = name
            if not inside or OURS.fullmatch(name):
                found = f"{writer.name(function.__globals__)}[{name!r}]"
            miss_if(writer, _changed(writer, found, value))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            miss_if(writer, _changed(writer, f"{writer.name(cell)}.cell_contents", value))
    return scope


def _changed(writer: Writer, found: str, value: Any) -> str:
    name = writer.name(value)
    if _is_simple(value):
        return f"{found} is not {name} and not {writer.name(alike)}({found}, {name})"
    return f"{found} is not {name}"


def _names(code: types.CodeType) -> set[str]:
    """Return the names in the code and in the functions inside it."""
    found = set(code.co_names)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found |= _names(one)
    return found


def _is_simple(value: Any) -> bool:
    """Return True if a value is immutable and compared by value."""
    if type(value) in (tuple, torch.Size):
        return all(map(_is_simple, value))
    return type(value) in _IMMUTABLE


def _differs(writer: Writer, name: str, value: Any) -> str:
    kind = type(value)
    if value is None or kind is bool:
        return f"{name} is not {value}"
    if kind in _SINGLE:
        return f"{name} is not {writer.name(value)}"
    if kind in (int, float, str, torch.device):
        known = writer.name(value)
        unequal = f"{name}.__class__ is not {writer.name(kind)} or {name} != {known}"
        if kind is float and value == 0:
            unequal += f" or {writer.name(math.copysign)}(1.0, {name}) != {math.copysign(1.0, value)}"
        return f"{name} is not {known} and ({unequal})"
    if kind in (tuple, torch.Size) and all(type(one) is int for one in value):
        # modules of one kind have equal sizes, which are not the same object
        known, integer = writer.name(value), writer.name(int)
        differ = [f"{name}.__class__ is not {writer.name(kind)}", f"{name} != {known}"]
        differ += [f"{name}[{at}].__class__ is not {integer}" for at in range(len(value))]
        return f"{name} is not {known} and ({' or '.join(differ)})"
    if _is_simple(value):
        known = writer.name(value)
        return f"{name} is not {known} and not {writer.name(alike)}({name}, {known})"
    if kind is list and all(type(one) is int for one in value):
        known, types_ = writer.name(list(value)), writer.name([int] * len(value))
        return f"{name}.__class__ is not list or {name} != {known} or [*map(type, {name})] != {types_}"
    return f"{writer.name(freeze)}({name}) != {writer.name(freeze(value))}"
