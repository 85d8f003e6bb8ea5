"""What of a call is kept for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Pack = Callable[[Sequence[Any], Sequence[Tensor], Sequence[Tensor]], tuple[Any, ...]]


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
        # written out: every call that wants a gradient goes through it
        kept = "".join([f"args[{i}], " for i in inputs] + [f"outputs[{i}], " for i in outputs])
        self.pack: Pack = eval(f"lambda args, outputs, saved: ({kept}*saved,)")
        """(arguments, outputs, saved) -> all that is kept of them, for save_for_backward."""

    def values(self, args: Sequence[Any]) -> list[Any]:
        """The arguments that are not tensors, None in the place of those that are. Not to be changed."""
        if not self._others:
            return self._blank
        values = self._blank.copy()
        for index in self._others:
            values[index] = args[index]
        return values

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
