"""Float instructions and conversions that PTX defines to the bit, and those that it leaves to an approximation."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .case import Section
from .values import dense, floats, integers, packed, rounding

_ROUNDINGS = ("rn", "rz", "rm", "rp")
_LETTER = {"f32": "r", "f64": "l", "f16": "h", "bf16": "h", "f16x2": "r", "bf16x2": "r"}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def _operands(type_: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return packed(type_[:-2]) if type_.endswith("x2") else floats(type_)


def _add(section: Section, instruction: str, arity: int, how: str = "bits") -> None:
    """An instruction whose operands and result are of the type that ends its name."""
    type_ = instruction.split(".")[-1]
    format_ = type_.removesuffix("x2")
    section.elementwise(instruction, _LETTER[type_], _operands(type_)[:arity], formats=[format_], how=how)


def exact() -> Section:
    """Sums, products, quotients, roots, minima and comparisons: every rounding, subnormal numbers, NaN."""
    section = Section("float")
    for operation, arity in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3), ("div", 2), ("rcp", 1), ("sqrt", 1)):
        for direction in _ROUNDINGS:
            _add(section, f"{operation}.{direction}.f32", arity)
            _add(section, f"{operation}.{direction}.ftz.f32", arity)
            _add(section, f"{operation}.{direction}.f64", arity)
        if arity > 1 and operation != "div":
            _add(section, f"{operation}.rn.sat.f32", arity)
            _add(section, f"{operation}.rz.ftz.sat.f32", arity)
    _halves(section)
    _order(section)
    _compare(section)
    return section


def _halves(section: Section) -> None:
    for type_ in ("f16", "f16x2", "bf16", "bf16x2"):
        plain = ("", ".ftz", ".sat") if type_.startswith("f16") else ("",)
        for operation, arity in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
            for flag in (*plain, ".relu") if operation == "fma" else plain:
                _add(section, f"{operation}.rn{flag}.{type_}", arity)
        for operation in ("abs", "neg"):
            _add(section, f"{operation}.{type_}", 1)


def _order(section: Section) -> None:
    """min, max, abs, neg, copysign and testp."""
    for operation, nan, sign in itertools.product(("min", "max"), ("", ".NaN"), ("", ".xorsign.abs")):
        for flush in ("", ".ftz"):
            _add(section, f"{operation}{flush}{nan}{sign}.f32", 2)
        for type_ in ("f16", "f16x2", "bf16", "bf16x2"):
            _add(section, f"{operation}{nan}{sign}.{type_}", 2)
    for instruction in ("min.f64", "max.f64", "copysign.f32", "copysign.f64"):
        _add(section, instruction, 2)
    for instruction in ("abs.f32", "abs.ftz.f32", "neg.f32", "neg.ftz.f32", "abs.f64", "neg.f64"):
        _add(section, instruction, 1)
    for test, type_ in itertools.product(
        ("finite", "infinite", "number", "notanumber", "normal", "subnormal"), ("f32", "f64")
    ):
        section.elementwise(f"testp.{test}.{type_}", "p", [floats(type_)[0]])


def _compare(section: Section) -> None:
    for comparison, type_ in itertools.product(_COMPARISONS, ("f32", "ftz.f32", "f64", "f16", "bf16")):
        section.elementwise(f"setp.{comparison}.{type_}", "p", floats(type_.split(".")[-1])[:2])
    for comparison, type_ in itertools.product(("lt", "neu", "geu"), ("f16x2", "bf16x2")):
        instruction = f"setp.{comparison}.{type_}"
        asm = f"{{.reg .pred p, q; {instruction} p|q, %2, %3; selp.u32 %0, 1, 0, p; selp.u32 %1, 1, 0, q;}}"
        section.elementwise(instruction, "rr", packed(type_[:-2])[:2], asm=asm)
    for target, type_ in itertools.product(("u32", "f32"), ("f32", "f64")):
        section.elementwise(f"set.gtu.{target}.{type_}", "r", floats(type_)[:2])


def conversions() -> Section:
    """cvt between every two types, with each rounding, saturation and NaN."""
    section = Section("convert")
    for source, target in itertools.permutations(("f16", "bf16", "f32", "f64"), 2):
        _between_floats(section, source, target)
    for type_ in ("f32", "f64", "f16"):
        for direction in ("rni", "rzi", "rmi", "rpi"):
            for integer in ("u16", "s16", "u32", "s32", "u64", "s64"):
                _to_integer(section, direction, integer, type_)
            name = f"cvt.{direction}.{type_}.{type_}"
            section.elementwise(name, _LETTER[type_], [rounding(type_)], formats=[type_])
    _small_integers(section)
    _from_integers(section)
    _packed(section)
    return section


def _between_floats(section: Section, source: str, target: str) -> None:
    widens = (source, target) in (("f16", "f32"), ("f16", "f64"), ("f32", "f64"), ("bf16", "f32"), ("bf16", "f64"))
    if {source, target} == {"f16", "bf16"}:
        return  # from sm_100 on
    if widens:
        flags = [""]
    elif target == "f32":
        flags = [f".{direction}" for direction in _ROUNDINGS]
    else:
        flags = [".rn", ".rz", ".rn.relu"] if source == "f32" else [".rn"]
    if (source, target) == ("f32", "f16"):
        flags += [".rm", ".rp", ".rn.sat", ".rn.ftz"]
    for flag in flags:
        name = f"cvt{flag}.{target}.{source}"
        section.elementwise(name, _LETTER[target], [rounding(source)], formats=[target])


def _to_integer(section: Section, direction: str, integer: str, type_: str) -> None:
    letter = {"16": "h", "32": "r", "64": "l"}[integer[1:]]
    section.elementwise(f"cvt.{direction}.{integer}.{type_}", letter, [rounding(type_)])
    if type_ == "f32" and direction in ("rni", "rmi"):
        section.elementwise(f"cvt.{direction}.ftz.{integer}.{type_}", letter, [rounding(type_)])


def _small_integers(section: Section) -> None:
    """8-bit integers, which registers of 32 bits hold, and saturation between integers."""
    a = integers(32)[0]
    for target, source in itertools.permutations(("u8", "s8", "u16", "s16", "u32", "s32"), 2):
        for flag in ("", ".sat") if _overflows(target, source) else ("",):
            asm = f"cvt{flag}.{target}.{source} %0, %1;"
            narrow = f"{{.reg .b16 t, s; cvt.u16.u32 s, %1; cvt{flag}.{target}.{source} TO, FROM; WIDEN}}"
            if target[1:] == "16" or source[1:] == "16":
                to, from_ = ("t" if target[1:] == "16" else "%0"), ("s" if source[1:] == "16" else "%1")
                widen = "cvt.u32.u16 %0, t;" if to == "t" else ""
                asm = narrow.replace("TO", to).replace("FROM", from_).replace("WIDEN", widen)
            section.elementwise(f"cvt{flag}.{target}.{source}", "r", [a], asm=asm)
    for target, source in itertools.permutations(("u32", "s32", "u64", "s64"), 2):
        for flag in ("", ".sat") if _overflows(target, source) else ("",):
            letter = {"32": "r", "64": "l"}[target[1:]]
            section.elementwise(f"cvt{flag}.{target}.{source} wide", letter, [integers(int(source[1:]))[0]],
                                asm=f"cvt{flag}.{target}.{source} %0, %1;")  # fmt: skip
    for type_, bits in itertools.product(("f32", "f64"), ("u8", "s8")):
        section.elementwise(f"cvt.rni.{bits}.{type_}", "r", [rounding(type_)])


def _overflows(target: str, source: str) -> bool:
    """Whether the source has values that the target has not."""
    wide, given = (np.iinfo(f"{type_[0].replace('s', 'i')}{int(type_[1:]) // 8}") for type_ in (target, source))
    return bool(given.min < wide.min or given.max > wide.max)


def _from_integers(section: Section) -> None:
    for integer in ("u16", "s16", "u32", "s32", "u64", "s64"):
        width = int(integer[1:])
        values = np.concatenate([integers(width)[0], _halfway(width)])
        for target in ("f32", "f64", "f16"):
            for direction in _ROUNDINGS if target != "f16" else ("rn", "rz"):
                name = f"cvt.{direction}.{target}.{integer}"
                section.elementwise(name, _LETTER[target], [values], formats=[target])
    for integer, type_ in itertools.product(("u8", "s8"), ("f32", "f64")):
        section.elementwise(f"cvt.rn.{type_}.{integer}", _LETTER[type_], [integers(32)[0]], formats=[type_])


def _halfway(width: int) -> np.ndarray:
    """Integers of few bits far apart, so that many lie halfway between two floats."""
    rng = np.random.default_rng(width)
    high = rng.integers(1, 1 << 12, 2048, np.uint64) << rng.integers(0, max(width - 11, 1), 2048, np.uint64)
    low = np.uint64(1) << rng.integers(0, width, 2048, np.uint64)
    return (high + low).astype(f"u{width // 8}")


def _packed(section: Section) -> None:
    """Two numbers of half width or less in a register, and tf32, which fills one."""
    a, b = rounding("f32"), np.roll(rounding("f32"), 11)
    for target, flag in itertools.product(("f16", "bf16"), ("rn", "rz", "rn.relu", "rz.relu")):
        section.elementwise(f"cvt.{flag}.{target}x2.f32", "r", [a, b], formats=[target])
    for flag in ("rna", "rn", "rz", "rn.relu", "rz.relu"):
        section.elementwise(f"cvt.{flag}.tf32.f32", "r", [a], formats=["f32"])
    for target, relu in itertools.product(("e4m3x2", "e5m2x2"), ("", ".relu")):
        section.elementwise(f"cvt.rn.satfinite{relu}.{target}.f32", "h", [a, b])
        halves = rounding("f16").astype(np.uint32)
        section.elementwise(
            f"cvt.rn.satfinite{relu}.{target}.f16x2", "h", [halves | np.roll(halves, 5) << np.uint32(16)]
        )
        every = np.arange(1 << 16, dtype=np.uint16)
        section.elementwise(f"cvt.rn{relu}.f16x2.{target}", "r", [every], formats=["f16"])
    x, y, z = integers(32)
    for target in ("u16", "s16"):
        section.elementwise(f"cvt.pack.sat.{target}.s32", "r", [x, y])
    for target in ("u8", "s8", "u4", "s4", "u2", "s2"):
        section.elementwise(f"cvt.pack.sat.{target}.s32.b32", "r", [x, y, z])


def approximations() -> Section:
    """ex2, lg2 and the like, over every magnitude: how far the hardware is from the correctly rounded result."""
    section = Section("approximate")
    for name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos"):
        for flush in ("", ".ftz"):
            _approximation(section, f"{name}.approx{flush}.f32", [dense("f32")])
    _approximation(section, "tanh.approx.f32", [dense("f32")])
    for name, low, high in (
        ("ex2", -20, 20),
        ("sin", -math.pi, math.pi),
        ("cos", -math.pi, math.pi),
        ("tanh", -6, 6),
        ("lg2", 0.25, 4),
    ):
        _approximation(section, f"{name}.approx.f32", [dense("f32", low, high)], f" from {low:.3g} to {high:.3g}")
    a, b, _ = floats("f32")
    for instruction in ("div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32"):
        _approximation(section, instruction, [a, b])
    for instruction in ("ex2.approx.f16", "tanh.approx.f16", "tanh.approx.bf16", "ex2.approx.ftz.bf16"):
        _approximation(section, instruction, [dense(instruction.split(".")[-1])])
    for instruction in ("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.f64"):
        _approximation(section, instruction, [dense("f64")])
    return section


def _approximation(section: Section, instruction: str, inputs: list[np.ndarray], where: str = "") -> None:
    type_ = instruction.split(".")[-1]
    sources = ", ".join(f"%{number + 1}" for number in range(len(inputs)))
    section.elementwise(instruction + where, _LETTER[type_], inputs, asm=f"{instruction} %0, {sources};",
                        formats=[type_], how="ulp")  # fmt: skip
