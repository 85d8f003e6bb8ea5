"""Values that nothing has written: variables, local arrays, and what shuffles read from outside of their masks."""

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import Uninitialized


def floats(count: int = 32) -> np.ndarray:
    return np.zeros(count, np.float32)


# --- registers ---

FRAGMENT = """
    __global__ void product(float* y) {
        unsigned a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
        float d[4]START;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
            " {%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));  // here
        for (int i = 0; i < 4; i++) y[4 * threadIdx.x + i] = d[i];
    }
"""


def test_an_accumulator_that_was_never_cleared():
    run(FRAGMENT.replace("START", " = {0, 0, 0, 0}"), "product", 1, 32, floats(128))
    says = ["computes with a value that nothing has written", "thread (0,0,0) of block (0,0,0), and 31 more threads"]
    fails(Uninitialized, FRAGMENT.replace("START", ""), "product", 1, 32, floats(128), says=says)


VARIABLE = """
    __global__ void choose(float* y, int n) {
        float v;
        asm volatile("{ .reg .pred p; setp.lt.s32 p, %1, %2; @p mov.f32 %0, 0f40400000; }"
            : "+f"(v) : "r"((int)threadIdx.x), "r"(n));
        USE
    }
"""


def test_what_nobody_uses_may_be_undefined():
    """It is computed with, chosen against, and not asked for in `a && b` where a is false."""
    code = VARIABLE.replace(
        "USE",
        """
        float twice = v * 2;
        bool set = threadIdx.x < n, large;
        asm volatile("{ .reg .pred p, q, r; setp.gt.f32 p, %1, 0f3f800000; setp.ne.u32 q, %2, 0; and.pred r, q, p;"
            " selp.u32 %0, 1, 0, r; }" : "=r"(*(unsigned*)&n) : "f"(v), "r"((unsigned)set));
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; selp.f32 %0, %0, 0f00000000, p; }"
            : "+f"(twice) : "r"((unsigned)set));
        y[threadIdx.x] = twice + n;
        """,
    )
    y = floats()
    run(code, "choose", 1, 32, y, 12)
    assert y.tolist() == [7] * 12 + [0] * 20


# --- local memory ---

LOCAL = """
    __global__ void local(float* y, const int* at, int n) {
        float a[8];
        for (int i = 0; i < n; i++) a[at[i]] = i + 1;
        float sum = 0;
        for (int i = 0; i < 8; i++) USE  // here
        y[threadIdx.x] = sum;
    }
"""


GIVEN_AWAY = """
    __device__ __noinline__ int get(const int* p, int i) { return p[i]; }
    __device__ __noinline__ void copy(int* to, const int* from) { for (int i = 0; i < 8; i++) to[i] = from[i]; }
    __global__ void away(int* y, int n) {
        int a[8], b[8];
        for (int i = 0; i < n; i++) a[i] = i;
        USE  // here
    }
"""


@pytest.mark.parametrize(
    "use, verb",
    [
        ("if (get(a, threadIdx.x) > 2) y[threadIdx.x] = 1;", "branches on a value"),
        ("copy(b, a); y[threadIdx.x] = get(b, threadIdx.x);", "stores a value"),
        ("y[threadIdx.x] = get(threadIdx.x % 2 ? a : y, threadIdx.x);", "stores a value"),
    ],
)
def test_local_memory_that_functions_read_through_pointers(use, verb):
    """Values that are copied, and that nobody asks for, may be undefined."""
    code, y = GIVEN_AWAY.replace("USE", use), np.zeros(8, np.int32)
    run(code, "away", 1, 8, y, 8)
    run(code, "away", 1, 6, y, 6)
    fails(Uninitialized, code, "away", 1, 8, y, 7, says=[verb, "thread (7,0,0)"])


def test_local_memory_that_is_copied_and_not_used():
    at = np.arange(8, dtype=np.int32)
    y = floats(8)
    run(LOCAL.replace("USE", "{ float v = a[at[i]]; if (i < n) sum += v; }"), "local", 1, 8, y, at, 5)
    assert (y == 15).all()
    code = LOCAL.replace("USE", "").replace(
        "sum = 0;", "sum = 0, b[8]; for (int i = 0; i < 8; i++) b[at[i]] = a[at[7 - i]];"
    )
    ok = code.replace("y[threadIdx.x] = sum", "y[threadIdx.x] = b[at[7]]").replace("  // here", ";")
    run(ok, "local", 1, 8, y, at, 5)
    assert (y == 1).all()
    bad = code.replace("y[threadIdx.x] = sum", "y[threadIdx.x] = b[at[0]]").replace("  // here", ";")
    fails(Uninitialized, bad, "local", 1, 8, y, at, 5, says=["stores a value that nothing has written"])


# --- shuffles ---

