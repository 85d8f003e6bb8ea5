"""Races through global memory within a block, memory that is read as constant, and the scopes of atomics."""

import numpy as np
import pytest
from simulator.kit import fails, launch, program, run

from cupyops.simulator import Pointer, Race

N = 64


def ints(count: int = N) -> np.ndarray:
    return np.zeros(count, np.int32)


# --- the races of a first course, each beside what is right ---

COUNT = """
    __global__ void count(const int* x, int* c, int n) {
        int i = threadIdx.x;
        ADD  // here
    }
"""


@pytest.mark.parametrize("seed", [None, 0])
def test_counting_without_atomics(seed):
    """c[x[i]] += 1: threads of one block read and write one place."""
    x, c = np.arange(N, dtype=np.int32) % 8, ints(8)
    run(COUNT.replace("ADD", "atomicAdd(&c[x[i]], 1);"), "count", 1, N, x, c, 8, seed=seed)
    assert (c == N // 8).all()
    run(COUNT.replace("ADD", "c[x[i] + 8 * (i / 8)] += 1;"), "count", 1, N, x, ints(N), 8, seed=seed)
    says = ["race within a block: write `c` where another thread has read", "of block (0,0,0)", "offset 0 of `c`"]
    fails(Race, COUNT.replace("ADD", "c[x[i]] += 1;"), "count", 1, N, x, ints(8), 8, says=says, seed=seed)


def test_counting_in_a_variable_of_the_file():
    code = """
        __device__ int counter;
        __global__ void visit(int* y) {
            ADD;  // here
            y[threadIdx.x] = 1;
        }
    """
    loaded = program(code.replace("ADD", "atomicAdd(&counter, 1)"), "visit")
    launch(loaded, ["y"], 2, N, ints())
    assert loaded[0].variables["counter"].view(np.int32)[0] == 2 * N
    says = ["race within a block: write `counter` where another thread has read"]
    fails(Race, code.replace("ADD", "counter++"), "visit", 1, N, ints(), says=says)


SHIFT = """
    __global__ void shift(int* x, int n) {
        int i = threadIdx.x;
        int v = x[(i + 1) % n];  // other
        BARRIER
        x[i] = v;  // here
    }
"""


@pytest.mark.parametrize("seed", [None, 3])
def test_a_shift_in_place(seed):
    x = np.arange(N, dtype=np.int32)
    run(SHIFT.replace("BARRIER", "__syncthreads();"), "shift", 1, N, x, N, seed=seed)
    assert x.tolist() == [*range(1, N), 0]
    says = ["race within a block: write `x` where another thread has read"]
    fails(Race, SHIFT.replace("BARRIER", ""), "shift", 1, N, x, N, says=says, seed=seed)
    # of one warp __syncwarp is enough, of two it is not
    run(SHIFT.replace("BARRIER", "__syncwarp();"), "shift", 1, 32, x, 32, seed=seed)
    fails(Race, SHIFT.replace("BARRIER", "__syncwarp();"), "shift", 1, N, x, N, says=says, seed=seed)


REDUCE = """
    __global__ void total(float* x) {
        float* own = x + blockIdx.x * blockDim.x;
        for (int half = blockDim.x / 2; half; half /= 2) {
            if (threadIdx.x < half) own[threadIdx.x] += own[threadIdx.x + half];  // here
            BARRIER
        }
    }
"""


def test_a_reduction_in_global_memory():
    x = np.arange(4 * N, dtype=np.float32)
    expected = x.reshape(4, N).sum(1)
    run(REDUCE.replace("BARRIER", "__syncthreads();"), "total", 4, N, x)
    assert x[::N].tolist() == expected.tolist()
    says = ["race within a block: read `x` where another thread has written"]
    fails(Race, REDUCE.replace("BARRIER", ""), "total", 4, N, x, says=says)


def test_a_result_that_one_thread_writes_and_all_read():
    code = """
        __global__ void mean(float* y, float* mean) {
            if (threadIdx.x == 0) mean[blockIdx.x] = 3;
            BARRIER
            y[blockIdx.x * blockDim.x + threadIdx.x] = mean[blockIdx.x];
        }
    """
    y = np.zeros(2 * N, np.float32)
    run(code.replace("BARRIER", "__syncthreads();"), "mean", 2, N, y, np.zeros(2, np.float32))
    assert (y == 3).all()
    for seed in (None, 0, 1):  # whoever comes first
        with pytest.raises(Race, match="race within a block: (read|write) `mean`") as caught:
            run(code.replace("BARRIER", ""), "mean", 2, N, y, np.zeros(2, np.float32), seed=seed)
        assert "thread (0,0,0) of block" in str(caught.value)


@pytest.mark.parametrize("blocks", [1, 3])
def test_threads_of_one_instruction_that_write_one_place(blocks):
    code = """
        __global__ void last(int* y, int* z) {
            y[blockIdx.x] = VALUE;  // here
            z[blockIdx.x] = y[blockIdx.x] * 0;
        }
    """
    y = ints(blocks)
    run(
        code.replace("VALUE", "blockIdx.x + 5").replace("z[blockIdx.x] =", "if (threadIdx.x > 99) z[0] ="),
        "last",
        blocks,
        N,
        y,
        ints(),
    )
    assert y.tolist() == [5 + block for block in range(blocks)]
    says = ["threads of one instruction write different values to one place of `y`"]
    fails(Race, code.replace("VALUE", "threadIdx.x"), "last", blocks, N, ints(blocks), ints(), says=says)


def test_a_race_within_a_block_where_blocks_have_met():
    """Blocks add to one place by atomics; then threads of a block race for another place of the same tensor."""
    code = """
        __global__ void both(int* y) {
            atomicAdd(&y[0], 1);
            BARRIER
            int v = y[1 + blockIdx.x * blockDim.x + (threadIdx.x + 1) % blockDim.x];  // other
            BARRIER
            y[1 + blockIdx.x * blockDim.x + threadIdx.x] = v + 1;  // here
        }
    """
    y = ints(1 + 2 * N)
    run(code.replace("BARRIER", "__syncthreads();"), "both", 2, N, y)
    assert y.tolist() == [2 * N, *[1] * (2 * N)]
    fails(Race, code.replace("BARRIER", ""), "both", 2, N, ints(1 + 2 * N), says=["race within a block: write `y`"])


def test_named_barriers_fences_and_volatile_flags_order_a_block():
    code = """
        __global__ void flags(int* data, volatile int* flag, int* y) {
            if (threadIdx.x == 0) {
                data[0] = 42;  // other
                __threadfence_block();
                flag[0] = 1;
            }
            if (threadIdx.x == 32) {
                while (flag[0] == 0) {}
                __threadfence_block();
                y[0] = data[0];  // here
            }
        }
    """
    y = ints(1)
    run(code, "flags", 1, 64, ints(1), ints(1), y)
    assert y[0] == 42
    missing = code.replace("__threadfence_block();", "", 1)
    fails(Race, missing, "flags", 1, 64, ints(1), ints(1), y, says=["race within a block: read `data`"])


def test_what_each_thread_has_for_itself_is_no_race():
    """Vectors and their elements, twice, in place, with a row that a whole block reads and none writes."""
    code = """
        __global__ void own(float4* x, const float* scale) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            float4 v = x[i];
            v.x *= scale[0];
            x[i] = v;
            volatile float* part = reinterpret_cast<volatile float*>(x + i);
            for (int k = 0; k < 4; k++) part[k] += scale[k];
            x[i].w += part[0];
        }
    """
    x = np.ones((3 * N, 4), np.float32)
    run(code, "own", 3, N, x, np.arange(4, dtype=np.float32))
    assert x[0].tolist() == [0, 2, 3, 4]


# --- ld.global.nc ---

CONSTANT = """
    __global__ void twice(float* y, const float* __restrict__ x) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        y[i] = __ldg(x + i) * 2;
        __syncthreads();
        float v = LOAD;  // here
        __syncthreads();
        y[i] += v;
    }
"""


@pytest.mark.parametrize("load", ["__ldg(y + i)", "__ldg(y + i - i % 32 + (i + 1) % 32)"])
def test_a_constant_load_of_what_the_launch_writes(load):
    x, y = np.ones(N, np.float32), np.zeros(N, np.float32)
    run(CONSTANT.replace("LOAD", load.replace("__ldg(", "*(")), "twice", 2, 32, y, x)
    assert (y == 4).all()
    says = ["read of `y` by ld.global.nc where this launch has written", "of `y`"]
    fails(Race, CONSTANT.replace("LOAD", load), "twice", 2, 32, y, x, says=says)


def test_a_restricted_pointer_to_what_another_one_writes():
    code = """
        __global__ void alias(float* y, const float* __restrict__ x) {
            y[threadIdx.x] = 1;
            __syncthreads();
            y[threadIdx.x + 32] = x[31 - threadIdx.x];  // here
        }
    """
    x, y = np.ones(N, np.float32), np.zeros(N, np.float32)
    run(code, "alias", 1, 32, y, x)
    kernels, symbol = program(code, "alias")
    shared = Pointer(kernels.memory.allocate(y, "y"))
    with pytest.raises(Race, match="by ld.global.nc where this launch has written"):
        kernels.launch(symbol, (1,), (32,), [shared, shared])


# --- scopes of atomics ---

SCOPES = """
    __global__ void add(int* total, int* y) {
        FIRST(total + AT, 1);
        SECOND(total + AT, 1);  // here
        y[0] = 1;
    }
"""


@pytest.mark.parametrize(
    "first, second, right",
    [
        ("atomicAdd", "atomicAdd", True),
        ("atomicAdd_system", "atomicMax", True),
        ("atomicAdd_block", "atomicAdd_block", False),
        ("atomicAdd", "atomicAdd_block", False),
        ("atomicMax_block", "atomicAdd", False),
    ],
)
def test_an_atomic_of_a_block_where_several_blocks_meet(first, second, right):
    code = SCOPES.replace("FIRST", first).replace("SECOND", second)
    own = code.replace("AT", "blockIdx.x")
    run(own, "add", 3, 32, ints(3), ints(1))
    run(code.replace("AT", "0"), "add", 1, 32, ints(3), ints(1))
    if right:
        run(code.replace("AT", "0"), "add", 3, 32, ints(3), ints(1))
    else:
        with pytest.raises(
            Race, match="race between blocks: update atomically `total` where another block has updated"
        ):
            run(code.replace("AT", "0"), "add", 3, 32, ints(3), ints(1))


@pytest.mark.parametrize("scope, right", [("gpu", True), ("cluster", False), ("cta", False)])
def test_a_reduction_of_a_cluster_where_several_clusters_meet(scope, right):
    """Without clusters each block is one by itself."""
    code = """
        __global__ void add(int* total) {
            asm volatile("red.relaxed.SCOPE.global.add.s32 [%0], 1;" :: "l"(total + AT) : "memory");  // here
        }
    """.replace("SCOPE", scope)
    run(code.replace("AT", "blockIdx.x"), "add", 3, 32, ints(3), arch="sm_90")
    if right:
        run(code.replace("AT", "0"), "add", 3, 32, ints(3), arch="sm_90")
    else:
        says = ["race between blocks: update atomically `total` where another block has updated atomically"]
        fails(Race, code.replace("AT", "0"), "add", 3, 32, ints(3), arch="sm_90", says=says)
