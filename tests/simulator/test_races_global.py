"""Races through global memory within a block, memory that is read as constant, and the scopes of atomics."""

import numpy as np
import pytest
from simulator.kit import fails, launch, program, run

from cupyops.simulator import Pointer, Race

N = 64


def ints(count: int = N) -> np.ndarray:
    return np.zeros(count, np.int32)


# --- the races of a first course, each beside what is right ---


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
