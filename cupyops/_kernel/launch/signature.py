"""Arguments of a kernel: the C signature of its text, the types and sizes of its PTX, and the checks of a call.

The C signature says which parameters are pointers and to what; the PTX says of which size each one is.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._util import libraries
from ..._util.strides import has_bits
from ...errors import CompileError, LaunchError
from ..compile.binary import Parameter
from . import tensor_map
from .accessor import Accessor
from .ctype import DTYPES, HALF, VARIABLE_DTYPES, WrongDtype, remedy, vector_alignment
from .pointers import SIZE, Pointers
from .tensor_map import TensorMap

_UNSIGNED = re.compile(r"\bunsigned\b|\bu(int|long|short|char)\w*|\bsize_t\b")
_CONST = re.compile(r"\bconst\b")
_IN_BRACKETS = re.compile(r"<[^<>]*>")
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
    template: str = ""  # the template parameter that says what a pointer points to
    inner: torch.dtype | None = None  # what the pointers of a table point to
    accessor: Accessor | None = None  # of a struct that is a tensor accessor of PyTorch's

    @property
    def is_written(self) -> bool:
        """True for a pointer through which the kernel may write: `T*`, `const T**`, not `const T*` or `T const*`."""
        if self.accessor is not None:
            return self.accessor.is_written
        return self.kind == "pointer" and not is_const(self.ctype)

    @property
    def entry(self) -> str:
        """Type of the entries of a pointer to pointers, a table: `const float*` of `const float* const*`; else empty."""
        pointee = re.sub(r" ?\bconst$", "", self.ctype[:-1].strip()) if self.kind == "pointer" else ""
        return pointee if pointee.endswith("*") else ""

    @property
    def takes_map(self) -> bool:
        """True for a struct in whose place a tensor map may be given."""
        return (
            self.accessor is None
            and self.kind == "struct"
            and self.size == tensor_map.BYTES
            and self.align % tensor_map.ALIGNMENT == 0
        )

    @property
    def format(self) -> str:
        """Format by which the `struct` module packs the argument."""
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
    name: str,
    declared: Sequence[tuple[str, str]],
    compiled: Sequence[Parameter],
    types: dict[str, str],
    real: Sequence[str] | None = None,
) -> tuple[Argument, ...]:
    """The C signature and the PTX parameters as one; `types` maps template parameters to C types.

    `real` are the types that the compiler understood; where the text has another name for one, that is left.
    """
    if len(declared) != len(compiled):
        raise CompileError(
            f"{name}: the text declares {len(declared)} parameters, the PTX has {len(compiled)}; "
            "write them without #if, each with its type and its name"
        )
    known = [
        ctype if real is None or _means(ctype, real[index], types) else _constant(ctype, real[index])
        for index, (ctype, _) in enumerate(declared)
    ]
    return tuple(
        _argument(ctype, arg, parameter, types) for ctype, (_, arg), parameter in zip(known, declared, compiled)
    )


def _constant(said: str, real: str) -> str:
    """The compiler's type, const where the text has a const accessor, which a kernel cannot write through."""
    is_constant = re.match(r"const\b[^<]*Accessor(32|64)?<", said) and "PackedTensorAccessor<" in real
    return f"const {real}" if is_constant else real


def _means(said: str, real: str, types: dict[str, str]) -> bool:
    """Return True if the type that the text names is the compiler's, without a typedef between."""
    if said.endswith("*") != real.endswith("*") or is_const(said) != is_const(real):
        return False
    one, other = unqualified(said), unqualified(real)
    one = types.get(one, one)
    return one == other or (one in VARIABLE_DTYPES and VARIABLE_DTYPES[one] is VARIABLE_DTYPES.get(other))


def unqualified(ctype: str) -> str:
    """Return a type without `const`, or the type that a pointer points to."""
    return " ".join(re.sub(r"\b(const|volatile)\b", " ", ctype.removesuffix("*")).split())


def is_const(pointer: str) -> bool:
    """Return True if a pointer's target is const; meaningless for other types."""
    pointee = pointer[:-1].strip() if pointer.endswith("*") else ""
    while pointee != (outside := _IN_BRACKETS.sub(" ", pointee)):  # in `Row<const T>*` the const is another's
        pointee = outside
    return _CONST.search(pointee.rpartition("*")[2]) is not None


def _argument(ctype: str, name: str, parameter: Parameter, types: dict[str, str]) -> Argument:
    if ctype.endswith("*"):
        pointee = unqualified(ctype)
        template, pointee = pointee if pointee in types else "", types.get(pointee, pointee)
        dtype = DTYPES.get(pointee)
        boundary = dtype.itemsize if dtype is not None else vector_alignment(pointee)
        inside = unqualified(pointee) if pointee.endswith("*") else ""
        inner = DTYPES.get(types.get(inside, inside))
        return Argument(name, ctype, "pointer", parameter.size, parameter.align, dtype, boundary, template, inner)
    bare = re.sub(r"\bconst\b", "", ctype).strip()
    ctype = types.get(bare, ctype)
    if parameter.kind in ("f32", "f64"):
        kind = "float"
    elif parameter.kind.startswith("b"):
        kind = "struct"
    else:
        kind = "bool" if types.get(bare, bare) == "bool" else "integer"
    accessor = Accessor.read(ctype, parameter.size) if kind == "struct" else None
    return Argument(name, ctype, kind, parameter.size, parameter.align, accessor=accessor)


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
    return [_checked(name, arguments, index, value, device) for index, value in enumerate(args)]


