"""cvt to and from the formats of machine learning, one or two numbers at a time, and cvt.pack of integers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .finish import NAN32, relu32
from .formats import BF16, E4M3, E5M2, F16, TF32, Format, decode8, encode, narrow_bf16, narrow_f16, widen_f16
from .lanes import choose, packed
from .operation import Function, Instruction, Operation

_F64, _U8, _U16, _U32 = np.float64, np.uint8, np.uint16, np.uint32
_EIGHT = {"e4m3x2": E4M3, "e5m2x2": E5M2}
_SIXTEEN = {"f16": F16, "bf16": BF16}
_NEAREST = {"f16": narrow_f16, "bf16": narrow_bf16}
_PACKED = ("u16", "s16", "u2", "s2", "u4", "s4", "u8", "s8")


def alternative(instruction: Instruction) -> Operation:
    """A conversion that is not of one plain number into another."""
    if instruction.qualifiers[:1] == ("pack",):
        return _pack(instruction)
    forms: dict[tuple[str, ...], Callable[[Instruction], Operation]] = {
        ("f16", "f32"): _to_sixteen,
        ("bf16", "f32"): _to_sixteen,
        ("f16x2", "f32"): _to_sixteen,
        ("bf16x2", "f32"): _to_sixteen,
        ("tf32", "f32"): _to_tf32,
        **{(name, source): _to_eight for name in _EIGHT for source in ("f32", "f16x2")},
        **{("f16x2", name): _from_eight for name in _EIGHT},
    }
    form = forms.get(instruction.types)
    if form is None:
        raise instruction.unsupported()
    return form(instruction)


def _joined(high: Any, low: Any, bits: int, dtype: type) -> Any:
    """Two codes in one word."""
    return (high.astype(dtype) << dtype(bits)) | low


def _to_sixteen(instruction: Instruction) -> Operation:
    """float32 as float16 or bfloat16: one, or the first in the upper half of a word and the second in the lower."""
    two = instruction.types[0].endswith("x2")
    instruction.check(3 if two else 2, ("relu", "satfinite"), ("rn", "rz"))
    name = instruction.types[0].removesuffix("x2")
    one = _encoder(instruction, _SIXTEEN[name])
    if instruction.rounding == "rn" and not (instruction.has("relu") or instruction.has("satfinite")):
        one = _NEAREST[name]
    if not two:
        return Operation(one, ("f32",), ("u16",))
    return Operation(lambda a, b: _joined(one(a), one(b), 16, _U32), ("f32", "f32"), ("u32",))


def _encoder(instruction: Instruction, form: Format) -> Function:
    """float32 to codes of a format, with .relu and .satfinite."""
    rounding = "rna" if instruction.has("rna") else instruction.rounding
    finite, relu = instruction.has("satfinite"), instruction.has("relu")
    dtype = {8: _U8, 16: _U16}.get(form.width, _U32)

    def code(value: Any) -> Any:
        value = relu32(value) if relu else value
        return encode(value.astype(_F64), form, rounding, finite).astype(dtype)

    return code


def _to_tf32(instruction: Instruction) -> Operation:
    """float32 with the lower 13 bits of its significand rounded away; NaN is float32's canonical one."""
    instruction.check(2, ("relu", "satfinite"), ("rn", "rz", "rna"))
    if instruction.has("rna") and instruction.has("relu"):
        raise instruction.unsupported()
    code = _encoder(instruction, TF32)

    def rounded(value: Any) -> Any:
        return choose(np.isnan(value), NAN32.view(_U32), code(value) << _U32(13))

    return Operation(rounded, ("f32",), ("u32",))


def _to_eight(instruction: Instruction) -> Operation:
    """Two codes of eight bits in 16: of two float32 (the first goes to the upper half) or of two float16."""
    instruction.check(3 if instruction.type == "f32" else 2, ("relu",), ("rn",), ("satfinite",))
    one = _encoder(instruction, _EIGHT[instruction.types[0]])
    if instruction.type == "f32":
        return Operation(lambda a, b: _joined(one(a), one(b), 8, _U16), ("f32", "f32"), ("u16",))
    halves = packed(lambda codes: one(widen_f16(codes)), _U16, _U16)
    return Operation(halves, ("u32",), ("u16",))


def _from_eight(instruction: Instruction) -> Operation:
    """Two codes of eight bits as two float16."""
    instruction.check(2, ("relu",), ("rn",))
    form, relu = _EIGHT[instruction.type], instruction.has("relu")

    def codes(code: Any) -> Any:
        result = decode8(code, form)
        return narrow_f16(relu32(widen_f16(result))) if relu else result

    return Operation(packed(codes, _U8, _U32), ("u16",), ("u32",))


def _pack(instruction: Instruction) -> Operation:
    """Two s32 clamped to few bits, the second in the lowest; above them the lower bits of a third operand."""
    modifiers = instruction.modifiers
    if len(modifiers) < 4 or modifiers[1] != "sat" or modifiers[2] not in _PACKED:
        raise instruction.unsupported()
    name, size = modifiers[2], int(modifiers[2][1:])
    has_rest = size < 16
    if modifiers[3:] != (("s32", "b32") if has_rest else ("s32",)) or instruction.operands != 3 + has_rest:
        raise instruction.unsupported()
    least, most = (-(1 << size - 1), (1 << size - 1) - 1) if name[0] == "s" else (0, (1 << size) - 1)

    def field(value: Any) -> Any:
        clamped = np.minimum(np.maximum(value, np.int32(least)), np.int32(most))
        return clamped.view(_U32) & _U32((1 << size) - 1)

    def fields(a: Any, b: Any) -> Any:
        return _joined(field(a), field(b), size, _U32)

    if not has_rest:
        return Operation(fields, ("s32", "s32"), ("u32",))
    return Operation(lambda a, b, c: fields(a, b) | (c << _U32(2 * size)), ("s32", "s32", "u32"), ("u32",))
