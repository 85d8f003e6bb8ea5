"""Masks: lanes that meet without the others of their warp, what shuffles read beyond, and registers of warpgroups."""

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import Deadlock, Race, WarpFault


def ints(count: int = 32) -> np.ndarray:
    return np.zeros(count, np.int32)


# --- __syncwarp of some lanes orders those alone ---

CHAIN = """
    __global__ void chain(int* y) {
        __shared__ int s[4];
        int lane = threadIdx.x;
        if (lane < 4) s[lane] = lane + 10;
        if (lane == FIRST || lane == SECOND) __syncwarp(1u << FIRST | 1u << SECOND);
        if (lane == 2 || lane == 3) __syncwarp(1u << 2 | 1u << 3);
        if (lane == 3) y[0] = s[0];  // here
    }
"""


def test_lanes_are_ordered_through_others():
    """0 meets 2, and then 2 meets 3: so 3 may read what 0 has written."""
    y = ints(1)
    run(CHAIN.replace("FIRST", "0").replace("SECOND", "2"), "chain", 1, 32, y)
    assert y[0] == 10
    fails(Race, CHAIN.replace("FIRST", "0").replace("SECOND", "1"), "chain", 1, 32, ints(1), says=["thread (3,0,0)"])


def test_a_meeting_of_all_lanes_ends_what_parts_of_them_had():
    code = """
        __global__ void halves(int* y) {
            __shared__ int s[64];
            int t = threadIdx.x, lane = t % 32;
            s[t] = t;
            __syncwarp(lane < 16 ? 0xffff : 0xffff0000);
            __syncwarp();
            y[t] = s[t - lane + 31 - lane] + s[t ^ 15];
        }
    """
    y = ints(64)
    run(code, "halves", 1, 64, y)
    assert y[0] == 31 + 15


# --- masks of some lanes ---

MASKED = """
    __global__ void masked(int* y) {
        int lane = threadIdx.x;
        unsigned mask = lane < 2 ? 3 : lane < 16 ? 0xfffc : 0xffff0000;
        int v = lane * 10;
        int found = 0;
        EXCHANGE
        y[lane] = found;
    }
"""
EXCHANGES = {
    "found = __shfl_xor_sync(mask, v, 1);": lambda lane, members: (lane ^ 1) * 10,
    "found = __ballot_sync(mask, v > 40);": lambda lane, members: sum(1 << i for i in members if i > 4),
    "found = __any_sync(mask, v == 10);": lambda lane, members: int(1 in members),
    "found = __reduce_add_sync(mask, v);": lambda lane, members: 10 * sum(members),
    "found = __match_any_sync(mask, v % 20);": lambda lane, members: sum(1 << i for i in members if i % 2 == lane % 2),
    "__syncwarp(mask);": lambda lane, members: 0,
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("exchange", list(EXCHANGES))
def test_an_exchange_of_the_lanes_of_a_mask(exchange, seed):
    y = ints()
    run(MASKED.replace("EXCHANGE", exchange), "masked", 1, 32, y, seed=seed)
    parts = [range(2), range(2, 16), range(16, 32)]
    assert (y.astype(np.int64) & 0xFFFFFFFF).tolist() == [EXCHANGES[exchange](i, part) for part in parts for i in part]


def test_half_a_warp_adds_up():
    """The usual form: the upper lanes of the half read beyond it, and nobody asks for what they have."""
    code = """
        __global__ void half(float* y) {
            if (threadIdx.x >= 16) return;
            float v = threadIdx.x;
            for (int by = 8; by; by /= 2) v += __shfl_down_sync(0xffff, v, by);
            if (threadIdx.x == 0) y[0] = v;
        }
    """
    y = np.zeros(1, np.float32)
    run(code, "half", 1, 32, y, exited_lanes=True)
    assert y[0] == 120


def test_a_lane_may_exchange_alone_before_it_meets_the_other():
    """Lane 0 waits with the mask of both, until lane 1 has come to the same instruction with that mask too."""
    code = """
        __global__ void later(int* y) {
            int lane = threadIdx.x;
            if (lane >= 2) return;
            #pragma unroll 1
            for (int round = lane == 1 ? 0 : 1; round < 2; round++)
                y[lane] += __shfl_sync(round == 0 ? 2 : 3, lane + 5, 1);
        }
    """
    for seed in (None, 0, 1):
        y = ints(2)
        run(code, "later", 1, 32, y, seed=seed)
        assert y.tolist() == [6, 12]


@pytest.mark.parametrize("mode", ["__shfl_sync(mask, v, (lane + 16) % 32)", "__shfl_xor_sync(mask, v, 16)"])
def test_what_a_lane_outside_of_the_mask_holds_is_not_known(mode):
    code = """
        __global__ void outside(unsigned* y) {
            int lane = threadIdx.x;
            unsigned mask = lane < 16 ? 0xffff : 0xffff0000, v = lane;
            y[lane] = MODE;
        }
    """
    y = np.zeros(32, np.uint32)
    run(code.replace("MODE", mode.replace("16", "8").replace("% 32", "% 16 + lane / 16 * 16")), "outside", 1, 32, y)
    assert y.tolist() == [i ^ 8 for i in range(32)]
    run(code.replace("MODE", mode), "outside", 1, 32, y, check=False)
    assert set(y.tolist()) == {0xCBCBCBCB}


# --- registers of warpgroups ---

REGISTERS = """
    __global__ void __launch_bounds__(384) registers(int* y) {
        int warpgroup = threadIdx.x / 128;
        if (warpgroup == 0 ONLY) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 GIVEN;");  // gives
            y[threadIdx.x] = 1;
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 TAKEN;");  // here
            y[threadIdx.x] = 2;
        }
    }
"""


def registers(given: int, taken: int, only: str = "") -> str:
    return REGISTERS.replace("GIVEN", str(given)).replace("TAKEN", str(taken)).replace("ONLY", only)


def test_registers_that_one_warpgroup_gives_and_others_take():
    """168 a thread at launch: what one warpgroup gives must be enough for two."""
    y = ints(384)
    for given, taken in [(24, 240), (40, 232), (168, 168)]:
        run(registers(given, taken), "registers", 1, 384, y, arch="sm_90a")
    assert y.tolist() == [1] * 128 + [2] * 256
    says = ["setmaxnreg.inc waits for registers that are never given back", "by warpgroup: 40, 240, 240; 168 at launch"]
    fails(Deadlock, registers(40, 240), "registers", 1, 384, ints(384), arch="sm_90a", says=says)


def test_registers_of_a_kernel_that_wants_several_blocks_side_by_side():
    """`__launch_bounds__(384, 2)` leaves each thread 80 at launch, and one block must not take what the other needs."""
    code = registers(40, 96).replace("(384)", "(384, 2)")
    y = ints(384)
    run(code, "registers", 1, 384, y, arch="sm_90a")
    assert y.tolist() == [1] * 128 + [2] * 256
    says = ["by warpgroup: 24, 112, 112; 80 at launch"]
    wrong = registers(24, 112).replace("(384)", "(384, 2)")
    fails(Deadlock, wrong, "registers", 1, 384, ints(384), arch="sm_90a", says=says)


def test_registers_that_a_warp_has_already():
    says = ["setmaxnreg.inc to 160 registers by a warp that has 168"]
    fails(WarpFault, registers(24, 160), "registers", 1, 384, ints(384), arch="sm_90a", says=says)
