"""What the checks for races put off until it is asked for is found all the same, and named as exactly.

Reads are kept as they come, granules are wide until a narrower access comes, and blocks are told apart once two meet.
"""

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import Race
from cupyops.simulator.machine import global_records, shared_records

N = 64


def ints(n=N):
    return np.zeros(n, np.int32)


@pytest.fixture(params=["all reads kept", "reads sorted out at once"])
def log(request, monkeypatch):
    """As it is, and with hardly any room for reads that nobody has asked for yet."""
    if request.param == "reads sorted out at once":
        monkeypatch.setattr(shared_records, "_LOG_GRANULES", 100)
        monkeypatch.setattr(global_records, "_LONGEST_LOG", 100)


# --- reads of shared memory ---

ROUNDS = """
    __global__ void rounds(int* y, int n) {
        __shared__ volatile int s[128];
        s[threadIdx.x] = s[64 + threadIdx.x] = threadIdx.x;
        int sum = 0;
        for (int i = 0; i < n; i++) {
            __syncthreads();
            if (i == n - 1) sum += s[(threadIdx.x + 1) % 64];  // other
            for (int k = 0; k < 8; k++) sum += s[64 + (threadIdx.x + k) % 64];
        }
        LAST
        s[threadIdx.x] = sum;  // here
        y[threadIdx.x] = sum;
    }
"""


def test_a_read_before_many_others(log):
    """Those of earlier rounds are forgotten; the one of the last round is not, though others came after it."""
    y = ints()
    run(ROUNDS.replace("LAST", "__syncthreads();"), "rounds", 1, N, y, 5)
    assert y[0] == 1 + 5 * sum(range(8))
    says = ["write shared memory that another thread has read", "thread (0,0,0) of block (0,0,0), and 63 more"]
    says += ["offset 0, which thread (63,0,0) of block (0,0,0) has read"]
    fails(Race, ROUNDS.replace("LAST", ""), "rounds", 1, N, ints(), 5, says=says)


def test_a_warp_knows_when_it_has_synchronised(log):
    """Each warp reads, meets, and writes; the first warp meets more often than the second."""
    code = """
        __global__ void warps(int* y) {
            __shared__ volatile int s[64];
            s[threadIdx.x] = threadIdx.x;
            __syncwarp();
            if (threadIdx.x < 32)
                for (int i = 0; i < 3; i++) {
                    y[threadIdx.x] += s[threadIdx.x ^ 3];
                    __syncwarp();
                }
            int v = s[threadIdx.x ^ 3];  // other
            if (threadIdx.x / 32 != LATE) __syncwarp();
            s[threadIdx.x] = v;  // here
        }
    """
    run(code.replace("LATE", "2"), "warps", 1, N, ints())
    for late, said in enumerate(("offset 0, which thread (3,0,0)", "offset 128, which thread (35,0,0)")):
        says = ["write shared memory that another thread has read", "and 31 more", said]
        fails(Race, code.replace("LATE", str(late)), "warps", 1, N, ints(), says=says)


def test_meeting_in_a_warp_does_not_hide_a_reader_of_another(log):
    code = """
        __global__ void readers(int* y) {
            __shared__ volatile int s[64];
            s[threadIdx.x] = threadIdx.x;
            __syncthreads();
            if (threadIdx.x >= 32) y[threadIdx.x] = s[0];  // other
            __syncwarp();
            if (threadIdx.x < 32) y[threadIdx.x] = s[0] + s[32 + threadIdx.x % 8];
            __syncwarp();
            if (threadIdx.x == 0) s[FIRST] = 1;  // here
        }
    """
    run(code.replace("FIRST", "1"), "readers", 1, N, ints())
    says = ["write shared memory that another thread has read", "which several threads have read"]
    with pytest.raises(Race) as caught:
        run(code.replace("FIRST", "0"), "readers", 1, N, ints())
    assert all(word in str(caught.value) for word in says)


