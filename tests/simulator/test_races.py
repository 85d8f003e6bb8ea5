"""Races within a block, within a warp and between blocks: reported where they are, and not where there are none.

Threads run in lockstep here, so the results would be right without the barriers: only the report shows what is missing.
"""

import numpy as np
import pytest
from simulator.kit import fails, program, run

from cupyops.simulator import Race, Uninitialized

N = 64


def ints(n=N):
    return np.zeros(n, np.int32)


# --- within a block ---

READ_AFTER_WRITE = """
    __global__ void reverse(int* y) {
        __shared__ int s[64];
        s[threadIdx.x] = threadIdx.x;  // other
        __syncthreads();
        y[threadIdx.x] = s[63 - threadIdx.x];  // here
    }
"""
WRITE_AFTER_READ = """
    __global__ void shift(int* y) {
        __shared__ int s[64];
        s[threadIdx.x] = threadIdx.x;
        __syncthreads();
        int v = s[(threadIdx.x + 1) % 64];  // other
        __syncthreads();
        s[threadIdx.x] = v + 1;  // here
        y[threadIdx.x] = s[threadIdx.x];
    }
"""
WRITE_AFTER_WRITE = """
    __global__ void twice(int* y) {
        __shared__ volatile int s[64];
        s[threadIdx.x] = 1;  // other
        __syncthreads();
        s[63 - threadIdx.x] = 2;  // here
        y[threadIdx.x] = s[63 - threadIdx.x];
    }
"""


def without_last_barrier(code, barrier="__syncthreads();"):
    """The same text, with lines kept in place."""
    head, found, tail = code.rpartition(barrier)
    assert found
    return head + tail


def test_read_after_write():
    y = ints()
    run(READ_AFTER_WRITE, "reverse", 2, N, y)
    assert y.tolist() == list(range(63, -1, -1))
    says = ["read shared memory that another thread has written, with no barrier in between"]
    says += ["thread (0,0,0) of block (0,0,0), and 127 more threads"]
    says += ["offset 252, which thread (63,0,0) of block (0,0,0) has written"]
    fails(Race, without_last_barrier(READ_AFTER_WRITE), "reverse", 2, N, y, says=says)
    run(without_last_barrier(READ_AFTER_WRITE), "reverse", 2, N, y, check=False)


def test_write_after_read():
    y = ints()
    run(WRITE_AFTER_READ, "shift", 1, N, y)
    assert y.tolist() == [(i + 1) % 64 + 1 for i in range(64)]
    says = ["write shared memory that another thread has read, with no barrier in between", "thread (0,0,0)"]
    says += ["offset 0, which thread (63,0,0) of block (0,0,0) has read"]
    fails(Race, without_last_barrier(WRITE_AFTER_READ), "shift", 1, N, y, says=says)


def test_write_after_write():
    y = ints()
    run(WRITE_AFTER_WRITE, "twice", 1, N, y)
    assert y.tolist() == [2] * 64
    says = ["write shared memory that another thread has written", "offset 252, which thread (63,0,0)"]
    fails(Race, without_last_barrier(WRITE_AFTER_WRITE), "twice", 1, N, y, says=says)


def test_a_place_that_several_threads_have_read():
    code = """
        __global__ void broadcast(int* y) {
            __shared__ volatile int s[2];
            if (threadIdx.x == 0) s[0] = 5;
            __syncthreads();
            int v = s[0];  // other
            __syncthreads();
            if (threadIdx.x == 0) s[0] = 6;  // here
            y[threadIdx.x] = v;
        }
    """
    run(code, "broadcast", 1, N, ints())
    says = ["thread (0,0,0)", "offset 0, which several threads have read"]
    fails(Race, without_last_barrier(code), "broadcast", 1, N, ints(), says=says)


