"""Instructions end to end, from CUDA C through NVRTC: matrix units, packed and bit arithmetic, calls, structs."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from simulator.kit import launch, program, run

from cupyops.simulator import Pointer, Program

RNG = np.random.default_rng(11)


# --- matrix units ---

FRAGMENTS = """
    __device__ unsigned at(const void* p) { return __cvta_generic_to_shared(p); }
    __global__ void multiply(const unsigned short* a, const unsigned short* b, float* d, unsigned short* copy) {
        __shared__ __align__(16) unsigned short sa[16 * 24], sb[16 * 24];
        int lane = threadIdx.x;
        for (int i = lane; i < 256; i += 32) sa[i / 16 * 24 + i % 16] = a[i];
        for (int i = lane; i < 128; i += 32) sb[i / 8 * 24 + i % 8] = b[i];
        __syncwarp();
        unsigned ra[4], rb[2];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(at(sa + lane % 16 * 24 + lane / 16 * 8)));
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
            : "=r"(rb[0]), "=r"(rb[1]) : "r"(at(sb + lane % 16 * 24)));
        float r[4] = {1.f, 2.f, 3.f, 4.f};
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3])
            : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
        for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = r[i];
        __syncwarp();
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
            :: "r"(at(sb + lane % 8 * 24 + lane / 8 * 192)), "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]) : "memory");
        __syncwarp();
        for (int i = lane; i < 256; i += 32) copy[i] = sb[i / 64 * 192 + i / 8 % 8 * 24 + i % 8];
    }
