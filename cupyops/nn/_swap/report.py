"""The report of a swap, as values and as a table, and its undo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import Module

from ... import nn
from . import classes

Class = type[Module]


@dataclass(frozen=True)
class Replaced:
    """A module that now runs operators of cupyops.

    Attributes:
        name: in the model.
        type: the class that it had.
        by: the class that it has now: one of cupyops.nn, or a subclass of `type` with another `forward`.
        what: in words, as `rms_norm` or `softmax, dropout in its forward`.
    """

    name: str
    type: Class
    by: Class
    what: str


class Reason(NamedTuple):
    """The reason why a module stays as it is.

    Attributes:
        text: in words.
        near: whether it is close to what swap replaces, and not something for which cupyops has no operator.
        told: whether a report has it; what only holds other modules needs none.
    """

    text: str
    near: bool = True
    told: bool = True


@dataclass(frozen=True)
class Kept:
    """A module that stays as it is.

    Attributes:
        name: in the model.
        type: its class.
        reason: why, in words.
        near: whether it is close to what swap replaces, and not something for which cupyops has no operator.
    """

    name: str
    type: Class
    reason: str
    near: bool = True


class Swap:
    """The result of `swap`; `print` it for a table. As a context manager it is undone at the end of the block.

    Attributes:
        replaced: a `Replaced` for each name of each module that was replaced.
        kept: a `Kept` for each that computes something and was not.
        settings: what was set on models as a whole, and what was not: their attention and their loss.
    """

    def __init__(
        self,
        replaced: list[Replaced],
        kept: list[Kept],
        changed: list[tuple[Module, Class, Class]],
        settings: list[str],
        resets: list[Callable[[], None]],
    ) -> None:
        self.replaced = tuple(replaced)
        self.kept = tuple(kept)
        self.settings = tuple(settings)
        self._changed, self._resets = changed, resets

    def undo(self) -> None:
        """Give modules the classes that they had, and models their settings. A second call does nothing."""
        for module, before, ours in self._changed:
            if type(module) is ours:
                module.__class__ = before
            elif (
                theirs := classes.original(type(module))
            ) is not None:  # it has been parametrized since, or is no more
                module.__class__ = theirs
        for reset in reversed(self._resets):
            reset()
        self._changed, self._resets = [], []

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        rows = [("modules", "type", "outcome"), *_grouped([(r.type, f"now {r.what}", r.name) for r in self.replaced])]
        rows += _grouped([(k.type, f"kept: {k.reason}", k.name) for k in self.kept])
        sizes = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(text.ljust(size) for text, size in zip(row, sizes)).rstrip() for row in rows]
        title = f"{len(self.replaced)} replaced, {len(self.kept)} kept"
        return "\n".join([title, *self.settings, lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _grouped(rows: list[tuple[Class, str, str]]) -> list[tuple[str, str, str]]:
    """One row for all modules of a class with the same outcome."""
    groups: dict[tuple[Class, str], list[str]] = {}
    for cls, outcome, name in rows:
        groups.setdefault((cls, outcome), []).append(name or "(the model)")
    return [
        (names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more", shown(cls), outcome)
        for (cls, outcome), names in groups.items()
    ]


def shown(cls: type) -> str:
    """A class as users know it: `torch.nn.Linear`."""
    if getattr(nn, cls.__name__, None) is cls:
        return f"cupyops.nn.{cls.__name__}"
    if getattr(torch.nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
