"""The generated launch: it launches what the full checks accept, with the very same bytes, and hands on everything else."""

import ctypes
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from cupyops._kernel.compile import compiler, source
from cupyops._kernel.compile.binary import Parameter
from cupyops._kernel.compile.declarations import function
from cupyops._kernel.kernel import Kernel
from cupyops._kernel.launch import ctype, driver, fastpath, signature, versions
from cupyops._kernel.launch.configuration import Configuration
from cupyops._util import torch_private, tracing
from cupyops.errors import LaunchError

TEXT = """struct Three { char v[3]; };
template <typename T, int N> __global__ void f(const T* x, bool flag, int n, unsigned char u, float f, double d, Three s,
                                               void* any, unsigned long long m, T value) {}
"""
GRID, BLOCK, SHARED = (2, 3, 1), (32, 1, 1), 64
NAMES = ["x", "flag", "n", "u", "f", "d", "s", "any", "m", "value"]
CONFIGURATION = Configuration(GRID, BLOCK, SHARED)


class Machine:
    """Stands in for the driver and the kernel: what was launched, with which bytes, and what went the full way."""

    def __init__(self, device=-1, fail=False):
        self.launched, self.full, self.table, self.device, self.fail = [], [], {}, device, fail
        self.configure = None

    def load(self, *values):
        """Compile the instance of these template values and put it on the fast path."""
        text = source.load(TEXT)
        types = dict(zip("TN", map(ctype.c_token, values)))
        binary, _ = compiler.compile(text, f"f<{', '.join(types.values())}>", "sm_80")
        arguments = signature.join("f", function(text, "f").parameters, binary.parameters, types)
        letters, offsets = signature.layout(arguments)

        def new_slot():
            buffer = ctypes.create_string_buffer(struct.calcsize(letters))
            pointers = (ctypes.c_void_p * len(offsets))(*(ctypes.addressof(buffer) + offset for offset in offsets))
            return buffer, pointers, ctypes.addressof(pointers)

        slots = []
        self.table[fastpath.key(values)] = fastpath.entry(
            arguments, self.device, 1000 + len(self.table), slots, new_slot
        )
        if self.configure is None:
            self.configure = fastpath.configure(arguments, ("T", "N"), 0, self.table, self.full_path)
        return arguments

    def cu_launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        if self.fail:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        (start,) = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0:1]
        self.launched.append((function, (gx, gy, gz), (bx, by, bz), shared, stream, start))

    def full_path(self, launch, args, template):
        self.full.append((launch, args, template))

    def content(self, arguments):
        """The parameters of the last launch, read from where the driver would read them."""
        letters, _ = signature.layout(arguments)
        return list(struct.unpack(letters, ctypes.string_at(self.launched[-1][-1], struct.calcsize(letters))))


