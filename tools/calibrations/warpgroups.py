"""wgmma: every type, width and layout of an operand in shared memory, with descriptors as CUTLASS makes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from cupyops.simulator import matrix

from .case import Argument, Array, Section
from .elements import BITS, random, whole

_TYPES = ["f32.f16.f16", "f16.f16.f16", "f32.bf16.bf16", "f32.tf32.tf32", "f32.e4m3.e4m3", "f32.e5m2.e4m3", "f16.e4m3.e5m2",
          "s32.s8.s8", "s32.u8.s8"]  # fmt: skip
_MODE = {0: 0, 128: 1, 64: 2, 32: 3}
_TILE = 96 * 1024  # bytes of shared memory, filled with elements
_B_AT = 32 * 1024  # where B lies in it
_KINDS = {"f32": ("f", "float"), "u32": ("r", "unsigned"), "s32": ("r", "unsigned")}


def descriptor(start: int, leading: int, stride: int, span: int, first_line: int = 0) -> int:
    """A matrix descriptor, its start counted from the tile's."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | first_line << 49 | _MODE[span] << 62


def types_and_widths() -> Section:
    """Each type with n from 8 to 256, A in shared memory or in registers; K-major, 128 bytes of swizzle."""
    section = Section("wgmma")
    for types, n, registers in itertools.product(_TYPES, (8, 64, 128, 256), (False, True)):
        a, b = descriptor(0, 16, 1024, 128), descriptor(_B_AT, 16, 1024, 128)
        _case(section, types, n, "", a, b, whole, registers=registers)
        if types[0] == "f":
            _case(section, types, n, "random numbers", a, b, random, registers=registers, how="sum")
    for types in ("f32.bf16.bf16", "f32.e4m3.e4m3", "s32.s8.s8"):
        a, b = descriptor(0, 16, 1024, 128), descriptor(_B_AT, 16, 1024, 128)
        _case(section, types, 64, "scale-d 0", a, b, whole, scale_d=0)
        if types[0] == "f":
            for signs in ((-1, 1), (1, -1), (-1, -1)):
                _case(section, types, 64, f"signs {signs}", a, b, whole, signs=signs)
    return section


def layouts() -> Section:
    """K-major and MN-major, each swizzle, packed and with gaps; steps along K inside a swizzle; base offsets."""
    section = Section("wgmma layout")
    for types, n in itertools.product(("f32.f16.f16", "f32.tf32.tf32", "s32.s8.s8"), (8, 64, 256)):
        for span, variant in itertools.product((0, 32, 64, 128), (0, 1)):
            a, b = (descriptor(at, *_offsets(span, False, rows, variant), span) for at, rows in ((0, 64), (_B_AT, n)))
            _case(section, types, n, f"K-major swizzle {span} variant {variant}", a, b, whole)
    for types, n in itertools.product(("f32.f16.f16", "f32.bf16.bf16"), (64, 256)):
        for span, variant, (ta, tb) in itertools.product((0, 32, 64, 128), (0, 1), ((0, 1), (1, 0), (1, 1))):
            a = descriptor(0, *_offsets(span, bool(ta), 64, variant), span)
            b = descriptor(_B_AT, *_offsets(span, bool(tb), n, variant), span)
            major = f"A {'MN' if ta else 'K'}-major B {'MN' if tb else 'K'}-major"
            _case(section, types, n, f"{major} swizzle {span} variant {variant}", a, b, whole, transposed=(ta, tb))
    for what, a, b in _steps():
        _case(section, "f32.f16.f16", 64, what, a, b, whole)
    return section


