"""Gradients: whatever the gradient looks like that arrives, and whoever wants one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING
from ..._operator.derivation.backward import Backward
from ..._operator.derivation.definition import Definition
from ..._operator.operator import operators
from ..._util import torch_private
from ..call import Call, Outcome, differentiable, gradients, tensors_of
from ..case import Case, widened
from ..hazard import Failure, NotApplicable, hazard, told

_LINE = 64  # elements, of a multiple of 16 bytes in every dtype


@hazard("a gradient expanded from one number, as `.sum().backward()` gives, gives the right gradients")
def grad_expanded(case: Case) -> None:
    """Stride 0 in every dimension; then only in the first, and only in the last."""
    case.needs_gradient()
    for change in (_one_number, lambda g: _expanded_along(g, 0), lambda g: _expanded_along(g, -1)):
        outputs, leaves = _forward(case)
        grads = [change(grad) for grad in case.grads(outputs)]
        ours = Outcome(outputs, gradients(outputs, leaves, grads))
        # a constant gradient makes terms cancel outright: what is left is the rounding of each, a unit up or down
        draws = [torch.randn(g.shape, generator=case.generator(2), dtype=torch.float64) for g in grads]
        shifted = [widened(g) * (1 + torch.finfo(g.dtype).eps * d.sign().to(g.device)) for g, d in zip(grads, draws)]
        case.compare(ours, *case.expected(case.call, grads), moved=case.truth(case.call, shifted))


@hazard("a gradient laid out unlike its output gives the right gradients")
def grad_strided(case: Case) -> None:
    """Transposed, every other element of a larger tensor, and a slice out of the middle of one."""
    case.needs_gradient()
    _with_grads(case, {"transposed": _transposed, "every other element": _every_other, "sliced": _sliced})


@hazard("a gradient one element past a 16-byte boundary gives the right gradients")
def grad_misaligned(case: Case) -> None:
    """Contiguous all the same: wide loads must look at the address."""
    case.needs_gradient()
    _with_grads(case, {"misaligned": _one_element_on})


@hazard("a gradient whose negative or conjugate bit is set gives the right gradients")
def grad_bits(case: Case) -> None:
    """The memory holds the values negated, as that of a conjugate's imaginary part does, or the conjugates."""
    case.needs_gradient()
    _with_grads(case, {"with a negative bit": _negated_twice, "with a conjugate bit": _conjugated_twice})


@hazard("a gradient that is of a subclass of Tensor gives the right gradients")
def grad_subclass(case: Case) -> None:
    """The subclass changes nothing by `__torch_function__`."""
    case.needs_gradient()
    _with_grads(case, {"of a subclass": lambda grad: grad.as_subclass(Subclass)})


@hazard("each input alone can want a gradient, and no other gradient is computed then")
def partial_gradients(case: Case) -> None:
    """Some weights of a model may be frozen."""
    case.needs_gradient()
    count = len(case.call.tensors())
    if count < 2:
        raise NotApplicable("one input wants a gradient")
    for index in range(count):
        leaves = case.call.relaid()
        for position, tensor in enumerate(leaves.tensors()):
            tensor.requires_grad_(position == index)
        outputs = tensors_of(leaves.of(case.target.function))
        with told(f"where only input {index} of {count} wants a gradient"):
            with _only_what_is_needed():
                found = _backward(outputs, leaves.tensors(), _grad_of_each(case), range(len(outputs)))
            _same_gradients(case, {index: found[0]})


@hazard("a gradient that arrives for some outputs only counts as zero for the others")
def missing_grads(case: Case) -> None:
    """Each output alone has a gradient."""
    case.needs_gradient()
    takes = [i for i, y in enumerate(case.plain.outputs) if y.requires_grad]
    if len(takes) < 2:
        raise NotApplicable("one output has a gradient")
    given = _grad_of_each(case)
    for index in takes:
        outputs, leaves = _forward(case)
        found = _backward(outputs, leaves.tensors(), given, [index])
        ours = [None if plain is None else mine for mine, plain in zip(found, case.plain.gradients)]
        grads = [given[i] if i == index else torch.zeros_like(given[i]) for i in takes]
        with told(f"where a gradient arrives for output {index} alone"):
            case.judge(Outcome(outputs, ours), case.call, grads)


