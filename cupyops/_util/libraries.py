"""The array libraries: NumPy, CuPy, and by DLPack any other. How their arrays become tensors, and tensors their arrays.

Nothing is copied that torch can name as it lies. NumPy and CuPy have bfloat16 and the float8 dtypes from ml_dtypes, which
their own ways to and from torch do not know: these cross as integers of their size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, MissingDependencyError

# what libraries raise for what they cannot export
_UNFIT = (TypeError, ValueError, RuntimeError, BufferError, AttributeError)


@dataclass(frozen=True)
class Kind:
    """An array library: how its arrays become tensors and tensors become its arrays."""

    name: str
    owns: Callable[[Any], bool]
    to_tensor: Callable[[Any], Tensor]
    from_tensor: Callable[[Tensor, Any], Any]  # the second argument is an array of the caller, for its namespace
    place: Callable[[Any], AbstractContextManager[Any]]  # that makes the device and the stream of an array current


# --- dtypes that NumPy has from ml_dtypes alone ---


def _bits(itemsize: int) -> str:
    """The name of an integer dtype of that size, in which other dtypes cross the border."""
    return f"int{8 * itemsize}"


def _twin(dtype: np.dtype) -> torch.dtype | None:
    """Return torch's dtype for one of ml_dtypes (bfloat16, float8_e4m3fn ...); None for NumPy's own."""
    twin = getattr(torch, dtype.name, None)
    known = dtype.type.__module__ == "ml_dtypes" and isinstance(twin, torch.dtype) and twin.is_floating_point
    return twin if known else None


def _is_extended(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype not in (torch.float16, torch.float32, torch.float64)


def _extended(dtype: torch.dtype) -> np.dtype:
    """The dtype of ml_dtypes for one that NumPy has not."""
    name = str(dtype).removeprefix("torch.")
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError) as error:
        what = f"a result of dtype {dtype} needs ml_dtypes to be a NumPy or CuPy array: {error}"
        raise MissingDependencyError(f"{what}\n  pip install --upgrade ml_dtypes") from error


# --- CuPy ---


def _is_cupy(value: Any) -> bool:
    module = sys.modules.get("cupy")
    return module is not None and isinstance(value, module.ndarray)


def _cupy_stream(like: Any) -> AbstractContextManager[Any]:
    """The array's device current, and PyTorch's stream there set to CuPy's."""
    index = like.device.id
    stream = sys.modules["cupy"].cuda.get_current_stream(index)
    return torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, device=torch.device("cuda", index)))


def _from_cupy(array: Any) -> Tensor:
    if any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch has no negative strides, and ends the process on them
    if (twin := _twin(array.dtype)) is not None:
        return torch.from_dlpack(array.view(_bits(array.itemsize))).view(twin)
    return torch.from_dlpack(array)


def _to_cupy(tensor: Tensor, like: Any) -> Any:
    cupy = sys.modules["cupy"]
    if tensor.is_cuda:
        # a pullback may run on another stream than the forward that allocated this
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    if _is_extended(tensor.dtype):
        return cupy.from_dlpack(tensor.view(getattr(torch, _bits(tensor.itemsize)))).view(_extended(tensor.dtype))
    return cupy.from_dlpack(tensor)


# --- NumPy ---


def _from_numpy(array: Any) -> Tensor:
    array = np.asarray(array)
    item = max(array.itemsize, 1)
    if not (array.flags.writeable and array.dtype.isnative) or any(s < 0 or s % item for s in array.strides):
        # torch has no read-only tensors, no negative or uneven strides and no foreign byte order
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    if (twin := _twin(array.dtype)) is not None:
        return torch.from_numpy(array.view(_bits(item))).view(twin)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise InputError(f"an array of dtype {array.dtype} cannot be a tensor: {error}; convert it first") from error


def _to_numpy(tensor: Tensor, like: Any) -> Any:
    if _is_extended(tensor.dtype):
        return tensor.view(getattr(torch, _bits(tensor.itemsize))).numpy().view(_extended(tensor.dtype))
    try:
        return tensor.numpy()
    except TypeError as error:
        raise InputError(
            f"a result of dtype {tensor.dtype} cannot be a NumPy array: {error}; call with tensors"
        ) from error


# --- JAX, and whoever else has DLPack ---


def _is_foreign(value: Any) -> bool:
    return hasattr(value, "__dlpack__") and not isinstance(value, Tensor)


def _not_a_tensor(value: Any, error: Exception) -> InputError:
    name = type(value).__name__
    hint = "; inside jax.jit, jax.grad or jax.vmap call it by jax.pure_callback" if name.endswith("Tracer") else ""
    return InputError(f"{name} cannot be a tensor: {error}{hint}; give a torch.Tensor")


def _dlpack_device(like: Any) -> AbstractContextManager[Any]:
    """Return a context in which the array's device is current: torch hands out tensors of no other."""
    try:
        device, index = like.__dlpack_device__()
    except _UNFIT as error:
        raise _not_a_tensor(like, error) from error
    return torch.cuda.device(index) if int(device) == torch.utils.dlpack.DLDeviceType.kDLCUDA else nullcontext()


def _from_dlpack(value: Any) -> Tensor:
    try:
        return torch.from_dlpack(value)
    except _UNFIT as error:
        raise _not_a_tensor(value, error) from error


def _to_namespace(tensor: Tensor, like: Any) -> Any:
    if not hasattr(like, "__array_namespace__"):
        raise InputError(
            f"{type(like).__name__} offers __dlpack__ but no __array_namespace__, so a result cannot be handed back as "
            "one; convert with torch.from_dlpack first"
        )
    library = like.__array_namespace__()
    try:
        return library.from_dlpack(tensor)
    except _UNFIT as error:
        if tensor.is_contiguous():
            raise InputError(
                f"a result of {tensor.dtype} cannot be of {library.__name__}: {error}; call with tensors"
            ) from error
        return library.from_dlpack(tensor.contiguous())  # JAX has no strides


_KINDS = (
    Kind("numpy", lambda value: isinstance(value, (np.ndarray, np.generic)), _from_numpy, _to_numpy, nullcontext),
    Kind("cupy", _is_cupy, _from_cupy, _to_cupy, _cupy_stream),
    Kind("dlpack", _is_foreign, _from_dlpack, _to_namespace, _dlpack_device),
)


def kind_of(value: Any) -> Kind | None:
    """The library of an array, or None for tensors and everything else."""
    return next((kind for kind in _KINDS if kind.owns(value)), None)


def is_array(value: Any) -> bool:
    """Return True for an array of one of the libraries; a NumPy scalar is a number."""
    return not isinstance(value, np.generic) and kind_of(value) is not None


def describe(array: Any) -> str:
    """Describe an array for messages, without its contents."""
    known = [f"of shape {tuple(array.shape)}"] if hasattr(array, "shape") else []
    known += [str(array.dtype)] if hasattr(array, "dtype") else []
    return " ".join(["an array", ", ".join(known), f"({type(array).__name__})"])
