"""What of a call is kept for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor


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
        self._of_inputs, self._of_outputs = picker(inputs), picker(outputs)

    def values(self, args: Sequence[Any]) -> list[Any]:
        """The arguments that are not tensors, None in the place of those that are. Not to be changed."""
        if not self._others:
            return self._blank
        values = self._blank.copy()
        for index in self._others:
            values[index] = args[index]
        return values

    def pack(
        self, args: Sequence[Any], outputs: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """All of it, for save_for_backward."""
        return (*self._of_inputs(args), *self._of_outputs(outputs), *saved)

    def unpack(self, values: list[Any], tensors: Sequence[Any]) -> tuple[list[Any], list[Any], tuple[Any, ...]]:
        """(arguments, outputs, saved), None in the place of each tensor that was not kept."""
        args, first, second = list(values), len(self.inputs), len(self.inputs) + len(self.outputs)
        for index, tensor in zip(self.inputs, tensors):
            args[index] = tensor
        return args, self.all_outputs(tensors[first:second]), tuple(tensors[second:])

    def all_outputs(self, kept: Sequence[Any]) -> list[Any]:
        """The outputs that were kept, in their places."""
        outputs: list[Any] = [None] * self._count
        for index, tensor in zip(self.outputs, kept):
            outputs[index] = tensor
        return outputs


def picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function of a sequence that gives those of its items as a tuple, in C where there are several."""
    if len(indices) > 1:
        return itemgetter(*indices)
    if indices:
        (only,) = indices
        return lambda items: (items[only],)
    return lambda items: ()
