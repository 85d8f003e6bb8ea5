"""Rules of operators that compute each element by itself. What the functions mean is in cuda_src/compiled/elements.cuh."""

from __future__ import annotations

from typing import Any

import torch

from ..builder import Builder, Result
from ..size import Real, Size
from ..values import HALVES, Constant, Pointwise, Range, Value
from .numbers import promoted
from .registry import rule

aten, prims = torch.ops.aten, torch.ops.prims


def _overloads(name: str, *variants: str) -> list[Any]:
    packet = getattr(aten, name, None)
    return [getattr(packet, v) for v in variants if packet is not None and v in packet.overloads()]


# -- one operand: name in ATen -> name of the function in C. `HEAVY` ones are worth storing when many elements use them.
CHEAP = {"neg": "neg", "abs": "absolute", "relu": "relu", "sign": "sign", "sgn": "sign", "square": "square"}
ROUNDING = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"}
HEAVY = {
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "log": "log",
    "log2": "log2",
    "log10": "log10",
    "log1p": "log1p",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "tanh": "tanh",
    "erf": "erf",
    "erfc": "erfc",
    "sigmoid": "sigmoid",
    "reciprocal": "reciprocal",
    "asin": "asin",
    "acos": "acos",
    "atan": "atan",
    "sinh": "sinh",
    "cosh": "cosh",
    "asinh": "asinh",
    "acosh": "acosh",
    "atanh": "atanh",
    "silu": "silu",
    "lgamma": "lgamma",
    "erfinv": "erfinv",
}


def _unary(name: str, function: str, heavy: bool) -> None:
    @rule(*_overloads(name, "default"))
    def one(build: Builder, result: Result, x: Value) -> Any:
        if not result.dtype.is_floating_point and (name in ROUNDING or heavy):
            if name not in ROUNDING or x.dtype != result.dtype:
                return NotImplemented
            return build.pointwise(result, "{0}", [x])  # integers are round
        if result.dtype is torch.bool and name != "sgn":
            return NotImplemented
        return build.pointwise(result, f"{function}({{0}})", [x], heavy=heavy)


for _name, _function in {**CHEAP, **ROUNDING, **HEAVY}.items():
    _unary(_name, _function, heavy=_name in HEAVY)


def _predicate(name: str, function: str) -> None:
    @rule(*_overloads(name, "default"))
    def one(build: Builder, result: Result, x: Value) -> Any:
        return build.pointwise(result, f"{function}({{0}})", [x], x.dtype)


for _name, _function in {"isnan": "is_nan", "isinf": "is_inf", "signbit": "sign_bit"}.items():
    _predicate(_name, _function)


@rule(aten.logical_not.default)
def logical_not(build: Builder, result: Result, x: Value) -> Any:
    """True where x is zero."""
    return build.pointwise(result, "!{0}", [x], torch.bool)


@rule(aten.bitwise_not.default)
def bitwise_not(build: Builder, result: Result, x: Value) -> Any:
    """Complement; of bool its opposite."""
    return build.pointwise(result, "!{0}" if result.dtype is torch.bool else "~{0}", [x])


# -- two operands ------------------------------------------------------------------------------------------------------


def _binary(
    names: tuple[str, ...], text: str, *, integers: bool = True, floats: bool = True, heavy: bool = False
) -> None:
    overloads = [o for n in names for o in _overloads(n, "default", "Tensor", "Scalar", "Tensor_Scalar")]

    @rule(*overloads)
    def two(build: Builder, result: Result, x: Any, other: Any) -> Any:
        floating = result.dtype.is_floating_point
        if (floating and not floats) or (not floating and not integers):
            return NotImplemented
        return build.pointwise(result, text, [x, other], heavy=heavy)


_binary(("maximum",), "maximum({0}, {1})")
_binary(("minimum",), "minimum({0}, {1})")
_binary(("fmax",), "fmaximum({0}, {1})")
_binary(("fmin",), "fminimum({0}, {1})")
_binary(("atan2",), "atan2({0}, {1})", integers=False, heavy=True)
_binary(("hypot",), "hypot({0}, {1})", integers=False, heavy=True)
_binary(("copysign",), "copysign({0}, {1})", integers=False)
_binary(("nextafter",), "nextafter({0}, {1})", integers=False)
_binary(("bitwise_and", "__and__"), "({0} & {1})", floats=False)
_binary(("bitwise_or", "__or__"), "({0} | {1})", floats=False)
_binary(("bitwise_xor", "__xor__"), "({0} ^ {1})", floats=False)
_binary(("bitwise_left_shift", "__lshift__"), "shift_left({0}, {1})", floats=False)
_binary(("bitwise_right_shift", "__rshift__"), "shift_right({0}, {1})", floats=False)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(build: Builder, result: Result, x: Any, other: Any) -> Any:
    """Product, which wraps for integers."""
    return build.pointwise(result, "mul({0}, {1})", [x, other])


