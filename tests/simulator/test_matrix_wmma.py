"""`wmma`: load, multiply and store as a machine does it, on matrices in memory, against a plain product."""

import itertools

import numpy as np
import pytest
import torch

from cupyops._kernel.compile import backend
from cupyops.simulator.errors import UnsupportedInstruction
from cupyops.simulator.matrix import wmma, wmma_memory

WARPS = 2
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "f64": 64, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NUMPY = {"u32": np.uint32, "f32": np.float32, "s32": np.int32, "f64": np.float64}
SIXTEENS = ("m16n16k16", "m32n8k16", "m8n32k16")


def cases():
    """(shape, d, a, c, layouts of A, B, C and D, flags)."""
    layouts = list(itertools.product(("row", "col"), repeat=4))
    kinds = [(x, d, "f16", c) for x in SIXTEENS for d in ("f16", "f32") for c in ("f16", "f32")]
    kinds += [(x, "f32", "bf16", "f32") for x in SIXTEENS] + [("m16n16k8", "f32", "tf32", "f32")]
    kinds += [(x, "s32", a, "s32") for x in SIXTEENS for a in ("s8", "u8")] + [("m8n8k4", "f64", "f64", "f64")]
    for i, (shape, d, a, c) in enumerate(kinds):
        yield shape, d, a, c, layouts[i % 16], ()
        yield shape, d, a, c, layouts[15 - i % 16], ()
    for shape, a, *flags in (
        ("m8n8k32", "s4"),
        ("m8n8k32", "u4"),
        ("m8n8k128", "b1", "xor", "popc"),
        ("m8n8k128", "b1", "and", "popc"),
    ):
        yield shape, "s32", a, "s32", ("row", "col", "row", "col"), tuple(flags)


CASES = list(cases())


def multiply(shape, d, a, c):
    """The modifiers of wmma.mma but for the layouts and flags."""
    return (shape, d, c) if a == "f16" else (shape, d, a, a, c)


def random_numbers(rng, shape, kind):
    """Numbers that the type holds exactly, as float64."""
    if kind == "f64":
        return rng.standard_normal(shape)
    if kind in ("f32", "s32"):
        return rng.integers(-1000, 1000, shape).astype(np.float64)
    if kind in ("f16", "bf16", "tf32"):
        return rng.integers(-15, 16, shape).astype(np.float64)
    low = -(2 ** (BITS[kind] - 1)) if kind.startswith("s") else 0
    return rng.integers(low, low + 2 ** BITS[kind], shape).astype(np.float64)


def to_bytes(numbers, kind):
    """(rows, elements along memory) -> bytes of each row."""
    if kind == "bf16":
        return torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16().view(torch.int16).numpy().view(np.uint8)
    if BITS[kind] >= 8:
        types = {"f16": "f2", "tf32": "f4", "f32": "f4", "f64": "f8", "s32": "i4", "s8": "i1", "u8": "u1"}
        return np.ascontiguousarray(numbers.astype(types[kind])).view(np.uint8)
    codes = numbers.astype(np.int64) & ((1 << BITS[kind]) - 1)
    per = 8 // BITS[kind]
    packed = sum(codes[:, i::per] << (BITS[kind] * i) for i in range(per))
    return packed.astype(np.uint8)


def in_memory(matrix, kind, layout, stride):
    """The matrix in bytes, `stride` elements from line to line."""
    lines = matrix if layout == "row" else matrix.T
    pitch = stride * BITS[kind] // 8
    memory = np.full(len(lines) * pitch, 0xEE, np.uint8)
    for i, line in enumerate(to_bytes(lines, kind)):
        memory[i * pitch : i * pitch + line.size] = line
    return memory


def load(which, shape, kind, layout, matrices, extra):
    """wmma.load as the machine does it: items are gathered from bytes at the offsets, warp by warp."""
    unit = wmma_memory(("load", which, "sync", "aligned", layout, shape, "global", kind))
    rows, columns = matrices[0].shape
    assert unit.default_stride == (columns if layout == "row" else rows)
    strides = [unit.default_stride + extra * (warp + 1) for warp in range(WARPS)]
    offsets = unit.offsets(np.array(strides)).reshape(WARPS, 32, -1)
    items = []
    for warp in range(WARPS):
        memory = in_memory(matrices[warp], kind, layout, strides[warp])
        gathered = memory[offsets[warp][..., None] + np.arange(unit.item_bytes)]
        items.append(gathered.view(UINT[unit.item_bytes])[..., 0])
    registers = unit.pack(np.concatenate(items))
    assert len(registers) == unit.registers
    return registers


