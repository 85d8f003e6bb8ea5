"""The author's kit: definitions, routes, derivatives, PyTorch's transforms, modes and compilers, on toy operators.

Their "kernels" are plain PyTorch that says when it runs; a stand-in executor makes the operators take the kernel route on
CPU tensors. What is asked of the routes here is asked of real kernels by each operator's own tests.
"""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import toys
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from toys import Nothing, Plain, Wrapper
from toys import clean_registry as clean_registry

import cupyops
from cupyops.errors import InputError


@pytest.fixture(params=["kernels", "reference"])
def route(request):
    """Each test twice: by the kernel route, and by the reference route as on a machine without a GPU."""
    if request.param == "kernels":
        with toys.executor():
            yield "kernel"
    else:
        yield "reference"


@pytest.fixture
def kernels():
    with toys.executor():
        yield


def doubles(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


def three(grad=True):
    """x, weight, bias for `product`."""
    return doubles(3, 4, grad=grad), doubles(4, grad=grad), doubles(3, 4, grad=grad)


def routes(function):
    """(route, operator) of each record of a call, and the result."""
    with cupyops.trace() as trace:
        result = function()
    return [(record.route, record.operator.rpartition("::")[2]) for record in trace.records], result


class TestDefinition:
    @pytest.mark.parametrize("name", ["relu", "a::", "::b", "a:b", "a::b::c", "a b::c", "a::b-c", "1a::b", ""])
    def test_bad_name(self, name):
        with pytest.raises(InputError, match='is not of the form "namespace::name", such as "mylib::my_op"$'):
            cupyops.operator(name)

    def test_bad_autocast(self):
        with pytest.raises(InputError, match="autocast is 'up', expected"):
            cupyops.operator("a::b", autocast="up")

    def test_missing_annotation(self):
        with pytest.raises(InputError, match=r"t::f: parameter scale of the reference needs a type annotation"):

            @cupyops.operator("t::f")
            def f(x: Tensor, scale) -> Tensor: ...

    @pytest.mark.parametrize("kind", ["args", "kwargs"])
    def test_variadic(self, kind):
        def args(x: Tensor, *rest: Tensor) -> Tensor: ...

        def kwargs(x: Tensor, **rest: Tensor) -> Tensor: ...

        with pytest.raises(InputError, match=r"t::f: \*+rest of the reference stands for any number of arguments"):
            cupyops.operator("t::f")({"args": args, "kwargs": kwargs}[kind])

    def test_without_a_name(self):
        with pytest.raises(InputError, match=r'write @cupyops.operator\("namespace::swish"\)'):

            @cupyops.operator
            def swish(x: Tensor) -> Tensor: ...

        with pytest.raises(InputError, match="operator name 3 is no text"):
            cupyops.operator(3)

    def test_keyword_only(self):
        with pytest.raises(InputError, match=r"t::f: parameter scale .* by keyword alone.*: leave the \* out"):

            @cupyops.operator("t::f")
            def f(x: Tensor, *, scale: float = 1.0) -> Tensor: ...

    @pytest.mark.parametrize("end", ["_backward", "_functional", "_functional_backward"])
    @pytest.mark.parametrize("first", [0, 1])
    def test_names_that_other_ops_of_an_operator_have(self, end, first):
        """In either order; the second is refused, and the first is as it was."""
        name = toys.fresh()

        def define(name):
            @cupyops.operator(name)
            def op(x: Tensor) -> Tensor:
                return 2 * x

            return op

        names = [name, name + end]
        kept = define(names[first])
        with pytest.raises(
            InputError, match=f"{name}{end} is (what torch.ops calls|an operator already).*another name"
        ):
            define(names[1 - first])
        with Nothing():
            assert kept(torch.ones(1)).item() == 2

    @pytest.mark.parametrize("launch", [
        lambda x, w, scale, extra: None, lambda x, w: None, lambda x: None, lambda w, x, scale: None,
        lambda x, w, *, scale: None,
    ])  # fmt: skip
    @pytest.mark.parametrize("role", ["forward", "unsupported"])
    def test_a_role_takes_what_the_reference_takes(self, launch, role):
        @cupyops.operator(toys.fresh())
        def op(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
            return x * w * scale

        with pytest.raises(
            InputError, match=rf"{role} takes \(.*\), expected what the reference takes.*: \(x, w, scale\)"
        ):
            getattr(op, role)(launch)
        for good in (lambda a, b, c: None, lambda *args: None, lambda x, w, scale=1.0, more=3: None):
            getattr(op, role)(good)

    def test_forward_returns_memory_of_its_own(self, kernels):
        for wrong, said in (
            (lambda x: (x, ()), "forward returned its argument x"),
            (lambda x: (x.view(-1), ()), "forward returned a view of its argument x"),
        ):

            @cupyops.operator(toys.fresh())
            def op(x: Tensor) -> Tensor:
                return x * 1

            op.forward(wrong)
            with pytest.raises(InputError, match=f"{said}; return memory of its own: torch.empty_like\\(x\\)"):
                op(torch.ones(3))

    def test_annotation_that_names_nothing(self):
        def f(x: "Nowhere") -> Tensor: ...  # noqa: F821

        with pytest.raises(InputError, match="t::f: an annotation of the reference cannot be resolved: .*Nowhere"):
            cupyops.operator("t::f")(f)

    def test_no_tensor(self):
        def f(n: int) -> Tensor: ...

        with pytest.raises(InputError, match="has no parameter annotated Tensor"):
            cupyops.operator("t::f")(f)

    @pytest.mark.parametrize("returned", [None, int, tuple[Tensor, int], list[Tensor], Tensor | None])
    def test_return_annotation(self, returned):
        def f(x): ...

        f.__annotations__ = {"x": Tensor} | ({} if returned is None else {"return": returned})
        with pytest.raises(InputError, match="expected Tensor or a tuple of them"):
            cupyops.operator("t::f")(f)

    @pytest.mark.parametrize("annotation", [dict, dict[str, Tensor], object, set[int], tuple[int, str]])
    def test_annotation_without_a_schema(self, annotation):
        def f(x, y): ...

        f.__annotations__ = {"x": Tensor, "y": annotation, "return": Tensor}
        with pytest.raises(InputError, match="t::f: "):
            cupyops.operator("t::f")(f)
        assert "t::f" not in cupyops.operators()

    def test_a_failed_definition_leaves_nothing(self):
        for _ in range(2):
            with pytest.raises(InputError):
                cupyops.operator("t::nothing_left")(lambda x: x)
        assert "t::nothing_left" not in cupyops.operators() and not hasattr(torch.ops.t, "nothing_left")

    @pytest.mark.parametrize("backward", [
        lambda grad_y, x: None, lambda: None, lambda saved: None, lambda saved, dy: None,
        lambda ctx, grad_y: None,
    ])  # fmt: skip
    def test_backward_that_begins_otherwise(self, backward):
        op, _ = toys.exponential()
        with pytest.raises(InputError, match=r"a backward begins with \(saved, grad_y\); this one has \("):
            op.backward(backward)
        with pytest.raises(InputError, match=r"a backward begins with \(saved, grad_y\)"):
            op.reference_backward(backward)

    def test_backward_of_several_outputs(self):
        op, _ = toys.extremum()
        with pytest.raises(InputError, match=r"begins with \(saved, grad_y0, grad_y1, grad_y2\)"):
            op.backward(lambda saved, grad_y: None)

    def test_backward_that_asks_for_the_unknown(self):
        op, _ = toys.product()
        with pytest.raises(
            InputError, match=r"backward asks for 'z'; it can have .*needs_grad.*y.*x, weight, bias, shift"
        ):
            op.backward(lambda saved, grad_y, z: None)

    def test_too_many_gradients(self, kernels):
        op, _ = toys.exponential()
        op.backward(lambda saved, grad_y, y: (grad_y, grad_y))
        with pytest.raises(InputError, match="backward gave 2 gradients for 1 tensors"):
            op(doubles(3)).sum().backward()

    def test_trailing_gradients_may_be_left_out(self, kernels):
        op, _ = toys.product()
        op.backward(lambda saved, grad_y, weight: grad_y * weight)
        x, weight, bias = three()
        x_grad, weight_grad, bias_grad = torch.autograd.grad(
            op(x, weight, bias).sum(), (x, weight, bias), allow_unused=True
        )
        assert torch.equal(x_grad, weight.expand(3, 4)) and weight_grad is None and bias_grad is None

    def test_missing_gradient_through_the_dispatcher(self, kernels):
        """There, a gradient that is wanted and not given cannot be passed on, and is told."""
        op, _ = toys.product()
        op.backward(lambda saved, grad_y, weight: grad_y * weight)
        with Nothing():
            y = op(*three())
            with pytest.raises(InputError, match="backward gave no gradient for weight, bias"):
                y.sum().backward()

    def test_an_output_called_as_a_parameter(self):
        """`grad_x` names the output `x`: the parameter goes before it."""

        @cupyops.operator(toys.fresh())
        def op(x: Tensor) -> Tensor:
            return 2 * x

        role = op.backward(lambda saved, grad_x, x: grad_x)
        assert role is not None and op.definition.launch_backward.inputs == {0}

    def test_forward_is_told_what_backward_will_be_asked(self, kernels):
        """Where eager autograd records the call, and nowhere else."""

        @cupyops.operator(toys.fresh())
        def op(x: Tensor, n: int, y: Tensor) -> Tensor:
            return n * x * y

        told = []

        @op.forward
        def _(x, n, y, needs_grad=None):
            told.append(needs_grad)
            return n * x * y, ()

        @op.backward
        def _(saved, grad_z, x, n, y):
            return grad_z * n * y, grad_z * n * x

        x, y = doubles(3), doubles(3).detach()
        op(x, 2, y).sum().backward()
        assert (told[-1].x, told[-1].n, told[-1].y) == (True, False, False)
        with torch.no_grad():
            op(x, 2, y)
        assert told[-1] is None
        op(x.detach(), 2, y)
        assert told[-1] is None
        with Nothing():
            op(x, 2, y)
        assert told[-1] is None and len(told) == 4

    def test_backward_is_told_when_it_is_the_last(self, kernels):
        """Then it may return what forward saved: no other call will see that."""

        @cupyops.operator(toys.fresh())
        def op(x: Tensor) -> Tensor:
            return 2 * x

        told = []

        @op.forward
        def _(x, needs_grad=None):
            return 2 * x, () if needs_grad is None else (torch.full_like(x, 2),)

        @op.backward
        def _(saved, grad_y, last):
            told.append(last)
            return saved[0].mul_(grad_y) if last and saved else 2 * grad_y

        x = doubles(3)
        y = op(x)
        kept = torch.autograd.grad(y.sum(), x, retain_graph=True)
        made = torch.autograd.grad(y.sum(), x, create_graph=True)
        final = torch.autograd.grad(y.sum(), x)
        assert told == [False, True]  # a graph is made by the reference
        assert all(torch.equal(grad, torch.full_like(x, 2)) for (grad,) in (kept, made, final))
        with Nothing():
            op(x).sum().backward()
        assert told[2:] == [False] and torch.equal(x.grad, torch.full_like(x, 2))

    def test_errors_carry_the_operator(self, kernels):
        op, _ = toys.exponential()

        @op.forward
        def _(x):
            raise InputError("no luck")

        with pytest.raises(InputError, match="no luck") as caught:
            op(doubles(3))
        assert any(f"in the forward of operator {op.name}" in note for note in caught.value.__notes__)

    def test_what_it_shows(self):
        op, _ = toys.product()
        assert repr(op) == f"Operator({op.name})" and op.__doc__ == "y = x * weight + shift * bias."
        assert cupyops.operators()[op.name] is op

    def test_registry_is_a_copy(self):
        cupyops.operators().clear()
        assert "cupyops::relu" in cupyops.operators()

    def test_string_annotations(self):
        """As under `from __future__ import annotations`."""

        @cupyops.operator(toys.fresh())
        def op(x: "Tensor", n: "int | None" = None) -> "tuple[Tensor, Tensor]":
            return x + 1, x * (n or 1)

        assert [t.tolist() for t in op(torch.ones(1), 3)] == [[2.0], [3.0]]


@pytest.mark.filterwarnings("ignore:cupyops_tests.* is defined anew:UserWarning")
class TestRedefinition:
    """A notebook cell run again."""

    def define(self, name, factor):
        @cupyops.operator(name)
        def op(x: Tensor) -> Tensor:
            return factor * x

        return op

    def test_the_new_one_serves_every_route(self):
        name = toys.fresh()
        self.define(name, 2)(torch.ones(2))
        op = self.define(name, 3)
        x = torch.ones(2, requires_grad=True)
        assert cupyops.operators()[name] is op
        assert op(x).tolist() == [3.0, 3.0]
        with Nothing():
            assert op(x).tolist() == [3.0, 3.0]
        torch._dynamo.reset()
        y = torch.compile(op, fullgraph=True, backend="aot_eager")(x)
        assert y.tolist() == [3.0, 3.0]
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [3.0, 3.0]

    def test_another_signature(self):
        name = toys.fresh()
        self.define(name, 2)(torch.ones(2))

        @cupyops.operator(name)
        def op(x: Tensor, y: Tensor, scale: float) -> Tensor:
            return scale * (x + y)

        with Nothing():
            assert op(torch.ones(2), torch.ones(2), 0.5).tolist() == [1.0, 1.0]

    @pytest.mark.parametrize("compiled", [False, True])
    def test_whoever_has_the_old_one_has_the_old_one(self, compiled):
        """The object, functions compiled with it, exported programs, and graphs that are yet to go backward."""
        name, x = toys.fresh(), torch.ones(2, requires_grad=True)
        old = self.define(name, 2)
        function = torch.compile(lambda x: old(x), fullgraph=True, backend="aot_eager")
        program = torch.export.export(toys.Module(old), (torch.ones(2),)) if compiled else None
        graph = function(x) if compiled else None
        new = self.define(name, 3)
        with Nothing():
            assert new(x).tolist() == [3.0, 3.0] and old(x).tolist() == [2.0, 2.0]
        assert function(x).tolist() == [2.0, 2.0]
        assert torch.compile(lambda x: (old(x), new(x)), backend="aot_eager", fullgraph=True)(x)[1].tolist() == [
            3.0,
            3.0,
        ]
        if compiled:
            assert program.module()(torch.ones(2)).tolist() == [2.0, 2.0]
            assert torch.autograd.grad(graph.sum(), x)[0].tolist() == [2.0, 2.0]
        assert torch.autograd.grad(function(x).sum(), x)[0].tolist() == [2.0, 2.0]

    def test_torch_ops_has_the_newest_where_it_has_none_yet(self):
        name = toys.fresh()
        old = self.define(name, 2)
        self.define(name, 3)
        namespace, _, short = name.partition("::")
        assert getattr(getattr(torch.ops, namespace), short)(torch.ones(1))[0].item() == 3
        with Nothing():
            assert old(torch.ones(1)).item() == 2

    def test_a_name_that_pytorch_knows_is_told(self):
        name = toys.fresh()
        with Nothing():
            self.define(name, 2)(torch.ones(1))
        with pytest.warns(
            UserWarning, match=f"{name} is defined anew after .* in torch.ops this one is {name}_2"
        ) as told:
            self.define(name, 3)
        assert told[0].filename == __file__

    def test_a_graph_of_the_old_one_still_goes_backward(self, route):
        name = toys.fresh()
        x = torch.ones(2, requires_grad=True)
        y = self.define(name, 2)(x)
        self.define(name, 3)
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2.0, 2.0]

    def test_a_failed_redefinition_leaves_the_old_one(self):
        name = toys.fresh()
        op = self.define(name, 2)
        with pytest.raises(InputError):
            cupyops.operator(name)(lambda x: x)
        with Nothing():
            assert op(torch.ones(1)).tolist() == [2.0]

    def test_many_times(self):
        name = toys.fresh()
        for factor in range(5):
            op = self.define(name, factor)
            with Nothing():
                assert op(torch.ones(1)).tolist() == [float(factor)]


class TestArguments:
    def test_positions_keywords_and_defaults(self, route):
        op, _ = toys.product()
        x, w, b = three(grad=False)
        expected = x * w + b
        for y in (
            op(x, w, b),
            op(x, w, b, 1.0),
            op(x, weight=w, bias=b),
            op(bias=b, x=x, weight=w),
            op(x, w, shift=1.0, bias=b),
        ):
            assert torch.equal(y, expected)
        assert torch.equal(op(x, w), x * w) and torch.equal(op(x, w, None), x * w)

    def test_wrong_calls(self, route):
        op, _ = toys.product()
        x, w, b = three(grad=False)
        with pytest.raises(TypeError, match="misses the argument 'weight'"):
            op(x)
        with pytest.raises(TypeError, match="misses the argument 'x'"):
            op()
        with pytest.raises(TypeError, match="takes 4 arguments, got 5"):
            op(x, w, b, 1.0, 2)
        with pytest.raises(TypeError, match="unexpected or repeated argument 'scale'"):
            op(x, w, scale=2)
        with pytest.raises(TypeError, match="unexpected or repeated argument 'x'"):
            op(x, w, x=x)

    @pytest.mark.parametrize("value", ["x", 3, 1.5, object(), [1.0]])
    def test_not_a_tensor(self, route, value):
        op, _ = toys.product()
        with pytest.raises(InputError, match=r"product_\d+: x is \w+, expected a tensor or an array"):
            op(value, doubles(3))
        with pytest.raises(InputError, match=r"product_\d+: weight is \w+, expected a tensor or an array"):
            op(doubles(3), value)

    def test_none_for_a_tensor(self, route):
        """None where a tensor must be is an error, not a null pointer for a kernel."""
        op, _ = toys.exponential()
        with pytest.raises(InputError, match="x is NoneType, expected a tensor"):
            op(None)
        op, _ = toys.product()
        with pytest.raises(InputError, match="weight is NoneType, expected a tensor"):
            op(doubles(3), None)

    def test_every_type(self, route):
        """Each kind of argument, by the eager and the registered route, with and without its default."""
        seen = []

        @cupyops.operator(toys.fresh())
        def op(
            x: Tensor,
            n: int,
            dims: list[int],
            scale: float = 0.5,
            flag: bool = True,
            mode: str = "mean",
            dtype: torch.dtype | None = None,
            size: int | None = None,
            other: Tensor | None = None,
            weights: list[float] | None = None,
        ) -> Tensor:
            seen.append((n, list(dims), scale, flag, mode, dtype, size, None if weights is None else list(weights)))
            y = x.sum(dims, dtype=dtype) * scale * n
            return y if other is None else y + other

        x = torch.ones(2, 3, 4)
        plain = (3, [0, 1], 0.5, True, "mean", None, None, None)
        full = (3, [0, 1], 0.25, False, "sum", torch.float64, 7, [1.0, 2.0])
        calls = [
            lambda f: f(x, 3, [0, 1]),
            lambda f: f(x, 3, [0, 1], 0.25, False, "sum", torch.float64, 7, torch.ones(4), [1.0, 2.0]),
        ]
        torch._dynamo.reset()
        for call, expected in zip(calls, (plain, full)):
            result = call(op)
            assert seen[-1] == expected
            with Nothing():
                assert torch.equal(call(op), result)
            assert seen[-1] == expected
            assert torch.equal(call(torch.compile(op, fullgraph=True, backend="aot_eager")), result)
            y = call(lambda first, *rest: op(first.clone().requires_grad_(), *rest))
            assert y.requires_grad

    def test_axis_for_dim(self, route):
        @cupyops.operator(toys.fresh())
        def op(x: Tensor, dim: int = 0) -> Tensor:
            return x.sum(dim)

        x = torch.ones(2, 3)
        assert op(x, axis=1).shape == (2,) and op(x, dim=1).shape == (2,)
        with pytest.raises(TypeError, match="axis"):
            op(x, dim=1, axis=1)
        with pytest.raises(TypeError, match="repeated argument"):
            op(x, 1, axis=1)

    def test_mixed_devices(self, route):
        op, _ = toys.product()
        x = doubles(3)
        with pytest.raises(InputError, match="tensors on different devices: x on cpu, weight on meta"):
            op(x, torch.empty(3, device="meta", dtype=torch.float64))

    @pytest.mark.gpu
    def test_mixed_devices_on_a_gpu(self):
        op, calls = toys.product()
        x = torch.ones(3, device="cuda")
        with pytest.raises(InputError, match="x on cuda:0, weight on cpu"):
            op(x, torch.ones(3))
        with pytest.raises(InputError, match="x on cpu, weight on cuda:0"):
            op(torch.ones(3), x)
        assert not calls


class TestRoutes:
    def seen(self, op, function):
        found, result = routes(function)
        short = op.name.rpartition("::")[2]
        return [(route, name.replace(short, "op")) for route, name in found], result

    def test_no_gradient_wanted(self, kernels):
        op, calls = toys.product()
        found, y = self.seen(op, lambda: op(*three(grad=False)))
        assert found == [("kernel", "op")] and calls == ["forward"] and not y.requires_grad

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_gradients_switched_off(self, kernels, mode):
        op, calls = toys.product()
        args = three()
        with mode():
            found, y = self.seen(op, lambda: op(*args))
        assert found == [("kernel", "op")] and calls == ["forward"] and y.grad_fn is None

    def test_gradient_wanted(self, kernels):
        op, calls = toys.product()
        x, w, b = three()
        found, y = self.seen(op, lambda: op(x, w, b))
        assert found == [("kernel", "op")] and y.requires_grad
        found, _ = self.seen(op, lambda: y.sum().backward())
        assert found == [("kernel", "op (backward)")] and calls == ["forward", "backward"]
        assert torch.equal(x.grad, w.expand(3, 4)) and torch.equal(w.grad, x.detach().sum(0))

    def test_create_graph(self, kernels):
        op, calls = toys.product()
        x, w, b = three()
        y = op(x, w, b)
        torch.autograd.grad(y.sum(), x, create_graph=True)
        assert calls == ["forward", "reference"]

    def test_create_graph_by_reference_backward(self, kernels):
        op, calls = toys.exponential()
        x = doubles(3)
        torch.autograd.grad(op(x).sum(), x, create_graph=True)
        assert calls == ["forward", "reference_backward"]

    def test_without_backward_the_reference_is_differentiated(self, kernels):
        op, calls = toys.product()
        op.definition.launch_backward = None
        x, w, b = three()
        found, y = self.seen(op, lambda: op(x, w, b))
        found_backward, grads = self.seen(op, lambda: torch.autograd.grad(y.sum(), (x, w, b)))
        assert found == [("kernel", "op")] and found_backward == [("reference", "op (backward)")]
        torch.testing.assert_close(grads, (w.expand(3, 4), x.sum(0), torch.ones(3, 4, dtype=torch.float64)))

    def test_cpu_tensors(self):
        op, calls = toys.product()
        with cupyops.trace() as trace:
            op(*three())
        (record,) = trace.records
        assert (record.route, record.note, record.dtype) == ("reference", "tensors on cpu", "float64")
        assert calls == ["reference"]

    def test_no_forward(self, kernels):
        @cupyops.operator(toys.fresh())
        def op(x: Tensor) -> Tensor:
            return x + 1

        with cupyops.trace() as trace:
            op(doubles(2))
        assert [(r.route, r.note) for r in trace.records] == [("reference", "no kernel")]

    @pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool, torch.float8_e5m2])
    def test_dtypes_that_are_not_declared(self, kernels, dtype):
        @cupyops.operator(toys.fresh(), dtypes=[torch.float32, torch.float64])
        def op(x: Tensor) -> Tensor:
            return x.clone()

        op.forward(lambda x: pytest.fail("the kernel has no case for this dtype"))
        with cupyops.trace() as trace:
            y = op(torch.ones(2).to(dtype))
        assert [(r.route, r.note) for r in trace.records] == [("reference", f"no kernel for {dtype}")]
        assert y.dtype == dtype

    def test_mixed_floating_dtypes(self, kernels):
        op, calls = toys.product()
        with cupyops.trace() as trace:
            y = op(torch.ones(3), torch.ones(3, dtype=torch.float64))
        assert trace.records[0].note == "no kernel for torch.float32 with torch.float64" and y.dtype == torch.float64

    def test_integer_tensors_beside_floating_ones(self, kernels):
        """Class indices beside logits are no mixture."""
        calls = []

        @cupyops.operator(toys.fresh())
        def op(x: Tensor, target: Tensor) -> Tensor:
            return x.gather(-1, target)

        @op.forward
        def _(x, target):
            calls.append("forward")
            return x.gather(-1, target), ()

        op(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64))
        assert calls == ["forward"]

    def test_negative_bit(self, kernels):
        op, calls = toys.product()
        x = torch.randn(3, dtype=torch.complex64).conj().imag
        assert x.is_neg()
        with cupyops.trace() as trace:
            y = op(x, torch.ones(3))
        assert trace.records[0].note == "negative bit" and torch.equal(y, x * 1)
        op(torch.ones(3), x)
        assert calls == ["reference", "reference"]

    def test_unsupported(self, kernels):
        op, calls = toys.product()

        @op.unsupported
        def _(x, weight, bias, shift):
            return "too wide" if x.shape[-1] > 4 else None

        with cupyops.trace() as trace:
            op(doubles(2, 4), doubles(4))
            op(doubles(2, 5), doubles(5))
        assert [(r.route, r.note) for r in trace.records] == [("kernel", ""), ("reference", "too wide")]
        assert calls == ["forward", "reference"] and "too wide" in str(trace)

    def test_transforms(self, kernels):
        op, calls = toys.product()
        with cupyops.trace() as trace:
            torch.func.vmap(op, (0, None))(doubles(3, 4, grad=False), doubles(4, grad=False))
        assert [(r.route, r.note) for r in trace.records] == [("reference", "torch.func or forward-mode AD")]
        assert calls == ["reference"]

    def test_forward_mode(self, kernels):
        op, calls = toys.product()
        with forward_ad.dual_level(), cupyops.trace() as trace:
            op(doubles(3), doubles(3))
        assert trace.routes() == {"reference"} and calls == ["reference"]

    def test_dispatch_mode(self, kernels):
        op, calls = toys.product()
        with Nothing() as mode:
            found, y = self.seen(op, lambda: op(*three()))
        assert found == [("torch.library", "op")] and op._registration.op in mode.seen and calls[0] == "forward"
        y.sum().backward()
        assert calls[-1] == "backward"

    def test_fake_tensors(self, kernels):
        from torch._subclasses.fake_tensor import FakeTensorMode

        op, calls = toys.product()
        with FakeTensorMode() as mode:
            x, w, b = map(mode.from_tensor, three(grad=False))
            found, y = self.seen(op, lambda: op(x, w, b))
        assert found == [("torch.library", "op")] and y.shape == (3, 4)

    def test_autocast(self, kernels):
        op, calls = toys.product(autocast="lower")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, y = self.seen(op, lambda: op(torch.ones(3), torch.ones(3)))
        assert found == [("kernel", "op")] and y.dtype == torch.bfloat16 and calls == ["forward"]

    def test_arrays(self, kernels):
        op, calls = toys.product()
        found, y = self.seen(op, lambda: op(np.ones(3), np.ones(3)))
        assert found == [("kernel", "op")] and isinstance(y, np.ndarray)

    def test_parameter(self, kernels):
        op, calls = toys.product()
        found, _ = self.seen(op, lambda: op(doubles(3), torch.nn.Parameter(doubles(3))))
        assert found == [("kernel", "op")]

    @pytest.mark.gpu
    def test_on_a_gpu(self):
        op, calls = toys.product()
        x = torch.ones(3, device="cuda", requires_grad=True)
        found, y = self.seen(op, lambda: op(x, x))
        y.sum().backward()
        assert found == [("kernel", "op")] and calls == ["forward", "backward"] and x.grad.tolist() == [2.0] * 3
        with torch.autocast("cuda", dtype=torch.float16):
            assert op(x, x).dtype == torch.float32  # no policy, no cast


