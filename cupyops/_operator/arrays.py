"""CuPy, NumPy and any other DLPack arrays in, the same kind out, with no copy.

A call has arrays of one kind. On a GPU it runs on the arrays' device and on that library's current stream there: a CuPy
user's stream, if the arrays are CuPy's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._util.libraries import Kind, kind_of
from .._util.torch_private import tree_map
from ..errors import InputError


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

    if kwargs.get("inplace") or any(value is True for value in args):
        bound = inspect.signature(function).bind(*args, **kwargs)
        if bound.arguments.get("inplace"):
            # not in a tensor, which may be a copy, or memory that its library takes to be immutable
            bound.arguments["inplace"] = False
            return overwrite(next(iter(bound.arguments.values())), call(function, bound.args, bound.kwargs))

    def convert(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        return kind.to_tensor(value) if kind.owns(value) else value

    with kind.place(like):
        args, kwargs = tree_map(convert, (args, kwargs))
        return to_arrays(function(*args, **kwargs), kind, like)


def to_arrays(result: Any, kind: Kind, like: Any) -> Any:
    """Each tensor of `result` as an array of `kind`."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        plain = value.detach().resolve_conj().resolve_neg()  # of these bits other libraries know nothing
        return kind.from_tensor(plain, like)

    return tree_map(convert, result)


def overwrite(target: Any, result: Any) -> Any:
    """`target` with `result` written into it: what `inplace=True` means. Raises `InputError` where it is immutable."""
    try:
        target[...] = result
    except (TypeError, ValueError) as error:
        name = type(target).__name__
        raise InputError(f"inplace=True, but this {name} cannot be written to: {error}; give a copy of it") from error
    return target


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
    """The value of `function` and its pullback, for arrays of CuPy, NumPy, JAX and others with DLPack (and for tensors).

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

    def place() -> AbstractContextManager[Any]:
        return kind.place(like) if kind is not None else nullcontext()

    def tensor(value: Any) -> Any:
        return kind.to_tensor(value) if kind is not None and kind.owns(value) else value

    def result(value: Any) -> Any:
        return to_arrays(value, kind, like) if kind is not None else value

    with place():
        inputs = [_leaf(tensor(primal)) for primal in primals]
        with torch.enable_grad():
            try:
                outputs = function(*inputs)
            except RuntimeError as error:
                if "call numpy() on Tensor" not in str(error):
                    raise
                raise InputError(
                    "inside cupyops.vjp arrays are tensors: call PyTorch's functions, and pass other arrays as arguments"
                ) from error
        values = result(outputs)
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]

    listed = outputs if isinstance(outputs, (tuple, list)) else (outputs,)

    def pullback(*grads: Any) -> tuple[Any, ...]:
        if len(grads) != len(listed):
            raise InputError(
                f"pullback got {len(grads)} gradients for {len(listed)} outputs; give one for each, or None"
            )
        with place():
            pairs = [(y, _like(y, tensor(g))) for y, g in zip(listed, grads) if g is not None and y.requires_grad]
            if pairs:
                ys, grad_ys = zip(*pairs)
                found = torch.autograd.grad(ys, wanted, grad_ys, retain_graph=True, materialize_grads=True)
            else:
                found = tuple(torch.zeros_like(value) for value in wanted)
            gradients = iter(found)
            return tuple(result(next(gradients)) if any(v is w for w in wanted) else None for v in inputs)

    return values, pullback


def _like(y: Tensor, grad: Any) -> Tensor:
    """A gradient for `y`: a number, or a tensor of its shape."""
    grad = torch.as_tensor(grad, dtype=y.dtype, device=y.device)
    if grad.shape != y.shape:
        raise InputError(
            f"a gradient of shape {tuple(grad.shape)} for an output of shape {tuple(y.shape)}; expected one shape"
        )
    return grad


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex):
        return value.detach().requires_grad_()
    return value
