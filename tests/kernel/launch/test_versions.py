"""A launch raises the version of what it writes, so that autograd refuses the gradient of what had been saved before."""

import contextlib

import pytest
import torch
from torch import Tensor
from toys import executor, forget, fresh

import cupyops
from cupyops import Kernel
from cupyops._kernel.compile import source
from cupyops._kernel.compile.binary import Parameter
from cupyops._kernel.compile.declarations import function
from cupyops._kernel.launch import signature
from cupyops._kernel.launch.versions import in_role
from cupyops.errors import SimulatorError

TWICE = """
__global__ void twice(const float* x, float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = 2 * x[threadIdx.x]; }
__global__ void twice_(float* x, float* unused, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }
"""


@pytest.fixture
def running(device):
    """Kernels run on the device: by themselves on a GPU, in the simulator on the CPU."""
    with cupyops.simulate() if device.type == "cpu" else contextlib.nullcontext():
        yield device


@pytest.mark.parametrize(("parameter", "written"), [
    ("float* x", True), ("float* __restrict__ x", True), ("float* const x", True),
    ("float* const __restrict__ x", True), ("volatile float* x", True), ("float x[]", True), ("void* x", True),
    ("const float** x", True), ("Row<const float>* x", True), ("Row<Row<const float>, 4>* x", True),
    ("constant* x", True), ("const float* x", False), ("float const* x", False),
    ("const float * const __restrict__ x", False), ("const volatile float* volatile const x", False),
    ("const float x[]", False), ("float* const* x", False), ("const Row<float>* x", False),
])  # fmt: skip
@pytest.mark.parametrize("template", ["", "template <typename T> "])
def test_which_pointers_are_written(parameter, written, template):
    text = f"{template}__global__ void f({parameter.replace('float', 'T') if template else parameter}) {{}}\n"
    declared = function(source.load(text), "f").parameters
    (argument,) = signature.join("f", declared, [Parameter("u64", 8, 8)], {"T": "float"} if template else {})
    assert argument.is_written is written


def test_a_number_is_not_written():
    arguments = signature.join("f", [("int", "n")], [Parameter("u32", 4, 4)], {})
    assert not arguments[0].is_written


@pytest.mark.parametrize("repeat", [1, 3], ids=["first launch", "later launch"])
def test_each_written_tensor_counts_once(running, repeat):
    twice = Kernel(TWICE, "twice")
    x, y = torch.ones(8, device=running), torch.zeros(8, device=running)
    for _ in range(repeat):
        before = y._version
        twice[1, 32](x, y, 8)
    assert y._version == before + 1 and x._version == 0
    assert y.tolist() == [2.0] * 8


