"""C++'s types, and values of them as Python: conversions and arithmetic with C++'s results.

Integers keep the range in which they lie, so that the plain Python is written where it is the same: `n // 4` of a size, a
helper that rounds towards zero of an integer that may be negative. Where nothing is known the exact form is written.
"""

from __future__ import annotations

import ctypes
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

# how tightly Python binds what an expression ends with
ATOM, UNARY, TIMES, PLUS, SHIFT, BIT_AND, BIT_XOR, BIT_OR, COMPARE, NOT, AND, OR, CHOICE = range(13, 0, -1)


@dataclass(frozen=True)
class Type:
    """A C++ type.

    Attributes:
        kind: "int", "bool", "float", or what it is of PyTorch, CUDA or C++'s library: "tensor", "pointer", "dim3", "dtype",
            "options", "list", "tuple", "string", "status", ...
        bits: the width of a number.
        signed: whether an integer is signed.
        of: the types of its elements, of a list, a tuple or a pointer.
        name: the C++ name of what has no Python of its own, as a template parameter.
    """

    kind: str
    bits: int = 0
    signed: bool = True
    of: tuple[Type, ...] = ()
    name: str = ""

    @property
    def is_integer(self) -> bool:
        """True for an integer, or a truth value, which is one in arithmetic."""
        return self.kind in ("int", "bool")

    @property
    def is_number(self) -> bool:
        """True if C++ computes with it."""
        return self.kind in ("int", "bool", "float")

    @property
    def low(self) -> float:
        """The least value of an integer type."""
        return 0 if self.kind == "bool" or not self.signed else -(2 ** (self.bits - 1))

    @property
    def high(self) -> float:
        """The greatest value of an integer type."""
        return 1 if self.kind == "bool" else 2 ** (self.bits - self.signed) - 1

    def __str__(self) -> str:
        return self.name or self.kind


INT, LONG = Type("int", 32), Type("int", 64)
UINT, ULONG = Type("int", 32, False), Type("int", 64, False)
BOOL, FLOAT, DOUBLE = Type("bool", 1), Type("float", 32), Type("float", 64)
TENSOR, DIM3, DTYPE, OPTIONS = Type("tensor"), Type("dim3"), Type("dtype"), Type("options")
STRING, STATUS, VOID, DEVICE, NONE = Type("string"), Type("status"), Type("void"), Type("device"), Type("none")
SCALAR = Type("scalar")  # of a template parameter: a number, of a type that a launch knows
NUMBERS: Mapping[str, Type] = {
    "float": FLOAT, "double": DOUBLE, "bool": BOOL, "char": Type("int", 8), "signed char": Type("int", 8),
    "int": INT, "short": Type("int", 16), "long": LONG, "long long": LONG, "unsigned char": Type("int", 8, False),
    "unsigned": UINT, "unsigned short": Type("int", 16, False), "unsigned long": ULONG, "unsigned long long": ULONG,
    "int8_t": Type("int", 8), "int16_t": Type("int", 16), "int32_t": INT, "int64_t": LONG, "ptrdiff_t": LONG,
    "ssize_t": LONG, "uint8_t": Type("int", 8, False), "uint16_t": Type("int", 16, False), "uint32_t": UINT,
    "uint64_t": ULONG, "size_t": ULONG, "uint": UINT,
}  # fmt: skip
SIZE_LIMIT = 2**48  # no size, stride or number of elements of a tensor is larger


