"""Vocabulary of CUDA C: dtypes, vector types, and the values of template parameters."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from ...errors import LaunchError

# The one dtype table: what a torch dtype is called in CUDA C.
C_NAMES: dict[torch.dtype, str] = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
    torch.bool: "bool",
}
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALF = (torch.float16, torch.bfloat16)
INTEGRAL = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class WrongDtype(LaunchError):
    """A tensor of a dtype that a kernel does not declare. `dtype` is the one given."""

    def __init__(self, message: str, dtype: Any) -> None:
        super().__init__(message)
        self.dtype = dtype


_BYTES = frozenset((torch.bool, torch.uint8, torch.int8))  # any of which is a view of another


def remedy(tensor: torch.Tensor, dtype: torch.dtype, is_written: bool) -> str:
    """Advise how a tensor gets another dtype; a converted copy would not do for one that the kernel writes."""
    if {tensor.dtype, dtype} <= _BYTES:
        return f"give its .view({dtype}), which is the same memory"
    if not is_written:
        return f"convert it with .to({dtype})"
    return (
        f"allocate it as {dtype}, since a copy by .to() would take what the kernel writes; where it is only read, declare "
        "the pointer const"
    )


_OTHER_NAMES = {
    "half": torch.float16,
    "int8_t": torch.int8,
    "uint8_t": torch.uint8,
    "int16_t": torch.int16,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
    "long": torch.int64,
    # as C++ extensions call them
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
}
DTYPES = {name: dtype for dtype, name in C_NAMES.items()} | _OTHER_NAMES
# of a variable also those that PyTorch has few operations for
_UNSIGNED = {
    torch.uint16: ("unsigned short", "uint16_t"),
    torch.uint32: ("unsigned", "unsigned int", "uint32_t"),
    torch.uint64: ("unsigned long", "unsigned long long", "uint64_t", "size_t"),
}
VARIABLE_DTYPES = DTYPES | {name: dtype for dtype, names in _UNSIGNED.items() for name in names} | {"char": torch.int8}
_FROM_NUMPY = {np.dtype(str(dtype).removeprefix("torch.")): dtype for dtype in C_NAMES if dtype is not torch.bfloat16}

# Alignment of CUDA's vector types: 2 and 4 elements are aligned as a whole, up to 16 bytes; 3 as one element.
_VECTOR = re.compile(r"(u?)(char|short|int|long|longlong|float|double)([1-4])")
_ELEMENT_SIZES = {"char": 1, "short": 2, "int": 4, "long": 8, "longlong": 8, "float": 4, "double": 8}
_PACKED = {"__half2": 4, "half2": 4, "__nv_bfloat162": 4}


def vector_alignment(ctype: str) -> int:
    """The alignment of a vector type such as `float4`; 1 for any other type."""
    if (match := _VECTOR.fullmatch(ctype)) is None:
        return _PACKED.get(ctype, 1)
    size, count = _ELEMENT_SIZES[match.group(2)], int(match.group(3))
    return size if count == 3 else min(16, size * count)


_IDENTIFIER = re.compile(r"(?:::)?[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*", re.ASCII)
# keywords that are types: of these the launch must know the dtype, so they are given as one
_KEYWORDS = frozenset(
    (
        "auto",
        "bool",
        "char",
        "const",
        "double",
        "float",
        "int",
        "long",
        "short",
        "signed",
        "unsigned",
        "void",
        "volatile",
    )
)


def is_type(name: str) -> bool:
    """Return True if C or CUDA has a type of this name: one of the dtypes, a vector, a keyword."""
    return name in VARIABLE_DTYPES or name in _PACKED or name in _KEYWORDS or _VECTOR.fullmatch(name) is not None


def canonical(value: Any) -> Any:
    """A template value as kernels are known by it: NumPy's dtypes and integers as PyTorch's and Python's."""
    if isinstance(value, np.dtype):
        return _FROM_NUMPY.get(value, value)
    if isinstance(value, np.bool_):
        return bool(value)
    return int(value) if isinstance(value, np.integer) else value


OF_EXTENSIONS = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}  # what their files call these dtypes


def _meant_dtype(value: str) -> str:
    """`, torch.float32`, of the name of a dtype, or of a type of C."""
    plain = value.removeprefix("torch.")
    found = next(
        (str(dtype) for dtype, name in C_NAMES.items() if plain in (name, str(dtype).removeprefix("torch."))), ""
    )
    return f", {found}" if found else ""


def c_token(value: Any, extension: bool = False) -> str:
    """A template value in C++: only dtypes of the table, bools, ints and plain names reach the compiler.

    With `extension` the half types are PyTorch's own, as kernels of C++ extensions are written for them.
    """
    if isinstance(value, torch.dtype) and value in C_NAMES:
        return OF_EXTENSIONS.get(value, C_NAMES[value]) if extension else C_NAMES[value]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        number = int.__index__(value)  # an int that writes itself in another way, as an enum may, is still that int
        if not -(2**63) <= number < 2**64:
            raise LaunchError(
                f"a template value of {number.bit_length()} bits fits no integer type; expected one of 64 bits at most"
            )
        # 9223372036854775808 is no signed literal, with a minus before it or without
        return str(number) if number > -(2**63) else f"({number + 1} - 1)"
    if type(value) is str and _IDENTIFIER.fullmatch(value) and value not in _KEYWORDS:
        return value
    name = value if isinstance(value, str) else getattr(value, "__name__", "")  # float and np.float32 have one
    hint = f"; of a type give the dtype{_meant_dtype(name)}" if name else ""
    raise LaunchError(
        f"a template value is a dtype ({', '.join(map(str, C_NAMES))}), a bool, an int or the name of a type, function or "
        f'constant of the source, such as "Add" or "ns::Add"; got {value!r}{hint}'
    )
