"""Looking after tensors while others work: whether they change, how long they live, whose memory is whose."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .._util.torch_private import tree_leaves, version
from .call import Outcome
from .guards import Allocations
from .hazard import Failure
from .tolerance import name

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- values -----------------------------------------------------------------------------------------------------------


def different_bits(a: Tensor, b: Tensor) -> str:
    """Describe the first bit by which two tensors of one shape and dtype differ, and count them; "" if none."""
    wrong = _bits(a) != _bits(b)
    if not wrong.any():
        return ""
    wrong = wrong.any(-1) if a.is_complex() else wrong
    flat = int(wrong.flatten().int().argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape)]
    one, other = (t.detach().flatten()[flat].item() for t in (a, b))
    return f"at {place} {one:.9g}, then {other:.9g}; {int(wrong.sum())} of {wrong.numel()} differ"


def same_bits(first: Outcome, second: Outcome, between: str) -> None:
    """Raise `Failure` where two runs gave other bits, other shapes or other presence; `between`: what lay between them."""
    for (what, a), (_, b) in zip(first.named(), second.named(), strict=True):
        if (a is None) != (b is None):
            raise Failure(f"{what} {between}: once a tensor, once None")
        if a is None or b is None:
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise Failure(f"{what} {between}: {tuple(a.shape)} {name(a.dtype)}, then {tuple(b.shape)} {name(b.dtype)}")
        if found := different_bits(a, b):
            raise Failure(f"{what} {between}: {found}")


def _bits(tensor: Tensor) -> Tensor:
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return values.resolve_neg().contiguous().view(_BITS[values.element_size()])


class Unchanged:
    """Tensors that are to stay as they are."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Tensor, Tensor, int]] = []

    def add(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Watch these tensors from now on, as `what` and a number."""
        for number, tensor in enumerate(tensors):
            copy = tensor.detach().clone()
            self._seen.append((f"{what} {number}", tensor, copy, version(tensor)))

    def check(self, when: str, except_for: Iterable[Tensor] = ()) -> None:
        """Raise `Failure` where a value or a version counter has changed."""
        excepted = {id(tensor) for tensor in except_for}
        for what, tensor, copy, before in self._seen:
            if id(tensor) in excepted:
                continue
            if found := different_bits(copy, tensor):
                raise Failure(f"{what} was changed by the {when}: {found}")
            if version(tensor) != before:
                raise Failure(
                    f"the version counter of {what} went from {before} to {version(tensor)} in the {when}: "
                    "PyTorch takes it for changed, and refuses the backward of whatever has saved it (of a kernel that only "
                    "reads it, make the pointer const)"
                )


# --- graphs -----------------------------------------------------------------------------------------------------------


def functions(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of the graph behind the outputs that are an `autograd.Function` of Python: what its code calls ctx."""
    left: list[Any] = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            yield node
        left += [following for following, _ in node.next_functions if following is not None]


def saved(node: Any) -> list[Tensor]:
    """Tensors that the node has by save_for_backward; nothing if that was freed."""
    try:
        return [tensor for tensor in node.saved_tensors if tensor is not None]
    except RuntimeError:
        return []


def attributes(node: Any) -> list[tuple[str, Tensor]]:
    """(name, tensor) of each tensor that the node has as an attribute."""
    return [(key, leaf) for key, value in vars(node).items() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


# --- memory -----------------------------------------------------------------------------------------------------------


def storages(tensors: Iterable[Tensor | None]) -> list[weakref.ref[Any]]:
    """Weak references to storages, by which it can be seen later whether their memory is still held, by whomever."""
    return [weakref.ref(tensor.untyped_storage()) for tensor in tensors if tensor is not None]


class Births(Allocations):
    """Notes the memory of each tensor that Python code allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[weakref.ref[Any]] = []

    def changed(self, fresh: Tensor, by: Any) -> Tensor:
        """Note the memory of a fresh tensor."""
        self.storages += storages([fresh])
        return fresh


def shared(outputs: list[Tensor], inputs: list[Tensor]) -> set[tuple[str, str]]:
    """The pairs of an output and an input, or of two outputs, that lie in one storage."""
    named = [(f"output {i}", y) for i, y in enumerate(outputs)], [(f"input {i}", x) for i, x in enumerate(inputs)]
    pairs = [(a, b) for i, a in enumerate(named[0]) for b in (*named[0][:i], *named[1])]
    return {(first, second) for (first, a), (second, b) in pairs if _address(a) == _address(b) != 0}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