@pytest.mark.parametrize("first", ["float4", "char"])
def test_accesses_of_different_sizes_meet(first):
    code = f"""
        __global__ void sizes(int* y) {{
            __shared__ __align__(16) char s[1024];
            reinterpret_cast<{first}*>(s)[threadIdx.x] = {first}();  // other
            __syncthreads();
            y[threadIdx.x] = reinterpret_cast<volatile int*>(s)[threadIdx.x / (16 / sizeof({first}))];  // here
        }}
    """
    run(code, "sizes", 1, N, ints())
    says = ["read shared memory that another thread has written", f"thread ({1 if first == 'float4' else 0},0,0)"]
    fails(Race, without_last_barrier(code), "sizes", 1, N, ints(), says=says)


WARP = """
    __global__ void exchange(int* y) {
        __shared__ volatile int s[64];
        s[threadIdx.x] = threadIdx.x;  // other
        __syncwarp();
        y[threadIdx.x] = s[threadIdx.x ^ 1];  // here
    }
"""


def test_within_a_warp_too():
    y = ints()
    run(WARP, "exchange", 1, N, y)
    assert y.tolist() == [i ^ 1 for i in range(64)]
    says = ["read shared memory that another thread has written", "offset 4, which thread (1,0,0)"]
    fails(Race, without_last_barrier(WARP, "__syncwarp();"), "exchange", 1, N, y, says=says)


def test_syncwarp_does_not_order_other_warps():
    says = ["thread (0,0,0)", "offset 128, which thread (32,0,0) of block (0,0,0) has written"]
    fails(Race, WARP.replace("^ 1", "^ 32"), "exchange", 1, N, ints(), says=says)


def test_syncwarp_orders_a_warp_that_has_read_together():
    """Every lane reads one place, then lane 0 writes it."""
    code = """
        __global__ void rounds(int* y) {
            __shared__ volatile int s[2];
            int w = threadIdx.x / 32, sum = 0;
            if (threadIdx.x % 32 == 0) s[w] = 100 * w;
            for (int i = 0; i < 4; i++) {
                __syncwarp();
                int v = s[w];  // other
                sum += v;
                __syncwarp();
                if (threadIdx.x % 32 == 0) s[w] = v + 1;  // here
            }
            y[threadIdx.x] = sum;
        }
    """
    y = ints()
    run(code, "rounds", 1, N, y)
    assert y.tolist() == [6] * 32 + [406] * 32
    says = ["write shared memory that another thread has read", "which several threads have read"]
    fails(Race, without_last_barrier(code, "__syncwarp();"), "rounds", 1, N, y, says=says)


def test_readers_of_several_warps_are_not_ordered_by_one_warp():
    code = """
        __global__ void readers(int* y) {
            __shared__ volatile int s;
            if (threadIdx.x == 0) s = 1;
            __syncthreads();
            y[threadIdx.x] = s;  // other
            __syncwarp();
            if (threadIdx.x == 0) s = 2;  // here
        }
    """
    run(code, "readers", 1, 32, ints(32))
    fails(Race, code, "readers", 1, 64, ints(), says=["which several threads have read"])


@pytest.mark.parametrize("writer_reads_first", [False, True])
@pytest.mark.parametrize("readers", [1, 2, 33])
def test_the_other_access_is_not_the_writers_own(writer_reads_first, readers):
    """It may have read there too, before the others or after them."""
    others = "if (threadIdx.x >= 1 && threadIdx.x <= n) sum += s;  // other"
    own = "if (threadIdx.x == 0) sum += s + 1;"
    first, second = (own, others) if writer_reads_first else (others, own)
    code = f"""
        __global__ void reads_too(int* y, int n) {{
            __shared__ volatile int s;
            if (threadIdx.x == 0) s = 1;
            __syncthreads();
            int sum = 0;
            {first}
            {second}
            if (threadIdx.x == 0) s = 2;  // here
            y[threadIdx.x] = sum;
        }}
    """
    fails(Race, code, "reads_too", 1, N, ints(), readers, says=["write shared memory that another thread has read"])


