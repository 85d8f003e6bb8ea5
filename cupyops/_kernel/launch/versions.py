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
from ..._util.strides import has_bits
from ...errors import InputError
from .pointers import Pointers, held
from .signature import Argument, is_const
from .tensor_map import TensorMap


class _Thread(threading.local):
    """State of a thread: True while it runs the forward or the backward of an operator.

    An operator declares itself what it changes (`mutates`, `updates`), and raises those versions once. Its other inputs stay
    as they are, also where a kernel takes them as pointers that are not const.
    """

    in_role = False
    # what a role that is looked at may not write: a name, the tensor, and what would allow it
    left_alone: Sequence[tuple[str, Tensor, str]] = ()


this_thread = _Thread()


@contextmanager
def in_role() -> Iterator[None]:
    """Mark launches of this thread inside as an operator's."""
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
    """Return True if the kernel may write to the memory that `value` gives it."""
    if isinstance(value, Pointers):
        return value.written or (argument.entry != "" and not is_const(argument.entry))
    return value.written if isinstance(value, TensorMap) else argument.is_written


def raise_all(tensors: Iterable[Tensor]) -> None:
    """Say that they have been changed: autograd, and whoever records the call. Inference tensors have no version."""
    changed = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(changed)
    if (recorder := observed.recorder()) is not None:
        recorder.bumped(changed)


@contextmanager
def left_alone(inputs: Sequence[tuple[str, Tensor, str]]) -> Iterator[None]:
    """Launches of this thread inside raise `InputError` where they change one of these tensors, which they then put back.

    inputs: of each tensor its name, and what beside a copy would allow it, for the message.
    """
    outer, this_thread.left_alone = this_thread.left_alone, inputs
    observed.watch()
    try:
        yield
    finally:
        observed.watch(-1)
        this_thread.left_alone = outer


@contextmanager
def refusing_writes(name: str, declared: Sequence[tuple[str, str]], args: Sequence[Any]) -> Iterator[None]:
    """One launch of a kernel with these parameters, which is to leave the inputs of `left_alone` as they are.

    A pointer that is not const may be read alone, so what there is before is compared with what there is after.
    """
    parameters = {}  # by storage, those through which the kernel may write
    for (ctype, parameter), value in zip(declared, args):
        if value is not None and not (ctype.endswith("*") and is_const(ctype)):
            parameters.update({_storage(one): f"{ctype} {parameter}" for one in held(value)})
    before = [
        (*one, one[1].detach().clone())
        for one in this_thread.left_alone
        if _storage(one[1]) in parameters and not has_bits(one[1])
    ]
    yield
    for said, tensor, allowed, content in before:
        if not torch.equal(_bits(tensor), _bits(content)):
            tensor.detach().copy_(content)
            raise InputError(
                f"{name}: the kernel writes to {said} through its parameter `{parameters[_storage(tensor)]}`, and the "
                f"operator does not say that {said} changes, so that a gradient would be wrong: give the kernel "
                f"{said}.clone(), or a torch.empty_like({said}) to write to{allowed}"
            )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
