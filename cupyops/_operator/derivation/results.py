"""Checks of what the roles return, made once: mistakes are reported by the operator's name, and later calls pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError


def check_form(name: str, outputs: int, in_place: bool, found: Any) -> None:
    """A forward has returned `(y, saved)`, with a tuple of tensors as `saved`; one that works in place may return None."""
    if found is None and in_place:
        return
    y = "y" if outputs == 1 else f"({', '.join(f'y{index}' for index in range(outputs))})"
    pair = isinstance(found, (tuple, list)) and len(found) == 2
    if not (pair and (in_place or _is_output(found[0], outputs))):
        expected = f"({y}, saved){' or None' if in_place else ''}"
        raise InputError(f"{name}: forward returned {_kind(found)}, expected {expected}: return {y}, ()")
    saved = found[1]
    if not (isinstance(saved, (tuple, list)) and all(isinstance(one, Tensor) for one in saved)):
        remedy = f": return {y}, (saved,)" if isinstance(saved, Tensor) else ""
        raise InputError(f"{name}: forward saved {_kind(saved)}, expected a tuple of tensors{remedy}")


def check_outputs(name: str, reference: Callable[..., Any], args: Sequence[Any], found: Any) -> None:
    """Outputs have the shapes and dtypes of the reference's, where it tells them without values."""
    outputs = (found,) if isinstance(found, Tensor) else found
    for index, (y, like) in enumerate(zip(outputs, _described(reference, args))):
        if (y.shape, y.dtype) != (like.shape, like.dtype):
            which = "y" if len(outputs) == 1 else f"y{index}"
            raise InputError(
                f"{name}: forward returned {which} of shape {tuple(y.shape)}, {y.dtype}; the reference returns shape "
                f"{tuple(like.shape)}, {like.dtype}: return the same"
            )


def check_fresh(name: str, args: Sequence[tuple[str, Any]], found: Any) -> None:
    """No output is an argument, nor shares its memory: torch.compile, and autograd, go by that."""
    given = [(parameter, value) for parameter, value in args if isinstance(value, Tensor) and value.numel()]
    for y in (found,) if isinstance(found, Tensor) else found:
        for parameter, value in given:
            if y.untyped_storage()._cdata == value.untyped_storage()._cdata:
                what = f"its argument {parameter}" if y is value else f"a view of its argument {parameter}"
                raise InputError(
                    f"{name}: forward returned {what}; return memory of its own: torch.empty_like({parameter}), "
                    f"which a kernel fills, or {parameter}.clone(). What works in place says so, by mutates=({parameter!r},)"
                )


def check_gradients(name: str, names: Sequence[str], edges: Sequence[Any], found: Sequence[Any]) -> None:
    """Gradients have the shapes and dtypes of the inputs of an autograd node, whose edges lead where each belongs."""
    for parameter, (node, index), gradient in zip(names, edges, found):
        if gradient is None or node is None:
            continue
        like = node._input_metadata[index]
        if not isinstance(gradient, Tensor):
            raise InputError(f"{name}: backward returned {_kind(gradient)} for {parameter}, expected its gradient")
        if (gradient.shape, gradient.dtype) != (torch.Size(like.shape), like.dtype):
            raise InputError(
                f"{name}: backward returned a gradient of shape {tuple(gradient.shape)}, {gradient.dtype} for {parameter}, "
                f"which is of shape {tuple(like.shape)}, {like.dtype}: return the same"
            )


def _described(reference: Callable[..., Any], args: Sequence[Any]) -> Sequence[Tensor]:
    """The outputs of the reference without their values; none where it needs values to tell."""
    try:
        # what it draws on the CPU must not be missing there afterwards
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            found = reference(*[value.detach().to("meta") if isinstance(value, Tensor) else value for value in args])
    except Exception:
        return ()
    outputs = (found,) if isinstance(found, Tensor) else found
    return outputs if isinstance(outputs, tuple) and all(isinstance(one, Tensor) for one in outputs) else ()


def _is_output(value: Any, count: int) -> bool:
    if count == 1:
        return isinstance(value, Tensor)
    return isinstance(value, (tuple, list)) and len(value) == count and all(isinstance(one, Tensor) for one in value)


def _kind(value: Any) -> str:
    """A value by its kind alone."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_kind, value))}{',' * (len(value) == 1)})"
    return "None" if value is None else "a tensor" if isinstance(value, Tensor) else f"{type(value).__name__}"
