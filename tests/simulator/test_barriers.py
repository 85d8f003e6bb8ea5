"""bar.sync and its kin: who waits for whom, what is found when threads never come, and endless loops."""

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import BarrierFault, Deadlock, Race, StepLimit, Uninitialized


def ints(n):
    return np.zeros(n, np.int32)


def test_reductions_over_the_block():
    code = """
        __global__ void reduce(int* y, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            y[3 * i] = __syncthreads_count(i % 3 == 0);
            y[3 * i + 1] = __syncthreads_and(i < n);
            y[3 * i + 2] = __syncthreads_or(i == n);
        }
    """
    y = np.zeros((4, 50, 3), np.int32)
    run(code, "reduce", 4, 50, y, 70)
    for block in range(4):
        inside = range(50 * block, 50 * block + 50)
        assert (y[block, :, 0] == sum(i % 3 == 0 for i in inside)).all()
        assert ((y[block, :, 1] != 0) == all(i < 70 for i in inside)).all()
        assert ((y[block, :, 2] != 0) == (70 in inside)).all()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_reductions_in_a_loop_that_blocks_leave_at_different_times(seed):
    code = """
        __global__ void vote(int* y) {
            int left = (threadIdx.x * 7 + blockIdx.x * 13) % 11, rounds = 0;
            while (__syncthreads_or(left > 0)) { left--; rounds++; }
            y[blockIdx.x * blockDim.x + threadIdx.x] = rounds;
        }
    """
    y = np.zeros((5, 40), np.int32)
    run(code, "vote", 5, 40, y, seed=seed)
    assert y.tolist() == [[max((t * 7 + b * 13) % 11 for t in range(40))] * 40 for b in range(5)]


# --- threads that never come ---


def test_a_barrier_in_one_branch_of_threads_that_leave_otherwise():
    code = """
        __global__ void one_branch(int* y) {
            if (threadIdx.x < 16) {
                y[threadIdx.x] = 1;
                __syncthreads();  // here
            }
        }
    """
    says = [
        "16 threads of the block have exited before its barrier",
        "block (0,0,0)",
        "16 threads, first thread (0,0,0)",
    ]
    fails(BarrierFault, code, "one_branch", 1, 32, ints(32), says=says)


def test_different_barriers():
    code = """
        __global__ void branches(int* y) {
            if (threadIdx.x < 16) {
                y[threadIdx.x] = 1;
                __syncthreads();  // here
                y[threadIdx.x] = 2;
            } else {
                y[threadIdx.x] = 3;
                __syncthreads();  // too
                y[threadIdx.x] = 4;
            }
        }
    """
    says = ["threads of one block wait at different barriers", "block (0,0,0)", "__syncthreads();  // too"]
    says += ["16 threads, first thread (0,0,0) of block (0,0,0), wait at", "16 threads, first thread (16,0,0)"]
    fails(BarrierFault, code, "branches", 2, 32, ints(32), says=says)


def test_threads_that_exited_before_the_barrier():
    code = """
        __global__ void early(int* y, int n) {
            int i = threadIdx.x + blockIdx.x * blockDim.x;
            if (i >= n) return;
            y[i] = 1;
            __syncthreads();  // here
            y[i] = 2;
        }
    """
    run(code, "early", 2, 32, ints(64), 64)
    says = [
        "4 threads of the block have exited before its barrier",
        "block (1,0,0)",
        "28 threads, first thread (0,0,0)",
        "exited_lanes=True",
    ]
    fails(BarrierFault, code, "early", 2, 32, ints(64), 60, says=says)
    y = ints(64)
    run(code, "early", 2, 32, y, 60, exited_lanes=True)
    assert y.tolist() == [2] * 60 + [0] * 4


def test_who_stays_is_waited_for_where_exited_threads_are_let_pass():
    """What the last of those that stay stores before the barrier, the others read behind it."""
    code = """
        __global__ void early(int* y, int n) {
            __shared__ int s[64];
            if (threadIdx.x >= n) return;
            s[threadIdx.x] = threadIdx.x;
            __syncthreads();
            y[threadIdx.x] = s[n - 1 - threadIdx.x];
        }
    """
    y = ints(64)
    run(code, "early", 1, 64, y, 40, exited_lanes=True)
    assert y.tolist() == [*range(39, -1, -1), *[0] * 24]
    stuck = code.replace("__syncthreads();", 'asm volatile("bar.sync 1, 64;" ::: "memory");')
    fails(Deadlock, stuck, "early", 1, 64, ints(64), 32, exited_lanes=True, says=["32 of 64 threads have arrived"])


