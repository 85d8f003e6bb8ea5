"""Declaration of an operator, read from text such as `mylib::swish(T x, float beta = 1.0) -> T y`."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass

import torch

from .._kernel.kernel import FLOATING
from ..errors import InputError

# The types of tensors other than T, by the names that C, PyTorch and CUDA have for them.
TENSORS: dict[str, torch.dtype] = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
    "double": torch.float64,
    "float64": torch.float64,
    "bool": torch.bool,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int": torch.int32,
    "int32": torch.int32,
    "long long": torch.int64,
    "int64": torch.int64,
}
# The types of scalars: in C, and in Python.
SCALARS: dict[str, type] = {"float": float, "double": float, "int": int, "long long": int, "bool": bool}

NAMESPACE = "user"  # of a name that has none, before the module that it is defined in
RESERVED = frozenset({"T", "A", "n", "FORM", "axis", "dim", "keepdim", "saved", "needs_grad"})

_FORM = re.compile(r"\s*(?:(\w+)\s*::\s*)?(\w+)\s*\(([^()]*)\)\s*->([^()]*)", re.DOTALL)
_PART = re.compile(r"\s*(\w[\w\s]*?)\s*(\[\s*\])?\s+(\w+)\s*(?:=\s*(.*?)\s*)?", re.DOTALL)
_TRUTH = {"true": True, "false": False}
C_WORDS = re.compile(
    "alignas|alignof|and|and_eq|asm|auto|bitand|bitor|bool|break|case|catch|char|char16_t|char32_t|"
    "char8_t|class|co_await|co_return|co_yield|compl|concept|const|const_cast|consteval|constexpr|"
    "constinit|continue|decltype|default|delete|do|double|dynamic_cast|else|enum|explicit|export|extern|"
    "false|float|for|friend|goto|if|inline|int|long|mutable|namespace|new|noexcept|not|not_eq|nullptr|"
    "operator|or|or_eq|private|protected|public|register|reinterpret_cast|requires|return|short|signed|"
    "sizeof|static|static_assert|static_cast|struct|switch|template|this|thread_local|throw|true|try|"
    "typedef|typeid|typename|union|unsigned|using|virtual|void|volatile|wchar_t|while|xor|xor_eq"
)


@dataclass(frozen=True)
class Parameter:
    """A tensor (`dtype` None where it is T) or a scalar, of the C type `ctype` ("T", "float", "int" ...)."""

    name: str
    ctype: str
    is_tensor: bool
    dtype: torch.dtype | None = None
    default: float | int | bool | None = None

    @property
    def is_typed(self) -> bool:
        """True if it is of the operator's dtype T."""
        return self.ctype == "T"

    @property
    def is_floating(self) -> bool:
        """True for a tensor that has a gradient."""
        return self.is_tensor and (self.dtype is None or self.dtype.is_floating_point)


@dataclass(frozen=True)
class Declaration:
    """A signature. Inputs and scalars are in the order of the text, `parameters` is all of both."""

    name: str  # qualified: "user::swish"
    parameters: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]

    @property
    def short(self) -> str:
        """The name without its namespace."""
        return self.name.partition("::")[2]

    @property
    def tensors(self) -> tuple[Parameter, ...]:
        """The inputs, those of type T first: by the first one an operator knows its dtype and device."""
        found = [one for one in self.parameters if one.is_tensor]
        return tuple(sorted(found, key=lambda one: not one.is_typed))

    @property
    def scalars(self) -> tuple[Parameter, ...]:
        """The parameters by value."""
        return tuple(one for one in self.parameters if not one.is_tensor)

    @property
    def differentiable(self) -> tuple[Parameter, ...]:
        """The inputs that have a gradient, in the order of `tensors`."""
        return tuple(one for one in self.tensors if one.is_floating)

    @property
    def graded(self) -> tuple[Parameter, ...]:
        """The outputs that have one."""
        return tuple(one for one in self.outputs if one.is_floating)


def namespace_of(module: str) -> str:
    """The namespace of names without one: of each module its own, so that two may define the same."""
    return NAMESPACE if module == "__main__" else f"{NAMESPACE}_{re.sub(r'[^0-9A-Za-z_]', '_', module)}"


