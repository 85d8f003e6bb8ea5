"""Calls through pointers, barriers of the grid, atomics of vectors, and the names of what is refused."""

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import Misaligned, OutOfBounds, Program, Trap, UnsupportedInstruction


def ints(count: int = 32) -> np.ndarray:
    return np.zeros(count, np.int32)


# --- calls through pointers ---


def test_functions_called_through_pointers():
    code = """
        __device__ int one(int x) { return x + 1; }
        __device__ int two(int x) { return 2 * x; }
        __device__ float other(float x, float y) { return x * y; }
        __device__ int (*table[3])(int) = {one, two, one};
        __global__ void choose(int* y, float* z, int k) {
            int (*f)(int) = threadIdx.x % 2 ? one : two;
            float (*g)(float, float) = k ? other : nullptr;
            y[threadIdx.x] = f(threadIdx.x) + 100 * table[threadIdx.x % 3](threadIdx.x);
            z[threadIdx.x] = g(threadIdx.x, 3);  // here
        }
    """
    y, z = ints(), np.zeros(32, np.float32)
    run(code, "choose", 1, 32, y, z, 1)
    i = np.arange(32)
    assert y.tolist() == (np.where(i % 2, i + 1, 2 * i) + 100 * np.where(i % 3 == 1, 2 * i, i + 1)).tolist()
    assert z.tolist() == (3 * i).tolist()
    fails(OutOfBounds, code, "choose", 1, 32, y, z, 0, says=["a call through a pointer to no function"])


def test_virtual_functions():
    code = """
        struct Shape { float a; __device__ virtual float area() const { return a; } };
        struct Square : Shape { __device__ float area() const override { return a * a; } };
        struct Disc : Shape { __device__ float area() const override { return 3 * a * a; } };
        __global__ void areas(float* y) {
            Shape point; Square square; Disc disc;
            point.a = square.a = disc.a = threadIdx.x;
            const Shape* all[3] = {&point, &square, &disc};
            y[threadIdx.x] = all[threadIdx.x % 3]->area();
        }
    """
    y, i = np.zeros(12, np.float32), np.arange(12)
    run(code, "areas", 1, 12, y)
    assert y.tolist() == np.choose(i % 3, [i, i * i, 3 * i * i]).tolist()


# --- barriers of the grid ---

GRID = """
    __global__ void turn(int* x, int* y) {
        x[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x;
        unsigned low, high;
        asm volatile("mov.u32 %0, %%envreg2; mov.u32 %1, %%envreg1;" : "=r"(low), "=r"(high));
        unsigned long long workspace = (unsigned long long)high << 32 | low;
        if (workspace == 0) asm volatile("trap;");
        unsigned* arrived = reinterpret_cast<unsigned*>(workspace + 4);
        BARRIER
        if (threadIdx.x == 0) {
            unsigned old, now, add = blockIdx.x == 0 ? 0x80000000 - (gridDim.x - 1) : 1;
            asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;" : "=r"(old) : "l"(arrived), "r"(add) : "memory");
            do {
                asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
            } while (((old ^ now) & 0x80000000) == 0);
        }
        __syncthreads();
        int other = (blockIdx.x + 1) % gridDim.x;
        y[blockIdx.x * blockDim.x + threadIdx.x] = x[other * blockDim.x + blockDim.x - 1 - threadIdx.x];
    }
"""


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("blocks", [3, 70])
def test_a_barrier_of_the_grid(blocks, seed):
    """As cooperative_groups::this_grid().sync() has it; more blocks than otherwise run side by side."""
    x, y = ints(blocks * 512), np.zeros((blocks, 512), np.int32)
    run(GRID.replace("BARRIER", "__syncthreads();"), "turn", blocks, 512, x, y, seed=seed, cooperative=True)
    assert y[:, 0].tolist() == [(block + 1) % blocks for block in range(blocks)]


