"""DTensor: an operator on tensors that are spread over a mesh of devices.

An operator with a rule (sharding.py) splits the work as its tensors are split: each device computes its part, forward and
backward. What its rule does not allow is gathered first; without a rule that is everything, the result is on every device in
full, and the value is right all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from . import sharding
from .definition import Definition


def is_spread(value: Any) -> bool:
    """Return True for a DTensor, without importing torch.distributed (and so that torch.compile can follow)."""
    return isinstance(value, Tensor) and type(value).__name__ == "DTensor"


def placements(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """The mesh and the placements of a DTensor."""
    return tensor.device_mesh, tensor.placements


def local(tensor: Any) -> Tensor:
    """Return this device's part of a DTensor, in its memory; no gradient goes through it."""
    found: Tensor = tensor.detach().to_local()
    return found


def whole(part: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor of which `part` is this device's part, placed as `like`; `part` itself if `like` is plain."""
    if not is_spread(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, lies = placements(like)
    return DTensor.from_local(part, mesh, lies, run_check=False, shape=like.shape, stride=like.stride())


def reduced(value: Tensor, mesh: Any, lies: Sequence[Any], operation: str) -> Tensor:
    """Reduce values of all devices, which have different parts of tensors placed so, to their "sum" or "max"."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    parts: list[Any] = [Partial(operation) if one.is_shard() else Replicate() for one in lies]
    spread = DTensor.from_local(value, mesh, parts, run_check=False)
    found: Tensor = spread.redistribute(mesh, [Replicate()] * len(parts)).to_local()
    return found


def replicated(value: Tensor, mesh: Any) -> Tensor:
    """A tensor that is the same on every device, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def alike(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, a plain one, or where `like` is a DTensor that of the mesh's first process, on all of them."""
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim)


def call_operator(function: Callable[..., Any], of: Definition, args: Sequence[Any]) -> Any:
    """An operator on DTensors, by its rule; DTensors out. Differentiable."""
    rule = None if of.sharding is None else sharding.read(of.sharding(*args))
    operands = {} if rule is None else dict(zip(of.tensors, rule.tensors))
    changed = (*of.mutated, *of.updated)
    return _Spread(of.name, args, operands, rule, changed).call(function, [one.name for one in of.parameters])


def call(function: Callable[..., Any], name: str, args: Sequence[Any], changed: Sequence[int] = ()) -> Any:
    """`function(*args)` on the whole of each DTensor; DTensors out. Differentiable."""
    return _Spread(name, args, {}, None, changed).call(function, ())


class _Spread:
    """One call: how its tensors lie, and how they are to lie."""

    def __init__(
        self,
        name: str,
        args: Sequence[Any],
        operands: dict[int, sharding.Operand],
        rule: sharding.Rule | None,
        changed: Sequence[int],
    ) -> None:
        self.name, self.args, self.rule, self.changed = name, args, rule, changed
        self.mesh = next(value.device_mesh for value in args if is_spread(value))
        if any(isinstance(value, Tensor) and not is_spread(value) for value in args):
            raise InputError(f"{name}: plain tensors beside DTensors; distribute them over the same mesh")
        self.operands = operands
        self.tensors: dict[int, sharding.Tensor] = {}
        for index, value in enumerate(args):
            if not is_spread(value):
                continue
            operand = operands.get(index)
            labels: Sequence[sharding.Label] = ()
            if operand is not None and operand.fits(value.ndim):
                labels = operand.labels(value.ndim)
            elif operand is not None:
                self.rule = None
            nbytes = value.numel() * value.element_size()
            self.tensors[index] = sharding.Tensor(labels, value.shape, value.placements, nbytes)
        mesh_shape = [self.mesh.size(dim) for dim in range(self.mesh.ndim)]
        self.chosen: list[sharding.Label | None] = [None] * len(mesh_shape)
        if self.rule is not None and not all(p.is_replicate() for one in self.tensors.values() for p in one.placements):
            self.chosen = sharding.choose(list(self.tensors.values()), mesh_shape)
        for index in changed:  # what every device has as a whole is changed by a call on the whole alone
            whole = self.tensors.get(index)
            self.chosen = [None if whole is not None and whole.place(one) is None else one for one in self.chosen]
        self.sizes: dict[sharding.Label, int] = {}  # of each label that is split, on all devices
        for one in self.tensors.values():
            for label in self.chosen:
                place = one.place(label)
                if label is not None and place is not None:
                    self.sizes[label] = max(one.shape[place], self.sizes.get(label, 0))

    def call(self, function: Callable[..., Any], names: Sequence[str]) -> Any:
        """`function` on each device's part. Of what is changed in place it is given copies, which are written back."""
        from torch.distributed.tensor import DTensor

        local: list[Any] = [
            self._local(index) if index in self.tensors else value for index, value in enumerate(self.args)
        ]
        for operand in () if self.rule is None else self.rule.sizes:
            place = names.index(operand.name)
            local[place] = local[place] and self._local_sizes(operand, local[place])
        for index in self.changed:
            local[index] = None if local[index] is None else local[index].clone()
        result = function(*local)
        written: dict[int, Tensor] = {}  # by the identity of the copy
        for index in self.changed:
            if (copy := local[index]) is not None:
                placements = [self._placement(index, label) for label in self.chosen]
                back = DTensor.from_local(
                    copy,
                    self.mesh,
                    placements,
                    run_check=False,
                    shape=self.args[index].shape,
                    stride=self.args[index].stride(),
                )
                written[id(copy)] = self.args[index].copy_(back)
        if result is None:
            return None
        results = (result,) if isinstance(result, Tensor) else result
        spread = [
            written[id(one)] if id(one) in written else self._output(place, one) for place, one in enumerate(results)
        ]
        return spread[0] if isinstance(result, Tensor) else tuple(spread)

    # --- what goes in ---

    def _placement(self, index: int, label: sharding.Label | None) -> Any:
        from torch.distributed.tensor import Replicate, Shard

        place = self.tensors[index].place(label)
        return Replicate() if place is None else Shard(place)

    def _local(self, index: int) -> Tensor:
        """A device's part of a tensor; its gradient is a part of the whole's, or one of the parts of a sum."""
        value: Any = self.args[index]
        placements = [self._placement(index, label) for label in self.chosen]
        if list(value.placements) != placements:
            value = value.redistribute(self.mesh, placements)
        found: Tensor = value.to_local(
            grad_placements=[self._placement_of_gradient(index, label) for label in self.chosen]
        )
        operand = self.operands.get(index)
        if operand is not None and operand.seed:
            return found + self._number()
        for mesh_dim, label in enumerate(self.chosen):
            if operand is not None and operand.once and self._is_summed(label) and self.mesh.get_local_rank(mesh_dim):
                found = _Nothing.apply(found)
        return found

    def _number(self) -> int:
        """Number of this device's part of the work."""
        number = 0
        for mesh_dim, label in enumerate(self.chosen):
            if label is not None:
                number = number * self.mesh.size(mesh_dim) + self.mesh.get_local_rank(mesh_dim)
        return number

    def _placement_of_gradient(self, index: int, label: sharding.Label | None) -> Any:
        from torch.distributed.tensor import Partial, Replicate, Shard

        place = self.tensors[index].place(label)
        if place is not None:
            return Shard(place)
        operand = self.operands.get(index)
        once = operand is not None and operand.once and self._is_summed(label)
        return Replicate() if label is None or once else Partial()

    def _is_summed(self, label: sharding.Label | None) -> bool:
        """Return True if a label is split that no output has, so that each device has a part of a sum."""
        if label is None or self.rule is None:
            return False
        return not any(one.has(label) for one in self.rule.outputs)

    def _local_sizes(self, operand: sharding.Operand, sizes: Sequence[int]) -> list[int]:
        found = list(sizes)
        for label in self.chosen:
            labels = operand.labels(len(found))
            if label is not None and label in labels and found[place := labels.index(label)] != 1:
                found[place] = self._part(label)
        return found

    def _part(self, label: sharding.Label) -> int:
        """Size of this device's part of a label."""
        size = self.sizes[label]
        for mesh_dim, chosen in enumerate(self.chosen):
            if chosen == label:
                chunk = -(-size // self.mesh.size(mesh_dim))
                size = max(0, min(chunk, size - chunk * self.mesh.get_local_rank(mesh_dim)))
        return size

    # --- what comes out ---

    def _output(self, place: int, value: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        labels = () if self.rule is None else self.rule.outputs[place].labels(value.ndim)
        shape = list(value.shape)
        placements: list[Any] = []
        for label in self.chosen:
            if label is None:
                placements.append(Replicate())
            elif label in labels:
                placements.append(Shard(labels.index(label)))
                shape[labels.index(label)] = self.sizes[label]
            else:
                placements.append(Partial())
        stride = _stride(shape, value)
        return DTensor.from_local(value, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


class _Nothing(torch.autograd.Function):
    """Zeros in a tensor's place, with the gradient that it would have."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _stride(shape: Sequence[int], local: Tensor) -> tuple[int, ...]:
    """Strides of the whole tensor, with the order of dimensions in memory that its part has."""
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):
        found[dim] = step
        step *= max(1, shape[dim])
    return tuple(found)
