"""Order among some warps of a block, and by fences of some threads: each kernel beside one that lacks what orders it."""

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import Deadlock, Race

BARRIERS = """
    __device__ void wait(int b, int n) { asm volatile("bar.sync %0, %1;" :: "r"(b), "r"(n) : "memory"); }
    __device__ void arrive(int b, int n) { asm volatile("bar.arrive %0, %1;" :: "r"(b), "r"(n) : "memory"); }
"""
MBARRIERS = """
    typedef unsigned long long Bar;
    __device__ unsigned at(Bar* b) { return __cvta_generic_to_shared(b); }
    __device__ void init(Bar* b, int n) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory");
    }
    __device__ void arrive(Bar* b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(at(b)) : "memory"); }
    __device__ void wait(Bar* b, int parity) {
        asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again; }"
            :: "r"(at(b)), "r"(parity) : "memory");
    }
"""
SEEDS = pytest.mark.parametrize("seed", [None, 0, 1])


def ints(count: int = 64) -> np.ndarray:
    return np.zeros(count, np.int32)


# --- named barriers of some warps ---


@SEEDS
@pytest.mark.parametrize("memory", ["__shared__ int s[128];", "int* s = g;"])
def test_two_halves_of_a_block_meet_apart(memory, seed):
    code = """
        __global__ void halves(int* y, int* g) {
            MEMORY
            s[threadIdx.x] = threadIdx.x;
            if (threadIdx.x < 64) wait(1, 64); else wait(2, 64);
            y[threadIdx.x] = s[threadIdx.x ^ OTHER];  // here
        }
    """
    code = BARRIERS + code.replace("MEMORY", memory)
    y = ints(128)
    run(code.replace("OTHER", "63"), "halves", 1, 128, y, ints(128), seed=seed)
    assert y.tolist() == [i ^ 63 for i in range(128)]
    fails(Race, code.replace("OTHER", "127"), "halves", 1, 128, y, ints(128), seed=seed)


@SEEDS
def test_a_warp_that_arrives_is_not_ordered_behind_who_waits(seed):
    """Who waits sees what was written before the arrival, not after it; who arrives has waited for nobody."""
    code = (
        BARRIERS
        + """
        __global__ void one_way(int* y) {
            __shared__ int s[64], t[64];
            int lane = threadIdx.x % 32;
            if (threadIdx.x < 32) t[lane] = 1;
            __syncthreads();
            if (threadIdx.x < 32) {
                BEFORE
                arrive(1, 64);
                AFTER
            } else {
                t[lane] = 5;
                wait(1, 64);
                y[lane] = s[31 - lane];
            }
        }
    """
    )
    y, right = ints(), code.replace("BEFORE", "s[lane] = lane;")
    run(right.replace("AFTER", ""), "one_way", 1, 64, y, seed=seed)
    assert y[:32].tolist() == list(range(31, -1, -1))
    for wrong in (
        right.replace("AFTER", "y[32 + lane] = t[lane];"),
        right.replace("AFTER", "s[lane] = 3;"),
        code.replace("BEFORE", "s[lane] = 1; __syncwarp();").replace("AFTER", "s[31 - lane] = lane;"),
    ):
        with pytest.raises(Race, match="with no barrier in between"):
            run(wrong, "one_way", 1, 64, ints(), seed=seed)


RING = """
    __global__ void ring(const int* x, int* y, int rounds) {
        __shared__ int s[2][32];
        int lane = threadIdx.x % 32;
        if (threadIdx.x < 32) {
            for (int i = 0; i < rounds; i++) {
                if (i >= 2) EMPTY
                s[i % 2][lane] = x[32 * i + lane];
                arrive(1 + i % 2, 96);
            }
        } else {
            int sum = 0;
            for (int i = 0; i < rounds; i++) {
                wait(1 + i % 2, 96);
                EARLY
                sum += s[i % 2][31 - lane];
                LATE
            }
            y[threadIdx.x - 32] = sum;
        }
    }
"""
GIVES = "if (i < rounds - 2) arrive(3 + i % 2, 96);"