class TestDerivatives:
    def test_gradcheck(self, route):
        op, _ = toys.product()
        assert torch.autograd.gradcheck(op, three())
        assert torch.autograd.gradcheck(lambda x, w: op(x, w), three()[:2])
        assert torch.autograd.gradcheck(lambda x, w, b: op(x, w, b, -0.5), three())

    def test_gradgradcheck(self, route):
        op, _ = toys.product()
        assert torch.autograd.gradgradcheck(op, three())

    def test_reference_backward(self, route):
        op, _ = toys.exponential()
        assert torch.autograd.gradcheck(op, doubles(5)) and torch.autograd.gradgradcheck(op, doubles(5))

    def test_several_outputs(self, route):
        op, _ = toys.extremum()

        def f(x):
            largest, _, smallest = op(x, 0.5)
            return largest, smallest

        assert torch.autograd.gradcheck(f, doubles(3, 4)) and torch.autograd.gradgradcheck(f, doubles(3, 4))

    @pytest.mark.parametrize("through", ["eager", "dispatcher"])
    def test_third_derivative(self, route, through):
        for op, f in ((toys.exponential()[0], torch.exp), (toys.product()[0], torch.mul)):
            x = doubles(3)
            with Nothing() if through == "dispatcher" else torch.enable_grad():
                values = []
                for function in (op, f):
                    y = function(x) if f is torch.exp else function(x, x) * x
                    for _ in range(3):
                        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                    values.append(y)
            torch.testing.assert_close(*values)

    @pytest.mark.parametrize("through", ["eager", "dispatcher", "compiled"])
    def test_the_same_tensor_twice(self, route, through):
        """Two gradients, each once, summed by autograd: first and second order."""
        op, _ = toys.product()
        x = doubles(3)
        torch._dynamo.reset()
        f = torch.compile(op, fullgraph=True, backend="aot_eager") if through == "compiled" else op
        with Nothing() if through == "dispatcher" else torch.enable_grad():
            y = f(x, x, x)
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=through != "compiled")
            torch.testing.assert_close(grad, 2 * x + 1)
            if through != "compiled":
                torch.testing.assert_close(torch.autograd.grad(grad.sum(), x)[0], torch.full_like(x, 2))

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
    @pytest.mark.parametrize("through", ["eager", "dispatcher"])
    def test_partial_gradients(self, route, wanted, through):
        op, _ = toys.product()
        asked = []
        genuine = op.definition.launch_backward.launch

        @op.backward
        def _(saved, grad_y, x, weight, bias, shift, needs_grad):
            asked.append(needs_grad)
            return genuine(saved, grad_y, x, weight, bias, shift, needs_grad)

        args = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(three())]
        with Nothing() if through == "dispatcher" else torch.enable_grad():
            op(*args).sum().backward()
        expected = (args[1].expand(3, 4), args[0].sum(0), torch.ones(3, 4, dtype=torch.float64))
        for index, (arg, grad) in enumerate(zip(args, expected)):
            assert arg.grad is None if index not in wanted else torch.allclose(arg.grad, grad.detach())
        if route == "kernel":
            assert [(*a[:3],) for a in asked] == [tuple(i in wanted for i in range(3))]

    @pytest.mark.parametrize("through", ["eager", "dispatcher", "compiled"])
    @pytest.mark.parametrize("used", [(0,), (2,), (0, 2)])
    def test_unused_outputs(self, route, through, used):
        """A gradient of None reaches backward for no output; what is unused contributes nothing."""
        op, _ = toys.extremum()
        x = doubles(3, 4)
        torch._dynamo.reset()
        f = torch.compile(op, fullgraph=True, backend="aot_eager") if through == "compiled" else op
        with Nothing() if through == "dispatcher" else torch.enable_grad():
            outputs = f(x)
            (grad,) = torch.autograd.grad(sum(outputs[i].sum() for i in used), x)
        reference = (x.max(-1).values, None, x.min(-1).values)
        (expected,) = torch.autograd.grad(sum(reference[i].sum() for i in used), x)
        assert torch.equal(grad, expected)

    @pytest.mark.parametrize("through", ["eager", "dispatcher", "compiled"])
    def test_integer_output(self, route, through):
        op, _ = toys.extremum()
        x = doubles(3, 4)
        torch._dynamo.reset()
        f = torch.compile(op, fullgraph=True, backend="aot_eager") if through == "compiled" else op
        with Nothing() if through == "dispatcher" else torch.enable_grad():
            largest, index, smallest = f(x)
        assert largest.requires_grad and smallest.requires_grad and not index.requires_grad
        assert index.dtype == torch.int64 and torch.equal(index, x.argmax(-1))

    @pytest.mark.parametrize("through", ["eager", "dispatcher"])
    def test_input_changed_in_place(self, route, through):
        """Between forward and backward: PyTorch's own error."""
        op, _ = toys.product()
        x, w, b = three()
        with Nothing() if through == "dispatcher" else torch.enable_grad():
            y = op(x, w, b)
            with torch.no_grad():
                x.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()

    @pytest.mark.parametrize("through", ["eager", "dispatcher"])
    def test_output_changed_in_place(self, kernels, through):
        op, _ = toys.exponential()
        with Nothing() if through == "dispatcher" else torch.enable_grad():
            y = op(doubles(3))
            y.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()

    def test_in_place_use_of_the_output(self, route):
        """Where backward does not read it, that is allowed."""
        op, _ = toys.product()
        x, w, b = three()
        op(x, w, b).mul_(2).sum().backward()
        torch.testing.assert_close(x.grad, (2 * w).expand(3, 4).detach())

    @pytest.mark.parametrize("through", ["eager", "dispatcher"])
    def test_second_backward(self, route, through):
        op, _ = toys.product()
        x, w, b = three()
        with Nothing() if through == "dispatcher" else torch.enable_grad():
            y = op(x, w, b).sum()
            first = torch.autograd.grad(y, (x, w, b), retain_graph=True)
            second = torch.autograd.grad(y, (x, w, b))
            assert all(map(torch.equal, first, second))
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(y, (x, w, b))

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint(self, route, reentrant):
        op, calls = toys.product()
        x, w, b = three()
        y = checkpoint(lambda *a: op(*a).sin(), x, w, b, use_reentrant=reentrant)
        y.sum().backward()
        expected = torch.autograd.grad((x * w + b).sin().sum(), (x, w, b))
        torch.testing.assert_close((x.grad, w.grad, b.grad), expected)
        assert calls.count_of("forward" if route == "kernel" else "reference") == 2

    def test_saved_tensor_hooks(self, route):
        """`save_on_cpu` and its like see what is kept, and may replace it."""
        op, _ = toys.product()
        packed = []
        x, w, b = three()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t.clone()):
            y = op(x, w, b)
        y.sum().backward()
        assert packed and torch.equal(w.grad, x.detach().sum(0))

    @pytest.mark.parametrize("kind", ["expanded", "transposed", "negative", "zero strides with size one"])
    @pytest.mark.parametrize("through", ["eager", "dispatcher"])
    def test_gradients_arrive_laid_out_as_the_output(self, kernels, kind, through):
        op, _ = toys.product()
        seen = []

        @op.backward
        def _(saved, grad_y, x):
            seen.append(grad_y)
            return grad_y.clone(), grad_y.sum(0), grad_y.clone()

        x, w, b = doubles(3, 4), doubles(4), doubles(3, 4)
        grad = {
            "expanded": lambda: torch.tensor(2.0, dtype=torch.float64).expand(3, 4),
            "transposed": lambda: torch.randn(4, 3, dtype=torch.float64).t(),
            "negative": lambda: torch.randn(3, 4, dtype=torch.complex128).conj().imag,
            "zero strides with size one": lambda: torch.randn(3, 4, dtype=torch.float64).as_strided((3, 4), (4, 1)),
        }[kind]()
        with Nothing() if through == "dispatcher" else torch.enable_grad():
            y = op(x, w, b)
            y.backward(grad)
        (arrived,) = seen
        assert arrived.stride() == y.stride() and not arrived.is_neg() and arrived.dtype == y.dtype
        assert torch.equal(arrived, grad) and torch.equal(x.grad, grad)

    def test_channels_last_output_has_channels_last_gradients(self, kernels):
        op, _ = toys.exponential()
        seen = []

        @op.backward
        def _(saved, grad_y, y):
            seen.append((grad_y.stride(), y.stride()))
            return grad_y * y

        x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
        op(x).sum().backward()
        assert seen == [(x.stride(), x.stride())]

    def test_backward_on_another_thread(self, route):
        op, _ = toys.product()
        x, w, b = three()
        y = op(x, w, b).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
        assert torch.equal(w.grad, x.detach().sum(0))

    def test_threads(self, route):
        op, _ = toys.product()

        def work(seed):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(16, 4, generator=generator, dtype=torch.float64, requires_grad=True)
            w = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
            for _ in range(20):
                grads = torch.autograd.grad(op(x, w).sum(), (x, w))
                assert torch.equal(grads[0], w.detach().expand(16, 4)) and torch.equal(grads[1], x.detach().sum(0))
            return True

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))

    def test_outputs_are_no_views_of_inputs(self, route):
        """A reference that returns its input, or a view of it, is copied on the registered route, as torch.library asks."""

        @cupyops.operator(toys.fresh())
        def op(x: Tensor, p: float = 0.0) -> Tensor:
            return x.t() if p == 0 else x

        x = doubles(3, 4, grad=False)
        for p in (0.0, 1.0):
            with Nothing():
                y = op(x, p)
            assert (
                torch.equal(y, x.t() if p == 0 else x)
                and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            )