def resolved(name: str, arguments: Sequence[Argument], args: Sequence[Any]) -> Sequence[Any]:
    """The arguments, with a copy of each tensor that PyTorch has only noted to be conjugated or negated, and with tables of
    pointers in memory.

    Raises:
        LaunchError: the kernel writes to such a one, or takes no such table.
    """
    if any(isinstance(value, Pointers) for value in args):
        args = [_in_memory(name, arguments, index, value) for index, value in enumerate(args)]
    noted = [index for index, value in enumerate(args) if isinstance(value, Tensor) and has_bits(value)]
    if not noted:
        return args
    values = list(args)
    for index in noted:
        argument = arguments[min(index, len(arguments) - 1)]  # of too many, which are counted later
        if argument.is_written:
            kind, call = ("conjugates", "conj") if values[index].is_conj() else ("negatives", "neg")
            raise LaunchError(
                f"{name}: argument {index + 1} of {len(arguments)}, parameter `{argument.ctype} {argument.name}` got a view "
                f"whose values are the {kind} of its memory, which a kernel that writes there does not know: give its "
                f".resolve_{call}(), which is a copy; where it is only read, declare `const`"
            )
        values[index] = values[index].resolve_conj().resolve_neg()
    return values


def _in_memory(name: str, arguments: Sequence[Argument], index: int, value: Any) -> Any:
    """A table of pointers as a tensor, where the kernel has a pointer to it; anything else as it is."""
    if not isinstance(value, Pointers) or index >= len(arguments) or not (argument := arguments[index]).entry:
        return value
    wrong = [one for one in value.tensors if argument.inner not in (None, one.dtype)]
    if expected := f"pointers to tensors of {argument.inner}" if wrong else value.unfit():
        found = f"one to {shown(wrong[0])}" if wrong else shown(value)
        raise LaunchError(_refusal(name, arguments, index, found, expected))
    return value.table()


def constant(name: str, arguments: Sequence[Argument], index: int, value: Any) -> bytes:
    """The bytes of an argument that is no tensor, as the kernel reads them. Raises `LaunchError`."""
    checked_value = 0 if value is None else _checked(name, arguments, index, value, -1)
    return struct.pack(f"<{arguments[index].format}", checked_value)


def check_count(name: str, declared: Sequence[tuple[str, str]], args: Sequence[Any]) -> None:
    """Check that as many arguments are given as declared."""
    if len(args) != len(declared):
        expected = ", ".join(f"{ctype} {parameter}" for ctype, parameter in declared)
        given = f"; given: {', '.join(map(_kind, args))}" if args else ""
        count = f"{len(args)} argument{'s' * (len(args) != 1)}"
        raise LaunchError(f"{name}: {count} given, {len(declared)} declared ({expected}){given}; give one for each")


_NUMBERS = (int, float, np.integer, np.floating, np.bool_)


def _checked(name: str, arguments: Sequence[Argument], index: int, value: Any, device: int) -> Any:
    argument, expected = arguments[index], ""
    if argument.kind == "pointer":
        if value is None:
            return 0
        expected = _no_pointer(argument, value, device)
        if not expected:
            return value.data_ptr()
        if isinstance(value, Tensor) and argument.dtype not in (None, value.dtype):
            raise WrongDtype(_refusal(name, arguments, index, shown(value), expected), value.dtype)
    elif argument.kind == "struct":
        if isinstance(value, (np.ndarray, np.void)) and value.nbytes == argument.size:
            return value.tobytes()
        if argument.accessor is not None and isinstance(value, Tensor):
            expected = argument.accessor.unfit(value) or (_elsewhere(device) if value.get_device() != device else "")
            if not expected:
                return argument.accessor.packed(value, value.data_ptr())
        elif isinstance(value, Pointers):
            expected = _no_pointers(argument, value, device)
            if not expected:
                return value.tobytes(argument.size)
        elif (half := DTYPES.get(unqualified(argument.ctype))) in HALF and isinstance(value, _NUMBERS):
            return torch.tensor(float(value), dtype=half).view(torch.int16).numpy().tobytes()
        else:
            expected = _no_map(argument, value, device) if isinstance(value, TensorMap) else _no_struct(argument, value)
            if not expected:
                return value.tobytes()
    elif argument.kind == "float":
        if not isinstance(value, _NUMBERS):
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
        expected = "an integer" + _as_integer(value)
    elif not argument.range[0] <= int(value) <= argument.range[1]:
        expected = f"an integer that fits {argument.ctype}"
    else:
        return int(value)
    raise LaunchError(_refusal(name, arguments, index, shown(value), expected))