# --- named barriers: how many they wait for ---


def test_threads_of_one_instruction_with_two_counts():
    code = """
        __global__ void counts(int* y) {
            asm volatile("bar.sync 1, %0;" :: "r"(COUNT) : "memory");  // here
            y[threadIdx.x] = 1;
        }
    """
    run(code.replace("COUNT", "blockDim.x"), "counts", 2, 64, ints(64))
    says = ["is to wait for 96 threads, but others have come to it that expect 64"]
    fails(BarrierFault, code.replace("COUNT", "threadIdx.x < 32 ? 96 : 64"), "counts", 2, 64, ints(64), says=says)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ("16, 64", "barrier 16 of a block that has 16, 0 to 15"),
        ("1, 40", "to wait for 40 threads; expected a multiple of 32"),
    ],
)
def test_barriers_that_no_block_has(wrong, says):
    code = """
        __global__ void named(int* y) {
            asm volatile("{ .reg .u32 a, b; mov.u32 a, %0; mov.u32 b, %1;"
                " bar.sync a, b; }" :: "r"(A), "r"(B) : "memory");
            y[threadIdx.x] = 1;
        }
    """
    number, count = wrong.split(", ")
    run(code.replace("(A)", "(15)").replace("(B)", "(64)"), "named", 1, 64, ints(64))
    fails(
        BarrierFault,
        code.replace("(A)", f"({number})").replace("(B)", f"({count})"),
        "named",
        1,
        64,
        ints(64),
        says=[says],
    )


# --- a cluster's barrier that says only who is there ---


def test_a_relaxed_arrival_says_who_is_there():
    run(
        CLUSTER.replace("FIRST", "barrier.cluster.arrive.relaxed.aligned;" + WAIT),
        "pairs",
        4,
        32,
        ints(128),
        arch="sm_90",
    )


def test_a_whole_block_may_leave_early():
    code = """
        __global__ void early(int* y, int n) {
            if (blockIdx.x >= n) return;
            __syncthreads();
            y[blockIdx.x * blockDim.x + threadIdx.x] = 1;
        }
    """
    y = np.zeros((4, 32), np.int32)
    run(code, "early", 4, 32, y, 3)
    assert y.sum(1).tolist() == [32, 32, 32, 0]


def test_a_barrier_in_a_loop_with_different_counts():
    """The threads that have left the loop wait at another barrier, or have exited."""
    code = """
        __global__ void loop(int* y) {
            #pragma unroll 1
            for (int i = 0; i <= threadIdx.x; i++) {
                y[threadIdx.x] += i;
                __syncthreads();  // here
            }
        }
    """
    says = ["1 threads of the block have exited before its barrier", "31 threads, first thread (1,0,0)"]
    fails(BarrierFault, code, "loop", 1, 32, ints(32), says=says)


def test_deadlock_of_barriers_that_wait_for_too_many():
    code = """
        __global__ void stuck(int* y) {
            y[threadIdx.x] = 1;
            asm volatile("bar.sync 3, 96;" ::: "memory");  // here
            y[threadIdx.x] = 2;
        }
    """
    run(code, "stuck", 1, 96, ints(96))
    says = [
        "deadlock: every thread that is left waits at a barrier",
        "64 of 96 threads have arrived",
        "first thread (0,0,0)",
    ]
    fails(Deadlock, code, "stuck", 1, 64, ints(64), says=says)


def test_deadlock_of_two_barriers():
    code = """
        __global__ void crossed(int* y) {
            y[threadIdx.x] = 1;
            if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");  // here
            else asm volatile("bar.sync 2, 64;" ::: "memory");  // there
            y[threadIdx.x] = 2;
        }
    """
    says = ["deadlock", "// there", "32 of 64 threads have arrived"]
    fails(Deadlock, code, "crossed", 1, 64, ints(64), says=says)


# --- producers and consumers ---

