"""mma.sync, ldmatrix, stmatrix and wmma: whole numbers to the bit, which shows every layout; random ones as sums."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np

from cupyops.simulator import matrix

from .case import Array, Section
from .elements import BITS, random, whole

_WARPS = 4
Fill = Callable[[str, tuple[int, ...], np.random.Generator], np.ndarray]
_LETTERS = {"u32": ("r", "unsigned"), "s32": ("r", "unsigned"), "f32": ("f", "float"), "f64": ("d", "double")}

_HALF = ("m16n8k8", "m16n8k16")
_TABLE = [
    *[(shape, "row.col", f"{sums}.f16.f16.{sums}", "") for shape in _HALF for sums in ("f16", "f32")],
    *[(shape, "row.col", "f32.bf16.bf16.f32", "") for shape in _HALF],
    *[(shape, "row.col", "f32.tf32.tf32.f32", "") for shape in ("m16n8k4", "m16n8k8")],
    *[(shape, "row.col", "f64.f64.f64.f64", "") for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")],
    *[("m16n8k32", "row.col", f"f32.{a}.{b}.f32", "") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")],
    *[
        (shape, "row.col", f"s32.{a}.{b}.s32", flag)
        for shape in ("m8n8k16", "m16n8k16", "m16n8k32")
        for a in ("s8", "u8")
        for b in ("s8", "u8")
        for flag in ("", ".satfinite")
    ],
    *[
        (shape, "row.col", f"s32.{a}.{b}.s32", "")
        for shape in ("m8n8k32", "m16n8k32", "m16n8k64")
        for a in ("s4", "u4")
        for b in ("s4", "u4")
    ],
    *[
        (shape, "row.col", "s32.b1.b1.s32", flag)
        for shape in ("m8n8k128", "m16n8k128", "m16n8k256")
        for flag in (".and.popc", ".xor.popc")
    ],
    *[
        ("m8n8k4", f"{a}.{b}", f"{d}.f16.f16.{c}", "")
        for a in ("row", "col")
        for b in ("row", "col")
        for d, c in (("f16", "f16"), ("f32", "f16"), ("f32", "f32"))
    ],
]


def mma() -> Section:
    """Every shape and type of mma.sync."""
    section = Section("mma")
    for shape, layouts, types, flag in _TABLE:
        d, a, b, c = types.split(".")
        name = f"mma.sync.aligned.{shape}.{layouts}"
        # b1 names its operation last; saturation comes before the types
        name += f".{types}{flag}" if a == "b1" else f"{flag}.{types}"
        _case(section, name, (d, a, b, c), whole, "whole numbers", "bits")
        if a[0] in "fte" or a == "bf16":
            _case(section, name, (d, a, b, c), random, "random numbers", "sum")
    return section


def _case(section: Section, name: str, types: tuple[str, ...], fill: Fill, what: str, how: str) -> None:
    unit = matrix.mma(tuple(name.split(".")[1:]))
    d, a, b, c = types
    rng = np.random.default_rng(len(section.cases))
    counts = unit.a_registers, unit.b_registers, unit.c_registers
    views = unit.a_type, unit.b_type, unit.c_type, unit.d_type
    operands = [Array(_registers(fill, type_, count, rng)) for type_, count in zip((a, b, c), counts)]
    dtype = np.uint64 if d == "f64" else np.uint32
    result = Array(np.zeros((unit.d_registers, 32 * _WARPS), dtype), True, d if d[0] == "f" else "")
    kernel = section.kernel(*_text(name, counts, unit.d_registers, views))
    section.add(f"{name} {what}", kernel, [*operands, result], block=32 * _WARPS, how=how)


def _registers(fill: Fill, type_: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` registers of each thread: packed elements, or one element wider than 32 bits."""
    width = max(BITS[type_], 32)
    elements = fill(type_, (count, 32 * _WARPS, width // max(BITS[type_], 8)), rng)
    return np.ascontiguousarray(elements).view(f"u{width // 8}")[:, :, 0]


def _text(name: str, counts: tuple[int, ...], results: int, views: tuple[str, ...]) -> tuple[str, str]:
    """(parameters, body): registers from global memory, one mma, registers to global memory."""
    lines, inputs, groups, parameters = ["  unsigned t = threadIdx.x;"], [], [], []
    number = results
    for operand, count, view in zip("abc", counts, views):
        letter, kind = _LETTERS[view]
        lines.append(f"  {kind} {operand}[{count}];")
        lines += [f"  {operand}[{i}] = {operand}_[{i} * {32 * _WARPS} + t];" for i in range(count)]
        parameters.append(f"const {kind}* {operand}_")
        inputs += [f'"{letter}"({operand}[{i}])' for i in range(count)]
        groups.append("{" + ", ".join(f"%{number + i}" for i in range(count)) + "}")
        number += count
    letter, kind = _LETTERS[views[3]]
    outputs = ", ".join(f'"={letter}"(d[{i}])' for i in range(results))
    destination = "{" + ", ".join(f"%{i}" for i in range(results)) + "}"
    lines.append(f"  {kind} d[{results}];")
    lines.append(f'  asm volatile("{name} {destination}, {", ".join(groups)};" : {outputs} : {", ".join(inputs)});')
    lines += [f"  d_[{i} * {32 * _WARPS} + t] = d[{i}];" for i in range(results)]
    return ", ".join([*parameters, f"{kind}* d_"]), "\n".join(lines)


_SHARED = """  __shared__ __align__(1024) uint4 shared[512];
  unsigned t = threadIdx.x, base = (unsigned)__cvta_generic_to_shared(shared);
  for (unsigned i = t; i < 512; i += 128) shared[i] = memory[i];
  __syncthreads();
"""


def movement() -> Section:
    """ldmatrix and stmatrix of one, two and four matrices, transposed or not; rows anywhere in shared memory."""
    section = Section("ldmatrix")
    rng = np.random.default_rng(3)
    memory = Array(rng.integers(0, 1 << 16, 4096, np.uint16))
    rows = np.concatenate([rng.permutation(512)[:32] * 16 for _ in range(_WARPS)]).astype(np.uint32)
    registers = Array(rng.integers(0, 1 << 32, (4, 32 * _WARPS), np.uint64).astype(np.uint32))
    apart = (rng.permutation(512)[: 32 * _WARPS] * 16).astype(np.uint32)
    for count, transposed in itertools.product((1, 2, 4), ("", ".trans")):
        form = f"matrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16"
        kernel = section.kernel("const uint4* memory, const unsigned* rows, unsigned* out", _load(form, count))
        result = Array(np.zeros((count, 32 * _WARPS), np.uint32), True)
        section.add("ld" + form, kernel, [memory, Array(rows), result])
        parameters = "const uint4* memory, const unsigned* rows, const unsigned* d, uint4* out"
        kernel = section.kernel(parameters, _store(form, count))
        result = Array(np.zeros(4096, np.uint16), True)
        section.add("st" + form, kernel, [memory, Array(apart), registers, result])
    return section


def _load(form: str, count: int) -> str:
    list_ = "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
    outputs = ", ".join(f'"=r"(d[{i}])' for i in range(count))
    asm = f'  asm volatile("ld{form} {list_}, [%{count}];" : {outputs} : "r"(base + rows[t]) : "memory");\n'
    stores = "\n".join(f"  out[{i} * 128 + t] = d[{i}];" for i in range(count))
    return f"{_SHARED}  unsigned d[4];\n{asm}{stores}"


def _store(form: str, count: int) -> str:
    list_ = "{" + ", ".join(f"%{i + 1}" for i in range(count)) + "}"
    inputs = ", ".join(f'"r"(d[{i} * 128 + t])' for i in range(count))
    asm = (
        f'  asm volatile("st{form} [%0], {list_};" :: "r"(base + rows[t]), {inputs} : "memory");\n  __syncthreads();\n'
    )
    return f"{_SHARED}{asm}  for (unsigned i = t; i < 512; i += 128) out[i] = shared[i];"


_WMMA = [
    *[(shape, d, "f16", c) for shape in ("m16n16k16", "m32n8k16", "m8n32k16") for d, c in
      (("f32", "f32"), ("f16", "f16"), ("f16", "f32"))],
    *[(shape, "f32", "bf16", "f32") for shape in ("m16n16k16", "m32n8k16", "m8n32k16")],
    ("m16n16k8", "f32", "tf32", "f32"),
    ("m8n8k4", "f64", "f64", "f64"),
    *[(shape, "s32", type_, "s32") for shape in ("m16n16k16", "m32n8k16", "m8n32k16") for type_ in ("s8", "u8")],
]  # fmt: skip


def wmma() -> Section:
    """wmma, whose fragments nobody may look into: memory to memory, A and B row- and column-major."""
    section = Section("wmma")
    for (shape, d, a, c), left, right in itertools.product(_WMMA, ("row", "col"), ("row", "col")):
        fills = [(whole, "whole numbers", "bits")]
        if a[0] in "fbt":
            fills.append((random, "random numbers", "sum"))
        for fill, what, how in fills:
            _wmma_case(section, shape, (d, a, c), (left, right), fill, what, how)
    return section


def _wmma_case(
    section: Section,
    shape: str,
    types: tuple[str, str, str],
    layouts: tuple[str, str],
    fill: Fill,
    what: str,
    how: str,
) -> None:
    d, a, c = types
    m, n, k = (int(number) for number in re.findall(r"\d+", shape))
    rng = np.random.default_rng(len(section.cases))
    operands = [fill(a, (m, k), rng), fill(a, (k, n), rng)]
    start = fill(c, (m, n), rng)
    result = np.zeros((m, n), f"u{BITS[d] // 8}")
    named = (d, c) if a == "f16" else (d, a, a, c)
    name = ".".join(("wmma.mma.sync.aligned", *layouts, shape, *named))
    strides = (k if layouts[0] == "row" else m, n if layouts[1] == "row" else k, n, n)
    kernel = section.kernel(*_wmma_text(name, shape, types, layouts, strides))
    arguments = [*map(Array, operands), Array(start), Array(result, True, d if d[0] == "f" else "")]
    section.add(f"{name} {what}", kernel, arguments, block=32, how=how)


def _wmma_text(
    name: str, shape: str, types: tuple[str, str, str], layouts: tuple[str, str], strides: tuple[int, ...]
) -> tuple[str, str]:
    """(parameters, body): three loads, one multiplication, one store."""
    d, a, c = types
    unit = matrix.wmma(tuple(name.split(".")[1:]))
    views = dict(zip("abcd", (unit.a_type, unit.b_type, unit.c_type, unit.d_type)))
    counts = dict(zip("abcd", (unit.a_registers, unit.b_registers, unit.c_registers, unit.d_registers)))
    of_view = {"u32": "b32", "s32": "s32", "f32": "f32", "f64": "f64"}
    group = {x: "{" + ", ".join(f"{x}{i}" for i in range(counts[x])) + "}" for x in "abcd"}
    lines = [f".reg .{of_view[views[x]]} {x}<{counts[x]}>;" for x in "abcd"]
    for number, (x, layout, type_) in enumerate(zip("abc", (*layouts, "row"), (a, a, c))):
        load = f"wmma.load.{x}.sync.aligned.{layout}.{shape}.global.{type_}"
        lines.append(f"{load} {group[x]}, [%{number}], {strides[number]};")
    lines.append(f"{name} {', '.join(group[x] for x in 'dabc')};")
    lines.append(f"wmma.store.d.sync.aligned.row.{shape}.global.{d} [%3], {group['d']}, {strides[3]};")
    asm = " ".join(lines)
    body = f'  asm volatile("{{{asm}}}" :: "l"(a), "l"(b), "l"(c), "l"(d) : "memory");'
    return "const void* a, const void* b, const void* c, void* d", body
