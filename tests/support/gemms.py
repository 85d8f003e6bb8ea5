"""What the tests of matmul, linear and conv2d share: every tile of their kernels at any size, and every form by wgmma."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import cupyops
from cupyops._dispatch import gemm, wgmma
from cupyops._dispatch.forms import use_form
from cupyops._dispatch.gpu import assume_gpu

ALL = (*gemm.TILES, gemm.WIDE)


@contextmanager
def tiled(operator: str, dtype: torch.dtype, tile: int) -> Iterator[None]:
    """Every problem takes this tile, whatever its size, or that of fp64; those of the widest must be whole vectors."""
    engine = "mma" if dtype in gemm.HALF else "fma"
    tile = tile if tile in gemm.tiles_for(dtype, wide=True) else gemm.FP64_TILE
    with use_form(f"{operator}:{engine}_{tile}"), assume_gpu(shared=232448):
        yield


HOPPER = {"shared": 232448, "multiprocessors": 4}  # few, so that each block has several tiles
WGMMA = [(form, layout) for form in wgmma.FORMS for layout in form.layouts]


def operands(form: wgmma.Tile, layout: tuple[bool, bool], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Matrices of several tiles in each direction, with tails, stored as a kernel takes them."""
    m, k = (40, 392) if form.split > 1 else (2 * form.m * form.cluster + 24, 136)
    n = 2 * form.n + 40
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    a_mn, b_mn = layout
    return a.T.contiguous().T if a_mn else a, b if b_mn else b.T.contiguous().T


def compare_wgmma(form: wgmma.Tile, layout: tuple[bool, bool], dtype: torch.dtype, device: str) -> None:
    """A form beside PyTorch in float64: rounded once."""
    a, b = operands(form, layout, dtype, device)
    with use_form(f"matmul:{form.name}"), assume_gpu(**HOPPER) if device == "cpu" else assume_gpu():
        y = cupyops.matmul(a, b)
    exact = a.double() @ b.double()
    assert (y.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max(), (form.name, layout)
