"""Executors of launches, by type of device. CUDA tensors have the driver; a simulator takes turns at "cpu"."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._util.strides import has_bits, is_dry
from ...errors import LaunchError

# By type of device, as execute(specialised, device, configuration, args); what it returns tells a launch's cost, or is None.
executors: dict[str, Callable[..., Any] | None] = {"cuda": None}


def addressing(device: torch.device) -> Callable[[Tensor], int]:
    """Return the function from a tensor to the pointer that kernels on `device` know, for structs passed by value."""
    return getattr(executors.get(device.type), "address", Tensor.data_ptr)


class _Asked(threading.local):
    """State of a thread: True if the last address asked for was that of a tensor without storage."""

    of_nothing = False


asked = _Asked()


def address(tensor: Tensor) -> int:
    """The address of a tensor as a kernel knows it, for a pointer inside a struct that is passed by value.

    Inside `cupyops.simulate()` it is one of the simulator's, which knows from then on that kernels may reach the tensor. Of
    a tensor without storage, on which `torch.compile` runs a forward to learn shapes, it is 0. A tensor that is an argument
    of a launch needs none of this; for several pointers and nothing else `cupyops.pointers` is simpler.

    Args:
        tensor: on a GPU, or on the CPU inside `simulate()`; it must outlive the launches that use the address.

    Raises:
        LaunchError: it is a view of conjugates or negatives, of which PyTorch only keeps a note.

    Example:
        >>> code = '''
        ... struct Pair { float* first; float* second; };
        ... __global__ void swap(float* x, Pair of) { of.second[0] = of.first[0]; }
        ... '''
        >>> swap, x, y = cupyops.Kernel(code, "swap"), torch.ones(1), torch.zeros(1)
        >>> with cupyops.simulate():
        ...     swap[1, 1](x, np.array([cupyops.address(x), cupyops.address(y)], np.uint64))
        >>> y
        tensor([1.])
    """
    asked.of_nothing = is_dry(tensor)
    if asked.of_nothing:
        return 0
    if has_bits(tensor):
        raise LaunchError(
            "the values of this tensor are not those in its memory but their conjugates or negatives: take the address of "
            "its .resolve_conj().resolve_neg(), which is a copy"
        )
    return addressing(tensor.device)(tensor)


def default_device() -> torch.device:
    """Device of launches without a tensor: the CPU inside `cupyops.simulate()`, else the current GPU."""
    return torch.device("cpu" if executors.get("cpu") is not None else "cuda")


def capability(device: torch.device) -> int:
    """Major compute capability of the device that runs launches on `device`; 0 where none does."""
    if device.type == "cuda":
        return _capability_of_gpu(device)
    return int(getattr(executors.get(device.type), "capability", 0))


@functools.cache
def _capability_of_gpu(device: torch.device) -> int:
    """Major compute capability of a GPU; 0 in a dry run without one."""
    return torch.cuda.get_device_properties(device).major if torch.cuda.is_available() else 0


_ABSENT: Any = object()
_turns: list[Turn] = []  # in the order of their beginnings, which in several threads need not be that of their ends
_changing = threading.Lock()


class Turn:
    """An executor's turn at the launches on a type of device, from now until it is ended.

    The turn that began last has the launches; what was there before the first has them again after the last.
    """

    def __init__(self, kind: str, executor: Callable[..., Any]) -> None:
        self.kind = kind
        with _changing:
            self.before = executors.get(kind, _ABSENT)
            executors[kind] = executor
            _turns.append(self)

    def end(self) -> None:
        """Give the launches back; or leave them to the turn that has begun since, which is then to give them back."""
        with _changing:
            later = [turn for turn in _turns[_turns.index(self) + 1 :] if turn.kind == self.kind]
            _turns.remove(self)
            if later:
                later[0].before = self.before
            elif self.before is _ABSENT:
                del executors[self.kind]
            else:
                executors[self.kind] = self.before
