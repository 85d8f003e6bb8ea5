"""Sharding rules: how work of an operator on DTensors may be split over a mesh, and what is chosen in a call.

A rule names the dimensions of each tensor that goes in and comes out, as einsum does: `"...k, nk, +n -> ...n"` is that of
linear. A small letter may be split, in all tensors that have it at once. One that no output has is summed over: split, it
leaves each device a part of the sum. A capital is whole on every device. `...` stands for any dimensions, aligned at the
right, which may be split too; where a tensor has the size 1 there, it is not. `+` is before a tensor that is added once to
such a sum, `name=` before the sizes in a parameter `name`; `*` is a tensor that is whole, of any shape, and `#` a seed, to
which each device adds the number of its part.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.compiler import is_dynamo_compiling

from ...errors import InputError

Label = str | int  # a letter, or a place before the end of `...`
_OPERAND = re.compile(r"(?P<once>\+?)(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dims>[*#]|[A-Za-z]*(?:\.\.\.)?[A-Za-z]*)")


@dataclass(frozen=True)
class Operand:
    """One tensor of a rule, or the sizes in a parameter `name`."""

    before: str
    spread: bool  # whether there is a `...`
    after: str
    once: bool
    name: str | None
    whole: bool = False  # whatever its dimensions
    seed: bool = False

    def labels(self, ndim: int) -> tuple[Label, ...]:
        """A label for each of `ndim` dimensions; none may be split of a tensor that is whole."""
        if self.whole:
            return ()
        if not self.spread:
            return tuple(self.before)
        middle = ndim - len(self.before) - len(self.after)
        return (*self.before, *range(-middle, 0), *self.after)

    def fits(self, ndim: int) -> bool:
        """Return True if a tensor may have `ndim` dimensions."""
        named = len(self.before) + len(self.after)
        return self.whole or (ndim >= named if self.spread else ndim == named)

    def has(self, label: Label) -> bool:
        """Return True if one of its dimensions has that label."""
        return self.spread if isinstance(label, int) else label in self.before + self.after


@dataclass(frozen=True)
class Rule:
    """A rule, read."""

    tensors: tuple[Operand, ...]
    sizes: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


def read(text: str) -> Rule:
    """The rule that a text says."""
    return _read(text) if is_dynamo_compiling() else _remembered(text)  # torch.compile looks through a cache, and warns


def _read(text: str) -> Rule:
    inputs, arrow, outputs = text.replace(" ", "").partition("->")
    try:
        if not arrow:
            raise ValueError
        given = [_operand(one) for one in inputs.split(",")]
        tensors = tuple(one for one in given if one.name is None)
        sizes = tuple(one for one in given if one.name is not None)
        return Rule(tensors, sizes, tuple(_operand(one) for one in outputs.split(",")))
    except ValueError:
        raise InputError(
            f'sharding {text!r} is no rule such as "...k, nk, +n -> ...n": dimensions by letters, a comma between tensors, '
            "and -> before the outputs"
        ) from None


_remembered = functools.lru_cache(maxsize=1024)(_read)


def _operand(text: str) -> Operand:
    found = _OPERAND.fullmatch(text)
    if found is None:
        raise ValueError
    if found["dims"] in ("*", "#"):
        return Operand("", False, "", False, None, whole=True, seed=found["dims"] == "#")
    before, spread, after = found["dims"].partition("...")
    if len({*before, *after}) < len(before) + len(after):
        raise ValueError
    return Operand(before, bool(spread), after, bool(found["once"]), found["name"])


class Tensor:
    """Input of a choice for one tensor: its labels, sizes and placements, and its number of bytes."""

    def __init__(self, labels: Sequence[Label], shape: Sequence[int], placements: Sequence[Any], nbytes: int) -> None:
        self.labels, self.shape, self.placements, self.nbytes = labels, shape, placements, nbytes

    def place(self, label: Label | None) -> int | None:
        """Return the dimension that splits at `label`; None where the tensor is on every device as it is."""
        if label is None or label not in self.labels:
            return None
        index = self.labels.index(label)
        return index if self.shape[index] != 1 else None

    def cost(self, label: Label | None, mesh_dim: int) -> int:
        """Approximate bytes to be sent to a device if the tensor is to be split at `label` on a mesh dimension."""
        placement, place = self.placements[mesh_dim], self.place(label)
        if placement.is_replicate():
            return 0
        if placement.is_partial():
            return self.nbytes * (2 if place is None else 1)
        return 0 if type(placement).__name__ == "Shard" and placement.dim == place else self.nbytes


def choose(tensors: Sequence[Tensor], mesh: Sequence[int]) -> list[Label | None]:
    """Choose the label along which each dimension of a mesh splits the work, to send the least. None: no split.

    Where nothing is split, nothing becomes so: the work is done on every device, as PyTorch does it.
    """
    chosen: list[Label | None] = []
    for mesh_dim, devices in enumerate(mesh):
        parts = devices
        for earlier, label in zip(mesh, chosen):
            parts *= earlier if label is not None else 1
        best: Label | None = None
        least = _cost(None, tensors, mesh_dim)
        for one in tensors:
            for label in one.labels:
                if _splits(label, tensors, parts) and (cost := _cost(label, tensors, mesh_dim)) < least:
                    best, least = label, cost
        chosen.append(best)
    return chosen


def _cost(label: Label | None, tensors: Sequence[Tensor], mesh_dim: int) -> int:
    total = 0
    for one in tensors:
        total += one.cost(label, mesh_dim)
    return total


def _splits(label: Label, tensors: Sequence[Tensor], parts: int) -> bool:
    """Return True if a label may be split into `parts`; where sizes differ, as of heads of queries and keys, evenly."""
    if isinstance(label, str) and label.isupper():
        return False
    sizes = []
    for one in tensors:
        place = one.place(label)
        if place is not None:
            sizes.append(one.shape[place])
    if not sizes or min(sizes) < parts:
        return False
    return all(size == sizes[0] for size in sizes) or all(size % parts == 0 for size in sizes)


def same(rule: str) -> Callable[..., str]:
    """A rule that is the same for all arguments, as a function of them."""
    read(rule)
    return lambda *args: rule
