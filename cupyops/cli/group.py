"""The commands together: in the order of a user's day, their help, and what an interrupt of any of them comes to."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_DAY = ("new", "check", "simulate", "explain", "port", "compile", "bench", "cache", "doctor")
INTERRUPTED = 130  # the exit code of what Ctrl-C has ended, as shells have it
_NARROW = 60  # columns under which the help has no frames and no columns, which would cut the options' names


class Command(TyperCommand):
    """A command whose help can be read in a narrow terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write it: in a narrow terminal each option on a line of its own, and what it does below it."""
        columns = shutil.get_terminal_size().columns
        if columns < _NARROW:
            self.rich_markup_mode = None
            formatter.width = columns
            formatter.write_dl = functools.partial(formatter.write_dl, col_max=2)
        super().format_help(ctx, formatter)


class Commands(TyperGroup):
    """A group whose help lists the commands as they are needed, those that are not named here behind the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, in the order of a user's day."""
        return sorted(super().list_commands(ctx), key=lambda name: _DAY.index(name) if name in _DAY else len(_DAY))

    def invoke(self, ctx: Any) -> Any:
        """Run one. Commands that have something to show of half their work catch the interrupt before."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
