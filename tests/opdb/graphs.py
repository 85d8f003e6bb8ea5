"""One sample of PyTorch's database through the backend of torch.compile, beside eager: results, gradients, inputs after.

Traced from AOTAutograd on, which is most of what torch.compile does with a single call; the graph runs by kernels, with the
calls of ATen that the backend leaves as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from compiled import traced
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .backends import Backend
from .comparison import assert_same, strides, tensors, widened

EQUAL, IN_PART, LEFT = "equal", "equal, in part by PyTorch's calls", "equal, PyTorch's calls alone"
NOT_TRACED, REFUSED, OTHER_LAYOUT = (
    "PyTorch does not trace it",
    "PyTorch refuses it",
    "PyTorch's trace has other strides or dimensions of size 1",
)
HALVES = (torch.float16, torch.bfloat16)
UNWRITTEN = ("empty", "new_empty")  # their results are what was in memory


class Sample:
    """A sample as a function of its tensors."""

    def __init__(self, function: Callable[..., Any], sample: Any) -> None:
        leaves, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.given = [leaves[k] for k in places]
        self.what = sample.summary()

        def call(*given: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for k, tensor in zip(places, given):
                filled[k] = tensor
            if any(tensor.dtype == torch.float64 for tensor in given):  # so is a half type that is asked for
                filled = [torch.float64 if one in HALVES else one for one in filled]
            first, args, kwargs = tree_unflatten(filled, spec)
            return tensors(function(first, *args, **kwargs))

        self.call = call

    def evaluated(self, call: Callable[..., Any], *, wide: bool = False) -> Evaluated:
        """Results and gradients of a function of the sample's tensors, from the same seeds each time."""
        return Evaluated(call, [_copied(t, wide) for t in self.given])


class Evaluated:
    """Results of a call, the gradients of its inputs, and the inputs afterwards."""

    def __init__(self, call: Callable[..., Any], given: list[Tensor]) -> None:
        torch.manual_seed(0)
        self.results = list(call(*given))
        outputs = [one for one in self.results if one.requires_grad]
        inputs = [one for one in given if one.requires_grad]
        self.gradients: Sequence[Tensor | None] = []
        if outputs and inputs:
            generator = torch.Generator().manual_seed(1)
            grads = [torch.randn(one.shape, generator=generator).to(one.device, one.dtype) for one in outputs]
            torch.manual_seed(1)
            self.gradients = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
        self.inputs = given

    def named(self) -> Iterator[tuple[str, Tensor | None]]:
        """All that is compared."""
        for what, found in (("output", self.results), ("gradient", self.gradients), ("input", self.inputs)):
            for k, one in enumerate(found):
                yield f"{what} {k}", one


def _copied(tensor: Tensor, wide: bool) -> Tensor:
    found = widened(tensor.detach()) if wide else tensor.detach()
    overlapping = tensor.layout is torch.strided and (not tensor.numel() or 0 in tensor.stride())
    if found.layout is not torch.strided or overlapping:
        copy = found.clone()
    else:
        copy = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device).copy_(found)
    return copy.requires_grad_(tensor.requires_grad)


@contextmanager
def _untraceable() -> Iterator[list[Exception]]:
    found: list[Exception] = []
    try:
        yield found
    except Exception as error:
        found.append(error)


def tried(function: Callable[..., Any], sample: Any, backend: Backend) -> str:
    """What became of a sample, one of the constants above.

    Raises:
        AssertionError: something differs from eager.
    """
    one = Sample(function, sample)
    with _untraceable() as errors:
        eager = one.evaluated(one.call)
    if errors:
        return REFUSED
    fast = traced(one.call)
    with backend.running(), _untraceable() as errors:
        found = one.evaluated(fast)
        if _drawn(eager, found):  # what traces draws, too
            found = one.evaluated(fast)
    if errors:
        if not fast.runners:
            return NOT_TRACED
        raise AssertionError("the compiled function fails") from errors[0]
    outcome = compared(eager, found, lambda: one.evaluated(one.call, wide=True))
    return outcome or _by_kernels(fast.runners)


def _drawn(eager: Evaluated, found: Evaluated) -> bool:
    pairs = zip(eager.results, found.results)
    return any(
        a.layout is torch.strided and a.shape == b.shape and not a.equal(b) for a, b in pairs if not a.is_complex()
    )


def compared(eager: Evaluated, found: Evaluated, truth: Callable[[], Evaluated]) -> str | None:
    """Raise where results, gradients or inputs differ; `OTHER_LAYOUT`, where the trace itself has not eager's."""
    exact: list[dict[str, Tensor | None]] = []

    def true(what: str) -> Tensor:
        if not exact:
            exact.append(dict(truth().named()))
        value = exact[0][what]
        assert value is not None
        return value

    outcome = None
    for (what, want), (_, got) in zip(eager.named(), found.named(), strict=True):
        if want is None or got is None:
            rest = [one for one in (want, got) if one is not None]
            assert not any(one.any() for one in rest), f"{what} is {got}, eager's {want}"
            continue
        if what.startswith("output"):
            assert want.requires_grad == got.requires_grad, f"{what} wants a gradient: {got.requires_grad}"
            if want.layout is torch.strided and strides(want) != strides(got):
                outcome = OTHER_LAYOUT
            if want.shape != got.shape and want.squeeze().shape == got.squeeze().shape:
                outcome, got = OTHER_LAYOUT, got.reshape(want.shape)
        dense = [one.detach() if one.layout is torch.strided else one.detach().to_dense() for one in (got, want)]
        assert_same(*dense, lambda what=what: true(what), what)
    return outcome


def _by_kernels(runners: Sequence[Any]) -> str:
    reasons = [runner.reason for runner in runners if runner.reason]
    made = [program for runner in runners for program in runner.programs]
    if not any(program.kernels for program in made):
        return LEFT
    return IN_PART if reasons or any(program.lowering.left for program in made) else EQUAL