@SEEDS
def test_a_ring_between_warps(seed):
    code = BARRIERS + RING
    x, y = np.arange(256, dtype=np.int32), ints()
    right = code.replace("EMPTY", "wait(3 + i % 2, 96);").replace("EARLY", "").replace("LATE", GIVES)
    run(right, "ring", 1, 96, x, y, 8, seed=seed)
    assert y.tolist() == np.tile(x.reshape(8, 32).sum(0)[::-1], 2).tolist()
    early = code.replace("EMPTY", "wait(3 + i % 2, 96);").replace("EARLY", GIVES).replace("LATE", "")
    with pytest.raises(Race, match="with no barrier in between"):  # given back before it is read
        run(early, "ring", 1, 96, x, y, 8, seed=seed)
    with pytest.raises((Race, Deadlock)):
        run(code.replace("EMPTY", "").replace("EARLY", "").replace("LATE", ""), "ring", 1, 96, x, y, 8, seed=seed)


@SEEDS
def test_warps_are_ordered_through_others(seed):
    """Warp 0 meets warp 1, which then meets warp 2."""
    code = (
        BARRIERS
        + """
        __global__ void chain(int* y) {
            __shared__ int s;
            int warp = threadIdx.x / 32;
            if (threadIdx.x == 0) s = y[0] + 42;
            if (warp < 2) wait(1, 64);
            if (warp > 0) MEET
            if (warp == 2) y[threadIdx.x - 64] = s;  // here
        }
    """
    )
    y = ints(32)
    run(code.replace("MEET", "wait(2, 64);"), "chain", 1, 96, y, seed=seed)
    assert (y == 42).all()
    with pytest.raises(Race):
        run(code.replace("MEET", "__syncwarp();"), "chain", 1, 96, ints(32), seed=seed)


# --- plain loads and stores around mbarriers ---

STAGES = """
    __global__ void stages(const int* x, int* y, int rounds) {
        __shared__ int s[3][32];
        __shared__ Bar full[3], empty[3];
        if (threadIdx.x < 3) { init(full + threadIdx.x, 32); init(empty + threadIdx.x, 64); }
        __syncthreads();
        int lane = threadIdx.x % 32;
        if (threadIdx.x < 32) {
            for (int i = 0; i < rounds; i++) {
                EMPTY
                s[i % 3][lane] = x[32 * i + lane];
                arrive(full + i % 3);
            }
        } else {
            int sum = 0;
            for (int i = 0; i < rounds; i++) {
                FULL
                EARLY
                sum += s[i % 3][31 - lane];
                LATE
            }
            y[threadIdx.x - 32] = sum;
        }
    }
"""
STAGED = {
    "EMPTY": "wait(empty + i % 3, (i / 3 & 1) ^ 1);",
    "FULL": "wait(full + i % 3, i / 3 & 1);",
    "EARLY": "",
    "LATE": "arrive(empty + i % 3);",
}


@SEEDS
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"EARLY": STAGED["LATE"], "LATE": ""},
        {"FULL": "if (lane == 0) wait(full + i % 3, i / 3 & 1);"},
        {"EMPTY": ""},
        {"FULL": "wait(full + i % 3, 0);"},
    ],
    ids=["right", "given back early", "one lane waits", "no wait for room", "one parity"],
)
def test_stages_of_plain_stores(change, seed):
    code = MBARRIERS + STAGES
    for name, text in (STAGED | change).items():
        code = code.replace(name, text)
    x, y = np.arange(288, dtype=np.int32), ints()
    one_lane = "if (lane == 0)" in code  # whose warp must hear of it
    if change and not one_lane:
        with pytest.raises((Race, Deadlock)):
            run(code, "stages", 1, 96, x, y, 9, arch="sm_90", seed=seed)
        return
    run(code.replace("sum +=", "__syncwarp(); sum +="), "stages", 1, 96, x, y, 9, arch="sm_90", seed=seed)
    assert y.tolist() == np.tile(x.reshape(9, 32).sum(0)[::-1], 2).tolist()


# --- flags and locks in shared memory ---

FLAG = """
    __global__ void flag(int* y) {
        __shared__ int data[32];
        __shared__ volatile int flag;
        int lane = threadIdx.x % 32;
        if (threadIdx.x == 0) flag = 0;
        __syncthreads();
        if (threadIdx.x < 32) {
            data[lane] = lane;
            __syncwarp();
            FENCE
            if (lane == 0) flag = 1;
        } else if (threadIdx.x < 64) {
            WAIT
            __threadfence_block();
            y[lane] = data[31 - lane];  // here
        }
    }
"""


