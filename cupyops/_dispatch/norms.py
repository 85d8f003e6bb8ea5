"""The card that launches are planned for, for families that do not ask `gpu()` yet."""

from __future__ import annotations

import torch

from .gpu import gpu


def card(device: torch.device) -> tuple[int, int]:
    """The number of multiprocessors, and the bytes of shared memory that a block can have."""
    of = gpu(device)
    return of.multiprocessors, of.shared
