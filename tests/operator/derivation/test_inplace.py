"""Operators that declare what they change in place: the same values, versions, gradients and refusals as PyTorch's own."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import Nothing, Plain, executor, forget, fresh

import cupyops
from cupyops import InputError


@pytest.fixture
def kernels():
    """CPU tensors take the route of kernels."""
    with executor():
        yield


@pytest.fixture(params=["reference", "kernels"])
def route(request):
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    return request.param


def exponential(backward=True, reference_backward=True):
    """x = exp(x), and the roles that ran. Its kernel writes as a true one does, behind autograd's back."""
    calls = []

    @cupyops.operator(fresh("exp_"), mutates=("x",))
    def op(x: Tensor) -> Tensor:
        calls.append("reference")
        return x.exp_()

    @op.forward
    def _(x):
        calls.append("forward")
        x.data.exp_()
        return x, ()

    if backward:

        @op.backward
        def _(saved, grad_y, y):
            calls.append("backward")
            return grad_y * y

    if reference_backward:

        @op.reference_backward
        def _(saved, grad_y, y):
            return grad_y * y

    return op, calls


def multiply_add():
    """x += scale * w, with what backward needs saved; returns nothing."""
    calls = []

    @cupyops.operator(fresh("multiply_add_"), mutates="x")
    def op(x: Tensor, w: Tensor, scale: float = 1.0) -> None:
        calls.append("reference")
        x.add_(scale * w * w)

    @op.forward
    def _(x, w, scale):
        calls.append("forward")
        x.data.add_(scale * w.detach() ** 2)
        return None, (2 * scale * w.detach(),)

    @op.backward
    def _(saved, grad_y, needs_grad):
        calls.append("backward")
        return grad_y, grad_y * saved[0] if needs_grad.w else None

    return op, calls


