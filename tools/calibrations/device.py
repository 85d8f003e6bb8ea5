"""The GPU, through the driver's own library: modules, memory, launches and tensor maps. Needs nothing but the driver."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NAME = 256
_ELEMENTS = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "s32": 3,
    "u64": 4,
    "s64": 5,
    "f16": 6,
    "f32": 7,
    "f64": 8,
    "bf16": 9,
    "tf32": 11,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}

# arguments that are neither pointers nor arrays have to have their width told
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDriverGetVersion": (c_void_p,),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint, c_void_p, *[c_void_p] * 4, *[c_int] * 4),
}


class DeviceError(RuntimeError):
    """The driver refused a call, or a kernel failed."""


class Device:
    """The first GPU, with its primary context made current."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ.get("CALIBRATION_DRIVER", "libcuda.so.1"))
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, c_int
        number, context = c_int(), c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(number), 0)
        self._call("cuDevicePrimaryCtxRetain", byref(context), number)
        self._call("cuCtxSetCurrent", context)
        self._number = number
        self._modules: dict[bytes, c_void_p] = {}

    def describe(self) -> dict[str, str]:
        """The GPU's name, and the CUDA version that its driver serves."""
        name, version = ctypes.create_string_buffer(_NAME), c_int()
        self._call("cuDeviceGetName", name, _NAME, self._number)
        self._call("cuDriverGetVersion", byref(version))
        return {"gpu": name.value.decode(), "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}

    def allocate(self, data: np.ndarray) -> int:
        """The address of a copy of the data."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), max(data.nbytes, 16))
        self._call("cuMemcpyHtoD_v2", address, data.ctypes.data, data.nbytes)
        return address.value

    def read(self, address: int, data: np.ndarray) -> None:
        """Overwrite `data` with what lies at the address."""
        self._call("cuMemcpyDtoH_v2", data.ctypes.data, address, data.nbytes)

    def free(self, address: int) -> None:
        """Give an allocation back."""
        self._call("cuMemFree_v2", address)

    def tensor_map(self, map_: dict[str, Any], address: int) -> bytes:
        """CUDA's own 128 bytes for a tensor map."""
        buffer = ctypes.create_string_buffer(128 + 64)
        aligned = ctypes.addressof(buffer) + 63 & ~63
        rank = len(map_["sizes"])
        sizes = (c_uint64 * rank)(*map_["sizes"])
        strides = (c_uint64 * max(rank - 1, 1))(*map_["strides"])
        box, steps = (c_uint * rank)(*map_["box"]), (c_uint * rank)(*map_["element_strides"])
        element, fill = _ELEMENTS[map_["element"]], int(map_["fill"] == "nan")
        extents = (ctypes.cast(values, c_void_p) for values in (sizes, strides, box, steps))
        modes = 0, _SWIZZLES[map_["swizzle"]], 0, fill  # no interleaving, no promotion in the L2 cache
        self._call("cuTensorMapEncodeTiled", aligned, element, rank, address, *extents, *modes)
        return ctypes.string_at(aligned, 128)

    def launch(
        self, cubin: bytes, kernel: str, grid: int, block: int, shared: int, arguments: Sequence[int | bytes]
    ) -> None:
        """Run a kernel to its end. Addresses are 64-bit ints; other ints are to come as bytes."""
        function = c_void_p()
        self._call("cuModuleGetFunction", byref(function), self._module(cubin), kernel.encode())
        if shared > 48 * 1024:
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        packed = [value if isinstance(value, bytes) else value.to_bytes(8, "little") for value in arguments]
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in packed]
        pointers = (c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        self._call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared, None, pointers, None)
        self._call("cuCtxSynchronize")

    def _module(self, cubin: bytes) -> c_void_p:
        if cubin not in self._modules:
            module = c_void_p()
            self._call("cuModuleLoadData", byref(module), cubin)
            self._modules[cubin] = module
        return self._modules[cubin]

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorName(status, byref(text))
            raise DeviceError(f"{name}: {(text.value or b'error ' + str(status).encode()).decode()}")