@pytest.mark.parametrize("place", [0, 17, 63])
def test_one_place_of_many(log, place):
    """Each thread reads a place of its own, then one of these is written."""
    code = f"""
        __global__ void one(int* y) {{
            __shared__ volatile int s[64];
            s[threadIdx.x] = threadIdx.x;
            __syncthreads();
            y[threadIdx.x] = s[63 - threadIdx.x];  // other
            SYNC
            if (threadIdx.x == {place}) s[{place}] = 1;  // here
        }}
    """
    run(code.replace("SYNC", "__syncthreads();"), "one", 1, N, ints())
    says = [f"offset {4 * place}, which thread ({63 - place},0,0) of block (0,0,0) has read"]
    fails(Race, code.replace("SYNC", ""), "one", 1, N, ints(), says=says)


def test_a_read_is_compared_with_each_later_write_once(log):
    """A thread may write what it has read itself; what others write then is compared with that."""
    code = """
        __global__ void own(int* y) {
            __shared__ volatile int s[64];
            s[threadIdx.x] = 1;
            for (int i = 0; i < 4; i++) s[threadIdx.x] = s[threadIdx.x] + i;  // other
            SYNC
            s[threadIdx.x ^ 1] = 5;  // here
            y[threadIdx.x] = s[threadIdx.x ^ 1];
        }
    """
    run(code.replace("SYNC", "__syncthreads();"), "own", 1, N, ints())
    says = ["write shared memory that another thread has written", "offset 4, which thread (1,0,0)"]
    fails(Race, code.replace("SYNC", ""), "own", 1, N, ints(), says=says)


CLUSTER = """
    __global__ void __cluster_dims__(2, 1, 1) pairs(int* y) {
        __shared__ volatile int s[32], t[32];
        unsigned rank, own = __cvta_generic_to_shared((const void*)(s + threadIdx.x)), far;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        s[threadIdx.x] = t[threadIdx.x] = 10 * rank;
        asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(own), "r"(rank ^ 1));
        int v;
        asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(v) : "r"(far));  // other
        for (int i = 0; i < 4; i++) { __syncthreads(); v += t[(threadIdx.x + i) % 32]; }
        SYNC
        s[threadIdx.x] = v;  // here
        y[32 * blockIdx.x + threadIdx.x] = v;
    }
"""


def test_a_block_barrier_does_not_hide_a_reader_of_the_cluster(log):
    wait = 'asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");'
    y = ints(128)
    run(CLUSTER.replace("SYNC", wait), "pairs", 4, 32, y, arch="sm_90")
    assert y.reshape(4, 32)[:, 0].tolist() == [10, 40, 10, 40]
    with pytest.raises(Race, match="write shared memory that another thread has read"):
        run(CLUSTER.replace("SYNC", "__syncthreads();"), "pairs", 4, 32, y, arch="sm_90")


OWN = """
    __global__ void __cluster_dims__(2, 1, 1) pairs(int* y) {
        __shared__ volatile int s[32];
        unsigned rank, own = __cvta_generic_to_shared((const void*)(s + threadIdx.x % 32)), far;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        if (threadIdx.x < 32) s[threadIdx.x] = rank;
        asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
        int v = s[0];  // other
        for (int i = 1; i < 4; i++) __syncthreads();
        SYNC
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(own), "r"(rank ^ 1));
        if (threadIdx.x < 32) asm volatile("st.shared::cluster.s32 [%0], %1;" :: "r"(far), "r"(v) : "memory");  // here
        asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
        y[64 * blockIdx.x + threadIdx.x] = s[0];
    }
"""


@pytest.mark.parametrize("threads", [32, 64])
def test_a_block_barrier_does_not_hide_a_block_that_reads_its_own(log, threads):
    wait = 'asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");'
    y = ints(256)
    run(OWN.replace("SYNC", wait), "pairs", 4, threads, y, arch="sm_90")
    assert y.reshape(4, 64)[:, 0].tolist() == [1, 0, 1, 0]
    with pytest.raises(Race, match="write shared memory that another thread has read"):
        run(OWN.replace("SYNC", "__syncthreads();"), "pairs", 4, threads, y, arch="sm_90")