@dataclass(frozen=True)
class Value:
    """An expression in Python.

    Attributes:
        code: the Python.
        type: its C++ type.
        binds: how tightly the Python binds.
        low, high: the range of an integer.
        sized: whether it is computed of sizes of tensors and of integers of 32 bits: what such a number has beyond 32 bits
            is kept where C++ would lose it, and refused at the launch.
        lax: the Python where what takes it rounds it to its type itself, as a launch does.
        truth: what it is for certain, of a condition on CUDA's errors, which are exceptions here.
        checked: whether a launch checks this condition itself.
        loose: whether the Python has the truth of a bool alone, as `a and b` has.
        options: of TensorOptions, the Python of each keyword.
        element: the Python of the dtype that lies behind a pointer.
    """

    code: str
    type: Type
    binds: int = ATOM
    low: float = -math.inf
    high: float = math.inf
    sized: bool = False
    lax: str = ""
    truth: bool | None = None
    checked: bool = False
    loose: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    element: str = ""

    def at(self, binds: int) -> str:
        """The Python, in brackets where it binds less tightly than this."""
        return self.code if self.binds >= binds else f"({self.code})"


def whole(
    code: str,
    kind: Type = INT,
    binds: int = ATOM,
    low: float | None = None,
    high: float | None = None,
    sized: bool = False,
) -> Value:
    """An integer, whose range is that of its type where none is given."""
    least = kind.low if low is None else max(low, kind.low)
    most = kind.high if high is None else min(high, kind.high)
    return Value(code, kind, binds, least, most, sized)


def size(code: str) -> Value:
    """A size of a tensor."""
    return whole(code, LONG, low=0, high=SIZE_LIMIT, sized=True)


def number(value: float, kind: Type, code: str) -> Value:
    """A literal."""
    if kind.is_integer:
        return whole(code, kind, UNARY if code.startswith("-") else ATOM, value, value, sized=True)
    if kind == FLOAT and not _is_float(value):
        return Value(f"cpp.to_float({code})", kind, lax=code)
    return Value(code, kind, UNARY if code.startswith("-") else ATOM)


def _is_float(value: float) -> bool:
    return value != value or ctypes.c_float(value).value == value


def promoted(value: Value) -> Value:
    """An integer as arithmetic has it: at least of 32 bits."""
    if value.type.kind == "bool":
        code = f"bool({value.code})" if value.loose else value.code
        return replace(
            value, code=code, binds=ATOM if value.loose else value.binds, type=INT, low=0, high=1, loose=False
        )
    return replace(value, type=INT) if value.type.kind == "int" and value.type.bits < 32 else value


def common(a: Type, b: Type) -> Type:
    """The type in which C++ computes with two numbers."""
    if "float" in (a.kind, b.kind):
        return Type("float", max(one.bits for one in (a, b) if one.kind == "float"))
    if a.bits == b.bits:
        return a if not a.signed else b
    return a if a.bits > b.bits else b


def to_integer(value: Value, to: Type) -> Value:
    """An integer, converted to another type of integer."""
    if to.low <= value.low and value.high <= to.high:
        return replace(value, type=to)
    if value.low == value.high:  # one number, which is known
        known = (int(value.low) - int(to.low)) % 2**to.bits + int(to.low)
        return replace(number(known, to, str(known)), sized=False)
    if not to.signed:
        low, high = (value.low, value.high) if value.low >= 0 and value.high <= to.high else (0, to.high)
        return whole(
            f"{value.at(BIT_AND)} & {hex(2**to.bits - 1)}",
            to,
            BIT_AND,
            low,
            high,
            sized=value.sized and value.low >= 0,  # what has wrapped below 0 is no size any more
        )
    if value.sized and to.bits >= 32:
        return replace(value, type=to, low=max(value.low, to.low), high=min(value.high, to.high))
    made = Value(f"cpp.signed({value.code}, {to.bits})", to)
    return replace(made, low=to.low, high=to.high)