"""


def test_mma_with_ldmatrix_and_stmatrix():
    code = FRAGMENTS.replace("sb[16 * 24]", "sb[32 * 24]")
    a, b = (RNG.integers(-5, 6, shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    d, copy = np.zeros((16, 8), np.float32), np.zeros((4, 8, 8), np.float16)
    run(code, "multiply", 1, 32, a.view(np.uint16), b.view(np.uint16), d, copy.view(np.uint16), arch="sm_90")
    start = 1 + np.arange(8) % 2 + 2 * (np.arange(16) // 8)[:, None]
    assert (d == a.astype(np.float32) @ b.astype(np.float32) + start).all()
    assert (copy == [a[:8, :8].T, a[8:, :8].T, a[:8, 8:].T, a[8:, 8:].T]).all()


def test_wmma_through_global_memory():
    """One warp for each of two products, with float sums."""
    inputs = "{%0, %1, %2, %3, %4, %5, %6, %7}"
    eight = ", ".join(f'"=r"({{0}}[{i}])' for i in range(8))
    load = f'asm volatile("wmma.load.{{0}}.sync.aligned.{{1}}.m16n16k16.global.f16 {inputs}, [%8], 16;"'
    load += f' : {eight} : "l"({{0}}g + 256 * w));'
    load = load.replace(inputs, "{" + inputs + "}")
    sums = ", ".join(f'"=f"(d[{i}])' for i in range(8))
    registers = [", ".join(f"%{i}" for i in range(first, first + 8)) for first in (0, 8, 16)]
    zeros = ", ".join(["%24"] * 8)
    sources = ", ".join(f'"r"({name}[{i}])' for name in "ab" for i in range(8))
    stored = ", ".join(f'"f"(d[{i}])' for i in range(8))
    code = f"""
        __global__ void multiply(const unsigned short* ag, const unsigned short* bg, float* y) {{
            unsigned a[8], b[8];
            float d[8];
            int w = threadIdx.x / 32;
            {load.format("a", "row")}
            {load.format("b", "col")}
            asm volatile("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {{{registers[0]}}}, "
                "{{{registers[1]}}}, {{{registers[2]}}}, {{{zeros}}};"
                : {sums} : {sources}, "f"(0.5f));
            asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%8], {inputs}, 16;"
                :: {stored}, "l"(y + 256 * w) : "memory");
        }}
    """
    a, b = (RNG.integers(-5, 6, (2, 16, 16)).astype(np.float16) for _ in range(2))
    y = np.zeros((2, 16, 16), np.float32)
    run(code, "multiply", 1, 64, a.view(np.uint16), b.view(np.uint16), y)
    assert (y == a.astype(np.float32) @ b.astype(np.float32).transpose(0, 2, 1) + 0.5).all()


# --- bits and packed integers ---


def test_dot_products_of_bytes():
    code = """
        __global__ void dots(const int* a, const int* b, int* y) {
            int i = threadIdx.x;
            y[3 * i] = __dp4a(a[i], b[i], i);
            y[3 * i + 1] = __dp4a(unsigned(a[i]), unsigned(b[i]), unsigned(i));
            y[3 * i + 2] = __dp2a_hi(a[i], b[i], -i);
        }
    """
    a, b = (RNG.integers(-(2**31), 2**31, 32).astype(np.int32) for _ in range(2))
    y = np.zeros((32, 3), np.int32)
    run(code, "dots", 1, 32, a, b, y)
    i = np.arange(32)
    signed = (a.view(np.int8).reshape(32, 4).astype(np.int64) * b.view(np.int8).reshape(32, 4)).sum(1) + i
    unsigned = (a.view(np.uint8).reshape(32, 4).astype(np.int64) * b.view(np.uint8).reshape(32, 4)).sum(1) + i
    halves = (a.view(np.int16).reshape(32, 2).astype(np.int64) * b.view(np.int8).reshape(32, 4)[:, 2:]).sum(1) - i
    assert y.tolist() == np.stack([signed, unsigned, halves], 1).tolist()


def test_bits():
    code = """
        __global__ void bits(const unsigned* x, unsigned* y) {
            unsigned i = threadIdx.x, v = x[i], w = x[31 - i], *out = y + 9 * i;
            out[0] = __byte_perm(v, w, 0x6531);
            out[1] = __popc(v);
            out[2] = __clz(v);
            out[3] = __brev(v);
            out[4] = __ffs(v);
            out[5] = __funnelshift_l(v, w, i);
            out[6] = __funnelshift_rc(v, w, i + 3);
            out[7] = (v >> (i % 7)) & 0x3ff;
            out[8] = (v & w) ^ (~v | i);
        }
    """
    x = RNG.integers(0, 1 << 32, 32).astype(np.uint32)
    x[:2] = 0, 1
    y = np.zeros((32, 9), np.uint32)
    run(code, "bits", 1, 32, x, y)
    for i in range(32):
        v, w = int(x[i]), int(x[31 - i])
        both = (w << 32 | v).to_bytes(8, "little")
        permuted = int.from_bytes(bytes(both[k] for k in (1, 3, 5, 6)), "little")
        text = f"{v:032b}"
        lowest = (v & -v).bit_length()
        assert y[i].tolist() == [
            permuted, v.bit_count(), 32 - v.bit_length(), int(text[::-1], 2), lowest,
            ((w << 32 | v) << i >> 32) & 0xFFFFFFFF, (w << 32 | v) >> min(i + 3, 32) & 0xFFFFFFFF,
            v >> i % 7 & 0x3FF, (v & w) ^ (~v & 0xFFFFFFFF | i),
        ]  # fmt: skip


def test_wide_arithmetic():
    """Products and sums of 128 bits, through carries."""
    code = """
        __global__ void wide(const unsigned long long* a, const unsigned long long* b, unsigned long long* y) {
            int i = threadIdx.x;
            unsigned __int128 p = (unsigned __int128)a[i] * b[i] + (((unsigned __int128)b[i] << 64) | a[i]);
            y[4 * i] = p;
            y[4 * i + 1] = p >> 64;
            y[4 * i + 2] = a[i] / (b[i] >> 40);
            y[4 * i + 3] = (long long)a[i] % ((long long)b[i] >> 20);
        }
    """
    a, b = (RNG.integers(1 << 62, 1 << 64, 32, np.uint64) for _ in range(2))
    y = np.zeros((32, 4), np.uint64)
    run(code, "wide", 1, 32, a, b, y)
    for row, left, right in zip(y.tolist(), a.tolist(), b.tolist()):
        product = left * right + (right << 64 | left) & (1 << 128) - 1
        dividend, divisor = (value - (1 << 64 if value >> 63 else 0) for value in (left, right))
        divisor >>= 20
        rest = abs(dividend) % abs(divisor) * (1 if dividend >= 0 else -1)
        assert row == [product & (1 << 64) - 1, product >> 64, left // (right >> 40), rest & (1 << 64) - 1]


def quotient(a: int, b: int) -> int:
    """Toward zero."""
    return abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


WIDE: dict[str, Callable[[int, int, int], int]] = {
    "a + b": lambda a, b, n: a + b,
    "a - b": lambda a, b, n: a - b,
    "a * b": lambda a, b, n: a * b,
    "a / b": lambda a, b, n: quotient(a, b),
    "a % b": lambda a, b, n: a - b * quotient(a, b),
    "a & b": lambda a, b, n: a & b,
    "a | b": lambda a, b, n: a | b,
    "a ^ b": lambda a, b, n: a ^ b,
    "~a": lambda a, b, n: ~a,
    "-a": lambda a, b, n: -a,
    "a << n": lambda a, b, n: a << n,
    "a >> n": lambda a, b, n: a >> n,
    "a < b": lambda a, b, n: a < b,
    "a <= b": lambda a, b, n: a <= b,
    "a == b": lambda a, b, n: a == b,
    "a > b": lambda a, b, n: a > b,
    "a > b ? a - b : b - a": lambda a, b, n: abs(a - b),
    "(wide)(double)(a >> 70)": lambda a, b, n: int(float(a >> 70)),
    "(wide)(long long)a": lambda a, b, n: (a + 2**63) % 2**64 - 2**63,
}


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_of_128_bits(signed: bool):
    """Every operation, against Python's integers: of random, narrow and extreme numbers."""
    names = [name for name in WIDE if signed or "double" not in name and "long long" not in name]
    stores = " ".join(f"y[{len(names)} * i + {place}] = {name};" for place, name in enumerate(names))
    code = f"""
        typedef {"" if signed else "unsigned "}__int128 wide;
        __global__ void each(const wide* x, const wide* z, wide* y) {{
            int i = threadIdx.x, n = i % 128;
            wide a = x[i], b = z[i];
            {stores}
        }}
    """
    low = -(2**127) if signed else 0
    ends = [low, low + 1, low + 2**64, 2**64 - 1, 2**64, 2**96, 2**96 - 1, 2**126, low + 2**128 - 1, 1, 3, 10**30]
    draw = random.Random(0)
    pairs = [(a, b) for a in ends for b in ends]
    for shift in draw.choices([0, 0, 20, 31, 33, 64, 90], k=300):
        pairs += [(draw.randrange(2**128) + low >> shift, draw.randrange(2**128) + low >> draw.choice([0, 20, 64, 90]))]
    pairs = [(a, b) for a, b in pairs if b and (a, b) != (low, -1)]
    mask = 2**128 - 1
    x, z = (
        np.frombuffer(b"".join((pair[k] & mask).to_bytes(16, "little") for pair in pairs), np.uint64) for k in (0, 1)
    )
    y = np.zeros((len(pairs), len(names), 2), np.uint64)
    run(code, "each", 1, len(pairs), x.copy(), z.copy(), y)
    for i, (a, b) in enumerate(pairs):
        for name, (first, second) in zip(names, y[i].tolist()):
            assert first | second << 64 == WIDE[name](a, b, i % 128) & mask, (name, a, b)