# --- granules ---


def test_a_place_is_named_exactly_once_granules_are_narrow(log):
    """16 bytes at a time, until a single byte is read elsewhere; reads from before that count still."""
    code = """
        __global__ void narrow(int* y) {
            __shared__ float4 s[64];
            __shared__ volatile char c[64];
            s[threadIdx.x] = make_float4(1, 2, 3, 4);
            SECOND
            float4 v = s[(threadIdx.x + 1) % 64];  // other
            c[threadIdx.x] = 1;
            y[threadIdx.x] = c[threadIdx.x] + v.x + v.y + v.z + v.w;
            FIRST
            reinterpret_cast<volatile int*>(s)[4 * threadIdx.x + 2] = 5;  // here
        }
    """
    sync = "__syncthreads();"
    run(code.replace("FIRST", sync).replace("SECOND", sync), "narrow", 1, N, ints())
    says = ["offset 8 of `s`, which thread (63,0,0) of block (0,0,0) has read"]
    fails(Race, code.replace("FIRST", "").replace("SECOND", sync), "narrow", 1, N, ints(), says=says)


def test_one_of_four_values_written_at_once():
    """Threads write one place, 16 bytes at a time: all four values must be the same."""
    code = """
        __global__ void wide(int* y, int n) {
            __shared__ int4 s[2];
            s[threadIdx.x / 32] = make_int4(1, 2, threadIdx.x / n, 4);  // here
            __syncthreads();
            int4 v = s[threadIdx.x / 32];
            y[threadIdx.x] = v.x + v.y + v.z + v.w;
        }
    """
    y = ints()
    run(code, "wide", 1, N, y, 32)
    assert y.tolist() == [7] * 32 + [8] * 32
    fails(Race, code, "wide", 1, N, y, 16, says=["write different values to one place", "offset 8"])


# --- blocks that meet ---

READERS = """
    __global__ void readers(float4* x, float* y) {
        float4 v = x[threadIdx.x];  // other
        y[blockIdx.x * blockDim.x + threadIdx.x] = v.x + v.w;
        if (blockIdx.x == 2 && threadIdx.x == 7) reinterpret_cast<float*>(x)[PLACE] = 5;  // here
    }
"""


def test_a_write_of_what_all_blocks_have_read(log):
    x, y = np.arange(4 * N, dtype=np.float32), np.zeros(4 * 32, np.float32)
    run(READERS.replace("PLACE", "128"), "readers", 4, 32, x, y)
    assert y.tolist() == (8 * np.arange(32) + 3).tolist() * 4
    says = ["race between blocks: write `x` where another block has read", "thread (7,0,0) of block (2,0,0)"]
    says += ["offset 104 of `x`, which block (3,0,0) has read"]
    fails(Race, READERS.replace("PLACE", "26"), "readers", 4, 32, x, y, says=says)


def test_blocks_that_meet_after_a_while():
    """Each block writes what is its own, twice; then one reads its neighbour's, of the first time."""
    code = """
        __global__ void neighbours(int4* x, int* y) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            x[i] = make_int4(i, i, i, i);  // other
            x[blockDim.x * gridDim.x + i] = x[i];
            int at = SHIFT + i;
            y[i] = reinterpret_cast<int*>(x)[4 * (at % (blockDim.x * gridDim.x)) + 3];  // here
        }
    """
    x, y = np.zeros((2 * N, 4), np.int32), ints()
    run(code.replace("SHIFT", "0"), "neighbours", 2, 32, x, y)
    assert y.tolist() == list(range(N)) and (x[N:] == x[:N]).all()
    says = ["race between blocks: read `x` where another block has written", "thread (31,0,0) of block (0,0,0)"]
    says += ["offset 524 of `x`, which block (1,0,0) has written"]
    fails(Race, code.replace("SHIFT", "1"), "neighbours", 2, 32, x, y, says=says)
