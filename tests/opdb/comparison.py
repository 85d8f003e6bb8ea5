"""One sample, ours beside PyTorch's: results, strides, gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import cupyops
from cupyops.testing import Call, Tolerance

from .database import ours, pytorchs
from .known import named


class Comparison:
    """One sample of one entry of the database."""

    def __init__(self, info: Any, sample: Any) -> None:
        assert "out" not in sample.kwargs, "a sample with out=, which no function here has"
        self.info, self.sample = info, sample
        self.call = call_of(sample)
        copies = self.call.relaid()
        # for PyTorch, which may update what wants no gradient, as the running statistics of a batch_norm
        self.other = copies.with_tensors(copies.tensors(), self.call.tensors())
        self.what = f"{named(info)}({sample.summary()})"

    @cached_property
    def ours(self) -> list[Tensor]:
        """Our results."""
        return tensors(mine(self.info, self.call))

    @cached_property
    def theirs(self) -> list[Tensor]:
        """PyTorch's."""
        return tensors(theirs(self.info, self.other))

    def forward(self) -> None:
        """Raise unless results, their strides, their want of a gradient and the inputs afterwards are PyTorch's."""
        before = self._values()
        for index, (a, b) in enumerate(zip(self.ours, self.theirs, strict=True)):
            assert a.requires_grad == b.requires_grad, f"output {index} wants a gradient: {a.requires_grad}"
            assert strides(a) == strides(b), f"output {index} has strides {a.stride()}, PyTorch's {b.stride()}"
            assert_same(a, b, lambda i=index: self._true_outputs()[i], f"output {index}")
        self._assert_unchanged(before)

    def gradients(self) -> None:
        """Raise unless every gradient is PyTorch's."""
        before = self._values()
        grads = [torch.randn_like(y) for y in self.theirs if y.requires_grad]
        pairs = zip(gradients(self.ours, self.call, grads), self._their_gradients(grads), strict=True)
        for index, (a, b) in enumerate(pairs):
            assert (a is None) == (b is None), f"gradient {index} is {a}, PyTorch's {b}"
            if a is not None:
                assert_same(a, b, lambda i=index: self._true_gradients(grads)[i], f"gradient {index}")
        self._assert_unchanged(before)

    def _values(self) -> list[Tensor]:
        return [t.detach().clone() for t in self.call.all_tensors()]

    def _assert_unchanged(self, before: list[Tensor]) -> None:
        """But for what PyTorch changes too, and then as it does."""
        for now, other, then in zip(self._values(), self.other.all_tensors(), before, strict=True):
            if named(self.info).startswith("batch_norm") and now.is_cuda and not other.is_contiguous():
                continue  # PyTorch's CUDA kernels leave running statistics alone that are not contiguous
            if _equal(other.detach(), then):
                assert _equal(now, then), "an input was changed"
            else:
                torch.testing.assert_close(now, other.detach(), equal_nan=True, msg=lambda text: f"an input: {text}")

    def _their_gradients(self, grads: list[Tensor]) -> list[Tensor | None]:
        """PyTorch's; in float64 and rounded where its attention with a mask refuses on a GPU what it has itself saved."""
        try:
            return gradients(self.theirs, self.call, grads)
        except RuntimeError as error:
            if "LSE is not correctly aligned" not in str(error):
                raise
        wanted = self.call.tensors()
        found = zip(self._true_gradients(grads), wanted, strict=True)
        return [None if grad is None else grad.to(like.dtype) for grad, like in found]

    def _true_outputs(self) -> list[Tensor]:
        return tensors(theirs(self.info, doubled(self.call)))

    def _true_gradients(self, grads: list[Tensor]) -> list[Tensor | None]:
        wide = doubled(self.call)
        return gradients(tensors(theirs(self.info, wide)), wide, [widened(grad) for grad in grads])


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def call_of(sample: Any) -> Call:
    """What is called with."""
    return Call(sample.input, *sample.args, **sample.kwargs)


def mine(info: Any, call: Call) -> Any:
    """The call of our function."""
    return ours(info)(*call.args, **call.kwargs)


def theirs(info: Any, call: Call) -> Any:
    """The call of PyTorch's function; from here, since a warning in a module of cupyops is an error."""
    return pytorchs(info)(*call.args, **call.kwargs)


def wants_gradient(sample: Any) -> bool:
    """Whether an input does."""
    return bool(call_of(sample).tensors())


def route_of(info: Any, sample: Any) -> tuple[set[str], bool]:
    """(the operators that a call goes through, whether they launch kernels)."""
    # apart from the comparisons: a trace takes calls off the fast path, which is to be compared too
    with cupyops.trace() as trace, torch.no_grad():
        mine(info, call_of(sample).relaid())
    return {record.operator for record in trace.records}, bool(trace.launches())


def assert_same(
    mine: Tensor, other: Tensor, truth: Callable[[], Tensor], what: str, extra: Callable[[], float] = lambda: 0.0
) -> None:
    """Equal within assert_close's defaults for the dtype; where sums cancel, as near to float64 as PyTorch, or `extra`."""
    try:
        torch.testing.assert_close(mine, other, equal_nan=True, msg=lambda text: f"{what}: {text}")
    except AssertionError:
        inexact = mine.is_floating_point() or mine.is_complex()
        if not inexact or mine.dtype != other.dtype or mine.shape != other.shape:
            raise
        Tolerance().judge(mine, other, truth(), what, extra=extra())


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def gradients(outputs: list[Tensor], call: Call, grads: list[Tensor]) -> list[Tensor | None]:
    """Of each input that wants one."""
    wanted, takes = call.tensors(), [y for y in outputs if y.requires_grad]
    if not wanted or not takes:
        return []
    return list(torch.autograd.grad(takes, wanted, grads, allow_unused=True))


def doubled(call: Call) -> Call:
    """The same call in double precision, where sums are exact enough to tell who is nearer."""
    wide = call.map(lambda t: widened(t.detach()).requires_grad_(t.requires_grad))
    if wide.kwargs.get("dtype") is not None and wide.kwargs["dtype"].is_floating_point:
        wide.kwargs["dtype"] = torch.float64
    return wide


def widened(tensor: Tensor) -> Tensor:
    """In float64 or complex128; integers as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def strides(tensor: Tensor) -> list[tuple[int, int]]:
    """The strides along which there is a second element."""
    return [(dim, tensor.stride(dim)) for dim in range(tensor.dim()) if tensor.shape[dim] > 1 and tensor.numel()]