def test_a_guarded_carry_leaves_that_of_other_threads():
    code = """
        __global__ void guarded(unsigned* y) {
            unsigned r;
            asm("{ .reg .pred p; .reg .u32 t; setp.lt.u32 p, %1, 16; add.cc.u32 t, 0xffffffff, 1;"
                " @p add.cc.u32 t, 1, 1; addc.u32 %0, 0, 0; }" : "=r"(r) : "r"(threadIdx.x));
            y[threadIdx.x] = r;
        }
    """
    y = np.zeros(32, np.uint32)
    run(code, "guarded", 1, 32, y)
    assert y.tolist() == [0] * 16 + [1] * 16


def test_special_functions_and_conversions():
    code = """
        __global__ void convert(const float* x, int* n, float* y, unsigned char* c) {
            int i = threadIdx.x;
            n[2 * i] = int(x[i]);
            n[2 * i + 1] = __float2int_rn(x[i]);
            y[3 * i] = fmaf(x[i], x[i], 1.f);
            y[3 * i + 1] = sqrtf(fabsf(x[i]));
            y[3 * i + 2] = rintf(x[i]);
            c[i] = (unsigned char)(int)x[i];
        }
    """
    x = (RNG.standard_normal(32) * 50).astype(np.float32)
    n, y, c = np.zeros((32, 2), np.int32), np.zeros((32, 3), np.float32), np.zeros(32, np.uint8)
    run(code, "convert", 1, 32, x, n, y, c)
    assert n.tolist() == np.stack([np.trunc(x), np.rint(x)], 1).astype(int).tolist()
    wide = x.astype(np.float64)
    assert (y == np.stack([wide * wide + 1, np.sqrt(abs(wide)), np.rint(wide)], 1).astype(np.float32)).all()
    assert c.tolist() == np.trunc(x).astype(np.int64).astype(np.uint8).tolist()


def test_the_clock_goes_on():
    code = """
        __global__ void ticks(long long* y, unsigned* z) {
            long long start = clock64();
            unsigned low = clock();
            __syncthreads();
            y[threadIdx.x] = clock64() - start;
            z[threadIdx.x] = clock() - low;
        }
    """
    y, z = np.zeros(64, np.int64), np.zeros(64, np.uint32)
    run(code, "ticks", 1, 64, y, z)
    assert (y > 0).all() and (z > 0).all() and (z < 1000).all()


