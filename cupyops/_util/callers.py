"""Stack level of the code that called this package, for warnings."""

from __future__ import annotations

import sys

_INSIDE = (__name__.partition(".")[0], "torch")  # PyTorch calls us back, as torch.compile's wrappers do


def outside() -> int:
    """The `stacklevel` at which a warning of the caller's is one of whoever called this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level