def _as_integer(value: Any) -> str:
    if isinstance(value, Tensor):
        return ": its .item()" if value.numel() == 1 else ""
    return (
        ": divide with //, or convert it with int()"
        if isinstance(value, (float, np.floating)) and math.isfinite(value)
        else ""
    )


def _refusal(name: str, arguments: Sequence[Argument], index: int, found: str, expected: str) -> str:
    argument = arguments[index]
    return (
        f"{name}: argument {index + 1} of {len(arguments)}, parameter `{argument.ctype} {argument.name}` "
        f"got {found}, expected {expected}"
    )


def _no_pointer(argument: Argument, value: Any, device: int) -> str:
    """Describe what was expected instead of `value`; empty where it fits."""
    if not isinstance(value, Tensor):
        if isinstance(value, TensorMap):
            return f"a tensor or None; a tensor map is taken by value, as const __grid_constant__ TensorMap {argument.name}"
        if isinstance(value, Pointers):
            return (
                f"a tensor or None; pointers are taken by value in a struct, or as a table, `{argument.ctype} const*`"
            )
        return "a tensor or None" + tensor_of(value, argument.name)
    if argument.dtype is not None and value.dtype is not argument.dtype:
        other = f"launch with {argument.template}={value.dtype} for this tensor, or " if argument.template else ""
        return f"a tensor of {argument.dtype}: {other}{remedy(value, argument.dtype, argument.is_written)}"
    if value.get_device() != device:
        return _elsewhere(device)
    if value.layout is not torch.strided or (not value.data_ptr() and value.numel()):
        return "a tensor with storage of its own"
    if value.data_ptr() % argument.boundary:
        apart = "give its .clone(), or have the kernel read single elements"
        if argument.is_written:
            apart = (
                "the kernel writes to it, and a .clone() would take that in its place: allocate it as a tensor of its own, "
                "or have the kernel write single elements; where it is only read, declare the pointer const"
            )
        return (
            f"one whose address is a multiple of {argument.boundary}; this one begins at element {value.storage_offset()} "
            f"of its storage: {apart}"
        )
    return ""


def _no_map(argument: Argument, value: TensorMap, device: int) -> str:
    """Describe what was expected instead of a tensor map; empty where it fits."""
    if not argument.takes_map:
        return (
            f"a NumPy array of {argument.size} bytes; for a tensor map declare `const __grid_constant__ TensorMap "
            f"{argument.name}` with struct alignas(64) TensorMap {{ char bytes[128]; }};"
        )
    return _elsewhere(device) if value.get_device() != device else value.unfit()


def _no_pointers(argument: Argument, value: Pointers, device: int) -> str:
    """Describe what was expected instead of pointers by value; empty where they fit."""
    if SIZE * len(value) > argument.size or argument.align % SIZE:
        return (
            f"a NumPy array of {argument.size} bytes, which are {argument.size // SIZE} pointers; for {len(value)} declare "
            f"`struct {{ float* at[{len(value)}]; }}`, or take a table, `float* const* {argument.name}`"
        )
    return _elsewhere(device) if value.get_device() != device else value.unfit()


def _elsewhere(device: int) -> str:
    return f"a tensor on the device of the first one, {'cpu' if device < 0 else f'cuda:{device}'}"


def _no_struct(argument: Argument, value: Any) -> str:
    """Describe what was expected instead of `value`, and how a dtype of fields gets the layout that C has."""
    expected = f"a NumPy array of {argument.size} bytes"
    if DTYPES.get(unqualified(argument.ctype)) in HALF:
        expected = f"a number, or {expected}"
    if argument.accessor is not None:
        return f"a tensor of {argument.accessor.rank} dimensions, which the accessor is packed of"
    if argument.takes_map:
        expected += f", or a tensor map: cupyops.tensor_map({argument.name}, box)"
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


def tensor_of(value: Any, name: str) -> str:
    """Say how an array becomes a tensor, for the end of a message; empty where `value` is no array."""
    if not libraries.is_array(value):
        return ""
    return f": torch.from_{'numpy' if isinstance(value, np.ndarray) else 'dlpack'}({name}) is one"


def _kind(value: Any) -> str:
    return (
        f"tensor of {value.dtype}" if isinstance(value, Tensor) else "None" if value is None else type(value).__name__
    )


def shown(value: Any) -> str:
    """A value as messages show it: tensors and arrays without what is in them."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} on {value.device}"
    if isinstance(value, Pointers):
        return repr(value)
    if isinstance(value, int) and value.bit_length() > 1024:  # Python itself refuses to write out very long ones
        return f"an int of {value.bit_length()} bits"
    if libraries.is_array(value):
        return libraries.describe(value)
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:200] + '...'} ({type(value).__name__})"
