"""Atomics: each thread on an element of its own, old value and new compared; and many threads on one, integers only."""

from __future__ import annotations

import numpy as np

from .case import CTYPES, Array, Section
from .values import floats, integers, packed

_INTEGERS = {"u32": "r", "s32": "r", "u64": "l", "s64": "l", "b32": "r", "b64": "l"}
_TABLE = [
    *[("add", type_) for type_ in ("u32", "s32", "u64")],
    *[(operation, type_) for operation in ("min", "max") for type_ in ("u32", "s32", "u64", "s64")],
    *[(operation, type_) for operation in ("and", "or", "xor", "exch", "cas") for type_ in ("b32", "b64")],
    ("inc", "u32"),
    ("dec", "u32"),
]
_FLOATS = [("add.f32", "r", "f32"), ("add.f64", "l", "f64")]
_HALVES = [("add.noftz.f16", "h", "f16"), ("add.noftz.bf16", "h", "bf16"),
           ("add.noftz.f16x2", "r", "f16"), ("add.noftz.bf16x2", "r", "bf16")]  # fmt: skip


def atomics() -> Section:
    """atom in global and in shared memory, and red where many threads meet."""
    section = Section("atomic")
    for space in ("global", "shared"):
        for operation, type_ in _TABLE:
            width = int(type_[1:])
            memory, value, other = integers(width)
            operands = [value, other] if operation == "cas" else [value]
            if operation == "cas":
                operands[0] = np.where(np.arange(len(memory)) % 2 == 0, memory, value)
            _alone(section, f"atom.{space}.{operation}.{type_}", space, _INTEGERS[type_], memory, operands, "")
        for name, letter, format_ in [*_FLOATS, *_HALVES]:
            memory, value, _ = packed(format_) if name.endswith("x2") else floats(format_)
            _alone(section, f"atom.{space}.{name}", space, letter, memory, [value], format_)
    memory, value, other = integers(16)
    expected = np.where(np.arange(len(memory)) % 2 == 0, memory, value)
    _alone(section, "atom.global.cas.b16", "global", "h", memory, [expected, other], "")
    for operation, type_ in _TABLE:
        if operation not in ("exch", "cas", "inc", "dec"):
            _together(section, operation, type_)
    return section


def _alone(
    section: Section, name: str, space: str, letter: str, memory: np.ndarray, operands: list[np.ndarray], format_: str
) -> None:
    c = CTYPES[letter]
    parameters = ", ".join([f"{c}* memory", f"{c}* old", *[f"const {c}* x{n}" for n in range(len(operands))]])
    values = ", ".join(f"%{2 + n}" for n in range(len(operands)))
    inputs = "".join(f', "{letter}"(x{n}[i])' for n in range(len(operands)))
    place, before, after = "memory + i", "", ""
    if space == "shared":
        before = f"  __shared__ {c} mine[128];\n  mine[threadIdx.x] = memory[i];\n"
        after, place = (
            "  memory[i] = mine[threadIdx.x];\n",
            "(unsigned long long)__cvta_generic_to_shared(mine + threadIdx.x)",
        )
    body = (
        f"  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;\n  {c} before;\n{before}"
        f'  asm volatile("{name} %0, [%1], {values};" : "={letter}"(before) : "l"({place}){inputs} : "memory");\n'
        f"{after}  old[i] = before;"
    )
    arguments = [Array(memory, True, format_), Array(np.zeros_like(memory), True, format_), *map(Array, operands)]
    section.add(name, section.kernel(parameters, body), arguments, grid=len(memory) // 128)


def _together(section: Section, operation: str, type_: str) -> None:
    """Every element of a few is the target of many threads."""
    letter = _INTEGERS[type_]
    c, width = CTYPES[letter], int(type_[1:])
    memory, value, _ = integers(width)
    body = (
        "  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        f'  asm volatile("red.global.{operation}.{type_} [%0], %1;" :: "l"(memory + i % 67), "{letter}"(x[i]) : "memory");'
    )
    kernel = section.kernel(f"{c}* memory, const {c}* x", body)
    section.add(
        f"red.global.{operation}.{type_} contended",
        kernel,
        [Array(memory[:67], True), Array(value)],
        grid=len(value) // 128,
    )
