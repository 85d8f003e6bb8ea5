"""C++'s numbers and memory, for the Python that `python -m cupyops port` writes.

Functions of floating-point numbers never raise: where Python's do, these give the infinity or the NaN of C++.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from ._kernel.launch.executors import address as _address
from ._simulate import simulating as _simulating


def to_float(x: float) -> float:
    """Round a number to C++'s float."""
    return ctypes.c_float(x).value


def quotient(a: int, b: int) -> int:
    """C++'s a / b of integers: towards zero."""
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def remainder(a: int, b: int) -> int:
    """C++'s a % b of integers: with the sign of a."""
    return abs(a) % abs(b) if a >= 0 else -(-a % abs(b))


def ratio(a: float, b: float) -> float:
    """C++'s a / b of floating-point numbers, also where b is 0."""
    if b:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


def signed(x: int, bits: int) -> int:
    """Wrap an integer into C++'s signed type of so many bits."""
    return (x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def _whole(function: Callable[[float], float]) -> Callable[[float], float]:
    """Round to a whole number, with the sign of zero; what is none, infinity and NaN, stays."""
    return lambda x: math.copysign(function(x), x) if math.isfinite(x) else x


ceil, floor, trunc, rint = _whole(math.ceil), _whole(math.floor), _whole(math.trunc), _whole(round)
round = _whole(lambda x: math.floor(abs(x)) + (abs(x) % 1 >= 0.5))  # halves away from 0


def fmax(a: float, b: float) -> float:
    """Return the larger of two numbers, of which one may be NaN."""
    return float(max((one for one in (a, b) if one == one), default=a))


def fmin(a: float, b: float) -> float:
    """Return the smaller of two numbers, of which one may be NaN."""
    return float(min((one for one in (a, b) if one == one), default=a))


def _total(name: str) -> Callable[..., float]:
    def function(*given: float) -> float:
        try:
            return float(getattr(math, name)(*given))
        except (ValueError, OverflowError):  # a result that IEEE 754 has and Python refuses
            return float(getattr(torch, name)(*(torch.tensor(float(one), dtype=torch.float64) for one in given)))

    function.__doc__ = f"C's {name}."
    return function


sqrt, exp, exp2, expm1, log, log2, log10, log1p, pow, fmod = map(
    _total, ("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "fmod")
)
sin, cos, tan, asin, acos, sinh, cosh, acosh, atanh, lgamma = map(
    _total, ("sin", "cos", "tan", "asin", "acos", "sinh", "cosh", "acosh", "atanh", "lgamma")
)


def atoi(text: str) -> int:
    """C's atoi: the number with which a text begins, else 0."""
    found = re.match(r"[ \t\n\v\f\r]*([+-]?[0-9]+)", text)
    return int(found[1]) if found else 0


def limit(dtype: torch.dtype, name: str) -> float:
    """Number of std::numeric_limits."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if name == "infinity":
        return math.inf if dtype.is_floating_point else 0
    return {"max": info.max, "lowest": info.min, "min": getattr(info, "tiny", info.min)}[name]


def memory(x: Tensor, at: int) -> Tensor:
    """Memory of x from its element `at` on, as a pointer has it."""
    start = x.storage_offset() + at
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size() - start,), (1,), start)


def first_bytes(x: Tensor, count: int) -> Tensor:
    """First bytes of the memory of x."""
    return memory(x, 0).view(torch.uint8)[:count]


def address(x: Tensor, dtype: torch.dtype) -> int:
    """Address of a tensor, for a pointer inside a struct. Raises TypeError for another dtype."""
    if x.dtype != dtype:
        raise TypeError(f"expected a tensor of {dtype}, found one of {x.dtype}")
    return _address(x)


def dispatched(dtype: torch.dtype, name: str, *dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype, where the C++ is compiled for it; else raise NotImplementedError."""
    if dtype not in dtypes:
        raise NotImplementedError(f'"{name}" not implemented for {dtype}')
    return dtype


def alert(name: str) -> None:
    """Raise RuntimeError where deterministic algorithms are asked for, as alertNotDeterministic does."""
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(f"{name} does not have a deterministic implementation")


def multiprocessors(device: int | None = None) -> int:
    """Number of multiprocessors of a GPU, by default of the current one; the simulator has one."""
    return 1 if _simulating() else torch.cuda.get_device_properties(device).multi_processor_count