def swap():
    @cupyops.operator(fresh("swap_"), mutates=("a", "b"))
    def op(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        kept = a.clone()
        return a.copy_(b), b.copy_(kept)

    @op.forward
    def _(a, b):
        kept = a.data.clone()
        a.data.copy_(b.data)
        b.data.copy_(kept)

    @op.backward
    def _(saved, grad_a, grad_b):
        return grad_b, grad_a

    return op


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_it_changes_and_returns_its_argument(route):
    op, calls = exponential()
    x = torch.randn(5)
    before, version, expected = x, x._version, x.exp()
    assert op(x) is x is before and x._version > version
    assert torch.equal(x, expected) and calls == ["forward" if route == "kernels" else "reference"]


def test_it_may_return_nothing(route):
    op, calls = multiply_add()
    x, w = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    version = x._version
    assert op(x, w, scale=2.0) is None and x.tolist() == [3.0, 9.0, 19.0] and x._version > version
    assert calls == ["forward" if route == "kernels" else "reference"]


def test_several_are_returned_in_their_order(route):
    op, a, b = swap(), torch.ones(2), torch.zeros(2)
    c, d = op(a, b)
    assert c is a and d is b and a.tolist() == [0.0, 0.0] and b.tolist() == [1.0, 1.0]


def test_a_view_changes_its_base(route):
    op, base = exponential()[0], torch.zeros(4, 3)
    view = base[1:3, 1]
    version = base._version
    op(view)
    assert base.sum() == 2 and base[1, 1] == 1 and base._version > version


def test_a_real_kernel_in_the_simulator():
    kernel = cupyops.Kernel(
        "__global__ void halve(float* x, int n) {\n  if (threadIdx.x < n) x[threadIdx.x] /= 2;\n}\n", "halve"
    )

    @cupyops.operator(fresh("halve_"), mutates=("x",))
    def op(x: Tensor) -> Tensor:
        return x.div_(2)

    @op.forward
    def _(x):
        kernel[1, 32](x, x.numel())

    x = torch.arange(8.0)
    with cupyops.simulate(), cupyops.trace() as trace:
        op(x)
    assert x.tolist() == [i / 2 for i in range(8)] and trace.launches()[0].operator == op.name


def test_gradients(route):
    op, calls = exponential()
    assert torch.autograd.gradcheck(lambda x: op(x * 1), leaf(4))
    assert torch.autograd.gradgradcheck(lambda x: op(x * 1), leaf(4))
    assert ("backward" in calls) == (route == "kernels")
    add, calls = multiply_add()

    def function(x, w):
        x = x * 1
        add(x, w, 3.0)
        return x * w

    assert torch.autograd.gradcheck(function, (leaf(3), leaf(3)))
    assert torch.autograd.gradcheck(lambda w: function(torch.ones(3, dtype=torch.float64), w), leaf(3))
    assert ("backward" in calls) == (route == "kernels")
    assert torch.autograd.gradcheck(lambda a, b: swap()(a * 1, b * 1), (leaf(3), leaf(3)))


def test_gradients_through_a_view_and_its_base(route):
    op = exponential()[0]

    def function(x):
        x = x * 2
        op(x[1:, ::2])
        return x

    assert torch.autograd.gradcheck(function, leaf(3, 4))
    assert torch.autograd.gradgradcheck(function, leaf(3, 4))


def test_without_a_backward_the_reference_is_differentiated(kernels):
    op, calls = exponential(backward=False, reference_backward=False)
    assert torch.autograd.gradgradcheck(lambda x: op(x * 1), leaf(4)) and set(calls) == {"reference"}
    with cupyops.trace() as trace:
        op(leaf(3) * 1)
    assert trace.records[-1].note == "no backward, and the inputs are overwritten"
    op(torch.randn(3))
    assert calls[-1] == "forward"


def test_a_second_derivative_without_reference_backward_is_refused(kernels):
    op = exponential(reference_backward=False)[0]
    x = leaf(3)
    (grad,) = torch.autograd.grad(op(x * 1).sum(), x)
    assert torch.equal(grad, x.exp())
    with pytest.raises(InputError, match="second derivative needs a reference_backward, since forward overwrites x"):
        torch.autograd.grad(op(x * 1).sum(), x, create_graph=True)


def test_what_was_saved_of_it_is_stale(route):
    """As after PyTorch's own in-place operators."""
    op, x = exponential()[0], leaf(3)
    y = x * 1
    z = y.sin()
    with torch.no_grad():
        op(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    y = op(x * 1)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("view", [False, True], ids=["leaf", "view of a leaf"])
def test_a_leaf_that_requires_a_gradient_is_refused(route, view):
    op, x = exponential()[0], leaf(3)
    before = x.detach().clone()
    with pytest.raises((RuntimeError, InputError), match="leaf"):
        op(x[1:] if view else x)
    assert torch.equal(x, before), "nothing has been changed"
    with torch.no_grad():
        op(x)
    assert torch.equal(x, before.exp())


def test_views_that_pytorch_refuses(route):
    op, x = exponential()[0], leaf(4) * 1
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="multiple views"):
        op(x.split(2)[0])
    assert torch.equal(x, before)


def test_an_expanded_tensor_is_refused(kernels):
    op, calls = exponential()
    with pytest.raises(InputError, match="exp__.*: x is expanded: several of its elements are one place"):
        op(torch.zeros(1).expand(3))
    assert not calls


def test_inference_tensors(kernels):
    op, calls = exponential()
    with torch.inference_mode():
        x = op(torch.zeros(2))
    assert x.tolist() == [1.0, 1.0]
    with pytest.raises(InputError, match="x is an inference tensor"):
        op(x)
    assert calls == ["forward"]


@pytest.mark.parametrize("array", [np.zeros(3), [0.0]], ids=["numpy", "list"])
def test_arrays_are_refused(route, array):
    with pytest.raises(InputError, match="works in place and would change a copy|expected a tensor"):
        exponential()[0](array)


def test_errors_of_the_launch_say_where(kernels):
    @cupyops.operator(fresh("bad_"), mutates=("x",))
    def op(x: Tensor) -> None:
        x.add_(1)

    @op.forward
    def _(x):
        raise cupyops.LaunchError("no")

    x = torch.zeros(2)
    with pytest.raises(cupyops.LaunchError) as caught:
        op(x)
    assert caught.value.__notes__ == [f"in the forward of operator {op.name}"] and x._version == 0


def wrong(match, mutates, function, **options):
    with pytest.raises(InputError, match=match):
        cupyops.operator(fresh(), mutates=mutates, **options)(function)


def test_definitions():
    def one(x: Tensor, y: Tensor | None = None, n: int = 1) -> Tensor: ...

    def two(x: Tensor, y: Tensor) -> Tensor: ...

    def number(x: Tensor) -> int: ...

    def mixed(x: Tensor) -> tuple[Tensor, float]: ...

    def nothing(x: Tensor) -> None: ...

    def unannotated(x: Tensor): ...

    for name in ("z", "n", "y"):
        wrong(f"mutates names '{name}', expected each of some of: x", (name,), one)
    wrong("mutates names 'x'", ("x", "x"), two)
    wrong("the reference returns 1 tensors, but .* returns what it mutates, or None: x, y", ("x", "y"), two)
    wrong("expected Tensor or a tuple of them; a number is returned as a tensor without dimensions", (), number)
    wrong("a number is returned as a tensor without dimensions", (), mixed)
    wrong("a number is returned as a tensor without dimensions", ("x",), number)
    wrong("annotated to return <class 'NoneType'>, expected Tensor", (), nothing)
    wrong("annotated to return nothing, expected Tensor", (), unannotated)
    wrong("annotated to return nothing, expected Tensor", ("x",), unannotated)
    wrong("autocast casts copies", ("x",), one, autocast="lower")


def test_a_backward_cannot_name_what_is_overwritten():
    op = exponential(backward=False, reference_backward=False)[0]
    for role in (op.backward, op.reference_backward):
        with pytest.raises(InputError, match="backward asks for 'x', which forward overwrites"):

            @role
            def _(saved, grad_y, x): ...

    @op.backward
    def _(saved, grad_x, x):  # the output, by the name of its gradient
        return grad_x * x

    with executor():
        assert torch.autograd.gradcheck(lambda x: op(x * 1), leaf(3))


def test_the_registered_op_declares_what_it_mutates(route):
    op = multiply_add()[0]
    assert str(op._registration.in_place._schema).endswith("(Tensor(a0!) x, Tensor w, float scale=1.) -> ()")
    torch.library.opcheck(op._registration.in_place, (torch.ones(3), torch.ones(3), 2.0))
    torch.library.opcheck(op._registration.op, (torch.ones(3), leaf(3).float().detach().requires_grad_(), 2.0))

    def function(x, w):
        x = x * 1
        op._registration.in_place(x, w, 2.0)  # as one may call it from torch.ops
        return x * w

    assert torch.autograd.gradcheck(function, (leaf(3), leaf(3)))


@pytest.mark.parametrize("mode", ["fake", "dispatch mode", "subclass"])
def test_dispatcher(route, mode):
    op = exponential()[0]
    if mode == "fake":
        with FakeTensorMode():
            x = torch.empty(3, 2)
            assert op(x) is x and x.shape == (3, 2)
    elif mode == "dispatch mode":
        with Nothing() as seen:
            x = torch.zeros(3)
            assert op(x) is x
        assert x.tolist() == [1.0] * 3 and op._registration.in_place in seen.seen
    else:
        x = torch.zeros(3).as_subclass(Plain)
        assert op(x) is x and x.tolist() == [1.0] * 3


def test_gradient_in_a_dispatch_mode(route):
    op = exponential()[0]

    def function(x):
        with Nothing():
            x = x * 1
            op(x[1:])
            return x

    assert torch.autograd.gradcheck(function, leaf(3))
    bare = exponential(backward=False, reference_backward=False)[0]
    with Nothing():
        assert torch.autograd.gradcheck(lambda x: bare(x * 1), leaf(3))


def test_transforms(route):
    op, x = exponential()[0], torch.randn(3, 2)
    torch.testing.assert_close(torch.func.vmap(lambda x: op(x.clone()))(x), x.exp())
    torch.testing.assert_close(torch.func.grad(lambda x: op(x * 1).sum())(x), x.exp())
    torch.testing.assert_close(torch.func.jvp(lambda x: op(x * 1), (x,), (x,))[1], x * x.exp())


@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
def test_compile(route, gradient):
    exp, add = exponential()[0], multiply_add()[0]

    def function(x, w):
        y = x * 2
        add(y, w, 0.5)
        exp(y[1:])
        return exp(y.sin())

    x, w = (torch.randn(3, 4, requires_grad=gradient) for _ in range(2))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = compiled(x, w), function(x, w)
    torch.testing.assert_close(found, expected)
    if gradient:
        for one, other in zip(torch.autograd.grad(found.sum(), (x, w)), torch.autograd.grad(expected.sum(), (x, w))):
            torch.testing.assert_close(one, other)


def test_compile_changes_an_input(route):
    op = exponential()[0]
    compiled = torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager")
    x = torch.zeros(3)
    version = x._version
    assert compiled(x).tolist() == [1.0] * 3 == x.tolist() and x._version > version


def test_export():
    op = multiply_add()[0]

    class Model(torch.nn.Module):
        def forward(self, x, w):
            y = x * 1
            op(y, w)
            return y

    args = torch.ones(3), torch.ones(3)
    program = torch.export.export(Model(), args)
    assert any(node.target is op._registration.in_place for node in program.graph.nodes)
    assert program.module()(*args).tolist() == [2.0] * 3


def test_a_definition_may_be_given_again():
    op, _ = exponential()
    again = cupyops.operator(op.name, mutates=("x",))(op.reference)
    assert again(torch.zeros(1)).item() == 1.0 and cupyops.operators()[op.name] is again
    forget(again)


@pytest.mark.gpu
def test_on_a_gpu():
    kernel = cupyops.Kernel(
        "template <typename T> __global__ void exp_inplace(T* x, int n) {\n"
        "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  if (i < n) x[i] = exp(x[i]);\n"
        "}\n",
        "exp_inplace<T>",
        T=(torch.float32, torch.float64),
    )

    @cupyops.operator(fresh("exp_"), mutates=("x",))
    def op(x: Tensor) -> Tensor:
        return x.exp_()

    @op.forward
    def _(x):
        kernel[cupyops.ceil_div(x.numel(), 256), 256](x, x.numel(), T=x.dtype)

    @op.backward
    def _(saved, grad_y, y):
        return grad_y * y

    @op.reference_backward
    def _(saved, grad_y, y):
        return grad_y * y

    x = torch.randn(1000, device="cuda")
    expected, version = x.exp(), x._version
    with cupyops.trace() as trace:
        op(x)
    assert trace.routes() == {"kernel"} and x._version > version
    torch.testing.assert_close(x, expected)
    z = torch.randn(5, dtype=torch.float64, device="cuda", requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: op(z * 1), z) and torch.autograd.gradgradcheck(lambda z: op(z * 1), z)
    compiled = torch.compile(lambda x: op(x * 2), fullgraph=True)
    torch.testing.assert_close(compiled(x), (x * 2).exp())