def converted(value: Value, to: Type) -> Value | None:
    """A number, converted as C++ does it when it is assigned; None where there is no such conversion."""
    of = value.type
    if of == to and not value.loose:
        return value
    if not of.is_number or not to.is_number:
        return None
    if to.kind == "bool":
        if of.kind == "bool":
            return Value(f"bool({value.code})", BOOL, low=0, high=1)
        return Value(f"{value.at(COMPARE + 1)} != 0", BOOL, COMPARE, 0, 1)
    if to.kind == "int":
        if of.kind == "float":
            return whole(f"int({value.code})", to)
        if of.kind == "bool":
            return whole(f"int(bool({value.code}))" if value.loose else f"int({value.code})", to, low=0, high=1)
        return to_integer(value, to)
    if of.kind == "float":
        if to.bits > of.bits:
            return replace(value, type=to, lax="")
        return Value(f"cpp.to_float({value.code})", FLOAT, lax=value.code)
    if to.bits == 64 or (value.low >= -(2**24) and value.high <= 2**24):
        return Value(f"float({value.code})", to)
    return Value(f"cpp.to_float({value.code})", FLOAT, lax=value.code)


def truth(value: Value) -> Value:
    """A condition: its Python is true or false as C++'s is."""
    if value.type.kind in ("bool", "int", "float", "status"):
        return value
    if value.type.kind in ("tensor", "pointer", "optional", "none"):
        return Value(f"{value.at(COMPARE + 1)} is not None", BOOL, COMPARE, 0, 1)
    raise ValueError(value.type.kind)


_INTEGERS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_BINDS = {"+": PLUS, "-": PLUS, "*": TIMES, "/": TIMES, "%": TIMES, "<<": SHIFT, ">>": SHIFT}
_BINDS |= {"&": BIT_AND, "^": BIT_XOR, "|": BIT_OR}
COMPARISONS = frozenset(("<", ">", "<=", ">=", "==", "!="))


def _sides(a: Value, b: Value, binds: int) -> tuple[str, str]:
    """The Python of both sides of an operator that binds to the left."""
    return a.at(binds), b.at(binds + 1)


def compared(sign: str, a: Value, b: Value) -> Value:
    """A comparison of two numbers."""
    a, b = _in_common_type(promoted(a), promoted(b))
    left, right = a.at(COMPARE + 1), b.at(COMPARE + 1)
    return Value(f"{left} {sign} {right}", BOOL, COMPARE, 0, 1)


def _in_common_type(a: Value, b: Value) -> tuple[Value, Value]:
    """Both sides in the type in which C++ computes with them, where that changes a value."""
    to = common(a.type, b.type)
    if to.kind == "int":
        return to_integer(a, to), to_integer(b, to)
    return _as_float(a, to), _as_float(b, to)


def _as_float(value: Value, to: Type) -> Value:
    """An integer beside a floating-point number: Python converts it by itself, to double."""
    if value.type.kind == "float":
        return value
    limit = 2**24 if to == FLOAT else 2**53
    if -limit <= value.low and value.high <= limit:
        return value
    if to == FLOAT:
        return Value(f"cpp.to_float({value.code})", to)
    return value if value.sized else Value(f"float({value.code})", to)


def computed(sign: str, a: Value, b: Value) -> Value:
    """`a sign b` of two numbers, by C++'s rules. Raises `ValueError` for what C++ does not have."""
    a, b = promoted(a), promoted(b)
    if sign in COMPARISONS:
        return compared(sign, a, b)
    if sign in ("<<", ">>"):
        return _shifted(sign, a, b)
    to = common(a.type, b.type)
    a, b = _in_common_type(a, b)
    if to.kind == "float":
        return _of_floats(sign, a, b, to)
    sized = any(one.sized and one.low != one.high for one in (a, b)) and all(
        one.sized or one.type.bits <= 32 for one in (a, b)
    )
    if sign in ("/", "%"):
        return replace(_divided(sign, a, b, to), sized=sized)
    left, right = _sides(a, b, _BINDS[sign])
    code = f"{left} {sign} {right}"
    if sign in "&|^":
        low, high = _bits(sign, a, b, to)
        return whole(code, to, _BINDS[sign], low, high, sized=sized)
    corners = [_INTEGERS[sign](x, y) for x in (a.low, a.high) for y in (b.low, b.high)]  # type: ignore[arg-type]
    low, high = min(corners), max(corners)
    made = Value(code, to, _BINDS[sign], low, high, sized=sized)
    if to.low <= low and high <= to.high:
        return made
    if not to.signed:
        return to_integer(made, to)
    return replace(made, low=max(low, to.low), high=min(high, to.high))  # beyond it C++ has no result


