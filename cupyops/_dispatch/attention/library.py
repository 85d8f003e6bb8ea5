"""Sizes from which attention's kernels were measured as fast as PyTorch's own, which is taken elsewhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..._util import torch_private
from ..core.gpu import Gpu
from ..core.library import FASTER
from .attention import taken, taken_mask

NEVER = math.inf
# From how many queries and keys on kernels took at most as long as the faster of cuDNN and flash attention, which PyTorch
# has, on an H100, 16,384 tokens of 2,048 elements: of all keys, causal, and causal with heads that share. By elements of a
# row of q and of v; forward alone, and with backward. Of all keys and rows of 64 also 25,216 tokens of 768 elements were
# measured, parts of one tensor: 197 rows, forward and backward, take 0.54 of the time, and 256 take 0.47.
ALONE: dict[tuple[int, int], tuple[float, float, float]] = {
    (64, 64): (4096, 512, 512),
    (96, 96): (512, 512, 512),
    (128, 128): (NEVER, 1024, 512),
    (192, 128): (512, 512, 512),
    (256, 256): (1024, 4096, 512),
}
WITH_BACKWARD: dict[tuple[int, int], tuple[float, float, float]] = {
    (64, 64): (192, 512, 512),
    (96, 96): (512, 1024, 512),
    (128, 128): (NEVER, 512, 512),
    (192, 128): (512, 512, 512),
    (256, 256): (512, 1024, 1024),
}
# Where a fixed order is asked for, beside flash attention, which has one too: cuDNN has none. Of 192 and 128 flash
# attention has no function; there the kernels were at least 0.96 times as fast as cuDNN. Causal rows of 96 were
# measured with shared heads alone from 1,024 on.
IN_ORDER: dict[tuple[int, int], tuple[float, float, float]] = {
    (64, 64): (1024, 1024, 1024),
    (96, 96): (NEVER, 512, 1024),
    (128, 128): (512, 512, 1024),
    (192, 128): (512, 512, 512),
    (256, 256): (512, 512, 1024),
}


def slower(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, card: Gpu) -> str | None:
    """Return why PyTorch's own attention is faster than kernels that serve the tensors, or None.

    What is not measured is PyTorch's: masks, other GPUs, other widths, as many queries as keys alone.
    """
    if not card.library:
        return None
    if card.capability == 9 and mask is None and q.shape[2] == k.shape[2] and q.shape[2] >= _least(q, k, v, causal):
        return None
    # where PyTorch's function gets copies something is left to do
    as_they_are = all(x is taken(x) for x in (q, k, v)) and (mask is None or mask is taken_mask(mask))
    return FASTER if as_they_are else str(FASTER)


def _least(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """Number of rows from which kernels are as fast as PyTorch's."""
    needs = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
    if any(needs) and not all(needs):  # not measured
        return NEVER
    of = ALONE if not any(needs) else IN_ORDER if torch_private.deterministic() else WITH_BACKWARD
    shared = q.shape[1] > k.shape[1]
    if shared and not causal:
        return NEVER
    return of.get((q.shape[3], v.shape[3]), (NEVER,) * 3)[2 if shared else int(causal)]