@SEEDS
def test_a_volatile_flag_with_fences(seed):
    wait, y = "while (flag == 0) {}", ints(32)
    code = FLAG.replace("FENCE", "__threadfence_block();").replace("WAIT", wait)
    run(code, "flag", 1, 96, y, seed=seed)
    assert y.tolist() == list(range(31, -1, -1))
    with pytest.raises(Race):
        run(FLAG.replace("FENCE", "").replace("WAIT", wait), "flag", 1, 96, y, seed=seed)
    with pytest.raises(Race):
        run(code.replace(wait, ""), "flag", 1, 96, y, seed=seed)
    with pytest.raises(Race):  # the store that clears it may come after the one that sets it
        run(code.replace("flag = 0;\n        __syncthreads();", "flag = 0;"), "flag", 1, 96, y, seed=seed)


LOCK = """
    __global__ void lock(int* y) {
        __shared__ int lock, count;
        if (threadIdx.x == 0) lock = count = 0;
        __syncthreads();
        if (threadIdx.x % 32 == 0) {
            while (atomicCAS(&lock, 0, 1)) {}
            __threadfence_block();
            count = count + 1;
            FENCE
            atomicExch(&lock, 0);
        }
        __syncthreads();
        y[threadIdx.x] = count;
    }
"""


@SEEDS
def test_a_lock_in_shared_memory(seed):
    y = ints(128)
    run(LOCK.replace("FENCE", "__threadfence_block();"), "lock", 2, 128, y, seed=seed)
    assert (y == 4).all()
    without = LOCK.replace("FENCE", "").replace("__threadfence_block();", "")
    with pytest.raises(Race, match="shared memory that another thread has (read|written)"):
        run(without, "lock", 2, 128, y, seed=seed)


def test_an_atomic_load_beside_plain_loads():
    code = """
        #include <cuda/atomic>
        __global__ void loads(int* y) {
            __shared__ int n;
            if (threadIdx.x == 0) n = 7;
            __syncthreads();
            int v = n + cuda::atomic_ref<int, cuda::thread_scope_block>(n).load(cuda::memory_order_relaxed);
            y[threadIdx.x] = v + n;
            LAST
        }
    """
    y = ints()
    run(code.replace("LAST", ""), "loads", 1, 64, y)
    assert (y == 21).all()
    with pytest.raises(Race):
        run(code.replace("LAST", "if (threadIdx.x == 63) n = 8;"), "loads", 1, 64, y)


# --- fences of some threads, and other blocks ---

LAST_BLOCK = """
    __device__ unsigned done;
    __global__ void total(const float* x, float* part, float* y) {
        __shared__ bool last;
        part[64 * blockIdx.x + threadIdx.x] = x[threadIdx.x] + blockIdx.x;
        BARRIER
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicInc(&done, gridDim.x - 1) == gridDim.x - 1;
        }
        __syncthreads();
        if (!last) return;
        float sum = 0;
        for (int block = 0; block < gridDim.x; block++) sum += part[64 * block + threadIdx.x];  // here
        y[threadIdx.x] = sum;
    }
"""


@SEEDS
def test_a_fence_of_one_thread_for_its_block(seed):
    """It covers what others have written that this thread has met: by a barrier, and of its warp without one."""
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run(LAST_BLOCK.replace("BARRIER", "__syncthreads();"), "total", 6, 64, x, np.zeros(384, np.float32), y, seed=seed)
    assert y.tolist() == (6 * x + 15).tolist()
    fences = LAST_BLOCK.replace("BARRIER", "__threadfence(); __syncthreads();")
    run(fences, "total", 6, 64, x, np.zeros(384, np.float32), y, seed=seed)
    says = ["race between blocks: read `part` where another block has written"]
    without = LAST_BLOCK.replace("BARRIER", "")
    fails(Race, without, "total", 6, 64, x, np.zeros(384, np.float32), y, says=says, seed=seed)


def test_a_fence_of_one_warp_behind_a_named_barrier():
    code = BARRIERS + LAST_BLOCK.replace("BARRIER", "if (threadIdx.x / 32 != 2) wait(1, 64);").replace("64 *", "96 *")
    x, part, y = np.arange(96, dtype=np.float32), np.zeros(576, np.float32), np.zeros(96, np.float32)
    with pytest.raises(Race, match="race between blocks"):
        run(code, "total", 6, 96, x, part, y)
    right = code.replace("sum +=", "if (threadIdx.x < 64) sum +=")
    run(right, "total", 6, 96, x, np.zeros(576, np.float32), y)
    assert y[:64].tolist() == (6 * x[:64] + 15).tolist()


