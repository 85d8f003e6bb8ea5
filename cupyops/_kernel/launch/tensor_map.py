"""Tensor maps: what the tiled copies of compute capability 9.0 read to find a box of a tensor, as arguments of a kernel.

`tensor_map` describes a tensor and a box of it, once and without its address; the 128 bytes that a kernel takes are written
at the launch, where the address is known: by the driver for a GPU, by an executor for its own kernels.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._util import arguments
from ..._util.strides import is_dry
from ...errors import InputError, LaunchError
from . import driver
from .executors import capability, executors

BYTES = 128
ALIGNMENT = 64  # of the struct that takes one
ADDRESS_ALIGNMENT = 16  # of the tensor
PLACE_ALIGNMENT = 128  # where the driver writes one; CUDA 12 asks for 64, CUDA 13 declares 128

_FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
# by dtype the element type as PTX calls it; of those that it has none for, one with as many bits
_ELEMENTS: dict[torch.dtype, str] = {
    torch.bool: "u8",
    torch.uint8: "u8",
    torch.int8: "u8",
    torch.int16: "u16",
    torch.uint16: "u16",
    torch.int32: "s32",
    torch.uint32: "u32",
    torch.int64: "s64",
    torch.uint64: "u64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    **dict.fromkeys(_FLOAT8, "u8"),
}
# the driver's numbers for what a description holds
_CODES = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "s32": 3,
    "u64": 4,
    "s64": 5,
    "f16": 6,
    "f32": 7,
    "f64": 8,
    "bf16": 9,
    "tf32": 11,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_FILLS = {"zero": 0, "nan": 1}
_ARGUMENTS = {"sizes": "x.shape", "rank": "x.dim()", "strides": "x.stride()"}  # by the names of the limits
_MOST_STRIDE = (1 << 40) - 16


class Description(NamedTuple):
    """All that a tensor map says but the address; dimensions from the innermost outwards, as the driver takes them.

    element: as PTX calls the type. strides: in bytes, of each dimension but the innermost. promotion: how many bytes the L2
    cache fetches for a part of them. before: how many bytes before the tensor's address the map begins.
    """

    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    fill: str
    promotion: int = 256
    before: int = 0


class TensorMap:
    """A tensor and a box of it, as `cupyops.tensor_map` gives it: an argument of a launch.

    Attributes:
        tensor: whose elements a kernel copies.
        description: what of the map does not depend on the address; None where the tensor has no storage.
        written: whether kernels write to the tensor through the map.
    """

    __slots__ = ("_encoded", "_laid_out", "description", "tensor", "written")
    nbytes = BYTES

    def __init__(self, tensor: Tensor, description: Description | None, written: bool = False) -> None:
        self.tensor, self.description, self.written = tensor, description, written
        self._laid_out: tuple[Any, ...] = () if description is None else _layout(tensor)
        self._encoded: tuple[int, bytes] = 0, b""  # the driver's bytes, and the address that they were made for

    def get_device(self) -> int:
        """The index of the tensor's device, as `Tensor.get_device`."""
        return self.tensor.get_device()

    def tobytes(self) -> bytes:
        """The 128 bytes that a kernel takes, for the tensor where it is now.

        Raises:
            LaunchError: the tensor has moved to where no map can begin, is no longer of the shape that it had, or is on a
                device where nothing can be launched.
        """
        tensor = self.tensor
        address, encoded = self._encoded
        if address and address == tensor.data_ptr() and _layout(tensor) == self._laid_out:
            return encoded
        if expected := self.unfit():
            raise LaunchError(f"{self}: expected {expected}")
        by_executor = getattr(executors.get(tensor.device.type), "tensor_map", None)
        if by_executor is not None:
            return bytes(by_executor(self))
        if not tensor.is_cuda or self.description is None:
            raise LaunchError(f"{self}: no way to run a kernel there; expected a tensor on a CUDA GPU")
        address = tensor.data_ptr()
        encoded = encode(self.description, address)
        self._encoded = address, encoded
        return encoded

    def unfit(self) -> str:
        """Describe what a launch needs instead of this map; empty where it fits."""
        tensor = self.tensor
        if self.description is not None and _layout(tensor) != self._laid_out:
            shape, strides, dtype = self._laid_out
            return (
                f"the tensor as the map was made of it, of shape {tuple(shape)}, strides {strides} and {dtype}: make the "
                "map anew"
            )
        if self.description is None or not tensor.data_ptr() or not _holds(tensor):
            return "a tensor with storage of its own"
        if tensor.data_ptr() % ADDRESS_ALIGNMENT:
            return (
                f"a map of a tensor whose address is a multiple of {ADDRESS_ALIGNMENT}; this one begins at element "
                f"{tensor.storage_offset()} of its storage: make the map of its .clone()"
            )
        if 0 < (major := capability(tensor.device)) < 9:
            return f"compute capability 9.0 or later, which tensor maps need; here it is {major}.x"
        return ""

    def __repr__(self) -> str:
        box = "" if self.description is None else f", box {self.description.box[::-1]}"
        return f"tensor map of a {tuple(self.tensor.shape)} tensor of {self.tensor.dtype} on {self.tensor.device}{box}"


