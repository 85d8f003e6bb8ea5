"""Where kernels are kept that tests have compiled: as long as their text is the same, the next test and run have them."""

import sys
from pathlib import Path

import pytest
import torch

from cupyops._kernel.compile import cache, compiler
from cupyops._kernel.compile.binary import Binary

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "tools"))

from ptx_alone import ptx_alone  # noqa: E402

CUBINS = _ROOT / "build" / "cubins"  # `make demo` uses it too
TEXTS = _ROOT / "build" / "ptx"  # PTX without machine code, as entries of the same names: all that the simulator runs

_found: dict[str, Binary] = {}  # in this process; other tests want machine code of the same kernels


def arch(dtype: torch.dtype) -> str:
    """For which architecture the text of an instance is kept in any case: of bfloat16 headers have more for sm_90."""
    return "sm_90" if dtype is torch.bfloat16 else "sm_80"


def texts_alone(patch: pytest.MonkeyPatch) -> None:
    """What is built is found among the texts, or compiled to one more."""
    TEXTS.mkdir(parents=True, exist_ok=True)
    patch.setattr(cache, "folder", lambda: TEXTS)
    patch.setattr(compiler, "compile", ptx_alone)
    patch.setattr(compiler, "_memory", _found)
