"""What a kernel takes: its C signature read from the text, its types and sizes from the PTX, its arguments checked.

The C signature says which parameters are pointers and to what; the PTX says of which size each one is.
"""

from __future__ import annotations

import ctypes
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import source
from .binary import Parameter
from .ctype import C_NAMES as C_NAMES
from .ctype import DTYPES, vector_alignment
from .errors import CompileError, InputError, LaunchError

_UNSIGNED = re.compile(r"\bunsigned\b|\bu(int|long|short|char)\w*|\bsize_t\b")
_FORMATS = {1: "b", 2: "h", 4: "i", 8: "q"}  # the struct module's letters; upper case is unsigned


@dataclass(frozen=True)
class Argument:
    """One parameter of a kernel."""

    name: str
    ctype: str
    kind: str  # "pointer", "integer", "bool", "float" or "struct"
    size: int
    align: int
    dtype: torch.dtype | None = None  # what a pointer points to; None where any tensor will do
    boundary: int = 1  # a pointer's address is to be a multiple of this

    @property
    def format(self) -> str:
        """How the `struct` module packs it."""
        if self.kind == "struct":
            return f"{self.size}s"
        if self.kind == "float":
            return "f" if self.size == 4 else "d"
        if self.kind == "bool":
            return "?"
        letter = _FORMATS[self.size]
        return letter.upper() if self.kind == "pointer" or _UNSIGNED.search(self.ctype) else letter

    @property
    def range(self) -> tuple[int, int]:
        """The least and the greatest integer that fits."""
        bits = 8 * self.size
        return (0, 2**bits - 1) if self.format.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def join(
    name: str, declared: Sequence[tuple[str, str]], compiled: Sequence[Parameter], types: dict[str, str]
) -> tuple[Argument, ...]:
    """The C signature and the PTX parameters as one; `types` maps template parameters to C types."""
    if len(declared) != len(compiled):
        raise CompileError(f"{name}: the text declares {len(declared)} parameters, the PTX has {len(compiled)}")
    return tuple(_argument(ctype, arg, parameter, types) for (ctype, arg), parameter in zip(declared, compiled))


def _argument(ctype: str, name: str, parameter: Parameter, types: dict[str, str]) -> Argument:
    if ctype.endswith("*"):
        pointee = re.sub(r"\b(const|volatile)\b", "", ctype[:-1]).strip()
        pointee = types.get(pointee, pointee)
        dtype = DTYPES.get(pointee)
        boundary = dtype.itemsize if dtype is not None else vector_alignment(pointee)
        return Argument(name, ctype, "pointer", parameter.size, parameter.align, dtype, boundary)
    bare = re.sub(r"\bconst\b", "", ctype).strip()
    ctype = types.get(bare, ctype)
    if parameter.kind in ("f32", "f64"):
        kind = "float"
    elif parameter.kind.startswith("b"):
        kind = "struct"
    else:
        kind = "bool" if types.get(bare, bare) == "bool" else "integer"
    return Argument(name, ctype, kind, parameter.size, parameter.align)


def layout(arguments: Sequence[Argument]) -> tuple[str, list[int]]:
    """A `struct` format for all arguments, each at its alignment, and the offset of each."""
    letters, offsets, end = ["<"], [], 0
    for argument in arguments:
        padding = -end % argument.align
        letters.append(f"{padding}x{argument.format}" if padding else argument.format)
        offsets.append(end + padding)
        end += padding + argument.size
    return "".join(letters), offsets


def checked(name: str, arguments: Sequence[Argument], args: Sequence[Any], device: int) -> list[Any]:
    """The values to launch kernel `name` with: tensors as addresses, structs as bytes. Raises `LaunchError`."""
    check_count(name, [(argument.ctype, argument.name) for argument in arguments], args)
    return [_checked(name, argument, value, device) for argument, value in zip(arguments, args)]


def check_count(name: str, declared: Sequence[tuple[str, str]], args: Sequence[Any]) -> None:
    """As many arguments are given as declared."""
    if len(args) != len(declared):
        expected = ", ".join(f"{ctype} {parameter}" for ctype, parameter in declared)
        raise LaunchError(f"{name}: {len(args)} arguments given, {len(declared)} declared ({expected})")


def _checked(name: str, argument: Argument, value: Any, device: int) -> Any:
    expected = ""
    if argument.kind == "pointer":
        if value is None:
            return 0
        expected = _no_pointer(argument, value, device)
        if not expected:
            return value.data_ptr()
    elif argument.kind == "struct":
        if isinstance(value, (np.ndarray, np.void)) and value.nbytes == argument.size:
            return value.tobytes()
        expected = _no_struct(argument, value)
    elif argument.kind == "float":
        if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
            expected = "a number"
        elif isinstance(value, int) and value.bit_length() > 1024:
            expected = "a number that fits double"
        else:
            number = float(value)
            return ctypes.c_float(number).value if argument.size == 4 else number  # past the range: infinity, as in C
    elif argument.kind == "bool":
        if isinstance(value, (int, np.integer, np.bool_)):
            return bool(value)
        expected = "a bool"
    elif not isinstance(value, (int, np.integer)):
        expected = "an integer"
    elif not argument.range[0] <= int(value) <= argument.range[1]:
        expected = f"an integer that fits {argument.ctype}"
    else:
        return int(value)
    raise LaunchError(f"{name}: parameter `{argument.ctype} {argument.name}` got {_shown(value)}, expected {expected}")


