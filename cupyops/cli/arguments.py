"""The kernel's arguments as the command line gives them: `1000`, `randn(32,64)`, `@weights.npy`, `null`."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._kernel.launch import signature
from ..errors import CupyopsError, InputError

# C names of element types beyond those of the library's own table.
_MORE = {
    "char": "int8",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "uint": "uint32",
    "uint32_t": "uint32",
    "unsigned short": "uint16",
    "uint16_t": "uint16",
    "unsigned long long": "uint64",
    "unsigned long": "uint64",
    "uint64_t": "uint64",
    "size_t": "uint64",
    "long long int": "int64",
}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
ELEMENTS = (*_FLOATS, "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
_MOST_BYTES = 1 << 32  # of one array: beyond it a typing error is likelier than a wish

_MAKER = re.compile(r"(\w+)\((.*)\)(?::(\w+))?")
_FILE = re.compile(rf"@(.+?)(?::({'|'.join(ELEMENTS)}))?")
FORMS = (
    "a number, true or false; randn(n), rand(n), zeros(n,m), ones(n), arange(n), full(n,value), randint(low,high,n), "
    "empty(n) (uninitialised), @file.npy, each with :float32 or another dtype where the C type does not say it; null"
)


@dataclass(eq=False)
class Array:
    """Array that a pointer argument points to. NumPy has no bfloat16: its bits are held as uint16."""

    name: str
    ctype: str
    element: str
    storage: np.ndarray
    initialized: bool = True

    def values(self) -> np.ndarray:
        """The elements as numbers: bfloat16 as float32."""
        if self.element != "bfloat16":
            return self.storage
        return torch.from_numpy(self.storage.view(np.int16)).view(torch.bfloat16).float().numpy()


def stored(values: np.ndarray, element: str) -> np.ndarray:
    """`values` as elements of that name, contiguous; bfloat16 by way of float32, rounded to nearest even."""
    with np.errstate(all="ignore"):
        if element != "bfloat16":
            return np.ascontiguousarray(values.astype(element))
        rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


def values(
    name: str, arguments: Sequence[signature.Argument], texts: Sequence[str], types: dict[str, str]
) -> list[Any]:
    """One value for each parameter: an `Array` or None for a pointer, a number, or bytes for a struct.

    `types` says what the template parameters stand for. Raises `InputError`.
    """
    if len(texts) != len(arguments):
        count = f"{len(arguments)} argument{'s' * (len(arguments) != 1)}"
        raise InputError(f"{name} takes {count}; {len(texts)} given with --arg: give one --arg for each")
    made = [_value(number, *pair, types) for number, pair in enumerate(zip(arguments, texts))]
    plain = [None if argument.kind == "pointer" else value for argument, value in zip(arguments, made)]
    try:
        checked = signature.checked(name, arguments, plain, -1)
    except CupyopsError as error:
        raise InputError(str(error)) from error
    return [value if argument.kind == "pointer" else plain for argument, value, plain in zip(arguments, made, checked)]


def usage(file: str, kernel: str, arguments: Sequence[signature.Argument], types: dict[str, str]) -> str:
    """The kernel's C signature, and a command line that would run it."""
    declared = ", ".join(f"{argument.ctype} {argument.name}" for argument in arguments)
    words = ["python", "-m", "cupyops", "simulate", file, kernel, "--grid", "4", "--block", "256"]
    for argument in arguments:
        words += ["--arg", _example(argument, types)]
    return f"signature: __global__ void {kernel}({declared})\nexample:   {shlex.join(words)}\n--arg:     {FORMS}"


def _example(argument: signature.Argument, types: dict[str, str]) -> str:
    if argument.kind == "pointer":
        element = element_of(argument, types)
        if "const" not in argument.ctype:
            return "empty(1024)" if element else "empty(1024):float32"
        if element is None:
            return "zeros(1024):float32"
        return "randn(1024)" if element in _FLOATS else "zeros(1024)"
    if argument.kind == "struct":
        return f"zeros({argument.size}):uint8" if _half(argument) is None else "1.0"
    return {"integer": "1024", "float": "1.0", "bool": "true"}[argument.kind]


# --- one argument ------------------------------------------------------------------------------------------------


def element_of(argument: signature.Argument, types: dict[str, str]) -> str | None:
    """Dtype that a pointer points to, or None where the C type does not tell."""
    if argument.dtype is not None:
        return str(argument.dtype).removeprefix("torch.")
    pointee = re.sub(r"\b(const|volatile)\b", "", argument.ctype.removesuffix("*")).strip()
    return _MORE.get(types.get(pointee, pointee))


def _half(argument: signature.Argument) -> str | None:
    """float16 or bfloat16 for a parameter of that type, which the PTX has as a struct of two bytes."""
    names = {"__half": "float16", "half": "float16", "__nv_bfloat16": "bfloat16"}
    return names.get(re.sub(r"\bconst\b", "", argument.ctype).strip())


def _value(number: int, argument: signature.Argument, text: str, types: dict[str, str]) -> Any:
    text = text.strip()
    try:
        if argument.kind == "pointer":
            return _pointer(number, argument, text, types)
        if argument.kind != "struct":
            return _number(text)
        if (element := _half(argument)) is not None:
            return stored(np.array(_number(text)), element)
        return _array(number, argument.name, text, None)[0]
    except (InputError, MemoryError, ValueError, OverflowError) as error:
        raise InputError(f"--arg {text!r} for `{argument.ctype} {argument.name}`: {error}") from error


