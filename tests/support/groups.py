"""Products of groups as the tests of grouped_mm make them: sizes of groups, and PyTorch's products one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu

HOPPER = {"shared": 232448, "multiprocessors": 4}  # few, so that each block has several tiles
BY_WGMMA = "grouped_mm:wgmma_128x256"

# rows, k, n, where groups end
SIZES = [
    (200, 72, 40, [130, 130, 170]),  # whole and ragged pieces, an empty group, rows of none
    (300, 136, 264, [300]),  # one group, several tiles each way
    (150, 72, 264, [0, 1, 64, 64, 127, 128, 150]),  # less than a stage, whole stages, ends on both sides of a boundary
    (40, 64, 72, [0, 0, 0]),  # nothing
    (270, 200, 80, [*range(1, 34), 261, 262]),  # many groups, one of which has most rows
]


def by_torch(
    input: Tensor,
    mat2: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A product of each group by PyTorch; rows and columns of none are zeros."""
    if offs is None:
        return input @ mat2
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(offs):
        return _whatever_the_ends(input, mat2, offs)
    ends = offs.tolist()
    bounds = [0, *ends, input.shape[0] if mat2.dim() == 3 else mat2.shape[input.dim() - 2]]
    if sorted(bounds) != bounds:
        raise ValueError("groups outside of the operand")
    firsts = [0, *ends[:-1]]
    if input.dim() == mat2.dim():
        return torch.stack([input[:, a:b] @ mat2[a:b] for a, b in zip(firsts, ends)])
    if input.dim() == 2:
        parts = [input[a:b] @ mat2[g] for g, (a, b) in enumerate(zip(firsts, ends))]
        return torch.cat([*parts, parts[0].new_zeros(input.shape[0] - ends[-1], mat2.shape[2])])
    parts = [input[g] @ mat2[:, a:b] for g, (a, b) in enumerate(zip(firsts, ends))]
    return torch.cat([*parts, parts[0].new_zeros(input.shape[1], mat2.shape[1] - ends[-1])], 1)


def _whatever_the_ends(input: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:
    """By a matrix that says which row is of which group."""
    size = input.shape[0] if mat2.dim() == 3 else mat2.shape[input.dim() - 2]
    group = (torch.arange(size)[:, None] >= offs).sum(1)
    of = (group[:, None] == torch.arange(offs.shape[0])).to(input.dtype)
    if input.dim() == mat2.dim():
        return torch.einsum("mr,rg,rn->gmn", input, of, mat2)
    if input.dim() == 2:
        return torch.einsum("rg,rk,gkn->rn", of, input, mat2)
    return torch.einsum("gmk,kr,rg->mr", input, mat2, of)


def ends(*values: int, device: Any = "cpu") -> Tensor:
    """Offsets."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def calls(dtype: torch.dtype, device: str) -> Iterator[Callable[[], None]]:
    """Each size, of both layouts of the matrices."""
    for size in SIZES:
        for turned in (False, True):
            yield partial(compare, *size, turned, dtype, device)


def compare(rows: int, k: int, n: int, offs: list[int], turned: bool, dtype: torch.dtype, device: str) -> None:
    """By the kernels beside PyTorch in float64: the result and both gradients, each rounded once."""
    torch.manual_seed(0)
    groups, at = len(offs), ends(*offs, device=device)
    x = torch.randn(rows, k, device=device).to(dtype).requires_grad_()
    weight = torch.randn(groups, *((n, k) if turned else (k, n)), device=device).to(dtype).requires_grad_()
    grad = torch.randn(rows, n, device=device).to(dtype)
    with cupyops.use_form(BY_WGMMA), assume_gpu(**HOPPER) if device == "cpu" else assume_gpu():
        y = cupyops.grouped_mm(x, weight.mT if turned else weight, offs=at)
        found = [y, *torch.autograd.grad(y, (x, weight), grad)]
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = by_torch(exact[0], exact[1].mT if turned else exact[1], offs=at)
    for ours, right in zip(found, [truth, *torch.autograd.grad(truth, exact, grad.double())]):
        worst, scale = (ours.double() - right).abs().max().item(), right.abs().max().item()
        assert worst <= 2 * torch.finfo(dtype).eps * scale, (rows, k, n, offs, turned, worst, scale)
