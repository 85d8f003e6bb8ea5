"""`ldmatrix` and `stmatrix`: 8 x 8 matrices of 16-bit elements between rows in shared memory and a warp's registers."""

import numpy as np


def ldmatrix_lanes(count: int) -> np.ndarray:
    """(count, 8): the lane whose address names row r of matrix m."""
    return np.arange(8 * count).reshape(count, 8)


def ldmatrix(rows: np.ndarray, transposed: bool) -> list[np.ndarray]:
    """(warps, count, 8, 8) uint16, row r of matrix m as lane 8 * m + r names it -> `count` registers of (32 * warps,).

    Lane l receives the elements 2 * (l % 4) and the next of row l // 4, or of that column with `transposed`.
    """
    matrices = rows.swapaxes(-1, -2) if transposed else rows
    registers = np.ascontiguousarray(matrices.swapaxes(0, 1)).view(np.uint32)
    return list(registers.reshape(rows.shape[1], -1))


def stmatrix(registers: list[np.ndarray], transposed: bool) -> np.ndarray:
    """The inverse: `count` registers of (32 * warps,) uint32 -> (warps, count, 8, 8) uint16, rows to be stored."""
    matrices = np.stack(registers).view(np.uint16).reshape(len(registers), -1, 8, 8).swapaxes(0, 1)
    return np.ascontiguousarray(matrices.swapaxes(-1, -2) if transposed else matrices)
