"""The checks of a call, on top of it: tensors of one dtype and device whose shapes broadcast, numbers of the right kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._dispatch.elementwise.broadcast import broadcast_shape
from .._util import arguments
from ..errors import InputError
from .declaration import SCALARS, Declaration, Parameter

_BITS = {"int": 32, "long long": 64}
_REAL = (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)
_WHOLE = (int, np.integer, torch.SymInt)


def checker(
    declaration: Declaration, dtypes: Sequence[torch.dtype], promote: bool
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that takes the arguments, tensors then scalars, and gives them as the operator takes them."""
    tensors, scalars = declaration.tensors, declaration.scalars
    typed = [one.name for one in tensors if one.is_typed]

    def checked(values: Sequence[Any]) -> list[Any]:
        given = dict(zip([one.name for one in tensors], values))
        for one in tensors:
            _tensor(one, given[one.name], dtypes)
        if len({given[name].dtype for name in typed}) > 1:
            if not promote:
                _refuse_mixed({name: given[name] for name in typed})
            dtype = _promoted([given[name] for name in typed])
            given |= {name: given[name].to(dtype) for name in typed}
        if len(given) > 1:
            arguments.same_device(**given)
            broadcast_shape(**given)
        return [*given.values(), *(_scalar(one, value) for one, value in zip(scalars, values[len(tensors) :]))]

    return checked


def _tensor(one: Parameter, value: Any, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(value, Tensor):
        if isinstance(value, _REAL):
            arguments.fail(one.name, value, f"a tensor or an array; a number is declared as `float {one.name}`")
        arguments.tensor(one.name, value)  # which refuses it
    allowed = dtypes if one.dtype is None else (one.dtype,)
    if value.dtype not in allowed:
        arguments.fail(one.name, value, f"a tensor of {' or '.join(map(str, allowed))}")


def _refuse_mixed(tensors: dict[str, Tensor]) -> None:
    found = ", ".join(f"{name} is {value.dtype}" for name, value in tensors.items())
    raise InputError(
        f"{found}: tensors of type T are of one dtype; cast them, or define the operator with promote=True"
    )


def _promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    """PyTorch's rule: a tensor of no dimension counts where there are no others."""
    counted = [tensor.dtype for tensor in tensors if tensor.dim()] or [tensor.dtype for tensor in tensors]
    return functools.reduce(torch.promote_types, counted)


def _scalar(one: Parameter, value: Any) -> Any:
    kind = SCALARS[one.ctype]
    if kind is bool:
        if not isinstance(value, (bool, np.bool_)):
            arguments.fail(one.name, value, "a bool")
    elif not isinstance(value, _REAL if kind is float else _WHOLE):
        arguments.fail(one.name, value, "a number" if kind is float else "an integer")
    elif kind is int and not -(2 ** (_BITS[one.ctype] - 1)) <= value < 2 ** (_BITS[one.ctype] - 1):
        arguments.fail(one.name, value, f"an integer of {_BITS[one.ctype]} bits")
    elif kind is float and isinstance(value, int) and value.bit_length() > 1023:
        arguments.fail(one.name, value, "a number that fits double")
    return value.item() if isinstance(value, np.generic) else value
