"""Choice of the tensors of a call that are kept for its backward."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._util import observed, torch_private


class Pooled(NamedTuple):
    """A saved tensor that is part of a larger one, which stands at `place` among the tensors kept."""

    place: int
    offset: int  # in elements
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Blank(NamedTuple):
    """Metadata of an input that no gradient asked for depends on: all that its backward may ask of it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def stand_in(self) -> Tensor:
        """A tensor in its place without values: one element, NaN where that costs no launch, stands for all of them."""
        one = torch.empty((), dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point and not torch_private.dispatch_modes():
            with observed.unseen():  # a replay needs none
                one.fill_(float("nan"))
        return one.expand(self.shape)

    def zeros(self) -> Tensor:
        """Zeros in its place, all of them one element."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


class Kept:
    """Choice of the inputs and outputs of a call that are kept for backward, besides whatever forward saved.

    Of those that are `blank`, shape, dtype and device are.
    """

    def __init__(
        self,
        arity: int,
        tensors: tuple[int, ...],
        count: int,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        blank: tuple[int, ...] = (),
    ) -> None:
        self.arity = arity
        self.inputs = inputs
        self.outputs = outputs
        self.blank = blank
        self._tensors = tensors
        self._count = count  # of all outputs
        self._others = tuple(i for i in range(arity) if i not in tensors)
        self._nothing: list[Any] = [None] * arity

    def without(self, inputs: Container[int], outputs: Container[int]) -> Kept:
        """Return a copy without these inputs and outputs; the inputs become blank."""
        return Kept(
            self.arity,
            self._tensors,
            self._count,
            tuple(i for i in self.inputs if i not in inputs),
            tuple(i for i in self.outputs if i not in outputs),
            tuple(i for i in self.inputs if i in inputs),
        )

    @property
    def before_saved(self) -> int:
        """Number of tensors kept before those that forward saved."""
        return len(self.inputs) + len(self.outputs)

    def pack(self, args: Sequence[Any], outputs: Sequence[Tensor], saved: Sequence[Tensor]) -> tuple[Any, ...]:
        """All that is kept of arguments, outputs and what forward saved, for save_for_backward."""
        return (*[args[i] for i in self.inputs], *[outputs[i] for i in self.outputs], *saved)

    def values(self, args: Sequence[Any]) -> list[Any]:
        """The arguments that are not tensors, None or a Blank in the place of those that are. Not to be changed."""
        if not self._others and not self.blank:
            return self._nothing
        values = self._nothing.copy()
        for index in self._others:
            values[index] = args[index]
        for index in self.blank:
            if (tensor := args[index]) is not None:
                values[index] = Blank(tensor.shape, tensor.dtype, tensor.device)
        return values

    def unpack(
        self, values: list[Any], tensors: Sequence[Any], pooled: Sequence[int | Pooled] | None = None
    ) -> tuple[list[Any], list[Any], tuple[Any, ...]]:
        """(arguments, outputs, saved), None or a Blank in the place of each tensor that was not kept.

        `pooled` says of each that was saved at which place it stands, or of which larger tensor it is a part.
        """
        args, first, second = list(values), len(self.inputs), self.before_saved
        for index, tensor in zip(self.inputs, tensors):
            args[index] = tensor
        saved = tensors[second:] if pooled is None else [_part(one, tensors) for one in pooled]
        return args, self.all_outputs(tensors[first:second]), tuple(saved)

    def all_outputs(self, kept: Sequence[Any]) -> list[Any]:
        """The outputs that were kept, in their places."""
        outputs: list[Any] = [None] * self._count
        for index, tensor in zip(self.outputs, kept):
            outputs[index] = tensor
        return outputs


def by_kernels(args: Sequence[Any]) -> list[Any]:
    """Arguments as the kernels are given them: what is blank has no values."""
    return [value.stand_in() if isinstance(value, Blank) else value for value in args]


def by_reference(args: Sequence[Any]) -> list[Any]:
    """Arguments as the reference is given them: zeros for what is blank."""
    return [value.zeros() if isinstance(value, Blank) else value for value in args]


def _part(one: int | Pooled, tensors: Sequence[Any]) -> Any:
    if isinstance(one, int):
        return tensors[one]
    return torch.as_strided(tensors[one.place], one.size, one.stride, one.offset)
