"""The table of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RULES: dict[Any, Callable[..., Any]] = {}


def rule(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule of overloads; None stands for one that this PyTorch does not have."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            if overload is not None:
                RULES[overload] = function
        return function

    return register
