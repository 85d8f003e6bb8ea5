"""The version counters of tensors that a launch writes.

PyTorch raises a tensor's version when its content changes, and autograd refuses the backward of what had saved the tensor
before. A kernel writes behind PyTorch's back, so the launch raises the version: of each tensor given for a pointer that is
not const, or as a tensor map that says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._util import observed
from .pointers import Pointers, held
from .signature import Argument, is_const
from .tensor_map import TensorMap


class _Thread(threading.local):
    """Whether this thread runs the forward or the backward of an operator.

    An operator declares itself what it changes (`mutates`, `updates`), and raises those versions once. Its other inputs stay
    as they are, also where a kernel takes them as pointers that are not const.
    """

    in_role = False


this_thread = _Thread()


@contextmanager
def in_role() -> Iterator[None]:
    """What this thread launches inside belongs to an operator."""
    outer, this_thread.in_role = this_thread.in_role, True
    try:
        yield
    finally:
        this_thread.in_role = outer


def raise_written(arguments: Sequence[Argument], args: Sequence[Any]) -> None:
    """Raise the versions of the tensors that a launch with these arguments has written."""
    if not this_thread.in_role:
        raise_all(
            one for argument, value in zip(arguments, args) if _is_written(argument, value) for one in held(value)
        )


def _is_written(argument: Argument, value: Any) -> bool:
    """Whether the kernel may write to what it is given."""
    if isinstance(value, Pointers):
        return value.written or (argument.entry != "" and not is_const(argument.entry))
    return value.written if isinstance(value, TensorMap) else argument.is_written


def raise_all(tensors: Iterable[Tensor]) -> None:
    """Say that they have been changed: autograd, and whoever records the call. Inference tensors have no version."""
    changed = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(changed)
    if (recorder := observed.recorder()) is not None:
        recorder.bumped(changed)