def test_several_writers_of_one_instruction():
    """Of one value: fine. Of different values: which one stays is not known."""
    code = """
        __global__ void all_write(int* y, int n) {
            __shared__ volatile int s[2];
            s[threadIdx.x / 32] = threadIdx.x / n;  // here
            __syncthreads();
            y[threadIdx.x] = s[threadIdx.x / 32];
        }
    """
    y = ints()
    run(code, "all_write", 1, N, y, 32)
    assert y.tolist() == [0] * 32 + [1] * 32
    says = ["threads of one instruction write different values to one place", "offset 0"]
    fails(Race, code, "all_write", 1, N, y, 16, says=says)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("type_", ["char", "int", "double", "int2"])
def test_several_writers_of_one_instruction_who_come_to_it_apart(type_, seed):
    """As where each warp goes round a loop at its own pace and raises one flag: of one value it is fine all the same."""
    value = "make_int2(v, v)" if type_ == "int2" else "v"
    first = "s[0].x" if type_ == "int2" else "s[0]"
    code = f"""
        __global__ void apart(int* y, int differ, int rounds) {{
            __shared__ volatile {type_} raw[2];
            {type_}* s = const_cast<{type_}*>(raw);
            #pragma unroll 1
            for (int i = 0; i < rounds; i++) {{
                if (i != threadIdx.x / 16) continue;
                const int v = differ ? threadIdx.x / 16 : 1;
                s[0] = {value};  // here
                __threadfence_block();
            }}
            __syncthreads();
            y[threadIdx.x] = {first};
        }}
    """
    y = ints()
    run(code, "apart", 1, N, y, 0, 4, seed=seed)
    assert y.tolist() == [1] * N
    with pytest.raises(Race):
        run(code, "apart", 1, N, y, 1, 4, seed=seed)


def test_writers_of_one_instruction_beside_accesses_of_bytes():
    """That some other access is smaller changes nothing."""
    code = """
        __global__ void all_write(int* y, int n) {
            __shared__ __align__(8) volatile char s[64];
            s[32 + threadIdx.x % 2] = 1;
            *reinterpret_cast<volatile int*>(s + 8) = 1000 + threadIdx.x / n;  // here
            __syncthreads();
            y[threadIdx.x] = *reinterpret_cast<volatile int*>(s + 8);
        }
    """
    y = ints()
    run(code, "all_write", 1, N, y, 64)
    assert y.tolist() == [1000] * 64
    fails(Race, code, "all_write", 1, N, y, 32, says=["write different values to one place", "offset 8"])


def test_atomics_in_shared_memory():
    code = """
        __global__ void count(int* y) {
            __shared__ int s[2];
            if (threadIdx.x < 2) s[threadIdx.x] = 0;
            __syncthreads();
            atomicAdd(s + threadIdx.x % 2, 1);  // other
            __syncthreads();
            y[threadIdx.x] = s[0] + s[1];  // here
        }
    """
    y = ints()
    run(code, "count", 1, N, y)
    assert y.tolist() == [64] * 64
    says = ["read shared memory that another thread has updated atomically", "which several threads have updated"]
    fails(Race, without_last_barrier(code), "count", 1, N, y, says=says)


def test_an_atomic_after_a_plain_write():
    code = """
        __global__ void count(int* y) {
            __shared__ int s[1];
            if (threadIdx.x == 0) s[0] = 0;  // other
            __syncthreads();
            atomicAdd(s, 1);  // here
            __syncthreads();
            y[threadIdx.x] = s[0];
        }
    """
    run(code, "count", 1, N, ints())
    missing = code.replace("__syncthreads();", "", 1)
    says = ["update atomically shared memory that another thread has written"]
    fails(Race, missing, "count", 1, N, ints(), says=says)


def test_named_barriers():
    """Each half of the block has a barrier of its own."""
    code = """
        __global__ void halves(int* y) {
            __shared__ int s[128];
            int half = threadIdx.x / 64;
            s[threadIdx.x] = threadIdx.x;  // other
            asm volatile("bar.sync %0, 64;" :: "r"(half + 1) : "memory");
            y[threadIdx.x] = s[threadIdx.x ^ 63];  // here
        }
    """
    y = ints(128)
    run(code, "halves", 2, 128, y)
    assert y.tolist() == [i ^ 63 for i in range(128)]
    missing = without_last_barrier(code, 'asm volatile("bar.sync %0, 64;" :: "r"(half + 1) : "memory");')
    fails(Race, missing, "halves", 2, 128, y, says=["read shared memory that another thread has written"])


