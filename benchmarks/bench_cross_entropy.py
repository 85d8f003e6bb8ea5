"""cross_entropy of language models: forward and backward in one figure."""

import torch
from common import HALF, beside
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case


def liger(x, target):
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(x.clone(), target)  # a copy: it writes the gradient into its input


def case(rows, classes, dtype, want=None):
    def make(device, dtype):
        logits = torch.randn(rows, classes, device=device).to(dtype).requires_grad_()
        return logits, torch.randint(0, classes, (rows,), device=device)

    moved = rows * classes * dtype.itemsize
    return Case(
        "cross_entropy", f"{rows}x{classes}", dtype, make, cupyops.cross_entropy, F.cross_entropy, liger=liger,
        forward_bytes=moved, backward_bytes=moved, want=want, together=True, unit="us",
        small=lambda: case(4, 33, dtype),
    )  # fmt: skip


def cases():
    yield case(4096, 32000, HALF, 135)
    yield case(4096, 128256, HALF, 530)
    for dtype in (torch.float16, torch.float32):
        yield case(4096, 32000, dtype)
    for rows, classes, even in ((4096, 50257, 50256), (65536, 1000, 1024), (1 << 20, 64, 1024)):
        yield beside(case(rows, classes, HALF), case(rows * classes // even, even, HALF))
