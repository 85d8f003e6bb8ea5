"""Exchange between the lanes of a warp, against its definition written out lane by lane; and lanes that are missing."""

import numpy as np
import pytest
from simulator.kit import fails, place, ptx, run

from cupyops.simulator import Race, StepLimit, Uninitialized, WarpFault
from cupyops.simulator.machine import machine, scheduler

RNG = np.random.default_rng(3)


def source_lane(mode, lane, by, width):
    """The lane that a shuffle reads from: its own where the other is outside its segment of `width` lanes."""
    start = lane // width * width
    other = {"up": lane - by, "down": lane + by, "xor": lane ^ by, "idx": start + by % width}[mode]
    if mode == "xor":
        return other if other < start + width else lane  # an earlier segment may be read
    return other if start <= other < start + width else lane


@pytest.mark.parametrize("width", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("mode", ["up", "down", "xor", "idx"])
def test_shuffles_of_all_modes_and_widths(mode, width):
    name = "__shfl_sync" if mode == "idx" else f"__shfl_{mode}_sync"
    code = f"""
        __global__ void shuffle(const int* x, int* y) {{
            for (int by = 0; by < 32; by++) y[by * 64 + threadIdx.x] = {name}(0xffffffff, x[threadIdx.x], by, {width});
        }}
    """
    x, y = RNG.integers(0, 1000, 64).astype(np.int32), np.zeros((32, 2, 32), np.int32)
    run(code, "shuffle", 1, 64, x, y)
    warps = x.reshape(2, 32)
    for by in range(32):
        expected = [[warp[source_lane(mode, lane, by, width)] for lane in range(32)] for warp in warps]
        assert y[by].tolist() == expected, by


def test_a_shuffle_says_whether_the_lane_was_there():
    code = """
        __global__ void shuffle(int* y) {
            int v = threadIdx.x, inside;
            asm volatile("{.reg .pred p; shfl.sync.down.b32 %0|p, %0, 3, 0x1f, 0xffffffff; selp.s32 %1, 1, 0, p;}"
                         : "+r"(v), "=r"(inside));
            y[threadIdx.x] = inside ? v : -v;
        }
    """
    y = np.zeros(32, np.int32)
    run(code, "shuffle", 1, 32, y)
    assert y.tolist() == [lane + 3 if lane < 29 else -lane for lane in range(32)]


@pytest.mark.parametrize("dtype", ["float", "double", "long long", "unsigned"])
def test_shuffles_of_other_types(dtype):
    kind = {"float": np.float32, "double": np.float64, "long long": np.int64, "unsigned": np.uint32}[dtype]
    code = "template <typename T> __global__ void reverse(const T* x, T* y) {"
    code += "y[threadIdx.x] = __shfl_sync(0xffffffff, x[threadIdx.x], 31 - int(threadIdx.x % 32)); }"
    x = RNG.integers(0, 2**63, 64, np.uint64).view(np.float64 if kind is np.float64 else np.uint64)
    x = np.frombuffer(x.tobytes(), kind)[:64].copy()
    x[~np.isfinite(x)] = 1
    y = np.zeros_like(x)
    run(code, f"reverse<{dtype}>", 1, 64, x, y)
    assert y.tolist() == x.reshape(2, 32)[:, ::-1].reshape(-1).tolist()


def test_an_incomplete_warp_with_the_mask_of_its_lanes():
    code = """
        __global__ void sum(int* y) {
            unsigned mask = __activemask();
            int v = threadIdx.x;
            for (int offset = 16; offset > 0; offset /= 2) {
                int other = __shfl_down_sync(mask, v, offset);
                if (threadIdx.x + offset < 40 && threadIdx.x % 32 + offset < 32) v += other;
            }
            y[threadIdx.x] = v + 10000 * __popc(mask);
        }
    """
    y = np.zeros(40, np.int32)
    run(code, "sum", 1, 40, y)
    assert (y[0], y[32]) == (496 + 320000, sum(range(32, 40)) + 80000)


def test_votes():
    code = """
        __global__ void vote(const int* x, unsigned* y) {
            int i = threadIdx.x;
            y[4 * i] = __ballot_sync(0xffffffff, x[i] > 0);
            y[4 * i + 1] = __any_sync(0xffffffff, x[i] > 5);
            y[4 * i + 2] = __all_sync(0xffffffff, x[i] >= 0);
            y[4 * i + 3] = __uni_sync(0xffffffff, x[i] > 5);
        }
    """
    x = np.zeros((4, 32), np.int32)
    x[1, [3, 31]] = 1, -1
    x[2, [0, 30]] = 6
    x[3] = 7
    y = np.zeros((4, 32, 4), np.uint32)
    run(code, "vote", 1, 128, x, y)
    expected = [[0, 0, 1, 1], [1 << 3, 0, 0, 1], [1 | 1 << 30, 1, 1, 0], [0xFFFFFFFF, 1, 1, 1]]
    assert [[row.tolist() for row in warp] for warp in y != 0] == [
        [[value != 0 for value in values]] * 32 for values in expected
    ]
    assert (y[:, :, 0] == np.array([values[0] for values in expected], np.uint32)[:, None]).all()


def test_votes_of_half_a_warp():
    code = """
        __global__ void vote(unsigned* y) {
            int lane = threadIdx.x;
            if (lane < 16) y[lane] = __ballot_sync(0xffff, lane % 2) | (__all_sync(0xffff, lane < 16) ? 1u << 31 : 0);
            else y[lane] = __ballot_sync(0xffff0000, lane % 3 == 0) | (__any_sync(0xffff0000, lane < 16) ? 1u : 0);
        }
    """
    y = np.zeros(32, np.uint32)
    run(code, "vote", 1, 32, y)
    high = sum(1 << lane for lane in range(16, 32) if lane % 3 == 0)
    assert y.tolist() == [0xAAAA | 1 << 31] * 16 + [high] * 16


def test_matches():
    code = """
        __global__ void match(const int* x, const long long* z, unsigned* y) {
            int i = threadIdx.x, same;
            y[4 * i] = __match_any_sync(0xffffffff, x[i]);
            y[4 * i + 1] = __match_all_sync(0xffffffff, x[i], &same);
            y[4 * i + 2] = same;
            y[4 * i + 3] = __match_any_sync(0xffffffff, z[i]);
        }
    """
    x = RNG.integers(0, 4, (2, 32)).astype(np.int32)
    x[1] = 9
    z = np.int64(1) << RNG.integers(30, 34, (2, 32))
    y = np.zeros((2, 32, 4), np.uint32)
    run(code, "match", 1, 64, x, z, y)
    for warp in range(2):
        for lane in range(32):
            expected = sum(1 << other for other in range(32) if x[warp, other] == x[warp, lane])
            wide = sum(1 << other for other in range(32) if z[warp, other] == z[warp, lane])
            alike = 0xFFFFFFFF if warp == 1 else 0
            assert y[warp, lane].tolist() == [expected, alike, warp, wide]


def test_reductions():
    """redux.sync, also of the two halves of a warp apart."""
    code = """
        __global__ void reduce(const int* x, int* y) {
            int i = threadIdx.x;
            y[7 * i] = __reduce_add_sync(0xffffffff, x[i]);
            y[7 * i + 1] = __reduce_min_sync(0xffffffff, x[i]);
            y[7 * i + 2] = __reduce_max_sync(0xffffffff, x[i]);
            y[7 * i + 3] = __reduce_max_sync(0xffffffff, unsigned(x[i]));
            y[7 * i + 4] = __reduce_and_sync(0xffffffff, unsigned(x[i]));
            y[7 * i + 5] = __reduce_or_sync(0xffffffff, unsigned(x[i]));
            unsigned half = i % 32 < 16 ? 0xffff : 0xffff0000;
            y[7 * i + 6] = __reduce_xor_sync(half, unsigned(x[i]));
        }
    """
    x = RNG.integers(-(2**31), 2**31, (2, 32)).astype(np.int32)
    y = np.zeros((2, 32, 7), np.int32)
    run(code, "reduce", 1, 64, x, y)
    unsigned = x.view(np.uint32)
    for warp in range(2):
        sums = x[warp].sum(dtype=np.int32), x[warp].min(), x[warp].max(), unsigned[warp].max().view(np.int32)
        bits = np.bitwise_and.reduce(x[warp]), np.bitwise_or.reduce(x[warp])
        halves = [np.bitwise_xor.reduce(x[warp, :16]), np.bitwise_xor.reduce(x[warp, 16:])]
        for lane in range(32):
            assert y[warp, lane].tolist() == [*sums, *bits, halves[lane // 16]]


def test_elect_and_lane_masks():
    code = """
        __global__ void leader(unsigned* y) {
            unsigned lane = threadIdx.x % 32, chosen, first, eq, lt, le, gt, ge;
            unsigned mask = lane < 9 ? 0x000001ff : 0xfffffe00;
            asm volatile("{.reg .pred p; elect.sync %0|p, %2; selp.u32 %1, 1, 0, p;}"
                         : "=r"(first), "=r"(chosen) : "r"(mask));
            asm("mov.u32 %0, %%lanemask_eq;" : "=r"(eq));
            asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lt));
            asm("mov.u32 %0, %%lanemask_le;" : "=r"(le));
            asm("mov.u32 %0, %%lanemask_gt;" : "=r"(gt));
            asm("mov.u32 %0, %%lanemask_ge;" : "=r"(ge));
            unsigned* out = y + 7 * threadIdx.x;
            out[0] = first; out[1] = chosen; out[2] = eq; out[3] = lt; out[4] = le; out[5] = gt; out[6] = ge;
        }
    """
    y = np.zeros((64, 7), np.uint32)
    run(code, "leader", 1, 64, y, arch="sm_90")
    for thread in range(64):
        lane = thread % 32
        first = 0 if lane < 9 else 9
        above = sum(1 << other for other in range(lane + 1, 32))
        masks = [1 << lane, (1 << lane) - 1, (2 << lane) - 1, above, above | 1 << lane]
        assert y[thread].tolist() == [first, lane == first, *masks]


# --- lanes that do not come ---


def test_lanes_that_have_exited():
    code = """
        __global__ void early(int* y, int n) {
            if (threadIdx.x >= n) return;
            y[threadIdx.x] = __shfl_xor_sync(0xffffffff, threadIdx.x, 1);  // here
        }
    """
    run(code, "early", 1, 64, np.zeros(64, np.int32), 32)  # a whole warp may leave
    says = ["names lanes that have exited or do not exist", "thread (32,0,0) of block (0,0,0), and 27 more threads"]
    says += ["mask 0xffffffff; lanes 28, 29, 30, 31 have exited"]
    fails(WarpFault, code, "early", 1, 64, np.zeros(64, np.int32), 60, says=says)


def test_lanes_that_do_not_exist():
    code = """
        __global__ void part(int* y) {
            y[threadIdx.x] = __any_sync(0xffffffff, threadIdx.x > 3);  // here
        }
    """
    says = ["lanes 24, 25, 26, 27, 28, 29 and 2 more have exited or do not exist"]
    fails(WarpFault, code, "part", 1, 24, np.zeros(24, np.int32), says=says)


def test_a_lane_that_does_not_name_itself():
    code = """
        __global__ void wrong(int* y) {
            y[threadIdx.x] = __shfl_sync(threadIdx.x < 16 ? 0xffffu : 0xffffu, threadIdx.x, 0);  // here
        }
    """
    says = [
        "executed by a lane that its mask does not name",
        "thread (16,0,0) of block (0,0,0), and 15 more",
        "0x0000ffff",
    ]
    fails(WarpFault, code, "wrong", 1, 32, np.zeros(32, np.int32), says=says)


def test_lanes_that_wait_at_a_barrier():
    code = """
        __global__ void apart(int* y) {
            if (threadIdx.x % 32 == 5) __syncthreads();
            else __syncwarp();  // here
            y[threadIdx.x] = 1;
        }
    """
    says = ["names lanes that are elsewhere", "mask 0xffffffff; lanes 5 are elsewhere"]
    fails(WarpFault, code, "apart", 1, 32, np.zeros(32, np.int32), says=says)


def test_a_matrix_instruction_of_half_a_warp():
    code = """
        __global__ void half(unsigned* y) {
            __shared__ __align__(16) unsigned s[64];
            unsigned a = __cvta_generic_to_shared(s + 4 * (threadIdx.x % 8)), r = 0;
            s[threadIdx.x] = 1, s[threadIdx.x + 32] = 2;
            __syncthreads();
            if (threadIdx.x < 16)
                asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(a));  // here
            else __syncthreads();
            y[threadIdx.x] = r;
        }
    """
    says = ["an instruction of all 32 lanes is executed by some of them only", "thread (0,0,0)"]
    fails(WarpFault, code, "half", 1, 32, np.zeros(32, np.uint32), says=says)


# --- lanes at different copies of one instruction ---

ORDERS = [None, 0, 1, 2]


def copies(code, name, instruction, arch="sm_80"):
    """How often the PTX has it."""
    return ptx(code, name, arch).count(instruction)


BOTH = """
    __global__ void both(int* y) {
        __shared__ int s[96];
        int i = threadIdx.x;
        if (i % 3 == 0) {
            s[i] = 2 * i;
            __syncwarp();  // one
            y[i] = s[i ^ 1];
        } else {
            s[i] = 7 * i;
            __syncwarp();  // two
            y[i] = -s[i ^ 1];
        }
    }
"""


@pytest.mark.parametrize("seed", ORDERS)
def test_syncwarp_in_both_branches(seed):
    """It orders what the lanes do in shared memory; without it, that is a race."""
    assert copies(BOTH, "both", "bar.warp.sync") == 2
    y = np.zeros(96, np.int32)
    run(BOTH, "both", 1, 96, y, seed=seed)
    assert y.tolist() == [(1 if i % 3 == 0 else -1) * (i ^ 1) * (7 if (i ^ 1) % 3 else 2) for i in range(96)]
    without = BOTH.replace("__syncwarp();  // one", "").replace("__syncwarp();  // two", "")
    with pytest.raises((Race, Uninitialized)):
        run(without, "both", 1, 96, y, seed=seed)


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize("threads_per_batch", [1, 16384])
def test_shuffles_in_both_branches(seed, threads_per_batch, monkeypatch):
    """Each lane gives its own value, reads by its own distance, and the result goes where its branch wants it. Some warps
    are of one mind."""
    monkeypatch.setattr(machine, "_THREADS_PER_BATCH", threads_per_batch)
    code = """
        __global__ void both(const int* x, int* y) {
            int i = blockIdx.x * blockDim.x + threadIdx.x, a = x[i], b = 10 * x[i];
            if (a % 2) a -= __shfl_xor_sync(0xffffffff, b, 3);
            else b = 2 * __shfl_xor_sync(0xffffffff, a + 1, 5);
            y[2 * i] = a, y[2 * i + 1] = b;
        }
    """
    assert copies(code, "both", "shfl.sync") == 2
    x = RNG.integers(0, 1000, (6, 32)).astype(np.int32)
    x[1] |= 1
    x[4] &= ~1
    y = np.zeros((6, 32, 2), np.int32)
    run(code, "both", 3, 64, x, y, seed=seed)
    given = np.where(x % 2, 10 * x, x + 1)
    for warp in range(6):
        for lane in range(32):
            own = int(x[warp, lane])
            odd, even = (own - given[warp, lane ^ 3], 10 * own), (own, 2 * given[warp, lane ^ 5])
            assert y[warp, lane].tolist() == list(odd if own % 2 else even)


@pytest.mark.parametrize("seed", ORDERS)
def test_votes_in_a_switch(seed):
    code = """
        __global__ void cases(const int* x, unsigned* y) {
            int i = threadIdx.x;
            unsigned votes;
            switch (x[i]) {
                case 0: votes = __ballot_sync(0xffffffff, i % 2); break;
                case 1: votes = __ballot_sync(0xffffffff, i % 3 == 0) + 1; break;
                case 2: votes = __ballot_sync(0xffffffff, i > 40) * 3; break;
                default: votes = ~__ballot_sync(0xffffffff, true);
            }
            y[i] = votes;
        }
    """
    assert copies(code, "cases", "vote.sync") == 4
    x, y = RNG.integers(0, 4, 64).astype(np.int32), np.zeros(64, np.uint32)
    run(code, "cases", 1, 64, x, y, seed=seed)
    for warp in range(2):
        lanes = range(32 * warp, 32 * warp + 32)
        true = {i: [i % 2 == 1, i % 3 == 0, i > 40, True][x[i]] for i in lanes}
        ballot = sum(1 << i % 32 for i in lanes if true[i])
        expected = {0: ballot, 1: ballot + 1, 2: ballot * 3, 3: ~ballot}
        assert [int(y[i]) for i in lanes] == [expected[x[i]] & 0xFFFFFFFF for i in lanes]


@pytest.mark.parametrize("seed", ORDERS)
def test_matches_reductions_and_elections_in_both_branches(seed):
    code = """
        __device__ unsigned leader(unsigned mask) {
            unsigned first;
            asm volatile("{.reg .pred p; elect.sync %0|p, %1;}" : "=r"(first) : "r"(mask));
            return first;
        }
        __global__ void both(const int* x, unsigned* y) {
            int i = threadIdx.x;
            unsigned half = i % 32 < 16 ? 0x0000ffff : 0xffff0000, same, sum, largest, first;
            if (x[i] % 2) {
                same = __match_any_sync(0xffffffff, x[i] / 2);
                sum = __reduce_add_sync(half, (unsigned)x[i]);
                largest = __reduce_max_sync(0xffffffff, x[i]);
                first = leader(half);
            } else {
                same = 1 + __match_any_sync(0xffffffff, x[i] / 2);
                sum = 10 + __reduce_add_sync(half, 100u);
                largest = 1 + __reduce_max_sync(0xffffffff, i);
                first = 1 + leader(half);
            }
            y[4 * i] = same, y[4 * i + 1] = sum, y[4 * i + 2] = largest, y[4 * i + 3] = first;
        }
    """
    for instruction in ("match.any.sync", "redux.sync.add", "redux.sync.max", "elect.sync"):
        assert copies(code, "both", instruction, "sm_90") == 2
    x, y = RNG.integers(0, 12, (2, 32)).astype(np.int32), np.zeros((2, 32, 4), np.uint32)
    run(code, "both", 1, 64, x, y, seed=seed, arch="sm_90")
    for warp in range(2):
        value = x[warp]
        odd = value % 2 == 1
        for lane in range(32):
            half = slice(lane // 16 * 16, lane // 16 * 16 + 16)
            expected = [
                sum(1 << other for other in range(32) if value[other] // 2 == value[lane] // 2),
                int(np.where(odd, value, 100)[half].sum()) + (0 if odd[lane] else 10),
                int(np.where(odd, value, np.arange(32) + 32 * warp).max()),
                lane // 16 * 16,
            ]
            more = [0, 0, 0, 0] if odd[lane] else [1, 0, 1, 1]
            assert y[warp, lane].tolist() == [one + by for one, by in zip(expected, more)]


@pytest.mark.parametrize("seed", ORDERS)
def test_several_exchanges_in_a_row_against_some_that_are_apart(seed):
    """A double is two shuffles, one after the other; in the other branch something lies between them."""
    code = """
        __global__ void both(const double* x, double* y) {
            int i = threadIdx.x;
            double v = x[i];
            if (i % 5 < 2) v = 2 * __shfl_down_sync(0xffffffff, v, 4);
            else {
                int low = __double2loint(v), high = __double2hiint(v);
                asm volatile("shfl.sync.down.b32 %0, %0, 4, 0x1f, 0xffffffff;" : "+r"(high));
                asm volatile("xor.b32 %0, %0, 0;" : "+r"(low));
                if (i % 5 < 4) asm volatile("shfl.sync.down.b32 %0, %0, 4, 0x1f, 0xffffffff;" : "+r"(low));
                else {
                    asm volatile("xor.b32 %0, %0, 0;" : "+r"(low));
                    low = __shfl_down_sync(0xffffffff, low, 4);
                }
                v = -__hiloint2double(high, low);
            }
            y[i] = v;
        }
    """
    assert copies(code, "both", "shfl.sync") == 5
    x, y = RNG.standard_normal((3, 32)), np.zeros((3, 32))
    run(code, "both", 1, 96, x, y, seed=seed)
    lane = np.arange(32)
    moved = x[:, np.where(lane < 28, lane + 4, lane)]
    assert y.tolist() == np.where(np.arange(96).reshape(3, 32) % 5 < 2, 2 * moved, -moved).tolist()


@pytest.mark.parametrize("seed", ORDERS)
def test_a_row_of_exchanges_that_one_warp_ends_before_another(seed):
    """Odd lanes shuffle and vote in a row. Even lanes do so apart, those of warp 1 after warp 0 is through."""
    code = """
        __global__ void both(int* y) {
            __shared__ int flag;
            int i = threadIdx.x, v = 3 * i, votes;
            if (i == 0) flag = 0;
            __syncthreads();
            if (i % 2)
                asm volatile("{.reg .pred p; setp.gt.s32 p, %2, 20;"
                             "shfl.sync.bfly.b32 %0, %0, 1, 0x1f, 0xffffffff; vote.sync.ballot.b32 %1, p, 0xffffffff;}"
                             : "+r"(v), "=r"(votes) : "r"(i));
            else {
                v = 1 - __shfl_xor_sync(0xffffffff, v, 3);
                if (i >= 32) while (atomicAdd(&flag, 0) == 0) {}
                votes = -__ballot_sync(0xffffffff, i % 4);
                if (i == 0) atomicExch(&flag, 1);
            }
            y[2 * i] = v, y[2 * i + 1] = votes;
        }
    """
    y = np.zeros((64, 2), np.int32)
    run(code, "both", 1, 64, y, seed=seed)
    for i in range(64):
        warp = range(i // 32 * 32, i // 32 * 32 + 32)
        votes = sum(1 << lane % 32 for lane in warp if (lane > 20 if lane % 2 else lane % 4))
        expected = (3 * (i ^ 1), votes) if i % 2 else (1 - 3 * (i ^ 3), -votes)
        assert y[i].tolist() == np.array(expected).astype(np.int32).tolist()


def test_what_lanes_execute_as_one_is_counted_once():
    code = """
        __global__ void both(double* y) {
            double v = threadIdx.x;
            if (threadIdx.x % 4 == 0) v += __shfl_xor_sync(0xffffffff, v, 1);
            else v -= __shfl_xor_sync(0xffffffff, v, 1);
            y[threadIdx.x] = v;
        }
    """
    profile = run(code, "both", 1, 64, np.zeros(64), profile=True).profile
    counts = [
        (profile.instructions[pc].warps, profile.instructions[pc].threads)
        for pc, instruction in enumerate(profile.listing.instructions)
        if instruction.opcode == "shfl"
    ]
    assert sorted(counts) == [(2, 16), (2, 16), (2, 48), (2, 48)]


@pytest.mark.parametrize("seed", ORDERS)
def test_unrolled_loops_of_lengths_that_differ_between_lanes(seed):
    """Every lane takes part in twelve shuffles, x[i] of them in the first loop."""
    code = """
        __global__ void loops(const int* x, int* y) {
            int i = threadIdx.x, first = x[i], v = i;
            #pragma unroll 4
            for (int k = 0; k < first; k++) v += __shfl_xor_sync(0xffffffff, v, 1);
            v = v * 3 + 1;
            #pragma unroll 4
            for (int k = first; k < 12; k++) v = (v ^ __shfl_xor_sync(0xffffffff, v, 1 + k % 8)) + k;
            y[i] = v;
        }
    """
    assert copies(code, "loops", "shfl.sync") >= 8
    x, y = RNG.integers(0, 13, 96).astype(np.int32), np.zeros(96, np.int32)
    run(code, "loops", 1, 96, x, y, seed=seed)
    values = list(range(96))
    for k in range(12):
        for lane in range(96):
            values[lane] = values[lane] * 3 + 1 if x[lane] == k else values[lane]
        before = list(values)
        for lane in range(96):
            in_first = k < x[lane]
            other = before[lane ^ (1 if in_first else 1 + k % 8)]
            values[lane] = before[lane] + other if in_first else (before[lane] ^ other) + k
    values = [value * 3 + 1 if count == 12 else value for value, count in zip(values, x)]
    assert y.tolist() == np.array(values).astype(np.int32).tolist()


@pytest.mark.parametrize("seed", ORDERS)
def test_masks_of_their_own_at_several_copies(seed):
    """Four lanes at a time, in three branches; each quarter meets by itself, and lane 0 of the warp waits for none."""
    code = """
        __global__ void quarters(const int* x, int* y) {
            int i = threadIdx.x, v = x[i];
            unsigned four = 0xfu << (i % 32 / 4 * 4);
            if (v % 3 == 0) v += 10 * __shfl_xor_sync(four, v, 1);
            else if (v % 3 == 1) {
                for (int k = 0; k < i; k++) asm volatile("add.s32 %0, %0, 3;" : "+r"(v));
                v += 100 * __shfl_xor_sync(four, v, 2);
            } else v += 1000 * __shfl_xor_sync(four, v, 3);
            y[i] = v;
        }
    """
    assert copies(code, "quarters", "shfl.sync") == 3
    x, y = RNG.integers(0, 100, 64).astype(np.int32), np.zeros(64, np.int32)
    run(code, "quarters", 1, 64, x, y, seed=seed)
    given = [int(v) + 3 * i * (v % 3 == 1) for i, v in enumerate(x)]
    factor, by = [10, 100, 1000], [1, 2, 3]
    assert y.tolist() == [given[i] + factor[v % 3] * given[i ^ by[v % 3]] for i, v in enumerate(x)]


def test_a_mask_that_the_exchange_before_gives():
    code = """
        __global__ void masks(int* y) {
            unsigned mask = threadIdx.x < 16 ? 0x0000ffff : 0xffff0000, v = threadIdx.x;
            for (int k = 0; k < (v < 16 ? 1 : 20); k++) asm volatile("add.s32 %0, %0, 0;" : "+r"(v));
            asm volatile("shfl.sync.bfly.b32 %0, 0xffffffff, 0, 0x1f, %0; shfl.sync.bfly.b32 %1, %1, 16, 0x1f, %0;"
                         : "+r"(mask), "+r"(v));
            y[threadIdx.x] = v;
        }
    """
    for seed in ORDERS:
        y = np.zeros(32, np.int32)
        run(code, "masks", 1, 32, y, seed=seed)
        assert y.tolist() == [lane ^ 16 for lane in range(32)]


def test_lanes_meet_while_another_polls(monkeypatch):
    """Thread 32 goes on only when the lanes of warp 0 have met; it changes memory with each look, or does not."""
    monkeypatch.setattr(scheduler, "_PATIENCE", 20)
    code = """
        __global__ void poll(int* y) {
            __shared__ int flag;
            int i = threadIdx.x;
            if (i == 0) flag = 0;
            __syncthreads();
            if (i == 32) while ((POLL & 1) == 0) {}
            else if (i < 32) {
                int sum;
                if (i % 2) sum = __reduce_add_sync(0xffffffff, i); else sum = -__reduce_add_sync(0xffffffff, -i);
                if (i == 0) atomicOr(&flag, 1);
                y[i] = sum;
            }
        }
    """
    sums = sum(i if i % 2 else -i for i in range(32))
    for poll in ("atomicAdd(&flag, 2)", "atomicAdd(&flag, 0)"):
        y = np.zeros(32, np.int32)
        run(code.replace("POLL", poll), "poll", 1, 64, y, max_steps=2000)
        assert y.tolist() == [sums if i % 2 else -sums for i in range(32)]


def test_activemask_waits_for_nobody():
    """Lanes at a shuffle wait for others that ask which lanes are with them."""
    code = """
        __global__ void ask(unsigned* y) {
            unsigned i = threadIdx.x, with = 0;
            if (i < 8) { y[i] = __shfl_sync(0xffffffff, i, 9); return; }
            with = __activemask();
            y[i] = __shfl_sync(0xffffffff, i, 9) + with;
        }
    """
    assert copies(code, "ask", "shfl.sync") == 2
    y = np.zeros(32, np.uint32)
    run(code, "ask", 1, 32, y)
    assert y.tolist() == [9] * 8 + [9 + 0xFFFFFF00] * 24


def names_both(message, code):
    """One party's place is told, and where the other waits."""
    here, _, there = message.partition(" wait at\n")
    one, two = place(code, "// one"), place(code, "// two")
    assert (one in here and two in there) or (two in here and one in there), message
    assert "PTX line" in here and "PTX line" in there


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize(
    "other",
    [
        "__shfl_down_sync(0xffffffff, v, 1)",  # another mode
        "(int)__ballot_sync(0xffffffff, v)",  # another operation
        "__shfl_xor_sync(0xfffffffe, v, 1)",  # another mask
    ],
)
def test_lanes_at_instructions_that_do_not_go_together(seed, other):
    code = """
        __global__ void apart(int* y) {
            int v = threadIdx.x;
            if (v % 4 != 1) v += __shfl_xor_sync(0xffffffff, v, 1);  // one
            else v -= OTHER;  // two
            y[threadIdx.x] = v;
        }
    """.replace("OTHER", other)
    says = ["a warp-wide instruction names lanes that are elsewhere"]
    message = fails(WarpFault, code, "apart", 1, 32, np.zeros(32, np.int32), seed=seed, says=says)
    names_both(message, code)


@pytest.mark.parametrize("seed", ORDERS)
def test_lanes_that_come_once_and_not_again(seed):
    """They meet at the first shuffle; the second is awaited in vain."""
    code = """
        __global__ void twice(double* y) {
            double v = threadIdx.x;
            if (threadIdx.x % 2) v = __shfl_xor_sync(0xffffffff, v, 1);  // one
            else {
                v = __shfl_xor_sync(0xffffffff, (int)v, 1);
                __syncthreads();  // two
            }
            y[threadIdx.x] = v;
        }
    """
    says = ["lanes 0, 2, 4, 6, 8, 10 and 10 more are elsewhere", "thread (1,0,0) of block (0,0,0), and 15 more threads"]
    message = fails(WarpFault, code, "twice", 1, 32, np.zeros(32), seed=seed, says=says)
    names_both(message, code)


@pytest.mark.parametrize("seed", ORDERS)
def test_lanes_that_come_once_and_exit(seed):
    code = """
        __global__ void twice(double* y) {
            double v = threadIdx.x;
            if (threadIdx.x % 2) v = __shfl_xor_sync(0xffffffff, v, 1);  // here
            else {
                __shfl_xor_sync(0xffffffff, (int)v, 1);
                return;
            }
            y[threadIdx.x] = v;
        }
    """
    says = ["lanes 0, 2, 4, 6, 8, 10 and 10 more have exited", "thread (1,0,0) of block (0,0,0), and 15 more threads"]
    fails(WarpFault, code, "twice", 1, 32, np.zeros(32), seed=seed, says=says)


@pytest.mark.parametrize("odd", [0, 1])
def test_lanes_of_one_copy_that_have_exited(odd):
    """The others meet and find them missing."""
    code = """
        __global__ void early(int* y) {
            int v = threadIdx.x;
            if (v == 7) return;
            if (v % 2 == ODD) v += __shfl_xor_sync(0xffffffff, v, 1);
            else v -= __shfl_xor_sync(0xffffffff, v, 1);
            y[threadIdx.x] = v;
        }
    """
    code = code.replace("ODD", str(odd))
    says = ["names lanes that have exited or do not exist", "mask 0xffffffff; lanes 7 have exited"]
    says += ["thread (0,0,0) of block (0,0,0), and 30 more threads"]
    for seed in ORDERS:
        fails(WarpFault, code, "early", 1, 32, np.zeros(32, np.int32), seed=seed, says=says)
    named = code.replace("0xffffffff", "0xffffff7f")
    says = ["stores a value that nothing has written", "thread (6,0,0)"]  # which reads lane 7
    fails(Uninitialized, named, "early", 1, 32, np.zeros(32, np.int32), says=says)
    run(named.replace("y[thr", "if (threadIdx.x != 6) y[thr"), "early", 1, 32, np.zeros(32, np.int32))


@pytest.mark.parametrize("seed", ORDERS)
def test_a_lane_that_waits_for_the_whole_block(seed):
    """Two copies have come, and wait for a lane that waits for them."""
    code = """
        __global__ void apart(int* y) {
            int v = threadIdx.x;
            if (v == 5) __syncthreads();  // two
            else if (v % 2) v += __shfl_xor_sync(0xffffffff, v, 1);  // one
            else v -= __shfl_xor_sync(0xffffffff, v, 1);  // three
            y[threadIdx.x] = v;
        }
    """
    message = fails(WarpFault, code, "apart", 1, 64, np.zeros(64, np.int32), seed=seed, says=["are elsewhere"])
    assert "lanes 5 wait at\n  " + place(code, "// two") in message, message
    assert place(code, "// one") in message and place(code, "// three") in message


def test_a_lane_that_never_comes():
    code = """
        __global__ void apart(volatile int* y) {
            int v = threadIdx.x;
            if (v == 5) while (y[0] == 0) {}
            if (v % 2) v += __shfl_xor_sync(0xffffffff, v, 1);
            else v -= __shfl_xor_sync(0xffffffff, v, 1);
            y[threadIdx.x] = v;
        }
    """
    fails(StepLimit, code, "apart", 1, 32, np.zeros(32, np.int32), max_steps=500, says=["no end after 500 steps"])
    fails(StepLimit, LOOPS_FOR_EVER, "rounds", 1, 32, np.zeros(32, np.int32), max_steps=500, says=["after 500 steps"])


LOOPS_FOR_EVER = """
    __global__ void rounds(int* y) {
        int v = threadIdx.x;
        while (v != -1) {
            if (v % 2) v = 3 * __shfl_xor_sync(0xffffffff, v, 1) & 0xffff; else v = __shfl_xor_sync(0xffffffff, v, 1);
        }
        y[threadIdx.x] = v;
    }
"""


# --- lanes that have exited ----------------------------------------------------------------------------------------------

EXITED = """
    __global__ void without_some(const int* x, int* y, int n) {
        const int i = threadIdx.x;
        if (i >= n) return;
        int sum = x[i];
        for (int step = 16; step > 0; step /= 2) {
            const int other = __shfl_down_sync(0xffffffffu, sum, step);  // here
            if (i + step < n) sum += other;
        }
        const int seen = __shfl_sync(0xffffffffu, x[i], 31);
        const unsigned alike = __match_any_sync(0xffffffffu, x[i] & 1);
        const int all = __all_sync(0xffffffffu, 1), none = __any_sync(0xffffffffu, 0);
        const int total = __reduce_add_sync(0xffffffffu, x[i]);
        const int count = __popc(__ballot_sync(0xffffffffu, 1));
        __syncwarp();
        if (i == 0) {
            y[0] = sum; y[1] = all; y[2] = none; y[3] = total; y[4] = count; y[5] = __popc(alike); y[6] = seen;
        }
    }
"""


@pytest.mark.parametrize("n", [1, 20, 31, 32])
@pytest.mark.parametrize("exited", [True, False], ids=["exited", "not there"])
@pytest.mark.parametrize("seed", [None, 1])
def test_lanes_that_have_exited_take_no_part_where_that_is_let_pass(n, exited, seed):
    x, y = np.arange(1, 33, dtype=np.int32), np.zeros(7, np.int32)
    run(EXITED, "without_some", 1, 32 if exited else n, x, y, n, exited_lanes=True, seed=seed)
    total, odd = n * (n + 1) // 2, (n + 1) // 2
    assert y[:6].tolist() == [total, 1, 0, total, n, odd]
    assert (y[6] == 32) == (n == 32)  # of a lane that is gone a pattern is read, and no number that looks right


def test_they_are_a_fault_by_default():
    x, y = np.arange(1, 33, dtype=np.int32), np.zeros(7, np.int32)
    says = ["names lanes that have exited or do not exist"]
    fails(WarpFault, EXITED, "without_some", 1, 32, x, y, 20, says=says)


def test_lanes_that_are_elsewhere_are_a_fault_all_the_same():
    code = """
        __global__ void elsewhere(int* y) {
            const int i = threadIdx.x;
            if (i >= 24) return;
            if (i < 8) y[i] = __shfl_sync(0xffffffffu, i, 0);
            else __syncthreads();
        }
    """
    fails(WarpFault, code, "elsewhere", 1, 32, np.zeros(32, np.int32), says=["are elsewhere"], exited_lanes=True)