QUEUE = """
    __global__ void queue(int* y, int n) {
        __shared__ int items[64];
        __shared__ volatile int ready[64];
        __shared__ unsigned head;
        int lane = threadIdx.x % 32, at;
        if (threadIdx.x < 64) ready[threadIdx.x] = 0;
        if (threadIdx.x == 0) head = 0;
        __syncthreads();
        if (threadIdx.x < 32) {
            for (int i = lane; i < n; i += 32) { items[i] = i * i; FENCE ready[i] = 1; }
            return;
        }
        for (;;) {
            if (lane == 0) at = atomicAdd(&head, 1u);
            at = __shfl_sync(~0u, at, 0);
            if (at >= n) break;
            if (lane == 0) { while (!ready[at]) {} }
            __threadfence_block();
            __syncwarp();
            if (lane == 5) y[at] = items[at];
        }
    }
"""


@SEEDS
def test_a_queue_between_warps(seed):
    y = ints()
    run(QUEUE.replace("FENCE", "__threadfence_block();"), "queue", 1, 128, y, 64, seed=seed)
    assert y.tolist() == [i * i for i in range(64)]
    with pytest.raises(Race):
        run(QUEUE.replace("FENCE", ""), "queue", 1, 128, y, 64, seed=seed)


CHAIN = """
    __global__ void chain(volatile int* flag, int* data) {
        int block = blockIdx.x;
        if (threadIdx.x == 0 && block > 0) { while (flag[block - 1] == 0) {} __threadfence(); }
        __syncthreads();
        data[block * 64 + threadIdx.x] = (block ? data[block * 64 - 1 - threadIdx.x] : 0) + 1;
        LAST
    }
"""


@pytest.mark.parametrize(
    "last, right",
    [
        ("__threadfence(); __syncthreads(); if (threadIdx.x == 0) flag[block] = 1;", True),
        ("__syncthreads(); if (threadIdx.x == 0) { __threadfence(); flag[block] = 1; }", True),
        ("if (threadIdx.x == 0) { __threadfence(); flag[block] = 1; }", False),
        ("__syncthreads(); if (threadIdx.x == 0) flag[block] = 1;", False),
    ],
)
def test_blocks_that_wait_for_those_before(last, right):
    data, code = ints(384), CHAIN.replace("LAST", last)
    if right:
        run(code, "chain", 6, 64, ints(6), data)
        assert data.tolist() == np.repeat(np.arange(1, 7), 64).tolist()
    else:
        fails(Race, code, "chain", 6, 64, ints(6), data, says=["race between blocks: read `data`"])


SCOPED = """
    __global__ void locked(unsigned* lock, int* data) {
        if (threadIdx.x != 0) return;
        unsigned old;
        do {
            asm volatile("atom.TAKE.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(old) : "l"(lock) : "memory");
        } while (old != 0);
        AFTER
        data[0] = 2 * data[0] + 1;
        asm volatile("st.GIVE.gpu.global.u32 [%0], 0;" :: "l"(lock) : "memory");
    }
"""


@SEEDS
@pytest.mark.parametrize(
    "take, after, give, right",
    [
        ("acquire", "", "release", True),
        ("relaxed", "__threadfence();", "release", True),
        ("relaxed", "", "release", False),
        ("acquire", "", "relaxed", False),
    ],
)
def test_a_lock_says_what_it_orders(take, after, give, right, seed):
    code = SCOPED.replace("TAKE", take).replace("AFTER", after).replace("GIVE", give)
    lock, data = np.zeros(1, np.uint32), ints(1)
    if right:
        run(code, "locked", 5, 32, lock, data, seed=seed)
        assert data[0] == 31
    else:
        with pytest.raises(Race, match="race between blocks: (read|write) `data` where another block has"):
            run(code, "locked", 5, 32, lock, data, seed=seed)


@SEEDS
def test_volatile_sums_of_a_warp_that_has_fenced(seed):
    """Behind a fence volatile stores are flags for other warps, and still no order among the lanes of one."""
    code = """
        __global__ void sum(const float* x, float* y) {
            __shared__ float s[64];
            volatile float* v = s;
            int t = threadIdx.x;
            s[t] = x[t];
            __threadfence();
            __syncthreads();
            if (t < 32) {
                for (int by = 32; by; by /= 2) { float sum = v[t] + v[t + by]; MEET v[t] = sum; MEET }
            }
            if (t == 0) y[0] = v[0];
        }
    """
    x, y = np.arange(96, dtype=np.float32), np.zeros(1, np.float32)
    run(code.replace("MEET", "__syncwarp();"), "sum", 1, 64, x, y, seed=seed)
    assert y[0] == x[:64].sum()
    with pytest.raises(Race):
        run(code.replace("MEET", ""), "sum", 1, 64, x, y, seed=seed)
