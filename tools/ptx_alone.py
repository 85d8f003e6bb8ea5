"""Kernels without machine code: all that the simulator runs, and two thirds of the time to compile."""

from __future__ import annotations

from dataclasses import replace

from cupyops.compilation import compiler
from cupyops.compilation.binary import Binary
from cupyops.compilation.source import Source

_compile = compiler.compile


def ptx_alone(source: Source, name: str, arch: str, options: tuple[str, ...] = ()) -> tuple[Binary, bytes]:
    """To be put in the place of `compiler.compile`, for a cache that no GPU looks into."""
    binary, nothing = _compile(source, name, arch.replace("sm", "compute"), options)
    return replace(binary, arch=arch), nothing
