"""CuPy, NumPy and any other DLPack arrays in, the same kind out, with no copy.

A call is converted by the kind of its first array. On a GPU the operator then runs on that library's current stream: a
CuPy user's stream, if the arrays are CuPy's.
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
from torch.utils._pytree import tree_map

from .errors import InputError


@dataclass(frozen=True)
class Kind:
    """An array library: how its arrays become tensors and tensors become its arrays."""

    name: str
    owns: Callable[[Any], bool]
    to_tensor: Callable[[Any], Tensor]
    from_tensor: Callable[[Tensor, Any], Any]  # the second argument is an array of the caller, for its namespace
    stream: Callable[[], AbstractContextManager[Any]] = nullcontext


def _is_cupy(value: Any) -> bool:
    module = sys.modules.get("cupy")
    return module is not None and isinstance(value, module.ndarray)


def _cupy_stream() -> AbstractContextManager[Any]:
    """PyTorch's current stream set to CuPy's."""
    cupy = sys.modules["cupy"]
    device = torch.device("cuda", cupy.cuda.runtime.getDevice())
    return torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr, device=device))


def _from_cupy(array: Any) -> Tensor:
    if any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch has no negative strides, and ends the process on them
    return torch.from_dlpack(array)


def _from_numpy(array: Any) -> Tensor:
    array = np.asarray(array)
    item = max(array.itemsize, 1)
    if not (array.flags.writeable and array.dtype.isnative) or any(s < 0 or s % item for s in array.strides):
        # torch has no read-only tensors, no negative or uneven strides and no foreign byte order
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise InputError(f"an array of dtype {array.dtype} cannot be a tensor: {error}") from error


def _to_numpy(tensor: Tensor, like: Any) -> Any:
    try:
        return tensor.resolve_conj().resolve_neg().numpy()
    except TypeError as error:
        raise InputError(f"a result of dtype {tensor.dtype} cannot be a NumPy array: {error}") from error


def _dlpack_namespace(tensor: Tensor, like: Any) -> Any:
    if not hasattr(like, "__array_namespace__"):
        raise InputError(
            f"{type(like).__name__} offers __dlpack__ but no __array_namespace__, so a result cannot be handed back as "
            "one; convert with torch.from_dlpack first"
        )
    return like.__array_namespace__().from_dlpack(tensor)


_KINDS = (
    Kind("numpy", lambda v: isinstance(v, (np.ndarray, np.generic)), _from_numpy, _to_numpy),
    Kind(
        "cupy",
        _is_cupy,
        _from_cupy,
        lambda t, _: sys.modules["cupy"].from_dlpack(t),
        _cupy_stream,
    ),
    Kind(
        "dlpack",
        lambda v: hasattr(v, "__dlpack__") and not isinstance(v, Tensor),
        torch.from_dlpack,
        _dlpack_namespace,
    ),
)


def kind_of(value: Any) -> Kind | None:
    """The library of an array, or None for tensors and everything else."""
    return next((kind for kind in _KINDS if kind.owns(value)), None)


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`function(*args, **kwargs)`, with arrays as tensors on the way in and as arrays on the way out."""
    if "axis" in kwargs:
        if "dim" in kwargs:
            raise InputError("axis and dim mean the same; give one of them")
        kwargs = {("dim" if name == "axis" else name): value for name, value in kwargs.items()}
    kind, like = _kind_of_call(args, kwargs)
    if kind is None and args and isinstance(args[0], np.generic):
        args = (np.asarray(args[0]), *args[1:])  # what NumPy makes of an array without dimensions
        kind, like = _kind_of_call(args, kwargs)
    if kind is None:
        return function(*args, **kwargs)

    def convert(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        return kind.to_tensor(value) if kind.owns(value) else value

    with kind.stream():
        args, kwargs = tree_map(convert, (args, kwargs))
        return to_arrays(function(*args, **kwargs), kind, like)


def to_arrays(result: Any, kind: Kind, like: Any) -> Any:
    """Each tensor of `result` as an array of `kind`."""
    return tree_map(lambda v: kind.from_tensor(v.detach(), like) if isinstance(v, Tensor) else v, result)


def _kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind | None, Any]:
    """The one kind of array in a call, and one of its arrays. Two kinds, or arrays beside tensors, are refused."""
    found: dict[str, tuple[Kind, Any]] = {}
    tensors = False
    for value in (*args, *kwargs.values()):
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            kind = kind_of(leaf)
            # a NumPy scalar is a number, welcome beside any array
            if kind is not None and not isinstance(leaf, np.generic):
                found[kind.name] = (kind, leaf)
            tensors = tensors or isinstance(leaf, Tensor)
    if len(found) + tensors > 1:
        kinds = ", ".join([*found, *(["torch"] if tensors else [])])
        raise InputError(f"arguments of different array libraries ({kinds}) in one call; convert them to one")
    return next(iter(found.values())) if found else (None, None)


def vjp(function: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """The value of `function` and its pullback, for CuPy and NumPy arrays (and for tensors).

    Args:
        function: of arrays to one array or a tuple of arrays; the operators of cupyops are such functions.
        *primals: the arrays at which to evaluate; gradients flow to those of a floating-point dtype.

    Returns:
        `(y, pullback)`. `pullback(grad_y)` gives a tuple with the gradient for each primal (None for an integer one), of
        the primals' kind; it can be called more than once. It takes a gradient for each output, None for one that has
        none. Arrays are not copied: until the last call leave the primals and `y` as they are.

    Example:
        >>> x = np.linspace(-1.0, 1.0, 5)
        >>> y, pullback = cupyops.vjp(cupyops.relu, x)
        >>> (grad_x,) = pullback(np.ones_like(y))
    """
    primals = tuple(np.asarray(primal) if isinstance(primal, np.generic) else primal for primal in primals)
    kind, like = _kind_of_call(primals, {})
    stream = kind.stream if kind is not None else nullcontext

    def tensor(value: Any) -> Any:
        return kind.to_tensor(value) if kind is not None and kind.owns(value) else value

    def result(value: Any) -> Any:
        return to_arrays(value, kind, like) if kind is not None else value

    with stream(), torch.enable_grad():
        inputs = [_leaf(tensor(primal)) for primal in primals]
        outputs = function(*inputs)
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]

    listed = outputs if isinstance(outputs, (tuple, list)) else (outputs,)

    def pullback(*grads: Any) -> tuple[Any, ...]:
        if len(grads) != len(listed):
            raise InputError(f"pullback got {len(grads)} gradients for {len(listed)} outputs")
        with stream():
            pairs = [(y, _like(y, tensor(g))) for y, g in zip(listed, grads) if g is not None and y.requires_grad]
            if pairs:
                ys, grad_ys = zip(*pairs)
                found = torch.autograd.grad(ys, wanted, grad_ys, retain_graph=True, materialize_grads=True)
            else:
                found = tuple(torch.zeros_like(value) for value in wanted)
            gradients = iter(found)
            return tuple(result(next(gradients)) if any(v is w for w in wanted) else None for v in inputs)

    return result(outputs), pullback


def _like(y: Tensor, grad: Any) -> Tensor:
    """A gradient for `y`: a number, or a tensor of its shape."""
    grad = torch.as_tensor(grad, dtype=y.dtype, device=y.device)
    if grad.shape != y.shape:
        raise InputError(f"a gradient of shape {tuple(grad.shape)} for an output of shape {tuple(y.shape)}")
    return grad


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return value.detach().requires_grad_()
    return value
