"""Watch for edits of .cu files, and of headers that they include, since they were read.

Looked for in interactive sessions (a prompt, a notebook), and where `CUPYOPS_RELOAD=1` asks for it; `CUPYOPS_RELOAD=0` turns
it off. Elsewhere a kernel stays what it was at its first launch, and launches pay nothing.
"""

from __future__ import annotations

import sys
import time

from ..._util import settings
from ..compile.source import Source, stamp

INTERVAL = 0.1  # seconds between two looks at the same files: nobody edits and calls faster


def wanted() -> bool:
    """Return True if edited files are to be read again."""
    asked = settings.RELOAD.read()
    return hasattr(sys, "ps1") if asked is None else bool(asked)


class Watch:
    """Looks at the files of a source, now and then."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._looked = time.monotonic()

    def edited(self) -> bool:
        """Return True if a file has changed since the source was read; False within INTERVAL of the last look."""
        now = time.monotonic()
        if now - self._looked < INTERVAL:
            return False
        self._looked = now
        return any(stamp(path) != before for path, before in self.source.stamps.items())
