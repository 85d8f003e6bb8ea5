"""Integer and bit instructions, bit for bit."""

from __future__ import annotations

import itertools
import re

import numpy as np

from .case import Section
from .values import divisors, integers

_LETTER = {16: "h", 32: "r", 64: "l"}
_WORDS = "u16 s16 u32 s32 u64 s64"

# instruction, types for {t}, operands: t as wide as the type, w twice as wide, or a register's own letter
_TABLE = [
    ("add.{t}", _WORDS, "ttt"),
    ("sub.{t}", _WORDS, "ttt"),
    ("add.sat.s32", "", "rrr"),
    ("sub.sat.s32", "", "rrr"),
    ("add.u16x2", "", "rrr"),
    ("add.s16x2", "", "rrr"),
    ("mul.lo.{t}", _WORDS, "ttt"),
    ("mul.hi.{t}", _WORDS, "ttt"),
    ("mul.wide.{t}", "u16 s16 u32 s32", "wtt"),
    ("mad.lo.{t}", _WORDS, "tttt"),
    ("mad.hi.{t}", _WORDS, "tttt"),
    ("mad.wide.{t}", "u16 s16 u32 s32", "wttw"),
    ("mad.hi.sat.s32", "", "rrrr"),
    ("mul24.lo.{t}", "u32 s32", "ttt"),
    ("mul24.hi.{t}", "u32 s32", "ttt"),
    ("mad24.lo.{t}", "u32 s32", "tttt"),
    ("mad24.hi.{t}", "u32 s32", "tttt"),
    ("mad24.hi.sat.s32", "", "rrrr"),
    ("sad.{t}", _WORDS, "tttt"),
    ("abs.{t}", "s16 s32 s64", "tt"),
    ("neg.{t}", "s16 s32 s64", "tt"),
    ("min.{t}", f"{_WORDS} u16x2 s16x2", "ttt"),
    ("max.{t}", f"{_WORDS} u16x2 s16x2", "ttt"),
    ("min.relu.{t}", "s32 s16x2", "ttt"),
    ("max.relu.{t}", "s32 s16x2", "ttt"),
    ("popc.{t}", "b32 b64", "rt"),
    ("clz.{t}", "b32 b64", "rt"),
    ("bfind.{t}", "u32 s32 u64 s64", "rt"),
    ("bfind.shiftamt.{t}", "u32 s32 u64 s64", "rt"),
    ("brev.{t}", "b32 b64", "tt"),
    ("bfe.{t}", "u32 s32 u64 s64", "ttrr"),
    ("bfi.{t}", "b32 b64", "tttrr"),
    ("bmsk.clamp.b32", "", "rrr"),
    ("bmsk.wrap.b32", "", "rrr"),
    ("szext.clamp.{t}", "u32 s32", "ttr"),
    ("szext.wrap.{t}", "u32 s32", "ttr"),
    ("dp4a.{t}", "u32.u32 u32.s32 s32.u32 s32.s32", "rrrr"),
    ("dp2a.lo.{t}", "u32.u32 u32.s32 s32.u32 s32.s32", "rrrr"),
    ("dp2a.hi.{t}", "u32.u32 u32.s32 s32.u32 s32.s32", "rrrr"),
    ("and.{t}", "b16 b32 b64", "ttt"),
    ("or.{t}", "b16 b32 b64", "ttt"),
    ("xor.{t}", "b16 b32 b64", "ttt"),
    ("not.{t}", "b16 b32 b64", "tt"),
    ("cnot.{t}", "b16 b32 b64", "tt"),
    ("shl.{t}", "b16 b32 b64", "ttr"),
    ("shr.{t}", f"b16 b32 b64 {_WORDS}", "ttr"),
    ("shf.{t}.wrap.b32", "l r", "rrrr"),
    ("shf.{t}.clamp.b32", "l r", "rrrr"),
    ("prmt.b32", "", "rrrr"),
    ("prmt.b32.{t}", "f4e b4e rc8 ecl ecr rc16", "rrrr"),
    ("slct.{t}.s32", "u16 u32 u64", "tttr"),
    *[(f"setp.{comparison}.{{t}}", _WORDS, "ptt") for comparison in ("eq", "ne", "lt", "le", "gt", "ge")],
    *[(f"setp.{comparison}.{{t}}", "u16 u32 u64", "ptt") for comparison in ("lo", "ls", "hi", "hs")],
    ("set.{t}.u32.s32", "lt eq ge", "rrr"),
    ("set.lt.f32.{t}", "u32 s32", "rtt"),
]


def arithmetic() -> Section:
    """Every integer instruction on edge values and on random bits."""
    section = Section("integer")
    for template, types, operands in _TABLE:
        for type_ in types.split() or [""]:
            _add(section, template.format(t=type_), type_ or template, operands)
    for operation, type_ in itertools.product(("div", "rem"), _WORDS.split()):
        width = int(type_[1:])
        section.elementwise(f"{operation}.{type_}", _LETTER[width], [integers(width)[0], divisors(width)])
    _immediates(section)
    _carries(section)
    return section


def _add(section: Section, instruction: str, type_: str, operands: str) -> None:
    width = 32 if "x2" in type_ else int((re.findall(r"16|32|64", type_) or ["32"])[0])
    widths = {"t": width, "w": 2 * width, "h": 16, "r": 32, "l": 64, "p": 0}
    gives, takes = operands[0], operands[1:]
    given = gives if gives == "p" else _LETTER[widths[gives]]
    inputs = [integers(widths[letter])[number % 3] for number, letter in enumerate(takes)]
    section.elementwise(instruction, given, inputs)


