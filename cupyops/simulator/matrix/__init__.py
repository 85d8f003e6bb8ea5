"""The matrix units as pure functions of NumPy arrays: `mma`, `wgmma`, `wmma`, `ldmatrix` and `stmatrix`."""

from .ldmatrix import ldmatrix, ldmatrix_lanes, stmatrix
from .mma import Mma, mma
from .wgmma import Wgmma, wgmma
from .wmma import WmmaMemory, wmma, wmma_memory

__all__ = [
    "Mma",
    "Wgmma",
    "WmmaMemory",
    "ldmatrix",
    "ldmatrix_lanes",
    "mma",
    "stmatrix",
    "wgmma",
    "wmma",
    "wmma_memory",
]
