"""Errors about words of the command line."""

from __future__ import annotations

from rich.console import Console

from .._util.near import meant as near

__all__ = ["complain", "near"]


def complain(error: object) -> None:
    """The error's text on the standard error."""
    Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True, style="red")
