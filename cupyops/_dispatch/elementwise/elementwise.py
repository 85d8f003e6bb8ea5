"""Elementwise launches over arrays that are laid out alike: the host's half of common/elementwise/elementwise.cuh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._util.strides import alike, laid_out_alike

BLOCK = 128
# Dtypes of the specialised forms of an operator. Double precision has one form in each direction, the most general one.
UP_TO_FLOAT32 = (torch.float16, torch.bfloat16, torch.float32)


def why_not_size(kernel: Kernel | None, itemsize: int, **template: Any) -> str | None:
    """Return why a kernel has no instance for elements of `itemsize` bytes, or None; None also without a kernel."""
    if kernel is None:
        return None
    for values in kernel.combinations():
        found = dict(zip(kernel.template, values))
        if found["T"].itemsize == itemsize and template.items() <= found.items():
            return None
    return f"there is no instance for elements of {itemsize} bytes"


def by_vectors(output: Tensor, block: int = BLOCK) -> tuple[int, int]:
    """(grid, block) with a thread for every 16 bytes of the output."""
    return ceil_div(output.numel(), block * (16 // output.element_size())), block


def change_in_place(x: Tensor, launch: Callable[[Tensor, Tensor], None]) -> None:
    """`launch(x, x)` where the memory of `x` can be read as a flat array; else on a copy, which is then written back."""
    if laid_out_alike((x,)):
        launch(x, x)
        return
    y, flat = alike(x)
    launch(flat, y)
    x.copy_(y)
