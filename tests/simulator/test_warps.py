"""Exchange between the lanes of a warp, against its definition written out lane by lane; and lanes that are missing."""

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import WarpFault

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
