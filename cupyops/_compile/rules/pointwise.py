"""Rules of operators that compute each element by itself. What the functions mean is in cuda_src/compiled/elements.cuh."""

from __future__ import annotations

from typing import Any

import torch

from ..builder import Builder, Result, rule
from ..size import Real, Size
from ..values import HALVES, Buffer, Constant, Pointwise, Range, Value, broadcast, is_dense
from .numbers import promoted

aten, prims = torch.ops.aten, torch.ops.prims


def _overloads(names: str, *variants: str) -> list[Any]:
    """Overloads of operators, those that this PyTorch has."""
    packets = [getattr(aten, name, None) for name in names.split()]
    return [getattr(packet, v) for packet in packets if packet is not None for v in variants if v in packet.overloads()]


# -- one operand: name in ATen -> name of the function in C. `HEAVY` ones are worth storing when many elements use them.
CHEAP = {"neg": "neg", "abs": "absolute", "relu": "relu", "sign": "sign", "sgn": "sign", "square": "square"}
ROUNDING = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"}
PREDICATES = {"isnan": "is_nan", "isinf": "is_inf", "signbit": "sign_bit"}
HEAVY = """
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan tanh erf erfc sigmoid reciprocal asin acos atan sinh cosh
    asinh acosh atanh silu lgamma erfinv
"""


def _unary(name: str, function: str) -> None:
    heavy = name in HEAVY.split()

    @rule(*_overloads(name, "default"))
    def one(build: Builder, result: Result, x: Value) -> Any:
        if name in PREDICATES:
            return build.pointwise(result, f"{function}({{0}})", [x], x.dtype)
        if not result.dtype.is_floating_point and (name in ROUNDING or heavy):
            if name not in ROUNDING or x.dtype != result.dtype:
                return NotImplemented
            return build.pointwise(result, "{0}", [x])  # integers are round
        if result.dtype is torch.bool and name != "sgn":
            return NotImplemented
        return build.pointwise(result, f"{function}({{0}})", [x], heavy=heavy)


for _name, _function in {**CHEAP, **ROUNDING, **PREDICATES, **{name: name for name in HEAVY.split()}}.items():
    _unary(_name, _function)


@rule(aten.bitwise_not.default)
def bitwise_not(build: Builder, result: Result, x: Value) -> Any:
    """Complement; of bool its opposite."""
    return build.pointwise(result, "!{0}" if result.dtype is torch.bool else "~{0}", [x])


# -- expressions of all arguments --------------------------------------------------------------------------------------


def _expression(
    names: str, text: str, compute: Any = None, *, integers: bool = True, floats: bool = True, heavy: bool = False
) -> None:
    @rule(*_overloads(names, "default", "Tensor", "Scalar", "Tensor_Scalar"))
    def computed(build: Builder, result: Result, **operands: Any) -> Any:
        if not (floats if result.dtype.is_floating_point else integers):
            return NotImplemented
        return build.pointwise(result, text, list(operands.values()), compute, heavy=heavy)


_expression("mul", "mul({0}, {1})")
_expression("maximum", "maximum({0}, {1})")
_expression("minimum", "minimum({0}, {1})")
_expression("fmax", "fmaximum({0}, {1})")
_expression("fmin", "fminimum({0}, {1})")
_expression("atan2", "atan2({0}, {1})", integers=False, heavy=True)
_expression("hypot", "hypot({0}, {1})", integers=False, heavy=True)
_expression("copysign", "copysign({0}, {1})", integers=False)
_expression("nextafter", "nextafter({0}, {1})", integers=False)
_expression("bitwise_and __and__", "({0} & {1})", floats=False)
_expression("bitwise_or __or__", "({0} | {1})", floats=False)
_expression("bitwise_xor __xor__", "({0} ^ {1})", floats=False)
_expression("bitwise_left_shift __lshift__", "shift_left({0}, {1})", floats=False)
_expression("bitwise_right_shift __rshift__", "shift_right({0}, {1})", floats=False)
_expression("logical_not", "!{0}", torch.bool)
_expression("logical_and", "({0} && {1})", torch.bool)
_expression("logical_or", "({0} || {1})", torch.bool)
_expression("logical_xor", "({0} != {1})", torch.bool)
_expression("silu_backward", "({0} * silu_gradient({1}))", heavy=True)
_expression("sigmoid_backward", "({0} * ((1 - {1}) * {1}))")  # of the result, as that of tanh
_expression("tanh_backward", "({0} * (1 - {1} * {1}))")


# -- two operands ------------------------------------------------------------------------------------------------------


def _sum_or_difference(name: str) -> None:
    @rule(*_overloads(name, "Tensor", "Scalar"))
    def computed(build: Builder, result: Result, x: Any, other: Any, alpha: Any = 1) -> Any:
        truth = any(isinstance(one, bool) or getattr(one, "dtype", None) is torch.bool for one in (x, other))
        if name == "sub" and truth:
            return NotImplemented  # PyTorch's error, which FakeTensors do not raise
        if alpha == 1:
            return build.pointwise(result, f"{name}({{0}}, {{1}})", [x, other])
        return build.pointwise(result, f"{name}({{0}}, mul({{1}}, {{2}}))", [x, other, alpha])