def test_matrix_fragments_and_wide_copies():
    """wmma touches two bytes at a time; nothing else does so here."""
    registers = "{%0, %1, %2, %3, %4, %5, %6, %7}"
    outputs = ", ".join(f'"=r"(X[{i}])' for i in range(8))
    inputs = ", ".join(f'"r"(X[{i}])' for i in range(8))
    load = f'asm volatile("wmma.load.KIND.sync.aligned.row.m16n16k16.shared.f16 {registers}, [%8], 16;" : {outputs} : '
    load += '"r"(from) : "memory");'
    load_a, load_b = load.replace("KIND", "a").replace("X", "a"), load.replace("KIND", "b").replace("X", "b")
    a, b = (", ".join(f"%{i}" for i in range(first, first + 8)) for first in (4, 12))
    multiply = 'asm volatile("wmma.mma.sync.aligned.row.row.m16n16k16.f16.f16 '
    multiply += f'{{%0, %1, %2, %3}}, {{{a}}}, {{{b}}}, {{%20, %20, %20, %20}};" : '
    multiply += ", ".join(f'"=r"(d[{i}])' for i in range(4)) + f" : {inputs.replace('X', 'a')}, "
    multiply += f'{inputs.replace("X", "b")}, "r"(0));'
    store = 'asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f16 [%4], {%0, %1, %2, %3}, 16;" :: '
    store += ", ".join(f'"r"(d[{i}])' for i in range(4)) + ', "r"(to) : "memory");'
    code = f"""
        __global__ void square(const float4* x, float4* y) {{
            __shared__ __align__(32) float4 s[32];
            __shared__ __align__(32) float4 t[32];
            s[threadIdx.x] = x[threadIdx.x];
            __syncwarp();
            unsigned a[8], b[8], d[4], from = __cvta_generic_to_shared(s), to = __cvta_generic_to_shared(t);
            {load_a}
            {load_b}
            {multiply}
            {store}
            __syncwarp();
            y[threadIdx.x ^ 1] = t[threadIdx.x ^ 1];  // here
        }}
    """
    x = np.random.default_rng(0).integers(-3, 4, (16, 16)).astype(np.float16)
    y = np.zeros_like(x)
    run(code, "square", 1, 32, x, y)
    assert (y == x @ x).all()
    fails(Race, without_last_barrier(code, "__syncwarp();"), "square", 1, 32, x, y, says=["another thread has written"])


# --- cp.async ---

COPY = """
    #include <cuda_pipeline.h>
    __global__ void copy(const int* x, int* y) {
        __shared__ int s[64];
        __pipeline_memcpy_async(s + threadIdx.x, x + threadIdx.x, 4);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
        y[threadIdx.x] = s[threadIdx.x ^ LANE];  // here
    }
"""


@pytest.mark.parametrize("lane", ["0", "1"])
def test_an_asynchronous_copy_must_be_waited_for(lane):
    code = COPY.replace("LANE", lane)
    x, y = np.arange(N, dtype=np.int32), ints()
    run(code, "copy", 1, N, x, y)
    assert y.tolist() == [i ^ int(lane) for i in range(N)]
    says = ["read of shared memory while an asynchronous copy to it is in flight", "offset"]
    fails(Race, without_last_barrier(code, "__pipeline_wait_prior(0);"), "copy", 1, N, x, y, says=says)


def test_waiting_makes_a_copy_visible_to_its_own_thread_only():
    x, y = np.arange(N, dtype=np.int32), ints()
    run(without_last_barrier(COPY.replace("LANE", "0")), "copy", 1, N, x, y)
    assert y.tolist() == x.tolist()
    says = ["read shared memory that another thread has written", "offset 4, which thread (1,0,0)"]
    fails(Race, without_last_barrier(COPY.replace("LANE", "1")), "copy", 1, N, x, y, says=says)


