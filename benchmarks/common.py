"""What the declarations share: random arguments, and cases of a kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cupyops.bench import Case

HALF, FLOAT = torch.bfloat16, torch.float32
FEW = 133  # elements of a twin for a CPU
ALL = (torch.bfloat16, torch.float16, torch.float32)
ODD_REDUCTIONS = [  # a shape, a rounder one, what is reduced
    ((4095, 4095), (4096, 4096), 1),
    ((4095, 4095), (4096, 4096), 0),
    ((65536, 1000), (65536, 1024), 1),
    ((4096, 50257), (4096, 50256), 1),
    ((1 << 21, 32), (1 << 16, 1024), 1),
    ((1000003, 17), (1000003, 16), 1),
]


def beside(odd: Case, even: Case) -> Case:
    """A case that is to reach the rate of another, rounder one of about as many bytes: the launch weighs more in fewer."""
    return replace(odd, beside=even)


def randn(*shapes: tuple[int, ...]) -> Callable[[Any, torch.dtype], tuple[Tensor, ...]]:
    """Normal values that want a gradient."""

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes)

    return make


def elementwise(
    op: str, ours: Callable[..., Tensor], eager: Callable[..., Tensor], count: int, dtype: torch.dtype, *,
    inputs: int = 1, backward: int = 3, size: str = "", want: Any = None, **options: Any,
) -> Case:  # fmt: skip
    """`inputs` tensors of `count` elements to one; backward moves `backward` times as many."""
    element = dtype.itemsize
    return Case(
        op=op, size=size or f"{count:,}", dtype=dtype, make=randn(*[(count,)] * inputs), ours=ours, eager=eager,
        forward_bytes=(inputs + 1) * count * element, backward_bytes=backward * count * element, want=want, **options,
        small=lambda: elementwise(op, ours, eager, FEW, dtype, inputs=inputs, backward=backward, **options),
    )  # fmt: skip


def counts(
    op: str, ours: Callable[..., Tensor], eager: Callable[..., Tensor], want: Any = None, **options: Any
) -> list[Case]:
    """The large size of every dtype, an odd one, a small one."""
    large, odd, small = 1 << 27, (1 << 24) + 1, 1 << 20
    found = [elementwise(op, ours, eager, large, HALF, size="2^27", want=want, **options)]
    found += [elementwise(op, ours, eager, large // 2, dtype, size="2^26", **options) for dtype in ALL[1:]]
    behind = elementwise(op, ours, eager, odd, HALF, size="2^24 + 1", **options)
    found += [beside(behind, elementwise(op, ours, eager, odd - 1, HALF, size="2^24", **options))]
    return [*found, elementwise(op, ours, eager, small, HALF, size="2^20", **options)]


def rows_of(
    op: str, ours: Callable[..., Tensor], eager: Callable[..., Tensor], rows: int, columns: int, dtype: torch.dtype, *,
    parameters: int = 0, want: Any = None, **options: Any,
) -> Case:  # fmt: skip
    """(rows, columns) to the same, with `parameters` vectors of a row's size; forward moves it twice, backward thrice."""
    moved = rows * columns * dtype.itemsize
    return Case(
        op=op, size=f"{rows}x{columns}", dtype=dtype, make=randn((rows, columns), *[(columns,)] * parameters), ours=ours,
        eager=eager, forward_bytes=2 * moved, backward_bytes=3 * moved, want=want, **options,
        small=lambda: rows_of(op, ours, eager, 4, 33, dtype, parameters=parameters, **options),
    )  # fmt: skip
