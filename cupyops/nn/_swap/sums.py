"""A residual sum and the norm that reads it, in one operator: `x = x + self.attention(...)`, and then `self.norm(x)`.

The text of a block's forward says which norm reads a sum. In a copy of that forward the sum is a call of `added`, which
computes the norm as well and leaves that for the norm, which takes it if it gets that very sum, as it was.
So the text decides only where it is worth while: a sum is a sum whoever reads it, and a norm that is given something else
normalises it. The last sum of a block is for the first norm of the next one in a list of blocks.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from ..._dispatch.norm_lowered import HALF, of_autocast
from ..._util import torch_private
from ...ops._add_norm_lowered import add_norm_lowered
from ...ops._add_rms_norm import add_rms_norm
from . import activated, calls, sums_text
from .classes import MARK, Class, Recipe, derived, kind, recipe_of

# On an H100 a step of GPT-2 takes 0.951 of what it takes without, of which 0.025 are across blocks; of ViT 0.943.
NEXT = "_cupyops_next"  # of a block: the first norm of the next one, alone in a tuple, as it is no module inside
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)


# --- when it runs -----------------------------------------------------------------------------------------------------


class _Normed(NamedTuple):
    """What a norm makes of a sum: it waits for the norm to be called, and goes when the sum goes.

    Attributes:
        sum: a reference to the sum, which is not held: what is saved for the gradient of `y` may hold it already.
        of: what all was when it was computed: see `_state`.
        y: the result.
    """

    sum: weakref.ref[Tensor]
    of: tuple[Any, ...]
    y: Tensor


class _Waiting(threading.local):
    """Of a thread: what waits for each norm."""

    def __init__(self) -> None:
        self.of = weakref.WeakKeyDictionary[Module, _Normed]()


_waiting = _Waiting()


def _leave(norm: Module, summed: Tensor, y: Tensor) -> None:
    waiting = _waiting.of
    gone = functools.partial(_forget, waiting, weakref.ref(norm))
    waiting[norm] = _Normed(weakref.ref(summed, gone), _state(norm, summed), y)


def _forget(waiting: Any, norm: Any, summed: Any) -> None:
    """A sum is gone, perhaps in another thread than that in which it was made."""
    if (of := norm()) is not None and (left := waiting.get(of)) is not None and left.sum is summed:
        waiting.pop(of, None)


def added(norm: Any, a: Any, b: Any) -> Any:
    """a + b, with what `norm` makes of it, where one kernel computes both."""
    if is_dynamo_compiling() or type(a) is not Tensor or type(b) is not Tensor:
        return a + b
    if a.shape != b.shape or a.device != b.device or norm is None or norm._forward_pre_hooks:
        return a + b
    if torch.is_inference_mode_enabled():
        return a + b  # nothing would tell whether the sum has been changed since
    found = _of_one_type(norm, a, b) if a.dtype is b.dtype else _of_two_types(norm, a, b)
    if found is None:
        return a + b
    y, summed = found
    _leave(norm, summed, y)
    return summed


def _of_two_types(norm: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """What `norm` makes of the sum, and the sum, of float32 and what a product gave under autocast; None of others."""
    residual, x = (a, b) if a.dtype is torch.float32 else (b, a)
    if residual.dtype is not torch.float32 or x.dtype not in HALF or x.dtype is not of_autocast(x):
        return None
    if torch_private.functorch_active() or torch_private.forward_mode():
        return None
    lowering = getattr(norm, "_cupyops_lowering", None)
    if lowering is None or not _are_there(norm, residual) or (of := lowering(residual)) is None:
        return None
    return add_norm_lowered(residual, x, [*of.sizes], of.scale, of.shift, of.eps, of.centred)


def _of_one_type(norm: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same of a model that is all of one half type."""
    if a.dtype not in HALF or torch_private.functorch_active() or torch_private.forward_mode():
        return None
    rms = getattr(norm, "_cupyops_rms", None)
    if rms is None or torch.is_autocast_enabled(a.device.type) or not _are_there(norm, a) or (of := rms(a)) is None:
        return None
    return add_rms_norm(b, a, *of)


def after(block: Module) -> Module | None:
    """The norm that reads what a block returns, where one is known to.

    None while tensors that are saved go through hooks: by those checkpoints recompute a block without the one before it.
    """
    if is_dynamo_compiling() or torch_private.saved_tensors_hooks(True) is not None:
        return None
    found: tuple[Module | None, ...] = vars(block).get(NEXT, (None,))
    return found[0]