class TestKeptAlive:
    """What a call holds on to until its backward."""

    def kept(self, op, make, through):
        x = make()
        inner = x * 1  # the tensor that the operator sees: only the graph may hold it
        reference = weakref.ref(inner)
        storage = weakref.ref(inner.untyped_storage())
        with Nothing() if through == "dispatcher" else torch.enable_grad():
            y = op(inner)
        y = y[0] if isinstance(y, tuple) else y
        del inner
        gc.collect()
        alive = reference() is not None or storage() is not None
        (grad,) = torch.autograd.grad(y.sum(), x)
        return alive, grad

    def freed(self, op, through="eager"):
        """Whether the input's memory is released after forward, by the size of what autograd saved."""
        saved = []
        x = doubles(1000)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
            inner = x + 0
            with Nothing() if through == "dispatcher" else torch.enable_grad():
                op(inner)
        return inner.data_ptr() not in saved

    @pytest.mark.parametrize("through", ["eager", "dispatcher"])
    def test_an_input_that_no_role_names_is_freed(self, kernels, through):
        op, _ = toys.exponential()
        assert self.freed(op, through)

    @pytest.mark.parametrize("through", ["eager", "dispatcher"])
    def test_without_reference_backward_it_is_kept(self, kernels, through):
        op, _ = toys.exponential()
        op.definition.gradient = None
        op.definition._choose_kept()
        assert not self.freed(op, through)

    def test_weak_reference(self, kernels):
        """Nothing but the user's own name holds an input that backward does not need."""
        op, _ = toys.exponential()
        inner = doubles(10, grad=False).requires_grad_()
        reference = weakref.ref(inner)
        y = op(inner * 1)
        del inner
        gc.collect()
        assert reference() is not None, "the leaf is part of the graph"
        del y
        gc.collect()
        assert reference() is None

    def test_no_reference_cycle(self, kernels):
        """The graph goes at once when its last name goes, without the collector."""
        for make in (toys.product, toys.exponential, toys.extremum):
            op, _ = make()
            gc.collect()
            gc.disable()
            try:
                x = doubles(3, 4)
                y = op(x, doubles(4)) if make is toys.product else op(x)
                y = y[0] if isinstance(y, tuple) else y
                reference = weakref.ref(y.grad_fn)
                del y
                assert reference() is None, op.name
            finally:
                gc.enable()

    def test_no_gradient_keeps_nothing(self, kernels):
        op, _ = toys.product()
        x = doubles(3, grad=False)
        reference = weakref.ref(x)
        y = op(x, doubles(3, grad=False))
        del x
        assert reference() is None and y.grad_fn is None

    def test_saved_by_forward(self, kernels):
        """What forward saved reaches backward, and through the dispatcher too."""
        op, _ = toys.extremum()
        for through in (torch.enable_grad(), Nothing()):
            x = doubles(3, 4)
            with through:
                largest, _, smallest = op(x)
                (largest.sum() + 2 * smallest.sum()).backward()
            expected = torch.zeros(3, 4, dtype=torch.float64)
            expected.scatter_(1, x.argmax(1, keepdim=True), 1.0).scatter_add_(
                1, x.argmin(1, keepdim=True), torch.full((3, 1), 2.0, dtype=torch.float64)
            )
            assert torch.equal(x.grad, expected)


