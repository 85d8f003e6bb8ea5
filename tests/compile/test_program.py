"""The function of a program: its launches through the driver, of which a stand-in runs the kernels in the simulator."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from compiled import compiled, copied, programs, run
from plan_driver import Known
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options

import cupyops
from cupyops._compile import writer
from cupyops._compile.program import MACHINES
from cupyops._util import torch_private
from cupyops.errors import LaunchError


class Machine:
    """Where the second form of a program allocates and launches: on the CPU, and in the simulator."""

    index, several, known = 0, False, None
    begun: ClassVar[list] = []

    def __init__(self, device):
        self.thread = writer.Thread()
        self.view = torch_private.reinterpreted()

    def empty(self, size, stride, dtype):
        made = torch.empty_strided(size, stride, dtype=dtype)
        self.known.know(made)
        return made

    def begin(self):
        self.begun.append((id(self), threading.get_ident()))
        self.thread.ready = True

    def read(self, address, argument):
        """A parameter as the driver reads it."""
        if argument.kind == "pointer":
            at = ctypes.c_uint64.from_address(address).value
            return self.known.at(at, argument.dtype) if at else None
        kind = {("integer", 4): ctypes.c_int32, ("integer", 8): ctypes.c_int64, ("float", 8): ctypes.c_double}
        return kind[argument.kind, argument.size].from_address(address).value

    @staticmethod
    def stream(index):
        return 77

    def launcher(self, kernel, configuration):
        instance = kernel.instance()
        types = instance.arguments(instance.binary("sm_90"))

        def launch(handle, *rest):
            *dims, shared, stream, parameters, extra = rest
            assert (handle, shared, stream, extra) == ("handle", 0, 77, 0)
            assert tuple(dims[3:]) == configuration.block
            pointers = (ctypes.c_void_p * len(types)).from_address(parameters)
            given = [self.read(at, one) for at, one in zip(pointers, types)]
            self.known.launches.append(kernel)
            kernel[tuple(dims[:3]), configuration.block](*given)

        return launch, "handle"


@pytest.fixture
def driver(monkeypatch):
    """Inside, programs launch by a stand-in for the driver from their second run on; it is told of all memory."""
    known = Known()  # not entered as a mode, which Dynamo would trace
    monkeypatch.setattr(Machine, "known", known)
    monkeypatch.setitem(MACHINES, "cpu", Machine)
    with cupyops.simulate("sm_90"):
        yield known


def assert_same_by_driver(function, arguments, known, times=3):
    """Each run gives the same bits; those after the first go to the driver."""
    fast = compiled(function)
    before = len(programs)
    grads = [torch.randn_like(function(*copied(arguments)))]
    first = run(fast, copied(arguments), grads)
    assert not known.launches
    kernels = sum(len(program.kernels) for program in programs[before:])
    for time in range(1, times):
        for (name, want), (_, got) in zip(first, run(fast, copied(arguments), grads), strict=True):
            assert got.stride() == want.stride() and torch.equal(got, want), name
        assert len(known.launches) == time * kernels
    return first


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_()


@pytest.mark.parametrize(
    "function, arguments",
    [
        (lambda x, w, b: F.gelu(F.layer_norm(x, (64,), w, b)), [rand(8, 64), rand(64), rand(64)]),
        (lambda x, w: F.relu(x.view(4, 2, 32).transpose(1, 2) @ w).sum(1), [rand(8, 32), rand(2, 5)]),
        (lambda x, w: F.softmax(F.linear(x, w).float(), -1), [rand(8, 64), rand(16, 64)]),
    ],
    ids=["norm", "views to a product", "product and softmax"],
)
def test_the_second_run_goes_to_the_driver(function, arguments, driver):
    assert_same_by_driver(function, arguments, driver)


def test_sizes_go_to_the_driver_as_numbers(driver):
    def function(x, scale):
        return F.softmax(x * scale, -1) / x.shape[0], x.sum(0), (x * 2).t().contiguous()

    fast = compiled(function, dynamic=True)
    for rows, columns in ((5, 12), (9, 12), (7, 20), (6, 33)):
        x = rand(rows, columns).detach()
        torch.testing.assert_close(fast(x, 1.5 / rows), function(x, 1.5 / rows))
    assert len(driver.launches) == 3 * len(programs[-1].kernels)


def test_an_unpickled_program_goes_to_the_driver_too(driver):
    def function(x, w):
        return F.softmax(F.linear(x, w), -1) * 2

    x, w = rand(8, 64).detach(), rand(16, 64).detach()
    fast = compiled(function)
    want, program = fast(x, w), programs[-1]
    again = GraphPickler.loads(GraphPickler.dumps(program, Options(ops_filter=None)), FakeTensorMode())
    assert again.texts == program.texts and again.kernels == program.kernels
    for _ in range(3):
        (found,) = again.run([x, w])
        assert torch.equal(found, want)
    assert len(driver.launches) == 2 * len(program.kernels) > 0


def test_results_are_those_of_eager(driver):
    x, w = rand(8, 64), rand(16, 64)

    def function(x, w):
        return F.softmax(F.linear(x, w), -1) * 2

    found = assert_same_by_driver(function, [x, w], driver)
    torch.testing.assert_close(found[0][1], function(x, w))


def test_written_inputs_get_values_and_versions(driver):
    def function(x, total):
        total.add_(x.sum(0))
        return x * 2

    fast = compiled(function)
    x = rand(4, 32).detach()
    for time in range(3):
        total = torch.ones(32)
        version = total._version
        fast(x, total)
        torch.testing.assert_close(total, 1 + x.sum(0))
        assert total._version > version, time
    assert driver.launches


def test_inference_tensors_have_no_version_to_raise(driver):
    def function(x):
        return x.add_(1)

    fast = compiled(function)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.zeros(32)
            fast(x)
            assert x.eq(1).all()
    assert driver.launches


@pytest.mark.parametrize("offset", [0, 1])
def test_inputs_off_16_bytes_are_copied_there_and_back(offset, driver):
    def function(x, y):
        y.mul_(x)
        return x + 1

    fast = compiled(function)
    fast(torch.ones(64), torch.ones(64))
    for start in (offset, 0, offset):
        x, y = torch.arange(65.0)[start:][:64], torch.full((65,), 2.0)[start:][:64]
        expected = x * 2
        result = fast(x, y)
        assert torch.equal(result, x + 1) and torch.equal(y, expected)


def test_inputs_of_other_strides_than_the_graph_has(driver):
    """A tangent may have others than those that AOTAutograd has seen."""

    def function(x):
        return torch.sin(x) * x

    fast = compiled(function)
    for grad in (torch.randn(8, 6), torch.randn(6, 8).t(), torch.randn(1, 6).expand(8, 6)):
        x, same = copied([rand(8, 6)] * 2)
        fast(x).backward(grad)
        function(same).backward(grad)
        torch.testing.assert_close(x.grad, same.grad)


@torch.library.custom_op("cupyops_tests::off", mutates_args=())
def off(x: torch.Tensor) -> torch.Tensor:
    """A copy that begins 4 bytes after a boundary."""
    return torch.empty(x.numel() + 1)[1:].copy_(x)


@off.register_fake
def _(x):
    return torch.empty_like(x)


def test_results_of_calls_off_16_bytes(driver):
    fast = compiled(lambda x: off(x) * 2 + x)
    for _ in range(3):
        x = torch.arange(64.0)
        assert torch.equal(fast(x), 3 * x)
    assert driver.launches


def test_tensors_without_elements(driver):
    fast = compiled(lambda x, y: (x * 2, y.exp(), x.sum(0)))
    for _ in range(3):
        empty, ones, total = fast(torch.ones(0, 4), torch.zeros(8))
        assert empty.shape == (0, 4) and ones.eq(1).all() and total.eq(0).all()


def test_views_that_are_returned_share_versions_with_their_base(driver):
    """What forward saves as a view of a result notices that the result is written."""

    def function(x, w):
        y = x * 2
        return y, y.view(2, 16) @ w

    fast = compiled(function)
    for _ in range(3):
        y, z = fast(rand(32), rand(16, 4))
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_the_device_of_the_graph_is_made_current(driver, monkeypatch):
    """`_empty_strided_cuda` and the driver work on the current device."""
    asked = []
    monkeypatch.setattr(Machine, "several", True)
    monkeypatch.setattr(torch_private, "current_device", lambda: asked.append("current") or 0)
    fast = compiled(lambda x: x * 2)
    for _ in range(3):
        fast(torch.ones(32))
    assert len(asked) == 2
    moved = writer.on_device(3, lambda args: args)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda index: asked.append(index) or torch.no_grad())
        assert moved([1]) == [1]
    assert asked[-1] == 3


def test_a_refused_launch_is_an_error_of_the_program(driver, monkeypatch):
    class DriverError(RuntimeError):
        pass

    def refuse(*args):
        raise DriverError("an illegal memory access was encountered")

    fast = compiled(lambda x: x * 2)
    monkeypatch.setattr(Machine, "launcher", lambda *_: (refuse, "handle"))
    fast(torch.ones(32))
    with pytest.raises(LaunchError, match="1 compiled kernel.*\n.*CUPYOPS_DEBUG=1"):
        fast(torch.ones(32))


def test_launches_are_looked_at_again_inside_a_trace(driver):
    fast = compiled(lambda x: x * 2)
    fast(torch.ones(32))
    with cupyops.trace() as trace:
        fast(torch.ones(32))
    assert not driver.launches
    assert [(one.operator, one.route) for one in trace.launches()] == [("torch.compile: inference", "simulator")]


def test_threads_have_parameters_and_a_context_of_their_own(driver, monkeypatch):
    """Each run has a buffer for the addresses of its launches, and the driver launches in threads with a CUDA context."""
    begun, ready = [], threading.Barrier(4)
    monkeypatch.setattr(Machine, "begun", begun)
    fast = compiled(lambda x: (x * 2).sum(0))
    fast(torch.ones(4, 32))

    def call(value):
        x = torch.full((4, 32), float(value))
        driver.know(x)
        ready.wait(60)
        return all(fast(x).eq(8 * value).all() for _ in range(3))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))
    assert len(set(begun)) == len(begun)  # once in each thread; Dynamo may have made a program for these threads
    assert len({thread for _, thread in begun}) == 4


def test_numbers_may_lie_anywhere(driver):
    """A tensor of a single element is read as it lies: no copy for its alignment."""
    fast, x = compiled(lambda x, y: x * y), torch.arange(8.0)
    for place in (1, 2, 3):
        assert torch.equal(fast(x, x[place]), x * place)
    assert not [line for line in programs[-1].source.splitlines() if "a1.data_ptr()" in line]
