"""Losses of a linear layer by products that leave parts of them, beside PyTorch in float64, on a GPU and simulated."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gemms
import torch
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._dispatch.loss.linear_parts import LOSSES

PARTS = LOSSES.list[0]
NAME = f"fused_linear_cross_entropy.losses:{PARTS.name}"


def calls(dtype: torch.dtype, device: str) -> Iterator[Callable[[], None]]:
    """Several tiles in each direction, with tails; odd numbers of classes; rows in chunks; all options that it has."""
    many = 300 if device == "cpu" else 20_000
    yield partial(compare, (many, 136, 553), dtype, device)
    yield partial(compare, (many + 11, 72, 523), dtype, device, scratch=1 << 13, label_smoothing=0.2)
    yield partial(compare, (40, 64, 257), dtype, device, weighted=True, bias=False, ignore_index=3)
    yield partial(compare, (1, 8, 1), dtype, device)


def compare(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    weighted: bool = False,
    bias: bool = True,
    scratch: int = 240 << 20,
    **options: Any,
) -> None:
    """Each row's loss: the logits are rounded, as they would be in memory; the same bits twice."""
    rows, features, classes = sizes
    torch.manual_seed(rows)
    x, weight, b, c = (
        torch.randn(*shape).to(device, dtype)
        for shape in ((rows, features), (classes, features), (classes,), (classes,))
    )
    weight, c = weight / features**0.5 * 3, c.abs()
    target = torch.randint(classes, (rows,)).to(device)
    target[rows // 2] = options.get("ignore_index", -100)
    given = (x, weight, target, b if bias else None, c if weighted else None)
    assumed = gemms.HOPPER if device == "cpu" else {}
    with cupyops.use_form(NAME), assume_gpu(scratch=scratch, **assumed), torch.no_grad():
        y, again = (cupyops.fused_linear_cross_entropy(*given, reduction="none", **options) for _ in range(2))
        mean = cupyops.fused_linear_cross_entropy(*given, **options)
    assert y.dtype is torch.float32 and torch.equal(y, again)
    logits = F.linear(x.double(), weight.double(), b.double() if bias else None)
    exact = F.cross_entropy(logits, target, c.double() if weighted else None, reduction="none", **options)
    most = torch.finfo(dtype).eps * logits.abs().max() * (c.max() if weighted else 1)
    assert (y - exact).abs().max() <= most, ((y - exact).abs().max(), most)
    counted = target != options.get("ignore_index", -100)
    assert y[~counted].eq(0).all()
    divisor = (c.double()[target.where(counted, 0)] * counted).sum() if weighted else counted.sum()
    torch.testing.assert_close(mean.double(), y.double().sum() / divisor, equal_nan=True, rtol=1e-5, atol=1e-6)