PRODUCER = """
    __global__ void produce(const int* x, int* y, int rounds) {
        __shared__ int s[2][32];
        int lane = threadIdx.x % 32, sum = 0;
        if (threadIdx.x < 32) {
            for (int i = 0; i < rounds; i++) {
                if (i >= 2) asm volatile("bar.sync %0, 64;" :: "r"(3 + i % 2) : "memory");  // empty
                s[i % 2][lane] = x[32 * i + lane];  // here
                asm volatile("bar.arrive %0, 64;" :: "r"(1 + i % 2) : "memory");  // full
            }
        } else {
            for (int i = 0; i < rounds; i++) {
                asm volatile("bar.sync %0, 64;" :: "r"(1 + i % 2) : "memory");
                sum += s[i % 2][31 - lane];  // other
                if (i + 2 < rounds) asm volatile("bar.arrive %0, 64;" :: "r"(3 + i % 2) : "memory");
            }
            y[32 * blockIdx.x + lane] = sum;
        }
    }
"""


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_producer_warp_and_a_consumer_warp(seed):
    x, y = np.arange(32 * 9, dtype=np.int32), np.zeros((3, 32), np.int32)
    run(PRODUCER, "produce", 3, 64, x, y, 9, seed=seed)
    assert y.tolist() == [x.reshape(9, 32)[:, ::-1].sum(0).tolist()] * 3


def test_a_producer_whose_consumer_never_answers():
    code = PRODUCER.replace("if (i + 2 < rounds) asm", "if (i > 100) asm").replace("  // here", "")
    code = code.replace("// empty", "// here").replace("  // other", "")
    says = ["deadlock", "32 of 64 threads have arrived"]
    fails(Deadlock, code, "produce", 1, 64, ints(288), ints(32), 9, says=says)


def test_arriving_is_no_waiting():
    """Who only arrives may not read what the others write before the barrier is complete."""
    code = """
        __global__ void hurry(int* y) {
            __shared__ volatile int s[32];
            if (threadIdx.x >= 32) {
                s[threadIdx.x - 32] = 1;
                asm volatile("bar.sync 1, 64;" ::: "memory");
                s[threadIdx.x - 32] = 2;
            } else {
                asm volatile("bar.arrive 1, 64;" ::: "memory");
                y[threadIdx.x] = s[threadIdx.x];
            }
        }
    """
    with pytest.raises((Race, Uninitialized), match="shared memory"):
        run(code, "hurry", 1, 64, ints(32))


# --- endless loops ---


def test_an_endless_loop():
    code = """
        __global__ void forever(volatile int* y) {
            while (y[0] == 0) {  // here
                y[1] = y[2];
            }
        }
    """
    message = fails(StepLimit, code.replace("// here", ""), "forever", 1, 1, ints(4), max_steps=500)
    assert "no end after 500 steps" in message
    assert "<text>.cu:2" in message or "<text>.cu:3" in message
    run(code, "forever", 1, 1, np.ones(4, np.int32), max_steps=500)


def test_the_limit_counts_steps():
    code = """
        __global__ void loop(volatile int* y, int n) {
            #pragma unroll 1
            for (int i = 0; i < n; i++) y[0] += i;
        }
    """
    y = ints(1)
    report = run(code, "loop", 1, 1, y, 100)
    assert y[0] == 4950
    assert run(code, "loop", 1, 1, y, 100, max_steps=report.steps).steps == report.steps
    fails(StepLimit, code, "loop", 1, 1, y, 100, max_steps=report.steps - 2)


def test_a_lane_that_takes_long_is_waited_for():
    """The others wait at the warp's instruction and at the barrier, however long it takes."""
    code = """
        __global__ void slow(int* y) {
            int n = threadIdx.x == 7 ? 9000 : 1, x = threadIdx.x;
            for (int i = 0; i < n; i++) asm volatile("add.s32 %0, %0, 1;" : "+r"(x));
            __syncwarp();
            int sum = __reduce_add_sync(0xffffffff, x);
            __syncthreads();
            y[threadIdx.x] = sum;
        }
    """
    y = ints(64)
    run(code, "slow", 1, 64, y)
    assert y.tolist() == [sum(range(32)) + 31 + 9000] * 32 + [sum(range(32, 64)) + 32] * 32