class TestTransforms:
    def pairs(self):
        op, _ = toys.product()
        return (lambda x, w: op(x, w).sin(), lambda x, w: (x * w).sin()), (
            doubles(3, 4, grad=False),
            doubles(4, grad=False),
        )

    @pytest.mark.parametrize(
        "transform",
        [
            lambda f: torch.func.grad(lambda *a: f(*a).sum(), (0, 1)),
            lambda f: torch.func.vmap(f, (0, None)),
            lambda f: torch.func.vmap(torch.func.grad(lambda *a: f(*a).sum(), (0, 1)), (0, None)),
            lambda f: lambda x, w: torch.func.jvp(f, (x, w), (x, w)),
            lambda f: torch.func.jacrev(f, (0, 1)),
            lambda f: torch.func.jacfwd(f, (0, 1)),
            lambda f: torch.func.hessian(lambda *a: f(*a).sum(), (0, 1)),
            lambda f: lambda x, w: torch.func.vjp(f, x, w)[1](x),
            lambda f: torch.func.vmap(torch.func.hessian(lambda *a: f(*a).sum()), (0, None)),
            lambda f: torch.func.grad(lambda *a: torch.func.grad(lambda *b: f(*b).sum())(*a).sum()),
            lambda f: lambda x, w: torch.func.linearize(f, x, w)[1](x, w),
            lambda f: lambda x, w: torch.func.functionalize(f)(x, w),
            lambda f: lambda x, w: torch.autograd.functional.jacobian(f, (x, w)),
            lambda f: lambda x, w: torch.autograd.functional.hvp(lambda *a: f(*a).sum(), (x, w), (x, w)),
            lambda f: lambda x, w: torch.autograd.functional.jvp(f, (x, w), (x, w)),
        ],
        ids=[
            "grad", "vmap", "vmap of grad", "jvp", "jacrev", "jacfwd", "hessian", "vjp", "vmap of hessian",
            "grad of grad", "linearize", "functionalize", "jacobian", "hvp", "double-backward jvp",
        ],
    )  # fmt: skip
    def test_as_pytorch(self, route, transform):
        (ours, theirs), args = self.pairs()
        torch.testing.assert_close(transform(ours)(*args), transform(theirs)(*args))

    def test_several_outputs(self, route):
        op, _ = toys.extremum()
        x = doubles(3, 4, grad=False)
        largest, index, smallest = torch.func.vmap(op)(x)
        assert torch.equal(largest, x.max(-1).values) and torch.equal(index, x.argmax(-1))
        grad = torch.func.grad(lambda x: op(x)[0].sum())(x)
        assert torch.equal(grad.argmax(-1), index)

    def test_forward_mode(self, route):
        op, _ = toys.product()
        x, w, b = three(grad=False)
        with forward_ad.dual_level():
            y = op(forward_ad.make_dual(x, torch.ones_like(x)), w, forward_ad.make_dual(b, 2 * torch.ones_like(b)))
            tangent = forward_ad.unpack_dual(y).tangent
        torch.testing.assert_close(tangent, w.expand(3, 4) + 2)

    def test_forward_over_reverse(self, route):
        op, _ = toys.exponential()
        x = doubles(3)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            (grad,) = torch.autograd.grad(op(dual).sum(), dual, create_graph=True)
            torch.testing.assert_close(forward_ad.unpack_dual(grad).tangent, x.exp())

    def test_is_grads_batched(self, route):
        op, _ = toys.product()
        x, w, b = three()
        y = op(x, w, b)
        basis = torch.eye(12, dtype=torch.float64).view(12, 3, 4)
        (ours,) = torch.autograd.grad(y, w, basis, is_grads_batched=True, retain_graph=True)
        (theirs,) = torch.autograd.grad(x * w + b, w, basis, is_grads_batched=True)
        torch.testing.assert_close(ours, theirs)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
