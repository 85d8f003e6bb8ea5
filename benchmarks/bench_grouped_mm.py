"""grouped_mm: the products of experts, beside PyTorch's own, which they are but for `cupyops.never_slower(False)`."""

import torch
from common import HALF

import cupyops
from cupyops.bench import Case

QWEN3_30B = 128, 2048, 768  # experts, width, width of an expert
MIXTRAL = 8, 4096, 14336


def eager(x, weight, offs):
    if x.dtype is torch.float64:  # which PyTorch's has not
        return torch.cat([of @ one.mT for of, one in zip(x.tensor_split(offs[:-1].long().cpu()), weight)])
    return torch.nn.functional.grouped_mm(x, weight.mT, offs=offs)


def case(rows, groups, k, n, skewed=False):
    def make(device, dtype):
        if skewed:  # the first experts have most: the g-th a share like 1 / (g + 1)
            shares = 1 / torch.arange(1.0, groups + 1)
        else:
            shares = torch.ones(groups)
        ends = (rows * (shares / shares.sum()).cumsum(0)).round().int().clamp_(max=rows)
        ends[-1] = rows
        x, weight = torch.randn(rows, k, device=device), torch.randn(groups, n, k, device=device) / k**0.5
        return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ends.to(device)

    flops, elements = 2.0 * rows * n * k, rows * (k + n) + groups * n * k
    return Case(
        op="grouped_mm", size=f"{rows} in {groups}, {k}x{n}" + ", skewed" * skewed, dtype=HALF, make=make,
        ours=lambda x, weight, offs: cupyops.grouped_mm(x, weight.mT, offs=offs),
        eager=eager, liger=None,
        forward_flops=flops, backward_flops=2 * flops, forward_bytes=elements * HALF.itemsize,
        backward_bytes=2 * elements * HALF.itemsize, compiled=False,
        small=lambda: case(24, 3, 16, 8, skewed),
    )  # fmt: skip


def cases():
    for skewed in (False, True):
        for groups, width, inner in (QWEN3_30B, MIXTRAL):
            for rows in (16384, 65536) if groups == 128 else (8192,):
                yield case(rows, groups, width, inner, skewed)
                yield case(rows, groups, inner, width, skewed)
