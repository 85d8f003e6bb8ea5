"""Where kernels are kept that tests have compiled: as long as their text is the same, the next test and run have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cupyops.compilation import cache, compiler
from cupyops.compilation.binary import Binary
from cupyops.compilation.source import Source

_BUILD = Path(__file__).resolve().parent.parent / "build"
CUBINS = _BUILD / "cubins"  # `make demo` uses it too
TEXTS = _BUILD / "ptx"  # PTX without machine code, as entries of the same names: all that the simulator runs

_compile = compiler.compile
_found: dict[str, Binary] = {}  # in this process; other tests want machine code of the same kernels


def arch(dtype: torch.dtype) -> str:
    """For which architecture the text of an instance is kept in any case: of bfloat16 headers have more for sm_90."""
    return "sm_90" if dtype is torch.bfloat16 else "sm_80"


def text(source: Source, name: str, arch: str, options: tuple[str, ...] = ()) -> Binary:
    """The PTX of a kernel."""
    stem = compiler.entry_name(source, name, arch, options)
    found = cache.read_entry(TEXTS, stem)
    if found is None:
        TEXTS.mkdir(parents=True, exist_ok=True)
        found = cache.write_entry(TEXTS, stem, *text_alone(source, name, arch, options))
    return found


def text_alone(source: Source, name: str, arch: str, options: tuple[str, ...] = ()) -> tuple[Binary, bytes]:
    """`compiler.compile` without the machine code, which takes half as long again."""
    binary, nothing = _compile(source, name, arch.replace("sm", "compute"), options)
    return replace(binary, arch=arch), nothing


def simulate_texts(patch: pytest.MonkeyPatch) -> None:
    """What is launched is found among the texts, or compiled to one more."""
    TEXTS.mkdir(parents=True, exist_ok=True)
    patch.setattr(cache, "folder", lambda: TEXTS)
    patch.setattr(compiler, "compile", text_alone)
    patch.setattr(compiler, "_memory", _found)
