"""`mma.sync`: registers are filled lane by lane with the formulas of the PTX ISA; D is to be the plain matrix product."""

import itertools
import math

import numpy as np
import pytest
import torch

from cupyops._kernel.compile import backend
from cupyops.simulator.errors import UnsupportedInstruction
from cupyops.simulator.matrix import mma

WARPS = 2
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
BITS |= {"s4": 4, "u4": 4, "b1": 1}
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NUMPY = {"u32": np.uint32, "f32": np.float32, "s32": np.int32, "f64": np.float64}

# (shape, bits of an element of A and B) -> (row, column) of a_i and of b_i, with g = laneid >> 2 and t = laneid % 4
OPERANDS = {
    ("m16n8k8", 16): (lambda g, t, i: (g + 8 * (i >= 2), 2 * t + (i & 1)), lambda g, t, i: (2 * t + i, g)),
    ("m16n8k16", 16): (
        lambda g, t, i: (g if i < 2 or 4 <= i < 6 else g + 8, 2 * t + (i & 1) + 8 * (i >= 4)),
        lambda g, t, i: (2 * t + (i & 1) + 8 * (i >= 2), g),
    ),
    ("m16n8k4", 32): (lambda g, t, i: (g + 8 * (i == 1), t), lambda g, t, i: (t, g)),
    ("m16n8k8", 32): (
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
    ("m8n8k4", 64): (lambda g, t, i: (g, t), lambda g, t, i: (t, g)),
    ("m16n8k4", 64): (lambda g, t, i: (g if i == 0 else g + 8, t), lambda g, t, i: (t, g)),
    ("m16n8k8", 64): (
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
    ("m16n8k16", 64): (
        lambda g, t, i: (g, i * 2 + t) if i % 2 == 0 else (g + 8, i * 2 - 2 + t),
        lambda g, t, i: (t + i * 4, g),
    ),
    ("m8n8k16", 8): (lambda g, t, i: (g, t * 4 + i), lambda g, t, i: (t * 4 + i, g)),
    ("m16n8k16", 8): (lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)), lambda g, t, i: (t * 4 + i, g)),
    ("m16n8k32", 8): (
        lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + (16 if i >= 8 else 0)),
        lambda g, t, i: (t * 4 + (i & 3) + (16 if i >= 4 else 0), g),
    ),
    ("m8n8k32", 4): (lambda g, t, i: (g, t * 8 + i), lambda g, t, i: (t * 8 + i, g)),
    ("m16n8k32", 4): (lambda g, t, i: (g if i < 8 else g + 8, t * 8 + (i & 7)), lambda g, t, i: (t * 8 + i, g)),
    ("m16n8k64", 4): (
        lambda g, t, i: (g if i < 8 or 16 <= i < 24 else g + 8, t * 8 + (i & 7) + (32 if i >= 16 else 0)),
        lambda g, t, i: (t * 8 + (i & 7) + (32 if i >= 8 else 0), g),
    ),
    ("m8n8k128", 1): (lambda g, t, i: (g, t * 32 + i), lambda g, t, i: (t * 32 + i, g)),
    ("m16n8k128", 1): (lambda g, t, i: (g if i < 32 else g + 8, t * 32 + (i & 31)), lambda g, t, i: (t * 32 + i, g)),
    ("m16n8k256", 1): (
        lambda g, t, i: (g if i < 32 or 64 <= i < 96 else g + 8, t * 32 + (i & 31) + (128 if i >= 64 else 0)),
        lambda g, t, i: (t * 32 + (i & 31) + (128 if i >= 32 else 0), g),
    ),
}


def of_lane(formula):
    return lambda lane, i: formula(lane >> 2, lane % 4, i)


def accumulator(g, t, i):
    return (g if i < 2 else g + 8), t * 2 + (i & 1)


def held_as_halves(lane, i):  # m8n8k4 with f16
    return lane % 4 + (0 if lane < 16 else 4), i


def held_as_floats(lane, i):  # m8n8k4 with f16
    return (lane & 1) + (i & 2) + (0 if lane < 16 else 4), (i & 4) + (lane & 2) + (i & 1)


