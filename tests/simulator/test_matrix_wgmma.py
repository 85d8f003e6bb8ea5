"""`wgmma`: addresses against the canonical layouts of the PTX ISA, fragments and sums against a plain product.

A layout is written here as the documents write it, as shapes and strides in the notation of CuTe:
((8,m),(T,2k)):((1T,SBO),(1,LBO)), and so on; the matrix is drawn into a buffer of bytes with it.
"""

import itertools

import numpy as np
import pytest
import torch

from cupyops._kernel.compile import backend
from cupyops.simulator.errors import UnsupportedInstruction
from cupyops.simulator.matrix import wgmma
from cupyops.simulator.tensormap import TensorMap

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32}
MODE = {0: 0, 128: 1, 64: 2, 32: 3}


def unit(line):
    return wgmma(("mma_async", "sync", "aligned", *line.split(".")))


def descriptor(start, leading, stride, span, first_line=0):
    encode = lambda x: (x & 0x3FFFF) >> 4
    bits = encode(start) | encode(leading) << 16 | encode(stride) << 32 | first_line << 49 | MODE[span] << 62
    return np.array([bits], np.uint64)


def position(index, shape, stride):
    """The CuTe rule: a number is taken apart by a shape, innermost first, and its parts go along the strides."""
    total = 0
    for extent, step in zip(shape, stride):
        total += index % extent * step
        index //= extent
    assert index == 0
    return total


def swizzle(bits, byte):
    """Swizzle<bits, 4, 3> of a byte address."""
    return byte ^ ((byte & (((1 << bits) - 1) << 7)) >> 3)