def _offsets(span: int, transposed: bool, rows: int, variant: int) -> tuple[int, int]:
    """(leading, stride) in bytes: packed, or with gaps."""
    group = 8 * max(span, 16)  # eight lines
    if not transposed:
        packed, gaps = (
            ((group * (rows // 8), group), (group, 2 * group)) if not span else ((16, group), (16, 2 * group))
        )
        return (packed, gaps)[variant]
    across = max(rows * 2 // max(span, 16), 1)
    if not span:
        return ((group * across, group), (group, 2 * group))[variant]
    return ((2 * group, group), (group, group * across))[variant]


def _steps() -> Iterator[tuple[str, int, int]]:
    """Starts inside of a swizzle's pattern."""
    for span in (32, 64, 128):
        for step in range(span // 32):
            a, b = (descriptor(at + 32 * step, 16, 8 * span, span) for at in (0, _B_AT))
            yield f"K-major swizzle {span} step {step} along K", a, b
    for span, line in itertools.product((32, 64, 128), range(1, 8)):
        a, b = (descriptor(at + 128 * line, 16, 8 * span, span, line) for at in (0, _B_AT))
        yield f"K-major swizzle {span} base offset {line}", a, b
        a, b = (descriptor(at + 128 * line, 16, 8 * span, span) for at in (0, _B_AT))
        yield f"K-major swizzle {span} start at line {line} without base offset", a, b


def _case(
    section: Section,
    types: str,
    n: int,
    what: str,
    a: int,
    b: int,
    fill: Callable[..., np.ndarray],
    *,
    registers: bool = False,
    transposed: tuple[int, int] = (0, 0),
    signs: tuple[int, int] = (1, 1),
    scale_d: int = 1,
    how: str = "bits",
) -> None:
    sums, left, right = types.split(".")
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k{256 // BITS[left]}.{types}"
    unit = matrix.wgmma(tuple(instruction.split(".")[1:]))
    rng = np.random.default_rng(BITS[left])
    tile = np.concatenate([_bytes(fill(left, (_TILE,), rng))[:_B_AT], _bytes(fill(right, (_TILE,), rng))[_B_AT:_TILE]])
    held = fill(left, (4, 128, 32 // BITS[left]), rng).view(np.uint32)[:, :, 0]
    before = whole(sums, (unit.d_registers, 128, 32 // BITS[sums]), rng).view(np.uint32)[:, :, 0]
    if sums == "s32":
        flags: list[int] = []  # integers have neither signs nor transposes
    else:
        flags = [*signs, *(transposed[1:] if registers else transposed)] if BITS[left] == 16 else [*signs]
    kernel = section.kernel(*_text(instruction, unit.d_registers, unit.d_type, registers, flags))
    name = " ".join(filter(None, [instruction, "A in registers" if registers else "", what]))
    result = Array(before, True, sums if sums[0] == "f" else "")
    arguments: list[Argument] = [Array(tile), Array(np.array([a, b], np.uint64)), Array(held), result, scale_d]
    section.add(name, kernel, arguments, shared=_TILE + 1024, how=how)


def _bytes(elements: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(elements).view(np.uint8)


def _text(instruction: str, count: int, view: str, registers: bool, flags: list[int]) -> tuple[str, str, str]:
    """(parameters, body, head): shared memory and registers from global memory, one wgmma, registers back."""
    letter, kind = _KINDS[view]
    destination = ", ".join(f"%{i}" for i in range(count))
    left = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if registers else f"%{count}"
    lefts = [f'"r"(held[{i} * 128 + t])' for i in range(4)] if registers else ['"l"(x)']
    b, scale = count + len(lefts), count + len(lefts) + 1
    asm = (
        f"{{.reg .pred p; setp.ne.b32 p, %{scale}, 0; wgmma.fence.sync.aligned; "
        f"{instruction} {{{destination}}}, {left}, %{b}, p{''.join(f', {flag}' for flag in flags)}; "
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;}"
    )
    sums = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    body = f"""  extern __shared__ uint4 raw[];
  unsigned t = threadIdx.x, base = ((unsigned)__cvta_generic_to_shared(raw) + 1023) & ~1023u;
  uint4* shared = raw + (base - (unsigned)__cvta_generic_to_shared(raw)) / 16;
  for (unsigned i = t; i < {_TILE // 16}; i += 128) shared[i] = tile[i];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  unsigned long long x = descriptors[0] + (base >> 4), y = descriptors[1] + (base >> 4);
  {kind} d[{count}];
#pragma unroll
  for (int i = 0; i < {count}; i++) d[i] = sums[i * 128 + t];
  asm volatile("{asm}" : {sums} : {", ".join(lefts)}, "l"(y), "r"(scale_d) : "memory");
#pragma unroll
  for (int i = 0; i < {count}; i++) sums[i * 128 + t] = d[i];"""
    parameters = (
        f"const uint4* tile, const unsigned long long* descriptors, const unsigned* held, {kind}* sums, int scale_d"
    )
    return parameters, body, "__global__ __launch_bounds__(128)"
