"""Time of inference of small batches on a GPU, where the host decides: modules as they are, and after `cupyops.swap`.

usage: python tools/swap_host.py [NAME ...]
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cupyops

ROUNDS, CALLS = 9, 30
IMAGE, ROWS = (1, 64, 28, 28), (1, 128, 768)


class Bottleneck(nn.Module):
    """A block of ResNet-50, without a change of size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.conv2, self.bn2 = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.conv3, self.bn3 = nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block's result."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x
        return self.relu(y)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel  # type: ignore[import-not-found]

    model: nn.Module = BertModel(BertConfig(attn_implementation="sdpa"))
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(768, 768), lambda: torch.randn(ROWS)),
    "layer_norm": (lambda: nn.LayerNorm(768), lambda: torch.randn(ROWS)),
    "gelu": (nn.GELU, lambda: torch.randn(ROWS)),
    "softmax": (lambda: nn.Softmax(-1), lambda: torch.randn(ROWS)),
    "dropout": (nn.Dropout, lambda: torch.randn(ROWS)),
    "conv2d": (lambda: nn.Conv2d(64, 64, 3, padding=1), lambda: torch.randn(IMAGE)),
    "batch_norm": (lambda: nn.BatchNorm2d(64), lambda: torch.randn(IMAGE)),
    "group_norm": (lambda: nn.GroupNorm(8, 64), lambda: torch.randn(IMAGE)),
    "max_pool": (lambda: nn.MaxPool2d(3, 2, 1), lambda: torch.randn(IMAGE)),
    "bottleneck": (Bottleneck, lambda: torch.randn(IMAGE)),
    "bert": (_bert, lambda: torch.ones((1, 128), dtype=torch.long)),
}


def _time(models: list[nn.Module], x: Tensor) -> list[float]:
    """Microseconds of a call of each model, medians of turns that alternate between them."""
    found: list[list[float]] = [[] for _ in models]
    for _ in range(ROUNDS + 1):
        for times, model in zip(found, models):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                model(x)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / CALLS * 1e6)
    return [statistics.median(times[1:]) for times in found]


def main(names: list[str]) -> None:
    """Print a line for each case under each mode."""
    if not torch.cuda.is_available():
        sys.exit("swap_host.py measures on a GPU, and there is none")
    modes: dict[str, Any] = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}
    for name, (make, given) in CASES.items():
        if names and name not in names:
            continue
        own = make().eval().to("cuda", torch.bfloat16)
        x = given().cuda()
        x = x.bfloat16() if x.is_floating_point() else x
        swapped = copy.deepcopy(own)
        cupyops.swap(swapped)
        for mode, entered in modes.items():
            with entered():
                before, after = _time([own, swapped], x)
            print(f"{name:12s} {mode:15s} own {before:8.1f} us  swapped {after:8.1f} us  ratio {after / before:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
