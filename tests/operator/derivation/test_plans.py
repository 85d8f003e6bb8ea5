"""Recorded plans: when a call is recorded, when it is replayed, when it is not, and that it gives the same bits."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import plan_driver as driver
import plan_samples as planned
import pytest
import torch
from plan_samples import CODE, FLOATING, alike, counted, launch, plainly, same, scaled, warm
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cupyops
from cupyops._dispatch.core import forms
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._operator.derivation import plans
from cupyops.errors import InputError, LaunchError


@pytest.fixture(params=["interpreted", "generated"])
def running(request):
    """Kernels on the CPU: recordings interpreted, or replayed by generated code with a stand-in for the driver."""
    plans.forget_all()
    with cupyops.simulate() if request.param == "interpreted" else driver.driver():
        yield request.param
    plans.forget_all()


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def reason(op):
    return op._plans.reason


def by_first(name):
    """An operator that multiplies by the first number of a list."""

    @cupyops.operator(f"cupyops_plans::{name}")
    def op(x: Tensor, by: list[int]) -> Tensor:
        return x * by[0]

    @op.forward
    def _(x, by):
        y = torch.empty_like(x)
        launch(x, y, float(by[0]))
        return y, ()

    return op


class TestLifecycle:
    def test_the_first_call_is_plain_two_are_recorded_then_it_is_replayed(self, running):
        op, x = scaled(), torch.randn(5)
        with counted() as count:
            for misses, recorded in ((1, 0), (2, 1), (3, 2), (3, 2), (3, 2)):
                assert torch.equal(op(x), 2 * x) and (count.misses, count.recorded) == (misses, recorded)
            assert torch.equal(op(torch.ones(5)), torch.full((5,), 2.0)) and count.misses == 3

    def test_backward_is_recorded_behind_a_replayed_forward(self, running):
        op, x = scaled(), leaf(5)
        with counted() as count:
            for forward, backward in ((1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 2), (3, 2)):
                (grad,) = torch.autograd.grad(op(x), x, torch.ones(5))
                assert grad.tolist() == [2.0] * 5 and (count.misses, count.backward_misses) == (forward, backward)

    def test_results_are_new_memory_each_time(self, running):
        op, x = scaled(), leaf(5)
        warm(op, x)
        first, second = op(x), op(x)
        assert first.data_ptr() != second.data_ptr() and type(first.grad_fn) is type(second.grad_fn)
        assert "Scaled" in first.grad_fn.name() and first.requires_grad

    def test_off_switch(self, running):
        op, x = scaled(), torch.randn(5)
        warm(op, x)
        with counted() as count, cupyops.plans(enabled=False):
            with cupyops.plans():
                assert same(op(x), 2 * x)
            assert count.misses == 0 and count.recorded == 0
        with counted() as count:
            assert same(op(x), 2 * x) and count.misses == 0

    @pytest.mark.parametrize(
        "asked", [lambda: cupyops.use_form("softmax:two_pass"), lambda: assume_gpu(shared=1 << 16)]
    )
    def test_forms_and_gpus_asked_for_are_not_those_recorded(self, running, asked, monkeypatch):
        x, chosen = torch.randn(4, 64), []
        warm(cupyops.softmax, x, -1)
        monkeypatch.setattr(forms, "listeners", [lambda choice: chosen.append(choice.chosen.name)])
        with counted() as count:
            with asked():
                for _ in range(5):
                    assert torch.allclose(cupyops.softmax(x, -1), torch.softmax(x, -1))
            assert (count.misses, count.recorded, len(chosen)) == (5, 0, 5)
            assert same(cupyops.softmax(x, -1), cupyops.softmax(x, -1)) and (count.misses, len(chosen)) == (5, 5)

    def test_off_by_the_environment(self, monkeypatch):
        from cupyops._util import observed

        monkeypatch.setenv("CUPYOPS_PLANS", "0")
        before = observed.unplanned
        plans.off_if_asked()
        assert observed.unplanned == before + 1
        observed.go_plainly(-1)

    def test_a_trace_sees_launches_and_says_why_there_is_no_plan(self, running):
        op, x = scaled(), torch.randn(5)
        warm(op, x)
        with cupyops.trace() as trace:
            op(x)
        assert [(record.route, record.note) for record in trace.launches()] == [("simulator", "")]

        def reads(x, by):
            assert x.sum().item() is not None
            y = torch.empty_like(x)
            launch(x, y, by)
            return y, ()

        op = scaled(reads)
        warm(op, x)
        with cupyops.trace() as trace:
            op(x)
        assert "not replayed: item gives Python what may depend on data" in str(trace)


class TestKeys:
    """What differs from what was recorded finds no plan, and what is alike does."""

    OTHERS = {
        "shape": lambda x: x[:2].contiguous(),
        "strides": lambda x: x.t().contiguous().t(),
        "expanded": lambda x: x[:1].expand(4, 6),
        "dtype": lambda x: x.double(),
        "half": lambda x: x.half(),
        "requires_grad": lambda x: x.clone().requires_grad_(),
        "parameter": lambda x: torch.nn.Parameter(x.clone()),
        "negative bit": lambda x: torch._neg_view(x),
        "integers": lambda x: x.int(),
    }

    @pytest.mark.parametrize("other", OTHERS)
    def test_another_tensor(self, running, other):
        op, x = scaled(), torch.randn(4, 6)
        warm(op, x)
        y = TestKeys.OTHERS[other](x)
        with counted() as count:
            found = op(y)
        assert count.misses == 1 and same(found, plainly(op, y))
        with counted() as count:
            assert same(op(x + 1), plainly(op, x + 1)) and count.misses == 0

    @pytest.mark.parametrize("one,other", [(2.0, 3.0), (2.0, 2), (1, True), (1.0, 1), (0.0, -0.0), (2, 2.0)])
    def test_another_number(self, running, one, other):
        op, x = scaled(), torch.tensor([1.0, -2.0, 3.0])
        warm(op, x, one)
        with counted() as count:
            assert same(op(x, other), plainly(op, x, other)) and count.misses == 1
            assert same(op(x, one), plainly(op, x, one)) and count.misses == 1

    def test_a_list_that_the_caller_changes(self, running):
        op, x, by = by_first("by_list"), torch.ones(3), [2, 5]
        warm(op, x, by)
        with counted() as count:
            assert op(x, by).tolist() == [2.0] * 3 and op(x, [2, 5]).tolist() == [2.0] * 3 and count.misses == 0
        by[0] = 7
        assert op(x, by).tolist() == [7.0] * 3
        with counted() as count:
            assert op(x, [2, 5]).tolist() == [2.0] * 3 and count.misses == 0
            assert op(x, (2, 5)).tolist() == [2.0] * 3 and count.misses == 1

    def test_sizes_in_a_tuple(self, running):
        """Equal ones are alike, whichever object they are; what is equal and of another type is not."""
        op, x, sizes = by_first("by_tuple"), torch.ones(3), [1, 5]
        warm(op, x, tuple(sizes))
        for other, misses in ((tuple(sizes), 0), ((1, 6), 1), ((1,), 1), ((True, 5), 1), (torch.Size(sizes), 1)):
            with counted() as count:
                assert op(x, other).tolist() == [1.0] * 3 and count.misses == misses, other
        with counted() as count:
            assert op(x, (7, 5)).tolist() == [7.0] * 3 and count.misses == 1

    def test_a_mode_over_calls_that_are_made_the_plain_way(self, running):
        """What launches nothing is called without a plan, and PyTorch's own function where a mode is to see one."""

        class Seen(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                names.append(func.__name__)
                return func(*args, **(kwargs or {}))

        names, x = [], torch.ones(3)
        for _ in range(6):
            assert cupyops.dropout(x, 0.5, False) is x
        with Seen():
            assert cupyops.dropout(x, 0.5, False) is x
        assert "dropout" in names
        with pytest.raises(InputError, match="p is 2.0"):
            cupyops.dropout(x, 2.0, False)

    def test_strings_dtypes_and_devices(self, running):
        @cupyops.operator("cupyops_plans::kinds")
        def op(x: Tensor, how: str, dtype: torch.dtype | None) -> Tensor:
            return (x * len(how)).to(dtype or x.dtype)

        @op.forward
        def _(x, how, dtype):
            y = torch.empty_like(x)
            launch(x, y, float(len(how)))
            return (y if dtype is None else y.to(dtype)), ()

        x = torch.ones(3)
        for args in (("ab", None), ("ab", torch.float64), ("abc", None)):
            warm(op, x, *args)
        with counted() as count:
            assert op(x, "ab", None).tolist() == [2.0] * 3 and op(x, "abc", None).tolist() == [3.0] * 3
            assert op(x, "ab", torch.float64).dtype == torch.float64 and count.misses == 0
            assert op(x, "a", None).tolist() == [1.0] * 3 and count.misses == 1

    def test_alignment_that_forward_asks_for(self, running):
        asked = []

        def forward(x, by):
            y = torch.empty_like(x)
            asked.append(cupyops.aligned(x, 16))
            launch(x, y, by if asked[-1] else -by)
            return y, ()

        op = scaled(forward)
        base = torch.ones(9)
        warm(op, base[:8])
        warm(op, base[1:])
        with counted() as count:
            assert op(base[:8]).tolist() == [2.0] * 8 and op(base[1:]).tolist() == [-2.0] * 8 and count.misses == 0

    def test_grad_mode_and_inference_mode(self, running):
        op, x = scaled(), leaf(5)
        warm(op, x)
        with torch.no_grad():
            assert not op(x).requires_grad
            warm(op, x)
            with counted() as count:
                assert not op(x).requires_grad and count.misses == 0
        assert op(x).requires_grad
        with torch.inference_mode():
            assert op(x).is_inference()
            warm(op, x)
            assert op(x).is_inference()
        assert op(x).requires_grad and not op(x).is_inference()

    def test_autocast_and_its_dtype(self, running):
        op, x = scaled(autocast="lower"), torch.randn(5)
        warm(op, x)
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype):
                warm(op, x)
                with counted() as count:
                    assert op(x).dtype == dtype and same(op(x), plainly(op, x)) and count.misses == 0
        assert op(x).dtype == torch.float32

    def test_autocast_with_a_gradient(self, running):
        op, x = scaled(autocast="lower"), leaf(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            warm(op, x)
            y = op(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert y.dtype == torch.bfloat16 and grad.dtype == torch.float32 and grad.tolist() == [2.0] * 5

    def test_one_tensor_twice(self, running):
        x, other = torch.ones(4), torch.full((4,), 5.0)
        warm(cupyops.add, x, x)
        warm(cupyops.add, x, other)
        with counted() as count:
            assert cupyops.add(other, other).tolist() == [10.0] * 4 and cupyops.add(other, x).tolist() == [6.0] * 4
            assert count.misses == 0

    def test_a_default_dtype(self, running):
        def forward(x, by):
            room = torch.empty(x.numel(), device=x.device)
            y = torch.empty_like(x)
            launch(x, y, by)
            launch(x, room, by) if room.dtype is x.dtype else launch(x, y, 10 * by)
            return y, ()

        op, x = scaled(forward), torch.ones(3)
        warm(op, x)
        torch.set_default_dtype(torch.float64)
        try:
            assert op(x).tolist() == [20.0] * 3
        finally:
            torch.set_default_dtype(torch.float32)
        with counted() as count:
            assert op(x).tolist() == [2.0] * 3 and count.misses == 0

    def test_deterministic_algorithms(self, running):
        op, x = scaled(), torch.randn(5)
        warm(op, x)
        torch.use_deterministic_algorithms(False)
        with counted() as count:
            assert same(op(x), 2 * x) and count.misses == 1

    def test_modes_and_transforms_take_their_own_routes(self, running):
        op, x = scaled(), torch.randn(5)
        warm(op, x)
        assert torch.equal(torch.func.vmap(op)(torch.stack([x, x]))[1], 2 * x)
        assert torch.func.grad(lambda t: op(t).sum())(x).tolist() == [2.0] * 5
        assert torch.func.jvp(op, (x,), (torch.ones(5),))[1].tolist() == [2.0] * 5
        with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
            assert isinstance(op(mode.from_tensor(x)), torch._subclasses.fake_tensor.FakeTensor)
        assert op(x.numpy()).tolist() == (2 * x).tolist()
        with counted() as count:
            op(x)
        assert count.misses == 0

    def test_another_simulator(self):
        op, x = scaled(), torch.randn(5)
        for _ in range(2):
            with cupyops.simulate():
                warm(op, x)
                with counted() as count:
                    assert same(op(x), 2 * x) and count.misses == 0
        assert same(op(x), 2 * x)  # by the reference

    def test_freed_memory_is_refused_as_ever(self, running):
        op, x = scaled(), torch.randn(5)
        warm(op, x)
        size = x.untyped_storage().nbytes()
        x.untyped_storage().resize_(0)
        with pytest.raises(LaunchError, match="a tensor with storage of its own"):
            op(x)
        x.untyped_storage().resize_(size)
        x.fill_(3.0)
        assert op(x).tolist() == [6.0] * 5

    def test_no_elements(self, running):
        op, x = scaled(), torch.randn(0, 3)
        warm(op, x)
        assert op(x).shape == (0, 3) and op(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


class TestRefusals:
    """What cannot be replayed is not, and says why."""

    def refused(self, forward, match, x=None):
        op, x = scaled(forward), torch.ones(4) if x is None else x
        warm(op, x)
        assert match in reason(op), reason(op)
        with counted() as count:
            found = op(x)
        assert count.recorded == 0
        return found

    @pytest.mark.parametrize("number, match", [
        (lambda x, by: x.max().item(), "item gives Python what may depend on data"),
        (lambda x, by: by if (x > 0).all() else 0.0, "__bool__ gives Python what may depend on data"),
        (lambda x, by: float(x.data_ptr() % 2 + 1), "data_ptr gives Python"),
        (lambda x, by: random.random(), "differs between calls alike"),
    ], ids=["data", "truth", "addresses", "random numbers of Python"])  # fmt: skip
    def test_a_number(self, running, number, match):
        def forward(x, by):
            y = torch.empty_like(x)
            launch(x, y, number(x, by))
            return y, ()

        self.refused(forward, match)
        if match.startswith("item"):
            op = scaled(forward)
            for value in range(1, 8):
                assert op(torch.full((4,), float(value))).tolist() == [value**2] * 4

    def test_a_tensor_from_elsewhere(self, running):
        kept = torch.zeros(4)

        def forward(x, by):
            y = torch.empty_like(x)
            launch(x, kept, by)
            launch(x, y, by)
            return y, ()

        self.refused(forward, "was given a tensor that is none of its arguments")

    def test_no_launch(self, running):
        assert self.refused(lambda x, by: (x.detach() * by, ()), "it launches no kernel").tolist() == [2.0] * 4

    def test_the_graph(self, running):
        def forward(x, by):
            with torch.enable_grad():
                t = x.detach().requires_grad_()
                (grad,) = torch.autograd.grad((t * by).sum(), t)
            y = torch.empty_like(x)
            launch(grad, y, 1.0)
            return y, ()

        assert self.refused(forward, "works on the graph").tolist() == [2.0] * 4

    def test_memory_of_the_default_device(self, running):
        def forward(x, by):
            y = torch.empty(x.shape)
            launch(x, y, by)
            return y, ()

        self.refused(forward, "empty is given no device")

    def test_a_number_that_differs_at_every_call(self, running):
        op, x = scaled(), torch.ones(3)
        with counted() as count:
            for step in range(40):
                assert op(x, float(step)).tolist() == [float(step)] * 3
        assert count.recorded == 0 and count.misses <= plans.MOST_NUMBERS + 1
        assert "its numbers differ from call to call" in reason(op)
        assert [len(numbers) for numbers in op._plans._variants.values()] == [plans.MOST_NUMBERS + 1]

    def test_errors_are_those_of_a_plain_call(self, running):
        with pytest.raises(InputError, match="normalized_shape"):
            cupyops.layer_norm(torch.ones(2, 3), (4,))
        warm(cupyops.layer_norm, torch.ones(2, 3), (3,))
        with pytest.raises(InputError, match="normalized_shape"):
            cupyops.layer_norm(torch.ones(2, 3), (4,))
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'normalized_shape'"):
            cupyops.layer_norm(torch.ones(2, 3))

    def test_an_error_while_recording(self, running):
        fail = []

        def forward(x, by):
            y = torch.empty_like(x)
            launch(x, y, by)
            if fail:
                raise InputError("not now")
            return y, ()

        op, x = scaled(forward), torch.ones(3)
        op(x)
        fail.append(1)
        with pytest.raises(InputError, match="not now"):
            op(x)
        fail.clear()
        warm(op, x)
        with counted() as count:
            assert op(x).tolist() == [2.0] * 3 and count.misses == 0


FACTOR = 2.0
other_scale = planned.scale


class TestNothingStale:
    def test_a_global_number(self, running, monkeypatch):
        def forward(x, by):
            y = torch.empty_like(x)
            launch(x, y, FACTOR)
            return y, ()

        op, x = scaled(forward), torch.ones(3)
        warm(op, x)
        monkeypatch.setitem(globals(), "FACTOR", 5.0)
        assert op(x).tolist() == [5.0] * 3
        monkeypatch.undo()
        with counted() as count:
            assert op(x).tolist() == [2.0] * 3 and count.misses == 0

    def test_a_global_kernel(self, running, monkeypatch):
        def forward(x, by):
            y = torch.empty_like(x)
            other_scale[1, 32](x, y, by, 3, T=x.dtype)
            return y, ()

        op, x = scaled(forward), torch.ones(3)
        warm(op, x)
        monkeypatch.setitem(globals(), "other_scale", cupyops.Kernel(CODE.replace("* by", "* by * 10"), "scale<T>"))
        assert op(x).tolist() == [20.0] * 3

    def test_a_closure(self, running):
        factor = 2.0

        def forward(x, by):
            y = torch.empty_like(x)
            launch(x, y, factor)
            return y, ()

        op, x = scaled(forward), torch.ones(3)
        warm(op, x)
        factor = 7.0
        assert op(x).tolist() == [7.0] * 3

    def test_a_global_of_backward(self, running, monkeypatch):
        def backward(saved, grad_y):
            grad_x = torch.empty_like(grad_y)
            launch(grad_y, grad_x, FACTOR)
            return grad_x

        op, x = scaled(None, backward), leaf(3)
        warm(op, x)
        monkeypatch.setitem(globals(), "FACTOR", 5.0)
        assert torch.autograd.grad(op(x), x, torch.ones(3))[0].tolist() == [5.0] * 3

    def test_another_role(self, running):
        op, x = scaled(), leaf(3)
        warm(op, x)
        before = op(x)

        @op.forward
        def _(x, by):
            y = torch.empty_like(x)
            launch(x, y, 10 * by)
            return y, ()

        assert torch.equal(op(x), 20 * x)

        @op.backward
        def _(saved, grad_y, by):
            grad_x = torch.empty_like(grad_y)
            launch(grad_y, grad_x, 10 * by)
            return grad_x

        for y in (op(x), before):
            assert torch.autograd.grad(y, x, torch.ones(3))[0].tolist() == [20.0] * 3

    def test_a_forward_put_in_its_place(self, running):
        op, x = scaled(), torch.ones(3)
        warm(op, x)
        genuine = op.definition.launch_forward
        op.definition.launch_forward = lambda x, by: (torch.full_like(x, 9.0), ())
        assert op(x).tolist() == [9.0] * 3
        op.definition.launch_forward = genuine
        assert op(x).tolist() == [2.0] * 3

    def test_an_operator_inside_a_public_function(self, running):
        op, x = scaled(), torch.ones(3)

        @op.interface
        def twice(input, by=2.0):
            return op(op(input, by), by)

        warm(twice, x)
        with counted() as count:
            assert twice(x).tolist() == [4.0] * 3 and count.misses == 0

        @op.forward
        def _(x, by):
            y = torch.empty_like(x)
            launch(x, y, 10 * by)
            return y, ()

        assert twice(x).tolist() == [400.0] * 3

    def test_a_kernel_that_takes_the_reference_now(self, running):
        op, x = scaled(), torch.ones(3)
        warm(op, x)
        op.unsupported(lambda x, by: "never")
        with cupyops.trace() as trace:
            op(x)
        assert trace.routes() == {"reference"}
        warm(op, x)
        assert "takes the reference route: never" in reason(op)


class TestPublicFunctions:
    def test_keywords_and_defaults(self, running):
        x, weight = torch.randn(4, 6), torch.randn(6)
        warm(cupyops.layer_norm, x, (6,), weight)
        with counted() as count:
            a = cupyops.layer_norm(input=x, normalized_shape=(6,), weight=weight)
            b = cupyops.layer_norm(x, (6,), bias=None, weight=weight, eps=1e-5)
            assert same(a, b) and count.misses == 0
            assert same(a, plainly(cupyops.layer_norm, x, (6,), weight))

    def test_axis_and_arrays(self, running):
        x = torch.randn(4, 6)
        warm(cupyops.softmax, x, 1)
        assert same(cupyops.softmax(x, axis=1), cupyops.softmax(x, 1))
        assert cupyops.softmax(x.numpy(), axis=1).tolist() == cupyops.softmax(x, 1).tolist()
        with pytest.raises(InputError, match="axis and dim mean the same"):
            cupyops.softmax(x, 1, axis=1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'axes'"):
            cupyops.softmax(x, 1, axes=1)

    def test_a_warning_is_given_each_time(self, running):
        x = torch.randn(4, 6)
        for _ in range(6):
            with pytest.warns(UserWarning, match="Implicit dimension choice"):
                cupyops.softmax(x)

    def test_an_input_that_is_returned(self, running):
        x = torch.randn(4)
        for _ in range(6):
            assert cupyops.dropout(x, 0.0) is x

    def test_random_numbers_are_drawn_anew(self, running):
        x = torch.ones(1000)
        warm(cupyops.dropout, x, 0.5)
        with counted() as count:
            torch.manual_seed(3)
            one, other = cupyops.dropout(x, 0.5), cupyops.dropout(x, 0.5)
            assert not torch.equal(one, other) and count.misses == 0
        torch.manual_seed(3)
        assert same(plainly(cupyops.dropout, x, 0.5), one) and same(plainly(cupyops.dropout, x, 0.5), other)

    def test_what_is_updated_in_place(self, running):
        x, mean, var = leaf(4, 3), torch.zeros(3), torch.ones(3)
        warm(cupyops.batch_norm, x, mean, var, None, None, True)
        others = torch.zeros(3), torch.ones(3)
        versions = [one._version for one in others]
        with counted() as count:
            y = cupyops.batch_norm(x, *others, None, None, True)
            assert count.misses == 0
        expected = torch.zeros(3), torch.ones(3)
        assert same(plainly(cupyops.batch_norm, x, *expected, None, None, True), y)
        assert same(list(others), list(expected))
        assert [one._version for one in others] == [version + 1 for version in versions]

    def test_in_place_without_a_gradient(self, running):
        x = torch.randn(4)
        for _ in range(6):
            value = x.clone()
            version = value._version
            assert cupyops.relu(value, inplace=True) is value and same(value, torch.relu(x))
            assert value._version == version + 1

    def test_several_operators_with_a_gradient_are_planned_one_by_one(self, running):
        op, x = scaled(), leaf(3)

        @op.interface
        def twice(input, by=2.0):
            return op(op(input, by), by)

        for _ in range(8):
            (grad,) = torch.autograd.grad(twice(x), x, torch.ones(3))
            assert grad.tolist() == [4.0] * 3
        with counted() as count:
            twice(x)
        assert count.misses == 0


class TestBackward:
    def test_other_gradients(self, running):
        op, x = scaled(), leaf(4, 6)
        warm(op, x)
        grads = {
            "expanded": torch.ones(()).expand(4, 6),
            "transposed": torch.randn(6, 4).t(),
            "misaligned": torch.randn(25)[1:].view(4, 6),
            "negative": torch._neg_view(torch.randn(4, 6)),
        }
        for name, grad in grads.items():
            for _ in range(4):
                (found,) = torch.autograd.grad(op(x), x, grad)
                assert torch.equal(found, 2 * grad), name
        with counted() as count:
            for grad in grads.values():
                torch.autograd.grad(op(x), x, grad)
        assert count.backward_misses == 0

    def test_which_gradients_are_wanted(self, running):
        x, w, b = leaf(5, 8), leaf(8), leaf(8)
        grad = torch.randn(5, 8)
        warm(cupyops.layer_norm, x, (8,), w, b)
        for wanted in ([x], [w], [b], [x, w], [w, b], [x, w, b]):
            expected = torch.autograd.grad(plainly(cupyops.layer_norm, x, (8,), w, b), wanted, grad)
            for _ in range(4):
                found = torch.autograd.grad(cupyops.layer_norm(x, (8,), w, b), wanted, grad)
                assert same(list(found), list(expected))

    def test_twice_by_the_same_graph(self, running):
        x, target = leaf(6, 40), torch.randint(0, 40, (6,))
        loss = plainly(cupyops.cross_entropy, x, target)
        expected = [torch.autograd.grad(loss, x, retain_graph=kept)[0] for kept in (True, False)]
        for _ in range(7):
            loss = cupyops.cross_entropy(x, target)
            (first,) = torch.autograd.grad(loss, x, retain_graph=True)
            (second,) = torch.autograd.grad(loss, x)
            assert same([first, second], expected)
            assert first.data_ptr() != second.data_ptr()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                torch.autograd.grad(loss, x)

    def test_twice_differentiated(self, running):
        x, w = leaf(4, 6), leaf(6)
        warm(cupyops.layer_norm, x, (6,), w)

        def second(function):
            (grad,) = torch.autograd.grad((function(x, (6,), w) ** 2).sum(), x, create_graph=True)
            return torch.autograd.grad(grad.square().sum(), [x, w])

        theirs = second(torch.nn.functional.layer_norm)
        for _ in range(3):
            torch.testing.assert_close(second(cupyops.layer_norm), theirs, rtol=1e-3, atol=1e-3)

    def test_hooks_on_saved_tensors(self, running):
        x, w = leaf(4, 6), leaf(6)
        warm(cupyops.layer_norm, x, (6,), w)
        expected = torch.autograd.grad(cupyops.layer_norm(x, (6,), w).sum(), [x, w])
        hooks = {
            "copies": (torch.clone, lambda t: t),
            "other strides": (lambda t: torch.empty(t.shape[::-1]).t().copy_(t) if t.dim() == 2 else t, lambda t: t),
            "wider": (lambda t: t.double(), lambda t: t.float()),
        }
        for pack, unpack in hooks.values():
            for _ in range(3):
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    y = cupyops.layer_norm(x, (6,), w)
                torch.testing.assert_close(torch.autograd.grad(y.sum(), [x, w]), expected)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoint(self, running, reentrant):
        x, w, b = leaf(4, 6), leaf(6), leaf(6)
        expected = torch.autograd.grad(torch.nn.functional.layer_norm(x, (6,), w, b).sum(), [x, w, b])
        for _ in range(8):
            y = checkpoint(lambda x, w, b: cupyops.layer_norm(x, (6,), w, b), x, w, b, use_reentrant=reentrant)
            for one in (x, w, b):
                one.grad = None
            y.sum().backward()
            torch.testing.assert_close((x.grad, w.grad, b.grad), expected)
            y = cupyops.layer_norm(x, (6,), w, b)
            torch.testing.assert_close(torch.autograd.grad(y.sum(), [x, w, b]), expected)

    def test_checkpointed_calls_are_replayed(self, running):
        x, w, b = leaf(4, 6), leaf(6), leaf(6)

        def step():
            y = checkpoint(lambda x, w, b: cupyops.layer_norm(x, (6,), w, b), x, w, b, use_reentrant=False)
            return torch.autograd.grad(y.sum(), [x, w, b])

        expected = step()
        for _ in range(5):
            assert same(list(step()), list(expected))
        with counted() as count:
            assert same(list(step()), list(expected))
        assert (count.misses, count.backward_misses) == (0, 0)
        y = cupyops.layer_norm(x, (6,), w, b)
        assert same(list(torch.autograd.grad(y.sum(), [x, w, b])), list(expected))

    def test_changed_in_place_in_between(self, running):
        x, w = leaf(4, 6), leaf(6)
        warm(cupyops.layer_norm, x, (6,), w)
        value = x.clone()
        y = cupyops.layer_norm(value, (6,), w)
        value.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_several_outputs(self, running):
        @cupyops.operator("cupyops_plans::pair")
        def op(x: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, 3 * x

        @op.forward
        def _(x):
            y, z = torch.empty_like(x), torch.empty_like(x)
            planned.pair[1, 32](x, y, z, x.numel(), T=x.dtype)
            return (y, z), ()

        @op.backward
        def _(saved, grad_y, grad_z):
            given = [(grad, by) for grad, by in ((grad_y, 2.0), (grad_z, 3.0)) if grad is not None]
            parts = []
            for grad, by in given:
                parts.append(torch.empty_like(grad))
                launch(grad.contiguous(), parts[-1], by)
            return parts[0] if len(parts) == 1 else parts[0] + parts[1]

        x = leaf(4)
        for _ in range(7):
            y, z = op(x)
            assert torch.equal(y, 2 * x) and torch.equal(z, 3 * x)
            assert torch.autograd.grad(y, x, torch.ones(4), retain_graph=True)[0].tolist() == [2.0] * 4
            assert torch.autograd.grad(z, x, torch.ones(4), retain_graph=True)[0].tolist() == [3.0] * 4
            assert torch.autograd.grad([y, z], x, [torch.ones(4)] * 2)[0].tolist() == [5.0] * 4
        with counted() as count:
            y, z = op(x)
            torch.autograd.grad(z, x, torch.ones(4))
            assert count.misses == 0 and count.backward_misses == 0

    def test_what_forward_saved_is_returned(self, running):
        def forward(x, by):
            y, one, other = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
            launch(x, y, by)
            launch(torch.ones_like(x), one, by)
            launch(x, other, by)
            return y, (one, other)

        op, x = scaled(forward, lambda saved, grad_y: saved[0]), leaf(5)
        for _ in range(12):
            (grad,) = torch.autograd.grad(op(x), x, torch.ones(5))
            assert grad.tolist() == [2.0] * 5 and grad._base is None and grad.storage_offset() == 0

    def test_a_backward_by_the_reference(self, running):
        @cupyops.operator("cupyops_plans::without_backward")
        def op(x: Tensor, by: float = 2.0) -> Tensor:
            return x * by

        @op.forward
        def _(x, by):
            y = torch.empty_like(x)
            launch(x, y, by)
            return y, ()

        x = leaf(5)
        for _ in range(6):
            assert torch.autograd.grad(op(x), x, torch.ones(5))[0].tolist() == [2.0] * 5

    def test_a_leaf_changed_in_place_is_refused(self, running):
        x = leaf(4)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="leaf"):
                cupyops.relu(x, inplace=True)


class TestMemory:
    def test_a_plan_holds_no_tensor(self, running):
        op, x = scaled(), leaf(6)
        warm(op, x)
        grad = torch.ones(6)
        y = op(x)
        torch.autograd.grad(y, x, grad)
        references = [weakref.ref(one) for one in (x, y, grad)]
        del x, y, grad
        gc.collect()
        assert [reference() for reference in references] == [None] * 3 and op._plans.plans

    def test_a_function_has_so_many_plans_the_oldest_go(self, running, monkeypatch):
        monkeypatch.setattr(plans, "MOST", 3)
        op = scaled()
        for size in range(1, 7):
            warm(op, torch.ones(size))
        assert len(op._plans.plans) == 3 and set(op._plans.table) == {(4,), (5,), (6,)}
        with counted() as count:
            op(torch.ones(6))
            assert count.misses == 0
            op(torch.ones(1))
            assert count.misses == 1

    def test_so_many_plans_in_all(self, running, monkeypatch):
        monkeypatch.setattr(plans, "MOST_IN_ALL", 3)
        one, other = scaled(), scaled()
        for size in (1, 2, 3):
            warm(one, torch.ones(size))
        warm(other, torch.ones(1))
        assert (len(one._plans.plans), len(other._plans.plans)) == (2, 1) and len(plans._everywhere) == 3

    def test_signatures_that_are_never_repeated(self, running, monkeypatch):
        monkeypatch.setattr(plans, "MOST_SEEN", 4)
        op = scaled()
        for size in range(1, 20):
            op(torch.ones(size))
        assert len(op._plans.history.seen) <= 4 and not op._plans.plans
        assert len(op._plans._variants) <= 4


def test_threads(running):
    """Calls of several threads at once, of one signature and of others, forward and backward."""
    op, failures = scaled(), []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            with cupyops.plans():
                for step in range(30):
                    x = torch.randn(3 + step % 4, generator=generator).requires_grad_()
                    y = op(x)
                    (grad,) = torch.autograd.grad(y, x, torch.ones_like(x))
                    assert torch.equal(y, 2 * x) and torch.equal(grad, torch.full_like(x, 2.0))
        except BaseException as error:
            failures.append(error)

    if running == "generated":
        pytest.skip("the stand-in for the driver knows the memory of one thread")
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_alignment():
    x = torch.empty(64)
    assert cupyops.alignment(x, 64) == 64 and cupyops.alignment(x[1:], 64) == 4 and cupyops.aligned(x[4:])
    assert (
        not cupyops.aligned(x[2:])
        and cupyops.aligned(torch.empty(0))
        and cupyops.aligned(torch.empty(3, device="meta"))
    )


def test_half_types_are_served(running):
    op = scaled()
    for dtype in FLOATING:
        x = torch.ones(3, dtype=dtype)
        warm(op, x)
        assert op(x).dtype == dtype and op(x).tolist() == [2.0] * 3


def test_layouts_are_copied_as_they_were(running):
    op, x = scaled(), torch.randn(4, 6, 2)[..., 0]
    warm(op, x)
    with counted() as count:
        assert same(op(x + 0), plainly(op, x + 0))
        value = torch.randn(4, 6, 2)[..., 0]
        assert same(op(value), plainly(op, value)) and count.misses <= 1
    assert alike(x)[0].is_contiguous()


def test_what_is_not_recorded_in_the_simulator_runs_outside_of_it():
    """A signature that is given up is made the plain way by kernels, where there are any."""
    x, weight = (
        torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), requires_grad=True) for seed in (0, 1)
    )
    target = torch.arange(4)

    def gradient(function):
        return torch.autograd.grad(function(x, weight, target), (x, weight))

    expected = gradient(lambda x, weight, target: torch.nn.functional.cross_entropy(x @ weight.T, target))
    with cupyops.simulate():
        for _ in range(5):
            torch.testing.assert_close(gradient(cupyops.fused_linear_cross_entropy), expected)
    torch.testing.assert_close(gradient(cupyops.fused_linear_cross_entropy), expected)