@rule(aten.add.Tensor, aten.add.Scalar)
def add(build: Builder, result: Result, x: Any, other: Any, alpha: Any = 1) -> Any:
    """x + alpha * other."""
    if alpha == 1:
        return build.pointwise(result, "add({0}, {1})", [x, other])
    return build.pointwise(result, "add({0}, mul({1}, {2}))", [x, other, alpha])


@rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(build: Builder, result: Result, x: Any, other: Any, alpha: Any = 1) -> Any:
    """x - alpha * other; of truth values PyTorch's error, which FakeTensors do not raise."""
    if any(isinstance(one, bool) or getattr(one, "dtype", None) is torch.bool for one in (x, other)):
        return NotImplemented
    if alpha == 1:
        return build.pointwise(result, "sub({0}, {1})", [x, other])
    return build.pointwise(result, "sub({0}, mul({1}, {2}))", [x, other, alpha])


@rule(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(build: Builder, result: Result, x: Any, other: Any, alpha: Any = 1) -> Any:
    """other - alpha * x."""
    return sub(build, result, other, x, alpha)


def _nonzero(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and number != 0


@rule(aten.div.Tensor, aten.div.Scalar)
def div(build: Builder, result: Result, x: Any, other: Any) -> Any:
    """True division. By a number, halves multiply with its reciprocal, as eager does on CUDA."""
    if not result.dtype.is_floating_point:
        return NotImplemented
    if isinstance(other, (Size, Real)) and result.dtype in HALVES:
        return build.pointwise(result, "mul({0}, reciprocal({1}))", [x, other])
    if _nonzero(other) and result.dtype in HALVES:
        return build.pointwise(result, "mul({0}, {1})", [x, 1 / other])
    return build.pointwise(result, "div({0}, {1})", [x, other])


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(build: Builder, result: Result, x: Any, other: Any, rounding_mode: Any) -> Any:
    """Division rounded to an integer."""
    if rounding_mode is None:
        return div(build, result, x, other)
    if not result.dtype.is_floating_point and not _nonzero(other):
        return NotImplemented  # by zero: PyTorch's error
    function = {"floor": "floor_divide", "trunc": "trunc_divide"}[rounding_mode]
    return build.pointwise(result, f"{function}({{0}}, {{1}})", [x, other], heavy=True)


@rule(aten.floor_divide.default, *_overloads("floor_divide", "Scalar"))
def floor_divide(build: Builder, result: Result, x: Any, other: Any) -> Any:
    """Division rounded down."""
    return div_mode(build, result, x, other, "floor")


@rule(aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(build: Builder, result: Result, x: Any, other: Any) -> Any:
    """Remainder with the sign of the divisor."""
    if not result.dtype.is_floating_point and not _nonzero(other):
        return NotImplemented
    return build.pointwise(result, "remainder_of({0}, {1})", [x, other], heavy=True)


@rule(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(build: Builder, result: Result, x: Any, other: Any) -> Any:
    """Remainder with the sign of the dividend."""
    if not result.dtype.is_floating_point and not _nonzero(other):
        return NotImplemented
    return build.pointwise(result, "fmod_of({0}, {1})", [x, other], heavy=True)


@rule(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(build: Builder, result: Result, x: Any, exponent: Any) -> Any:
    """x to a power; small ones as eager writes them out."""
    if not result.dtype.is_floating_point:
        return build.pointwise(result, "mul({0}, {0})", [x]) if _is(exponent, 2) else NotImplemented
    written = {0.5: "sqrt({0})", 2: "mul({0}, {0})", 3: "mul(mul({0}, {0}), {0})", -0.5: "rsqrt({0})"}
    written |= {-1: "reciprocal({0})", -2: "reciprocal(mul({0}, {0}))", 1: "{0}"}
    for number, text in written.items():
        if _is(exponent, number):
            return build.pointwise(result, text, [x], heavy=number not in (1, 2, 3))
    return build.pointwise(result, "pow({0}, {1})", [x, exponent], heavy=True)


def _is(exponent: Any, number: float) -> bool:
    return isinstance(exponent, (int, float)) and exponent == number


# -- comparisons and logic ---------------------------------------------------------------------------------------------


def as_stored(build: Builder, x: Any) -> Any:
    """Round a half type as reading it from memory would, so that comparisons give the same everywhere."""
    if isinstance(x, Value) and x.dtype in HALVES and x.store is None and isinstance(x, Pointwise) and not x.rounds:
        found = Pointwise("{0}", [build.used(x, x.shape)], x.shape, x.dtype, rounds=True)
        found.meta, found.strides = x.meta, x.strides
        return found
    return x


def _comparison(name: str, operator: str) -> None:
    @rule(*_overloads(name, "Tensor", "Scalar"))
    def compare(build: Builder, result: Result, x: Any, other: Any) -> Any:
        dtype = promoted([x, other])
        operands = [as_stored(build, one) for one in (x, other)]
        if dtype in HALVES:  # a number is compared as a half
            plain = [float(one) if isinstance(one, (Size, Real)) else one for one in operands]
            operands = [one if isinstance(one, Value) else torch.tensor(one, dtype=dtype).item() for one in plain]
        return build.pointwise(result, f"({{0}} {operator} {{1}})", operands, dtype)


for _name, _operator in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _comparison(_name, _operator)


def _logic(name: str, text: str) -> None:
    @rule(*_overloads(name, "default"))
    def logic(build: Builder, result: Result, x: Any, other: Any) -> Any:
        return build.pointwise(result, text, [x, other], torch.bool)


_logic("logical_and", "({0} && {1})")
_logic("logical_or", "({0} || {1})")
_logic("logical_xor", "({0} != {1})")


@rule(*_overloads("where", "self", "ScalarSelf", "ScalarOther", "Scalar"))
def where(build: Builder, result: Result, condition: Any, x: Any, other: Any) -> Any:
    """x where the condition holds, else other."""
    return build.pointwise(result, "({0} ? {1} : {2})", [condition, x, other], [torch.bool, result.dtype, result.dtype])


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(build: Builder, result: Result, x: Any, mask: Any, value: Any) -> Any:
    """`value` where the mask holds, else x."""
    return where(build, result, mask, value, x)


def _clamped(build: Builder, result: Result, x: Any, low: Any, high: Any) -> Any:
    text, operands = "{0}", [x]
    for function, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            text = f"{function}({text}, {{{len(operands)}}})"
            operands.append(bound)
    return build.pointwise(result, text, operands)


@rule(aten.clamp.default, aten.clamp.Tensor)
def clamp(build: Builder, result: Result, x: Any, min: Any = None, max: Any = None) -> Any:
    """x between bounds; NaN stays."""
    return _clamped(build, result, x, min, max)


@rule(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(build: Builder, result: Result, x: Any, min: Any) -> Any:
    """x, at least `min`."""
    return _clamped(build, result, x, min, None)


@rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(build: Builder, result: Result, x: Any, max: Any) -> Any:
    """x, at most `max`."""
    return _clamped(build, result, x, None, max)


# -- activations and their gradients -----------------------------------------------------------------------------------


@rule(aten.gelu.default)
def gelu(build: Builder, result: Result, x: Value, approximate: str = "none") -> Any:
    """x times the normal distribution function, or its approximation by tanh."""
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    return build.pointwise(result, f"{name}({{0}})", [x], heavy=True)


@rule(aten.gelu_backward.default)
def gelu_backward(build: Builder, result: Result, grad_output: Value, x: Value, approximate: str = "none") -> Any:
    """Gradient of gelu."""
    name = "gelu_tanh_gradient" if approximate == "tanh" else "gelu_gradient"
    return build.pointwise(result, f"({{0}} * {name}({{1}}))", [grad_output, x], heavy=True)


@rule(aten.silu_backward.default)
def silu_backward(build: Builder, result: Result, grad_output: Value, x: Value) -> Any:
    """Gradient of silu."""
    return build.pointwise(result, "({0} * silu_gradient({1}))", [grad_output, x], heavy=True)


@rule(aten.sigmoid_backward.default)
def sigmoid_backward(build: Builder, result: Result, grad_output: Value, output: Value) -> Any:
    """Gradient of sigmoid from its result."""
    return build.pointwise(result, "({0} * ((1 - {1}) * {1}))", [grad_output, output])


@rule(aten.tanh_backward.default)
def tanh_backward(build: Builder, result: Result, grad_output: Value, output: Value) -> Any:
    """Gradient of tanh from its result."""
    return build.pointwise(result, "({0} * (1 - {1} * {1}))", [grad_output, output])


@rule(aten.threshold_backward.default)
def threshold_backward(build: Builder, result: Result, grad_output: Value, x: Value, threshold: Any) -> Any:
    """Gradient of relu: 0 where x is at most the threshold."""
    return build.pointwise(
        result,
        "({1} <= {2} ? 0 : {0})",
        [grad_output, as_stored(build, x), threshold],
        [grad_output.dtype, x.dtype, x.dtype],
    )


# -- casts, copies and constants ---------------------------------------------------------------------------------------


def converted(build: Builder, result: Result, x: Any, *, rounds: bool) -> Any:
    """x in another dtype. `rounds`: to a half, even where no kernel stores it."""
    if not isinstance(x, Value):
        return NotImplemented
    widens = x.dtype.itemsize < result.dtype.itemsize and x.shape == result.shape
    rounds = rounds and result.dtype in HALVES and x.dtype != result.dtype
    return build.pointwise(result, "{0}", [x], x.dtype, widens=widens, rounds=rounds)


@rule(aten._to_copy.default)
def to_copy(build: Builder, result: Result, x: Any) -> Any:
    """A copy in another dtype. One that the user wrote rounds; one of a decomposition need not."""
    original = build.node.meta.get("original_aten")  # by name: the partitioner copies overloads
    written = original is None or str(original).startswith("aten._to_copy")
    return converted(build, result, x, rounds=written)


@rule(prims.convert_element_type.default)
def convert_element_type(build: Builder, result: Result, a: Any) -> Any:
    """A cast of a decomposition."""
    return converted(build, result, a, rounds=False)


@rule(aten.clone.default)
def clone(build: Builder, result: Result, x: Any) -> Any:
    """A copy."""
    return converted(build, result, x, rounds=False)


@rule(aten.copy.default)
def copy(build: Builder, result: Result, x: Any, src: Any) -> Any:
    """`src`, in the shape and dtype of x."""
    if not isinstance(src, Value):
        return NotImplemented
    return build.pointwise(result, "{0}", [src], src.dtype, rounds=src.dtype != result.dtype and result.dtype in HALVES)


def _constant(number: Any, result: Result) -> Any:
    if not isinstance(number, (bool, int, float)):
        return NotImplemented
    if not result.dtype.is_floating_point and result.dtype is not torch.bool:
        limits = torch.iinfo(result.dtype)
        if not limits.min <= number <= limits.max:  # NaN, too
            return NotImplemented
    return Constant(number, result.shape, result.dtype)


@rule(aten.full.default, aten.full_like.default, aten.new_full.default)
def full(build: Builder, result: Result, fill_value: Any, x: Any = None) -> Any:
    """One number throughout."""
    return _constant(fill_value, result)


@rule(aten.scalar_tensor.default)
def scalar_tensor(build: Builder, result: Result, s: Any) -> Any:
    """A tensor of no dimensions."""
    return _constant(s, result)


@rule(aten.fill.Scalar)
def fill(build: Builder, result: Result, x: Any, value: Any) -> Any:
    """One number throughout."""
    return _constant(value, result)


def _filled(number: int, *names: str) -> None:
    @rule(*(overload for name in names for overload in _overloads(name, "default")))
    def filled(build: Builder, result: Result, x: Any = None) -> Any:
        return Constant(number, result.shape, result.dtype)


_filled(0, "zeros", "zeros_like", "new_zeros")
_filled(1, "ones", "ones_like", "new_ones")


@rule(*_overloads("arange", "default", "start", "start_step"))
def arange(build: Builder, result: Result, end: Any, start: Any = 0, step: Any = 1) -> Any:
    """start, start + step, ... below end."""
    if not all(isinstance(one, (int, float, Size, Real)) for one in (start, step)):
        return NotImplemented
    return Range(start, step, result.shape, result.dtype)


@rule(prims.iota.default)
def iota(build: Builder, result: Result, length: Any, start: Any, step: Any) -> Any:
    """start + step * i."""
    return Range(start, step, result.shape, result.dtype)