# --- calls, tables, structs ---


def test_functions_that_are_not_inlined():
    """Values, pointers and structs as arguments and results; a call in diverged code; calls within calls."""
    code = """
        struct Pair { double left; int right; char tag; };
        __device__ __noinline__ int twice(int n) { return 2 * n; }
        __device__ __noinline__ Pair make(int n, float f) {
            Pair p;
            p.left = n + f; p.right = twice(n) + 1; p.tag = char('a' + n % 26);
            return p;
        }
        __device__ __noinline__ double total(Pair p, const int* more, int count) {
            double sum = p.left + p.right * 1000.0 + p.tag;
            for (int i = 0; i < count; i++) sum += more[i];
            return sum;
        }
        __device__ __noinline__ void fill(int* own, int n) { for (int i = 0; i < 4; i++) own[i] = n * i; }
        __global__ void calls(const int* x, double* y) {
            int own[4], i = threadIdx.x;
            fill(own, i);
            if (i % 3 == 0) y[i] = total(make(i, 0.5f), own, i % 5);
            else if (i % 3 == 1) y[i] = total(make(x[i], 0.25f), x, 3);
            else y[i] = twice(twice(i));
        }
    """
    x, y = RNG.integers(0, 100, 48).astype(np.int32), np.zeros(48)

    def make(n, f):
        return n + f + (2 * n + 1) * 1000.0 + ord("a") + n % 26

    for seed in (None, 2):
        run(code, "calls", 1, 48, x, y, seed=seed)
        for i in range(48):
            expected = [make(i, 0.5) + sum(i * k for k in range(i % 5)), make(int(x[i]), 0.25) + x[:3].sum(), 4 * i][
                i % 3
            ]
            assert y[i] == expected


def test_structs_by_value():
    code = """
        struct Inner { short a[3]; float f; };
        struct Outer { char tag; double d; Inner inner[2]; const int* p; };
        __global__ void read(Outer o, int n, double* y) {
            int i = threadIdx.x;
            y[3 * i] = o.tag + o.d;
            y[3 * i + 1] = o.inner[i % 2].a[i % 3] * o.inner[(i + n) % 2].f;
            y[3 * i + 2] = o.p[i];
        }
    """
    inner = np.dtype({"names": ["a", "f"], "formats": [(np.int16, 3), np.float32], "offsets": [0, 8], "itemsize": 12})
    layout = {"names": ["tag", "d", "inner", "p"], "formats": [np.int8, np.float64, (inner, 2), np.uint64]}
    outer = np.zeros(1, np.dtype(layout | {"offsets": [0, 8, 16, 40], "itemsize": 48}))
    loaded = program(code, "read")
    p = loaded[0].memory.allocate(np.arange(70, 102, dtype=np.int32), "p")
    outer["tag"], outer["d"], outer["p"] = 7, 0.5, p.base
    outer["inner"]["a"], outer["inner"]["f"] = [[1, 2, 3], [4, 5, 6]], [1.5, -2.0]
    y = np.zeros((32, 3))
    launch(loaded, ["o", "n", "y"], 1, 32, outer.tobytes(), 1, y)
    a, f = [[1, 2, 3], [4, 5, 6]], [1.5, -2.0]
    assert y.tolist() == [[7.5, a[i % 2][i % 3] * f[(i + 1) % 2], 70 + i] for i in range(32)]