def tensor_map(
    x: Tensor,
    box: int | Sequence[int],
    *,
    swizzle: int = 0,
    element_strides: Sequence[int] | None = None,
    fill: str = "zero",
    element: str | None = None,
    written: bool = False,
) -> TensorMap:
    """A tensor and the box of it that one tiled copy (TMA, `cp.async.bulk.tensor`) moves, as an argument of a launch.

    The kernel takes it by value, as CUDA's `CUtensorMap` or a struct of its own of 128 bytes aligned to 64:
    `struct alignas(64) TensorMap { char bytes[128]; };` and `const __grid_constant__ TensorMap map`. It names coordinates
    from the innermost dimension outwards, as PTX does. Needs compute capability 9.0.

    Args:
        x: of 1 to 5 dimensions, the last one contiguous, the strides of the others multiples of 16 bytes; when a kernel is
            launched, its address must be a multiple of 16. float8 and 8-bit integers are copied as bytes, int16 as uint16.
        box: how many elements of each dimension, in the order of `x.shape`: 1 to 256 each, the last one's a multiple of 16
            bytes.
        swizzle: 0, 32, 64 or 128: how many bytes are permuted in shared memory, so that columns are read without conflicts
            of banks. A line of the box has at most that many bytes.
        element_strides: take every so-manieth element of the box, by dimension in the order of `x.shape`: 1 to 8. The
            hardware ignores that of the last one.
        fill: what a copy finds outside of `x`: "zero", or "nan" for floating-point numbers.
        element: "tf32" to have float32 rounded to it; by default what the dtype says.
        written: whether kernels write to `x` by way of the map: a launch then raises its version, as PyTorch's in-place
            functions do.

    Returns:
        TensorMap: to be given to launches. It holds `x`, and knows it by its address at each launch.

    Raises:
        InputError: CUDA has no tensor map of such a tensor, or box.

    Example:
        >>> code = '''
        ... struct alignas(64) TensorMap { char bytes[128]; };
        ... __global__ void corner(const __grid_constant__ TensorMap map, float* y) {
        ...     __shared__ alignas(128) float tile[2][4];
        ...     __shared__ unsigned long long bar;
        ...     unsigned to = __cvta_generic_to_shared(tile), at = __cvta_generic_to_shared(&bar), done = 0;
        ...     asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at) : "memory");
        ...     asm volatile("fence.proxy.async;" ::: "memory");
        ...     asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 32;" :: "r"(at) : "memory");
        ...     asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        ...                  "[%1, {%2, %3}], [%4];" :: "r"(to), "l"(&map), "r"(4), "r"(1), "r"(at) : "memory");
        ...     while (!done)
        ...         asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.b32 %0, 1, 0, p; }"
        ...                      : "=r"(done) : "r"(at) : "memory");
        ...     for (int i = 0; i < 8; ++i) y[i] = tile[i / 4][i % 4];
        ... }
        ... '''
        >>> corner, x, y = cupyops.Kernel(code, "corner"), torch.arange(24.0).view(3, 8), torch.empty(8)
        >>> with cupyops.simulate("sm_90"):
        ...     corner[1, 1](cupyops.tensor_map(x, (2, 4)), y)
        >>> y.tolist()
        [12.0, 13.0, 14.0, 15.0, 20.0, 21.0, 22.0, 23.0]
    """
    arguments.tensor("x", x)
    if is_dry(x):
        return TensorMap(x, None, bool(written))
    name = _element(x, element)
    if x.layout is not torch.strided or x.is_neg():
        arguments.fail("x", x, "one with storage of its own, as .clone() gives it")
    steps = (1,) * x.dim() if element_strides is None else _numbers("element_strides", element_strides)
    found = Description(name, tuple(x.shape[::-1]), _strides(x), _numbers("box", box), steps, swizzle, fill)
    try:
        _check(found)
    except TypeError:
        raise InputError(f"swizzle is {swizzle!r} and fill {fill!r}, expected an int and a string") from None
    return TensorMap(x, found, bool(written))


