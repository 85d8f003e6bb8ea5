"""nll_loss: forward reads one score a row, backward writes zeros."""

import torch
from common import beside
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case


def cases():
    for dtype in (torch.float32, torch.bfloat16):
        yield case(4096, 32000, dtype)
    for classes, even in ((50257, 50256), (1000, 1024)):
        yield beside(case(4096, classes, torch.bfloat16), case(4096, even, torch.bfloat16))


def case(rows, classes, dtype):
    def make(device, dtype):
        scores = torch.randn(rows, classes, device=device).log_softmax(1).to(dtype).requires_grad_()
        return scores, torch.randint(0, classes, (rows,), device=device)

    return Case(
        "nll_loss", f"{rows}x{classes}", dtype, make, cupyops.nll_loss, F.nll_loss, forward_bytes=rows * dtype.itemsize,
        backward_bytes=rows * classes * dtype.itemsize, unit="us", together=True, small=lambda: case(4, 33, dtype),
    )  # fmt: skip