@pytest.fixture(autouse=True, scope="module")
def no_gpu():
    """The two questions to CUDA, answered, before any launch function is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "current_stream", lambda device: 77)
        patch.setattr(torch_private, "current_device", lambda: -1)
        yield


@pytest.fixture(scope="module")
def loaded(no_gpu):
    machine = Machine()
    return machine, machine.load(torch.float32, 4)


@pytest.fixture
def machine(loaded):
    machine, _ = loaded
    machine.launched.clear()
    machine.full.clear()
    return machine


def good():
    return [torch.zeros(3), True, -5, 200, 0.5, 0.1, np.array([1, 2, 3], np.uint8), None, 2**64 - 1, 0.25]


def launch(machine, *args, **template):
    machine.configure(CONFIGURATION, machine.cu_launch)(*args, **(template or {"T": torch.float32, "N": 4}))


def given(**values):
    """Good arguments, some of them others: by the names of the parameters."""
    return [values.get(name, value) for name, value in zip(NAMES, good())]


def test_a_good_launch(machine, loaded):
    values = good()
    launch(machine, *values)
    ((function, grid, block, shared, stream, _),) = machine.launched
    assert (function, grid, block, shared, stream) == (1000, GRID, BLOCK, SHARED, 77) and not machine.full
    assert machine.content(loaded[1]) == signature.checked("f", loaded[1], values, -1)


@pytest.mark.parametrize("value", [True, False, np.int64(3)], ids=repr)
def test_an_integer_of_another_kind(machine, loaded, value):
    """A flag for an int, as a host computes it, costs no full checks either."""
    values = good()
    values[2] = value
    launch(machine, *values)
    assert len(machine.launched) == 1 and not machine.full
    assert machine.content(loaded[1]) == signature.checked("f", loaded[1], values, -1)


@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize(
    "value",
    [
        None, True, np.bool_(True), 0, -1, 255, 256, 2**31, 2**64, 1.5, 1e300, np.float32(1.5), np.int64(3), "x",
        b"xyz", torch.zeros(3), torch.nn.Parameter(torch.zeros(3)), torch.zeros((), dtype=torch.int64),
        torch.zeros(1, dtype=torch.float64), torch.empty(0), torch.zeros(3, device="meta"), np.zeros(3, np.uint8),
        np.zeros(4, np.uint8), [1],
    ],
    ids=repr,
)  # fmt: skip
def test_it_launches_nothing_that_the_full_checks_refuse(machine, loaded, index, value):
    """Each wrong value in each place goes the full way, once; what is launched at once has the same bytes."""
    values = good()
    values[index] = value
    launch(machine, *values)
    assert len(machine.launched) + len(machine.full) == 1
    try:
        expected = signature.checked("f", loaded[1], values, -1)
    except LaunchError:
        assert not machine.launched
    else:
        if machine.launched:
            assert machine.content(loaded[1]) == expected
    for dimensions, args, template in machine.full:
        assert dimensions == CONFIGURATION and template == {"T": torch.float32, "N": 4}
        assert len(args) == 10 and all(a is b for a, b in zip(args, values))


def test_the_fast_path_takes_names(machine, loaded):
    """In any order, with the bytes of the same arguments in order. `any` is a function of Python too."""
    _, arguments = loaded
    named = dict(zip(NAMES, good()))
    function = machine.configure(CONFIGURATION, machine.cu_launch)
    any_, rest = named.pop("any"), dict(reversed(named.items()))
    function(**rest, any=any_, T=torch.float32, N=4)
    assert not machine.launched and machine.full
    _, args, others = machine.full.pop()
    assert len(args) == 7 and all(a is b for a, b in zip(args, named.values()))
    assert others == {"any": any_, "m": named["m"], "value": named["value"], "T": torch.float32, "N": 4}
    values = good()
    function(*values[:8], value=0.25, m=2**64 - 1, N=4, T=torch.float32)
    assert len(machine.launched) == 1 and not machine.full
    assert machine.content(arguments) == signature.checked("f", arguments, values, -1)


def test_what_the_fast_path_hands_on_keeps_its_names(machine):
    function = machine.configure(CONFIGURATION, machine.cu_launch)
    function(*good()[:2], u=1, T=torch.float32, N=4)  # n is missing, and no value may take its place
    ((_, args, given),) = machine.full
    assert len(args) == 2 and given == {"u": 1, "T": torch.float32, "N": 4}


@pytest.mark.parametrize("place", [0, 7])
def test_values_that_are_not_in_memory_go_the_full_way(machine, loaded, place):
    """Views of negatives and, where the dtype is not declared, of conjugates."""
    views = [torch._neg_view(torch.zeros(3))] + [torch.zeros(3, dtype=torch.complex64).conj()] * (place == 7)
    for count, view in enumerate(views, 1):
        values = good()
        values[place] = view
        launch(machine, *values)
        assert not machine.launched and len(machine.full) == count


def test_addresses_of_vector_types():
    """Looked at where the kernel takes a vector type, and nowhere else."""
    arguments = tuple(
        signature.join("f", [(ctype, "x")], [Parameter("u64", 8, 8)], {})[0] for ctype in ("float4*", "float*", "void*")
    )
    assert [boundary for _, boundary in fastpath.boundaries(arguments)] == [16, 1, 1]
    machine = Machine()
    machine.configure = fastpath.configure(arguments, (), 0, machine.table, machine.full_path)
    slot = (ctypes.create_string_buffer(24), None, 0)
    machine.table[()] = fastpath.entry(arguments, -1, 7, [], lambda: slot)
    launched = []
    launch = machine.configure(CONFIGURATION, lambda function, *rest: launched.append(function))
    base = torch.zeros(16)
    start = -base.data_ptr() // 4 % 4
    launch(base[start:], base[1:], base[1:])
    launch(None, None, None)
    assert launched == [7] and len(machine.full) == 1  # the first pointer must be a tensor
    launch(base[start + 1 :], base, base)
    assert launched == [7] and len(machine.full) == 2


def test_structs_are_arrays_or_structured_scalars(machine, loaded):
    """What has as many bytes but is neither, such as a NumPy number, goes the full way."""
    void = np.zeros((), [("v", np.uint8, 3)])
    for value in (np.arange(3, dtype=np.uint8), void, void[()]):
        launch(machine, *[value if index == 6 else one for index, one in enumerate(good())])
        assert machine.content(loaded[1])[6] == value.tobytes()
    assert len(machine.launched) == 3 and not machine.full

    class Other(np.ndarray):
        pass

    launch(machine, *[void.view(Other) if index == 6 else one for index, one in enumerate(good())])
    assert len(machine.launched) == 3 and len(machine.full) == 1


def test_counts_and_names_go_the_full_way_as_they_are(machine):
    for args, template in [
        (good()[:-1], {"T": torch.float32, "N": 4}),
        ([*good(), 1], {"T": torch.float32, "N": 4}),
        ([], {"T": torch.float32, "N": 4}),
        (good(), {"T": torch.float32}),
        (good(), {"T": torch.float32, "N": 4, "M": 1}),
        (good(), {"T": torch.float64, "N": 4}),
        (good(), {"T": torch.float32, "N": 5}),
        (good(), {"T": [1], "N": 4}),
    ]:
        machine.full.clear()
        launch(machine, *args, **template)
        ((_, given, named),) = machine.full
        assert len(given) == len(args) and all(a is b for a, b in zip(given, args)) and named == template
    assert not machine.launched


def test_tensor_without_storage(machine):
    values = good()
    values[0] = torch.zeros(3)
    values[0].untyped_storage().resize_(0)
    launch(machine, *values)
    assert not machine.launched and len(machine.full) == 1


def test_fakes_and_subclasses_go_the_full_way(machine):
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mine(torch.Tensor):
        pass

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(3))
    for value in (fake, torch.zeros(3).as_subclass(Mine)):
        launch(machine, value, *good()[1:])
    assert not machine.launched and len(machine.full) == 2


def test_traced_launches_go_the_full_way(machine):
    with tracing.trace():
        launch(machine, *good())
    assert not machine.launched and len(machine.full) == 1


def test_an_error_of_the_driver_goes_the_full_way():
    machine = Machine(fail=True)
    machine.load(torch.float32, 4)
    launch(machine, *good())
    assert len(machine.full) == 1


def test_another_device():
    machine = Machine(device=0)  # the kernel is loaded on device 0, the tensors are elsewhere
    machine.load(torch.float32, 4)
    launch(machine, *good())
    assert not machine.launched and len(machine.full) == 1


def test_another_current_device(monkeypatch):
    """With several GPUs the current one is looked at."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    machine = Machine()
    machine.load(torch.float32, 4)
    launch(machine, *good())
    assert len(machine.launched) == 1
    monkeypatch.setattr(torch_private, "current_device", lambda: 5)
    machine = Machine()
    machine.load(torch.float32, 4)
    launch(machine, *good())
    assert not machine.launched and len(machine.full) == 1