@hazard("a second backward through a retained graph gives the same gradients")
def retained_graph(case: Case) -> None:
    """Saved tensors must survive the first backward."""
    case.needs_gradient()
    outputs, leaves = _forward(case)
    grads = case.grads(outputs)
    gradients(outputs, leaves, grads, retain_graph=True)
    with told("the second time"):
        case.same_as_plain(Outcome(outputs, gradients(outputs, leaves, grads)))


@hazard("after an input was changed in place backward gives the gradients of the old values, or PyTorch's error")
def changed_input(case: Case) -> None:
    """Each tensor in turn, between forward and backward: never a silently wrong gradient."""
    case.needs_gradient()
    for index in range(len(case.call.all_tensors())):
        leaves = case.call.map(_writable)
        outputs = tensors_of(leaves.of(case.target.function))
        _change(leaves.all_tensors()[index], index in case.call.kept)
        try:
            found = gradients(outputs, leaves, case.grads(outputs))
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            continue
        with told(f"tensor {index} changed before backward"):
            _same_gradients(case, dict(enumerate(found)))


@hazard("a call of other values between a forward and its backward changes neither its results nor its gradients")
def calls_between(case: Case) -> None:
    """An operator may be used twice in a model: what it has kept of one call must not be that of another."""
    calls = case.call, case.varied()
    leaves = [call.relaid() for call in calls]
    outputs = [tensors_of(each.of(case.target.function)) for each in leaves]
    without = [case.inference(call.relaid()) for call in calls]
    for what, call, each, results, others in zip(("first", "second"), calls, leaves, outputs, without):
        with told(f"the {what} of two calls"):
            case.judge(Outcome(results, gradients(results, each, case.grads(results)), others), call)


@hazard("gradients add up in `.grad`")
def accumulated_grads(case: Case) -> None:
    """Forward and `backward()` twice on the same leaves."""
    case.needs_gradient()
    leaves = case.call.relaid()
    for times in (1, 2):
        outputs = tensors_of(leaves.of(case.target.function))
        torch.autograd.backward(differentiable(outputs), case.grads(outputs))
        found = [None if leaf.grad is None else leaf.grad.clone() / times for leaf in leaves.tensors()]
        with told(f".grad after {times} calls of backward(), divided by {times}"):
            _same_gradients(case, dict(enumerate(found)))


@hazard("under no_grad and in inference_mode the values are the same and nothing requires a gradient")
def no_gradient_wanted(case: Case) -> None:
    """Check modes in which no gradient is wanted although inputs ask for one."""
    case.needs_gradient()
    for mode in (torch.no_grad, torch.inference_mode):
        with told(f"under {mode.__name__}"):
            with mode():
                outputs, theirs = (
                    tensors_of(case.call.of(one)) for one in (case.target.function, case.target.reference)
                )
            # a view of an input that requires one says that it does so, too
            if any(y.requires_grad and not other.requires_grad for y, other in zip(outputs, theirs)):
                raise Failure("an output requires a gradient")
            case.judge_outputs([y.clone() for y in outputs], case.call)


# --- calls ---


def _forward(case: Case) -> tuple[list[Tensor], Call]:
    leaves = case.call.relaid()
    return tensors_of(leaves.of(case.target.function)), leaves


def _grad_of_each(case: Case) -> dict[int, Tensor]:
    """The gradient of the plain call for each output that takes one, by the output's number."""
    takes = [i for i, y in enumerate(case.plain.outputs) if y.requires_grad]
    return dict(zip(takes, case.grads(case.plain.outputs), strict=True))


def _backward(
    outputs: Sequence[Tensor], wanted: Sequence[Tensor], grads: dict[int, Tensor], chosen: Sequence[int]
) -> list[Tensor]:
    """The gradients where only the chosen outputs have one; zeros where nothing arrives."""
    used = [i for i in chosen if i in grads and outputs[i].requires_grad]
    if not used:
        return [torch.zeros_like(leaf) for leaf in wanted]
    found = torch.autograd.grad(
        [outputs[i] for i in used], wanted, [grads[i].to(outputs[i].dtype) for i in used], materialize_grads=True
    )
    return list(found)


