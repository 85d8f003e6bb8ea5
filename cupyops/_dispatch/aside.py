"""Copies on a stream of their own, which the GPU's copy engines make beside the kernels that are launched next.

`begin_(t)`: what was launched so far comes before the copies that follow. `end_(t)`: those come before what is launched
next. What the copies read and write must live until then. On the CPU they are made at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .._kernel.launch import driver
from .._util import torch_private


def _noted(function: Callable[..., None]) -> Callable[..., None]:
    """Seen by modes as PyTorch's own functions are, so that it is a step of a recorded plan."""

    @functools.wraps(function)
    def call(*args: Any) -> None:
        tensors = [one for one in args if isinstance(one, Tensor)]
        if has_torch_function(tensors):
            handle_torch_function(call, tensors, *args)
        else:
            function(*args)

    return call


@_noted
def begin_(on: Tensor) -> None:
    """The copies that follow wait for what is on the current stream now."""
    if on.is_cuda:
        _beside(on.device).wait_stream(torch.cuda.current_stream(on.device))


@_noted
def end_(on: Tensor) -> None:
    """The current stream waits for the copies."""
    if on.is_cuda:
        torch.cuda.current_stream(on.device).wait_stream(_beside(on.device))


@_noted
def copy_(to: Tensor, source: Tensor) -> None:
    """A matrix whose rows are contiguous, to another of its dtype."""
    if not to.is_cuda:
        to.copy_(source)
    elif to.numel():
        size = to.element_size()
        pitches = to.stride(0) * size, source.stride(0) * size
        stream = _beside(to.device).cuda_stream
        driver.copy_rows(
            to.data_ptr(), pitches[0], source.data_ptr(), pitches[1], to.shape[1] * size, to.shape[0], stream
        )


@_noted
def deal_(to: Tensor, source: Tensor, first: int, rows: int, width: int, step: int) -> None:
    """Columns [i width, (i + 1) width) of `source` become rows of a matrix of so many `rows`, from row `first` on.

    That matrix begins at element `i * step` of `to`, and is contiguous.
    """
    to, (count, columns) = to.view(-1), source.shape
    for begin in range(0, columns, width):
        part = source[:, begin : begin + width]
        wide = part.shape[1]
        start = begin // width * step + first * wide
        copy_(to[start : start + count * wide].view(count, wide), part)


def _beside(device: torch.device) -> torch.cuda.Stream:
    return _stream(device, torch_private.current_stream(device.index))


@functools.lru_cache(maxsize=64)
def _stream(device: torch.device, beside: int) -> torch.cuda.Stream:
    """One for each stream: a graph that is captured on one has copies of its own alone."""
    return torch.cuda.Stream(device)
