"""Launch configuration of a kernel: grid, block and the rest, checked against what every CUDA GPU allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InputError, LaunchError

Dim3 = tuple[int, int, int]

_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_THREADS = 1024
_MAX_BLOCK_Z = 64
_MAX_CLUSTER = 8  # blocks: what every GPU with clusters allows


def ceil_div(a: int, b: int) -> int:
    """The number of blocks of `b` that cover `a`.

    Example:
        >>> cupyops.ceil_div(1000, 256)
        4
    """
    return (a + b - 1) // b


def grid_1d(n: int, block: int = 256, *, per_thread: int = 1, most: int | None = None) -> tuple[int, int]:
    """Grid and block of a launch with a thread for each of `n` elements: `kernel[cupyops.grid_1d(n)](x, y, n)`.

    Args:
        n: how many elements; of 0 nothing is launched.
        block: threads per block.
        per_thread: elements of each thread.
        most: blocks at most, for a kernel whose threads go on until all elements are done (a grid-stride loop).

    Returns:
        (grid, block), which stand between the brackets of a launch.

    Raises:
        InputError: `block`, `per_thread` or `most` is less than 1.

    Example:
        >>> cupyops.grid_1d(1000), cupyops.grid_1d(10**9, 128, per_thread=4, most=1024)
        ((4, 256), (1024, 128))
    """
    for name, value in (("block", block), ("per_thread", per_thread), ("most", most)):
        if value is not None and value < 1:
            raise InputError(f"grid_1d: {name} is {value}, expected at least 1")
    grid = ceil_div(n, block * per_thread)
    return (grid if most is None else min(grid, most)), block


def waits(ptx: str) -> bool:
    """Return True if a kernel waits for the grid before it, as it must where it may overlap that."""
    return "griddepcontrol.wait" in ptx


@dataclass(frozen=True)
class Configuration:
    """A checked launch configuration; `of` makes one."""

    grid: Dim3
    block: Dim3
    shared: int = 0  # bytes of dynamic shared memory
    cooperative: bool = False  # all blocks run at the same time, or nothing is launched
    cluster: Dim3 | None = None  # blocks that run on one group of multiprocessors and share their shared memory
    overlap: bool = False  # blocks begin while the grid before ends, for which the kernel waits itself

    @classmethod
    def of(
        cls,
        grid: Any,
        block: Any,
        shared: Any = 0,
        cooperative: Any = False,
        cluster: Any = None,
        overlap: Any = False,
    ) -> Configuration:
        """Read ints or tuples of one to three ints. Raises `LaunchError` for what no CUDA GPU can launch."""
        grid3, block3 = _triple("grid", grid), _triple("block", block)
        if any(g < 0 or g > limit for g, limit in zip(grid3, _MAX_GRID)):
            raise LaunchError(f"grid {grid3} is outside CUDA's limits {_MAX_GRID}; take fewer blocks, each doing more")
        threads = _product(block3)
        if min(block3) < 1 or threads > _MAX_THREADS or block3[2] > _MAX_BLOCK_Z:
            raise LaunchError(
                f"block {block3} has {threads} threads; CUDA allows 1 to {_MAX_THREADS}, at most {_MAX_BLOCK_Z} in z"
            )
        if not isinstance(shared, (int, np.integer)) or shared < 0:
            raise LaunchError(f"shared memory is {shared!r}, expected a number of bytes")
        for name, value in (("cooperative", cooperative), ("overlap", overlap)):
            if not isinstance(value, (bool, np.bool_)):
                raise LaunchError(f"{name} is {value!r}, expected a bool")
        cluster3 = None if cluster is None else _cluster(cluster, grid3)
        return cls(grid3, block3, int(shared), bool(cooperative), cluster3, bool(overlap))

    @property
    def blocks(self) -> int:
        """Number of blocks of the grid."""
        return _product(self.grid)

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        return _product(self.block)

    def __str__(self) -> str:
        parts = [f"grid {self.grid}, block {self.block}, {self.shared} bytes of dynamic shared memory"]
        parts += ["cooperative"] if self.cooperative else []
        parts += [f"cluster {self.cluster}"] if self.cluster is not None else []
        parts += ["overlapping the grid before"] if self.overlap else []
        return ", ".join(parts)


def _cluster(cluster: Any, grid: Dim3) -> Dim3:
    cluster3 = _triple("cluster", cluster)
    blocks = _product(cluster3)
    if min(cluster3) < 1 or blocks > _MAX_CLUSTER:
        raise LaunchError(f"cluster {cluster3} has {blocks} blocks; CUDA allows 1 to {_MAX_CLUSTER}")
    if any(extent % size for extent, size in zip(grid, cluster3)):
        raise LaunchError(f"grid {grid} is no multiple of the cluster {cluster3}; make it one, in each dimension")
    return cluster3


def _triple(name: str, dims: Any) -> Dim3:
    given = dims if isinstance(dims, tuple) else (dims,)
    if not 1 <= len(given) <= 3 or any(not isinstance(dim, (int, np.integer)) for dim in given):
        quotient = any(isinstance(dim, (float, np.floating)) for dim in given)
        remedy = ": use cupyops.ceil_div(n, block) for n threads" if quotient and name == "grid" else ""
        raise LaunchError(f"{name} is {dims!r}, expected an int or a tuple of 1 to 3 ints{remedy}")
    x, y, z = (*given, 1, 1)[:3]
    return int(x), int(y), int(z)


def _product(dims: Dim3) -> int:
    return dims[0] * dims[1] * dims[2]