def test_a_barrier_of_the_grid_in_a_launch_that_is_not_cooperative():
    message = fails(Trap, GRID.replace("BARRIER", ""), "turn", 2, 32, ints(64), ints(64))
    assert (
        "the kernel waits for the whole grid in a launch that is not cooperative: configure(cooperative=True)"
        in message
    )


# --- atomics of vectors ---


@pytest.mark.parametrize("count", [2, 4])
def test_atomics_of_vectors(count):
    vector = f"float{count}"
    values = ", ".join(f"{k}.f" for k in range(1, count + 1))
    code = f"""
        __global__ void add({vector}* x, {vector}* old) {{
            {vector} before = atomicAdd(x + threadIdx.x % 2, make_{vector}({values}));
            old[threadIdx.x] = before;
        }}
    """
    x, old = np.zeros((2, count), np.float32), np.zeros((8, count), np.float32)
    run(code, "add", 1, 8, x, old, arch="sm_90")
    assert x.tolist() == [[4.0 * k for k in range(1, count + 1)]] * 2
    assert sorted(old[::2, 1].tolist()) == [0, 2, 4, 6]
    with pytest.raises(Misaligned, match="misaligned atomic update"):
        run(code.replace("x + threadIdx.x % 2", f"({vector}*)((float*)x + 1)"), "add", 1, 8, x, old, arch="sm_90")


# --- matrices and mbarriers ---


def test_movmatrix():
    code = """
        __global__ void transpose(const unsigned* x, unsigned* y) {
            asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y[threadIdx.x]) : "r"(x[threadIdx.x]));
        }
    """
    x, y = np.arange(128, dtype=np.uint16).reshape(2, 8, 8), np.zeros((2, 8, 8), np.uint16)
    run(code, "transpose", 1, 64, x.view(np.uint32), y.view(np.uint32))
    assert (y == x.swapaxes(1, 2)).all()


def test_the_arrivals_that_a_token_says_are_missing():
    code = """
        __global__ void pending(unsigned* y) {
            __shared__ unsigned long long bar;
            unsigned at = __cvta_generic_to_shared(&bar);
            if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 4;" :: "r"(at) : "memory");
            __syncthreads();
            for (int i = 0; i < 4; i++) {
                if (threadIdx.x == i) {
                    unsigned long long token;
                    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(token) : "r"(at) : "memory");
                    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(y[i]) : "l"(token));
                    unsigned done;
                    asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                        : "=r"(done) : "r"(at), "l"(token) : "memory");
                    y[4 + i] = done;
                }
                __syncthreads();
            }
        }
    """
    y = np.zeros(8, np.uint32)
    run(code, "pending", 1, 4, y)
    assert y.tolist() == [4, 3, 2, 1, 0, 0, 0, 1]


SENT = """
    __global__ void __cluster_dims__(2, 1, 1) sent(int* y) {
        __shared__ int sum;
        __shared__ unsigned long long bar;
        unsigned rank, at = __cvta_generic_to_shared(&sum), own = __cvta_generic_to_shared(&bar), far, report;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        if (threadIdx.x == 0) {
            sum = 100;
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(own) : "memory");
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 128;" :: "r"(own) : "memory");
        }
        asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(at), "r"(rank ^ 1));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(report) : "r"(own), "r"(rank ^ 1));
        asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.s32 [%0], %1, [%2];"
            :: "r"(far), "r"(threadIdx.x * (rank + 1)), "r"(report) : "memory");
        asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra again; }"
            :: "r"(own) : "memory");
        y[32 * blockIdx.x + threadIdx.x] = sum;
        asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
    }
"""


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_reductions_sent_to_another_block(seed):
    y = ints(64)
    run(SENT, "sent", 2, 32, y, arch="sm_90", seed=seed)
    assert y[[0, 31, 32, 63]].tolist() == [100 + 2 * 496] * 2 + [100 + 496] * 2


# --- what is refused, by its name ---

TEMPLATE = """.version 8.5
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 k_param_0)
{
    .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>; .reg .pred %p<3>;
    TEXT
    ret;
}
"""


