"""Products of 8-bit numbers as the tests of scaled_mm make them, and PyTorch's of the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._dispatch.gemm import scaled
from cupyops._dispatch.gemm.scaled import PAIRS

HOPPER = {"shared": 232448, "multiprocessors": 4}  # few, so that each block has several tiles


def by_torch(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """By numbers of the scales' dtype; of float64 the result as it is."""
    wide, of = scale_a.dtype, out_dtype or a.dtype
    y = a.to(wide) @ b.to(wide) * (scale_a * scale_b)
    if bias is not None:
        y = y + bias
    if of.itemsize == 1:
        y = (y if scale_result is None else y * scale_result).clamp(torch.finfo(of).min, torch.finfo(of).max)
    return y if wide is torch.float64 else y.to(of)


def of_numbers(x: Tensor, weight: Tensor, *scales: Tensor, types: str, **options: Any) -> Tensor:
    """scaled_mm of numbers that are made 8-bit ones first, since PyTorch has few operations for these.

    types: of x, of weight and of the result, by their names.
    """
    a, b, out = (getattr(torch, name) for name in types.split())
    return cupyops.scaled_mm(x.to(a), weight.to(b).t(), *scales, out_dtype=out, **options)


def of_numbers_by_torch(x: Tensor, weight: Tensor, *scales: Tensor, types: str, **options: Any) -> Tensor:
    """The same by PyTorch."""
    a, b, out = (getattr(torch, name) for name in types.split())
    return by_torch(x.to(a), weight.to(b).t(), *scales, out_dtype=out, **options)


def types_of(*dtypes: torch.dtype) -> str:
    """Their names."""
    return " ".join(str(one).removeprefix("torch.") for one in dtypes)


def operands(
    m: int, k: int, n: int, a: torch.dtype, b: torch.dtype, by_row: bool, device: Any = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, b and their scales."""
    torch.manual_seed(0)
    scales = (torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5) if by_row else (torch.tensor(0.5), torch.tensor(0.75))
    both = torch.randn(m, k).to(a), torch.randn(n, k).to(b).T
    return tuple(one.to(device) for one in (*both, *scales))  # type: ignore[return-value]


def compare(
    form: scaled.Scaled,
    a: torch.dtype,
    b: torch.dtype,
    out: torch.dtype,
    device: str,
    size: tuple[int, int, int],
    by_row: bool = True,
    fast: bool = False,
    with_bias: bool = True,
) -> None:
    """By one form beside PyTorch in float64: rounded once, of sums that are exact to some bits."""
    m, k, n = size
    given = operands(m, k, n, a, b, by_row, device)
    bias = torch.randn(n, device=device).to(out if out.itemsize == 2 else torch.bfloat16) if with_bias else None
    with cupyops.use_form(f"scaled_mm:{form.name}"), assume_gpu(**HOPPER) if device == "cpu" else assume_gpu():
        y = cupyops.scaled_mm(*given, bias, out_dtype=out, use_fast_accum=fast)
    exact = [one.double() for one in given]
    truth = by_torch(*exact, None if bias is None else bias.double(), out_dtype=out)
    sums = (exact[0].abs() * exact[2]) @ (exact[1].abs() * exact[3])  # of what was added up
    bits = 2**-22 if device == "cpu" else 2**-10 if fast else 2**-12
    bound = torch.finfo(out).eps * truth.abs() + bits * sums + 1e-30
    assert ((y.double() - truth).abs() <= bound).all(), (form.name, a, b, out, size, by_row, fast)


def sizes(form: scaled.Scaled) -> list[tuple[int, int, int]]:
    """m, k, n: of one tile and of several, with rests of each; n in whole vectors and not."""
    if form.split > 1:
        return [(form.m - 14, 320, 80), (5, 272, 77)]
    return [(form.m + 44, 320, form.n + 24), (70, 144, 77)]


def calls(dtype: torch.dtype, device: str) -> Iterator[Callable[[], None]]:
    """Each form, pair of types and way of adding up, with results of a dtype."""
    for form in scaled.TILES:
        first, second = sizes(form)
        pairs = [pair for pair in PAIRS if form.of_fp32 or scaled.sums_in(*pair, dtype) is not torch.float32]
        for pair in pairs:
            yield partial(compare, form, *pair, dtype, device, first, fast=pair != PAIRS[0])
        for fast in (False, True) if PAIRS[0] in pairs else ():
            yield partial(compare, form, *PAIRS[0], dtype, device, second, False, fast, with_bias=fast)