def parse(text: str, module: str = "__main__") -> Declaration:
    """Read a signature, defined in `module`. Raises `InputError`, which shows the part that cannot be read."""
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(f'signature is {text!r}, expected the form "name(T x, float scale = 1.0) -> T y"')
    namespace, name, inside, returned = match.groups()
    inputs = [_parameter(part, text) for part in inside.split(",") if part.strip()]
    outputs = [_output(part, text) for part in returned.split(",")]
    _check_names(text, name, [one.name for one in (*inputs, *outputs)])
    if not any(one.is_typed for one in inputs):
        raise InputError(
            f"{text}: no parameter is of type T; declare one, from which the operator takes its dtype and device"
        )
    defaults = [one.default is not None for one in inputs]
    if defaults != sorted(defaults):
        raise InputError(f"{text}: a parameter without a default stands after one that has one; move it before")
    return Declaration(f"{namespace or namespace_of(module)}::{name}", tuple(inputs), tuple(outputs))


def dtypes_of(asked: object) -> tuple[torch.dtype, ...]:
    """Dtypes that T may be: those asked for, or all that kernels are made for."""
    listed = FLOATING if asked is None else asked if isinstance(asked, (tuple, list)) else (asked,)
    if not listed or any(one not in FLOATING for one in listed):
        raise InputError(f"dtypes is {asked!r}, expected one of {', '.join(map(str, FLOATING))}")
    return tuple(listed)


def _parameter(part: str, text: str) -> Parameter:
    ctype, brackets, name, default = _split(part, text)
    if ctype == "T" or brackets:
        if default is not None:
            raise InputError(f"{text}: {name} is a tensor, which has no default; leave it out")
        dtype = _dtype(ctype, text)
        if dtype is not None and dtype.is_floating_point:
            raise InputError(
                f"{text}: {name} is a tensor of {ctype}; write T {name}, which stands for every floating-point dtype"
            )
        return Parameter(name, ctype, True, dtype)
    if ctype not in SCALARS:
        hint = f"; a tensor of integers is written {ctype}[] {name}" if ctype in TENSORS else ""
        raise InputError(f"{text}: {name} is of type {ctype!r}, expected T or one of {', '.join(SCALARS)}{hint}")
    return Parameter(name, ctype, False, default=None if default is None else _default(ctype, name, default, text))


def _output(part: str, text: str) -> Parameter:
    ctype, _, name, default = _split(part, text)
    if default is not None:
        raise InputError(f"{text}: the output {name} has no default; leave it out")
    return Parameter(name, ctype, True, _dtype(ctype, text))


def _split(part: str, text: str) -> tuple[str, str | None, str, str | None]:
    match = _PART.fullmatch(part)
    if match is None:
        raise InputError(f'{text}: cannot read {part.strip()!r}, expected "type name" or "type name = number"')
    ctype, brackets, name, default = match.groups()
    return " ".join(ctype.split()), brackets, name, default


def _dtype(ctype: str, text: str) -> torch.dtype | None:
    if ctype == "T":
        return None
    if ctype not in TENSORS:
        raise InputError(f"{text}: {ctype!r} is no type of a tensor, expected T or one of {', '.join(TENSORS)}")
    return TENSORS[ctype]


def _default(ctype: str, name: str, default: str, text: str) -> float | int | bool:
    kind = SCALARS[ctype]
    try:
        if kind is bool:
            return _TRUTH[default]
        return int(default, 0) if kind is int else float(default.removesuffix("f"))
    except (ValueError, KeyError):
        raise InputError(
            f"{text}: {default!r} is no default for {ctype} {name}; expected a number of that type"
        ) from None


def _check_names(text: str, name: str, names: list[str]) -> None:
    """The names are those of C variables and of Python arguments at once."""
    for one in (name, *names):
        if not one.isidentifier() or C_WORDS.fullmatch(one):
            raise InputError(f"{text}: {one!r} cannot be a name in C; choose another")
        if keyword.iskeyword(one):
            raise InputError(f"{text}: {one!r} is a word of Python's own, which no argument can be called by")
    for one in names:
        if one in RESERVED or one.startswith(("grad_", "_", "CUPYOPS_")) or one.endswith("_"):
            raise InputError(f"{text}: the name {one!r} is kept for what cupyops adds; choose another")
        if names.count(one) > 1:
            raise InputError(f"{text}: {one!r} is declared twice; rename one of the two")
