"""What is kept for backward: for each choice of the gradients asked for, no more than PyTorch keeps, on every route."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import toys
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cupyops
from cupyops.errors import InputError

F = torch.nn.functional
ROWS, COLS = 24, 16


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Case(NamedTuple):
    """A call of ours, its twin in PyTorch, and the tensors that may want a gradient, which are the arguments of both."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    tensors: Callable[[], list[Tensor]]
    more: str = ""  # why ours may keep more than PyTorch, and
    bytes: int = 0  # how much


image = lambda: values(2, 4, 8, 8)
rows = lambda: values(ROWS, COLS)
vector = lambda: values(COLS)
classes = torch.arange(ROWS) % COLS
places = torch.arange(ROWS)
angles = torch.outer(torch.arange(64.0), torch.arange(8.0))
running = torch.zeros(4), torch.ones(4)
CASES = {
    "add": Case(cupyops.add, torch.add, lambda: [rows(), rows()]),
    "add_scalar": Case(lambda x: cupyops.add(x, 2.0), lambda x: x + 2.0, lambda: [rows()]),
    "add_rms_norm": Case(
        lambda x, r, w: cupyops.add_rms_norm(x, r, (COLS,), w)[0],
        lambda x, r, w: F.rms_norm(x + r, (COLS,), w),
        lambda: [rows(), rows(), vector()],
        "for the gradient of the weight alone PyTorch keeps what the weight was multiplied by, and no weight and no rstd",
        4 * (COLS + ROWS),
    ),
    "amax": Case(lambda x: cupyops.amax(x, 1), lambda x: torch.amax(x, 1), lambda: [rows()], "ties", 8 * ROWS),
    "avg_pool2d": Case(lambda x: cupyops.avg_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), lambda: [image()]),
    "batch_norm": Case(
        lambda x, w, b: cupyops.batch_norm(x, None, None, w, b, True),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        lambda: [image(), values(4), values(4)],
    ),
    "batch_norm_inference": Case(
        lambda x, w, b: cupyops.batch_norm(x, *running, w, b),
        lambda x, w, b: F.batch_norm(x, *running, w, b),
        lambda: [image(), values(4), values(4)],
    ),
    "bias_gelu": Case(
        cupyops.bias_gelu,
        lambda x, b: F.gelu(x + b),
        lambda: [rows(), vector()],
        "input and bias, in the place of a sum of the size of input, which nothing else would hold",
        4 * COLS,
    ),
    "conv2d": Case(
        lambda x, w, b: cupyops.conv2d(x, w, b, padding=1),
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        lambda: [image(), values(8, 4, 3, 3), values(8)],
    ),
    "conv2d_relu_max_pool2d": Case(
        lambda x, w, b: cupyops.conv2d_relu_max_pool2d(x, w, b, padding=1),
        lambda x, w, b: F.max_pool2d(F.relu(F.conv2d(x, w, b, padding=1)), 2),
        lambda: [image(), values(8, 4, 3, 3), values(8)],
    ),
    "cross_entropy": Case(
        lambda x: cupyops.cross_entropy(x, classes),
        lambda x: F.cross_entropy(x, classes),
        lambda: [rows()],
        "the gradient, which forward has written, beside the logits: as much as PyTorch holds in its backward",
        4 * ROWS * COLS + 8 * ROWS + 4,
    ),
    "cross_entropy_probabilities": Case(
        cupyops.cross_entropy,
        F.cross_entropy,
        lambda: [rows(), rows().softmax(1)],
        "the targets, which are read for their own gradient too, and the sums of rows",
        4 * ROWS * COLS + 16 * ROWS,
    ),
    "dropout": Case(cupyops.dropout, F.dropout, lambda: [rows()]),
    "embedding": Case(
        lambda w: cupyops.embedding(classes, w), lambda w: F.embedding(classes, w), lambda: [values(COLS, 16)]
    ),
    "fused_linear_cross_entropy": Case(
        lambda x, w, b: cupyops.fused_linear_cross_entropy(x, w, classes, b),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), classes),
        lambda: [values(ROWS, 8), values(COLS, 8), vector()],
        "the gradients, which forward has made, in the place of the logits, which grow with rows times classes",
        4 * (ROWS * 8 + COLS * 8 + COLS) + 1,
    ),
    "geglu": Case(cupyops.geglu, lambda gate, up: F.gelu(gate) * up, lambda: [rows(), rows()]),
    "gelu": Case(cupyops.gelu, F.gelu, lambda: [rows()]),
    "group_norm": Case(
        lambda x, w, b: cupyops.group_norm(x, 2, w, b),
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda: [image(), values(4), values(4)],
        "the mean of a group with what was rounded off of it",
        2 * 2 * 4,
    ),
    "kl_div": Case(
        lambda x, t: cupyops.kl_div(x, t, reduction="sum"),
        lambda x, t: F.kl_div(x, t, reduction="sum"),
        lambda: [rows(), rows().softmax(1)],
    ),
    "layer_norm": Case(
        lambda x, w, b: cupyops.layer_norm(x, (COLS,), w, b),
        lambda x, w, b: F.layer_norm(x, (COLS,), w, b),
        lambda: [rows(), vector(), vector()],
    ),
    "linear": Case(cupyops.linear, F.linear, lambda: [rows(), values(16, COLS), values(16)]),
    "log_softmax": Case(lambda x: cupyops.log_softmax(x, 1), lambda x: F.log_softmax(x, 1), lambda: [rows()]),
    "matmul": Case(cupyops.matmul, torch.matmul, lambda: [rows(), values(COLS, 16)]),
    "max_pool2d": Case(lambda x: cupyops.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2), lambda: [image()]),
    "max_pool2d_with_indices": Case(
        lambda x: cupyops.max_pool2d(x, 2, return_indices=True)[0], lambda x: F.max_pool2d(x, 2), lambda: [image()]
    ),
    "mean": Case(lambda x: cupyops.mean(x, 1), lambda x: torch.mean(x, 1), lambda: [rows()]),
    "nll_loss": Case(lambda x: cupyops.nll_loss(x, classes), lambda x: F.nll_loss(x, classes), lambda: [rows()]),
    "relu": Case(cupyops.relu, F.relu, lambda: [rows()]),
    "relu_": Case(lambda x: cupyops.relu(x + 1, inplace=True), lambda x: F.relu(x + 1), lambda: [rows()]),
    "rms_norm": Case(
        lambda x, w: cupyops.rms_norm(x, (COLS,), w),
        lambda x, w: F.rms_norm(x, (COLS,), w),
        lambda: [rows(), vector()],
        "for the gradient of the weight alone PyTorch keeps what the weight was multiplied by, and no weight and no rstd",
        4 * (COLS + ROWS),
    ),
    "rope": Case(
        lambda x: cupyops.rope(x, angles.cos(), angles.sin(), places),
        lambda x: rotated(x, angles.cos()[places], angles.sin()[places]),
        lambda: [values(2, 3, ROWS, 16)],
        "the tables and the positions, in the place of a copy of the rows that they choose",
        2 * 4 * (64 - ROWS) * 8 + 8 * ROWS,
    ),
    "scale_shift": Case(cupyops.scale_shift, lambda x, w, b: x * w + b, lambda: [rows(), vector(), vector()]),
    "silu": Case(cupyops.silu, F.silu, lambda: [rows()]),
    "softmax": Case(lambda x: cupyops.softmax(x, 1), lambda x: F.softmax(x, 1), lambda: [rows()]),
    "sum": Case(lambda x: cupyops.sum(x, 1), lambda x: torch.sum(x, 1), lambda: [rows()]),
    "swiglu": Case(cupyops.swiglu, lambda gate, up: F.silu(gate) * up, lambda: [rows(), rows()]),
    "var": Case(lambda x: cupyops.var(x, 1), lambda x: torch.var(x, 1), lambda: [rows()], "the means", 4 * ROWS),
}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


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
    assert ours == {*CASES, "silu_"}  # which is not run where a gradient is wanted: silu is, on a copy


