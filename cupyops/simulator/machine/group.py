"""Threads that run together: the batch of blocks under way, and groups of its threads at one place of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Index = np.ndarray | slice | None  # thread numbers within the batch, ascending; None for all


class Batch:
    """The threads of some blocks of the grid, numbered from 0, and what each knows of itself."""

    def __init__(
        self, grid: tuple[int, ...], block: tuple[int, ...], cluster: tuple[int, ...], numbers: np.ndarray
    ) -> None:
        self.grid, self.block_shape = grid, block
        self.block_numbers = numbers  # of the grid's blocks, those that this batch runs
        self.blocks = len(numbers)
        self.threads_per_block = block[0] * block[1] * block[2]
        self.threads = self.blocks * self.threads_per_block
        self.warps_per_block = -(-self.threads_per_block // 32)
        self.warps = self.blocks * self.warps_per_block
        self.whole_warps = self.threads_per_block % 32 == 0
        self.per_thread = _PerThread(self, cluster)
        self.shuffles: dict[tuple[str, int, int] | None, tuple[np.ndarray, np.ndarray]] = {}  # found out once

    def block_name(self, block: int) -> str:
        """(x,y,z) of the batch's block number `block`."""
        return _triple(int(self.block_numbers[block]), self.grid)

    def thread_name(self, thread: int) -> str:
        """Thread and block as a person counts them."""
        local, block = thread % self.threads_per_block, thread // self.threads_per_block
        return f"thread {_triple(local, self.block_shape)} of block {self.block_name(block)}"


class _PerThread(dict[str, np.ndarray]):
    """The special registers, one array each, and the numbers by which the machine finds a thread's things.

    Each is worked out at first use.
    """

    def __init__(self, batch: Batch, cluster: tuple[int, ...]) -> None:
        super().__init__()
        self._batch, self._cluster = batch, cluster

    def __missing__(self, name: str) -> np.ndarray:
        value = self._found(name)
        self[name] = value if name in ("thread", "block", "warp", "slot") else value.astype(np.uint32)
        return self[name]

    def _found(self, name: str) -> np.ndarray:
        batch = self._batch
        thread = np.arange(batch.threads)
        local, block = thread % batch.threads_per_block, thread // batch.threads_per_block
        if name in ("thread", "block"):
            return thread if name == "thread" else block
        if name in ("laneid", "warpid"):
            return local % 32 if name == "laneid" else local // 32
        if name in ("warp", "slot"):
            warp = block * batch.warps_per_block + local // 32
            return warp if name == "warp" else warp * 32 + local % 32  # among all lanes of all warps, missing ones too
        if name == "cluster_ctarank":
            x, y, z = (self[f"cluster_ctaid_{axis}"].astype(np.int64) for axis in "xyz")
            return x + self._cluster[0] * (y + self._cluster[1] * z)
        register, axis = name.rsplit("_", 1)
        if register == "tid":
            return _along(axis, local, batch.block_shape)
        position, extent = _along(axis, batch.block_numbers[block], batch.grid), self._cluster["xyz".index(axis)]
        return {"ctaid": position, "cluster_ctaid": position % extent, "clusterid": position // extent}[register]


def _along(axis: str, number: np.ndarray, extents: tuple[int, ...]) -> np.ndarray:
    x, y, _ = extents
    return number % x if axis == "x" else number // x % y if axis == "y" else number // (x * y)


def _triple(number: int, extents: tuple[int, ...]) -> str:
    x, y, _ = extents
    return f"({number % x},{number // x % y},{number // (x * y)})"


class Group:
    """Threads of a batch that stand at the same instruction.

    Attributes:
        index: their numbers; None for the whole batch.
        size: how many they are.
    """

    __slots__ = ("_cache", "batch", "index", "size")

    def __init__(self, batch: Batch, index: Index, size: int) -> None:
        self.batch = batch
        self.index = index
        self.size = size
        self._cache: dict[str, Any] = {}

    def get(self, name: str) -> np.ndarray:
        """A special register, or a number of `Batch.per_thread`, for these threads."""
        if self.index is None:
            return self.batch.per_thread[name]
        found = self._cache.get(name)
        if found is None:
            found = self._cache[name] = self.batch.per_thread[name][self.index]
        return found

    def once(self, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """Compute a value for these threads at first use and cache it. `name` is no name that `get` knows."""
        found = self._cache.get(name)
        if found is None:
            found = self._cache[name] = compute()
        return found

    @property
    def threads(self) -> np.ndarray:
        """Numbers of the threads within the batch."""
        return self.get("thread")

    def where(self, condition: Any) -> Selection | None:
        """Select the threads for which `condition` holds; None if there are none."""
        if not isinstance(condition, np.ndarray):
            return Selection(self, None, self) if condition else None
        count = int(np.count_nonzero(condition))
        if count == 0:
            return None
        if count == self.size:
            return Selection(self, None, self)
        return Selection(self, condition, Group(self.batch, self.threads[condition], count))

    def one_by_one(self) -> list[Group]:
        """Each thread as a group of its own."""
        return [Group(self.batch, self.threads[number : number + 1], 1) for number in range(self.size)]

    def subset(self, mask: np.ndarray) -> Group:
        """The threads for which `mask` is true."""
        threads = self.threads[mask]
        return Group(self.batch, threads, len(threads))

    def lanes_present(self) -> np.ndarray:
        """Bits of each warp of the batch: one for each lane that is in this group."""
        found = self._cache.get("present")
        if found is None:
            found = self._cache["present"] = lane_bits(self.batch, self.get("slot"))
        return found

    def spread(self, value: Any, dtype: Any = None) -> np.ndarray:
        """One element for each thread, of an array or a scalar."""
        if isinstance(value, np.ndarray) and value.ndim:
            return value
        return np.full(self.size, value, dtype)


class Selection:
    """The threads of a group whose guard holds: `pick` narrows a value to them, `merge` writes theirs into all."""

    __slots__ = ("group", "mask", "whole")

    def __init__(self, whole: Group, mask: np.ndarray | None, group: Group) -> None:
        self.whole = whole
        self.mask = mask
        self.group = group

    def pick(self, value: Any) -> Any:
        """The selected threads' part of a value of all."""
        if self.mask is None or not isinstance(value, np.ndarray) or value.ndim == 0:
            return value
        return value[self.mask]

    def pick_all(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """`pick` for each of several values."""
        return tuple(self.pick(value) for value in values)

    def merge(self, old: Any, new: Any) -> np.ndarray:
        """`old`, with the selected threads' part replaced by `new`."""
        if self.mask is None:
            return self.whole.spread(new)
        result = np.array(self.whole.spread(old))
        result[self.mask] = new
        return result


def lane_bits(batch: Batch, slots: np.ndarray) -> np.ndarray:
    """Bits of each warp: one for each lane among `slots`."""
    flags = np.zeros(batch.warps * 32, np.bool_)
    flags[slots] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)