def store(shape, kind, layout, registers, m, n):
    unit = wmma_memory(("store", "d", "sync", "aligned", layout, shape, "shared", kind))
    stride = unit.default_stride + 16
    offsets, items = unit.offsets(np.full(WARPS, stride)), unit.unpack(registers)
    lines = m if layout == "row" else n
    out = np.full((WARPS, lines * stride * BITS[kind] // 8), 0xEE, np.uint8)
    for thread, (places, values) in enumerate(zip(offsets, items)):
        for place, value in zip(places, values):
            out[thread // 32, place : place + unit.item_bytes] = np.frombuffer(value.tobytes(), np.uint8)
    types = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}
    found = out.view(types[kind]).reshape(WARPS, lines, stride)[..., : unit.default_stride]
    return found if layout == "row" else found.swapaxes(-1, -2)


@pytest.mark.parametrize("shape, d, a, c, layouts, flags", CASES)
def test_load_multiply_store(shape, d, a, c, layouts, flags):
    m, n, k = (int(x) for x in shape.replace("m", "").replace("n", " ").replace("k", " ").split())
    rng = np.random.default_rng(6)
    left, right = random_numbers(rng, (WARPS, m, k), a), random_numbers(rng, (WARPS, k, n), a)
    before = random_numbers(rng, (WARPS, m, n), c)
    extra = 128 if BITS[a] < 8 else 8
    registers = [load("a", shape, a, layouts[0], left, extra), load("b", shape, a, layouts[1], right, extra)]
    registers.append(load("c", shape, c, layouts[2], before, 8))
    unit = wmma(("mma", *flags, "sync", "aligned", *layouts[:2], *multiply(shape, d, a, c)))
    assert [len(x) for x in registers] == [unit.a_registers, unit.b_registers, unit.c_registers]
    assert [x[0].dtype for x in registers] == [NUMPY[unit.a_type], NUMPY[unit.b_type], NUMPY[unit.c_type]]
    result = store(shape, d, layouts[3], unit.compute(*registers), m, n)
    if "xor" in flags:
        product = (left[..., :, None, :] != right.swapaxes(-1, -2)[..., None, :, :]).sum(-1)
    else:
        product = left @ right
    np.testing.assert_allclose(result, (product + before).astype(result.dtype), rtol=0 if a != "f64" else 1e-14)


def test_saturation():
    unit = wmma(("mma", "sync", "aligned", "row", "col", "m16n16k16", "s32", "s8", "s8", "s32", "satfinite"))
    ones = [np.full(32, 0x01010101, np.uint32)] * 2
    d = unit.compute(ones, ones, [np.full(32, 2**31 - 5, np.int32)] * 8)
    assert all((x == 2**31 - 1).all() for x in d)


REFUSED = [
    ("load", "a", "sync", "aligned", "row", "m16n16k8", "f16"),
    ("load", "d", "sync", "aligned", "row", "m16n16k16", "f32"),
    ("load", "a", "sync", "aligned", "col", "m8n8k32", "s4"),
    ("store", "d", "sync", "aligned", "row", "m16n16k16", "local", "f32"),
    ("mma", "sync", "aligned", "row", "col", "m16n16k16", "s32", "s8", "u8", "s32"),
    ("mma", "sync", "aligned", "row", "col", "m16n16k16", "f32", "bf16", "bf16", "f32", "satfinite"),
    ("mma", "sync", "aligned", "col", "col", "m8n8k32", "s32", "s4", "s4", "s32"),
    ("mma", "sync", "aligned", "row", "col", "m8n8k128", "s32", "b1", "b1", "s32"),
    ("mma", "sync", "aligned", "row", "col", "m8n8k4", "rz", "f64", "f64", "f64", "f64"),
]


@pytest.mark.parametrize("modifiers", REFUSED, ids=".".join)
def test_what_is_not_listed_is_refused_by_name(modifiers):
    with pytest.raises(UnsupportedInstruction, match=r"wmma\." + r"\.".join(modifiers)):
        (wmma if modifiers[0] == "mma" else wmma_memory)(modifiers)


def inline_assembly(index, shape, d, a, c, layouts, flags):
    """A kernel that loads, multiplies and stores with as many registers as the simulator says."""
    names = {"u32": ".b32", "s32": ".s32", "f32": ".f32", "f64": ".f64"}
    unit = wmma(("mma", *flags, "sync", "aligned", *layouts[:2], *multiply(shape, d, a, c)))
    group = lambda x: "{" + ", ".join(f"{x}{i}" for i in range(getattr(unit, f"{x}_registers"))) + "}"
    lines = [f".reg {names[getattr(unit, f'{x}_type')]} {x}<{getattr(unit, f'{x}_registers')}>;" for x in "abcd"]
    for x, layout, kind in zip("abc", layouts, (a, a, c)):
        lines.append(f"wmma.load.{x}.sync.aligned.{layout}.{shape}.{kind} {group(x)}, [%0], %1;")
    words = ".".join(("wmma.mma", *flags, "sync.aligned", *layouts[:2], *multiply(shape, d, a, c)))
    lines.append(f"{words} {group('d')}, {group('a')}, {group('b')}, {group('c')};")
    lines.append(f"wmma.store.d.sync.aligned.{layouts[3]}.{shape}.{d} [%0], {group('d')}, %1;")
    body = "{" + " ".join(lines) + "}"
    head = f'extern "C" __global__ void k{index}(void* p, int s)'
    return f'{head} {{ asm volatile("{body}" :: "l"(p), "r"(s) : "memory"); }}\n'


def test_the_assembler_accepts_the_same_registers():
    text = "".join(inline_assembly(i, *case) for i, case in enumerate(CASES))
    nvrtc = backend.nvrtc()
    program = nvrtc.createProgram(text, "all_wmma.cu", [], [])
    try:
        nvrtc.compileProgram(program, ["-arch=sm_80"])
        assert nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program)[:4000])
    finally:
        nvrtc.destroyProgram(program)