def test_a_copy_onto_what_others_still_read():
    code = """
        #include <cuda_pipeline.h>
        __global__ void copy(const int* x, int* y) {
            __shared__ int s[64];
            s[threadIdx.x] = 1;
            __syncthreads();
            int v = s[63 - threadIdx.x];  // other
            __syncthreads();
            __pipeline_memcpy_async(s + threadIdx.x, x + threadIdx.x, 4);
            __pipeline_commit();
            __pipeline_wait_prior(0);
            y[threadIdx.x] = s[threadIdx.x] + v;
        }
    """
    x, y = np.arange(N, dtype=np.int32), ints()
    run(code, "copy", 1, N, x, y)
    assert y.tolist() == [i + 1 for i in range(N)]
    fails(Race, without_last_barrier(code), "copy", 1, N, x, y, says=["another thread has read"])


# --- between blocks ---


def test_a_read_of_what_another_block_writes():
    code = """
        __global__ void neighbour(int* y) {
            y[blockIdx.x] = blockIdx.x;  // other
            y[64 + blockIdx.x] = y[(blockIdx.x + 1) % gridDim.x];  // here
        }
    """
    y = ints(128)
    says = ["race between blocks: read `y` where another block has written", "thread (0,0,0) of block (0,0,0)"]
    says += ["offset 4 of `y`, which block (1,0,0) has written"]
    fails(Race, code, "neighbour", 4, 1, y, says=says)
    run(code, "neighbour", 1, 1, y)
    run(code, "neighbour", 4, 1, y, check=False)


def test_a_write_of_what_another_block_has_read():
    code = """
        __global__ void update(int* y, int* z) {
            z[blockIdx.x] = y[(blockIdx.x + 1) % gridDim.x];  // other
            y[blockIdx.x] = 1;  // here
        }
    """
    says = [
        "race between blocks: write `y` where another block has read",
        "offset 0 of `y`, which block (3,0,0) has read",
    ]
    fails(Race, code, "update", 4, 1, ints(), ints(), says=says)


@pytest.mark.parametrize("threads", [1, 32])
@pytest.mark.parametrize("seed", [None, 3])
def test_two_blocks_write_one_place(threads, seed):
    code = """
        __global__ void clash(int* y, int n) {
            y[threadIdx.x] = blockIdx.x / n;  // here
        }
    """
    y = np.full(32, -1, np.int32)
    run(code, "clash", 4, threads, y, 4, seed=seed)  # one value
    assert y[:threads].tolist() == [0] * threads
    says = ["race between blocks", "`y`", "offset 0"]
    fails(Race, code, "clash", 4, threads, ints(), 2, seed=seed, says=says)


def test_two_blocks_write_one_place_at_different_times():
    code = """
        __global__ void clash(int* y, int value) {
            if (blockIdx.x == 0) y[3] = 1;  // other
            __syncthreads();
            if (blockIdx.x == 1) y[3] = value;  // here
        }
    """
    run(code, "clash", 2, 1, ints(), 1)
    says = [
        "race between blocks: write `y` where another block has written",
        "offset 12 of `y`, which block (0,0,0) has",
    ]
    fails(Race, code, "clash", 2, 1, ints(), 2, says=says)


def test_one_value_by_two_blocks_beside_accesses_of_bytes():
    code = """
        __global__ void same(char* bytes, int* y, int value) {
            bytes[blockIdx.x] = 1;
            if (blockIdx.x == 0) y[3] = 258;
            __syncthreads();
            if (blockIdx.x != 0) y[3] = value;  // here
        }
    """
    run(code, "same", 3, 1, np.zeros(8, np.int8), ints(), 258)
    fails(Race, code, "same", 3, 1, np.zeros(8, np.int8), ints(), 259, says=["another block has written"])