def test_instances_whose_parameters_differ_in_kind():
    """A `T value` is a float, a double or an integer: each instance packs its own, or goes the full way."""
    machine = Machine()
    first = machine.load(torch.float32, 1)
    instances = {dtype: machine.load(dtype, 1) for dtype in (torch.float64, torch.int32, torch.uint8)}
    for dtype, arguments in instances.items():
        values = [torch.zeros(3, dtype=dtype), *good()[1:-1], 7]
        machine.launched.clear()
        launch(machine, *values, T=dtype, N=1)
        assert machine.launched and machine.content(arguments) == signature.checked("f", arguments, values, -1)
    launch(machine, torch.zeros(3, dtype=torch.uint8), *good()[1:-1], 300, T=torch.uint8, N=1)
    launch(machine, torch.zeros(3, dtype=torch.int32), *good()[1:-1], 1.5, T=torch.int32, N=1)
    assert len(machine.full) == 2
    launch(machine, *good(), T=torch.float32, N=1)
    assert machine.content(first)[-1] == 0.25


def test_threads_do_not_share_a_buffer(monkeypatch):
    """Between packing and the driver's reading no other launch may write there."""
    machine, barrier, wrong = Machine(), threading.Barrier(4, timeout=30), []
    arguments = machine.load(torch.float32, 4)
    letters, _ = signature.layout(arguments)
    local = threading.local()

    def cu_launch(function, *rest):
        barrier.wait()  # every thread has packed its own before any of them is read
        (start,) = ctypes.cast(rest[-2], ctypes.POINTER(ctypes.c_void_p))[0:1]
        found = struct.unpack(letters, ctypes.string_at(start, struct.calcsize(letters)))
        if found[2] != local.n:
            wrong.append((found[2], local.n))

    machine.cu_launch = cu_launch

    def work(n):
        local.n = n
        for _ in range(20):
            values = good()
            values[2] = n
            launch(machine, *values)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong and not machine.full