def _are_there(norm: Module, x: Tensor) -> bool:
    """Whether a norm's parameters are as they are when it is called: a block that follows may get them only then."""
    return all(
        type(p) is torch.nn.Parameter and p.device == x.device and not p.is_inference() and p.untyped_storage().size()
        for p in norm._parameters.values()
        if p is not None
    )


def taken(norm: Module, x: Any) -> Tensor | None:
    """What `added` left for a norm with its argument; None where there is nothing, or where something has changed since."""
    if is_dynamo_compiling() or type(x) is not Tensor:
        return None
    left = _waiting.of.get(norm)
    if left is None or left.sum() is not x:
        return None
    _waiting.of.pop(norm, None)
    return left.y if left.of == _state(norm, x) else None


def _state(norm: Module, x: Tensor) -> tuple[Any, ...]:
    """What has to be as it was: the sum, autocast, whether gradients are recorded and where what is saved for them goes, the
    stream, on another of which the result would have to be waited for, and the norm's parameters."""
    parameters = [p for p in norm._parameters.values() if p is not None]
    versions = [(id(p), p._version) for p in parameters]
    stream = torch_private.current_stream(x.device.index) if x.is_cuda else None
    hooks = torch_private.saved_tensors_hooks(True)
    return x._version, x.data_ptr(), of_autocast(x), torch.is_grad_enabled(), hooks, stream, *versions


# --- which sums -------------------------------------------------------------------------------------------------------


def fused(module: Module, ours: Class | str | None, candidates: set[Module]) -> tuple[Class, str] | None:
    """The class of a module in whose forward a norm reads a sum, or gelu a layer's results, and what that is in words; None
    of any other.

    Args:
        module: of any class.
        ours: what it is to have otherwise; None, or in words why it is to have none.
        candidates: norms whose results products alone read.
    """
    inside = {name: one for name, one in module._modules.items() if one in candidates}
    norms = tuple(sorted(name for name, one in inside.items() if hasattr(type(one), "_cupyops_lowering")))
    if isinstance(ours, str):
        return None
    recipe = None if ours is None else recipe_of(ours)
    if ours is not None and (recipe is None or recipe.kind != "calls"):
        return None
    pair, forward, found = activated.names(module), type(module).forward, []
    if norms and sums_text.with_sums(forward, norms) is not None:
        found.append("residual sums with norms")
    else:
        norms = ()
    if all(pair) and sums_text.with_sums(forward, (), *pair) is not None:
        found.append("gelu of a layer")
    else:
        pair = ((), ())
    if not found:
        return None
    values = (None if recipe is None else recipe.values, norms, *pair)
    what = f"{', '.join(found)} in its forward"
    if recipe is not None:
        what = f"{recipe.what.removesuffix(' in its forward')}, {what}"
    return derived(type(module), Recipe("sums", values, what, exact=False)), what


@kind
def sums(cls: Class, values: tuple[Any, ...]) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class whose forward has calls of `added` for sums and of `activated` for gelu of layers; `values`: those of `calls`,
    or None, and the names of norms, of activations and of layers."""
    of_calls, *names = values
    bases, methods = ((cls,), {}) if of_calls is None else calls.calls(cls, of_calls)
    forward = sums_text.with_sums(cls.forward, *names)
    if forward is None:  # its text is not there, as where a module is unpickled
        return bases, methods
    if of_calls is not None:
        forward = calls.rewritten(forward, of_calls[0], []) or forward
    return bases, {**methods, "forward": forward}


def link(modules: Iterable[Module]) -> list[tuple[Module, Module]]:
    """Of blocks that follow each other in a list: each, and the first norm of the next."""
    found = []
    for parent in modules:
        blocks = [*parent._modules.values()] if isinstance(parent, _LISTS) else []
        for block, follows in pairwise(blocks):
            recipe = recipe_of(type(follows))
            if recipe is None or recipe.kind != "sums" or type(block) is not type(follows) or block is follows:
                continue
            name = sums_text.first(getattr(type(follows), MARK)[0].forward, recipe.values[1])
            norm = None if name is None else follows._modules[name]
            if block is not None and norm is not None:
                found.append((block, norm))
    return found


sums_text.CALLED.update(added=added, after=after, activated=activated.activated)