class TestCompile:
    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_values_and_gradients(self, route, dynamic, backend):
        op, _ = toys.product()
        compiled = torch.compile(lambda *a: op(*a).sin(), fullgraph=True, dynamic=dynamic, backend=backend)
        for rows in (3, 5):
            args = doubles(rows, 4), doubles(4), doubles(rows, 4)
            ours, theirs = compiled(*args), (args[0] * args[1] + args[2]).sin()
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(torch.autograd.grad(ours.sum(), args), torch.autograd.grad(theirs.sum(), args))

    def test_inductor(self, kernels):
        """The CPU's own backend takes the op as it is, strides asserted."""
        op, calls = toys.exponential()
        compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True)
        try:
            x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
            torch.testing.assert_close(compiled(x), x.exp() + 1)
        except torch._inductor.exc.InductorError as error:
            if "compiler" not in str(error).lower():
                raise
            pytest.skip("Inductor finds no C++ compiler on this machine")
        assert "forward" in calls

    def test_the_kernels_run_in_it(self, kernels):
        op, calls = toys.product()
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        args = three()
        compiled(*args).sum().backward()
        del calls[:]
        compiled(*args).sum().backward()
        assert calls == ["forward", "backward"], "once compiled, neither the reference nor a dry run"

    def test_the_op_is_in_the_graph(self, route):
        op, _ = toys.product()
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        torch.compile(op, fullgraph=True, backend=backend)(*three(grad=False))
        targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
        assert any(op.name.replace("::", ".") in target for target in targets)

    def test_keywords_defaults_and_none(self, route):
        op, _ = toys.product()
        x, w, b = three(grad=False)
        compiled = torch.compile(
            lambda: (op(x, weight=w), op(x, w, None), op(x, w, bias=b, shift=2.0)), fullgraph=True, backend="eager"
        )
        torch.testing.assert_close(compiled(), (x * w, x * w, x * w + 2 * b))

    def test_several_outputs(self, route):
        op, _ = toys.extremum()
        x = doubles(3, 4)
        ours = torch.compile(op, fullgraph=True, backend="aot_eager")(x, 2.0)
        assert isinstance(ours, tuple) and len(ours) == 3
        torch.testing.assert_close(ours[0], 2 * x.max(-1).values)
        assert torch.equal(ours[1], x.argmax(-1))

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_of_func_grad(self, route, dynamic):
        op, _ = toys.product()
        x, w, _ = three(grad=False)
        compiled = torch.compile(
            lambda x, w: torch.func.grad(lambda x: op(x, w).sin().sum())(x),
            fullgraph=True,
            dynamic=dynamic,
            backend="aot_eager",
        )
        torch.testing.assert_close(compiled(x, w), (x * w).cos() * w)

    def test_of_vmap(self, route):
        op, _ = toys.product()
        x, w, _ = three(grad=False)
        compiled = torch.compile(torch.func.vmap(lambda x: op(x, w)), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), x * w)

    def test_of_no_grad(self, route):
        op, _ = toys.product()
        args = three()

        @torch.compile(fullgraph=True, backend="aot_eager")
        def f(*args):
            with torch.no_grad():
                return op(*args)

        assert not f(*args).requires_grad

    def test_under_autocast(self, route):
        op, _ = toys.product(autocast="lower")

        @torch.compile(fullgraph=True, backend="aot_eager")
        def f(x, w):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return op(x, w)

        assert f(torch.ones(3), torch.ones(3)).dtype == torch.bfloat16

    def test_float_argument_does_not_recompile_without_end(self, route):
        op, _ = toys.product()
        compiled = torch.compile(lambda x, s: op(x, x, x, s), fullgraph=True, backend="eager")
        x = doubles(3, grad=False)
        for scale in (0.5, 0.25, 0.125):
            torch.testing.assert_close(compiled(x, scale), x * x + scale * x)

    def test_a_module_and_its_optimizer(self, route):
        op, _ = toys.product()

        class Scale(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(4))
                self.bias = torch.nn.Parameter(torch.zeros(4))

            def forward(self, x):
                return op(x, self.weight) + self.bias

        model = Scale()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.ones(2, 4)
        for _ in range(2):
            optimizer.zero_grad()
            compiled(x).sum().backward()
            optimizer.step()
        torch.testing.assert_close(model.weight, torch.full((4,), 0.6))

    def test_opcheck(self, route):
        op, _ = toys.product()
        torch.library.opcheck(op._registration.op, (*three(), 0.5))
        torch.library.opcheck(op._registration.op, (*three()[:2], None, 0.5))
        op, _ = toys.exponential()
        torch.library.opcheck(op._registration.op, (doubles(3),))
        op, _ = toys.extremum()
        torch.library.opcheck(op._registration.op, (doubles(3, 4), 1.0))

    def test_opcheck_of_the_backward_op(self, kernels):
        op, _ = toys.product()
        x, w, b = three()
        needs = [True, True, True, False]
        torch.library.opcheck(op._registration.backward_op, ([doubles(3, 4)], [], [], x, w, b, 0.5, needs))
        torch.library.opcheck(
            op._registration.backward_op, ([doubles(3, 4)], [], [], x, w, None, 0.5, [True, True, False, False])
        )

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("dynamic", [True, False])
    def test_export(self, route, tmp_path, strict, dynamic):
        op, _ = toys.product()

        class Module(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.full((4,), 3.0))

            def forward(self, x):
                return op(x, self.weight, bias=x, shift=0.5)

        shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}} if dynamic else None
        program = torch.export.export(Module(), (torch.ones(3, 4),), dynamic_shapes=shapes, strict=strict)
        assert any(op.name.replace("::", ".") in str(node.target) for node in program.graph.nodes)
        torch.export.save(program, tmp_path / "module.pt2")
        loaded = torch.export.load(tmp_path / "module.pt2").module()
        x = torch.randn(7 if dynamic else 3, 4)
        torch.testing.assert_close(loaded(x), 3 * x + 0.5 * x)

    def test_make_fx(self, route):
        from torch.fx.experimental.proxy_tensor import make_fx

        op, _ = toys.product()
        x, w, b = three(grad=False)
        for mode in ("real", "fake", "symbolic"):
            graph = make_fx(lambda x, w, b: op(x, w, b), tracing_mode=mode)(x, w, b)
            assert op.name.replace("::", ".") in graph.code.replace("torch.ops.", "")
            torch.testing.assert_close(graph(x, w, b), x * w + b)


