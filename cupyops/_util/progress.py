"""A progress bar on the standard error, for work that turns out to take long."""

from __future__ import annotations

import sys
import time
from typing import Any

_AFTER = 2.0  # seconds

_shown: Bar | None = None  # a terminal has room for one


class Bar:
    """A context manager; shows nothing unless the standard error is a terminal and rich is installed.

    Args:
        title: what is going on.
        total: how many steps there are, if that is known at once.
        wanted: False for no bar at all; None where the standard error is a terminal.
        after: seconds; what is done sooner needs no bar.
    """

    def __init__(self, title: str, total: int | None = None, wanted: bool | None = None, after: float = _AFTER) -> None:
        self.title, self.total, self.after = title, total, after
        self.wanted = sys.stderr.isatty() if wanted is None else wanted
        self._start = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: Any) -> None:
        global _shown
        if self._bar is not None:
            self._bar.stop()
            self._bar = _shown = None

    def update(self, done: int, total: int | None = None, title: str | None = None) -> None:
        """Show that `done` steps are done."""
        global _shown
        if self._bar is None:
            if not self.wanted or _shown is not None or time.perf_counter() - self._start < self.after:
                return
            self._bar = _rich_progress()
            if self._bar is None:
                self.wanted = False
                return
            _shown = self
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total)
        self._bar.update(
            self._task, completed=done, total=total or self.total, description=title or self.title, refresh=True
        )


def of_command(command: str, title: str) -> Bar:
    """A bar for what takes long before any command is there, shown where `python -m cupyops` is asked for this one."""
    asked = sys.argv[:2] == ["-m", command] and sys.orig_argv[-len(sys.argv)] == "cupyops"  # "-m" until it is found
    bar = Bar(title, wanted=None if asked else False, after=0.0)
    bar.update(0)
    return bar


def _rich_progress() -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    return Progress(console=Console(stderr=True), transient=True)
