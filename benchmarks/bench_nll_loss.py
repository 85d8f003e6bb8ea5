"""nll_loss: forward reads one score a row, backward writes zeros."""

import torch
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case


def make(device, dtype):
    scores = torch.randn(4096, 32000, device=device).log_softmax(1).to(dtype).requires_grad_()
    return scores, torch.randint(0, 32000, (4096,), device=device)


def cases():
    for dtype in (torch.float32, torch.bfloat16):
        yield Case(
            "nll_loss", "4096x32000", dtype, make, cupyops.nll_loss, F.nll_loss, forward_bytes=4096 * dtype.itemsize,
            backward_bytes=4096 * 32000 * dtype.itemsize, unit="us", together=True,
        )  # fmt: skip
