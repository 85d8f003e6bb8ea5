"""Tensor maps as arguments: what they may be, what a kernel copies by them, and every way in which a launch is made."""

import ctypes
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import plan_driver
import pytest
import tiles
import torch
from plan_samples import counted, plainly, same, warm

import cupyops
from cupyops._kernel.launch import driver, fastpath, signature, tensor_map, versions
from cupyops._kernel.launch.configuration import Configuration
from cupyops._util import torch_private
from cupyops.errors import CompileError, InputError, LaunchError
from cupyops.simulator import OutOfBounds, Race, Uninitialized
from cupyops.simulator import TensorMap as Simulated

STRUCT = "struct alignas(64) TensorMap { char bytes[128]; };"


@pytest.fixture
def hopper():
    with cupyops.simulate(tiles.ARCH):
        yield


def coordinates(*innermost_first):
    return [*innermost_first, *[0] * (3 - len(innermost_first))]


def grid_of(*shape, dtype=torch.float32, device="cpu"):
    """Numbers that differ, as far as the dtype has them."""
    return torch.arange(int(np.prod(shape)), device=device).remainder(251).reshape(shape).to(dtype)


X = torch.zeros(8, 16)
WRONG = [
    (lambda: ([1.0], 4), {}, "x is [1.0] (list), expected a tensor"),
    (lambda: (np.zeros(4), 4), {}, "x is an array of shape (4,)"),
    (lambda: (torch.zeros(()), ()), {}, "tensor_map: x.dim() is 0, expected 1 to 5"),
    (lambda: (torch.zeros(1, 1, 1, 1, 1, 4), (1, 1, 1, 1, 1, 4)), {}, "tensor_map: x.dim() is 6, expected 1 to 5"),
    (lambda: (torch.zeros(0, 16), (8, 4)), {}, "tensor_map: x.shape[0] is 0, expected 1 to 2^32"),
    (lambda: (torch.zeros(16, 0), (8, 4)), {}, "tensor_map: x.shape[1] is 0, expected 1 to 2^32"),
    (lambda: (torch.zeros(8, 3), (8, 4)), {}, "tensor_map: x.stride()[0] is 12 bytes, expected a multiple of 16"),
    (lambda: (torch.zeros(2, 3, 5, 4)[:, :, :, :3], (1, 1, 1, 4)), {}, None),
    (
        lambda: (torch.zeros(4, 6, 3).mT, (1, 1, 8)),
        {},
        "x.stride() is (18, 1, 3) (tuple), expected 1 in the last dimension",
    ),
    (lambda: (X.t(), (4, 4)), {}, "x.stride() is (1, 16) (tuple), expected 1 in the last dimension"),
    (lambda: (X.to(torch.complex64), (8, 4)), {}, "torch.complex64 on cpu, expected one of bool, uint8"),
    (lambda: (X._neg_view(), (8, 4)), {}, "expected one with storage of its own, as .clone() gives it"),
    (lambda: (X.to_sparse(), (8, 4)), {}, "expected one with storage of its own"),
    (lambda: (X, 4), {}, "tensor_map: box is (4,), expected 2 extents, for rank 2"),
    (lambda: (X, (1, 4, 8)), {}, "tensor_map: box is (1, 4, 8), expected 2 extents, for rank 2"),
    (lambda: (X, (257, 4)), {}, "tensor_map: box[0] is 257, expected 1 to 256"),
    (lambda: (X, (4, 0)), {}, "tensor_map: box[1] is 0, expected 1 to 256"),
    (lambda: (X, (4, 3)), {}, "tensor_map: box[1] is 12 bytes, expected a multiple of 16 bytes"),
    (lambda: (X, (4, 4.0)), {}, "box is (4, 4.0) (tuple), expected an int for each dimension of x"),
    (lambda: (X, None), {}, "box is None (NoneType), expected an int for each dimension of x"),
    (
        lambda: (X, (4, 16)),
        {"swizzle": 32},
        "tensor_map: box[1] is 64 bytes, expected at most the 32 bytes of the swizzle",
    ),
    (lambda: (X, (4, 4)), {"swizzle": 48}, "tensor_map: swizzle is 48, expected one of (0, 32, 64, 128)"),
    (lambda: (X, (4, 4)), {"swizzle": [32]}, "swizzle is [32]"),
    (lambda: (X, (4, 4)), {"fill": "one"}, "tensor_map: fill is one, expected 'zero' or 'nan'"),
    (lambda: (X.int(), (4, 4)), {"fill": "nan"}, "tensor_map: fill is 'nan', expected 'zero' for elements of type s32"),
    (
        lambda: (X, (4, 4)),
        {"element_strides": (2,)},
        "tensor_map: element_strides is (2,), expected 2 of them, for rank 2",
    ),
    (lambda: (X, (4, 4)), {"element_strides": (9, 1)}, "tensor_map: element_strides[0] is 9, expected 1 to 8"),
    (lambda: (X, (4, 4)), {"element": "bf16"}, "element is 'bf16' (str), expected \"tf32\", for a tensor of float32"),
    (
        lambda: (X.half(), (4, 8)),
        {"element": "tf32"},
        "element is 'tf32' (str), expected \"tf32\", for a tensor of float32",
    ),
]