class TestModesAndSubclasses:
    def test_dispatch_mode_sees_one_op(self, route):
        op, _ = toys.product()
        with Nothing() as mode:
            op(*three(grad=False))
        assert [f for f in mode.seen if f.namespace == "cupyops_tests"] == [op._registration.op]

    def test_flop_counter_and_deterministic_modes(self, route):
        from torch.utils.flop_counter import FlopCounterMode

        op, _ = toys.product()
        with FlopCounterMode(display=False):
            op(*three()).sum().backward()
        torch.use_deterministic_algorithms(True)
        try:
            op(*three()).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)

    def test_fake_tensors_have_the_real_ones_metadata(self, route):
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        op, _ = toys.extremum()
        x = torch.randn(3, 5, 4).transpose(0, 1)
        real = op(x)
        with FakeTensorMode() as mode:
            fake = op(mode.from_tensor(x))
        for f, r in zip(fake, real):
            assert isinstance(f, FakeTensor) and (f.shape, f.stride(), f.dtype, f.device) == (
                r.shape, r.stride(), r.dtype, r.device,
            )  # fmt: skip

    def test_fake_tensors_outside_their_mode(self, route):
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        op, _ = toys.product()
        with FakeTensorMode() as mode:
            x, w, b = map(mode.from_tensor, three(grad=False))
        assert isinstance(op(x, w, b), FakeTensor)

    def test_meta_tensors(self, route):
        op, _ = toys.product()
        x = torch.empty(3, 4, device="meta", requires_grad=True)
        y = op(x, torch.empty(4, device="meta"))
        assert y.is_meta and y.shape == (3, 4)
        y.sum().backward()
        assert x.grad.is_meta

    def test_subclass_without_dispatch(self, route):
        op, _ = toys.product()
        x, w, b = three()
        plain = x.detach().as_subclass(Plain).requires_grad_()
        y = op(plain, w, b)
        torch.testing.assert_close(y.as_subclass(Tensor), x * w + b)
        y.sum().backward()
        torch.testing.assert_close(w.grad, x.detach().sum(0))

    def test_subclass_with_dispatch(self, route):
        op, _ = toys.product()
        Wrapper.seen = []
        x, w, _ = three(grad=False)
        y = op(Wrapper(x), Wrapper(w))
        assert isinstance(y, Wrapper) and op._registration.op in Wrapper.seen
        torch.testing.assert_close(y.elem, x * w)

    def test_gradient_of_a_subclass_with_dispatch(self, route):
        op, _ = toys.product()
        x, w, _ = three(grad=False)
        wrapped = Wrapper(x).requires_grad_()
        y = op(wrapped, Wrapper(w))
        (grad,) = torch.autograd.grad(y.sum(), wrapped)
        assert isinstance(grad, Wrapper)
        torch.testing.assert_close(grad.elem, w.expand(3, 4))

    def test_parameter_subclass(self, route):
        class Mine(torch.nn.Parameter):
            pass

        op, _ = toys.product()
        w = Mine(torch.ones(3))
        op(torch.ones(3), w).sum().backward()
        assert w.grad.tolist() == [1.0] * 3


