"""Variables that the kernels of one text share: one module has all kernels that are no templates, others are kept equal.

A kernel is compiled with the whole of its text, so that the module of one has every other that is no template. An instance
of a template has a module of its own: before it is launched, the variables are copied from where they were written last.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from ..compile.binary import Binary
from ..compile.declarations import functions
from ..compile.source import Source
from .symbols import Symbol


class Holder(Protocol):
    """Memory of the variables of one module."""

    def read(self, symbol: str, size: int) -> Any:
        """Return the bytes."""

    def write(self, symbol: str, content: Any) -> None:
        """Set all bytes."""


class Shared:
    """The modules of one text, and which of them has the values of its variables."""

    def __init__(self) -> None:
        self._modules: dict[Hashable, list[tuple[Binary, Any]]] = {}
        self._last: dict[Hashable, tuple[Any, Holder, frozenset[str]]] = {}
        self._lock = threading.Lock()
        self._templates: dict[str, bool] = {}

    def module(self, place: Hashable, binary: Binary) -> Any:
        """A module of the text that has this kernel, on a device or in the simulator; None where there is none yet."""
        entry = re.compile(rf"\.entry\s+{re.escape(binary.symbol)}(?![\w$])")
        return next((module for one, module in self._modules.get(place, []) if entry.search(one.ptx)), None)

    def add(self, place: Hashable, binary: Binary, module: Any) -> None:
        """A module that has been loaded."""
        self._modules.setdefault(place, []).append((binary, module))

    def moves(self, text: Source) -> bool:
        """Return True if the text has templates of kernels, so that there may be several modules."""
        if text.digest not in self._templates:
            self._templates[text.digest] = any(one.template for one in functions(text))
        return self._templates[text.digest]

    def bring(self, place: Hashable, module: Any, holder: Holder, symbols: Mapping[str, Symbol]) -> None:
        """A kernel of this module is about to see the variables: they get the values that they have elsewhere."""
        with self._lock:
            before = self._last.get(place)
            self._last[place] = module, holder, frozenset(one.symbol for one in symbols.values())
            if before is None or before[0] is module:
                return
            for one in (one for one in symbols.values() if one.symbol in before[2]):
                holder.write(one.symbol, before[1].read(one.symbol, one.size))
