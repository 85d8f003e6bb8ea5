"""One step of Muon beside PyTorch's, over the matrices of a transformer's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import cupyops
from cupyops.bench import Case

# Of each block: the width, the hidden width, and how many blocks there are.
SIZES = {"12x768": (768, 3072, 12), "24x1024": (1024, 4096, 24), "4x4096": (4096, 11008, 4)}
SMALL = {"12x128": (128, 512, 12)}  # where the host's time is the whole


def cases() -> Iterator[Case]:
    """Of fp32 parameters, as Muon is used, and of bf16 ones."""
    for dtype in (torch.float32, torch.bfloat16):
        for sets, wall in ((SIZES, False), (SMALL, True)):
            for size, sizes in sets.items():
                yield step_of(size, *sizes, dtype, wall)


def step_of(size: str, width: int, hidden: int, blocks: int, dtype: torch.dtype, wall: bool) -> Case:
    """The bytes are those of parameter, gradient and momentum; most of the time is products."""
    shapes = [shape for _ in range(blocks) for shape in [(width, width)] * 4 + [(hidden, width), (width, hidden)]]

    def make(device: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        return (Steps(lambda: matrices(shapes, device, dtype)),)

    return Case(
        op="muon", size=size, dtype=dtype, make=make, ours=lambda steps: steps(cupyops.optim.Muon),
        eager=lambda steps: steps(torch.optim.Muon),
        forward_bytes=5 * dtype.itemsize * sum(rows * columns for rows, columns in shapes),
        compiled=False, same=False, wall=wall,
    )  # fmt: skip


class Steps:
    """A step of an optimizer, each made at its first and with parameters of its own."""

    def __init__(self, make: Callable[[], list[Tensor]]) -> None:
        self._make = make
        self._made: dict[Any, torch.optim.Optimizer] = {}

    def __call__(self, cls: Any) -> None:
        if cls not in self._made:
            self._made[cls] = cls(self._make(), 1e-3)
        self._made[cls].step()


def matrices(shapes: list[tuple[int, int]], device: Any, dtype: torch.dtype) -> list[Tensor]:
    """With gradients."""
    made: list[Tensor] = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for one in made:
        one.grad = torch.randn_like(one)
    return made
