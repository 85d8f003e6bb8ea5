"""The commands together: in the order of a user's day, and what an interrupt of any of them comes to."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

_DAY = ("new", "check", "simulate", "explain", "port", "compile", "bench", "doctor")
INTERRUPTED = 130  # the exit code of what Ctrl-C has ended, as shells have it


class Commands(TyperGroup):
    """A group whose help lists the commands as they are needed, those that are not named here behind the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return sorted(super().list_commands(ctx), key=lambda name: _DAY.index(name) if name in _DAY else len(_DAY))

    def invoke(self, ctx: Any) -> Any:
        """Run one. Commands that have something to show of half their work catch the interrupt before."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
