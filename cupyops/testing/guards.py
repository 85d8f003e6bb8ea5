"""Memory with a fence around it, and memory filled with what no result should hold.

Both are modes: while one is open, what Python code gets from `torch.empty` and its kin is fenced or filled. What C++ code
allocates by itself is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._util import torch_private
from .._util.allocations import EMPTY, FILLED, Allocations
from .call import Call
from .hazard import Failure

ZONE = 4096  # bytes on each side: whole elements of any dtype, and whole lines of a GPU's memory
FENCE = 0xB7  # what they hold

# what these modes allocate themselves goes past every mode
_unnoticed = torch_private.without_function_modes


class Guards(Allocations):
    """Puts a fence around each allocation; `check` finds what was written outside."""

    def __init__(self) -> None:
        super().__init__()
        self.fenced: list[Fenced] = []

    def changed(self, fresh: Tensor, by: Any) -> Tensor:
        """Put a fence around a fresh tensor."""
        title = f"{by.__name__}() of shape {tuple(fresh.shape)}"
        if by in FILLED:
            return self._fence(fresh.untyped_storage(), fresh, title)
        return self._fence(None, fresh, title)

    def around(self, call: Call) -> Call:
        """The call on fresh leaves of the same values, strides and surroundings, each fenced."""
        count = iter(range(1_000_000))

        def fence(tensor: Tensor) -> Tensor:
            values = tensor.detach()
            fenced = self._fence(values.untyped_storage(), values, f"input {next(count)}")
            fenced = torch_private.neg_view(fenced) if tensor.is_neg() else fenced
            return fenced.requires_grad_(tensor.requires_grad)

        return call.map(fence)

    def check(self, named: Sequence[tuple[str, Tensor | None]] = ()) -> None:
        """Raise `Failure` where a byte outside was written; `named` tells what became of the allocations."""
        names = {t.untyped_storage().data_ptr(): what for what, t in named if t is not None and t.numel()}
        for one in self.fenced:
            with _unnoticed():
                found = one.stray()
            if found:
                name = names.get(one.storage.data_ptr(), "")
                raise Failure(f"{name + ', ' if name else ''}{one.title}: {found}")

    def _fence(self, content: torch.UntypedStorage | None, like: Tensor, title: str) -> Tensor:
        with _unnoticed():
            one = Fenced(content, like, title)
            self.fenced.append(one)
            return one.tensor(like)


class Fenced:
    """A tensor's storage inside a larger one, and what that held at first."""

    def __init__(self, content: torch.UntypedStorage | None, like: Tensor, title: str) -> None:
        self.title = title
        self.shape, self.strides, self.size = tuple(like.shape), tuple(like.stride()), like.element_size()
        self.offset = ZONE // self.size + like.storage_offset()
        inside = like.untyped_storage().nbytes()
        self._bytes = torch.full((inside + 2 * ZONE,), FENCE, dtype=torch.uint8, device=like.device)
        self.storage = self._bytes.untyped_storage()
        if content is not None:
            given = torch.empty(0, dtype=torch.uint8, device=like.device).set_(content, 0, (inside,), (1,))
            self._bytes[ZONE : ZONE + inside].copy_(given)
        self._before = self._bytes.clone()

    def tensor(self, like: Tensor) -> Tensor:
        """The tensor itself: no view, with a version counter of its own."""
        made = torch.empty(0, dtype=like.dtype, device=like.device)
        made.set_(self.storage, self.offset, self.shape, self.strides)
        return made.data.requires_grad_(like.requires_grad)

    def stray(self) -> str:
        """Bytes that were written outside the tensor's elements; "" if nothing was."""
        if self.storage.nbytes() != self._before.numel():
            return ""  # it was resized, and lies elsewhere now
        own = self._own()
        changed = (self._bytes != self._before).cpu() & ~own
        if not changed.any():
            return ""
        inside, places = own.nonzero().flatten(), changed.nonzero().flatten()
        low, high = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (ZONE, ZONE)
        before, behind = places[places < low], places[places >= high]
        found = []
        if len(before):
            found.append(f"{len(before)} bytes before its start, the nearest {low - int(before[-1])} bytes off")
        if len(behind):
            found.append(f"{len(behind)} bytes behind its end, the nearest {int(behind[0]) - high} bytes off")
        if between := len(places) - len(before) - len(behind):
            found.append(f"{between} bytes between its elements")
        return f"written to {' and '.join(found)}; nothing outside its elements may be"

    def _own(self) -> Tensor:
        """Mask of the bytes that are elements of the tensor."""
        place = torch.tensor(self.offset)
        for extent, stride in zip(self.shape, self.strides):
            place = place.unsqueeze(-1) + torch.arange(extent) * stride
        mask = torch.zeros(self._before.numel() // self.size + 1, self.size, dtype=torch.bool)
        mask[place.flatten()] = True
        return mask.flatten()[: self._before.numel()]


@dataclass(frozen=True)
class Poison:
    """Values that unwritten memory is filled with, by kind of dtype."""

    name: str
    floating: Callable[[torch.dtype], float]
    integer: Callable[[torch.dtype], int]
    boolean: bool

    def fill(self, tensor: Tensor) -> None:
        """The whole storage; the tensor's version counter does not tell."""
        storage, size = tensor.untyped_storage(), tensor.element_size()
        with _unnoticed():
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.set_(storage, 0, (storage.nbytes() // size,), (1,)).fill_(self.value(tensor.dtype))

    def value(self, dtype: torch.dtype) -> Any:
        """Poison for tensors of a dtype."""
        if dtype.is_complex:
            return complex(self.floating(dtype), self.floating(dtype))
        if dtype.is_floating_point:
            return self.floating(dtype)
        return self.boolean if dtype is torch.bool else self.integer(dtype)


NAN = Poison("NaN", lambda dtype: float("nan"), lambda dtype: torch.iinfo(dtype).max // 3, False)
HUGE = Poison(
    "huge values", lambda dtype: 0.6 * torch.finfo(dtype).max, lambda dtype: torch.iinfo(dtype).max // 5, True
)


class Poisoned(Allocations):
    """Fills what comes from `torch.empty`."""

    wanted = EMPTY

    def __init__(self, poison: Poison) -> None:
        super().__init__()
        self.poison = poison
        self.count = 0

    def changed(self, fresh: Tensor, by: Any) -> Tensor:
        """Fill a fresh tensor."""
        self.count += 1
        self.poison.fill(fresh)
        return fresh