class TestAutocast:
    """Each policy beside an operator of PyTorch's own that has it."""

    @pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("through", ["eager", "dispatcher", "gradient"])
    def test_lower(self, route, given, low, through):
        @cupyops.operator(toys.fresh(), autocast="lower")
        def op(x: Tensor, w: Tensor) -> Tensor:
            return x @ w

        op.forward(lambda x, w: ((x.detach() @ w.detach()), ()))
        op.backward(lambda saved, grad_y, x, w: (grad_y @ w.t(), x.t() @ grad_y))
        x, w = (torch.randn(4, 4).to(given).requires_grad_() for _ in range(2))
        with torch.autocast("cpu", dtype=low):
            expected = x @ w
            with Nothing() if through == "dispatcher" else torch.enable_grad():
                y = op(x, w)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected)
        if through == "gradient":
            y.float().sum().backward()
            assert x.grad.dtype == given and w.grad.dtype == given

    @pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
    def test_fp32_everywhere(self, route, given):
        """nll_loss: on the CPU's list of fp32 operators too."""

        @cupyops.operator(toys.fresh(), autocast="fp32_everywhere")
        def op(x: Tensor, target: Tensor) -> Tensor:
            return torch.nn.functional.nll_loss(x, target)

        op.forward(lambda x, target: (torch.nn.functional.nll_loss(x, target), ()))
        x, target = torch.randn(3, 4).to(given), torch.zeros(3, dtype=torch.int64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert op(x, target).dtype == torch.nn.functional.nll_loss(x, target).dtype

    @pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
    def test_fp32(self, route, given):
        """softmax: on CUDA's list, not on the CPU's."""

        @cupyops.operator(toys.fresh(), autocast="fp32")
        def op(x: Tensor) -> Tensor:
            return x.softmax(-1)

        op.forward(lambda x: (x.softmax(-1), ()))
        x = torch.randn(3, 4).to(given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert op(x).dtype == x.softmax(-1).dtype

    def test_no_policy(self, route):
        op, _ = toys.product()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert op(torch.ones(3), torch.ones(3)).dtype == torch.float32

    def test_off_inside(self, route):
        op, _ = toys.product(autocast="lower")
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert op(torch.ones(3), torch.ones(3)).dtype == torch.float32

    @pytest.mark.parametrize("policy", ["fp32", "fp32_everywhere", "lower"])
    @pytest.mark.parametrize("through", ["eager", "dispatcher", "registered", "compile", "vmap", "forward mode", "jit"])
    def test_it_is_off_in_the_roles(self, route, policy, through):
        """`2 * (x @ w)` comes back in the dtype that its inputs were cast to, as under `custom_fwd(cast_inputs=...)`."""
        torch._dynamo.reset()
        op, seen = self.twice_the_product(policy)
        x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        calls = {
            "eager": op,
            "dispatcher": op,
            "registered": lambda x, w: op._registration.op(x, w)[0],
            "compile": torch.compile(op, backend="aot_eager", fullgraph=True),
            "vmap": lambda x, w: torch.func.vmap(op, in_dims=(0, None))(x.unsqueeze(0), w).squeeze(0),
            "forward mode": lambda x, w: torch.func.jvp(lambda x: op(x, w), (x,), (x,))[0],
            "jit": lambda x, w: replayed(torch.jit.trace(op, (x.detach(), w.detach()), check_trace=False), x, w),
        }

        def replayed(traced, *args):  # what a trace replays meets autocast once more
            with torch.autocast("cpu", enabled=False):
                return traced(*args)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            with Nothing() if through == "dispatcher" else torch.enable_grad():
                y = calls[through](x, w)
            assert torch.is_autocast_enabled("cpu")
            low = policy == "lower" and through != "registered"  # the op itself takes what it is given
            expected = torch.bfloat16 if low else torch.float32
            assert y.dtype == expected
            ours = route == "kernel" and through in ("eager", "dispatcher", "registered", "compile")
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ours):  # which is off in a backward of ours too
                (grad,) = torch.autograd.grad(y.float().sum(), w)
        assert not any(seen) and seen
        error = 0.05 if low else 1e-5
        torch.testing.assert_close(y.float(), 2 * (x @ w), atol=error * 10, rtol=error)
        torch.testing.assert_close(grad, (2 * x.sum(0))[:, None].expand(4, 4), atol=error * 10, rtol=error)

    def test_it_is_off_in_second_derivatives(self, kernels):
        op, seen = self.twice_the_product("fp32_everywhere")
        x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (grad,) = torch.autograd.grad(op(x, w).sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        assert not any(seen)
        torch.testing.assert_close(second, (32 * x.sum(0)).expand(4, 4))

    def twice_the_product(self, policy):
        """(the operator, whether autocast was on in each of its roles)."""
        seen = []
        on = lambda: seen.append(torch.is_autocast_enabled("cpu"))

        @cupyops.operator(toys.fresh(), autocast=policy)
        def op(x: Tensor, w: Tensor) -> Tensor:
            on()
            return 2 * (x @ w)

        @op.forward
        def _(x, w):
            on()
            return (2 * (x.detach() @ w.detach()), ())

        @op.backward
        def _(saved, grad_y, x, w):
            on()
            return 2 * (grad_y @ w.mT), 2 * (x.mT @ grad_y)

        return op, seen

    def test_no_policy_changes_nothing_inside(self, route):
        @cupyops.operator(toys.fresh())
        def op(x: Tensor) -> Tensor:
            return x @ x

        x = torch.randn(4, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert op(x).dtype == torch.bfloat16

    @pytest.mark.gpu
    @pytest.mark.parametrize("policy", ["lower", "fp32", "fp32_everywhere", None])
    @pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.float64])
    def test_on_a_gpu(self, policy, given):
        theirs = {"lower": lambda x: x @ x, "fp32": lambda x: x.softmax(-1), None: lambda x: x * x}
        theirs["fp32_everywhere"] = theirs["fp32"]

        @cupyops.operator(toys.fresh(), autocast=policy)
        def op(x: Tensor) -> Tensor:
            return theirs[policy](x)

        op.forward(lambda x: (theirs[policy](x), ()))
        x = torch.randn(4, 4, device="cuda").to(given)
        with torch.autocast("cuda", dtype=torch.float16):
            assert op(x).dtype == theirs[policy](x).dtype


class TestInterface:
    def define(self):
        op, calls = toys.product()

        @op.interface
        def scaled(x, weight, dim: int = -1):
            """Scale x."""
            return op(x, weight), dim

        return op, scaled

    def test_is_the_public_function(self):
        op, scaled = self.define()
        assert op.public is scaled and scaled.__doc__ == "Scale x." and scaled.__name__ == "scaled"

    def test_takes_tensors_arrays_and_axis(self, route):
        _, scaled = self.define()
        y, dim = scaled(torch.ones(3), torch.ones(3))
        assert isinstance(y, Tensor) and dim == -1
        y, dim = scaled(np.ones(3), np.ones(3), axis=2)
        assert isinstance(y, np.ndarray) and dim == 2
        assert scaled(torch.ones(3), torch.ones(3), axis=1)[1] == 1
        assert scaled(x=torch.ones(3), weight=torch.ones(3))[1] == -1

    def test_without_interface_the_operator_is_public(self):
        op, _ = toys.product()
        assert op.public is op


def test_names_of_parameters_meet_no_others():
    """An operator's parameters may have any."""

    @cupyops.operator("test_operator::names")
    def names(a1: torch.Tensor, a0: float, args: float, op: float) -> torch.Tensor:
        return a1 * a0 + args - op

    expected = torch.full((2,), 4.0)
    for found in (
        names(torch.ones(2), 2.0, 3.0, 1.0),
        names(a0=2.0, a1=torch.ones(2), op=1.0, args=3.0),
        names(torch.ones(2), 2.0, op=1.0, args=3.0),
    ):
        torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match="takes 4 arguments, got 5"):
        names(torch.ones(2), 2.0, 3.0, 1.0, 5.0)
    with pytest.raises(TypeError, match="misses the argument 'a1'"):
        names()