SEGMENT = 256  # rows of a segment map: as many as a box has at most


def segment_map(x: Tensor, box: tuple[int, int], *, swizzle: int = 0, written: bool = False) -> TensorMap:
    """Return a tensor map of the rows of `x`, (1, heads, rows, width), in segments of any bounds; for kernels of ours.

    A box is of so many rows and elements of a row. A kernel that wants it from a row on, of which `n` are left in the
    segment, at most SEGMENT, names the coordinates (element, SEGMENT - n, head, row + n): what lies past the segment's end
    is outside of the tensor then, so it is read as zeros, and not written.
    """
    if is_dry(x):
        return TensorMap(x, None, written)
    size, (_, heads, rows, width) = x.element_size(), x.shape
    head, row = (stride * size if of > 1 else 16 for of, stride in zip(x.shape[1:3], x.stride()[1:3]))
    sizes, boxes = (width, SEGMENT, heads, rows + 1), (box[1], box[0], 1, 1)
    before = SEGMENT * row
    found = Description(_ELEMENTS[x.dtype], sizes, (row, head, row), boxes, (1,) * 4, swizzle, "zero", before=before)
    _check(found)
    return TensorMap(x, found, written)


def _element(x: Tensor, asked: str | None) -> str:
    found = _ELEMENTS.get(x.dtype)
    if found is None:
        arguments.fail("x", x, f"one of {', '.join(str(dtype).removeprefix('torch.') for dtype in _ELEMENTS)}")
    if asked is None:
        return found
    if asked != "tf32" or x.dtype is not torch.float32:
        arguments.fail("element", asked, '"tf32", for a tensor of float32, or None')
    return asked


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    """Ints in the order of the dimensions, innermost first."""
    try:
        return tuple(operator.index(one) for one in ((value,) if isinstance(value, int) else value))[::-1]
    except TypeError:
        arguments.fail(name, value, "an int for each dimension of x")


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides in bytes, innermost first but without it. A dimension of one element may have any stride."""
    if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        arguments.fail("x.stride()", x.stride(), "1 in the last dimension, as .contiguous() has it")
    found: list[int] = []
    pitch = x.element_size()
    for size, inner, stride in list(zip(x.shape, x.shape[1:], x.stride()))[::-1]:
        pitch = stride * x.element_size() if size > 1 else min(-(-pitch * inner // 16) * 16, _MOST_STRIDE)
        found.append(pitch)
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _check(description: Description) -> None:
    """Check that CUDA has such a map. The limits stand with the simulator, which is imported here at first use."""
    from ...simulator.tensormap import LimitError, check

    try:
        check(*description[:-2])
    except LimitError as error:
        index = None if error.index is None else len(description.sizes) - 1 - error.index
        name = _ARGUMENTS.get(error.field, error.field)
        found = error.found
        if index is not None:
            name += f"[{index - 1 if error.field == 'strides' else index}]"
        elif isinstance(found, tuple):
            found = found[::-1]
        raise InputError(f"tensor_map: {name} is {found}, expected {error.expected}") from None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Properties of a tensor that its map depends on; `resize_` and `.data` may change them in place."""
    return tensor.shape, tensor.stride(), tensor.dtype


def _holds(tensor: Tensor) -> bool:
    """Return True if the storage reaches to the tensor's last element: it may have been resized."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (tensor.storage_offset() + last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


@functools.lru_cache(maxsize=1024)
def encode(description: Description, address: int) -> bytes:
    """The driver's 128 bytes for a tensor at `address`."""
    buffer = ctypes.create_string_buffer(BYTES + PLACE_ALIGNMENT)
    place = -(-ctypes.addressof(buffer) // PLACE_ALIGNMENT) * PLACE_ALIGNMENT
    encode_at(place, description, address)
    return ctypes.string_at(place, BYTES)


def encode_at(place: int, description: Description, address: int) -> None:
    """Encode a tensor map in memory of the host, at a multiple of `PLACE_ALIGNMENT`."""
    element, sizes, strides, box, steps, swizzle, fill, promotion, before = description
    modes = _SWIZZLES[swizzle], _PROMOTIONS[promotion], _FILLS[fill]
    driver.encode_tensor_map(place, _CODES[element], address - before, sizes, strides, box, steps, modes)