def canonical(span, transposed, rows, k, size, leading, stride):
    """(shape, stride) of rows and of k for the canonical layout; offsets in bytes, strides in elements."""
    T, LBO, SBO = 16 // size, leading // size, stride // size
    W = max(span, 16) // 16
    m, groups = rows // 8, k // 8
    if transposed and not span:
        return ((T, 1, rows // T), (1, T, SBO)), ((8, groups), (1 * T, LBO))
    if transposed:
        return ((T, W, rows // (T * W)), (1, T, LBO)), ((8, groups), (W * T, SBO))
    if not span:
        return ((8, m), (T, SBO)), ((T, k // T), (1, LBO))
    return ((8, m), (W * T, SBO)), ((T, k // T), (1, T))


def offsets(span, transposed, rows, k, size, leading, stride):
    """(rows, k): the byte of each element before the swizzle, counted from the start of the matrix."""
    by_row, by_column = canonical(span, transposed, rows, k, size, leading, stride)
    return np.array(
        [[(position(r, *by_row) + position(c, *by_column)) * size for c in range(k)] for r in range(rows)], np.int64
    )


def strides_for(span, transposed, rows, k, size):
    """Offsets that pack the groups without a gap, and others with gaps: (leading, stride)."""
    group = 8 * max(span, 16)  # bytes of eight lines
    if not transposed:
        row_groups = rows // 8
        return [(group * row_groups, group), (group, 2 * group)] if not span else [(16, group), (0, 3 * group)]
    row_groups = rows * size // max(span, 16)
    if not span:  # along the rows goes the stride offset, along k the leading one
        return [(group * row_groups, group), (group, 2 * group)]
    return [(2 * group, group), (group, group * row_groups)]


KINDS = [("f16", 16), ("tf32", 8), ("s8", 32)]
CASES = [
    (kind, k, span, transposed, rows)
    for (kind, k), span, transposed, rows in itertools.product(KINDS, (0, 32, 64, 128), (False, True), (64, 256))
    if kind == "f16" or not transposed
]


@pytest.mark.parametrize("kind, k, span, transposed, rows", CASES)
def test_addresses_are_those_of_the_canonical_layout(kind, k, span, transposed, rows):
    size = SIZE[kind]
    sums = "s32" if kind == "s8" else "f32"
    tested = unit(f"m64n256k{k}.{sums}.{kind}.{kind}")
    for leading, stride in strides_for(span, transposed, rows, k, size):
        start = 0x1400
        addresses = tested.operand_addresses(descriptor(start, leading, stride, span), rows, transposed)
        plain = offsets(span, transposed, rows, k, size, leading, stride)
        bits = {0: 0, 32: 1, 64: 2, 128: 3}[span]
        assert addresses.shape == (1, rows, k) and addresses.dtype == np.int64
        np.testing.assert_array_equal(addresses[0], swizzle(bits, start + plain))
        assert len(np.unique(addresses)) == rows * k


def test_the_examples_of_the_documents():
    """The layouts that the PTX ISA gives in numbers, each (shape, strides) in elements, with its two offsets."""
    rows_and_k = lambda *both: both
    examples = [
        ("tf32", 0, False, 64 * 4, 32 * 4, rows_and_k(((8, 2), (4, 32)), ((4, 2), (1, 64)))),
        ("tf32", 32, False, 16, 64 * 4, rows_and_k(((8, 2), (8, 64)), ((4, 2), (1, 4)))),
        ("bf16", 0, True, 128 * 2, 64 * 2, rows_and_k(((8, 1, 2), (1, 8, 64)), ((8, 2), (8, 128)))),
        ("bf16", 32, True, 128 * 2, 256 * 2, rows_and_k(((8, 2, 2), (1, 8, 128)), ((8, 2), (16, 256)))),
        ("bf16", 64, True, 256 * 2, 512 * 2, rows_and_k(((8, 4, 2), (1, 8, 256)), ((8, 2), (32, 512)))),
    ]
    for kind, span, transposed, leading, stride, (by_row, by_column) in examples:
        rows, k, size = int(np.prod(by_row[0])), int(np.prod(by_column[0])), SIZE[kind]
        tested = unit(f"m64n{rows}k{k}.f32.{kind}.{kind}")
        addresses = tested.operand_addresses(descriptor(0, leading, stride, span), rows, transposed)[0]
        bits = {0: 0, 32: 1, 64: 2}[span]
        for r, c in np.ndindex(rows, k):
            assert addresses[r, c] == swizzle(bits, (position(r, *by_row) + position(c, *by_column)) * size)


def test_a_step_along_k_inside_of_the_swizzle():
    """64 halves of a row in lines of 128 bytes: the k-th 16 of them begin 32 k bytes further on."""
    tested = unit("m64n64k16.f32.f16.f16")
    lines = np.arange(64)[:, None] * 128 + np.arange(64)[None, :] * 2
    for k in range(4):
        addresses = tested.operand_addresses(descriptor(2048 + 32 * k, 16, 1024, 128), 64, False)[0]
        np.testing.assert_array_equal(addresses, swizzle(3, 2048 + lines[:, 16 * k : 16 * k + 16]))


@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize("first_line", range(1, 8))
def test_the_base_offset_says_where_the_pattern_starts(span, first_line):
    """A pattern that starts off its boundary: as if it started on one, and then moved there as it is."""
    tested = unit("m64n64k16.f32.f16.f16")
    start = 4096 + 128 * first_line
    there = tested.operand_addresses(descriptor(start, 16, 8 * span, span, first_line), 64, False)
    on_boundary = tested.operand_addresses(descriptor(4096, 16, 8 * span, span), 64, False)
    np.testing.assert_array_equal(there - start, on_boundary - 4096)


def test_each_group_has_its_own_descriptor():
    tested = unit("m64n32k16.f32.f16.f16")
    each = [descriptor(0, 16, 512, 64), descriptor(8192, 16, 1024, 128), descriptor(4096, 128, 256, 0)]
    together = tested.operand_addresses(np.concatenate(each), 32, False)
    for i, one in enumerate(each):
        np.testing.assert_array_equal(together[i], tested.operand_addresses(one, 32, False)[0])


@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize("transposed", [False, True])
def test_tensor_copies_write_what_wgmma_reads(span, transposed):
    """A tile that a tensor map puts into shared memory with a swizzle is found again with the same swizzle."""
    rows, k = 64, 16
    matrix = np.arange(rows * k, dtype=np.uint16).reshape(rows, k)
    stored = np.ascontiguousarray(matrix.T if transposed else matrix)  # as it lies in global memory
    width = span // 2  # halves in a line
    padded = np.zeros((stored.shape[0], max(stored.shape[1], width)), np.uint16)
    padded[:, : stored.shape[1]] = stored
    shared, base = np.zeros(1 << 15, np.uint16), 0x2000
    lines = padded.shape[0]
    tile_map = TensorMap.of_array(padded, 1 << 20, (width, lines), swizzle=span)
    for i in range(padded.shape[1] // width):
        tile_base = base + i * lines * span
        addresses, inside, places = tile_map.tile((i * width, 0), tile_base)
        assert inside.all()
        shared[(tile_base + places) // 2] = padded.ravel()[(addresses - (1 << 20)) // 2]
    leading, stride = (lines * span, 8 * span) if transposed else (16, 8 * span)
    found = unit("m64n64k16.f32.f16.f16").operand_addresses(descriptor(base, leading, stride, span), rows, transposed)
    np.testing.assert_array_equal(shared[found[0] // 2], matrix)


# CuTe's register layouts: (threads, values) -> row + 64 * column
A_LAYOUT = {
    4: (((4, 8, 4), (64, 1, 16)), ((2, 2), (8, 256))),
    2: (((4, 8, 4), (128, 1, 16)), ((2, 2, 2), (64, 8, 512))),
    1: (((4, 8, 4), (256, 1, 16)), ((4, 2, 2), (64, 8, 1024))),
}


def d_layout(n):
    return ((4, 8, 4), (128, 1, 16)), ((2, 2, n // 8), (64, 8, 512))


def place(layout, thread, value):
    """(row, column) of a thread's value."""
    by_thread, by_value = layout
    column, row = divmod(position(thread, *by_thread) + position(value, *by_value), 64)
    return row, column


def random_raw(rng, shape, kind):
    if kind == "tf32":
        return rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    if kind in ("s8", "u8"):
        return rng.integers(0, 256, shape).astype(np.uint8)
    integer = torch.uint8 if SIZE[kind] == 1 else torch.int16
    raw = torch.from_numpy(rng.standard_normal(shape)).to(TORCH[kind]).view(integer).numpy()
    return raw.view(UINT[SIZE[kind]])


def number(raw, kind):
    if kind == "tf32":
        return (raw >> np.uint32(13) << np.uint32(13)).view(np.float32).astype(np.float64)
    if kind in ("s8", "u8"):
        return raw.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    return torch.from_numpy(raw).view(TORCH[kind]).double().numpy()


def packed(groups, layout, size, values):
    """Raw elements (groups, 64, columns) -> registers of 32 bits, packed value by value."""
    per = 4 // size
    registers = np.zeros((values // per, 128 * len(groups)), np.uint32)
    for (g, matrix), thread, value in itertools.product(enumerate(groups), range(128), range(values)):
        element = int(matrix[place(layout, thread, value)])
        registers[value // per, 128 * g + thread] |= np.uint32(element << (8 * size * (value % per)))
    return list(registers)


TYPES = [
    ("f16", "f16", "f16"),
    ("f32", "f16", "f16"),
    ("f32", "bf16", "bf16"),
    ("f32", "tf32", "tf32"),
    *((d, a, b) for d in ("f16", "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *(("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")),
]
SUM = {"f16": np.uint16, "f32": np.float32, "s32": np.int32}


@pytest.mark.parametrize("d, a, b", TYPES)
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_the_product(d, a, b, a_in_registers):
    """Two warpgroups, of which one adds to D and the other begins anew."""
    n, k, groups = 24, 32 // SIZE[a], 2
    rng = np.random.default_rng(5)
    tested = unit(f"m64n{n}k{k}.{d}.{a}.{b}")
    raw_a, raw_b = random_raw(rng, (groups, 64, k), a), random_raw(rng, (groups, n, k), b)
    if d == "s32":
        before = rng.integers(-1000, 1000, (groups, 64, n)).astype(np.int32)
    else:
        before = rng.standard_normal((groups, 64, n)).astype(np.float16 if d == "f16" else np.float32)
    before_raw = before.view(np.uint16 if d == "f16" else np.uint32)
    size = 2 if d == "f16" else 4
    d_registers = packed(before_raw, d_layout(n), size, n // 2)
    assert len(d_registers) == tested.d_registers
    view = {"f32": np.float32, "u32": np.uint32, "s32": np.int32}[tested.d_type]
    left = packed(raw_a, A_LAYOUT[SIZE[a]], SIZE[a], k // 2) if a_in_registers else raw_a
    assert not a_in_registers or len(left) == tested.a_registers
    signs = (1, 1) if d == "s32" else (-1, 1) if a_in_registers else (1, -1)
    scale_d = np.array([True, False])
    result = tested.compute(left, raw_b, [x.view(view) for x in d_registers], scale_d, *signs)
    product = signs[0] * signs[1] * number(raw_a, a) @ number(raw_b, b).swapaxes(-1, -2)
    wanted = product + np.where(scale_d[:, None, None], before.astype(np.float64), 0)
    wanted_raw = wanted.astype(before.dtype).view(before_raw.dtype)
    expected = packed(wanted_raw, d_layout(n), size, n // 2)
    assert len(result) == len(expected) and all(x.dtype == view for x in result)
    np.testing.assert_array_equal(np.stack([x.view(np.uint32) for x in result]), np.stack(expected))


def test_the_sum_ignores_a_nan_that_is_not_added():
    tested = unit("m64n8k16.f32.f16.f16")
    a, b = np.zeros((1, 64, 16), np.uint16), np.zeros((1, 8, 16), np.uint16)
    d = [np.full(128, np.nan, np.float32)] * 4
    assert all((x == 0).all() for x in tested.compute(a, b, d, np.array([False]), 1, 1))
    assert all(np.isnan(x).all() for x in tested.compute(a, b, d, np.array([True]), 1, 1))


def test_integers_wrap_or_saturate():
    a, b = np.full((1, 64, 32), 1, np.uint8), np.full((1, 8, 32), 1, np.uint8)
    d = [np.full(128, 2**31 - 1, np.int32)] * 4
    wrapped = unit("m64n8k32.s32.s8.s8").compute(a, b, d, np.array([True]), 1, 1)
    assert all((x == -(2**31) + 31).all() for x in wrapped)
    bounded = unit("m64n8k32.satfinite.s32.s8.s8").compute(a, b, d, np.array([True]), 1, 1)
    assert all((x == 2**31 - 1).all() for x in bounded)


REFUSED = [
    "m64n12k16.f32.f16.f16", "m64n264k16.f32.f16.f16", "m64n0k16.f32.f16.f16", "m64n40k32.s32.s8.s8",
    "m64n8k8.f32.f16.f16", "m64n8k16.f16.bf16.bf16", "m64n8k16.f32.f16.bf16", "m64n8k32.f32.s8.s8",
    "m64n8k256.s32.b1.b1.and.popc", "m64n8k16.satfinite.f32.f16.f16",
]  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_listed_is_refused_by_name(line):
    with pytest.raises(UnsupportedInstruction, match="wgmma.mma_async.sync.aligned." + line.replace(".", r"\.")):
        unit(line)


def test_sparse_and_a_transposed_tf32_are_refused():
    with pytest.raises(UnsupportedInstruction, match=r"wgmma\.mma_async\.sp\.sync"):
        wgmma(("mma_async", "sp", "sync", "aligned", "m64n8k32", "f32", "f16", "f16"))
    with pytest.raises(UnsupportedInstruction, match="transposed operand of type tf32"):
        unit("m64n8k8.f32.tf32.tf32").operand_addresses(descriptor(0, 16, 128, 0), 64, True)


def inline_assembly(index, line, a_in_registers):
    """A kernel with this instruction, with as many registers as the simulator says."""
    tested = unit(line)
    half = tested.a_type in ("f16", "bf16")
    immediates = "" if tested.d_type == "s32" else ", 1, 1" + (", 0" * (1 if a_in_registers else 2) if half else "")
    count, letter = tested.d_registers, "f" if tested.d_type == "f32" else "r"
    ctype = {"f32": "float", "u32": "unsigned", "s32": "int"}[tested.d_type]
    outputs = ", ".join(f"%{i}" for i in range(count))
    left = "{" + ", ".join(f"%{count + i}" for i in range(tested.a_registers)) + "}" if a_in_registers else f"%{count}"
    a_inputs = [f'"r"(a[{i}])' for i in range(tested.a_registers)] if a_in_registers else ['"l"(x)']
    asm = f"wgmma.mma_async.sync.aligned.{line} {{{outputs}}}, {left}, %{count + len(a_inputs)}, p{immediates};"
    return (
        f'extern "C" __global__ void k{index}({ctype}* d, unsigned* a, unsigned long long x, unsigned long long y) {{\n'
        f'  asm volatile("{{.reg .pred p; setp.eq.u32 p, 1, 1; wgmma.fence.sync.aligned; {asm} '
        f'wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;}}" : '
        + ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
        + f' : {", ".join(a_inputs)}, "l"(y));\n}}\n'
    )


def test_the_assembler_accepts_the_same_registers():
    """NVRTC assembles for sm_90a: every type, with the narrowest and the widest n, A in registers or not."""
    lines = [f"m64n{n}k{32 // SIZE[a]}.{d}.{a}.{b}" for d, a, b in TYPES for n in (8, 256)]
    both = itertools.product(lines, (False, True))
    text = "".join(inline_assembly(i, line, a_in_registers) for i, (line, a_in_registers) in enumerate(both))
    nvrtc = backend.nvrtc()
    program = nvrtc.createProgram(text, "all_wgmma.cu", [], [])
    try:
        nvrtc.compileProgram(program, ["-arch=sm_90a"])
        assert nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program)[:4000])
    finally:
        nvrtc.destroyProgram(program)