def test_atomics_are_no_race():
    code = """
        __global__ void count(int* y) {
            atomicAdd(y, 1);
            atomicMax(y + 1, int(blockIdx.x));
        }
    """
    y = ints(2)
    run(code, "count", 8, 32, y)
    assert y.tolist() == [256, 7]


def test_a_plain_access_beside_atomics():
    code = """
        __global__ void count(int* y, int* z) {
            atomicAdd(y, 1);  // other
            z[blockIdx.x] = y[0];  // here
        }
    """
    says = ["race between blocks: read `y` where another block has updated atomically", "which block (7,0,0) has"]
    fails(Race, code, "count", 8, 1, ints(1), ints(8), says=says)


LAST_BLOCK = """
    __device__ unsigned ticket;
    __global__ void sum(const int* x, int* part, int* y) {
        __shared__ bool last;
        if (threadIdx.x == 0) {
            int own = 0;
            for (int i = 0; i < 4; i++) own += x[4 * blockIdx.x + i];
            part[blockIdx.x] = own;  // other
            __threadfence();
            last = atomicAdd(&ticket, 1) == gridDim.x - 1;
        }
        __syncthreads();
        if (last && threadIdx.x == 0) {
            int total = 0;
            for (int b = 0; b < gridDim.x; b++)
                total += part[b];  // here
            y[0] = total;
        }
    }
"""


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_last_block_adds_up(seed):
    x, part, y = np.arange(32, dtype=np.int32), ints(8), ints(1)
    run(LAST_BLOCK, "sum", 8, 32, x, part, y, seed=seed)
    assert y[0] == x.sum()
    says = ["race between blocks: read `part` where another block has written"]
    fails(Race, without_last_barrier(LAST_BLOCK, "__threadfence();"), "sum", 8, 32, x, part, y, seed=seed, says=says)


def test_the_last_block_in_straight_code():
    """Store, fence and atomic in one stretch without a branch; and with the fence in the wrong place."""
    code = """
        __global__ void sum(int* part, unsigned* ticket, int* y) {
            part[blockIdx.x] = blockIdx.x;
            __threadfence();
            if (atomicAdd(ticket, 1) == gridDim.x - 1)
                for (int b = 0; b < gridDim.x; b++) y[0] += part[b];  // here
        }
    """
    y = ints(1)
    run(code, "sum", 8, 1, ints(8), np.zeros(1, np.uint32), y)
    assert y[0] == 28
    early = code.replace("            __threadfence();\n", "").replace("part[", "__threadfence(); part[", 1)
    fails(Race, early, "sum", 8, 1, ints(8), np.zeros(1, np.uint32), y, says=["`part` where another block has written"])


def test_a_flag_that_a_later_block_waits_for():
    """Block 0 publishes with a fence and a flag; block 1 spins on the flag."""
    code = """
        __global__ void handover(int* data, volatile int* flag, int* y) {
            if (blockIdx.x == BLOCK) {
                data[0] = 42;
                __threadfence();
                *flag = 1;
            } else {
                while (*flag == 0) {}
                __threadfence();
                y[0] = data[0];  // here
            }
        }
    """
    for block in "01":
        y = ints(1)
        run(code.replace("BLOCK", block), "handover", 2, 1, ints(1), ints(1), y)
        assert y[0] == 42
        missing = code.replace("BLOCK", block).replace("__threadfence();", "", 1)
        fails(Race, missing, "handover", 2, 1, ints(1), ints(1), ints(1), says=["read `data`"])


LOCK = """
    __global__ void locked(int* lock, int* count, int* order) {
        if (threadIdx.x % STEP == 0) {
            bool done = false;
            while (!done) {
                if (atomicCAS(lock, 0, 1) == 0) {
                    __threadfence();
                    int n = count[0];
                    order[n] = blockIdx.x;
                    count[0] = n + 1;
                    __threadfence();
                    atomicExch(lock, 0);
                    done = true;
                }
            }
        }
    }
"""


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("step", [32, 8])
def test_a_spin_lock(seed, step):
    """A global counter is right, and nothing is reported; several threads of one warp may want the lock."""
    blocks, threads = 12, 32
    count, order = ints(1), ints(blocks * threads)
    code = LOCK.replace("STEP", str(step))
    run(code, "locked", blocks, threads, ints(1), count, order, seed=seed)
    per_block = threads // step
    assert count[0] == blocks * per_block
    assert (np.bincount(order[: count[0]]) == per_block).all()


