"""Where kernels are kept that tests have compiled: as long as their text is the same, the next test and run have them.

All of pytest's processes share them: what one compiles, the others wait for.
"""

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cupyops._kernel.compile import cache, compiler
from cupyops._kernel.compile.binary import Binary
from cupyops._kernel.compile.source import Source

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "tools"))

from ptx_alone import ptx_alone  # noqa: E402

CUBINS = _ROOT / "build" / "cubins"
TEXTS = _ROOT / "build" / "ptx"  # PTX without machine code, as entries of the same names: all that the simulator runs

_found: dict[str, Binary] = {}  # in this process; other tests want machine code of the same kernels
_fresh = compiler._fresh


def arch(dtype: torch.dtype) -> str:
    """For which architecture the text of an instance is kept in any case: of bfloat16 headers have more for sm_90."""
    return "sm_90" if dtype is torch.bfloat16 else "sm_80"


def texts_alone(patch: pytest.MonkeyPatch) -> None:
    """What is built is found among the texts, or compiled to one more."""
    TEXTS.mkdir(parents=True, exist_ok=True)
    patch.setattr(cache, "folder", lambda: TEXTS)
    patch.setattr(compiler, "compile", ptx_alone)
    patch.setattr(compiler, "_memory", _found)
    patch.setattr(compiler, "_fresh", _once)


def _once(source: Source, name: str, arch: str, options: tuple[str, ...], stem: str) -> Binary:
    """Compiled by one process at a time; what another has compiled meanwhile is read."""
    with _alone(TEXTS / f".{stem}.lock"):
        return cache.read_entry(TEXTS, stem) or _fresh(source, name, arch, options, stem)


@contextmanager
def _alone(path: Path) -> Iterator[Any]:
    """While no other process holds the lock of that name, which is given back even by one that is killed."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
