"""Elementwise kernels whose output may be their input, on whatever tensor is to be changed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .._util.strides import alike, laid_out_alike


def change(x: Tensor, launch: Callable[[Tensor, Tensor], None]) -> None:
    """`launch(x, x)` where the memory of `x` can be read as a flat array; else on a copy, which is then written back."""
    if laid_out_alike((x,)):
        launch(x, x)
        return
    y, flat = alike(x)
    launch(flat, y)
    x.copy_(y)
