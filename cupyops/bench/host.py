"""The host's time for one small call: what a user waits for where the GPU is quick."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..ops import relu
from .timing import host

# Largest ratio of a call's time to that of torch.relu, without and with a gradient. In five runs, where torch.relu
# took 6.8 to 9.6 us and 7.8 to 12.1, it was 1.21 to 1.25 and 1.57 to 1.70.
ALLOWED = {"no gradient": 1.3, "gradient": 1.7}


def times() -> dict[str, dict[str, float]]:
    """Time relu on 1024 numbers, ours and PyTorch's, in us: the least of many short turns, since a host has moods."""
    found = {}
    for name, wants in (("no gradient", False), ("gradient", True)):
        x = torch.randn(1024, device="cuda", requires_grad=wants)
        calls: dict[str, Callable[[], object]] = {"ours": lambda x=x: relu(x), "torch": lambda x=x: torch.relu(x)}  # type: ignore[misc]
        turns = [{who: host(call, repeats=2).low for who, call in calls.items()} for _ in range(8)]
        found[name] = {who: round(min(turn[who] for turn in turns), 3) for who in calls}
    return found


def too_slow(found: dict[str, dict[str, float]]) -> list[str]:
    """List the times that exceed `ALLOWED`, as sentences."""
    problems = []
    for name, factor in ALLOWED.items():
        us = found[name]
        limit = factor * us["torch"]
        if us["ours"] > limit:
            problems.append(
                f"host, {name}: {us['ours']:.2f} us, at most {limit:.2f} beside torch.relu's {us['torch']:.2f}"
            )
    return problems
