"""What of a call is kept for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pooled(NamedTuple):
    """A saved tensor that is part of a larger one, which stands at `place` among the tensors kept."""

    place: int
    offset: int  # in elements
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Kept:
    """Which inputs and outputs of a call are kept for backward, besides whatever forward saved."""

    def __init__(
        self, arity: int, tensors: tuple[int, ...], count: int, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> None:
        self.arity = arity
        self.inputs = inputs
        self.outputs = outputs
        self._count = count  # of all outputs
        self._others = tuple(i for i in range(arity) if i not in tensors)
        self._blank: list[Any] = [None] * arity

    @property
    def before_saved(self) -> int:
        """How many tensors are kept before those that forward saved."""
        return len(self.inputs) + len(self.outputs)

    def pack(self, args: Sequence[Any], outputs: Sequence[Tensor], saved: Sequence[Tensor]) -> tuple[Any, ...]:
        """All that is kept of arguments, outputs and what forward saved, for save_for_backward."""
        return (*[args[i] for i in self.inputs], *[outputs[i] for i in self.outputs], *saved)

    def values(self, args: Sequence[Any]) -> list[Any]:
        """The arguments that are not tensors, None in the place of those that are. Not to be changed."""
        if not self._others:
            return self._blank
        values = self._blank.copy()
        for index in self._others:
            values[index] = args[index]
        return values

    def unpack(
        self, values: list[Any], tensors: Sequence[Any], pooled: Sequence[int | Pooled] | None = None
    ) -> tuple[list[Any], list[Any], tuple[Any, ...]]:
        """(arguments, outputs, saved), None in the place of each tensor that was not kept.

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


def _part(one: int | Pooled, tensors: Sequence[Any]) -> Any:
    if isinstance(one, int):
        return tensors[one]
    return torch.as_strided(tensors[one.place], one.size, one.stride, one.offset)