def quad_pair(a_layout, b_layout):
    """a_i and b_i of m8n8k4 with f16."""

    def a(lane, i):
        high = 0 if lane < 16 else 4
        return (lane % 4 + high, i) if a_layout == "row" else (i % 4 + high, lane % 4)

    def b(lane, i):
        high = 0 if lane < 16 else 4
        return (lane % 4, i + high) if b_layout == "row" else (i, lane % 4 + high)

    return a, b


class Layout:
    """Where the elements of one instruction are; m8n8k4 for halves multiplies four pairs of matrices at once."""

    def __init__(self, modifiers):
        self.shape, self.layouts = modifiers[2], modifiers[3:5]
        self.d, self.a, self.b, self.c = (word for word in modifiers if word in BITS)
        self.m, self.n, self.k = (
            int(x) for x in self.shape.replace("m", "").replace("n", " ").replace("k", " ").split()
        )
        self.pairs = self.shape == "m8n8k4" and self.a == "f16"
        self.matrices = 4 if self.pairs else 1
        if self.pairs:
            self.of_a, self.of_b = quad_pair(*self.layouts)
            self.of_c, self.of_d = (held_as_halves if x == "f16" else held_as_floats for x in (self.c, self.d))
        else:
            self.of_a, self.of_b = map(of_lane, OPERANDS[self.shape, BITS[self.a]])
            self.of_c = self.of_d = of_lane(accumulator)

    def places(self, where, rows, columns):
        """(matrix, row, column) of each element, lane by lane: all of the matrices, each element once."""
        count = self.matrices * rows * columns // 32
        of_warp = [[((lane // 4) % self.matrices, *where(lane, i)) for i in range(count)] for lane in range(32)]
        assert len({place for lane in of_warp for place in lane}) == 32 * count, "a formula of this test is wrong"
        return of_warp


def registers(matrices, places, bits):
    """Raw elements (warps, matrices, rows, columns) -> registers, packed bit by bit; 64-bit elements stay what they are."""
    words = []
    for warp, lane in itertools.product(range(len(matrices)), places):
        elements = [int(matrices[warp][place]) for place in lane]
        width = 64 if bits == 64 else 32
        per = width // bits
        chunks = [elements[i : i + per] for i in range(0, len(elements), per)]
        words.append([sum(element << (bits * j) for j, element in enumerate(chunk)) for chunk in chunks])
    return [np.array(column, np.uint64 if bits == 64 else np.uint32) for column in zip(*words)]


def elements(packed, places, shape, bits):
    """The inverse of `registers`."""
    matrices = np.zeros((WARPS, *shape), np.uint64)
    for warp, (lane, of_lane) in itertools.product(range(WARPS), enumerate(places)):
        for i, place in enumerate(of_lane):
            per = max(32 // bits, 1)
            word = int(packed[i // per][32 * warp + lane])
            matrices[(warp, *place)] = (word >> (bits * (i % per))) & ((1 << bits) - 1)
    return matrices


def random_raw(rng, shape, kind):
    """Finite random numbers of a type, as raw bits in uint64."""
    if kind in TORCH:
        integer = torch.uint8 if BITS[kind] == 8 else torch.int16
        raw = torch.from_numpy(rng.standard_normal(shape)).to(TORCH[kind]).view(integer).numpy()
        return raw.view(np.uint8 if BITS[kind] == 8 else np.uint16).astype(np.uint64)
    if kind in ("f32", "tf32"):
        return rng.standard_normal(shape).astype(np.float32).view(np.uint32).astype(np.uint64)
    if kind == "f64":
        return rng.standard_normal(shape).view(np.uint64)
    return rng.integers(0, 1 << BITS[kind], shape, np.uint64)


def number(raw, kind):
    """Raw bits -> float64 (or int64), by other means than the simulator's."""
    if kind in TORCH:
        plain = raw.astype(np.uint8 if BITS[kind] == 8 else np.uint16)
        return torch.from_numpy(plain).view(TORCH[kind]).double().numpy()
    if kind == "tf32":
        return (raw >> np.uint64(13) << np.uint64(13)).astype(np.uint32).view(np.float32).astype(np.float64)
    if kind == "f32":
        return raw.astype(np.uint32).view(np.float32).astype(np.float64)
    if kind == "f64":
        return raw.view(np.float64)
    signed = kind.startswith("s")
    return raw.astype(np.int64) - (raw >> np.uint64(BITS[kind] - 1) << np.uint64(BITS[kind])).astype(np.int64) * signed


def exact(a, b, c):
    """A B + C in float64, each sum rounded once."""
    out = np.empty(c.shape)
    for index in np.ndindex(c.shape):
        *which, row, column = index
        products = a[(*which, row)] * b[(*which, slice(None), column)]
        out[index] = math.fsum([*products, c[index]])
    return out


def viewed(packed, view):
    return [register.view(NUMPY[view]) for register in packed]


def run(modifiers, rng, raw=None):
    """(D's raw elements, the numbers A, B, C) for random operands or for those of `raw`."""
    layout, unit = Layout(modifiers), mma(modifiers)
    shapes = {"a": (layout.m, layout.k), "b": (layout.k, layout.n), "c": (layout.m, layout.n)}
    kinds = {"a": layout.a, "b": layout.b, "c": layout.c}
    operands = raw or {x: random_raw(rng, (WARPS, layout.matrices, *shapes[x]), kinds[x]) for x in "abc"}
    packed = {
        x: registers(operands[x], layout.places(getattr(layout, f"of_{x}"), *shapes[x]), BITS[kinds[x]]) for x in "abc"
    }
    assert [len(packed[x]) for x in "abc"] == [unit.a_registers, unit.b_registers, unit.c_registers]
    with np.errstate(all="ignore"):
        d = unit.compute(*(viewed(packed[x], getattr(unit, f"{x}_type")) for x in "abc"))
    assert len(d) == unit.d_registers
    assert all(x.shape == (32 * WARPS,) and x.dtype == NUMPY[unit.d_type] for x in d)
    words = [x.view(np.uint64 if layout.d == "f64" else np.uint32) for x in d]
    where = layout.places(layout.of_d, layout.m, layout.n)
    result = elements(words, where, (layout.matrices, layout.m, layout.n), BITS[layout.d])
    return result, *(number(operands[x], kinds[x]) for x in "abc")


def instructions(*lines):
    return [("sync", "aligned", *line.split(".")) for line in lines]


HALVES = instructions(
    *(f"{shape}.row.col.{d}.f16.f16.{d}" for shape in ("m16n8k8", "m16n8k16") for d in ("f16", "f32")),
    *(f"m16n8k{k}.row.col.f32.bf16.bf16.f32" for k in (8, 16)),
)
VOLTA = instructions(
    *(
        f"m8n8k4.{a}.{b}.{d}.f16.f16.{c}"
        for a, b in itertools.product(("row", "col"), repeat=2)
        for d, c in (("f16", "f16"), ("f32", "f16"), ("f32", "f32"))
    )
)
TF32 = instructions(*(f"m16n8k{k}.row.col.f32.tf32.tf32.f32" for k in (4, 8)))
DOUBLES = instructions(*(f"{s}.row.col.f64.f64.f64.f64" for s in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")))
FP8 = instructions(
    *(
        f"m16n8k{k}.row.col.{d}.{a}.{b}.{d}"
        for k in (16, 32)
        for a, b in itertools.product(("e4m3", "e5m2"), repeat=2)
        for d in ("f32", "f16")
    )
)
INTEGERS = instructions(
    *(
        f"{shape}.row.col{flag}.s32.{a}.{b}.s32"
        for width, shapes in ((8, ("m8n8k16", "m16n8k16", "m16n8k32")), (4, ("m8n8k32", "m16n8k32", "m16n8k64")))
        for shape in shapes
        for a, b in itertools.product((f"s{width}", f"u{width}"), repeat=2)
        for flag in ("", ".satfinite")
    )
)
BITWISE = instructions(
    *(f"{s}.row.col.s32.b1.b1.s32.{op}.popc" for s in ("m8n8k128", "m16n8k128", "m16n8k256") for op in ("xor", "and"))
)
FLOATS = [*HALVES, *VOLTA, *TF32, *FP8]


def name(modifiers):
    return ".".join(modifiers[2:])


@pytest.mark.parametrize("modifiers", FLOATS, ids=name)
def test_float_types_round_once(modifiers):
    result, a, b, c = run(modifiers, np.random.default_rng(1))
    kind = Layout(modifiers).d
    wanted = exact(a, b, c).astype(np.float16 if kind == "f16" else np.float32)
    np.testing.assert_array_equal(number(result, kind), wanted.astype(np.float64))


@pytest.mark.parametrize("modifiers", DOUBLES, ids=name)
def test_doubles(modifiers):
    result, a, b, c = run(modifiers, np.random.default_rng(2))
    bound = np.abs(a) @ np.abs(b) + np.abs(c)
    assert (np.abs(number(result, "f64") - exact(a, b, c)) <= 16 * np.finfo(np.float64).eps * bound).all()


@pytest.mark.parametrize("modifiers", INTEGERS, ids=name)
def test_integers_wrap_or_saturate(modifiers):
    rng, layout = np.random.default_rng(3), Layout(modifiers)
    shapes = {"a": (layout.m, layout.k), "b": (layout.k, layout.n), "c": (layout.m, layout.n)}
    raw = {x: random_raw(rng, (WARPS, 1, *shapes[x]), getattr(layout, x)) for x in "abc"}
    raw["c"][..., 0::2] = 0x7FFFFFFF  # where a sum leaves the range one way or the other
    raw["c"][..., 1::2] = 0x80000000
    result, a, b, c = run(modifiers, rng, raw)
    total = a @ b + c
    assert ((total > 2**31 - 1) | (total < -(2**31))).any(), "this test is to leave the range"
    if "satfinite" in modifiers:
        wanted = total.clip(-(2**31), 2**31 - 1)
    else:
        wanted = (total + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(number(result, "s32"), wanted)


@pytest.mark.parametrize("modifiers", BITWISE, ids=name)
def test_bits(modifiers):
    result, a, b, c = run(modifiers, np.random.default_rng(4))
    left, right = a[..., :, None, :], b.swapaxes(-1, -2)[..., None, :, :]
    ones = ((left ^ right) if "xor" in modifiers else (left & right)).sum(-1)
    np.testing.assert_array_equal(number(result, "s32"), (ones + c + 2**31) % 2**32 - 2**31)


def test_every_code_of_the_small_types():
    """Each 8-bit code times one, subnormals, infinities and NaN included."""
    for kind in ("e4m3", "e5m2", "s8", "u8"):
        accumulator = "s32" if kind in ("s8", "u8") else "f32"
        modifiers = instructions(f"m16n8k32.row.col.{accumulator}.{kind}.{kind}.{accumulator}")[0]
        one = {"e4m3": 0x38, "e5m2": 0x3C, "s8": 1, "u8": 1}[kind]
        for first in range(0, 256, 32):
            codes = np.arange(first, first + 32, dtype=np.uint64).reshape(WARPS, 16)
            a, b = np.zeros((WARPS, 1, 16, 32), np.uint64), np.zeros((WARPS, 1, 32, 8), np.uint64)
            a[:, 0, :, 5], b[:, 0, 5, :] = codes, one
            c = np.zeros((WARPS, 1, 16, 8), np.uint64)
            result = run(modifiers, None, {"a": a, "b": b, "c": c})[0]
            wanted = np.repeat(number(codes, kind)[:, None, :, None], 8, axis=3)
            np.testing.assert_array_equal(number(result, accumulator), wanted)


def test_tf32_ignores_the_low_bits():
    modifiers = TF32[0]
    one = np.uint64(np.float32(1).view(np.uint32))
    a, b = np.zeros((WARPS, 1, 16, 4), np.uint64), np.zeros((WARPS, 1, 4, 8), np.uint64)
    a[..., 0], b[..., 0, :] = one | np.uint64(0x1FFF), one
    c = np.zeros((WARPS, 1, 16, 8), np.uint64)
    assert (number(run(modifiers, None, {"a": a, "b": b, "c": c})[0], "f32") == 1).all()


def test_overflow_and_nan():
    """Sums beyond the type of D become infinite; NaN and infinity stay in their row."""
    half = lambda value: np.uint64(np.float16(value).view(np.uint16))
    a, b = np.zeros((WARPS, 1, 16, 8), np.uint64), np.zeros((WARPS, 1, 8, 8), np.uint64)
    a[..., 0, 0], a[..., 1, 0], a[..., 2, 0], a[..., 3, 0] = half(6e4), half(np.nan), half(np.inf), half(1)
    b[..., 0, :] = half(2)
    c = np.zeros((WARPS, 1, 16, 8), np.uint64)
    raw = {"a": a, "b": b, "c": c}
    for kind, first in (("f16", np.inf), ("f32", 2 * float(np.float16(6e4)))):
        d = number(run(instructions(f"m16n8k8.row.col.{kind}.f16.f16.{kind}")[0], None, raw)[0], kind)
        column = d[0, 0, :4, 0]
        np.testing.assert_array_equal(column, [first, np.nan, np.inf, 2])
        assert (d[..., 4:, :] == 0).all()


REFUSED = [
    "m16n8k32.row.col.f32.bf16.bf16.f32",  # no such shape
    "m16n8k16.row.row.f32.f16.f16.f32",  # only m8n8k4 has a choice of layouts
    "m16n8k16.row.col.f32.f16.f16.f16",  # D and C must be of one type
    "m8n8k4.row.col.f16.f16.f16.f32",
    "m16n8k16.row.col.f32.bf16.f16.f32",
    "m16n8k32.row.col.s32.s8.s4.s32",
    "m16n8k16.row.col.satfinite.f32.f16.f16.f32",
    "m16n8k256.row.col.s32.b1.b1.s32.or.popc",
    "m16n8k256.row.col.s32.b1.b1.s32",
    "m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32",
    "m16n8k16.row.col.f32.f16.f16",
]


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_listed_is_refused_by_name(line):
    with pytest.raises(UnsupportedInstruction, match="mma.sync.aligned." + line.replace(".", r"\.")):
        mma(("sync", "aligned", *line.split(".")))


def test_sparse_is_refused():
    with pytest.raises(UnsupportedInstruction, match="mma.sp.sync"):
        mma(("sp", "sync", "aligned", "m16n8k16", "row", "col", "f32", "f16", "f16", "f32"))


def inline_assembly(index, modifiers):
    """A kernel with this instruction, with as many registers as the simulator says."""
    unit = mma(modifiers)
    letter = {"u32": "r", "s32": "r", "f32": "f", "f64": "d"}
    ctype = {"u32": "unsigned", "s32": "int", "f32": "float", "f64": "double"}
    parts = [(x, getattr(unit, f"{x}_registers"), getattr(unit, f"{x}_type")) for x in "dabc"]
    numbers = itertools.count()
    braces = ", ".join("{" + ", ".join(f"%{next(numbers)}" for _ in range(count)) + "}" for _, count, _ in parts)
    outputs = ", ".join(f'"={letter[kind]}"(d[{i}])' for x, count, kind in parts[:1] for i in range(count))
    inputs = ", ".join(f'"{letter[kind]}"({x}[{i}])' for x, count, kind in parts[1:] for i in range(count))
    arguments = ", ".join(f"{ctype[kind]}* {x}" for x, _, kind in parts)
    instruction = ".".join(("mma", *modifiers))
    return (
        f'extern "C" __global__ void k{index}({arguments}) {{ asm volatile("{instruction} {braces};" '
        f": {outputs} : {inputs}); }}\n"
    )


def test_the_assembler_accepts_the_same_registers():
    """NVRTC assembles every instruction for sm_90 with the numbers and types of registers that we give it."""
    known = [*HALVES, *VOLTA, *TF32, *DOUBLES, *FP8, *INTEGERS, *BITWISE]
    text = "".join(inline_assembly(i, modifiers) for i, modifiers in enumerate(known))
    nvrtc = backend.nvrtc()
    program = nvrtc.createProgram(text, "all_mma.cu", [], [])
    try:
        nvrtc.compileProgram(program, ["-arch=sm_90"])
        assert nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program)[:4000])
    finally:
        nvrtc.destroyProgram(program)
