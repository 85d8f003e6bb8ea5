"""Layouts: views of every kind give what contiguous tensors give, laid out as PyTorch lays it out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING
from ..._util import torch_private
from ..._util.torch_private import tree_flatten, tree_unflatten
from ..call import INFERENCE, Call, Function, Outcome, gradients, tensors_of
from ..case import Case
from ..hazard import Failure, NotApplicable, hazard

Change = Callable[[Tensor], Tensor]

_ALIGNED = 64  # elements: past a 16-byte boundary by whole multiples, in every dtype


@hazard("a contiguous tensor one element past a 16-byte boundary gives the same result")
def misaligned(case: Case) -> None:
    """A tensor like `x[1:]`; wide loads must not be chosen by the shape alone."""
    _vary(case, lambda tensor: _offset(tensor, 1))


@hazard("a contiguous tensor that starts inside its storage gives the same result")
def storage_offset(case: Case) -> None:
    """Aligned, so that wide loads are taken: from the tensor's address, not its storage's."""
    _vary(case, lambda tensor: _offset(tensor, _ALIGNED))


@hazard("every other element of a larger tensor gives the same result")
def strided(case: Case) -> None:
    """A tensor like `x[..., ::2]`: no stride is 1."""
    _vary(case, lambda t: t.repeat_interleave(2, dim=-1)[..., ::2] if t.dim() else t)


@hazard("a slice out of the middle of a larger tensor gives the same result")
def sliced(case: Case) -> None:
    """A part of a fused projection: the last stride is 1, rows are further apart than they are long."""
    _vary(case, lambda t: torch.cat([t, t, t], -1).narrow(-1, t.shape[-1], t.shape[-1]) if t.dim() > 1 else t)


@hazard("tensors stored with their dimensions in the opposite order give the same result")
def transposed(case: Case) -> None:
    """Dense, but not contiguous."""
    _vary(case, _reversed)


@hazard("tensors with their channels last in memory give the same result")
def channels_last(case: Case) -> None:
    """Tensors of 4 and 5 dimensions."""
    _vary(case, _channels_last)


@hazard("a tensor expanded along a dimension, with stride 0, gives what its copy gives")
def expanded(case: Case) -> None:
    """Values equal along the first dimension, then along the last; compared with a contiguous copy of the same."""
    tried = False
    for dim in (0, -1):
        call = case.call.map_values(lambda tensor: _expanded(tensor, dim))  # noqa: B023
        if _is_varied(case, call):
            copied = case.with_call(call.map(lambda t: t.detach().contiguous().requires_grad_(t.requires_grad)))
            _judge(copied, call)
            tried = True
    if not tried:
        raise NotApplicable("no dimension to expand")


@hazard("a tensor whose negative bit is set gives the same result")
def negative_bit(case: Case) -> None:
    """A tensor like the imaginary part of a conjugate: the memory holds the values negated."""
    _vary(case, lambda t: torch_private.neg_view(-t) if t.dtype in FLOATING or t.is_complex() else t)


@hazard("a complex tensor whose conjugate bit is set gives the same result")
def conjugate_bit(case: Case) -> None:
    """A tensor like `x.conj()`: the memory holds the conjugates."""
    if not any(tensor.is_complex() for tensor in case.call.all_tensors()):
        raise NotApplicable("no complex tensor")
    _vary(case, lambda t: t.conj().resolve_conj().conj() if t.is_complex() else t)


@hazard("one tensor given for two arguments gives the right result, and the sum of both gradients")
def same_tensor_twice(case: Case) -> None:
    """Two inputs of one shape and dtype, one tensor object."""
    pair = _pair(case.call)
    if pair is None:
        raise NotApplicable("no two floating inputs of one shape and dtype")
    tied = case.wrapped(lambda function: _tied(function, *pair))
    tied.judge(tied.both_ways(case.call), case.call)


@hazard("outputs have the strides of PyTorch's, for transposed and channels_last inputs too")
def output_strides(case: Case) -> None:
    """Strides of dimensions with more than one element are compared; those of the others say nothing."""
    changes = {"transposed": _reversed, "channels_last": _channels_last}
    calls = {"given": case.call, **{what: _changed(case, change) for what, change in changes.items()}}
    plain = [y.shape for y in case.theirs(case.call).outputs]
    if plain != [y.shape for y in case.plain.outputs]:
        raise NotApplicable("the call itself is wrong, see accuracy")
    if not any(size > 1 for shape in plain for size in shape):
        raise NotApplicable("no output has more than one element")
    for what, call in calls.items():
        theirs, ours = case.theirs(call).outputs, {"": case.ours(call.relaid()).outputs}
        ours |= {INFERENCE: case.inference(call.relaid())} if call.tensors() else {}
        for when, outputs in ours.items():
            for index, (mine, expected) in enumerate(zip(outputs, theirs, strict=True)):
                if _strides(mine) != _strides(expected):
                    found = f"strides {mine.stride()}, PyTorch's {expected.stride()}"
                    raise Failure(f"output {index} of inputs as {what}{when}: {found}")


# --- variants of a call -----------------------------------------------------------------------------------------------


def _vary(case: Case, change: Change) -> None:
    """The call with each tensor changed to another layout of the same values."""
    call = _changed(case, change)
    if not _is_varied(case, call):
        raise NotApplicable("no tensor has such a layout")
    _judge(case, call)


def _judge(case: Case, call: Call) -> None:
    """Raise `Failure` unless a call of the case's values is as near as PyTorch's own, of dense tensors or of these views."""
    ours = case.both_ways(call)
    try:
        case.same_as_plain(ours)
    except Failure:
        views = call.relaid()
        outputs = tensors_of(views.of(case.target.reference))
        _, truth = case.expected(case.call)
        case.compare(ours, Outcome(outputs, gradients(outputs, views, case.grads(outputs))), truth)


def _changed(case: Case, change: Change) -> Call:
    def changed(tensor: Tensor) -> Tensor:
        plain = tensor.detach()
        result = change(plain)
        return tensor if result is plain else result.requires_grad_(tensor.requires_grad)

    return case.call.map(changed)


def _is_varied(case: Case, call: Call) -> bool:
    return any(a is not b for a, b in zip(call.all_tensors(), case.call.all_tensors()))


def _offset(tensor: Tensor, elements: int) -> Tensor:
    if not tensor.numel():
        return tensor
    return torch.cat([tensor.flatten()[:1].expand(elements), tensor.flatten()])[elements:].view(tensor.shape)


def _reversed(tensor: Tensor) -> Tensor:
    if sum(size > 1 for size in tensor.shape) < 2:
        return tensor
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _channels_last(tensor: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        return tensor
    return tensor.contiguous().clone(memory_format=formats[tensor.dim()])


def _expanded(tensor: Tensor, dim: int) -> Tensor:
    if not tensor.dim() or tensor.shape[dim] < 2:
        return tensor
    one = tensor.detach().narrow(dim, 0, 1).clone()
    return one.expand(tensor.shape).requires_grad_(tensor.requires_grad)


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and tensor.numel()]


# --- one tensor twice -------------------------------------------------------------------------------------------------


def _pair(call: Call) -> tuple[int, int] | None:
    """Positions of two arguments that could be one tensor, or None."""
    leaves, _ = tree_flatten((call.args, call.kwargs))
    numbers = lambda t: isinstance(t, Tensor) and (t.dtype in FLOATING or t.is_complex())  # noqa: E731
    places = [i for i, leaf in enumerate(leaves) if numbers(leaf)]
    alike = lambda i: (leaves[i].shape, leaves[i].dtype)  # noqa: E731
    return next(((i, j) for i in places for j in places if i < j and alike(i) == alike(j)), None)


def _tied(function: Function, first: int, second: int) -> Function:
    """The function with the tensor of the first place in the second place too."""

    def tied(*args: object, **kwargs: object) -> object:
        leaves, spec = tree_flatten((args, kwargs))
        leaves[second] = leaves[first]
        args, kwargs = tree_unflatten(leaves, spec)
        return function(*args, **kwargs)

    return tied
