"""What a step of an optimizer has found out, for the next one to go by where nothing but gradients has moved.

A plan asks of all at once whether types, dtypes, devices, sizes, strides and addresses are those that the kernel was found
to serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from ..common.multi_tensor import Alike, Launch, Moving
from ..kernel import addressing

Group = dict[str, Any]

_GRADIENTS = 1  # their place among the arrays of a launch
_grad = attrgetter("grad")


class Batch:
    """Parameters that one launch serves, but for the size of its table; `variant` is what they share besides their dtype.

    Attributes:
        places: which they are, of the group's parameters that have a gradient.
        states: the state by name, a list for each, in the order of `Fused._state_names`.
        bank: what their steps are views of, where the host counts them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, variant: Any) -> None:
        self.device, self.dtype, self.variant = device, dtype, variant
        self.places: list[int] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.states: list[list[Any]] = []
        self.bank: Tensor | None = None
        self._moving: Moving | None = None

    def append(self, place: int, param: Tensor, grad: Tensor, state: tuple[Any, ...]) -> None:
        """One parameter more."""
        self.places.append(place)
        self.params.append(param)
        self.grads.append(grad)
        self.states = self.states or [[] for _ in state]
        for column, one in zip(self.states, state):
            column.append(one)

    def let_go(self) -> None:
        """Keep nothing alive that the user may drop before the next step, gradients above all."""
        self.params, self.grads, self.states = [], [], []

    def launches(self, *states: list[Tensor] | None) -> list[Launch]:
        """Over parameters, gradients and these; in a later step the gradients alone are taken to have moved."""
        if self._moving is None:
            self._moving = Moving((self.params, self.grads, *states))
        else:
            self._moving.move(_GRADIENTS, self.grads)
        return self._moving.launches


def can_last(batches: list[Batch]) -> bool:
    """Whether there can be a plan of these."""
    return Alike.can_tell() and len({batch.device.type for batch in batches}) == 1


class Plan:
    """The batches of a group that the kernels serve as a whole, after a step with them."""

    def __init__(
        self,
        group: Group,
        batches: list[Batch],
        state: Mapping[Tensor, dict[str, Any]],
        names: tuple[str, ...],
        options: tuple[Any, ...],
    ) -> None:
        self._batches, self._options = batches, options
        self._present = [param.grad is not None for param in group["params"]]
        self._absent = [not present for present in self._present]
        self._fields = [itemgetter(name) for name in names]
        self._address = addressing(batches[0].device)
        columns = params, _, *states = self._columns(group, state)
        # steps on the host are views of a bank: where they lie says all of them
        self._looked_at = len(columns) - all(batch.bank is not None for batch in batches)
        self._alike = Alike([*chain.from_iterable(columns[: self._looked_at])])
        self._addresses = [list(map(self._address, column)) for column in (params, *states)]

    def renewed(
        self, group: Group, state: Mapping[Tensor, dict[str, Any]], options: tuple[Any, ...]
    ) -> list[Batch] | None:
        """The batches with the gradients that there are now; None where anything else has changed."""
        given = group["params"]
        if options != self._options or len(given) != len(self._present):
            return None
        if any(param.grad is not None for param in compress(given, self._absent)):
            return None
        try:
            columns = params, grads, *states = self._columns(group, state)
            alike = self._alike(chain.from_iterable(columns[: self._looked_at]))
            addresses = [list(map(self._address, column)) for column in (params, *states)]
        except (KeyError, TypeError):  # a parameter or a name without state, or a state that is no tensor
            return None
        if not alike or addresses != self._addresses:
            return None
        for batch in self._batches:
            if len(batch.places) == len(params):
                batch.params, batch.grads, batch.states = params, grads, states
            else:
                batch.params, batch.grads, *batch.states = ([column[i] for i in batch.places] for column in columns)
        return self._batches

    def _columns(self, group: Group, state: Mapping[Tensor, dict[str, Any]]) -> list[list[Any]]:
        """Parameters that had a gradient, gradients, and the state by name."""
        params = list(compress(group["params"], self._present))
        columns = [params, list(map(_grad, params))]
        if self._fields:
            # all in their order, as a rule: to look each up hashes it in Python
            whole = len(state) == len(params) and all(map(is_, state, params))
            dicts: list[Any] = list(state.values() if whole else map(state.get, params))
            columns += [list(map(field, dicts)) for field in self._fields]
        return columns