def test_what_is_written_counts_once(machine):
    x, written = torch.zeros(3), torch.zeros(3)
    launch(machine, *given(x=x, any=written))
    assert len(machine.launched) == 1 and (x._version, written._version) == (0, 1)
    launch(machine, *given(x=x, any=None))
    assert len(machine.launched) == 2 and not machine.full and x._version == 0


def test_what_the_full_path_looks_at_is_left_to_it(machine):
    written = torch.zeros(3)
    for wrong in ({"n": 1.5}, {"u": 256}, {"value": "x"}, {"x": None}):
        launch(machine, *given(any=written, **wrong))
    assert len(machine.full) == 4 and not machine.launched and written._version == 0


@pytest.mark.parametrize("inside", [True, False])
def test_an_inference_tensor_is_launched_at_once(machine, inside):
    with torch.inference_mode():
        written = torch.zeros(3)
    with torch.inference_mode(inside):
        launch(machine, *given(any=written))
    assert len(machine.launched) == 1 and not machine.full


def test_inside_a_role_the_operator_counts(machine):
    written = torch.zeros(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions.this_thread, "in_role", True)
        launch(machine, *given(any=written))
        other = torch.zeros(3)
        thread = threading.Thread(target=launch, args=(machine, *given(any=other)))
        thread.start()
        thread.join()
    assert (written._version, other._version) == (0, 1)  # of this thread alone
    launch(machine, *given(any=written))
    assert written._version == 1


def test_several_that_are_written():
    """Of each one that is given."""
    arguments = signature.join(
        "f", [("float*", "x"), ("float const*", "y"), ("int*", "z")], [Parameter("u64", 8, 8)] * 3, {}
    )
    machine = Machine()
    configure = fastpath.configure(arguments, (), 0, machine.table, machine.full_path)
    slot = (ctypes.create_string_buffer(24), None, 0)
    machine.table[()] = fastpath.entry(arguments, -1, 7, [], lambda: slot)
    launch = configure(CONFIGURATION, lambda *args: machine.launched.append(args))
    x, y, z = torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.int32)
    launch(x, y, z)
    launch(x, None, None)
    launch(x, y, z)
    assert len(machine.launched) == 3 and not machine.full
    assert (x._version, y._version, z._version) == (3, 0, 2)


def test_a_launch_function_kept_from_before_the_first_launch_becomes_a_fast_one(monkeypatch):
    kernel, slow, fast = Kernel("__global__ void g(float* x) {}", "g"), [], []

    def load(configuration, args, template):
        slow.append(args)
        kernel._fast = lambda configuration, launch: lambda *args, **template: fast.append((configuration.grid, args))

    monkeypatch.setattr(kernel, "_launch", load)
    monkeypatch.setattr(driver, "launcher", lambda configuration: None)
    launch = kernel[2, 32]
    for index in range(3):
        launch(index)
    assert slow == [(0,)] and fast == [((2, 1, 1), (1,)), ((2, 1, 1), (2,))]