@pytest.mark.parametrize("name", CASES)
def test_no_more_than_pytorch(name):
    case = CASES[name]
    for wanted in choices(case):
        tensors = [t.requires_grad_(need) for t, need in zip(case.tensors(), wanted)]
        with cupyops.simulate(), cupyops.trace() as trace:
            ours = bytes_kept(case.ours, tensors)
        assert f"cupyops::{name}" in {record.operator for record in trace.records} and trace.launches()
        assert ours <= bytes_kept(case.theirs, tensors) + case.bytes, (wanted, ours, case.more)


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
        y = case.theirs(*tensors)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        expected = torch.autograd.grad(y, leaves, grad)
        with cupyops.simulate():
            for _ in range(5):
                found = torch.autograd.grad(case.ours(*tensors), leaves, grad)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["linear", "matmul", "scale_shift", "swiglu", "kl_div"])
@pytest.mark.parametrize("through", ["eager", "dispatcher"])
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
                y = function(*tensors)
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
            ({"y": ("x",), "z": ()}, "reads names 'z', expected some of: x, weight, y"),
            ({"x": ("y",)}, "reads says that 'x' is read for 'y', expected some of: x, weight"),
        ],
    )
    def test_names(self, reads, told):
        with pytest.raises(InputError, match=told):
            self.op(reads)