def _pointer(number: int, argument: signature.Argument, text: str, types: dict[str, str]) -> Array | None:
    if text in ("null", "nullptr", "none", "None"):
        return None
    if not (_MAKER.fullmatch(text) or text.startswith("@")):
        raise InputError("a pointer takes an array, such as randn(1024), or null")
    declared = element_of(argument, types)
    free = declared is None or re.search(r"\bchar\*$", argument.ctype) and "signed" not in argument.ctype
    storage, element = _array(number, argument.name, text, declared)
    if not free and element != declared:
        raise InputError(f"it holds {element}, expected {declared}; {text.split(':')[0]}:{declared} converts it")
    return Array(argument.name, argument.ctype, element, storage, not text.startswith("empty("))


def _number(text: str) -> int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    for kind in (lambda text: int(text, 0), float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise InputError("expected a number, true or false")


def _array(number: int, name: str, text: str, element: str | None) -> tuple[np.ndarray, str]:
    """(storage, element name). The random numbers are the same in every run, and differ between parameters."""
    if text.startswith("@"):
        return _file(text, element)
    match = _MAKER.fullmatch(text)
    if match is None:
        raise InputError(f"expected one of: {FORMS}")
    maker, inside, suffix = match.groups()
    if maker not in _MAKERS:
        raise InputError(f"there is no {maker}(); there are {', '.join(_MAKERS)}")
    chosen = _element(suffix) or element
    if chosen is None:
        raise InputError(f"the C type does not say what it points to; write it behind: {text}:float32")
    generator = np.random.default_rng([number, *name.encode()])
    made = _MAKERS[maker](generator, chosen, _numbers(maker, inside))
    return stored(made, chosen), chosen


def _numbers(maker: str, inside: str) -> list[Any]:
    """Numbers between the parentheses; parentheses of a shape among them change nothing."""
    parts = [part.strip() for part in inside.replace("(", "").replace(")", "").split(",") if part.strip()]
    try:
        return [ast.literal_eval(part) for part in parts]
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{maker}() takes numbers, not {inside!r}; write some such as (4,8)") from error


def files(args: Iterable[str]) -> list[Path]:
    """Files that the arguments are read from."""
    return [Path(match.group(1)) for text in args if (match := _FILE.fullmatch(text)) is not None]


def _file(text: str, element: str | None) -> tuple[np.ndarray, str]:
    match = _FILE.fullmatch(text)
    path = Path(match.group(1)) if match is not None else Path()
    if match is None or not path.is_file():
        raise InputError(f"there is no file {path}; give the path of a .npy file")
    try:
        loaded = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path} is no .npy file: {error}; save it with numpy.save") from error
    if not isinstance(loaded, np.ndarray):
        raise InputError(f"{path} holds several arrays; save one with numpy.save")
    found = str(loaded.dtype)
    chosen = _element(match.group(2)) or ("bfloat16" if element == "bfloat16" and found == "float32" else found)
    if chosen not in ELEMENTS:
        raise InputError(f"{path} holds {found}, expected one of {', '.join(ELEMENTS)}")
    return stored(loaded, chosen), chosen


def _element(suffix: str | None) -> str | None:
    if suffix is not None and suffix not in ELEMENTS:
        raise InputError(f"{suffix!r} is no dtype; there are {', '.join(ELEMENTS)}")
    return suffix


# --- makers: of a generator, the element's name and the numbers between the parentheses -----------------------------


def _shape(dims: Sequence[Any], element: str) -> tuple[int, ...]:
    if not dims or not all(isinstance(extent, int) and not isinstance(extent, bool) and extent >= 0 for extent in dims):
        raise InputError(f"expected extents, such as (1024) or (32,64); got ({', '.join(map(str, dims))})")
    size = np.prod(dims, dtype=object) * 8
    if size > _MOST_BYTES:
        raise InputError(
            f"an array of {', '.join(map(str, dims))} elements is too large to simulate with; "
            f"expected at most {_MOST_BYTES:,} bytes"
        )
    return tuple(dims)


def _random(draw: str) -> Callable[..., np.ndarray]:
    def make(rng: np.random.Generator, element: str, numbers: list[Any]) -> np.ndarray:
        if element not in _FLOATS:
            raise InputError(f"random {element} numbers are made by randint(low,high,n); write that")
        return np.asarray(getattr(rng, draw)(_shape(numbers, element)))

    return make


def _randint(rng: np.random.Generator, element: str, numbers: list[Any]) -> np.ndarray:
    if len(numbers) < 3 or not numbers[0] < numbers[1]:
        raise InputError("expected randint(low,high,n) with low < high; high is left out")
    return rng.integers(numbers[0], numbers[1], _shape(numbers[2:], element))


def _full(rng: np.random.Generator, element: str, numbers: list[Any]) -> np.ndarray:
    if len(numbers) < 2:
        raise InputError("expected full(n,value) or full(n,m,value)")
    kind = np.float64 if isinstance(numbers[-1], float) else np.int64
    return np.full(_shape(numbers[:-1], element), numbers[-1], kind)


def _constant(value: int) -> Callable[..., np.ndarray]:
    return lambda rng, element, numbers: np.full(_shape(numbers, element), value)


def _arange(rng: np.random.Generator, element: str, numbers: list[Any]) -> np.ndarray:
    shape = _shape(numbers, element)
    return np.arange(int(np.prod(shape))).reshape(shape)


_MAKERS: dict[str, Callable[[np.random.Generator, str, list[Any]], np.ndarray]] = {
    "randn": _random("standard_normal"),
    "rand": _random("random"),
    "randint": _randint,
    "zeros": _constant(0),
    "ones": _constant(1),
    "full": _full,
    "arange": _arange,
    "empty": _constant(0),  # overwritten with a pattern when it is allocated
}