_sum_or_difference("add")
_sum_or_difference("sub")


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
def div_mode(build: Builder, result: Result, x: Any, other: Any, rounding_mode: Any = None) -> Any:
    """Division rounded to an integer."""
    return QUOTIENTS[rounding_mode](build, result, x, other)


def _whole(names: str, function: str) -> Any:
    """Quotient or remainder of a division to an integer."""

    @rule(*_overloads(names, "default", "Tensor", "Scalar"))
    def divided(build: Builder, result: Result, x: Any, other: Any) -> Any:
        if not result.dtype.is_floating_point and not _nonzero(other):
            return NotImplemented  # by zero: PyTorch's error
        return build.pointwise(result, f"{function}({{0}}, {{1}})", [x, other], heavy=True)

    return divided


QUOTIENTS = {None: div, "floor": _whole("floor_divide", "floor_divide"), "trunc": _whole("", "trunc_divide")}
_whole("remainder", "remainder_of")  # with the sign of the divisor
_whole("fmod", "fmod_of")  # with the sign of the dividend


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
        found = Pointwise("{0}", [build.used(x)], x.shape, x.dtype, rounds=True)
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


@rule(*_overloads("where", "self", "ScalarSelf", "ScalarOther", "Scalar"))
def where(build: Builder, result: Result, condition: Any, x: Any, other: Any) -> Any:
    """x where the condition holds, else other."""
    return build.pointwise(result, "({0} ? {1} : {2})", [condition, x, other], [torch.bool, result.dtype, result.dtype])


@rule(*_overloads("clamp clamp_min clamp_max", "default", "Tensor"))
def clamp(build: Builder, result: Result, x: Any, min: Any = None, max: Any = None) -> Any:
    """x between bounds; NaN stays."""
    text, operands = "{0}", [x]
    for function, bound in (("maximum", min), ("minimum", max)):
        if bound is not None:
            text = f"{function}({text}, {{{len(operands)}}})"
            operands.append(bound)
    return build.pointwise(result, text, operands)


# -- activations and their gradients -----------------------------------------------------------------------------------


GELU = {"none": "gelu", "tanh": "gelu_tanh"}


@rule(aten.gelu.default)
def gelu(build: Builder, result: Result, x: Value, approximate: str = "none") -> Any:
    """x times the normal distribution function, or its approximation by tanh."""
    return build.pointwise(result, f"{GELU[approximate]}({{0}})", [x], heavy=True)


@rule(aten.gelu_backward.default)
def gelu_backward(build: Builder, result: Result, grad_output: Value, x: Value, approximate: str = "none") -> Any:
    """Gradient of gelu."""
    return build.pointwise(result, f"({{0}} * {GELU[approximate]}_gradient({{1}}))", [grad_output, x], heavy=True)


@rule(aten.threshold_backward.default)
def threshold_backward(build: Builder, result: Result, grad_output: Value, x: Value, threshold: Any) -> Any:
    """Gradient of relu: 0 where x is at most the threshold."""
    operands, compute = [grad_output, as_stored(build, x), threshold], [grad_output.dtype, x.dtype, x.dtype]
    return build.pointwise(result, "({1} <= {2} ? 0 : {0})", operands, compute)


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


@rule(aten.clone.default, aten.lift_fresh_copy.default, prims.convert_element_type.default)
def clone(build: Builder, result: Result, x: Any = None, a: Any = None) -> Any:
    """A copy, or a cast of a decomposition."""
    return converted(build, result, a if x is None else x, rounds=False)


@rule(aten.copy.default)
def copy(build: Builder, result: Result, x: Any, src: Any) -> Any:
    """`src`, in the shape and dtype of x."""
    return converted(build, result, src, rounds=True)


@rule(aten.copy_.default)
def copy_(build: Builder, result: Result, x: Value, src: Any, non_blocking: bool = False) -> Any:
    """Overwrite an input."""
    if not isinstance(src, Value) or not isinstance(x, Buffer) or x.unit is not None or not is_dense(x):
        return NotImplemented
    build.write(x, converted(build, result, broadcast(src, x.shape), rounds=False))
    return x


@rule(aten.full.default, aten.full_like.default, aten.new_full.default, aten.fill.Scalar, aten.scalar_tensor.default)
def full(
    build: Builder, result: Result, x: Any = None, fill_value: Any = None, value: Any = None, s: Any = None
) -> Any:
    """One number throughout."""
    number = next((one for one in (fill_value, value, s) if one is not None), None)
    if not isinstance(number, (bool, int, float)):
        return NotImplemented
    if not result.dtype.is_floating_point and result.dtype is not torch.bool:
        limits = torch.iinfo(result.dtype)
        if not limits.min <= number <= limits.max:  # NaN, too
            return NotImplemented
    return Constant(number, result.shape, result.dtype)


def _filled(number: int, names: str) -> None:
    @rule(*_overloads(names, "default"))
    def filled(build: Builder, result: Result, x: Any = None) -> Any:
        return Constant(number, result.shape, result.dtype)


_filled(0, "zeros zeros_like")
_filled(1, "ones ones_like")


@rule(*_overloads("arange", "default", "start", "start_step"), prims.iota.default)
def arange(build: Builder, result: Result, end: Any = None, length: Any = None, start: Any = 0, step: Any = 1) -> Any:
    """start, start + step, ..."""
    if not all(isinstance(one, (int, float, Size, Real)) for one in (start, step)):
        return NotImplemented
    return Range(start, step, result.shape, result.dtype)
