"""Output where not every character can be printed: a terminal or a pipe of ASCII, or of an old code page."""

from __future__ import annotations

import codecs
import io
import sys

# One character for one, so that tables stay straight.
_PLAIN = {
    "…": "~",
    "█": "#",
    "•": "*",
    "²": "2",
    "“": '"',
    "”": '"',
    "\u2019": "'",
    "\xd7": "x",
    "\u2013": "-",
    "—": "-",
}


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(one, "?") for one in error.object[error.start : error.end]), error.end


def plain() -> None:
    """Make the standard output and error replace characters that they cannot print."""
    codecs.register_error("cupyops.plain", _plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not where something else has taken its place, as in a notebook
            stream.reconfigure(errors="cupyops.plain")
