"""Pointers to several tensors as one argument of a launch: a struct of pointers by value, or a table of them in memory."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..._util import arguments
from ..._util.strides import has_bits, is_dry
from ...errors import InputError, LaunchError
from .ctype import remedy
from .executors import executors

SIZE = 8  # bytes of a pointer


class Pointers:
    """The addresses of some tensors, as `cupyops.pointers` gives them: an argument of a launch.

    Attributes:
        entries: the tensors, None for a null pointer.
        written: whether kernels write to the tensors through a struct of pointers, of which the C type does not tell.
    """

    __slots__ = ("entries", "written")

    def __init__(self, entries: tuple[Tensor | None, ...], written: bool = False) -> None:
        self.entries, self.written = entries, written

    @property
    def tensors(self) -> list[Tensor]:
        """Entries that are not None."""
        return [one for one in self.entries if one is not None]

    def __len__(self) -> int:
        return len(self.entries)

    def get_device(self) -> int:
        """The index of the tensors' device, as `Tensor.get_device`."""
        return self.tensors[0].get_device()

    def addresses(self) -> list[int]:
        """Addresses of the tensors now, as kernels know them."""
        of = getattr(executors.get(self.tensors[0].device.type), "place", Tensor.data_ptr)
        return [0 if one is None else of(one) for one in self.entries]

    def tobytes(self, size: int) -> bytes:
        """The struct of `size` bytes; the pointers that it has besides these are null."""
        return struct.pack(f"<{len(self)}Q", *self.addresses()).ljust(size, b"\0")

    def table(self) -> Tensor:
        """The pointers in memory of the tensors' device. Raises `LaunchError` while a CUDA graph is captured."""
        device = self.tensors[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise LaunchError(
                "a table of pointers is copied to the GPU at the launch, which a CUDA graph would repeat with what the "
                "host's memory holds then; give the kernel the pointers by value, in a struct, which is faster too"
            )
        return torch.tensor(self.addresses(), dtype=torch.int64, device=device)

    def unfit(self) -> str:
        """Describe what a launch needs instead of one of these tensors; empty where all fit."""
        for number, one in enumerate(self.entries):
            if one is not None and not one.data_ptr() and one.numel():
                return f"pointers to tensors with storage of their own, which entry {number} has not"
        return ""

    def __repr__(self) -> str:
        first = self.tensors[0]
        return f"pointers to {len(self)} tensors, of which the first is of {first.dtype} on {first.device}"


def pointers(tensors: Iterable[Tensor | None], *, dtype: torch.dtype | None = None, written: bool = False) -> Pointers:
    """Pointers to several tensors, as one argument of a launch.

    A kernel takes them by value, as a struct that begins with so many pointers: `struct Inputs { const float* at[8]; };`.
    Pointers that the struct has besides are null. Or it takes a table, `const float* const* xs`, which is put into the
    memory of the device at each launch. By value is faster, is recorded with a call and can be captured in a CUDA graph; a
    launch has 4 KB of parameters, so some 500 pointers. A kernel sees no sizes: give them beside the pointers.

    Inside `cupyops.simulate()` the addresses are the simulator's, which checks accesses to each of the tensors as to those
    that are arguments.

    Args:
        tensors: on one device; None for a null pointer, though one must be a tensor.
        dtype: what all of them must be of. Of a table the C type says so; of a struct nothing does.
        written: whether the kernel writes to them. Of a table its C type says so, as `float* const*` does; of a struct
            nothing does. A launch then raises their versions, as PyTorch's in-place functions do.

    Returns:
        Pointers: to be given to launches; it holds the tensors, and knows them by their addresses at each launch.

    Raises:
        InputError: no tensor among them, tensors of several devices, one of another dtype, or one whose values are not those
            in its memory.

    Example:
        >>> code = '''
        ... struct Inputs { const float* at[3]; };
        ... __global__ void total(Inputs xs, int count, float* y) {
        ...     float sum = 0;
        ...     for (int k = 0; k < count; ++k) sum += xs.at[k][threadIdx.x];
        ...     y[threadIdx.x] = sum;
        ... }
        ... '''
        >>> total, xs, y = cupyops.Kernel(code, "total"), [torch.ones(2), torch.arange(2.0)], torch.empty(2)
        >>> with cupyops.simulate():
        ...     total[1, 2](cupyops.pointers(xs), len(xs), y)
        >>> y
        tensor([1., 2.])
    """
    entries = tuple(tensors)
    given = [(f"tensors[{number}]", one) for number, one in enumerate(entries) if one is not None]
    for name, one in given:
        arguments.tensor(name, one)
        if one.layout is not torch.strided or (has_bits(one) and not is_dry(one)):
            arguments.fail(
                name, one, "one with storage of its own, as .resolve_conj().resolve_neg() or .clone() gives it"
            )
        if dtype not in (None, one.dtype):
            arguments.fail(name, one, f"a tensor of {dtype}: {remedy(one, dtype, bool(written))}")
        if one.device != given[0][1].device:
            raise InputError(f"{name} is on {one.device}, expected {given[0][1].device}, where {given[0][0]} is")
    if not given:
        raise InputError("pointers: no tensor among them, expected one at least, whose device the launch goes to")
    return Pointers(entries, bool(written))


def held(value: Any) -> list[Tensor]:
    """The tensors that an argument of a launch is, or holds."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Pointers):
        return value.tensors
    one = getattr(value, "tensor", None)  # of a tensor map
    return [] if one is None else [one]
