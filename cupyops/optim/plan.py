"""Plan of an optimizer's step, which later steps follow as long as only the gradients have moved.

A plan asks of all at once whether types, dtypes, devices, sizes, strides and addresses are those that the kernel was found
to serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, compress, islice
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from .._dispatch.multi_tensor import MovingTables, SameLayout, TableLaunch
from .._kernel.kernel import addressing

Group = dict[str, Any]

_GRADIENTS = 1  # their place among the arrays of a launch
_grad = attrgetter("grad")


class Batch:
    """Parameters that one launch serves, but for the size of its table; `variant` is what they share besides their dtype.

    Attributes:
        places: which they are, of the group's parameters that have a gradient.
        owners: the parameters themselves, of which `params` are this device's parts where they are DTensors.
        states: the state by name, a list for each, in the order of `Fused._state_names`; what is as it was may be left out.
        bank: what their steps are views of, where the host counts them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, variant: Any) -> None:
        self.device, self.dtype, self.variant = device, dtype, variant
        self.places: list[int] = []
        self.owners: list[Tensor] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.states: list[list[Any]] = []
        self.bank: Tensor | None = None
        self._moving: MovingTables | None = None

    def append(self, place: int, owner: Tensor, param: Tensor, grad: Tensor, state: tuple[Any, ...]) -> None:
        """One parameter more."""
        self.places.append(place)
        self.owners.append(owner)
        self.params.append(param)
        self.grads.append(grad)
        self.states = self.states or [[] for _ in state]
        for column, one in zip(self.states, state):
            column.append(one)

    def let_go(self) -> None:
        """Keep nothing alive that the user may drop before the next step, gradients above all."""
        self.owners, self.params, self.grads, self.states = [], [], [], []

    def launches(self, *states: list[Tensor] | None) -> list[TableLaunch]:
        """Launches over parameters, gradients and these; in a later step the gradients alone are taken to have moved."""
        if self._moving is None:
            self._moving = MovingTables((self.params, self.grads, *states))
        else:
            self._moving.move(_GRADIENTS, self.grads)
        return self._moving.launches


def can_last(batches: list[Batch]) -> bool:
    """Return True if a plan of these batches is possible."""
    plain = all(map(is_, chain(*(batch.owners for batch in batches)), chain(*(batch.params for batch in batches))))
    return plain and SameLayout.can_tell() and len({batch.device.type for batch in batches}) == 1


class StepPlan:
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
        self._absent = [] if all(self._present) else [not present for present in self._present]
        self._fields = [itemgetter(name) for name in names]
        self._address = addressing(batches[0].device)
        params = self._params(group["params"])
        self._alike = SameLayout([*params, *map(_grad, params)])
        self._addresses = list(map(self._address, params))
        if self._fields:
            self._start = next(place for place, param in enumerate(state) if param is params[0])
            states = self._states(params, state)
            # steps on the host are views of a bank: where they lie says all of them
            banked = all(batch.bank is not None for batch in batches)
            self._looked_at = len(params) * (len(states) - banked)
            flat = list(chain.from_iterable(states))
            self._states_alike = SameLayout(flat[: self._looked_at])
            self._states_addresses = list(map(self._address, flat))
            self._counts = names[-1] == "step" and not banked  # on the device, tensor by tensor

    def renewed(
        self, group: Group, state: Mapping[Tensor, dict[str, Any]], options: tuple[Any, ...], shown: bool
    ) -> list[Batch] | None:
        """The batches with the gradients that there are now; None where anything else has changed.

        Without state in them, but for steps to be counted, where that is not `shown`: nobody but the optimizer has it, so
        it is what it was.
        """
        given = group["params"]
        if options != self._options or len(given) != len(self._present):
            return None
        if any(param.grad is not None for param in compress(given, self._absent)):
            return None
        params = self._params(given)
        grads = list(map(_grad, params))
        if not self._alike((*params, *grads)) or list(map(self._address, params)) != self._addresses:
            return None
        states: list[list[Any]] = []
        if self._fields and not shown and self._in_order(params, state):
            states = self._states(params, state)[-1:] if self._counts else []
        elif self._fields:
            try:
                states = self._states(params, state)
                flat = list(chain.from_iterable(states))
                alike = self._states_alike(flat[: self._looked_at])
                if not alike or list(map(self._address, flat)) != self._states_addresses:
                    return None
            except (KeyError, TypeError):  # a parameter or a name without state, or a state that is no tensor
                return None
        for batch in self._batches:
            if len(batch.places) == len(params):
                batch.params, batch.grads, batch.states = params, grads, states
            else:
                columns = params, grads, *states
                batch.params, batch.grads, *batch.states = ([column[i] for i in batch.places] for column in columns)
        return self._batches

    def _params(self, given: list[Tensor]) -> list[Tensor]:
        """Parameters that had a gradient."""
        return list(compress(given, self._present)) if self._absent else given

    def _in_order(self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Return True if the state holds these in order, as a rule: looking each one up would hash it in Python."""
        return len(state) >= self._start + len(params) and all(map(is_, islice(state, self._start, None), params))

    def _states(self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> list[list[Any]]:
        """The state by name."""
        dicts: list[Any]
        if self._in_order(params, state):
            dicts = list(islice(state.values(), self._start, self._start + len(params)))
        else:
            dicts = list(map(state.get, params))
        return [list(map(field, dicts)) for field in self._fields]
