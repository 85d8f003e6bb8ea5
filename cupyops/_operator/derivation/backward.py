"""The backward role of an operator, understood once: what its parameters name is what it is given."""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from ..._kernel.launch.versions import this_thread
from ...errors import InputError


class Signature(Protocol):
    """Parts of an operator's definition by which a role is understood."""

    name: str
    parameters: list[inspect.Parameter]
    outputs: int
    tensors: tuple[int, ...]
    mutates: tuple[str, ...]
    mutated: tuple[int, ...]
    updated: tuple[int, ...]


class Backward:
    """A backward role, understood once: what its parameters name is what it is given."""

    def __init__(
        self,
        of: Signature,
        launch: Callable[..., Any],
        role: str,
        reads: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.name, self.tensors = of.name, of.tensors
        self.launch, self.role = launch, role
        names = list(inspect.signature(launch).parameters)
        grads = names[1 : 1 + of.outputs]
        if names[:1] != ["saved"] or len(grads) != of.outputs or not all(n.startswith("grad_") for n in grads):
            expected = ["saved", *(["grad_y"] if of.outputs == 1 else [f"grad_y{i}" for i in range(of.outputs)])]
            raise InputError(
                f"{of.name}: a backward begins with ({', '.join(expected)}); this one has ({', '.join(names)}): rename them"
            )
        outputs = {name.removeprefix("grad_"): index for index, name in enumerate(grads)}
        position = {one.name: index for index, one in enumerate(of.parameters)}
        known = {"needs_grad": ("needs", 0), "last": ("last", 0)}
        known |= {name: ("output", index) for name, index in outputs.items()}
        changed = (*of.mutated, *of.updated)
        known |= {name: ("input", index) for name, index in position.items() if index not in changed}
        self.needs_type: Any = namedtuple("NeedsGrad", position)  # type: ignore[misc]
        self.named: Callable[..., Any] = functools.cache(self.needs_type._make)  # type: ignore[attr-defined]
        asked = names[1 + of.outputs :]
        if lost := [name for name in asked if name in of.mutates and name not in known]:
            raise InputError(
                f"{of.name}: backward asks for {lost[0]!r}, which forward overwrites; it can name the outputs"
            )
        if unknown := [name for name in asked if name not in known]:
            raise InputError(f"{of.name}: backward asks for {unknown[0]!r}; it can have {', '.join(known)}")
        self.wants = [known[name] for name in asked]
        self.inputs = {index for kind, index in self.wants if kind == "input"}
        self.outputs = {index for kind, index in self.wants if kind == "output"}
        tensors = {one.name: index for index, one in enumerate(of.parameters) if index in of.tensors}
        inputs = {name: index for name, index in tensors.items() if index not in changed}
        self._readers_of_inputs = _readers(of.name, reads, inputs, outputs, tensors)
        self._readers_of_outputs = _readers(of.name, reads, outputs, inputs, tensors)
        self.reads_by_gradient = bool(reads)

    def unread(self, needs: Sequence[bool]) -> tuple[set[int], set[int]]:
        """The inputs and the outputs that no gradient asked for depends on."""
        inputs, outputs = (
            {index for index, readers in found.items() if not any(needs[reader] for reader in readers)}
            for found in (self._readers_of_inputs, self._readers_of_outputs)
        )
        return inputs, outputs

    def __call__(
        self, grads: Any, outputs: Any, saved: Any, args: Any, needs: Any, last: bool = False
    ) -> list[Tensor | None]:
        extra = [
            args[index]
            if kind == "input"
            else outputs[index]
            if kind == "output"
            else self.named(tuple(needs))
            if kind == "needs"
            else last
            for kind, index in self.wants
        ]
        outer, this_thread.in_role = this_thread.in_role, True
        try:
            found = self.launch(saved, *grads, *extra)
        finally:
            this_thread.in_role = outer
        return self.placed(found, needs)

    def placed(self, found: Tensor | Sequence[Tensor | None] | None, needs: Sequence[bool]) -> list[Tensor | None]:
        """Put the gradients that `launch` returned in the places of the parameters."""
        if isinstance(found, Tensor):
            found = (found,)
        if found is None:
            raise self._forgotten(needs)
        if len(found) > len(self.tensors):
            raise InputError(
                f"{self.name}: backward gave {len(found)} gradients for {len(self.tensors)} tensors; return one for each"
            )
        result: list[Tensor | None] = [None] * len(needs)
        for index, gradient in zip(self.tensors, found):
            if needs[index]:
                result[index] = gradient
        return result

    def _forgotten(self, needs: Sequence[bool]) -> InputError:
        """The error of a role that returns nothing at all, as a function without `return` does."""
        wanted = ", ".join(name for name, need in zip(self.needs_type._fields, needs) if need)
        return InputError(
            f"{self.name}: {self.role} returned None, expected a gradient for {wanted}; to leave one out on purpose, "
            "return (None,)"
        )


def _readers(
    name: str,
    reads: Mapping[str, Sequence[str]],
    ours: Mapping[str, int],
    others: Mapping[str, int],
    tensors: Mapping[str, int],
) -> dict[int, list[int]]:
    """Return for each tensor that `reads` names the parameters whose gradients depend on it."""
    found = {}
    for tensor, gradients in reads.items():
        if tensor not in ours and tensor not in others:
            raise InputError(f"{name}: reads names {tensor!r}, expected one of: {', '.join([*ours, *others])}")
        gradients = (gradients,) if isinstance(gradients, str) else gradients
        if unknown := [one for one in gradients if one not in tensors]:
            raise InputError(
                f"{name}: reads says that {tensor!r} is read for {unknown[0]!r}, expected one of: {', '.join(tensors)}"
            )
        if tensor in ours:
            found[ours[tensor]] = [tensors[one] for one in gradients]
    return found