def _immediates(section: Section) -> None:
    """Instructions that take a constant, and those that take or give predicates."""
    a, b, c = integers(32)
    for table in (0x00, 0x1B, 0x80, 0x96, 0xCA, 0xE8, 0xFE, 0xFF):
        section.elementwise(f"lop3.b32 {table:#x}", "r", [a, b, c], asm=f"lop3.b32 %0, %1, %2, %3, {table};")
    base, offset = np.tile(np.arange(32, dtype=np.uint32), len(a) // 32), (b % 71).astype(np.int64) - 35
    section.elementwise("fns.b32", "r", [c, base, offset.astype(np.uint32)])
    test = "{.reg .pred p, q; setp.ne.u32 p, %3, 0; "
    section.elementwise("selp.b32", "r", [a, b, c & np.uint32(1)], asm=test + "selp.b32 %0, %1, %2, p;}")
    for combine in ("and", "or", "xor"):
        asm = (
            test.replace("%3", "%4")
            + f"setp.lt.{combine}.s32 p|q, %2, %3, p; selp.u32 %0, 1, 0, p; selp.u32 %1, 1, 0, q;}}"
        )
        section.elementwise(f"setp.lt.{combine}.s32 p|q", "rr", [a, b, c & np.uint32(1)], asm=asm)


def _carries(section: Section) -> None:
    """Chains of carries and borrows through two and three instructions."""
    for width, letter in ((32, "r"), (64, "l")):
        for first, second in (("add", "addc"), ("sub", "subc")):
            asm = f"{first}.cc.u{width} t, %2, %3; {second}.cc.u{width} %1, %4, %3; {second}.u{width} %0, t, %4;"
            _chain(section, f"{first}.cc {second} u{width}", width, letter, asm)
        for half in ("lo", "hi"):
            asm = f"mad.{half}.cc.u{width} t, %2, %3, %4; madc.{half}.cc.u{width} %1, %3, %4, %2; "
            _chain(section, f"mad.{half}.cc madc u{width}", width, letter, asm + f"addc.u{width} %0, t, 0;")


def _chain(section: Section, name: str, width: int, letter: str, asm: str) -> None:
    section.elementwise(name, letter * 2, integers(width), asm=f"{{.reg .u{width} t; {asm}}}")


_MASKS = ("0xffffffff", "0x0ff0a5c3")  # all lanes, and some
_IN_MASK = (
    "{.reg .pred in, p, q; .reg .u32 lane, bit; mov.u32 lane, %%laneid; shl.b32 bit, 1, lane; "
    "and.b32 bit, bit, MASK; setp.ne.u32 in, bit, 0; "
)
_REDUCTIONS = ("add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32")


def warps() -> Section:
    """shfl, vote, match and redux, by whole warps and by some of their lanes."""
    section = Section("warp")
    a, b, _ = integers(32)
    lanes = b.copy()
    lanes[: len(b) // 2] %= 40
    for mode, clamp in itertools.product(("up", "down", "bfly", "idx"), (0x1F, 0x0, 0x181F, 0x1C03, 0x1807)):
        asm = f"{{.reg .pred p; shfl.sync.{mode}.b32 %0|p, %2, %3, {clamp}, 0xffffffff; selp.u32 %1, 1, 0, p;}}"
        section.elementwise(f"shfl.sync.{mode}.b32 clamp {clamp:#x}", "rr", [a, lanes], asm=asm)
    for mask in _MASKS:
        begin = "mov.u32 %0, 0; " + _IN_MASK.replace("MASK", mask)
        _votes(section, mask, begin)
        for width in (32, 64):
            _matches(section, mask, begin, width)
        for reduction in _REDUCTIONS:
            asm = begin + f"@in redux.sync.{reduction} %0, %1, {mask};}}"
            section.elementwise(f"redux.sync.{reduction} {mask}", "r", [integers(32)[2]], asm=asm)
    return section


def _opinions() -> np.ndarray:
    """One number for each thread: warps all of ones, all of zeros, and of both, in turn."""
    turn = np.arange(len(integers(32)[0])) // 32 % 3
    return np.where(turn == 0, 1, np.where(turn == 1, 0, integers(32)[0] & 1)).astype(np.uint32)


def _votes(section: Section, mask: str, begin: str) -> None:
    for mode in ("all", "any", "uni"):
        asm = begin + f"setp.ne.u32 p, %1, 0; @in vote.sync.{mode}.pred q, p, {mask}; @in selp.u32 %0, 1, 0, q;}}"
        section.elementwise(f"vote.sync.{mode}.pred {mask}", "r", [_opinions()], asm=asm)
    asm = begin + f"setp.ne.u32 p, %1, 0; @in vote.sync.ballot.b32 %0, p, {mask};}}"
    section.elementwise(f"vote.sync.ballot.b32 {mask}", "r", [integers(32)[0] & np.uint32(1)], asm=asm)


def _matches(section: Section, mask: str, begin: str, width: int) -> None:
    dtype = integers(width)[0].dtype
    few = (_opinions() * 7 + integers(width)[1] % 3).astype(dtype)
    asm = begin + f"@in match.any.sync.b{width} %0, %1, {mask};}}"
    section.elementwise(f"match.any.sync.b{width} {mask}", "r", [few], asm=asm)
    asm = begin.replace("%0, 0", "%0, 0; mov.u32 %1, 9")
    asm += f"@in match.all.sync.b{width} %0|p, %2, {mask}; @in selp.u32 %1, 1, 0, p;}}"
    alike = np.where(np.arange(len(few)) // 32 % 3 < 2, _opinions(), few).astype(dtype)
    section.elementwise(f"match.all.sync.b{width} {mask}", "rr", [alike], asm=asm)
