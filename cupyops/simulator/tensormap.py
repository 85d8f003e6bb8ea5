"""Tensor maps: what `cp.async.bulk.tensor` reads to find the elements of a box in global and in shared memory.

CUDA's own 128 bytes are opaque; ours begin with a mark and hold the same arguments as `cuTensorMapEncodeTiled` takes.
Dimensions are listed from the innermost outwards, as there.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..errors import InputError
from .errors import Misaligned, UnsupportedInstruction
from .matrix.swizzle import SPANS, swizzled

BYTES = 128
SHARED_ALIGNMENT = 128  # of a tile in shared memory
_MARK = b"cupyops\x01"
_LAYOUT = struct.Struct("<8sBBBBQ5I4Q5H5B")
_PATTERN_REPEATS = 1024  # bytes after which every swizzle begins anew

# element type -> bytes, and the NaN that fills what lies outside (None: only zero can). CUDA calls it special and does
# not say which it is; any NaN serves a kernel that tests for NaN.
_ELEMENTS: dict[str, tuple[int, int | None]] = {
    "u8": (1, None),
    "u16": (2, None),
    "u32": (4, None),
    "s32": (4, None),
    "u64": (8, None),
    "s64": (8, None),
    "f16": (2, 0x7FFF),
    "bf16": (2, 0x7FFF),
    "f32": (4, 0x7FFFFFFF),
    "tf32": (4, 0x7FFFFFFF),
    "f64": (8, 0x7FFFFFFFFFFFFFFF),
}
_NAMES = tuple(_ELEMENTS)
_ONE_OF = f"one of {', '.join(_NAMES)}"
_OF_KIND = {
    "b1": "u8",
    "i1": "u8",
    "u1": "u8",
    "i2": "u16",
    "u2": "u16",
    "i4": "s32",
    "u4": "u32",
    "i8": "s64",
    "u8": "u64",
    "f2": "f16",
    "f4": "f32",
    "f8": "f64",
}


class TensorMapError(InputError):
    """Error of a tensor map: it is none, or is outside what `cuTensorMapEncodeTiled` accepts."""


class LimitError(TensorMapError):
    """An argument of a tensor map is outside what `cuTensorMapEncodeTiled` accepts: the message names it.

    Attributes:
        field: the argument.
        index: which of its numbers, innermost first, where it has several.
        found: what it is.
        expected: what it should be.
    """

    def __init__(self, field: str, found: object, expected: str, index: int | None = None) -> None:
        name = field if index is None else f"{field}[{index}]"
        super().__init__(f"tensor map: {name} is {found}, expected {expected}")
        self.field, self.index, self.found, self.expected = field, index, found, expected


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one tiled copy moves.

    element: a PTX type name. sizes: elements in each dimension, innermost first. strides: bytes from one element to the
    next in each dimension but the innermost, which is contiguous. box: the extent that a copy covers in each dimension;
    with element strides above one, it takes every so-manieth element of it. swizzle: 0, 32, 64 or 128 bytes.
    fill: "zero" or "nan", what a load puts in place of elements outside of the tensor.
    """

    address: int
    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: int = 0
    fill: str = "zero"

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.sizes))
        check(self.element, self.sizes, self.strides, self.box, self.element_strides, self.swizzle, self.fill)
        holds = self.address % 16 == 0 and 0 <= self.address < 1 << 64
        _require(holds, "address", f"{self.address:#x}", "a multiple of 16")
        _check_covered(self)

    @classmethod
    def of_array(
        cls,
        array: np.ndarray,
        address: int,
        box: Sequence[int],
        *,
        element: str | None = None,
        element_strides: Sequence[int] = (),
        swizzle: int = 0,
        fill: str = "zero",
    ) -> "TensorMap":
        """The map of an array that the device knows at `address`; `box` is innermost first, unlike the array's shape.

        `element` says what the bits are where NumPy's dtype does not: "bf16" for uint16, for example.
        """
        kind = f"{array.dtype.kind}{array.dtype.itemsize}"
        name = element or _OF_KIND.get(kind)
        if name not in _ELEMENTS:
            raise LimitError("element", element or array.dtype, _ONE_OF)
        size = element_size(name)
        _require(array.dtype.itemsize == size, "element", name, f"a type of the array's {array.dtype.itemsize} bytes")
        _require(array.ndim > 0, "rank", 0, "1 to 5")
        contiguous = array.shape[-1] <= 1 or array.strides[-1] == size
        _require(contiguous, "innermost stride", f"{array.strides[-1]} bytes", f"{size}: contiguous elements")
        sizes, strides = tuple(array.shape[::-1]), tuple(array.strides[-2::-1])
        return cls(address, name, sizes, strides, tuple(box), tuple(element_strides), swizzle, fill)

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def element_size(self) -> int:
        """Bytes of an element."""
        return element_size(self.element)

    @property
    def fill_bits(self) -> int:
        """The bits of an element that a load finds outside of the tensor."""
        nan = _ELEMENTS[self.element][1]
        return nan if self.fill == "nan" and nan is not None else 0

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements that a copy moves in each dimension, innermost first."""
        return tuple(-(-extent // step) for extent, step in zip(self.box, self._steps))

    @property
    def tile_bytes(self) -> int:
        """Bytes that a copy adds to the count of its mbarrier, elements outside of the tensor included."""
        return int(np.prod(self.counts)) * self.element_size

    def tile(self, coordinates: Sequence[int], shared_base: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Locate each element of the box at `coordinates` (innermost first), in the tile's order without a swizzle:

        its address in global memory (int64), whether it lies inside of the tensor (bool; the address of one that does
        not must not be used), and its byte offset (int64) from `shared_base`, the tile's address in shared memory.
        """
        if len(coordinates) != self.rank:
            raise ValueError(f"{len(coordinates)} coordinates for a tensor map of rank {self.rank}")
        if shared_base % SHARED_ALIGNMENT:
            raise Misaligned(f"a tile in shared memory at {shared_base:#x}, not a multiple of {SHARED_ALIGNMENT}")
        start = [int(c) for c in coordinates]
        origin = self.address + sum(c * pitch for c, pitch in zip(start, self._pitches))
        return self._relative + origin, self._inside(start), self._offsets(shared_base % _PATTERN_REPEATS)

    def encode(self) -> bytes:
        """128 bytes that `decode` understands; a kernel receives them as its CUtensorMap."""
        code = (_NAMES.index(self.element), SPANS.index(self.swizzle), int(self.fill == "nan"))
        sizes = [size - 1 for size in self.sizes]  # up to 2^32
        extents = [*_padded(sizes, 5), *_padded(self.strides, 4)]
        fields = [*extents, *_padded(self.box, 5), *_padded(self.element_strides, 5)]
        return _LAYOUT.pack(_MARK, self.rank, *code, self.address, *fields).ljust(BYTES, b"\0")

    @staticmethod
    def decode(encoded: bytes) -> "TensorMap":
        """The inverse of `encode`; TensorMapError where the bytes are not those of a tensor map."""
        return _decode(bytes(encoded))

    @property
    def _steps(self) -> tuple[int, ...]:
        """The hardware ignores the innermost element stride."""
        return (1, *self.element_strides[1:])

    @property
    def _pitches(self) -> tuple[int, ...]:
        return (self.element_size, *self.strides)

    @cached_property
    def _relative(self) -> np.ndarray:
        """Bytes from the box's first element to each of its elements."""
        total = np.zeros((), np.int64)
        for count, step, pitch in zip(self.counts, self._steps, self._pitches):
            total = np.add.outer(np.arange(count, dtype=np.int64) * (step * pitch), total)
        return total.ravel()

    def _inside(self, start: list[int]) -> np.ndarray:
        inside = np.ones((), bool)
        for first, count, step, size in zip(start, self.counts, self._steps, self.sizes):
            index = first + np.arange(count, dtype=np.int64) * step
            inside = np.logical_and.outer((index >= 0) & (index < size), inside)
        return inside.ravel()

    @cached_property
    def _offsets_seen(self) -> dict[int, np.ndarray]:
        return {}

    def _offsets(self, base: int) -> np.ndarray:
        if base not in self._offsets_seen:
            plain = np.arange(np.prod(self.counts), dtype=np.int64) * self.element_size
            self._offsets_seen[base] = swizzled(plain + base, self.swizzle) - base
        return self._offsets_seen[base]


