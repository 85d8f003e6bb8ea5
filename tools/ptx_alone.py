"""Kernels without machine code: all that the simulator runs, and two thirds of the time to compile."""

from __future__ import annotations

from dataclasses import replace

from cupyops._kernel.compile import compiler
from cupyops._kernel.compile.binary import Binary
from cupyops._kernel.compile.source import Source

_compile = compiler.compile


def ptx_alone(source: Source, name: str, arch: str, options: tuple[str, ...] = ()) -> tuple[Binary, bytes]:
    """To be put in the place of `compiler.compile`, for a cache that no GPU looks into."""
    binary, nothing = _compile(source, name, arch.replace("sm", "compute"), options)
    return replace(binary, arch=arch), nothing
