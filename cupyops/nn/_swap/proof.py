"""Two functions on the same random input: whether results and gradients are equal within what their dtype can tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# of the largest element; a half type is rounded after each step of one function and once by the other
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


def random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of a normal distribution, the same each time; the random state of the process stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def alike(
    theirs: Callable[..., Any],
    ours: Callable[..., Any],
    inputs: Sequence[Tensor],
    parameters: tuple[list[Tensor], list[Tensor]] = ([], []),
    autocast: torch.dtype | None = None,
) -> bool:
    """Return whether two functions of tensors give the same, with the gradients of the inputs and of the parameters of each.

    `autocast`: the half type of the autocast that is on, in which results count as rounded; None where it is off.
    """
    with torch.enable_grad(), torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of dtypes that the user has not asked for
                expected, found = _run(theirs, inputs, parameters[0]), _run(ours, inputs, parameters[1])
        except Exception:
            return False  # one of them does not take such arguments
    return len(expected) == len(found) and all(_near(*pair, autocast) for pair in zip(found, expected))


def _run(function: Callable[..., Any], inputs: Sequence[Tensor], parameters: list[Tensor]) -> list[Tensor | None]:
    given = [x.detach().clone().requires_grad_() for x in inputs]
    results = function(*given)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    wanted = [random(y.shape, y.dtype, 11 + at) for at, y in enumerate(results)]
    grads = torch.autograd.grad(results, [*given, *parameters], wanted, allow_unused=True)
    return [*(y.detach() for y in results), *grads]


def _near(found: Tensor | None, expected: Tensor | None, rounded: torch.dtype | None = None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return False
    if not expected.isfinite().all():
        return False
    bound = _TOLERANCE[rounded or expected.dtype] * expected.double().abs().max()
    return bool((found.double() - expected.double()).abs().max() <= bound)
