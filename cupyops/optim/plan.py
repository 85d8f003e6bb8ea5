"""What a step of an optimizer has found out, for the next one to go by where nothing but gradients has moved.

To look at each parameter in Python costs microseconds, and there are hundreds. A plan asks the same of all at once, in C:
whether types, dtypes, devices, sizes, strides and addresses are those that the kernel was found to serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from ..common.multi_tensor import Launch, Moving
from ..kernel import addressing, executors

try:  # what torch.compile asks its own guards
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # no plans: each step looks at each parameter
    TensorGuards = None  # type: ignore[assignment,misc]

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
    return TensorGuards is not None and len({batch.device.type for batch in batches}) == 1


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
        self._batches, self._options, self._executors = batches, options, executors.copy()
        self._present = [param.grad is not None for param in group["params"]]
        self._absent = [not present for present in self._present]
        self._fields = [itemgetter(name) for name in names]
        self._address = addressing(batches[0].device)
        params, grads, *states = self._columns(group, state)
        tensors = [one for column in (params, grads, *states) for one in column]
        sizes: Any = [list(one.shape) for one in tensors]  # a None among them would be let pass
        strides: Any = [list(one.stride()) for one in tensors]
        self._alike = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        self._addresses = [list(map(self._address, column)) for column in (params, *states)]

    def renewed(
        self, group: Group, state: Mapping[Tensor, dict[str, Any]], options: tuple[Any, ...]
    ) -> list[Batch] | None:
        """The batches with the gradients that there are now; None where anything else has changed."""
        given = group["params"]
        if options != self._options or executors != self._executors or len(given) != len(self._present):
            return None
        if any(param.grad is not None for param in compress(given, self._absent)):
            return None
        try:
            columns = self._columns(group, state)
        except (KeyError, TypeError):  # a parameter or a name without state
            return None
        params, grads, *states = columns
        if not self._alike(*[one for column in columns for one in column]):
            return None
        if [list(map(self._address, column)) for column in (params, *states)] != self._addresses:
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
            dicts: list[Any] = list(map(state.get, params))
            columns += [list(map(field, dicts)) for field in self._fields]
        return columns
