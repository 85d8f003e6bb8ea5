"""`ldmatrix` and `stmatrix`: lane by lane as the PTX ISA says, and together with `mma` in the usual idioms."""

import numpy as np
import pytest

from cupyops.simulator.matrix import ldmatrix, ldmatrix_lanes, mma, stmatrix

WARPS = 3


@pytest.mark.parametrize("count", [1, 2, 4])
def test_which_lane_names_which_row(count):
    lanes = ldmatrix_lanes(count)
    assert lanes.shape == (count, 8)
    assert all(lanes[matrix, row] == 8 * matrix + row for matrix in range(count) for row in range(8))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_lane_receives_two_neighbours(count, transposed):
    rows = np.random.default_rng(0).integers(0, 1 << 16, (WARPS, count, 8, 8)).astype(np.uint16)
    registers = ldmatrix(rows, transposed)
    assert len(registers) == count
    for matrix, register in enumerate(registers):
        assert register.shape == (32 * WARPS,) and register.dtype == np.uint32
        for thread in range(32 * WARPS):
            warp, lane = divmod(thread, 32)
            row, column = lane // 4, 2 * (lane % 4)
            m = rows[warp, matrix]
            low, high = (m[column, row], m[column + 1, row]) if transposed else (m[row, column], m[row, column + 1])
            assert register[thread] == int(low) | int(high) << 16


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_is_the_inverse(count, transposed):
    rows = np.random.default_rng(1).integers(0, 1 << 16, (WARPS, count, 8, 8)).astype(np.uint16)
    stored = stmatrix(ldmatrix(rows, transposed), transposed)
    assert stored.dtype == np.uint16
    np.testing.assert_array_equal(stored, rows)


def loaded(memory, count, address, transposed=False):
    """ldmatrix from a (rows, columns) array; `address`: lane -> (row, column) of the 8 elements that it names."""
    rows = np.empty((1, count, 8, 8), np.uint16)
    for matrix, lanes in enumerate(ldmatrix_lanes(count)):
        for row, lane in enumerate(lanes):
            i, j = address(int(lane))
            rows[0, matrix, row] = memory[i, j : j + 8].view(np.uint16)
    return ldmatrix(rows, transposed)


@pytest.mark.parametrize("b_is_k_by_n", [False, True])
def test_with_mma_it_multiplies(b_is_k_by_n):
    """A as 16 x 16 rows; B as n x k rows, or as k x n rows with `.trans`; D against NumPy's product."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
    a_registers = loaded(a, 4, lambda lane: (lane % 16, lane // 16 * 8))
    if b_is_k_by_n:
        b_registers = loaded(b, 2, lambda lane: (lane, 0), transposed=True)
    else:
        b_registers = loaded(np.ascontiguousarray(b.T), 2, lambda lane: (lane % 8, lane // 8 * 8))
    unit = mma(("sync", "aligned", "m16n8k16", "row", "col", "f32", "f16", "f16", "f32"))
    d = unit.compute(a_registers, b_registers, [np.zeros(32, np.float32)] * 4)
    wanted = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    for lane in range(32):
        for i in range(4):
            assert d[i][lane] == wanted[lane // 4 + 8 * (i >= 2), lane % 4 * 2 + i % 2]
