"""What the tests of matmul, linear and conv2d share: every tile of their kernels at any size."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cupyops._dispatch import gemm
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
