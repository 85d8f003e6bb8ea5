"""The matrix units: ldmatrix, stmatrix, mma, wmma and wgmma on the machine's registers and memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import matrix
from ..errors import OutOfBounds
from ..memory import WORDS
from ..translate.function import Load
from .faults import fault
from .group import Group
from .products import Products
from .spaces import Spaces
from .state import State
from .warps import Warps

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Matrices:
    """Instructions that whole warps or warpgroups execute."""

    def __init__(self, state: State, spaces: Spaces, warps: Warps) -> None:
        self._state = state
        self._spaces = spaces
        self._warps = warps
        self._known_chunks: dict[Any, np.ndarray] = {}

    # --- fragments and shared memory ---

    def load(self, group: Group, address: Any, count: int, transposed: bool, pc: int) -> list[np.ndarray]:
        """ldmatrix: lane 8 m + r names row r of matrix m."""
        rows, position = self._rows(group, address, count, "read", pc)
        if self._spaces.shared.shadow is not None:
            self._spaces.shared.shadow.read(rows, position, 16, pc)
        words = self._state.shared_memory.view(WORDS[16]).take(position >> 4)
        return matrix.ldmatrix(words.view(np.uint16).reshape(-1, count, 8, 8), transposed)

    def store(self, group: Group, address: Any, values: tuple[Any, ...], count: int, transposed: bool, pc: int) -> None:
        """stmatrix."""
        rows, position = self._rows(group, address, count, "write", pc)
        if self._spaces.shared.shadow is not None:
            self._spaces.shared.shadow.write(rows, position, 16, pc)
        elements = matrix.stmatrix([group.spread(value) for value in values], transposed).reshape(-1, 8)
        self._state.shared_memory.view(WORDS[16])[position >> 4] = np.ascontiguousarray(elements).view(WORDS[16])[:, 0]

    def transpose(self, group: Group, value: Any, pc: int) -> np.ndarray:
        """movmatrix: an 8 x 8 matrix of 16-bit elements that a warp holds, as `ldmatrix` deals them out, transposed."""
        self._warps.check_whole(group, 32, pc)
        return matrix.ldmatrix(matrix.stmatrix([group.spread(value)], False), True)[0]

    def _rows(self, group: Group, address: Any, count: int, verb: str, pc: int) -> tuple[Group, np.ndarray]:
        """The lanes that name rows, and the positions of those rows."""
        self._warps.check_whole(group, 32, pc)
        address = group.spread(address)
        if count < 4:
            lanes = np.arange(group.size) % 32 < 8 * count
            group, address = group.subset(lanes), address[lanes]
        return group, self._spaces.shared.positions(group, address, 16, verb, pc)

    # --- products of registers ---

    def multiply(
        self, group: Group, unit: Any, a: tuple[Any, ...], b: tuple[Any, ...], c: tuple[Any, ...], pc: int
    ) -> Any:
        """mma and wmma.mma."""
        self._warps.check_whole(group, 32, pc)
        return unit.compute(*([group.spread(register) for register in registers] for registers in (a, b, c)))

    def wmma_load(self, group: Group, unit: Any, space: str, address: Any, stride: Any, pc: int) -> list[np.ndarray]:
        """wmma.load: a fragment from memory, row by row."""
        target, places = self._items(group, unit, space, address, stride, pc)
        dtype = _UNSIGNED[unit.item_bytes]
        items = [target.load(group, place, Load(dtype, unit.item_bytes, 1, pc)) for place in places]
        return unit.pack(np.stack(items, axis=-1))

    def wmma_store(
        self, group: Group, unit: Any, space: str, address: Any, stride: Any, values: tuple[Any, ...], pc: int
    ) -> None:
        """wmma.store."""
        target, places = self._items(group, unit, space, address, stride, pc)
        items = unit.unpack([group.spread(value) for value in values])
        for number, place in enumerate(places):
            value = np.ascontiguousarray(items[:, number])
            target.store(group, place, (value,), value.dtype.type, unit.item_bytes, pc)

    def _items(
        self, group: Group, unit: Any, space: str, address: Any, stride: Any, pc: int
    ) -> tuple[Any, list[np.ndarray]]:
        self._warps.check_whole(group, 32, pc)
        strides = group.spread(unit.default_stride if stride is None else stride)[::32]
        offsets = unit.offsets(strides)
        address = group.spread(address)
        spaces = {"global": self._spaces.global_, "shared": self._spaces.shared}
        places = [address + offsets[:, item].astype(address.dtype) for item in range(offsets.shape[1])]
        return spaces.get(space, self._spaces.generic), places

    # --- wgmma ---

    def begin(self) -> None:
        """A batch of blocks begins."""
        self._products = Products(self._state, self._spaces.shared)
        self.fence, self.commit, self.wait = self._products.fence, self._products.commit, self._products.wait
        self.read_sums, self.begin_sums = self._products.read_sums, self._products.begin_sums
        self.copy_sums = self._products.copy_sums

    def wgmma(
        self, group: Group, unit: Any, d: tuple[Any, ...], a: Any, b: Any, scale_d: Any,
        scale_a: Any, scale_b: Any, transpose_a: Any, transpose_b: Any, unfenced: bool, pc: int,
    ) -> Any:  # fmt: skip
        """wgmma.mma_async. The sums are there at once; `Products` knows who may read them, and write what it reads.

        `unfenced`: its registers may have been touched since the last wgmma.fence.
        """
        self._warps.check_whole(group, 128, pc)
        if unfenced:
            self._products.check_fenced(group, pc)
        if isinstance(a, tuple):
            left: Any = [group.spread(register) for register in a]
        else:
            left = self._operand(group, unit, a, 64, bool(int(transpose_a)), pc)
        right = self._operand(group, unit, b, unit.n, bool(int(transpose_b)), pc)
        before = [group.spread(register) for register in d]
        return unit.compute(left, right, before, group.spread(scale_d)[::128], int(scale_a), int(scale_b))

    def _operand(self, group: Group, unit: Any, descriptor: Any, rows: int, transposed: bool, pc: int) -> np.ndarray:
        """The raw elements that a matrix descriptor names, for each warpgroup."""
        state = self._state
        descriptors = group.spread(descriptor)[::128]
        addresses = unit.operand_addresses(descriptors, rows, transposed)
        size = {"tf32": 4, "f16": 2, "bf16": 2}.get(unit.a_type, 1)
        if int(addresses.min()) < 0 or int(addresses.max()) + size > state.shared_bytes:
            detail = f"its elements reach up to byte {int(addresses.max()) + size} of {state.shared_bytes}"
            what = "a matrix descriptor reaches outside the block's shared memory"
            raise fault(OutOfBounds, state.listing, group, np.True_, what, pc, detail=detail)
        start = group.get("block")[::128] * state.shared_stride
        if self._spaces.shared.shadow is not None:
            self._products.reads(group, self._chunks(unit, descriptors, rows, transposed), start, pc)
        return state.shared_memory.view(_UNSIGNED[size])[(addresses + start[:, None, None]) // size]

    def _chunks(self, unit: Any, descriptors: np.ndarray, rows: int, transposed: bool) -> list[np.ndarray]:
        """Chunks of 16 bytes that make up the operand of each warpgroup, by their offsets."""
        found = []
        for one in descriptors.tolist():
            key = unit.k, unit.a_type, rows, transposed, one
            if key not in self._known_chunks:
                addresses = unit.operand_addresses(np.array([one], np.uint64), rows, transposed)
                self._known_chunks[key] = np.unique(addresses >> 4) << 4
            found.append(self._known_chunks[key])
        return found
