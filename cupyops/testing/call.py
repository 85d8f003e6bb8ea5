"""One call of a function: its arguments, and what comes of it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._kernel.kernel import FLOATING
from .._util import torch_private
from .._util.torch_private import tree_leaves, tree_map, tree_map_only

if TYPE_CHECKING:
    from typing import Self

Function = Callable[..., Any]


class Call:
    """Arguments of a function; tensors may stand in lists, tuples and dicts among them.

    Attributes:
        args, kwargs: the arguments.
        kept: the numbers of the tensors, as `all_tensors` has them, whose values have a meaning that others lack.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.kept: frozenset[int] = frozenset()

    def like(self, args: Iterable[Any], kwargs: dict[str, Any]) -> Self:
        """A call of other arguments in the places of these."""
        other = copy.copy(self)
        other.args, other.kwargs = tuple(args), kwargs
        return other

    def of(self, function: Function) -> Any:
        """The call made."""
        return function(*self.args, **self.kwargs)

    def map(self, change: Callable[[Tensor], Any]) -> Call:
        """Copy of the call with each tensor changed."""
        args, kwargs = tree_map_only(Tensor, change, (self.args, self.kwargs))
        return self.like(args, kwargs)

    def map_floating(self, change: Callable[[Tensor], Any]) -> Call:
        """Copy of the call with each floating-point tensor changed; not those of float8, in which nobody computes."""
        return self.map(lambda tensor: change(tensor) if tensor.dtype in FLOATING else tensor)

    def map_values(self, change: Callable[[Tensor], Any]) -> Call:
        """Copy of the call with other values in each floating-point or complex tensor whose values are not `kept`."""
        count = itertools.count()
        return self.map(lambda tensor: change(tensor) if self._is_free(tensor, next(count)) else tensor)

    def _is_free(self, tensor: Tensor, number: int) -> bool:
        return number not in self.kept and tensor.dtype in (*FLOATING, torch.complex64, torch.complex128)

    def free_values(self) -> list[Tensor]:
        """The tensors that `map_values` changes."""
        return [tensor for number, tensor in enumerate(self.all_tensors()) if self._is_free(tensor, number)]

    def replaced(self, old: Tensor, new: Any) -> Call:
        """Copy of the call with `new` wherever `old` is."""
        return self.map(lambda tensor: new if tensor is old else tensor)

    def with_tensors(self, old: Sequence[Tensor], new: Sequence[Any]) -> Call:
        """Copy of the call with some tensors replaced."""
        replace = {id(before): after for before, after in zip(old, new, strict=True)}
        return self.map(lambda tensor: replace.get(id(tensor), tensor))

    def resized(self, size: int, new: int, numbers: bool = True) -> Call:
        """Copy of the call with every extent of `size` made `new`, and with `numbers` every int argument of that value.

        Longer tensors repeat their values; indices into what has become shorter stay inside it.
        """

        def change(value: Any) -> Any:
            if isinstance(value, Tensor):
                return _resized(value, size, new)
            return new if numbers and type(value) is int and value == size else value

        args, kwargs = tree_map(change, (self.args, self.kwargs))
        return self.like(args, kwargs)

    def all_tensors(self) -> list[Tensor]:
        """Every tensor, in order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def resized_along(self, dim: int, size: int, new: int) -> Call:
        """The call with each tensor that has `size` elements along `dim`, counted from the end, resized there alone."""

        def change(tensor: Tensor) -> Tensor:
            is_meant = tensor.dim() >= -dim and tensor.shape[dim] == size
            return _resized(tensor, size, new, [dim]) if is_meant else tensor

        return self.map(change)

    def tensors(self) -> list[Tensor]:
        """The tensors that want a gradient, in order."""
        return [tensor for tensor in self.all_tensors() if tensor.requires_grad]

    def leaves(self) -> Call:
        """Copy of the call on fresh leaves of the same values and dense strides; what wanted a gradient does so again."""
        return self.map(lambda t: t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad))

    def relaid(self) -> Call:
        """Fresh leaves with the very strides, offset and surroundings of these tensors."""
        return self.map(_relaid)

    def closure(self, function: Function) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        """(f, inputs), with f a function of the tensors that want a gradient alone, and its first output."""
        inputs = tuple(self.tensors())

        def f(*values: Tensor) -> Any:
            replace = {id(old): new for old, new in zip(inputs, values)}
            return first(self.map(lambda t: replace.get(id(t), t)).of(function))

        return f, inputs

    def __repr__(self) -> str:
        show = lambda v: f"{tuple(v.shape)}:{v.stride()}" if isinstance(v, Tensor) else repr(v)  # noqa: E731
        return ", ".join([*map(show, self.args), *(f"{name}={show(value)}" for name, value in self.kwargs.items())])


@dataclass
class Outcome:
    """Results of a call.

    Attributes:
        outputs: the outputs that are tensors.
        gradients: the gradient of each input that wants one.
        inference: the outputs of the same call where no gradient is wanted; empty if it was not made.
    """

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    inference: list[Tensor] = field(default_factory=list)

    def named(self) -> list[tuple[str, Tensor | None]]:
        """Results and gradients, each with a name for messages."""
        found: list[tuple[str, Tensor | None]] = list(zip(_names(self.outputs), self.outputs))
        found += [(f"gradient {i}", gradient) for i, gradient in enumerate(self.gradients)]
        return found + [(f"{name}{INFERENCE}", y) for name, y in zip(_names(self.inference), self.inference)]

    def is_empty(self) -> bool:
        """Return True if no result has an element."""
        return all(result is None or not result.numel() for _, result in self.named())


INFERENCE = " where no gradient is wanted"


def _names(outputs: Sequence[Tensor]) -> list[str]:
    return ["output"] if len(outputs) == 1 else [f"output {i}" for i in range(len(outputs))]


Gradients = Callable[[list[Tensor]], Sequence[Tensor]]  # makes the incoming gradients of a call with these outputs


def run(function: Function, call: Call, grads: Sequence[Tensor] | Gradients | None = None) -> Outcome:
    """Make the call, and its backward with `grads`, one for each output that can take one; None: no backward."""
    outputs = tensors_of(call.of(function))
    given = grads(outputs) if callable(grads) else grads
    return Outcome(outputs, [] if given is None else gradients(outputs, call, given))


def inference(function: Function, call: Call) -> list[Tensor]:
    """The outputs of the call on tensors that want no gradient, under `torch.no_grad()`."""
    with torch.no_grad():
        return tensors_of(call.map(Tensor.detach).of(function))


def gradients(outputs: Sequence[Tensor], call: Call, grads: Sequence[Tensor], **options: Any) -> list[Tensor | None]:
    """The gradients of `call.tensors()`; `grads` are cast to the outputs' dtypes."""
    wanted, takes = call.tensors(), differentiable(outputs)
    if not wanted or not takes:
        return [None] * len(wanted)
    grads = [grad.to(y.dtype) for grad, y in zip(grads, takes, strict=True)]
    return list(torch.autograd.grad(takes, wanted, grads, allow_unused=True, **options))


def differentiable(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that can take a gradient."""
    return [y for y in outputs if y.requires_grad]


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def first(result: Any) -> Any:
    """The output that has a gradient."""
    return result[0] if isinstance(result, (tuple, list)) else result


def _resized(tensor: Tensor, size: int, new: int, dims: Iterable[int] | None = None) -> Tensor:
    result = tensor.detach()
    for dim in range(tensor.dim()) if dims is None else dims:
        if tensor.shape[dim] == size:
            source = torch.arange(new, device=tensor.device) % max(size, 1)
            result = result.index_select(dim, source)
    whole = not result.is_floating_point() and not result.is_complex() and result.dtype != torch.bool
    if whole and 0 < new < size and result.numel() and 0 <= int(result.max()) < size:
        result = torch.where(result >= new, result % new, result).to(result.dtype)
    return result.clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)


def _relaid(tensor: Tensor) -> Tensor:
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        storage = tensor.detach().untyped_storage().clone()
        fresh.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    fresh = fresh.conj() if tensor.is_conj() else fresh
    fresh = torch_private.neg_view(fresh) if tensor.is_neg() else fresh
    return fresh.requires_grad_(tensor.requires_grad)
