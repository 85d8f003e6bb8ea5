"""Other arguments: shapes and numbers that the sample call has not, and the reference takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..call import Call, Outcome, gradients, tensors_of
from ..case import Case
from ..hazard import Failure, NotApplicable, hazard, told
from ..numbers import near, other_numbers
from ..recast import widened
from ..refusals import REFUSALS, is_clear

_MOST_DIMS = 4  # of a tensor, that are made 1


@hazard("a tensor that is broadcast gives the right results, and gradients summed over what it is broadcast along")
def broadcast(case: Case) -> None:
    """Each tensor in turn with each size 1, with all of them, and without its first dimension, where the results stay as
    large as they were."""
    tensors, tried = case.call.all_tensors(), _Tried(case)
    if len(tensors) < 2:
        raise NotApplicable("one tensor alone")
    shapes = [y.shape for y in case.plain.outputs]
    for index, tensor in enumerate(tensors):
        for what, smaller in _smaller(tensor):
            call = case.call.replaced(tensor, smaller.requires_grad_(tensor.requires_grad))
            tried(call, f"tensor {index} {what}", lambda given: [y.shape for y in given.outputs] == shapes)
    tried.needs_any("the reference broadcasts no tensor of this call")


@hazard("tensors of one dimension more, and of one less, give PyTorch's answer, or an error")
def dimensions(case: Case) -> None:
    """The largest tensors, or else all of them, twice under each other; then the first row of them."""
    case.needs_floating()
    most, tried = max(tensor.dim() for tensor in case.call.all_tensors()), _Tried(case)
    for least in (most, 0):
        tried(_of_other_dimensions(case.call, least, _stacked), "of one dimension more")
    for least in (most, 1) if most else ():
        tried(_of_other_dimensions(case.call, least, lambda tensor: tensor[0].clone()), "of one dimension less")
    tried.needs_any("the reference takes no other number of dimensions")


@hazard("other numbers and flags give PyTorch's answer, or an error")
def numbers(case: Case) -> None:
    """Each that is given or has a default, in turn: numbers a little larger and smaller, flags the other way."""
    tried = _Tried(case, lenient=False)
    for call, what in other_numbers(case, near):
        tried(call, what, lambda given: not _is_random(case, call, given))  # noqa: B023
    tried.needs_any("no number or flag can be another")


class _Tried:
    """Judges calls that may be refused, and remembers what came of them."""

    def __init__(self, case: Case, lenient: bool = True) -> None:
        self.case, self.lenient = case, lenient
        self.judged, self.refusal = False, ""

    def __call__(self, call: Call, what: str, wanted: Callable[[Outcome], bool] = lambda given: True) -> None:
        """Judge a call that the reference takes, with results that are `wanted`.

        The function comes first: what it refuses is not asked of PyTorch, which reads past the end of some tensors that do
        not fit. But not where there are indices, of which one that is out of range would end the process on a GPU. A forward
        may refuse a call; a backward after a forward that did not may not.
        """
        indices = not all(tensor.is_floating_point() for tensor in call.all_tensors())
        if indices and _reference_outcome(self.case, call) is None:
            return
        leaves, error = call.relaid(), None
        try:
            outputs = tensors_of(leaves.of(self.case.target.function))
        except REFUSALS as refusal:
            if is_clear(refusal):
                self.refusal = f"it refuses {what}: {str(refusal).partition(chr(10))[0]}"
                return
            error = refusal
        given = _reference_outcome(self.case, call)
        if given is None or not wanted(given):
            return
        if error is not None:
            raise error
        with told(what):
            try:
                found = gradients(outputs, leaves, self.case.grads(outputs))
            except REFUSALS as refusal:
                raise Failure(f"backward: {type(refusal).__name__}: {refusal}") from refusal
            self.case.judge(Outcome(outputs, found, self.case.inference(call.relaid())), call, lenient=self.lenient)
        self.judged = True

    def needs_any(self, otherwise: str) -> None:
        """Raise `NotApplicable` where nothing was judged: for what the last refusal says, or for another reason."""
        if not self.judged:
            raise NotApplicable(self.refusal or otherwise)


def _reference_outcome(case: Case, call: Call) -> Outcome | None:
    """Outcome of the reference; None where it refuses the call or its backward, or gives what cannot be compared."""
    try:
        given = case.expected(call)[0]
    except (NotApplicable, *REFUSALS):
        return None
    found = (result for _, result in given.named() if result is not None)
    return given if all(result.layout is torch.strided for result in found) else None


def _smaller(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    plain = tensor.detach()
    dims = [dim for dim, size in enumerate(plain.shape) if size > 1][:_MOST_DIMS]
    for dim in dims:
        yield f"of size 1 in dimension {dim}", plain.narrow(dim, 0, 1).clone()
    if len(dims) > 1:
        yield "of one element", plain[tuple(slice(1) for _ in plain.shape)].clone()
    if plain.dim() and plain.shape[0]:
        yield "without its first dimension", plain[0].clone()


def _of_other_dimensions(call: Call, least: int, change: Callable[[Tensor], Tensor]) -> Call:
    """The call with each tensor of at least so many dimensions changed."""

    def changed(tensor: Tensor) -> Tensor:
        if tensor.dim() < least or not tensor.numel():
            return tensor
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    return call.map(changed)


def _stacked(tensor: Tensor) -> Tensor:
    """Twice, floating-point numbers the second time in another order."""
    return torch.stack([tensor, tensor.roll(1, -1) if tensor.dim() and tensor.is_floating_point() else tensor])


def _is_random(case: Case, call: Call, given: Outcome) -> bool:
    """True if the reference, or the function, gives something quite different when it is called again."""
    again = case.theirs(call).outputs
    ours = [tensors_of(call.relaid().of(case.target.function)) for _ in range(2)]
    pairs = [*zip(given.outputs, again), *zip(*ours)]
    return not all(torch.allclose(widened(a), widened(b), 1e-2, 1e-2, equal_nan=True) for a, b in pairs)