class _Seen(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("within", ["nothing", "a dispatch mode", "FlopCounterMode", "torch.compile"])
def test_a_backward_that_differentiates_something_itself(kernels, within):
    @cupyops.operator(f"mylib::shifted_in_{within.replace(' ', '_').replace('.', '_')}")
    def shifted(x: Tensor, shift: Tensor) -> Tensor:
        return x * torch.exp(shift)

    @shifted.forward
    def launch(x, shift):
        return x * torch.exp(shift), ()

    @shifted.backward
    def gradient(saved, grad_y, x, shift, needs_grad):
        with torch.enable_grad():
            again = shift.detach().requires_grad_()
            found = torch.autograd.grad(x * torch.exp(again), again, grad_y)
        return (grad_y * torch.exp(shift)).view(-1).view(x.shape), *found

    from torch.utils.flop_counter import FlopCounterMode

    x, shift = doubles(3), doubles(3)
    expected = torch.autograd.grad((x * torch.exp(shift)).square().sum(), (x, shift))
    modes = {"a dispatch mode": _Seen, "FlopCounterMode": lambda: FlopCounterMode(display=False)}
    call = torch.compile(shifted, backend="aot_eager", fullgraph=True) if within == "torch.compile" else shifted
    with modes.get(within, nullcontext)():
        found = torch.autograd.grad(call(x, shift).square().sum(), (x, shift))
    torch.testing.assert_close(found, expected)
