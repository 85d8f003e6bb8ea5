"""Every section of instructions, by name, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Iterator

from . import atomics, copies, floats, integers, matrices, warpgroups
from .case import Section

_MAKERS = (
    integers.arithmetic,
    integers.warps,
    atomics.atomics,
    floats.exact,
    floats.conversions,
    floats.approximations,
    matrices.mma,
    matrices.movement,
    matrices.wmma,
    warpgroups.types_and_widths,
    warpgroups.layouts,
    copies.copies,
    copies.tiles,
)


def sections() -> Iterator[Section]:
    """Each with all its cases."""
    for maker in _MAKERS:
        yield maker()
