"""The values of translated C: their types, what those are in PyTorch, and C's functions there.

In what is written here `c_` is the module functions.py: no name of a signature has an underscore at its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# The types of values, each holding those before it; "A" is the type computed in. What each is in PyTorch.
DTYPES = {"bool": "c_.torch.bool", "int": "c_.torch.int32", "long long": "c_.torch.int64"}
DTYPES |= {"A": "A", "double": "c_.torch.float64"}
RANK = {ctype: rank for rank, ctype in enumerate(DTYPES)}
SPELLED = {
    "A": "A",
    "T": "A",
    "double": "double",
    "bool": "bool",
    "_Bool": "bool",
    "int": "int",
    "int32_t": "int",
    "int64_t": "long long",
    "long": "long long",
    "long int": "long long",
    "long long": "long long",
    "long long int": "long long",
}


def _of_torch(*names: str) -> dict[str, str]:
    return {name: f"c_.torch.{name}" for name in names}


# C's functions in PyTorch, by what they take and give: of one or two floating numbers a floating one; of a floating one a
# bool; of two numbers of any type one of it.
FLOATING = (
    _of_torch("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin")
    | _of_torch("acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "sigmoid")
    | _of_torch("floor", "ceil", "trunc")
    | {"rint": "c_.torch.round", "round": "c_.rounded", "fabs": "c_.torch.abs", "exp10": "c_.exp10"}
    | {"normcdf": "c_.torch.special.ndtr"}
)
FLOATING_TWO = _of_torch("pow", "fmax", "fmin", "atan2", "fmod", "hypot", "copysign")
TRUTH = _of_torch("isnan", "isinf", "isfinite", "signbit")
ANY_TWO = {"max": "c_.torch.maximum", "min": "c_.torch.minimum"}
FORMS = FLOATING | FLOATING_TWO | TRUTH | ANY_TWO | {"abs": "c_.torch.abs"}
KNOWN = frozenset({*FORMS, "fma"})

# Advice of errors about C that has no translation.
GIVE = "give reference=, a Python function of the same parameters"


@dataclass(frozen=True)
class Value:
    """A Python expression of a C type; a literal is a Python number, everything else a tensor."""

    code: str
    ctype: str
    is_literal: bool = False


def literal(number: float | int | bool, ctype: str) -> Value:
    """A Python number as a value."""
    code = repr(number)
    return Value(re.sub("inf|nan", r"c_.\g<0>", code) if isinstance(number, float) else code, ctype, True)


@dataclass
class Variable:
    """A name of C: its type, and the Python name of its current value; None before the first assignment."""

    ctype: str
    value: Value | None


Scope = dict[str, Variable]
