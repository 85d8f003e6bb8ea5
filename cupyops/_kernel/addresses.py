"""Addresses that programs written for CuPy hand to a kernel, `x.data_ptr()`: the memory that lies there, as a tensor.

What lies there, of which dtype, and for how long is the caller's to know, as it is with CuPy.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from ..errors import LaunchError
from .launch.ctype import DTYPES
from .launch.executors import executors
from .launch.signature import unqualified


class _Memory:
    """One element at an address of the GPU, for `torch.as_tensor`."""

    def __init__(self, address: int, size: int) -> None:
        letters = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}
        self.__cuda_array_interface__ = {
            "shape": (1,), "typestr": letters[size], "data": (address, False), "version": 3,
        }  # fmt: skip


def tensor_at(address: int, ctype: str) -> Tensor:
    """The memory at an address, for a parameter of that pointer type.

    Raises:
        LaunchError: in the simulator, no tensor has its memory there; or the pointer is to something that is no number.
    """
    dtype = DTYPES.get(unqualified(ctype), torch.uint8)
    if executors.get("cpu") is not None and (found := _on_cpu(address, dtype)) is not None:
        return found
    if torch.cuda.is_available():
        return torch.as_tensor(_Memory(address, dtype.itemsize), device="cuda").view(dtype)
    raise LaunchError(
        f"got {address:#x} for a parameter `{ctype}`, expected the address of a tensor that is alive; give the tensor itself"
    )


def _on_cpu(address: int, dtype: torch.dtype) -> Tensor | None:
    """Find the storage behind the address, as a flat tensor, which the simulator has to know; None where there is none."""
    for one in gc.get_objects():
        if _is_there(one, address):
            storage = one.untyped_storage()
            offset = address - storage.data_ptr()
            if offset % dtype.itemsize:
                return None
            flat = torch.empty(0, dtype=dtype).set_(storage, 0, (storage.nbytes() // dtype.itemsize,))  # type: ignore[call-overload]
            return flat[offset // dtype.itemsize :]
    return None


def _is_there(one: Any, address: int) -> bool:
    if type(one) not in (Tensor, torch.nn.Parameter):  # isinstance would ask objects that answer with a warning
        return False
    if one.device.type != "cpu" or one.layout is not torch.strided:
        return False
    storage = one.untyped_storage()
    return storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()