def element_size(element: str) -> int:
    """Bytes of an element type."""
    return _ELEMENTS[element][0]


@lru_cache(maxsize=256)
def _decode(encoded: bytes) -> TensorMap:
    if len(encoded) != BYTES or encoded[: len(_MARK)] != _MARK:
        raise TensorMapError(f"no tensor map: found {encoded[:8]!r}, expected {BYTES} bytes that begin with {_MARK!r}")
    _, rank, element, span, nan, address, *fields = _LAYOUT.unpack_from(encoded)
    if not (1 <= rank <= 5 and element < len(_NAMES) and span < len(SPANS)):
        raise TensorMapError(
            f"no tensor map: found rank {rank}, element {element}, swizzle {span} after the mark; "
            "make one with cupyops.tensor_map"
        )
    sizes = tuple(size + 1 for size in fields[:rank])
    strides, box, steps = fields[5 : 4 + rank], fields[9 : 9 + rank], fields[14 : 14 + rank]
    fill = "nan" if nan else "zero"
    return TensorMap(address, _NAMES[element], sizes, tuple(strides), tuple(box), tuple(steps), SPANS[span], fill)


def _padded(numbers: Sequence[int], length: int) -> list[int]:
    return [*numbers, *[0] * (length - len(numbers))]


def check(
    element: str,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    swizzle: int,
    fill: str,
) -> None:
    """The limits that CUDA documents for `cuTensorMapEncodeTiled` without interleaving, but that of the address.

    The arguments are those of `TensorMap`. Raises LimitError.
    """
    rank = len(sizes)
    _require(element in _ELEMENTS, "element", element, _ONE_OF)
    _require(swizzle in SPANS, "swizzle", swizzle, f"one of {SPANS}")
    _require(fill in ("zero", "nan"), "fill", fill, "'zero' or 'nan'")
    fits = fill == "zero" or _ELEMENTS[element][1] is not None
    _require(fits, "fill", "'nan'", f"'zero' for elements of type {element}")
    _require(1 <= rank <= 5, "rank", rank, "1 to 5")
    _require(len(strides) == rank - 1, "strides", strides, f"{rank - 1} of them, for rank {rank}")
    for i, size in enumerate(sizes):
        _require(1 <= size <= 1 << 32, "sizes", size, "1 to 2^32", i)
    for i, stride in enumerate(strides):
        fits = stride % 16 == 0 and 0 <= stride < 1 << 40
        _require(fits, "strides", f"{stride} bytes", "a multiple of 16 from 0 to below 2^40", i)
    _check_box(element_size(element), rank, box, element_strides, swizzle)


