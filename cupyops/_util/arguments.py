"""Checks of arguments for the public functions: each names the argument, what it was and what it should be."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.jit import is_tracing

from ..errors import InputError
from . import libraries, observed, torch_private
from .strides import is_dry

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def fail(name: str, found: Any, expected: str) -> NoReturn:
    """Raise the `InputError` that every check raises."""
    raise InputError(f"{name} is {describe(found)}, expected {expected}")


def describe(value: Any) -> str:
    """A value as error messages show it: tensors by shape, dtype and device, arrays by shape and dtype."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype} on {value.device}"
    if libraries.is_array(value):
        return libraries.describe(value)
    text = repr(value)
    return f"{text if len(text) < 60 else text[:57] + '...'} ({type(value).__name__})"


def tensor(name: str, value: Any) -> None:
    """Check that `value` is a tensor."""
    if not isinstance(value, Tensor):
        if libraries.is_array(value):  # beside a tensor: of the arguments of a call all are arrays, or none
            fail(name, value, "a tensor; inside cupyops.vjp arrays are tensors: pass it to vjp as an argument")
        fail(name, value, "a tensor, or an array that offers DLPack")


def optional_tensor(name: str, value: Any) -> None:
    """Check that `value` is a tensor or None."""
    if value is not None:
        tensor(name, value)


def floating(name: str, value: Tensor) -> None:
    """Check that `value` is a tensor of a floating-point dtype."""
    tensor(name, value)
    if not value.dtype.is_floating_point:
        fail(name, value, "a tensor of a floating-point dtype")


def same_device(**tensors: Tensor | None) -> None:
    """Check that all tensors given are on the device of the first."""
    given = [(name, value) for name, value in tensors.items() if value is not None]
    for name, value in given[1:]:
        first_name, first = given[0]
        if value.device != first.device:
            raise InputError(f"{name} is on {value.device}, but {first_name} is on {first.device}; expected one device")


def same_dtype(**tensors: Tensor | None) -> None:
    """Check that all tensors given have the dtype of the first."""
    given = [(name, value) for name, value in tensors.items() if value is not None]
    for name, value in given[1:]:
        first_name, first = given[0]
        if value.dtype != first.dtype:
            raise InputError(f"{name} is {value.dtype}, but {first_name} is {first.dtype}; expected one dtype")


def dim(name: str, value: Any, ndim: int) -> int:
    """Return `value` as a dimension counted from the front, 0 <= dim < max(ndim, 1)."""
    value = _size(value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        fail(name, value, "an int")
    rank = max(ndim, 1)
    if not -rank <= value < rank:
        fail(name, value, f"a dimension in [{-rank}, {rank - 1}]")
    return value % rank  # type: ignore[return-value]  # a SymInt stands for an int


def in_range(where: str, values: Tensor, limit: int, expected: str, ignored: int | None = None) -> None:
    """Check that integers are in [0, limit), where they can be read: on the CPU, while nobody records or transforms a call.

    `where` has {} for the number of an element; the words are those that the kernels print before they stop.
    """
    if values.device.type != "cpu" or is_tracing() or torch.compiler.is_compiling() or _is_wrapped(values):
        return
    wrong = (values < 0) | (values >= limit)
    if ignored is not None:
        wrong &= values != ignored
    if wrong.any():
        element = int(wrong.flatten().nonzero()[0])
        found = int(values.flatten()[element])
        raise InputError(f"{where.format(element)} is {found}, expected {expected} in [0, {limit})")


def _is_wrapped(values: Tensor) -> bool:
    """Return True if the tensor has no values of its own to read."""
    return is_dry(values) or bool(torch_private.is_functorch_wrapped(values) or torch_private.dispatch_modes())


def choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Check that `value` is one of `allowed`."""
    if not any(isinstance(value, type(one)) and value == one for one in allowed):
        fail(name, value, "one of " + ", ".join(repr(one) for one in allowed))


def ints(name: str, value: Any, count: int, minimum: int) -> list[int]:
    """Return `value`, an int or a sequence of 1 or `count` ints of at least `minimum`, as a list of `count` ints."""
    values = [_size(v) for v in (value if isinstance(value, (tuple, list, torch.Size)) else [value])]
    if len(values) not in (1, count) or any(
        isinstance(v, bool) or not isinstance(v, (int, torch.SymInt)) for v in values
    ):
        fail(name, value, f"an int or {count} ints")
    if any(v < minimum for v in values):
        fail(name, value, f"at least {minimum}")
    return values * count if len(values) == 1 else values


def _size(value: Any) -> Any:
    """The size of a tensor, which is a tensor itself while torch.jit.trace records, as an int; anything else as it is."""
    return int(value) if isinstance(value, Tensor) and value.dim() == 0 and is_tracing() else value


def warn(message: str) -> None:
    """Warn whoever called a function of this package, at each call: a call that warns is not recorded."""
    observed.refuse("it warns")
    if torch.compiler.is_compiling():  # which cannot trace it
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_ours(filename: str) -> bool:
    """Return True if a frame is of a file of this package, or of code that it has generated."""
    return filename.startswith((_PACKAGE, "<plans of ", "<recorded plan"))


def autocast(device: torch.device) -> bool:
    """Return True if autocast is on for a device's tensors; PyTorch itself raises for devices without it, such as "meta"."""
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Half type to which autocast lowers the operands of products on the device of `x`; None while it is off."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return dtype if dtype.itemsize == 2 else None
