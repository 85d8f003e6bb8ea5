"""Forecast of the memory that a larger call would take, from smaller ones, so that a check does not run out of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._util.allocations import Allocations
from .._util.torch_private import TorchDispatchMode, tree_leaves
from .hazard import NotApplicable

STEP = 4  # between two smaller sizes
_STEPS = 6


class Computed(TorchDispatchMode):
    """Counts the bytes of all that PyTorch's operators make; more than there is at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        fresh = {_storage(one): one for one in tree_leaves(found) if isinstance(one, Tensor)}
        self.bytes += sum(one.untyped_storage().nbytes() for key, one in fresh.items() if key not in given)
        return found


class Allocated(Allocations):
    """Counts the bytes that Python code allocates, which is what a forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def changed(self, fresh: Tensor, by: Any) -> Tensor:
        """Count the bytes of a fresh tensor."""
        self.bytes += fresh.untyped_storage().nbytes()
        return fresh


def smaller_sizes(new: int, most: int) -> list[int]:
    """Sizes that grow by `STEP` each, up to `most`, and would reach `new`."""
    sizes = [new // STEP**power for power in range(_STEPS, 0, -1)]
    return [size for size in sizes if 1 < size <= most]


def needs_memory(new: int, sizes: Sequence[int], measure: Callable[[int], int | None], limit: int) -> None:
    """Raise `NotApplicable` where a size of `new` would take more than `limit` bytes, or a smaller one on the way does.

    `measure` gives the bytes for a size, None where a call of it is refused. What grows by a constant power of the size, and
    what stays the same beside it, are foretold exactly.
    """
    found: list[int] = []
    for size in sizes:
        _within(_next(found), limit)
        if (taken := measure(size)) is None:
            return
        found.append(taken)
        _within(taken, limit)
    left = 0
    while sizes and sizes[-1] * STEP**left < new:
        left += 1
        found.append(_next(found))
        _within(found[-1], limit)


def _next(found: Sequence[int]) -> int:
    """Next number of bytes, where the increment grows by a constant factor."""
    if len(found) < 2:
        return 0
    steps = [max(0, b - a) for a, b in itertools.pairwise(found)]
    before = steps[-2] if len(steps) > 1 else 0
    factor = steps[-1] / before if before else STEP
    return int(found[-1] + steps[-1] * max(factor, 1.0))


def _within(taken: int, limit: int) -> None:
    if taken > limit:
        raise NotApplicable(
            f"it would take {taken / 2**30:,.1f} GiB of memory, more than the {limit / 2**30:,.1f} GiB of check(memory=)"
        )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
