"""Stand-ins for tensors that a forward by kernels would have saved, where the reference runs and a graph expects them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._util import symbolic
from .constants import NoConstant, freeze
from .definition import Definition

_MOST = 1024  # signatures that are remembered
_known: OrderedDict[Any, list[tuple[Any, ...]]] = OrderedDict()


def unsaved(of: Definition, args: Sequence[Any]) -> list[Tensor]:
    """Return tensors filled with NaN in place of those that the kernels save, for sizes that they refuse.

    A graph with symbolic sizes is made for kernels and may be called with such sizes. Its backward looks at the sizes again.
    """
    if of.refusal is None or of.launch_forward is None or of.why_not(args) != of.refused(args):
        return []
    if of.why_not_dtypes(args) is not None:  # of no sizes are there kernels for these
        return []
    if symbolic.is_symbolic(args):  # which are no key
        found = _would_save(of, args)
    else:
        tensors = tuple((t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else None for t in args)
        try:
            key = of.name, id(of.forward), tensors, tuple(freeze(one) for one in args if not isinstance(one, Tensor))
        except NoConstant:
            return []
        if key not in _known:
            _known[key] = _would_save(of, args)
            while len(_known) > _MOST:
                _known.popitem(last=False)
        found = _known[key]
    return [_filled(*one) for one in found]


def _would_save(of: Definition, args: Sequence[Any]) -> list[tuple[Any, ...]]:
    try:
        _, saved = of.run_forward(symbolic.examples(args))
    except Exception:  # it relies on having been refused
        return []
    return [(one.shape, one.stride(), one.dtype, one.device) for one in saved]


def unknown(like: Tensor) -> Tensor:
    """A tensor like another, of values that nobody takes for right ones."""
    return torch.full(like.shape, _wrong(like.dtype), dtype=like.dtype, device=like.device)


def _filled(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(_wrong(dtype))


def _wrong(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else 0 if dtype is torch.bool else torch.iinfo(dtype).min
