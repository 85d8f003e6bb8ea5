"""What is kept for backward: for each choice of the gradients asked for, no more than PyTorch keeps, on every route."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twins import CASES, Case

import cupyops
from cupyops.errors import InputError

F = torch.nn.functional


def choices(case: Case) -> list[tuple[bool, ...]]:
    """Which of the tensors want a gradient: all that are left out are frozen."""
    return [wanted for wanted in itertools.product((True, False), repeat=len(case.tensors())) if any(wanted)]


def bytes_kept(function: Callable[..., Any], tensors: list[Tensor]) -> int:
    """The memory that a call keeps for its backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(*tensors)
    assert y.requires_grad
    return sum(kept.values())


def test_every_operator_has_a_case():
    ours = {name.removeprefix("cupyops::") for name in cupyops.operators() if name.startswith("cupyops::")}
    # silu_ is not run where a gradient is wanted: silu is, on a copy; the other has none
    without = {"silu_", "scaled_mm"}
    assert ours == {*CASES, *without}


@pytest.mark.parametrize("name", CASES)
def test_no_more_than_pytorch(name):
    case = CASES[name]
    for wanted in choices(case):
        tensors = [t.requires_grad_(need) for t, need in zip(case.tensors(), wanted)]
        with cupyops.simulate(), cupyops.trace() as trace:
            ours = bytes_kept(case.ours, [*tensors, *case.others()])
        assert f"cupyops::{name}" in {record.operator for record in trace.records}
        assert trace.launches() or not case.kernels
        assert ours <= bytes_kept(case.theirs, [*tensors, *case.others()]) + case.bytes, (wanted, ours, case.more)


BY_GRADIENT = [name for name in CASES if cupyops.operators()[f"cupyops::{name}"].definition.kept_by_gradient]


def test_which_depend_on_the_gradients_asked_for():
    assert {"linear", "matmul", "scale_shift", "swiglu", "geglu", "kl_div"} <= set(BY_GRADIENT)


@pytest.mark.parametrize("name", BY_GRADIENT)
def test_gradients_and_their_replay(name):
    """Each choice, and again and again: recorded plans keep as little."""
    case = CASES[name]
    for wanted in choices(case):
        tensors = [t.requires_grad_(need) for t, need in zip(case.tensors(), wanted)]
        leaves = [t for t in tensors if t.requires_grad]
        y = case.theirs(*tensors, *case.others())
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        expected = torch.autograd.grad(y, leaves, grad)
        with cupyops.simulate():
            for _ in range(5):
                found = torch.autograd.grad(case.ours(*tensors, *case.others()), leaves, grad)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "through"),
    [*((name, "eager") for name in BY_GRADIENT), ("linear", "dispatcher"), ("kl_div", "dispatcher")],
)
def test_second_derivatives(name, through):
    """With zeros in the place of what was not kept, on which the gradient does not depend."""
    case = CASES[name]
    for wanted in choices(case):
        tensors = [t.double().requires_grad_(need) for t, need in zip(case.tensors(), wanted)]
        leaves = [t for t in tensors if t.requires_grad]
        seconds = []
        for function in (case.ours, case.theirs):
            ours = function is case.ours
            with (
                cupyops.simulate() if ours else contextlib.nullcontext(),
                Nothing() if ours and through == "dispatcher" else contextlib.nullcontext(),
            ):
                others = [t.double() if t.is_floating_point() else t for t in case.others()]
                y = function(*tensors, *others)
                first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
                total = sum((one.sin() * torch.arange(one.numel()).view(one.shape)).sum() for one in first)
                seconds.append([*first, *torch.autograd.grad(total, leaves, allow_unused=True)])
        torch.testing.assert_close(*[[torch.zeros(()) if g is None else g for g in one] for one in seconds])


@pytest.mark.parametrize("through", ["eager", "replayed", "dispatcher", "compile"])
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (False, False, True)])
def test_a_frozen_layer(through, wanted):
    """LoRA's: its input is not kept, on any route."""
    tensors = [t.requires_grad_(need) for t, need in zip(CASES["linear"].tensors(), wanted)]
    function = torch.compile(cupyops.linear, backend="aot_eager") if through == "compile" else cupyops.linear
    with cupyops.simulate(), Nothing() if through == "dispatcher" else contextlib.nullcontext():
        for _ in range(5 if through == "replayed" else 1):
            ours = bytes_kept(function, tensors)
    assert ours == bytes_kept(F.linear, tensors)


class Nothing(TorchDispatchMode):
    """A mode that changes nothing: calls take the op that is registered."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class TestReads:
    """Of an author's operator."""

    def op(self, reads, read=lambda needs: needs):
        @cupyops.operator(toys.fresh())
        def product(x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

        product.forward(lambda x, weight: (x.detach() * weight.detach(), ()))

        @product.backward(reads=reads)
        def backward(saved, grad_y, x, weight, needs_grad):
            self.given = x, weight
            needs = read(needs_grad)
            return grad_y * weight if needs.x else None, grad_y * x if needs.weight else None

        return product

    def test_what_stands_in_for_it(self):
        """Its shape and dtype, and NaN for whoever reads it all the same."""
        op = self.op({"x": ("weight",), "weight": "x"})
        x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
        with toys.executor():
            (grad,) = torch.autograd.grad(op(x, weight).sum(), x)
        assert torch.equal(grad, weight)
        assert self.given[0].shape == (3, 4) and self.given[0].isnan().all() and self.given[1] is not None
        wrong = self.op({"x": ()})  # which is not so
        with toys.executor():
            (grad,) = torch.autograd.grad(wrong(x, weight.requires_grad_()).sum(), weight)
        assert grad.isnan().all()

    def test_all_is_kept_where_nothing_is_said(self):
        op = self.op({})
        x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
        with toys.executor():
            assert bytes_kept(op, [x, weight]) == 2 * 48

    def test_outputs_too(self):
        @cupyops.operator(toys.fresh())
        def op(x: Tensor, shift: Tensor) -> Tensor:
            return x.exp() + 0 * shift

        op.forward(lambda x, shift: (x.detach().exp(), ()))
        op.backward(lambda saved, grad_y, y: (grad_y * y, 0 * grad_y), reads={"y": ("x",), "x": (), "shift": ()})
        op.reference_backward(lambda saved, grad_y, y: (grad_y * y, 0 * grad_y))
        x, shift = torch.randn(3), torch.randn(3)
        for wanted, expected in (((True, False), 12), ((False, True), 0)):
            tensors = [t.detach().requires_grad_(need) for t, need in zip((x, shift), wanted)]
            with toys.executor():
                assert bytes_kept(op, tensors) == expected

    @pytest.mark.parametrize(
        ("reads", "told"),
        [
            ({"y": ("x",), "z": ()}, "reads names 'z', expected one of: x, weight, y"),
            ({"x": ("y",)}, "reads says that 'x' is read for 'y', expected one of: x, weight"),
        ],
    )
    def test_names(self, reads, told):
        with pytest.raises(InputError, match=told):
            self.op(reads)
