"""Functions made of text: constants are named in it and not written, so that plans of one structure share their code."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

OURS = re.compile(r"_([a-z]\d*p?|slot|stream|run|make|ctx|tensors|error|)")
"""The names that are ours in the text: others are globals of an author's module."""


class Writer:
    """The lines of one function, and the values that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[str, Any] = {}
        self.scope: dict[str, Any] | None = None  # of an author's module: names that are not ours are looked up there
        self._named: dict[Any, str] = {}
        self._indent = 1

    def name(self, value: Any) -> str:
        """A name for a constant, the same one for the same object, or number."""
        key = ("int", value) if type(value) is int else id(value)
        found = self._named.get(key)
        if found is None:
            found = self._named[key] = f"_k{len(self._named)}"
            self.known[found] = value
        return found

    def line(self, text: str) -> None:
        """One more line."""
        self.lines.append("    " * self._indent + text)

    def block(self, head: str) -> None:
        """The lines that follow are inside `head`."""
        self.line(head)
        self._indent += 1

    def end(self) -> None:
        """The lines that follow are outside of the last block again."""
        self._indent -= 1

    def function(self, title: str, parameters: str) -> Any:
        """The function."""
        body = "\n".join("    " + line for line in self.lines)
        source = f"def _make({', '.join(self.known)}):\n    def _run({parameters}):\n{body}\n    return _run\n"
        make = types.FunctionType(
            _compiled(source), {"__builtins__": __builtins__} if self.scope is None else self.scope
        )
        function = make(*self.known.values())
        function.__name__ = function.__qualname__ = title
        return function


@functools.lru_cache(maxsize=512)
def _compiled(source: str) -> types.CodeType:
    """The code of `_make`."""
    module = compile(source, "<recorded plan>", "exec")
    return next(one for one in module.co_consts if isinstance(one, types.CodeType))