EXCHANGES = [
    "y[lane] = __any_sync(0xfffffffe, v > 3)",
    "y[lane] = __popc(__ballot_sync(0xfffffffe, v > 3))",
    "y[lane] = __reduce_max_sync(0xfffffffe, v)",
    "y[lane] = __popc(__match_any_sync(0xfffffffe, v))",
]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_a_warp_is_asked_about(exchange):
    """Lane 0 is outside of the mask; the others read it, and vote on what they have got."""
    code = """
        __global__ void ask(float* y) {
            int lane = threadIdx.x;
            if (lane == 0) return;
            int v = __shfl_sync(0xfffffffe, lane, FROM);
            EXCHANGE;  // here
        }
    """.replace("EXCHANGE", exchange)
    run(code.replace("FROM", "1"), "ask", 1, 32, floats(), exited_lanes=False)
    run(code.replace("FROM", "lane - (lane > 1)").replace("v > 3", "lane > 1 && v > 3"), "ask", 1, 32, floats())
    says = ["computes with a value that nothing has written", "30 more threads"]
    fails(Uninitialized, code.replace("FROM", "0"), "ask", 1, 32, floats(), says=says)


def test_a_vector_of_which_the_compiler_knows_a_part_and_stores_the_others_afterwards():
    """NVRTC writes st.v4 with registers that nothing writes, packs one half of a pair, and mends the memory by scalars."""
    code = """
    struct alignas(16) Four { float v[4]; };
    __global__ void shifted(const float* x, float* y) {
        Four w;
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            float one = j >= 1 ? x[j - 1] : 0.f;
            w.v[j] = j >= 1 ? one : 1.f;
        }
        *(Four*)y = w;
    }
    """
    y = floats(4)
    run(code, "shifted", 1, 1, np.arange(4, dtype=np.float32), y)
    assert y.tolist() == [1, 0, 1, 2]


PARTS = """
    __global__ void parts(float4* y, const int* at) {
        float4 v[4];
        for (int i = 0; i < 4; i++) { v[at[i]].x = i; v[at[i]].y = 1; LAST v[at[i]].w = 3; }
        USE
    }
"""


@pytest.mark.parametrize("third", ["", "if (i != 2) v[at[i]].z = 2;"])
def test_a_vector_of_which_an_element_was_forgotten(third):
    """Who computes with the element is told; what is only copied may have pads."""
    at, y = np.arange(4, dtype=np.int32), floats(16)
    sums = "float4 w = v[at[3 - threadIdx.x]]; y[threadIdx.x].x = w.x + w.y + w.z + w.w;  // here"
    code = PARTS.replace("USE", sums)
    run(code.replace("LAST", "v[at[i]].z = 2;"), "parts", 1, 4, y, at)
    assert y[::4].tolist() == [9, 8, 7, 6]
    run(code.replace("LAST", third).replace("w.z +", ""), "parts", 1, 4, y, at)
    assert y[::4].tolist() == [7, 6, 5, 4]
    says = ["stores a value that nothing has written"]
    fails(Uninitialized, code.replace("LAST", third), "parts", 1, 4, y, at, says=says)


@pytest.mark.parametrize("members", ["char a; double d;", "int a; double d;", "float a; long long d;"])
def test_structs_with_pads_are_copied_whole(members):
    code = """
        struct P { MEMBERS };
        __device__ __noinline__ void use(P* p) { p->a += 1; p->d *= 2; }
        __global__ void copies(P* y, double* sums, const int* at) {
            P p[3];
            for (int i = 0; i < 3; i++) { p[at[i]].a = i; p[at[i]].d = 3 * i; }
            use(&p[at[1]]);
            P w = p[at[threadIdx.x]];
            y[threadIdx.x] = w;
            sums[threadIdx.x] = w.a + w.d;
        }
    """.replace("MEMBERS", members)
    y, sums = np.zeros(96, np.uint8), np.zeros(3)
    run(code, "copies", 1, 3, y, sums, np.arange(3, dtype=np.int32))
    assert sums.tolist() == [0, 8, 8]


OUTSIDE = """
    __global__ void outside(float* y) {
        int lane = threadIdx.x;
        unsigned mask = lane < 16 ? 0xffff : 0xffff0000;
        float v = lane;
        for (int by = FIRST; by; by /= 2) v += __shfl_down_sync(mask, v, by);
        if (WHO) y[lane] = v;  // here
    }
"""


def test_a_sum_that_takes_lanes_from_outside_of_the_mask():
    """The upper lanes read beyond the mask too, but what they have is not asked for."""
    y = floats()
    run(OUTSIDE.replace("FIRST", "8").replace("WHO", "lane % 16 == 0"), "outside", 1, 32, y)
    assert y[[0, 16]].tolist() == [120, 376]
    wrong = OUTSIDE.replace("FIRST", "16").replace("WHO", "lane == 0")
    fails(Uninitialized, wrong, "outside", 1, 32, y, says=["stores a value that nothing has written", "thread (0,0,0)"])
    wrong = OUTSIDE.replace("FIRST", "8").replace("WHO", "lane % 16 < 2")
    fails(Uninitialized, wrong, "outside", 1, 32, y, says=["thread (1,0,0)"])