@pytest.mark.parametrize("warm", [False, True])
def test_the_gradient_of_what_was_saved_and_overwritten_is_refused(running, warm):
    twice_ = Kernel(TWICE, "twice_")
    if warm:  # the generated launch
        for _ in range(2):
            twice_[1, 32](torch.ones(8, device=running), None, 8)
    w = torch.full((8,), 3.0, device=running)
    x = torch.ones(8, device=running, requires_grad=True)
    y = (x * w).sum()
    twice_[1, 32](w, None, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_view_shares_the_version_of_its_base(running):
    x = torch.ones(16, device=running)
    Kernel(TWICE, "twice_")[1, 32](x[8:], None, 8)
    assert x._version == 1 and x.tolist() == [1.0] * 8 + [2.0] * 8


def test_inference_tensors_have_no_version(running):
    twice = Kernel(TWICE, "twice")
    with torch.inference_mode():
        y = torch.empty(8, device=running)
    x = torch.ones(8, device=running)
    for _ in range(3):
        twice[1, 32](x, y, 8)
        with torch.inference_mode():
            twice[1, 32](x, y, 8)
    assert y.tolist() == [2.0] * 8


def test_a_refused_launch_changes_nothing(running):
    twice, x = Kernel(TWICE, "twice"), torch.ones(8, device=running)
    y = torch.zeros(8, device=running)
    for _ in range(3):
        version = y._version
        with pytest.raises(cupyops.CupyopsError):
            twice[1, 32](x, y, 1.5)
        assert y._version == version
        twice[1, 32](x, y, 8)
        assert y._version == version + 1


def test_an_empty_grid_writes_nothing(running):
    y = torch.zeros(8, device=running)
    Kernel(TWICE, "twice")[0, 32](torch.ones(8, device=running), y, 8)
    assert y._version == 0


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_a_dry_run_changes_no_version(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() if device == "fake" else torch.device("meta"), executor(), in_role():
        x, y = torch.ones(8), torch.zeros(8)
        Kernel(TWICE, "twice")[1, 32](x, y, 8)
    assert y._version == 0


def test_what_no_launch_has_written_is_still_known():
    """A version raised by a launch is no sign that PyTorch has filled the rest."""
    twice, y = Kernel(TWICE, "twice"), torch.empty(8)
    with cupyops.simulate():
        blank = torch.empty(8)
        twice[1, 32](y.fill_(1), blank, 4)
        twice[1, 32](y, blank, 4)
        twice[1, 32](blank, y, 4)
        with pytest.raises(SimulatorError, match="read of `x` where nothing was written"):
            twice[1, 32](blank, y, 5)
        blank.fill_(1)
        twice[1, 32](blank, y, 8)


def test_a_fault_in_the_middle_counts_as_written():
    twice_, x = Kernel(TWICE, "twice_"), torch.ones(8)
    with cupyops.simulate(), pytest.raises(SimulatorError, match="outside `x`"):
        twice_[1, 32](x, None, 9)
    assert x._version == 1


@pytest.fixture
def squares():
    """An operator whose kernels take what they only read by pointers that are not const."""
    code = """
    __global__ void fwd(float* x, float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x]; }
    __global__ void bwd(float* g, float* x, float* y, float* grad_x, int n) {
      if (threadIdx.x < n) grad_x[threadIdx.x] = 2 * g[threadIdx.x] * x[threadIdx.x] + 0 * y[threadIdx.x];
    }"""
    fwd, bwd = Kernel(code, "fwd"), Kernel(code, "bwd")

    @cupyops.operator(fresh("squares"))
    def op(x: Tensor) -> Tensor:
        return x * x

    @op.forward
    def _(x):
        y = torch.empty_like(x)
        fwd[1, 32](x, y, x.numel())
        return y, ()

    @op.backward
    def _(saved, grad_y, x, y):
        grad_x = torch.empty_like(x)
        bwd[1, 32](grad_y, x, y, grad_x, x.numel())
        return grad_x

    yield op
    forget(op)


def test_an_operator_says_itself_what_it_changes(running, squares):
    """Its inputs may be saved elsewhere, and its graph may be gone through twice."""
    for _ in range(3):
        leaf = torch.arange(8.0, device=running, requires_grad=True)
        x = leaf.exp()  # which saves it, too
        y = squares(x) * x
        assert squares(x.detach())._version == x._version == 0
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * 3 * torch.arange(8.0, device=running).exp() ** 3)


@pytest.mark.parametrize("mode", ["traced", "registered"])
def test_an_operator_by_other_routes(running, squares, mode):
    x = torch.arange(8.0, device=running, requires_grad=True)
    y = x.exp()
    with cupyops.trace() if mode == "traced" else contextlib.nullcontext():
        z = torch.compile(squares, backend="eager")(y) if mode == "registered" else squares(y)
        z.sum().backward()
    assert y._version == 0


def test_in_place_counts_once(running):
    twice_ = Kernel(TWICE, "twice_")

    @cupyops.operator(fresh("twice_"), mutates=("x",))
    def op(x: Tensor) -> Tensor:
        return x.mul_(2)

    @op.forward
    def _(x):
        twice_[1, 32](x, None, x.numel())

    x = torch.ones(8, device=running)
    for count in (1, 2, 3):
        op(x)
        assert x._version == count
    forget(op)


def test_a_launch_after_an_operator_that_failed_counts(running):
    twice_ = Kernel(TWICE, "twice_")

    @cupyops.operator(fresh("fails"))
    def op(x: Tensor) -> Tensor:
        return x

    @op.forward
    def _(x):
        raise cupyops.InputError("no")

    x = torch.ones(8, device=running)
    for tensor in (x, x.requires_grad_()):
        with pytest.raises(cupyops.InputError):
            op(tensor)
        y = torch.ones(8, device=running)
        twice_[1, 32](y, None, 8)
        assert y._version == 1
    forget(op)


def test_a_launch_inside_the_backward_of_a_function_of_pytorch(running):
    """Only operators declare what they change: other code in autograd's thread does not."""
    twice_, seen = Kernel(TWICE, "twice_"), []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found = grad.clone()
            twice_[1, 32](found, None, 8)
            seen.append(found._version)
            return found

    x = torch.ones(8, device=running, requires_grad=True)
    Function.apply(x).sum().backward()
    assert seen == [1] and x.grad.tolist() == [2.0] * 8
