"""One compiled kernel, and what its PTX says of its parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import CompileError
from . import mangled


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter as the PTX declares it: `u64`, `s32`, `f32` ..., or `b8` with a size for a struct."""

    kind: str
    size: int
    align: int


@dataclass(frozen=True)
class Binary:
    """One compiled kernel."""

    name: str  # as written: "relu_fwd<float>"
    symbol: str  # as the cubin names it (mangled)
    arch: str
    ptx: str
    parameters: tuple[Parameter, ...]
    path: Path | None = None  # the .cubin file; None until one is written
    origin: str = "nvrtc"  # "nvrtc", "cache" or "precompiled"
    typed: str = ""  # a symbol that tells the types of the parameters, where the kernel's own does not

    @property
    def types(self) -> tuple[str, ...] | None:
        """The C type of each parameter, as the compiler understood the text; None where that cannot be told."""
        found = mangled.parameters(self.typed or self.symbol)
        return None if found is None or len(found) != len(self.parameters) else tuple(map(str, found))


_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr\b[^,\[]*?)?\s+\w+(?:\[(\d+)\])?\s*(?:,|$)"
)


def parameters(ptx: str, symbol: str) -> tuple[Parameter, ...]:
    """The parameter list of the entry `symbol`: types and sizes, as the compiler laid them out."""
    match = re.search(rf"\.entry\s+{re.escape(symbol)}(?![\w$])\s*(?:\(([^)]*)\))?", ptx)
    if match is None:
        raise CompileError(f"the PTX has no entry {symbol}; compile its source anew")
    found = []
    for align, kind, count in _PARAMETER.findall(match.group(1) or ""):
        size = int(re.sub(r"\D", "", kind)) // 8
        found.append(Parameter(kind, size * int(count or 1), int(align or size)))
    return tuple(found)