def _require(holds: bool, field: str, found: object, expected: str, index: int | None = None) -> None:
    if not holds:
        raise LimitError(field, found, expected, index)


def _check_box(size: int, rank: int, box: Sequence[int], steps: Sequence[int], span: int) -> None:
    _require(len(box) == rank, "box", box, f"{rank} extents, for rank {rank}")
    _require(len(steps) == rank, "element_strides", steps, f"{rank} of them, for rank {rank}")
    for i, extent in enumerate(box):
        _require(1 <= extent <= 256, "box", extent, "1 to 256", i)
    for i, step in enumerate(steps):
        _require(1 <= step <= 8, "element_strides", step, "1 to 8", i)
    line = box[0] * size
    _require(line % 16 == 0, "box", f"{line} bytes", "a multiple of 16 bytes", 0)
    _require(not span or line <= span, "box", f"{line} bytes", f"at most the {span} bytes of the swizzle", 0)


def _check_covered(tensor_map: TensorMap) -> None:
    line, span = tensor_map.box[0] * tensor_map.element_size, tensor_map.swizzle
    if line < span and np.prod(tensor_map.box[1:]) > 1:
        # the documents only say that room for the whole span is needed, not how far apart the lines then are
        raise UnsupportedInstruction(
            f"a tensor map with lines of {line} bytes under a swizzle of {span} bytes is not supported: "
            f"their place in shared memory is not documented"
        )
