"""Tensor accessors of PyTorch's C++ as arguments of a kernel: address, sizes and strides, packed at the launch.

`PackedTensorAccessor32<float, 2>` of a C++ extension is a struct that `cuda_src/extension/accessor.cuh` declares; what the
compiler calls it says all that there is to know: element, dimensions, and whether sizes have 32 or 64 bits. `TensorInfo`
has room for the sizes and strides of 25 dimensions, and their number behind them.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._util.strides import has_bits
from ...errors import LaunchError
from .ctype import VARIABLE_DTYPES, remedy

_NAME = re.compile(
    r"(?:const )?at::GenericPackedTensorAccessor<(const )?(.+), (\d+), [\w:]+, (?:unsigned )?(int|long long|long)>"
)
_INFO = re.compile(r"(?:const )?at::cuda::detail::TensorInfo<(const )?(.+), (?:unsigned )?(int|long long|long)>")
_MOST = 25  # dimensions of a TensorInfo


@dataclass(frozen=True)
class Accessor:
    """Layout of a tensor accessor, from which it is packed."""

    dtype: torch.dtype | None  # of the tensor; None where the element is no dtype of PyTorch
    rank: int  # how many dimensions the tensor has; any number up to that of a TensorInfo, where it is one
    is_wide: bool  # whether sizes and strides have 64 bits
    is_written: bool  # whether the kernel may write through it: neither it nor its elements are const
    is_info: bool = False

    @classmethod
    def read(cls, ctype: str, size: int) -> Accessor | None:
        """The accessor that a C type is, of `size` bytes; None where it is none."""
        match = _NAME.fullmatch(ctype) or _INFO.fullmatch(ctype)
        if match is None:
            return None
        is_written, is_info = match[1] is None and not ctype.startswith("const "), match.re is _INFO
        dtype, rank = VARIABLE_DTYPES.get(match[2]), _MOST if is_info else int(match[3])
        found = cls(dtype, rank, match[match.re.groups] != "int", is_written, is_info)
        return found if struct.calcsize(found._format) == size else None

    @property
    def _format(self) -> str:
        return f"<Q{2 * self.rank}{'q' if self.is_wide else 'i'}{'i4x' if self.is_info else ''}"

    def unfit(self, tensor: Tensor) -> str:
        """Describe what was expected instead of `tensor`; empty where it fits."""
        if self.dtype is not None and tensor.dtype is not self.dtype:
            found = remedy(tensor, self.dtype, self.is_written)
            return f"a tensor of {self.dtype}: choose the template value for this one, or {found}"
        if tensor.dim() != self.rank and not (self.is_info and tensor.dim() < self.rank):
            return f"a tensor of {self.rank} dimensions; this one has {tensor.dim()}"
        if has_bits(tensor):
            return "a tensor whose values are in its memory: give its .resolve_conj().resolve_neg()"
        if tensor.layout is not torch.strided or (not tensor.data_ptr() and tensor.numel()):
            return "a tensor with storage of its own"
        places = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()) if size)
        if not self.is_wide and max(sum(places), *tensor.shape, 0) >= 2**31:
            return "a tensor of less than 2**31 elements, for the kernel counts with 32 bits; PackedTensorAccessor64 has 64"
        return ""

    def packed(self, tensor: Tensor, address: int) -> bytes:
        """The bytes that the kernel takes, for a tensor that fits."""
        if self.is_info:
            left = (0,) * (self.rank - tensor.dim())
            return struct.pack(self._format, address, *tensor.shape, *left, *tensor.stride(), *left, tensor.dim())
        return struct.pack(self._format, address, *tensor.shape, *tensor.stride())

    def of(self, tensor: Tensor, device: int) -> bytes:
        """Pack the accessor of a tensor on a GPU. Raises `LaunchError` where the launch needs all checks."""
        if not isinstance(tensor, Tensor) or tensor.get_device() != device or self.unfit(tensor):
            raise LaunchError("expected a tensor that fits the accessor")
        return self.packed(tensor, tensor.data_ptr())