def _with_grads(case: Case, layouts: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """Backward with gradients of the same values laid out otherwise."""
    tried = False
    for name, change in layouts.items():
        outputs, leaves = _forward(case)
        plain = case.grads(outputs)
        grads = [change(grad) for grad in plain]
        if all(a is b for a, b in zip(plain, grads)):
            continue
        tried = True
        with told(f"gradient {name}"):
            case.same_as_plain(Outcome(outputs, gradients(outputs, leaves, grads)))
    if not tried:
        raise NotApplicable("no gradient can be laid out like that")


def _same_gradients(case: Case, found: dict[int, Tensor | None]) -> None:
    """Judge the gradients that there are, by their numbers; for the rest the plain call stands."""
    rest = dict(enumerate(case.plain.gradients))
    case.same_as_plain(Outcome(case.plain.outputs, [(rest | found)[i] for i in rest]))


@contextmanager
def _only_what_is_needed() -> Iterator[None]:
    """Raise `Failure` where a backward of cupyops computes a gradient that nobody wants."""
    held = {of: of.launch_backward for of in (op.definition for op in operators().values())}
    unneeded: list[str] = []
    for of, role in held.items():
        if role is not None:
            of.launch_backward = _watched(of, role, unneeded)  # type: ignore[assignment]
    try:
        yield
    finally:
        for of, role in held.items():
            of.launch_backward = role
    if unneeded:
        raise Failure(f"backward of {unneeded[0]}, which nobody wants")


def _watched(of: Definition, role: Backward, unneeded: list[str]) -> Callable[..., Any]:
    """The role, which also notes the gradients that it gives though they are not needed."""

    def backward(grads: Any, outputs: Any, saved: Any, args: Any, needs: Any, last: bool = False) -> Any:
        def launch(*given: Any) -> Any:
            found = role.launch(*given)
            at_hand = {_memory(tensor) for tensor in tensors_of(given)}
            listed = (found,) if isinstance(found, Tensor) or found is None else found
            for index, gradient in zip(role.tensors, listed):
                if gradient is not None and not needs[index] and _memory(gradient) not in at_hand:
                    unneeded.append(f"{of.name} computes the gradient of {of.parameters[index].name}")
            return found

        spy = copy.copy(role)
        spy.launch = launch
        return spy(grads, outputs, saved, args, needs, last)

    return backward


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# --- layouts and changes ---


class Subclass(Tensor):
    """A tensor that is one in all but its type."""


def _negated_twice(tensor: Tensor) -> Tensor:
    return torch_private.neg_view(-tensor) if tensor.dtype in FLOATING or tensor.is_complex() else tensor


def _conjugated_twice(tensor: Tensor) -> Tensor:
    return tensor.conj().resolve_conj().conj() if tensor.is_complex() else tensor


def _one_number(tensor: Tensor) -> Tensor:
    return torch.full((), 0.75, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _expanded_along(tensor: Tensor, dim: int) -> Tensor:
    return tensor.narrow(dim, 0, 1).expand(tensor.shape) if tensor.numel() and tensor.dim() else tensor


def _sliced(tensor: Tensor) -> Tensor:
    if not tensor.dim():
        return tensor
    size = tensor.shape[-1]  # aligned, so that it is the distance of the rows that is tried
    return torch.nn.functional.pad(tensor, (_LINE, _LINE - size % _LINE)).narrow(-1, _LINE, size)


def _transposed(tensor: Tensor) -> Tensor:
    """The first and the last dimension stored the other way round."""
    if tensor.dim() < 2:
        return tensor
    order = [tensor.dim() - 1, *range(1, tensor.dim() - 1), 0]
    return tensor.permute(order).contiguous().permute(order)


def _every_other(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2] if tensor.dim() else tensor


def _one_element_on(tensor: Tensor) -> Tensor:
    flat = tensor.flatten()
    return torch.cat([flat[:1], flat])[1:].view(tensor.shape)


def _writable(tensor: Tensor) -> Tensor:
    """A fresh leaf in which each element has a place of its own."""
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)


def _change(tensor: Tensor, kept: bool) -> None:
    """Change a tensor to other legal values; to the same ones, where only those are legal."""
    with torch.no_grad():
        if kept or tensor.is_floating_point() and tensor.dtype not in FLOATING:
            tensor.copy_(tensor.clone())
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.mul_(-2)
        else:
            tensor.zero_()
