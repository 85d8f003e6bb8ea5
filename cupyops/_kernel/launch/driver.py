"""Launches through the CUDA driver: CuPy's binding where it has one, libcuda itself for what has attributes, as clusters."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import LaunchError
from ..compile import backend
from .configuration import Configuration, Dim3

Launch = Callable[..., None]  # takes what cuLaunchKernel takes

_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6  # of CUlaunchAttributeID
_OVERLAP_IN_GRAPHS = 12030  # the CUDA of a driver, from which on


class _Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


class _Value(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("flag", ctypes.c_int), ("cluster", _Dim3)]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _Value)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def launcher(configuration: Configuration) -> Launch:
    """Return the driver's function for launches of a configuration; it is called as cuLaunchKernel."""
    overlap = configuration.overlap and _can_overlap()
    if not configuration.cooperative and configuration.cluster is None and not overlap:
        launch: Launch = backend.cupy().cuda.driver.launchKernel
        return launch
    attributes = _attributes(configuration.cooperative, configuration.cluster, overlap)
    launch_kernel = _library().cuLaunchKernelEx
    kept: dict[int, Any] = {}  # by stream a reference to a _Config, which takes Python longer to make than the launch

    def launch_with_attributes(
        function: int,
        gx: int,
        gy: int,
        gz: int,
        bx: int,
        by: int,
        bz: int,
        shared: int,
        stream: int,
        parameters: int,
        _: int,
    ) -> None:
        if stream not in kept:
            dims = _Dim3(gx, gy, gz), _Dim3(bx, by, bz)
            kept[stream] = ctypes.byref(_Config(*dims, shared, stream, attributes, len(attributes)))
        if status := launch_kernel(kept[stream], function, parameters, None):
            _check(status)

    return launch_with_attributes


def most_clusters(function: int, configuration: Configuration) -> int:
    """Number of the configuration's clusters that the current device can run at once."""
    attributes = _attributes(False, configuration.cluster, False)
    dims = _Dim3(*configuration.grid), _Dim3(*configuration.block)
    config = _Config(*dims, configuration.shared, None, attributes, len(attributes))
    number = ctypes.c_int()
    _check(_library().cuOccupancyMaxActiveClusters(ctypes.byref(number), function, ctypes.byref(config)))
    return number.value


def encode_tensor_map(
    place: int,
    element: int,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    modes: tuple[int, int, int],
) -> None:
    """Write a CUtensorMap to `place`, a multiple of 64; extents innermost first, `modes` swizzle, promotion and fill."""
    rank, interleave = len(sizes), 0
    longs, words = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    extents = longs(*sizes), longs(*strides), words(*box), words(*element_strides)
    _check(_tensor_maps().cuTensorMapEncodeTiled(place, element, rank, address, *extents, interleave, *modes))


def replace_address(place: int, address: int) -> None:
    """Have the CUtensorMap at `place` begin at another address."""
    _check(_tensor_maps().cuTensorMapReplaceAddress(place, address))


@functools.cache
def _can_overlap() -> bool:
    """Return True if all GPUs can overlap launches, and the driver while it captures a graph; else it is not asked for."""
    if backend.cupy().cuda.runtime.driverGetVersion() < _OVERLAP_IN_GRAPHS:
        return False
    return all(torch.cuda.get_device_capability(device)[0] >= 9 for device in range(torch.cuda.device_count()))


def _attributes(cooperative: bool, cluster: Dim3 | None, overlap: bool) -> ctypes.Array[_Attribute]:
    found = []
    if cooperative:
        found.append(_Attribute(_COOPERATIVE, b"", _Value(flag=1)))
    if overlap:
        found.append(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", _Value(flag=1)))
    if cluster is not None:
        found.append(_Attribute(_CLUSTER_DIMENSION, b"", _Value(cluster=_Dim3(*cluster))))
    return (_Attribute * len(found))(*found)


@functools.cache
def _library() -> Any:
    """The driver's library, which is loaded already where there is a GPU to launch on."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
        launch, clusters = library.cuLaunchKernelEx, library.cuOccupancyMaxActiveClusters
    except (OSError, AttributeError) as error:
        raise LaunchError(f"clusters, cooperative grids and tensor maps need a driver of CUDA 12: {error}") from error
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    clusters.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_void_p, ctypes.POINTER(_Config)]
    return library


@functools.cache
def _tensor_maps() -> Any:
    """The library, where it knows tensor maps."""
    library = _library()
    try:
        encode, replace = library.cuTensorMapEncodeTiled, library.cuTensorMapReplaceAddress
    except AttributeError as error:
        raise LaunchError(f"tensor maps need a driver of CUDA 12: {error}") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    encode.argtypes = [pointer, number, ctypes.c_uint, *[pointer] * 5, *[number] * 4]
    replace.argtypes = [pointer, pointer]
    return library


class DriverError(RuntimeError):
    """Error that the driver returned; `status` is its CUresult."""

    def __init__(self, status: int) -> None:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        _library().cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        _library().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        super().__init__(": ".join((part.value or b"?").decode() for part in (name, text)))
        self.status = status


def _check(status: int) -> None:
    if status:
        raise DriverError(status)
