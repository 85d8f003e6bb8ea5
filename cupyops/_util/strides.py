"""Memory layouts: the strides that PyTorch's own operators give, without a copy where none is needed; and no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import observed
from .torch_private import FakeTensor, is_functional


def restride(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """`tensor` with the given (dense) strides, no negative and no conjugate bit: itself if it is so, else one copy."""
    if tensor.stride() == strides and not has_bits(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def has_bits(tensor: Tensor) -> bool:
    """Return True if the values are conjugates or negatives of what is in memory, of which PyTorch only keeps a note."""
    return tensor.is_conj() or tensor.is_neg()


def alike(first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """An empty output for an elementwise kernel, then each input laid out as the output is.

    The output has the strides that PyTorch's elementwise operators give: those of the first input where it is dense
    (channels_last stays so), else dense in the same order of dimensions. Every tensor can then be read as a flat array.
    """
    output = torch.empty_like(first)
    if not others and first.is_contiguous():
        return output, first
    strides = output.stride()
    return (output, restride(first, strides), *[restride(tensor, strides) for tensor in others])


def contiguous(*tensors: Tensor | None) -> Any:
    """The tensors as a kernel that knows no strides takes them: each itself where it is contiguous, else a copy.

    Args:
        *tensors: of any device; None stays None.

    Returns:
        As many as were given: of one the tensor, of several a tuple.

    Example:
        >>> x, bias = torch.ones(2, 3), None
        >>> y, same, none = cupyops.contiguous(x.t(), x, bias)
        >>> y.stride(), same is x, none
        ((2, 1), True, None)
    """
    found = tuple(None if one is None else one.contiguous() for one in tensors)
    return found[0] if len(found) == 1 else found


def alignment(tensor: Tensor, most: int = 16) -> int:
    """The greatest power of two, up to `most`, that the tensor's address in bytes is a multiple of.

    What a launch depends on is asked for in this way, and not by `data_ptr()`: a call that knows addresses cannot be
    recorded. Of a dry run, which has no addresses, it is `most`.

    Args:
        tensor: of any device.
        most: a power of two.

    Example:
        >>> x = torch.empty(8)
        >>> cupyops.alignment(x), cupyops.alignment(x[1:])
        (16, 4)
    """
    if observed.watching and (recorder := observed.recorder()) is not None:
        return int(recorder.alignment(tensor, most))
    address = 0 if is_dry(tensor) else tensor.data_ptr()
    return min(address & -address, most) if address else most


def laid_out_alike(tensors: Sequence[Tensor]) -> bool:
    """Return True if the tensors, of one shape, are dense and hold their elements in the same order."""
    if all(t.is_contiguous() for t in tensors):
        return True
    strides = tensors[0].stride()
    # a copy keeps the strides of a dense tensor, and of no other
    dense = torch.empty_like(tensors[0], device="meta").stride() == strides
    return dense and all(t.stride() == strides for t in tensors)


def aligned(tensor: Tensor, boundary: int = 16) -> bool:
    """Return True if the tensor's address is a multiple of `boundary` bytes, so that a kernel may use wide accesses.

    Ask this in a forward or backward, and not for `data_ptr()`: tensors without storage, on which `torch.compile` and
    `torch.export` run a forward, have no address, and what is recorded of a call is checked against the answer.

    Args:
        tensor: any tensor; one without storage counts as aligned, since nothing is launched on it.
        boundary: bytes, a power of two.

    Example:
        >>> x = torch.zeros(64)
        >>> cupyops.aligned(x), cupyops.aligned(x[1:])
        (True, False)
    """
    return alignment(tensor, boundary) == boundary


def is_dry(value: Any) -> bool:
    """Return True for a tensor without storage: a dry run, by which torch.compile and torch.export learn shapes."""
    if type(value) is Tensor:
        return value.is_meta or is_functional(value)
    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and (value.is_meta or is_functional(value)))


def suggested_format(x: Tensor) -> torch.memory_format:
    """The memory format that PyTorch takes strides for; where several fit, contiguous."""
    if x.dim() not in (4, 5):
        return torch.contiguous_format
    least: Any = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        size, step = x.shape[dim], x.stride(dim)
        if size == 0 or step < least or (dim == 1 and step == 0) or (dim == 0 and least == x.stride(1)):
            return torch.contiguous_format
        least = step * max(size, 1)
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d