def _no_pointer(argument: Argument, value: Any, device: int) -> str:
    """What was expected instead of `value`; nothing where it will do."""
    if not isinstance(value, Tensor):
        return "a tensor or None"
    if argument.dtype is not None and value.dtype is not argument.dtype:
        return f"a tensor of {argument.dtype}"
    if value.get_device() != device:
        return f"a tensor on the device of the first one, {'cpu' if device < 0 else f'cuda:{device}'}"
    if value.layout is not torch.strided or (not value.data_ptr() and value.numel()):
        return "a tensor with storage of its own"
    if value.data_ptr() % argument.boundary:
        return (
            f"one whose address is a multiple of {argument.boundary}; this one begins at element {value.storage_offset()} "
            "of its storage: give its .clone(), or have the kernel read single elements"
        )
    return ""


def _no_struct(argument: Argument, value: Any) -> str:
    """What was expected instead of `value`, with what a dtype of fields must be told to be as C lays it out."""
    expected = f"a NumPy array of {argument.size} bytes"
    dtype = getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.names is None:
        return expected
    told = f"{expected}, which is what `{argument.ctype}` takes in C; the dtype of this one has {value.nbytes}"
    aligned = _aligned(dtype)
    if value.size == 1 and aligned.itemsize == argument.size:
        return f"{told}: make the dtype with np.dtype([...], align=True), as C lays fields out"
    return f"{told} ({aligned.itemsize} with align=True): its fields are not those of the struct"


def _aligned(dtype: np.dtype) -> np.dtype:
    """The dtype with its fields laid out as C does."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((_aligned(base), shape))
    if dtype.names is None or dtype.fields is None:
        return dtype
    return np.dtype([(name, _aligned(dtype.fields[name][0])) for name in dtype.names], align=True)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} on {value.device}"
    if isinstance(value, int) and value.bit_length() > 1024:  # Python itself refuses to write out very long ones
        return f"an int of {value.bit_length()} bits"
    shown = " ".join(repr(value).split()) if isinstance(value, np.ndarray) else repr(value)
    return f"{shown if len(shown) <= 200 else shown[:200] + '...'} ({type(value).__name__})"


# --- names and text ----------------------------------------------------------------------------------------------


def parse_name(name: str) -> tuple[str, tuple[str, ...]]:
    """`"norm<T, VEC>"` -> `("norm", ("T", "VEC"))`."""
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:<([\w\s,]*)>)?\s*", name) if isinstance(name, str) else None
    if match is None:
        raise InputError(f'kernel name {name!r} is not of the form "name" or "name<T, N>"')
    template = tuple(part.strip() for part in (match.group(2) or "").split(",") if part.strip())
    for part in template:  # each is given as T=..., and a leading underscore is the fast path's
        if not part.isidentifier() or keyword.iskeyword(part) or part.startswith("_") or template.count(part) > 1:
            raise InputError(f"kernel name {name!r}: template parameter {part!r} cannot be the name of an argument")
    return match.group(1), template


# From __global__ to a kernel's name, past no other kernel. Each text is gone through once, whatever is in it.
_HEAD = r"__global__(?:(?!__global__)[^;{}])*?"


def declared(text: source.Source, name: str) -> list[tuple[str, str]]:
    """(C type, name) of each parameter of `__global__ ... name(...)`, from the file or one of its includes."""
    pieces = [source.strip_comments(piece) for piece in (text.text, *text.includes.values())]
    for clean in pieces:
        for match in re.finditer(rf"{_HEAD}\b{name}\s*\(", clean):
            end = _closing(clean, match.end())
            if clean[end + 1 :].lstrip().startswith(";"):
                continue  # a declaration, which need not name its parameters
            inside = clean[match.end() : end]
            return [_split_declaration(part) for part in _split_commas(inside) if part.strip() != "void"]
    found = _HEAD + r"\bvoid\s+(?:__launch_bounds__\s*\((?:(?!__global__)[^)])*\)\s*)?(\w+)\s*\("
    names = sorted({n for clean in pieces for n in re.findall(found, clean)})
    raise InputError(f"{text.name} has no __global__ function {name}; it has {', '.join(names) or 'none'}")


def _closing(text: str, start: int) -> int:
    depth = 1
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def _split_commas(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for char in text:
        depth += {"<": 1, "(": 1, "[": 1, ">": -1, ")": -1, "]": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [part for part in (*parts, current) if part.strip()]


def _split_declaration(declaration: str) -> tuple[str, str]:
    """`const T* __restrict__ x` -> (`const T*`, `x`)."""
    words = " ".join(re.sub(r"\b__(restrict|grid_constant)__\b", " ", declaration).split())
    words = re.sub(r"\* ?(const|volatile)\b", "*", words)  # what holds of the pointer itself
    match = re.search(r"\b(\w+) ?(\[ ?\w* ?\])?$", words)
    if match is None:
        raise InputError(f"cannot read the kernel parameter {words[:200]!r}")
    ctype = re.sub(r" ?\* ?", "*", words[: match.start()].strip())
    return ctype + ("*" if match.group(2) else ""), match.group(1)
