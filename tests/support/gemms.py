"""What the tests of products share: every tile of their kernels at any size, and every form by wgmma."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.conv.implicit_gemm import PatchTile
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._dispatch.gemm import gemm, wgmma

ALL = (*gemm.TILES, gemm.WIDE)


@contextmanager
def tiled(operator: str, dtype: torch.dtype, tile: int) -> Iterator[None]:
    """Every problem takes this tile, or the one there is, whatever its size; those of the widest must be whole vectors."""
    engine = "mma" if dtype in gemm.HALF else "fma"
    sizes = (PatchTile if operator == "conv2d" else gemm.Tile).sizes[engine]
    tile = tile if tile in gemm.tiles_for(dtype, wide=True) and tile in (*sizes, gemm.WIDE) else gemm.ONE_TILE
    with cupyops.use_form(f"{operator}:{engine}_{tile}"), assume_gpu(shared=232448):
        yield


HOPPER = {"shared": 232448, "multiprocessors": 4}  # few, so that each block has several tiles
WGMMA = [(form, layout) for form in wgmma.FORMS for layout in form.layouts]


def operands(form: wgmma.Tile, layout: tuple[bool, bool], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Matrices of several tiles in each direction, with tails, stored as a kernel takes them."""
    m, n, k = 2 * form.m * form.cluster + 24, 2 * form.n + 40, 136
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    a_mn, b_mn = layout
    return a.T.contiguous().T if a_mn else a, b if b_mn else b.T.contiguous().T


def compare_wgmma(form: wgmma.Tile, layout: tuple[bool, bool], dtype: torch.dtype, device: str) -> None:
    """A form beside PyTorch in float64: rounded once."""
    a, b = operands(form, layout, dtype, device)
    with cupyops.use_form(f"matmul:{form.name}"), assume_gpu(**HOPPER) if device == "cpu" else assume_gpu():
        y = cupyops.matmul(a, b)
    exact = a.double() @ b.double()
    assert (y.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max(), (form.name, layout)


# Of what is computed in an epilogue: 16-bit results are rounded once, gradients of what an activation was given once before;
# the sum of some hundred products in fp32 or fp64 has errors of its own.
UNITS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 8, torch.float64: 8}


def compare(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...] | None],
    activation: str,
    dtype: torch.dtype,
    device: Any,
) -> None:
    """A layer of (x, weight, bias or other weight, then a residual) beside PyTorch in float64, forward and gradients."""
    torch.manual_seed(0)
    made = [None if one is None else torch.randn(one, device=device, dtype=torch.float64) for one in shapes]
    scale = made[1].shape[1] ** -0.5  # results near 1
    made = [t if t is None else (t * scale if index else t).to(dtype) for index, t in enumerate(made)]
    given = [t if t is None else t.requires_grad_() for t in made]
    exact = [t if t is None else t.detach().double().requires_grad_() for t in given]
    truth = theirs(*exact[:3], activation, *exact[3:])
    y = ours(*given[:3], activation, *given[3:])
    if len(shapes) == 3:
        with torch.no_grad():
            assert torch.equal(ours(*given[:3], activation), y)  # with nothing kept for backward
    grad = torch.randn_like(truth)
    found = [y, *torch.autograd.grad(y, [t for t in given if t is not None], grad.to(dtype))]
    right = [truth, *torch.autograd.grad(truth, [t for t in exact if t is not None], grad.to(dtype).double())]
    for index, (a, b) in enumerate(zip(found, right)):
        worst, allowed = (a.double() - b).abs().max(), UNITS[dtype] * torch.finfo(dtype).eps * b.abs().max()
        assert worst <= allowed, (activation, index, worst, allowed)


def activated(form: Any, activation: str, dtype: torch.dtype, device: str) -> Iterator[Callable[[], None]]:
    """Calls of linear_act by a form of Hopper's, of several tiles in each direction, with tails; of one activation also such
    as TMA does not store, with nothing beside it."""
    m, n = _rows(form, device), form.n + 40
    shapes = [((m, 136), (n, 136), (n,), (m, n))]
    if activation == "gelu":
        shapes += [((m, 72), (n + 3, 72), None), ((40, 72), (67, 72), (67,), (40, 67))]
    for one in shapes:
        yield partial(
            _by_form, f"linear_act:{form.name}", cupyops.linear_act, linear_act, one, activation, dtype, device
        )


def gated(form: Any, activation: str, dtype: torch.dtype, device: str) -> Iterator[Callable[[], None]]:
    """The same of gated_linear, of two weights or packed ones."""
    m, n = _rows(form, device), form.columns + 40
    shapes = [((m, 136), (2 * n, 136), None)]
    if activation == "silu":
        shapes += [((m, 72), (n, 72), (n, 72)), ((m, 72), (n + 3, 72), (n + 3, 72)), ((40, 72), (2 * 67, 72), None)]
    name = f"gated_linear:{form.name}"
    for one in shapes:
        yield partial(_by_form, name, cupyops.gated_linear, gated_linear, one, activation, dtype, device)


def _rows(form: Any, device: str) -> int:
    """More than a cluster's tile, and on a GPU enough for several tiles of each block."""
    return form.m * form.cluster * (1 if device == "cpu" else 100) + 24


def _by_form(name: str, ours: Any, theirs: Any, shapes: Any, activation: str, dtype: torch.dtype, device: str) -> None:
    with cupyops.use_form(name), assume_gpu(**HOPPER) if device == "cpu" else assume_gpu():
        compare(ours, theirs, shapes, activation, dtype, device)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def linear_act(input: Any, weight: Any, bias: Any = None, activation: str = "gelu", residual: Any = None) -> Tensor:
    """By PyTorch."""
    y = _FUNCTIONS[activation](F.linear(input, weight, bias))
    return y if residual is None else y + residual


def gated_linear(input: Any, weight: Any, weight_up: Any = None, activation: str = "silu") -> Tensor:
    """By PyTorch."""
    if weight_up is None:
        if weight.shape[0] % 2:
            raise ValueError("halves of an odd number of rows")
        weight, weight_up = weight.chunk(2)
    return _FUNCTIONS[activation](F.linear(input, weight)) * F.linear(input, weight_up)
