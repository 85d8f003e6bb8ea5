"""Locations of a tensor map's tiles: the map that a kernel was given, and the coordinates at which a GPU takes a tile."""

from __future__ import annotations

import numpy as np

from ..errors import Misaligned, OutOfBounds
from ..memory import space_of
from ..tensormap import TensorMap
from ..translate.function import Load
from .faults import fault
from .group import Group
from .spaces import Spaces
from .state import State


def tensor_map(state: State, spaces: Spaces, group: Group, address: np.ndarray, pc: int) -> TensorMap:
    """The map at an address, of a group of one thread."""
    _check_place(state, group, address.astype(np.uint64), pc)
    words = [
        spaces.generic.load(group, address.astype(np.uint64) + np.uint64(8 * k), Load(np.uint64, 8, 1, pc))[0]
        for k in range(16)
    ]
    try:
        return TensorMap.decode(np.array(words, np.uint64).tobytes())
    except ValueError as error:
        raise fault(OutOfBounds, state.listing, group, np.True_, f"no tensor map: {error}", pc) from None


def _check_place(state: State, group: Group, address: np.ndarray, pc: int) -> None:
    """Check that a map lies in parameters, constants or global memory, from which alone a GPU reads it."""
    space = {1: "shared", 2: "local"}.get(int(space_of(address)[0]))
    if space is not None:
        what = f"a tensor map in {space} memory: take it as a parameter, const __grid_constant__"
        raise fault(OutOfBounds, state.listing, group, np.True_, what, pc)
    if address[0] % np.uint64(64):
        detail = f"address {int(address[0]):#x}"
        raise fault(Misaligned, state.listing, group, np.True_, "a tensor map at no multiple of 64", pc, detail=detail)


def coordinates(
    state: State, group: Group, map_: TensorMap, given: list[np.ndarray], pc: int, *, stored: bool = False
) -> list[int]:
    """The tile's coordinates.

    A GPU stops (illegal instruction) unless the innermost is at a multiple of 16 bytes, and at a store where one is
    negative; a tile may be read from there, and be stored beyond the tensor's other end.
    """
    place = [int(coordinate[0]) for coordinate in given]
    if stored and min(place) < 0:
        what = "a tile is stored at a negative coordinate"
        detail = f"coordinates {tuple(place)}, innermost first"
        raise fault(OutOfBounds, state.listing, group, np.True_, what, pc, detail=detail)
    offset = place[0] * map_.element_size
    if offset % 16:
        what = "a tile whose innermost coordinate is at no multiple of 16 bytes"
        detail = f"coordinate {place[0]}, elements of {map_.element_size} bytes: byte {offset}"
        raise fault(Misaligned, state.listing, group, np.True_, what, pc, detail=detail)
    return place