@pytest.mark.parametrize(("args", "options", "message"), WRONG)
def test_what_no_map_can_be_made_of(args, options, message):
    if message is None:
        assert cupyops.tensor_map(*args(), **options).description is not None
        return
    with pytest.raises(InputError) as caught:
        cupyops.tensor_map(*args(), **options)
    assert message in str(caught.value)


DTYPES = {
    torch.bool: "u8", torch.uint8: "u8", torch.int8: "u8", torch.float8_e4m3fn: "u8", torch.float8_e5m2: "u8",
    torch.int16: "u16", torch.uint16: "u16", torch.int32: "s32", torch.uint32: "u32", torch.int64: "s64",
    torch.uint64: "u64", torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_an_element_type_of_its_size(dtype):
    found = cupyops.tensor_map(torch.zeros(4, 16).to(dtype), (2, 16)).description
    assert found.element == DTYPES[dtype] and tensor_map._CODES[found.element] in range(12)
    assert Simulated(0, *found[:-2]).element_size == dtype.itemsize


def test_a_description_has_no_address_and_is_equal_for_tensors_alike():
    one, other = (cupyops.tensor_map(torch.zeros(3, 5, 8), (1, 2, 4), swizzle=32) for _ in range(2))
    assert one.description == other.description and hash(one.description) == hash(other.description)
    assert one.description[:5] == ("f32", (8, 5, 3), (32, 160), (4, 2, 1), (1, 1, 1))


def test_a_map_of_segments_begins_before_its_tensor():
    """By as many rows as a box may have: a row that is `n` before a segment's end is at SEGMENT - n, seen from that end."""
    x = torch.zeros(1, 40, 3, 64, dtype=torch.float16).transpose(1, 2)
    found = tensor_map.segment_map(x, (32, 64), swizzle=128).description
    rows = 3 * 64 * 2
    assert found.sizes == (64, 256, 3, 41) and found.strides == (rows, 128, rows) and found.box == (64, 32, 1, 1)
    assert found.before == 256 * rows
    addresses, inside, _ = Simulated(1 << 20, *found[:-2]).tile((0, 256 - 5, 2, 30 + 5))
    assert inside.sum() == 5 * 64 and addresses[0] - (1 << 20) - found.before == 30 * rows + 2 * 128


def test_a_tile_of_a_segment_that_is_wholly_outside():
    """An H100 stops at one where nothing lies before the tensor; by a map that begins with its tensor there are zeros."""
    x = torch.ones(40, 64, dtype=torch.float16)
    plain = cupyops.tensor_map(x[None], (1, 32, 64), swizzle=128)
    of = plain.description._replace(sizes=(64, 256, 41), strides=(128, 128), before=256 * 128)
    segments = tensor_map.TensorMap(x, of)

    def first(map_, column, row, segment):
        out = torch.full((32 * 64,), 7.0, dtype=torch.float16)
        with cupyops.simulate(tiles.ARCH):
            tiles.dump[1, 1, tiles.SHARED](map_, out.view(torch.uint8), column, row, segment, 32 * 128, RANK=3)
        return out.sum().item()

    assert first(segments, 0, 256 - 5, 35) == 5 * 64 and first(plain, 64, 0, 0) == first(plain, 0, 5000, 0) == 0
    for column, row in ((64, 256 - 5), (0, 256)):
        with pytest.raises(OutOfBounds, match="wholly outside of the tensor, by a map that begins where no memory is"):
            first(segments, column, row, 35)


def test_what_is_not_looked_at_on_a_dry_run():
    """Sizes that no tensor map can have, and symbols, are nothing to worry about where nothing is launched."""
    with torch.device("meta"):
        dry = cupyops.tensor_map(torch.empty(0, 3), (1000,))
    assert dry.description is None and "expected a tensor with storage of its own" in refused(dry.tobytes)
    with cupyops.simulate(tiles.ARCH):
        message = refused(lambda: tiles.copy[1, 1, tiles.SHARED](dry, dry, 0, 0, 0, 0, RANK=2))
    assert "which has no memory for a kernel to work on" in message


def test_a_dry_run_of_an_operator(hopper):
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = operator_of_maps()
    with FakeTensorMode():
        assert op(torch.empty(8, 16)).shape == (8, 16)
    compiled = torch.compile(op, backend="eager", fullgraph=True, dynamic=True)
    x = grid_of(8, 16)
    assert torch.equal(compiled(x), 2 * x)


PLACES = {
    1: ((100,), (32,), [(0,), (64,), (96,), (-16,), (128,)]),
    2: ((9, 40), (4, 16), [(0, 0), (16, 4), (32, 8), (-16, 1), (0, -2), (64, 0)]),
    3: ((3, 5, 32), (2, 3, 16), [(0, 0, 0), (16, 2, 1), (16, 4, 2), (-16, -1, -1)]),
}


def box_of(x, place, box):
    """The box by a loop over its elements, zero outside; `place` innermost first."""
    out = torch.zeros(box, dtype=x.dtype)
    for index in np.ndindex(*box):
        at = tuple(start + one for start, one in zip(place[::-1], index))
        if all(0 <= one < size for one, size in zip(at, x.shape)):
            out[index] = x[at]
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_tile_is_a_slice(hopper, rank, dtype):
    shape, box, places = PLACES[rank]
    x = grid_of(*shape[:-1], shape[-1] * (16 if dtype is torch.uint8 else 1), dtype=dtype)
    bytes_ = int(np.prod(box)) * dtype.itemsize
    map_ = cupyops.tensor_map(x, box)
    for place in places:
        if place[0] * dtype.itemsize % 16:
            continue
        out = torch.empty(bytes_, dtype=torch.uint8)
        tiles.dump[1, 1, tiles.SHARED](map_, out, *coordinates(*place), bytes_, RANK=rank)
        assert torch.equal(out.view(dtype).reshape(box), box_of(x, place, box))


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_in_and_out_again(hopper, rank, swizzle):
    """What lies outside of the tensor is not written."""
    shape, box, places = PLACES[rank]
    box = (*box[:-1], swizzle // 4 or box[-1])
    x = grid_of(*shape)
    for place in places:
        if min(place) < 0:
            continue  # at which no tile can be stored
        y = torch.full_like(x, -1)
        maps = cupyops.tensor_map(x, box, swizzle=swizzle), cupyops.tensor_map(y, box, swizzle=swizzle, written=True)
        tiles.copy[1, 1, tiles.SHARED](*maps, *coordinates(*place), int(np.prod(box)) * 4, RANK=rank)
        within = tuple(slice(start, start + extent) for start, extent in zip(place[::-1], box))
        expected = torch.full_like(x, -1)
        expected[within] = x[within]
        assert torch.equal(y, expected)


@pytest.mark.parametrize("span", [32, 64, 128])
def test_a_swizzle_is_that_of_the_programming_guide(hopper, span):
    """Of each 128 bytes of shared memory, 16-byte chunk c lies at c ^ (their number modulo how many a span has)."""
    x = grid_of(32, span // 2, dtype=torch.float16)
    out = torch.empty(32 * span, dtype=torch.uint8)
    map_ = cupyops.tensor_map(x, (32, span // 2), swizzle=span)
    tiles.dump[1, 1, tiles.SHARED](map_, out, 0, 0, 0, 32 * span, RANK=2)
    plain, found = x.view(torch.uint8).reshape(-1, 8, 16), out.reshape(-1, 8, 16)
    for line in range(len(plain)):
        for chunk in range(8):
            assert torch.equal(found[line, chunk ^ line % (span // 16)], plain[line, chunk])


def fills_and_steps(device):
    x = grid_of(6, 8, device=device) + 1
    out = torch.empty(2 * 8 * 4, dtype=torch.uint8, device=device)
    for options in ({"fill": "nan"}, {"fill": "nan", "element": "tf32"}, {}):
        map_ = cupyops.tensor_map(x, (4, 8), element_strides=(2, 1), **options)
        tiles.dump[1, 1, tiles.SHARED](map_, out, 4, 3, 0, out.numel(), RANK=2)
        expected = torch.full((2, 8), torch.nan if options else 0.0)
        expected[:, :4] = x[3::2, 4:].cpu()
        assert torch.equal(out.cpu().view(torch.float32).reshape(2, 8).nan_to_num(-1), expected.nan_to_num(-1))


def test_fills_and_steps(hopper):
    fills_and_steps("cpu")


VIEWS = {
    "rows and columns": lambda: grid_of(12, 64)[2:, 16:],
    "every other row": lambda: grid_of(12, 64)[::2],
    "expanded": lambda: grid_of(16).expand(6, 16),
    "one row, whose stride is no multiple of 16 bytes": lambda: grid_of(1, 33)[:, :16],
    "one column": lambda: grid_of(8, 4)[:, :1],
    "a chunk": lambda: grid_of(8, 48).chunk(3, 1)[1],
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_views(hopper, make):
    """What is beside the view is neither read nor known."""
    x = make()
    out = torch.empty(4 * 16 * 4, dtype=torch.uint8)
    tiles.dump[1, 1, tiles.SHARED](cupyops.tensor_map(x, (4, 16)), out, 0, 0, 0, out.numel(), RANK=2)
    assert torch.equal(out.view(torch.float32).reshape(4, 16), box_of(x, (0, 0), (4, 16)))


def test_a_tensor_that_grows_old_is_found_where_it_is(hopper):
    """A map knows its tensor, not the memory that this had when the map was made."""
    x, y = grid_of(8, 16), torch.zeros(8, 16)
    map_ = cupyops.tensor_map(x, tiles.BOX)
    x.set_(torch.full((8, 16), 7.0))
    for _ in range(2):
        tiles.copy_all[(2, 2), 1, tiles.SHARED](None, map_, cupyops.tensor_map(y, tiles.BOX, written=True), 8, 4)
    assert (y == 7).all()


def test_the_simulator_checks_what_is_copied(hopper):
    """By the name of the parameter."""
    blank, y = torch.empty(8, 16), torch.zeros(8, 16)
    with pytest.raises(Uninitialized, match="`?from`?"):
        tiles.copied(blank, y)
    x = grid_of(8, 16)
    tiles.copied(x, blank)
    tiles.copied(blank, y)  # of which a copy has written all
    assert torch.equal(y, x)


def test_blocks_that_store_to_one_place(hopper):
    code = """
    __global__ void f(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to) {
        load<2>(&from, tile(), 0, 4 * blockIdx.x, 0, 128);
        store<2>(&to, tile(), 0, 0, 0);
    }
    """
    kernel = cupyops.Kernel(tiles.TEXT + code, "f")
    maps = [cupyops.tensor_map(one, tiles.BOX) for one in (grid_of(8, 8), torch.zeros(4, 8))]
    with pytest.raises(Race, match="`to`"):
        kernel[2, 1, tiles.SHARED](*maps)
    kernel[1, 1, tiles.SHARED](*maps)


def refused(launch):
    with pytest.raises(LaunchError) as caught:
        launch()
    return str(caught.value)


def dump_of(given, out=None):
    out = torch.zeros(4) if out is None else out
    return lambda: tiles.dump[1, 1, tiles.SHARED](given, out.view(torch.uint8), 0, 0, 0, 16, RANK=1)


def test_a_tensor_that_no_map_can_begin_at(hopper):
    x = grid_of(20)
    message = refused(dump_of(cupyops.tensor_map(x[1:17], 4)))
    assert (
        "parameter `const TensorMap from` got tensor map of a (16,) tensor of torch.float32 on cpu, box (4,)" in message
    )
    assert (
        "whose address is a multiple of 16; this one begins at element 1 of its storage: make the map of its" in message
    )


def test_a_tensor_whose_storage_is_gone(hopper):
    x = grid_of(64)
    map_ = cupyops.tensor_map(x, 4)
    x.untyped_storage().resize_(16)
    assert "expected a tensor with storage of its own" in refused(dump_of(map_))
    x.untyped_storage().resize_(0)
    assert "expected a tensor with storage of its own" in refused(dump_of(map_))


def test_a_tensor_of_another_shape_by_now(hopper):
    x = grid_of(64)
    map_ = cupyops.tensor_map(x, 4)
    dump_of(map_)()
    x.resize_(32)
    assert "of it, of shape (64,), strides (1,) and torch.float32: make the map anew" in refused(dump_of(map_))
    x.resize_(64)
    dump_of(map_)()
    x.data = x.half()
    assert "strides (1,) and torch.float32: make the map anew" in refused(dump_of(map_))


def test_what_is_no_map(hopper):
    message = refused(dump_of(grid_of(16)))
    assert "got a tensor of torch.float32 on cpu" in message
    assert "expected a NumPy array of 128 bytes, or a tensor map: cupyops.tensor_map(from, box)" in message
    assert "or a tensor map" in refused(dump_of(None)) and "or a tensor map" in refused(dump_of(np.zeros(4)))


OTHERS = {
    "struct Pair { char bytes[64]; };": (
        "Pair map",
        "a NumPy array of 64 bytes; for a tensor map declare `const __grid_",
    ),
    "struct Map { char bytes[128]; };": (
        "Map map",
        "for a tensor map declare `const __grid_constant__ TensorMap map` with",
    ),
    STRUCT: ("const TensorMap* map", "a tensor map is taken by value, as const __grid_constant__ TensorMap map"),
}


@pytest.mark.parametrize("declared", OTHERS)
def test_parameters_that_take_none(hopper, declared):
    parameter, message = OTHERS[declared]
    kernel = cupyops.Kernel(f"{declared} __global__ void f(float* x, {parameter}) {{}}", "f")
    assert message in refused(lambda: kernel[1, 1](torch.zeros(4), cupyops.tensor_map(torch.zeros(16), 4)))


def test_another_device(hopper):
    arguments = arguments_of(tiles.dump, RANK=1)
    map_ = cupyops.tensor_map(grid_of(16), 4)
    args = [map_, torch.empty(4, device="meta"), 0, 0, 0, 16]
    with pytest.raises(
        LaunchError, match="parameter `const TensorMap from` got tensor map .* on the device of the first"
    ):
        signature.checked("dump", arguments, args, 0)


def test_where_nothing_runs():
    map_ = cupyops.tensor_map(grid_of(16), 4)
    assert "no way to run a kernel on cpu" in refused(lambda: tiles.copy[1, 1](map_, map_, 0, 0, 0, 16, RANK=1))
    with pytest.raises(LaunchError, match="no way to run a kernel"):
        map_.tobytes()
    with (
        cupyops.simulate("sm_80"),
        pytest.raises(LaunchError, match=r"9\.0 or later, which tensor maps need; here it is 8"),
    ):
        map_.tobytes()


def test_a_kernel_without_a_pointer(hopper):
    """It goes where its first tensor map is."""
    x = grid_of(8)
    with pytest.raises(OutOfBounds, match="no tensor map"):
        tiles.copy[1, 1](*[np.zeros(128, np.uint8)] * 2, 0, 0, 0, 16, RANK=1)
    assert "no argument tells of memory" in refused(lambda: tiles.copy[1, 1](1, 2, 0, 0, 0, 16, RANK=1))
    for text, args in ((f"{STRUCT} __global__ void f(TensorMap map) {{}}", ()), ("__global__ void f(int n) {}", (1,))):
        kernel = cupyops.Kernel(text, "f")
        with pytest.raises(
            (CompileError, LaunchError), match=r"without a pointer|0 arguments given, 1 declared|no pointer"
        ):
            kernel[1, 1](*args)
    cupyops.Kernel(f"{STRUCT} __global__ void f(TensorMap map, int n) {{}}", "f")[1, 1](cupyops.tensor_map(x, 4), 1)


def test_a_map_that_is_no_constant_of_the_grid(hopper):
    """A copy of it in the kernel's own memory, which the hardware does not read maps from."""
    code = """
__global__ void f(TensorMap from, unsigned char* out) {
    TensorMap own = from;
    own.bytes[out[0]] = from.bytes[0];
    load<1>(&own, tile(), 0, 0, 0, 16);
    out[0] = tile()[0];
}
"""
    kernel = cupyops.Kernel(tiles.TEXT + code, "f")
    with pytest.raises(OutOfBounds, match="__grid_constant__"):
        kernel[1, 1, tiles.SHARED](cupyops.tensor_map(grid_of(16), 4), torch.zeros(4, dtype=torch.uint8))


def test_versions(hopper):
    x, y = grid_of(8, 16), torch.zeros(8, 16)
    by = torch.ones(1)
    tiles.copied(x, y, by)
    assert (x._version, y._version, by._version) == (0, 1, 0)
    with versions.in_role():
        tiles.copied(x, y, by)
    assert (x._version, y._version) == (0, 1)
    with torch.inference_mode():
        z = torch.zeros(8, 16)
    tiles.copied(x, z)
    assert torch.equal(z, x)


def arguments_of(kernel, **template):
    instance = kernel.instance(**template)
    return instance.arguments(instance.binary(tiles.ARCH))


class Fast:
    """A kernel on the fast path of a device -1, with a stand-in for the driver."""

    def __init__(self, kernel, monkeypatch, **template):
        monkeypatch.setattr(torch_private, "current_stream", lambda device: 77)
        monkeypatch.setattr(torch_private, "current_device", lambda: -1)
        self.arguments, self.launched, self.full, table, slots = arguments_of(kernel, **template), [], [], {}, []
        letters, self.offsets = signature.layout(self.arguments)

        def new_slot():
            buffer = ctypes.create_string_buffer(struct.calcsize(letters))
            pointers = (ctypes.c_void_p * len(self.offsets))(*(ctypes.addressof(buffer) + one for one in self.offsets))
            return buffer, pointers, ctypes.addressof(pointers)

        table[fastpath.key(tuple(template.values()))] = fastpath.entry(self.arguments, -1, 7, slots, new_slot)
        anchor = next((index for index, one in enumerate(self.arguments) if one.kind == "pointer"), None)
        configure = fastpath.configure(
            self.arguments, tuple(template), anchor, table, lambda *call: self.full.append(call)
        )
        self.launch = configure(Configuration((1, 1, 1), (1, 1, 1), 0), self._cu_launch)

    def _cu_launch(self, *args):
        pointers = (ctypes.c_void_p * len(self.arguments)).from_address(args[-2])
        self.launched.append([ctypes.string_at(at, one.size) for at, one in zip(pointers, self.arguments)])


def test_the_fast_path(hopper, monkeypatch):
    fast = Fast(tiles.copy_all, monkeypatch)
    x, y, by = grid_of(8, 16), torch.zeros(8, 16), torch.ones(1)
    maps = cupyops.tensor_map(x, tiles.BOX), cupyops.tensor_map(y, tiles.BOX, written=True)
    for given in (by, None):  # where the pointer is null, the launch is about the first map
        fast.launch(given, *maps, 8, 4)
        content = fast.launched.pop()
        assert content[1:3] == [one.tobytes() for one in maps] and not fast.full
        assert struct.unpack("<Q", content[0]) == (0 if given is None else by.data_ptr(),)
    assert (x._version, y._version, by._version) == (0, 2, 0)
    with versions.in_role():
        fast.launch(by, *maps, 8, 4)
    assert y._version == 2
    fast.launch(by, np.zeros(128, np.uint8), maps[1], 8, 4)
    assert len(fast.launched) == 2 and not fast.full


def test_the_fast_path_of_maps_alone(hopper, monkeypatch):
    fast = Fast(tiles.copy, monkeypatch, RANK=1)
    map_ = cupyops.tensor_map(grid_of(16), 4)
    fast.launch(map_, map_, 0, 0, 0, 16, RANK=1)
    assert fast.launched and not fast.full


def test_what_leaves_the_fast_path(hopper, monkeypatch):
    """The full path explains it; nothing is launched, no version raised."""
    fast = Fast(tiles.copy_all, monkeypatch)
    x, by = grid_of(8, 17)[:, 1:], torch.ones(1)
    good = cupyops.tensor_map(grid_of(8, 16), tiles.BOX, written=True)
    meta = cupyops.tensor_map(grid_of(8, 16), tiles.BOX)
    monkeypatch.setattr(type(meta), "get_device", lambda self: 3 if self is meta else self.tensor.get_device())
    flat = grid_of(8, 16)
    reshaped = cupyops.tensor_map(flat, tiles.BOX)
    flat.resize_(4, 32)
    gone = grid_of(8, 16)
    freed = cupyops.tensor_map(gone, tiles.BOX)
    gone.untyped_storage().resize_(0)
    misaligned = torch.zeros(8 * 16 + 4)[1:129].view(8, 16)
    wrong = [meta, reshaped, freed, cupyops.tensor_map(misaligned, tiles.BOX), x, None, np.zeros(64, np.uint8)]
    for number, one in enumerate(wrong):
        fast.launch(by, good, one, 8, 4)
        assert len(fast.full) == number + 1
    fast.launch(None, np.zeros(128, np.uint8), good, 8, 4)  # which tensor it is about, the full path says
    assert len(fast.full) == len(wrong) + 1 and not fast.launched and good.tensor._version == 0


def test_a_struct_of_128_bytes_that_is_not_aligned_takes_no_map_on_the_fast_path(hopper, monkeypatch):
    text = "struct Map { char bytes[128]; }; __global__ void f(float* x, Map map) {}"
    fast, x = Fast(cupyops.Kernel(text, "f"), monkeypatch), torch.zeros(4)
    fast.launch(x, np.zeros(128, np.uint8))
    fast.launch(x, cupyops.tensor_map(torch.zeros(16), 4))
    assert len(fast.launched) == len(fast.full) == 1


class Library:
    """Stands in for libcuda: what its two functions were given."""

    def __init__(self, status=0):
        self.calls, self.status = [], status

        def encode(place, element, rank, address, sizes, strides, box, steps, *modes):
            assert place % 64 == 0
            extents = [list(one)[: rank - (one is strides)] for one in (sizes, strides, box, steps)]
            self.calls.append(("encode", element, rank, address, *extents, *modes))
            ctypes.memmove(place, struct.pack("<Q120x", address), 128)
            return self.status

        def replace(place, address):
            ctypes.memmove(place, struct.pack("<Q", address), 8)
            self.calls.append(("replace", address))
            return self.status

        def name(status, out):
            out._obj.value = b"CUDA_ERROR_INVALID_VALUE"

        self.cuTensorMapEncodeTiled, self.cuTensorMapReplaceAddress = encode, replace
        self.cuGetErrorName = self.cuGetErrorString = name


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(driver, "_library", lambda: library)
    driver._tensor_maps.cache_clear()
    tensor_map.encode.cache_clear()
    yield library
    driver._tensor_maps.cache_clear()
    tensor_map.encode.cache_clear()


def test_what_the_driver_is_given(library):
    """Dimensions innermost first; the numbers are those of cuda.h."""
    x = torch.zeros(3, 5, 64, dtype=torch.bfloat16)
    map_ = cupyops.tensor_map(x, (1, 2, 32), swizzle=64, element_strides=(1, 2, 1), fill="nan")
    assert struct.unpack_from("<Q", tensor_map.encode(map_.description, 4096)) == (4096,)
    extents = [64, 5, 3], [128, 640], [32, 2, 1], [1, 2, 1]
    assert library.calls == [("encode", 9, 3, 4096, *extents, 0, 2, 3, 1)]
    tensor_map.encode(map_.description, 4096)
    assert len(library.calls) == 1  # known
    tensor_map.encode(cupyops.tensor_map(torch.zeros(8), 4, element="tf32").description, 16)
    assert library.calls[1:] == [("encode", 11, 1, 16, [8], [], [4], [1], 0, 0, 3, 0)]


def test_a_driver_that_refuses(library, monkeypatch):
    library.status = 1
    with pytest.raises(driver.DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        tensor_map.encode(cupyops.tensor_map(torch.zeros(8), 4).description, 16)
    driver._tensor_maps.cache_clear()
    del library.cuTensorMapReplaceAddress
    with pytest.raises(LaunchError, match="tensor maps need a driver of CUDA 12"):
        tensor_map.encode(cupyops.tensor_map(torch.zeros(8), 4).description, 32)


def test_the_bytes_of_a_tensor_on_a_gpu_are_kept_while_it_lies_there(library, monkeypatch):
    x = torch.zeros(16)
    map_ = cupyops.tensor_map(x, 4)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(tensor_map, "capability", lambda device: 9)
    first = map_.tobytes()
    assert struct.unpack_from("<Q", first) == (x.data_ptr(),) and map_.tobytes() is first and len(library.calls) == 1
    before = x.data_ptr()
    x.set_(torch.zeros(16))
    assert before != x.data_ptr() == struct.unpack_from("<Q", map_.tobytes())[0] and len(library.calls) == 2
    monkeypatch.setattr(tensor_map, "capability", lambda device: 8)
    x.set_(torch.zeros(16))
    with pytest.raises(LaunchError, match="compute capability 9.0 or later"):
        map_.tobytes()


_names = iter(range(100))


def operator_of_maps(view=lambda x: x):
    """y = 2 * view(x) by way of a temporary, which is copied in and out, forward and backward."""

    @cupyops.operator(f"cupyops_maps::double_{next(_names)}")
    def op(x: torch.Tensor) -> torch.Tensor:
        return view(x) * 2

    def forward(x):
        part = view(x)
        between, y = torch.empty_like(part), torch.empty_like(part)
        tiles.copied(part, between)
        tiles.copied(between, y, torch.full((1,), 2.0, device=x.device))
        return y, ()

    def backward(saved, grad_y):
        grad_y = grad_y.contiguous()
        grad_x = torch.empty_like(grad_y)
        tiles.copied(grad_y, grad_x, torch.full((1,), 2.0, device=grad_y.device))
        return grad_x

    op.forward(forward)
    if view(X) is X:
        op.backward(backward)
    op.reference_backward(lambda saved, grad_y: grad_y * 2)
    return op


@pytest.mark.parametrize("gradient", [False, True])
def test_a_plan_encodes_once_and_then_follows_the_tensors(gradient):
    op = operator_of_maps()
    with plan_driver.driver(tiles.ARCH) as known:
        warm(op, torch.randn(8, 16, requires_grad=gradient))
        known.maps.clear()
        kept = []
        for number in range(4):
            x = torch.randn(8, 16, requires_grad=gradient)
            kept.append(x)  # so that each lies elsewhere
            with counted() as count:
                y = op(x)
                if gradient:
                    y.backward(torch.ones(8, 16))
            assert (count.misses, count.backward_misses) == (0, 0), op._plans.reason
            assert torch.equal(y, 2 * x) and (not gradient or (x.grad == 2).all())
            kept.append(y)
            assert "encoded" not in known.maps[0 if number else len(known.maps) :], known.maps
            assert "replaced" in known.maps
        with counted() as count:
            plain = plainly(op, x)
        assert same(plain, op(x))


def test_a_plan_whose_tensors_lie_where_they_lay_touches_no_map(monkeypatch):
    op, made = operator_of_maps(), {}

    def same_memory(self, *wanted):
        return made.setdefault(wanted, torch.empty_strided(*wanted[:2], dtype=wanted[2]))

    monkeypatch.setattr(plan_driver.Machine, "empty", same_memory)
    with plan_driver.driver(tiles.ARCH) as known, torch.no_grad():
        x = torch.randn(8, 16)
        warm(op, x)
        known.maps.clear()
        with counted() as count:
            x.add_(1)
            assert torch.equal(op(x), 2 * x) and not known.maps and not count.misses
            other = torch.randn(8, 16)
            assert torch.equal(op(other), 2 * other) and known.maps == ["replaced"] and not count.misses


def test_maps_of_views_of_inputs():
    """A sum of addresses; the sizes and strides are the view's."""
    op = operator_of_maps(lambda x: x[2:, 4:12])
    with plan_driver.driver(tiles.ARCH) as known, torch.no_grad():
        for _ in range(6):
            x = torch.randn(8, 16)
            assert torch.equal(op(x), 2 * x[2:, 4:12])
        assert "replaced" in known.maps and op._plans.plans


def test_a_plan_is_left_where_no_map_can_begin():
    op = operator_of_maps()
    with plan_driver.driver(tiles.ARCH), torch.no_grad():
        warm(op, torch.randn(8, 16))
        x = torch.randn(8 * 16 + 4)[1:129].view(8, 16)
        with counted() as count, pytest.raises(LaunchError, match="whose address is a multiple of 16"):
            op(x)
        assert count.misses == 1


def test_maps_that_could_not_be_moved_are_made_anew():
    op = operator_of_maps()
    with plan_driver.driver(tiles.ARCH) as known, torch.no_grad():
        x = torch.randn(8, 16)
        warm(op, x)
        replace, machine = plan_driver.Machine.replace_address, plan_driver.Machine

        def fail(self, place, address):
            replace(self, place, address)
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")

        kept = [x, op(x)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine, "replace_address", fail)
            other = torch.randn(8, 16)
            kept.append(op(other))  # by the plain call
            assert torch.equal(kept[-1], 2 * other)
        for one in (x, other):
            known.maps.clear()
            assert torch.equal(op(one), 2 * one)


def test_in_the_simulator_plans_are_interpreted(hopper):
    op = operator_of_maps()
    warm(op, torch.randn(8, 16, requires_grad=True))
    x = torch.randn(8, 16, requires_grad=True)
    with counted() as count:
        y = op(x)
        y.backward(torch.ones(8, 16).expand(8, 16))
    assert (count.misses, count.backward_misses) == (0, 0), op._plans.reason
    assert torch.equal(y, 2 * x) and (x.grad == 2).all()


def test_other_boxes_are_other_recordings(hopper):
    """What a map says is among the constants that two recordings must agree in."""
    x = grid_of(8, 16)
    one, other, third = (
        tensor_map.TensorMap(x, cupyops.tensor_map(x, box, **more).description)
        for box, more in (((4, 8), {}), ((4, 8), {"swizzle": 32}), ((2, 8), {}))
    )
    from cupyops._operator.derivation.constants import MapRef, Ref, freeze

    keys = {freeze((MapRef(Ref(0), map_.description, False),)) for map_ in (one, other, third, one)}
    assert len(keys) == 3 and freeze(MapRef(Ref(0), one.description, True)) not in keys


@pytest.mark.gpu
class TestGPU:
    @pytest.fixture(autouse=True)
    def hopper_or_later(self):
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("no tensor maps before compute capability 9.0")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, dtype):
        x = grid_of(9, 64, device="cuda").to(dtype)
        bytes_ = 4 * 32 * dtype.itemsize
        for place in ((0, 0), (32, 4), (48, 7)):
            out = torch.empty(bytes_, dtype=torch.uint8, device="cuda")
            tiles.dump[1, 1, tiles.SHARED](cupyops.tensor_map(x, (4, 32)), out, *place, 0, bytes_, RANK=2)
            bits = x.view(torch.uint8).reshape(9, 64, -1).cpu()
            expected = torch.zeros(4, 32, dtype.itemsize, dtype=torch.uint8)
            part = bits[place[1] : place[1] + 4, place[0] : place[0] + 32]
            expected[: part.shape[0], : part.shape[1]] = part
            assert torch.equal(out.cpu().reshape(expected.shape), expected)

    @pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
    @pytest.mark.parametrize("rank", [1, 2, 3])
    def test_as_in_the_simulator(self, rank, swizzle):
        """Shared memory, byte for byte, and what is stored."""
        shape, box, places = PLACES[rank]
        box = (*box[:-1], swizzle // 4 or box[-1])
        bytes_ = int(np.prod(box)) * 4
        found = {}
        for device in ("cpu", "cuda"):
            found[device] = []
            x = grid_of(*shape, device=device)
            for place in places:
                out = torch.empty(bytes_, dtype=torch.uint8, device=device)
                y = torch.full_like(x, -1)
                maps = [cupyops.tensor_map(one, box, swizzle=swizzle) for one in (x, y)]
                with cupyops.simulate(tiles.ARCH):
                    tiles.dump[1, 1, tiles.SHARED](maps[0], out, *coordinates(*place), bytes_, RANK=rank)
                    if min(place) >= 0:
                        tiles.copy[1, 1, tiles.SHARED](*maps, *coordinates(*place), bytes_, RANK=rank)
                found[device] += [out.cpu(), y.cpu()]
        assert all(map(torch.equal, found["cpu"], found["cuda"]))

    @pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
    def test_views(self, make):
        x = make()
        whole = x.as_strided((x.untyped_storage().nbytes() // 4,), (1,), 0)
        there = whole.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
        out = torch.empty(4 * 16 * 4, dtype=torch.uint8, device="cuda")
        tiles.dump[1, 1, tiles.SHARED](cupyops.tensor_map(there, (4, 16)), out, 0, 0, 0, out.numel(), RANK=2)
        assert torch.equal(out.cpu().view(torch.float32).reshape(4, 16), box_of(x, (0, 0), (4, 16)))

    def test_fills_and_steps(self):
        fills_and_steps("cuda")

    def test_first_launches_and_fast_ones(self):
        """With and without a pointer; a tensor that has moved; versions."""
        kernel = cupyops.Kernel(tiles.TEXT, "copy_all")
        by = torch.full((1,), 3.0, device="cuda")
        x, y = torch.randn(40, 64, device="cuda"), torch.zeros(40, 64, device="cuda")
        maps = cupyops.tensor_map(x, tiles.BOX), cupyops.tensor_map(y, tiles.BOX, written=True)
        for number, given in enumerate((by, None, by, None)):
            kernel[(8, 10), 1, tiles.SHARED](given, *maps, 8, 4)
            assert torch.equal(y, x if given is None else x * 3) and (x._version, y._version) == (0, number + 1)
        x.set_(torch.randn(40, 64, device="cuda"))
        kernel[(8, 10), 1, tiles.SHARED](None, *maps, 8, 4)
        assert torch.equal(y, x)
        with pytest.raises(LaunchError, match="on the device of the first one, cuda"):
            kernel[(8, 10), 1, tiles.SHARED](by, cupyops.tensor_map(torch.zeros(40, 64), tiles.BOX), maps[1], 8, 4)
        misaligned = cupyops.tensor_map(torch.zeros(65, device="cuda")[1:].view(4, 16), tiles.BOX)
        with pytest.raises(LaunchError, match="whose address is a multiple of 16"):
            kernel[(8, 10), 1, tiles.SHARED](by, misaligned, maps[1], 8, 4)

    @pytest.mark.parametrize("gradient", [False, True])
    def test_plans(self, gradient):
        """Replaced addresses are what the hardware reads: every call has tensors elsewhere."""
        op = operator_of_maps()
        warm(op, torch.randn(40, 64, device="cuda", requires_grad=gradient))
        kept = []
        for _ in range(20):
            x = torch.randn(40, 64, device="cuda", requires_grad=gradient)
            with counted() as count:
                y = op(x)
                if gradient:
                    grad_y = torch.randn_like(y)
                    y.backward(grad_y)
            assert (count.misses, count.backward_misses) == (0, 0), op._plans.reason
            assert torch.equal(y, 2 * x) and (not gradient or torch.equal(x.grad, 2 * grad_y))
            kept += [x, y]

    def test_in_a_thread_that_has_made_no_cuda_call(self):
        """The driver encodes no map where no context is current."""
        x, y = torch.randn(40, 64, device="cuda"), torch.zeros(40, 64, device="cuda")
        kernel = cupyops.Kernel(tiles.TEXT, "copy_all")

        def copied():
            maps = cupyops.tensor_map(x, tiles.BOX), cupyops.tensor_map(y, tiles.BOX, written=True)
            for _ in range(2):
                kernel[(8, 10), 1, tiles.SHARED](None, *maps, 8, 4)

        for _ in range(2):  # for the second thread the kernel is on the fast path
            y.zero_()
            torch.cuda.synchronize()
            tensor_map.encode.cache_clear()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(copied).result()
            torch.cuda.synchronize()
            assert torch.equal(y, x)

    def test_a_cuda_graph(self):
        x, y = torch.randn(40, 64, device="cuda"), torch.zeros(40, 64, device="cuda")
        tiles.copied(x, y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tiles.copied(x, y)
        x.mul_(2)
        graph.replay()
        assert torch.equal(y, x)

    def test_the_driver_refuses_nothing_that_the_limits_allow(self):
        x = torch.zeros(2, 3, 4, 5, 256, dtype=torch.uint8, device="cuda")
        for box, options in (
            ((1, 1, 1, 1, 256), {}),
            ((256, 1, 1, 1, 16), {}),
            ((1, 1, 1, 256, 128), {"swizzle": 128}),
            ((1, 1, 2, 5, 128), {"swizzle": 128, "element_strides": (8, 8, 8, 8, 1)}),
        ):
            assert len(cupyops.tensor_map(x, box, **options).tobytes()) == 128
        with pytest.raises(driver.DriverError, match="CUDA_ERROR_INVALID_VALUE"):  # so that the above says something
            tensor_map.encode(
                cupyops.tensor_map(x, (1, 1, 1, 1, 16)).description._replace(swizzle=0, box=(257,) * 5), 4096
            )