def test_tables_of_constants_with_a_dynamic_index():
    code = """
        __constant__ double table[5] = {1.5, -2.5, 1e300, 0.0, 7.0};
        __constant__ short small[] = {-1, 2, -3, 4};
        __constant__ struct { char c; int n[2]; } records[2] = {{'x', {10, -20}}, {'y', {30, -40}}};
        __global__ void look(double* y) {
            int i = threadIdx.x;
            y[i] = table[i % 5] + small[i % 4] + records[i % 2].n[i / 2 % 2] + (records[i % 2].c == 'x' ? 0.25 : 0.5);
        }
    """
    y = np.zeros(20)
    run(code, "look", 1, 20, y)
    table, small, numbers = [1.5, -2.5, 1e300, 0.0, 7.0], [-1, 2, -3, 4], [[10, -20], [30, -40]]
    assert y.tolist() == [
        table[i % 5] + small[i % 4] + numbers[i % 2][i // 2 % 2] + [0.25, 0.5][i % 2] for i in range(20)
    ]


def test_kernels_of_c_and_templates():
    code = """
        template <typename T, int N> __device__ T power(T x) { T r = 1; for (int i = 0; i < N; i++) r *= x; return r; }
        extern "C" __global__ void plain(const float* x, float* y) { y[threadIdx.x] = power<float, 3>(x[threadIdx.x]); }
        template <typename T, int N> __global__ void templated(const T* x, T* y) {
            y[threadIdx.x] = power<T, N>(x[threadIdx.x]);
        }
    """
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    run(code, "plain", 1, 8, x, y)
    assert y.tolist() == (x**3).tolist()
    wide, result = np.arange(8.0), np.zeros(8)
    run(code, "templated<double, 5>", 1, 8, wide, result)
    assert result.tolist() == (wide**5).tolist()


def test_a_large_switch():
    code = """
        __global__ void choose(const int* x, int* y) {
            int v = 0;
            switch (x[threadIdx.x]) {
                case 0: v = __popc(x[0] + 77); break;
                case 1: v = x[1] * x[2]; break;
                case 2: v = threadIdx.x; break;
                case 3: v = 3 + x[5]; break;
                case 4: for (int i = 0; i < 4; i++) v += x[i]; break;
                case 5: v = -1;
                case 6: v -= 6; break;
                case 7: v = x[x[7] % 8]; break;
                case 8: v = 1 << (threadIdx.x % 8); break;
                default: v = 1234;
            }
            y[threadIdx.x] = v;
        }
    """
    x, y = RNG.integers(-1, 11, 64).astype(np.int32), np.zeros(64, np.int32)
    x[7] = 7

    def expected(i):
        cases = [
            int(x[0] + 77).bit_count(), x[1] * x[2], i, 3 + x[5], x[:4].sum(), -7, -6, x[x[7] % 8], 1 << i % 8
        ]  # fmt: skip
        return cases[x[i]] if 0 <= x[i] <= 8 else 1234

    for seed in (None, 1):
        run(code, "choose", 1, 64, x, y, seed=seed)
        assert y.tolist() == [expected(i) for i in range(64)]


def test_registers_that_only_some_threads_write():
    """Guarded loads, selects and moves leave the other threads' values as they were."""
    code = """
        __global__ void guarded(const int* x, int* y) {
            int i = threadIdx.x, v = -1, w = 5;
            asm volatile("{.reg .pred p; setp.lt.s32 p, %2, 10; @p ld.global.s32 %0, [%3]; @!p mov.s32 %1, %2;"
                         "@p add.s32 %1, %1, %0; @!p st.global.s32 [%4], %1;}"
                         : "+r"(v), "+r"(w) : "r"(i), "l"(x + i), "l"(y + 64 + i) : "memory");
            y[i] = v;
            y[32 + i] = w;
        }
    """
    x, y = np.arange(100, 132, dtype=np.int32), np.zeros(96, np.int32)
    run(code, "guarded", 1, 32, x, y)
    assert y[:32].tolist() == [100 + i if i < 10 else -1 for i in range(32)]
    assert y[32:64].tolist() == [105 + i if i < 10 else i for i in range(32)]
    assert y[64:].tolist() == [0] * 10 + list(range(10, 32))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_ptx_written_by_hand(arch):
    """Declarations in one line, predicates combined, a uniform branch, vectors, a loop."""
    ptx = f"""
        .version 8.0
        .target {arch}
        .address_size 64
        .visible .entry sum(.param .u64 out, .param .u32 n)
        {{
            .reg .u32 a, b, %r<3>; .reg .u64 p, q; .reg .pred done, odd, both;
            .shared .align 8 .b8 room[64];
            ld.param.u64 p, [out]; ld.param.u32 a, [n];
            mov.u32 b, 0; mov.u32 %r0, %tid.x;
        loop:
            setp.eq.u32 done, a, 0;
            @done bra out_of_it;
            and.b32 %r1, a, 1; setp.ne.u32 odd, %r1, 0;
            setp.gt.and.u32 both, a, 3, odd;
            @both add.u32 b, b, 1000;
            add.u32 b, b, a; sub.u32 a, a, 1;
            bra.uni loop;
        out_of_it:
            mad.wide.u32 q, %r0, 8, p;
            st.global.v2.u32 [q], {{b, %r0}};
            ret;
        }}
    """
    kernels = Program(ptx)
    y = np.zeros((4, 2), np.uint32)
    kernels.launch("sum", (1,), (4,), [Pointer(kernels.memory.allocate(y, "out")), 7])
    assert y.tolist() == [[28 + 2000, i] for i in range(4)]