def _divided(sign: str, a: Value, b: Value, to: Type) -> Value:
    most = max(abs(a.low), abs(a.high))
    if a.low >= 0 and b.low >= 0:
        left, right = _sides(a, b, TIMES)
        if sign == "/":
            return whole(f"{left} // {right}", to, TIMES, a.low // max(b.high, 1), a.high // max(b.low, 1))
        return whole(f"{left} % {right}", to, TIMES, 0, min(a.high, max(b.high - 1, 0)))
    name = "cpp.quotient" if sign == "/" else "cpp.remainder"
    low = 0 if sign == "%" and a.low >= 0 else -most
    made = Value(f"{name}({a.code}, {b.code})", to)
    return replace(made, low=max(low, to.low), high=min(most, to.high))


def _bits(sign: str, a: Value, b: Value, to: Type) -> tuple[float, float]:
    if sign == "&" and (a.low >= 0 or b.low >= 0):
        return 0, min(one.high for one in (a, b) if one.low >= 0)
    if a.low >= 0 and b.low >= 0:
        return 0, 2 ** max(int(a.high).bit_length(), int(b.high).bit_length()) - 1
    return to.low, to.high


def _shifted(sign: str, a: Value, b: Value) -> Value:
    if not a.type.is_integer or not b.type.is_integer:
        raise ValueError(sign)
    left, right = _sides(a, b, SHIFT)
    code = f"{left} {sign} {right}"
    if sign == ">>":
        return whole(code, a.type, SHIFT, min(a.low, 0), max(a.high, 0))
    known = b.low == b.high and 0 <= b.low < 64
    by = 2 ** int(b.high) if known else 2**64
    made = Value(code, a.type, SHIFT, min(a.low * by, 0), max(a.high * by, 0))
    return to_integer(made, a.type)


def _of_floats(sign: str, a: Value, b: Value, to: Type) -> Value:
    if sign not in ("+", "-", "*", "/"):
        raise ValueError(sign)
    if sign == "/" and not _is_literal(b):
        code, binds = f"cpp.ratio({a.code}, {b.code})", ATOM
    else:
        left, right = _sides(a, b, _BINDS[sign])
        code, binds = f"{left} {sign} {right}", _BINDS[sign]
    if to == FLOAT:  # a product, sum or quotient of two floats in double, rounded once more, is that in float
        return Value(f"cpp.to_float({code})", FLOAT, lax=code)
    return Value(code, to, binds)


def _is_literal(value: Value) -> bool:
    """Return True if the value is written as a number other than 0."""
    found = re.fullmatch(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value.code)
    return found is not None and float(value.code) != 0


def unary(sign: str, a: Value) -> Value:
    """`-a`, `+a`, `~a`. Raises `ValueError` for what C++ does not have."""
    a = promoted(a)
    if sign == "+":
        return a
    if sign == "~":
        if not a.type.is_integer:
            raise ValueError(sign)
        made = Value(f"~{a.at(UNARY)}", a.type, UNARY, -a.high - 1, -a.low - 1)
    elif a.type.kind == "float":
        lax = f"-{a.lax}" if re.fullmatch(r"[\w.]+", a.lax) else ""
        return Value(f"-{a.at(UNARY)}", a.type, UNARY, lax=lax)
    else:
        made = Value(f"-{a.at(UNARY)}", a.type, UNARY, -a.high, -a.low, sized=a.sized)
    if not a.type.signed:
        return to_integer(made, a.type)
    return replace(made, low=max(made.low, a.type.low), high=min(made.high, a.type.high))