@pytest.mark.parametrize(
    "text, says",
    [
        ("tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f5, %f6}];", "textures"),
        ("suld.b.1d.b32.trap %r1, [%rd1, {%r2}];", "surfaces"),
        ("vadd.s32.s32.s32 %r1, %r2, %r3;", "video instructions"),
        ("tcgen05.commit.cta_group::1.b64 [%rd1];", "tensor cores of the fifth generation"),
        ("mma.sp.sync.aligned.m16n8k16 %r1, %r2;", "sparse matrix products"),
        ("atom.global.exch.b128 %rd1, [%rd2], %rd3;", "atomics and moves of 128 bits"),
        ("cvt.rn.satfinite.e2m1x2.f32 %r1, %f1, %f2;", "conversions to fp4 and fp6"),
        ("tensormap.replace.tile.rank.global.b1024.b32 [%rd1], 1;", "tensor maps that kernels change"),
        ("multimem.ld_reduce.global.add.f32 %f1, [%rd1];", "multicast objects of several GPUs"),
        (
            "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], %r2, %r3;",
            "copies of chosen bytes or rows",
        ),
        ("st.bulk.weak.shared::cta [%rd1], %rd2, 0;", "bulk stores of zeros"),
        ("cvt.rs.f16x2.f32 %r1, %f1, %f2, %r3;", "conversions that round at random"),
    ],
)
def test_what_is_refused_is_named(text, says):
    with pytest.raises(UnsupportedInstruction) as caught:
        Program(TEMPLATE.replace("TEXT", text)).kernel("k")
    message = str(caught.value)
    assert message.startswith(f"k: {says} ({text.split()[0]}) are not covered: ")
    assert message.endswith(f"\n  PTX line 7: {text[:-1]}")


@pytest.mark.parametrize(
    "name", ["ld.twice.global.b32", "mbarrier.twice.arrive.b64", "cp.twice.async.ca.shared.global"]
)
def test_a_word_that_the_simulator_does_not_know_is_refused(name):
    """It was passed over, and the instruction run without what it says."""
    with pytest.raises(UnsupportedInstruction, match=rf"k: `.twice` of {name.split('.')[0]} is not covered"):
        Program(TEMPLATE.replace("TEXT", f"{name} %rd1, [%r1], 16;")).kernel("k")


REFUSED = {
    "textures (tex.2d.v4.f32.f32) are not covered: read the tensor through its pointer": """
        __global__ void refused(unsigned long long t, float* y) {
            y[threadIdx.x] = tex2D<float>(t, threadIdx.x, 0.5f);  // here
        }
    """,
    "surfaces (sust.b.1d.b32.trap) are not covered: read and write the tensor": """
        template <typename T> __device__ void put(unsigned long long t, T v) {
            surf1Dwrite(v, t, threadIdx.x * sizeof(T));  // here
        }
        __global__ void refused(unsigned long long t, float* y) { put(t, y[0]); }
    """,
    "video instructions (vabsdiff4.u32.u32.u32.add) are not covered: write": """
        __global__ void refused(unsigned long long t, unsigned* y) {
            y[0] = __vsadu4(y[0], t);  // here
        }
    """,
    "TMA tiles by im2col (": """
        __global__ void refused(unsigned long long t, float* y) {
            asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                " [%0], [%1, {%2, %2, %2}], [%0], {%3};" :: "r"(0), "l"(t), "r"(0), "h"((short)0));  // here
        }
    """,
    "recursive calls (down) are not covered: write a loop": """
        __device__ __noinline__ int down(int n) {
            return n < 2 ? n : down(n - 1) + down(n - 2);  // here
        }
        __global__ void refused(unsigned long long t, float* y) { y[0] = down(t); }
    """,
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused_is_told_with_kernel_line_and_what_to_do(says):
    arch = "sm_90" if "TMA" in says else "sm_80"
    message = fails(UnsupportedInstruction, REFUSED[says], "refused", 1, 32, 1, ints(), arch=arch, says=[says])
    assert message.startswith(f"refused: {says}")
