"""Tensor maps: tiles against slices, swizzles against the table of the CUDA programming guide, every limit refused."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyops.errors import InputError
from cupyops.simulator.errors import Misaligned, UnsupportedInstruction
from cupyops.simulator.tensormap import TensorMap, TensorMapError

ADDRESS = 3 << 40  # where the device is to know the array


def load(tensor_map, array, coordinates, base=0):
    """The tile as bytes of shared memory: what a copy from global to shared memory would write."""
    memory, first = bytes_of(array)
    shared = np.full(1 << 18, 0xAA, np.uint8)
    addresses, inside, places = tensor_map.tile(coordinates, base)
    size = tensor_map.element_size
    fill = np.frombuffer(tensor_map.fill_bits.to_bytes(size, "little"), np.uint8)
    for address, is_inside, place in zip(addresses, inside, places):
        at = address - ADDRESS + first
        shared[base + place : base + place + size] = memory[at : at + size] if is_inside else fill
    return shared


def bytes_of(array):
    """(the bytes of the array that this one is a view of, the offset of its first element there)."""
    whole = array if array.base is None else array.base
    offset = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return whole.reshape(-1).view(np.uint8), offset


def sliced(array, coordinates, box, steps=None):
    """The box by a loop over its elements, zero outside; indices outermost first."""
    start, counts = coordinates[::-1], [-(-extent // step) for extent, step in zip(box, steps or [1] * len(box))][::-1]
    strides = (steps or [1] * len(box))[::-1]
    out = np.zeros(counts, array.dtype)
    for index in np.ndindex(*counts):
        where = tuple(c + i * s for c, i, s in zip(start, index, strides))
        if all(0 <= w < n for w, n in zip(where, array.shape)):
            out[index] = array[where]
    return out


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.int64])
def test_a_tile_is_a_slice(rank, dtype):
    """In the middle, across each edge, and wholly outside."""
    shape, box = (5, 4, 6, 7, 48)[-rank:], (16, 3, 2, 4, 2)[:rank]
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    tested = TensorMap.of_array(array, ADDRESS, box)
    assert tested.tile_bytes == np.prod(box) * array.itemsize
    for coordinates in itertools.product((0, -3, 41), *[(-1, 2)] * (rank - 1)):
        shared = load(tested, array, coordinates)
        tile = shared[: tested.tile_bytes].view(dtype).reshape(box[::-1])
        np.testing.assert_array_equal(tile, sliced(array, coordinates, box))
        assert (shared[tested.tile_bytes :] == 0xAA).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_strides_sizes_and_element_strides(data):
    rank = data.draw(st.integers(1, 4))
    whole = tuple(data.draw(st.integers(1, 6)) for _ in range(rank - 1)) + (32,)
    parent = np.arange(np.prod(whole), dtype=np.float32).reshape(whole)
    array = parent[tuple(slice(None, None, data.draw(st.integers(1, 2))) for _ in range(rank - 1))]
    array = array[..., : data.draw(st.integers(1, 32))]
    box = [4 * data.draw(st.integers(1, 4)), *(data.draw(st.integers(1, 5)) for _ in range(rank - 1))]
    steps = [data.draw(st.integers(1, 8)) for _ in range(rank)]
    coordinates = [data.draw(st.integers(-9, 9)) for _ in range(rank)]
    tested = TensorMap.of_array(array, ADDRESS, box, element_strides=steps)
    steps[0] = 1  # the hardware ignores it
    wanted = sliced(array, coordinates, box, steps)
    assert tested.tile_bytes == wanted.nbytes
    tile = load(tested, array, coordinates)[: wanted.nbytes].view(np.float32).reshape(wanted.shape)
    np.testing.assert_array_equal(tile, wanted)


@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize("base", [0, 128, 384, 1024, 7 * 128, 2048 + 640])
def test_swizzles_are_those_of_the_programming_guide(span, base):
    """Chunk x of line y lies in chunk ((y + offset) % n) ^ x, the offset being that of the tile's first line."""
    lines = 40
    array = np.arange(lines * span, dtype=np.int64).astype(np.uint8).reshape(lines, span)
    shared = load(TensorMap.of_array(array, ADDRESS, (span, lines), swizzle=span), array, (0, 0), base)
    plain = array.reshape(-1, 8, 16)  # 128-byte lines of eight chunks, as the guide draws them
    found = shared[base : base + array.size].reshape(-1, 8, 16)
    n = span // 16
    offset = base // 128 % n
    for y, x in np.ndindex(plain.shape[:2]):
        np.testing.assert_array_equal(found[y, ((y + offset) % n) ^ x], plain[y, x])


@pytest.mark.parametrize(
    "dtype, element, bits",
    [
        (np.float16, None, 0x7FFF),
        (np.float32, None, 0x7FFFFFFF),
        (np.uint16, "bf16", 0x7FFF),
        (np.float32, "tf32", 0x7FFFFFFF),
    ],
)
def test_what_is_outside_can_be_nan(dtype, element, bits):
    array = np.ones((4, 16), dtype)
    tested = TensorMap.of_array(array, ADDRESS, (16, 2), element=element, fill="nan")
    assert tested.fill_bits == bits
    tile = load(tested, array, (8, 3))[: tested.tile_bytes].view(f"u{array.itemsize}").reshape(2, 16)
    inside = np.zeros((2, 16), bool)
    inside[0, :8] = True
    assert (tile[~inside] == bits).all()
    assert (tile[inside].view(dtype) == 1).all()
    assert TensorMap.of_array(array, ADDRESS, (16, 2), element=element).fill_bits == 0


