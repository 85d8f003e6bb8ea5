"""The table of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RULES: dict[Any, Callable[..., Any]] = {}


def rule(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule of overloads."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(overloads, function))
        return function

    return register