# --- of a cluster ---

ARRIVE, WAIT = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"
CLUSTER = """
    __global__ void __cluster_dims__(2, 1, 1) pairs(int* y) {
        __shared__ volatile int s[32];
        unsigned rank, own = __cvta_generic_to_shared((const void*)(s + threadIdx.x)), far;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm volatile("FIRST" ::: "memory");
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(own), "r"(rank ^ 1));
        asm volatile("st.shared::cluster.s32 [%0], %1;" :: "r"(far), "r"(rank) : "memory");  // far
        asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
        y[32 * blockIdx.x + threadIdx.x] = s[threadIdx.x];
    }
"""


def test_the_barrier_of_a_cluster():
    y = ints(128)
    run(CLUSTER.replace("FIRST", ARRIVE + WAIT), "pairs", 4, 32, y, arch="sm_90")
    assert y[::32].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "first, kind, says",
    [
        ("", Race, "write of another block's shared memory before the cluster has met"),
        (ARRIVE, Race, "that block may not have begun"),
        (ARRIVE + WAIT + ARRIVE, BarrierFault, "arrives at the cluster's barrier again"),
        (WAIT, BarrierFault, "waits at the cluster's barrier without having arrived"),
    ],
)
def test_what_is_wrong_at_the_barrier_of_a_cluster(first, kind, says):
    with pytest.raises(kind, match=says):
        run(CLUSTER.replace("FIRST", first), "pairs", 4, 32, ints(128), arch="sm_90")


TWO_PLACES = """
    __global__ void __cluster_dims__(2, 1, 1) halves(int* y) {
        __shared__ volatile int s;
        unsigned rank, own = __cvta_generic_to_shared((const void*)&s), far;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(own), "r"(rank ^ 1));
        if (threadIdx.x < SPLIT) {
            asm volatile("barrier.cluster.arriveHOW; barrier.cluster.waitHOW;" ::: "memory");
            if (threadIdx.x == 0) asm volatile("st.shared::cluster.s32 [%0], %1;" :: "r"(far), "r"(rank) : "memory");
            asm volatile("barrier.cluster.arriveHOW; barrier.cluster.waitHOW;" ::: "memory");
        } else {
            asm volatile("barrier.cluster.arriveHOW; barrier.cluster.waitHOW;" ::: "memory");
            asm volatile("barrier.cluster.arriveHOW;" ::: "memory");
            y[256 + threadIdx.x] = rank;
            asm volatile("barrier.cluster.waitHOW;" ::: "memory");
        }
        y[64 * blockIdx.x + threadIdx.x] = s;
    }
"""


@pytest.mark.parametrize("how, split", [(".aligned", 32), ("", 32), ("", 7), (".release", 7)])
def test_the_barrier_of_a_cluster_at_two_places_of_the_text(how, split):
    """Of `.aligned` a warp is at one place; a block need not be, as it must be at bar.sync."""
    waits = TWO_PLACES.replace("SPLIT", str(split)).replace("waitHOW", f"wait{how.replace('release', 'acquire')}")
    y = ints(320)
    code = waits.replace("arriveHOW", f"arrive{how}").replace("y[256 + threadIdx.x] = rank;", "")
    run(code, "halves", 4, 64, y, arch="sm_90")
    assert y[:256].reshape(4, 64).T.tolist() == [[1, 0, 1, 0]] * 64


def test_a_warp_at_two_places_of_an_aligned_barrier_of_a_cluster():
    code = TWO_PLACES.replace("SPLIT", "7").replace("HOW", ".aligned").replace("y[256 + threadIdx.x] = rank;", "")
    with pytest.raises(BarrierFault, match="threads of one warp wait at different barriers of the cluster"):
        run(code, "halves", 4, 64, ints(320), arch="sm_90")


def test_the_barrier_of_a_cluster_does_not_wait_for_who_has_left():
    """Unlike the barrier of a block, for which that is an error."""
    code = """
    __global__ void __cluster_dims__(2, 1, 1) leave(int* y) {
        if (threadIdx.x >= 32) return;
        asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
        y[32 * blockIdx.x + threadIdx.x] = 1;
    }
    """
    y = ints(128)
    run(code, "leave", 4, 64, y, arch="sm_90")
    assert (y == 1).all()