def test_encode_and_decode():
    full = TensorMap(
        1 << 63,
        "bf16",
        (1 << 32, 5, 4, 3, 2),
        (16, (1 << 40) - 16, 48, 0),
        (64, 256, 1, 1, 1),
        (8, 7, 6, 5, 1),
        128,
        "nan",
    )
    small = TensorMap(16, "u8", (1,), (), (16,))
    for tested in (full, small):
        encoded = tested.encode()
        assert isinstance(encoded, bytes) and len(encoded) == 128
        assert TensorMap.decode(encoded) == tested
        assert TensorMap.decode(bytearray(encoded)) == tested
    assert small.element_strides == (1,)


def test_the_tile_of_a_decoded_map():
    array = np.arange(64, dtype=np.float32).reshape(4, 16)
    tested = TensorMap.decode(TensorMap.of_array(array, ADDRESS, (4, 2)).encode())
    addresses, inside, places = tested.tile((14, 3), 256)
    assert addresses.dtype == places.dtype == np.int64 and inside.dtype == bool
    first = ADDRESS + (3 * 16 + 14) * 4
    assert addresses.tolist() == [first, first + 4, first + 8, first + 12, *(first + 64 + 4 * i for i in range(4))]
    assert inside.tolist() == [True, True, *[False] * 6]
    assert places.tolist() == list(range(0, 32, 4))


@pytest.mark.parametrize(
    "encoded", [bytes(128), b"cupyops\x01", b"cupyops\x02" + bytes(120), b"cupyops\x01" + b"\xff" * 120]
)
def test_other_bytes_are_no_tensor_map(encoded):
    with pytest.raises(TensorMapError, match="no tensor map"):
        TensorMap.decode(encoded)


GOOD = dict(address=ADDRESS, element="f16", sizes=(64, 32), strides=(128,), box=(64, 8), swizzle=128)

LIMITS = [
    (dict(address=ADDRESS + 8), "address is 0x30000000008, expected a multiple of 16"),
    (dict(element="f8"), "element is f8, expected one of u8, u16"),
    (dict(sizes=(), strides=(), box=()), "rank is 0, expected 1 to 5"),
    (dict(sizes=(64,) * 6, strides=(128,) * 5, box=(8,) * 6), "rank is 6, expected 1 to 5"),
    (dict(sizes=(64, 0)), r"sizes[1] is 0, expected 1 to 2^32"),
    (dict(sizes=((1 << 32) + 1, 4)), r"sizes[0] is 4294967297, expected 1 to 2^32"),
    (dict(strides=()), "strides is (), expected 1 of them, for rank 2"),
    (dict(strides=(136,)), "strides[0] is 136 bytes, expected a multiple of 16"),
    (dict(strides=(-128,)), "strides[0] is -128 bytes, expected a multiple of 16 from 0 to below 2^40"),
    (dict(strides=(1 << 40,)), "strides[0] is 1099511627776 bytes, expected a multiple of 16 from 0 to below 2^40"),
    (dict(box=(64,)), "box is (64,), expected 2 extents, for rank 2"),
    (dict(box=(64, 257)), "box[1] is 257, expected 1 to 256"),
    (dict(box=(64, 0)), "box[1] is 0, expected 1 to 256"),
    (dict(box=(12, 8), swizzle=0), "box[0] is 24 bytes, expected a multiple of 16 bytes"),
    (dict(box=(72, 8)), "box[0] is 144 bytes, expected at most the 128 bytes of the swizzle"),
    (dict(element_strides=(1,)), "element_strides is (1,), expected 2 of them, for rank 2"),
    (dict(element_strides=(1, 9)), "element_strides[1] is 9, expected 1 to 8"),
    (dict(element_strides=(1, 0)), "element_strides[1] is 0, expected 1 to 8"),
    (dict(swizzle=16), "swizzle is 16, expected one of (0, 32, 64, 128)"),
    (dict(fill="one"), "fill is one, expected 'zero' or 'nan'"),
    (dict(element="u16", fill="nan"), "fill is 'nan', expected 'zero' for elements of type u16"),
]


@pytest.mark.parametrize("change, message", LIMITS, ids=[message for _, message in LIMITS])
def test_limits(change, message):
    TensorMap(**GOOD)
    with pytest.raises(TensorMapError, match=re.escape(message)) as caught:
        TensorMap(**GOOD | change)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, InputError)


def test_arrays_that_cannot_be_described():
    array = np.zeros((8, 64), np.float16)
    with pytest.raises(TensorMapError, match="innermost stride is 4 bytes, expected 2"):
        TensorMap.of_array(array[:, ::2], ADDRESS, (16, 8))
    with pytest.raises(TensorMapError, match="element is complex64, expected one of"):
        TensorMap.of_array(array.astype(np.complex64), ADDRESS, (16, 8))
    with pytest.raises(TensorMapError, match="element is f32, expected a type of the array's 2 bytes"):
        TensorMap.of_array(array, ADDRESS, (16, 8), element="f32")
    with pytest.raises(TensorMapError, match="rank is 0, expected 1 to 5"):
        TensorMap.of_array(np.zeros((), np.float16), ADDRESS, ())


def test_lines_narrower_than_the_swizzle_are_not_guessed():
    with pytest.raises(UnsupportedInstruction, match="lines of 64 bytes under a swizzle of 128 bytes"):
        TensorMap(**GOOD | dict(box=(32, 8)))
    TensorMap(**GOOD | dict(box=(32, 1)))


def test_how_a_tile_is_asked_for():
    tested = TensorMap(**GOOD)
    with pytest.raises(Misaligned, match="0x1040, not a multiple of 128"):
        tested.tile((0, 0), 0x1040)
    with pytest.raises(ValueError, match="3 coordinates for a tensor map of rank 2"):
        tested.tile((0, 0, 0))