def test_a_spin_lock_of_the_simplest_form():
    code = """
        __global__ void locked(int* lock, int* count) {
            if (threadIdx.x == 0) {
                while (atomicExch(lock, 1) != 0) {}
                __threadfence();
                count[0] += 1;
                __threadfence();
                atomicExch(lock, 0);
            }
        }
    """
    count = ints(1)
    run(code, "locked", 100, 32, ints(1), count)
    assert count[0] == 100


def test_a_lock_without_fences_is_a_race():
    code = LOCK.replace("STEP", "32").replace("__threadfence();", "")
    with pytest.raises(Race, match="race between blocks"):
        run(code, "locked", 4, 32, ints(1), ints(1), ints(128))


def test_pointers_in_a_struct_are_followed():
    code = """
        struct Views { int* y; int n; };
        __global__ void neighbour(Views v) {
            v.y[blockIdx.x] = blockIdx.x;
            v.y[v.n + blockIdx.x] = v.y[(blockIdx.x + 1) % gridDim.x];  // here
        }
    """
    kernels, symbol = program(code, "neighbour")
    y = kernels.memory.allocate(ints(), "y")
    views = np.array([(y.base, 32)], [("y", np.uint64), ("n", np.int64)]).tobytes()
    with pytest.raises(Race, match="read `y` where another block has written"):
        kernels.launch(symbol, (4,), (1,), [views])


# --- flags in shared memory ---

FLAG = """
    #include <cuda/atomic>
    __global__ void flag(int* y) {
        __shared__ int f;
        cuda::atomic_ref<int, cuda::thread_scope_block> ready(f);
        __shared__ short before[4];
        if (threadIdx.x == 0) FIRST;
        before[threadIdx.x % 4] = 1;
        __syncthreads();
        if (threadIdx.x == 0) ready.store(1, cuda::memory_order_release);
        if (threadIdx.x == 32) { while (READ == 0) {} y[0] = 7; }
    }
"""


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("first", ["f = 0", "ready.store(0, cuda::memory_order_relaxed)"])
def test_atomic_loads_and_stores_may_meet(first, seed):
    """Atomic accesses may meet; a plain load beside such a store is a race, and so is a first store beside a load."""
    y, code = np.zeros(1, np.int32), FLAG.replace("FIRST", first)
    load = "ready.load(cuda::memory_order_acquire)"
    run(code.replace("READ", load), "flag", 1, 64, y, seed=seed)
    assert y[0] == 7
    with pytest.raises(Race, match="shared memory that another thread has (written|updated|read)"):
        run(code.replace("READ", "*(volatile int*)&f"), "flag", 1, 64, y, seed=seed)
    with pytest.raises((Race, Uninitialized)):
        run(code.replace("READ", load).replace("__syncthreads();", ""), "flag", 1, 64, y, seed=seed)


def test_two_buffers_in_turn_need_one_barrier_a_round():
    code = """
        __global__ void pipeline(const int* x, int* y) {
            __shared__ int s[2][64];
            int sum = 0;
            for (int i = 0; i < 6; i++) {
                s[i % DEPTH][threadIdx.x] = x[i * 64 + threadIdx.x];  // here
                __syncthreads();
                sum += s[i % DEPTH][63 - threadIdx.x];  // other
            }
            y[threadIdx.x] = sum;
        }
    """
    x, y = np.arange(6 * N, dtype=np.int32), ints()
    run(code.replace("DEPTH", "2"), "pipeline", 1, N, x, y)
    assert y.tolist() == x.reshape(6, N)[:, ::-1].sum(0).tolist()
    fails(Race, code.replace("DEPTH", "1"), "pipeline", 1, N, x, y, says=["another thread has read"])
