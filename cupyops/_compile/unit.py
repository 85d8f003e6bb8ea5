"""A step of a program."""

from __future__ import annotations


class Unit:
    """One step. `order` is its place in the graph, `after` the steps that run before it."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.after: set[Unit] = set()
