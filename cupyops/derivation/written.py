"""What every small call waits for, written out for one operator: no loop over its tensors, no look at roles that it lacks.

Where the host is the limit, each tenth of a microsecond counts here, and in the launch (launching/fastpath.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .. import tracing
from ..errors import CupyopsError
from ..kernel import FLOATING
from .definition import Definition

_KNOWN = {
    "Tensor": Tensor,
    "Parameter": Parameter,
    "FLOATING": frozenset(FLOATING),
    "CupyopsError": CupyopsError,
    "tracing": tracing,
    "forward_ad": forward_ad,
    "is_dynamo_compiling": is_dynamo_compiling,
    "functorch_active": torch._C._are_functorch_transforms_active,
    "dispatch_modes": torch._C._len_torch_dispatch_stack,
    "is_grad_enabled": torch.is_grad_enabled,
    "is_autocast_enabled": torch.is_autocast_enabled,
}


def call(op: Definition, autocasts: bool) -> Callable[..., Any]:
    """`Operator.__call__`: plain CUDA tensors go straight on, all else to `self._otherwise(args)`."""
    first, *others = op.tensors
    named = _names(op)
    elsewhere = [_not_plain(first), f"not a{first}.is_cuda", f"a{first}.dtype not in FLOATING", f"a{first}.is_neg()"]
    for index in others:
        found = [_not_plain(index), f"a{index}.get_device() != a{first}.get_device()", f"a{index}.is_neg()"]
        if index not in op.mixed:
            of_another = f"a{index}.is_floating_point() or a{index}.is_complex()"
            found.append(f"a{index}.dtype is not a{first}.dtype and ({of_another})")
        absent = "" if index in op.required else f"a{index} is not None and "
        elsewhere.append(f"{absent}({' or '.join(found)})")
    elsewhere.append("op.launch_forward is None")
    if op.refusal is not None:
        elsewhere.append(f"op.refusal({named}) is not None")
    if autocasts:
        elsewhere.append("is_autocast_enabled('cuda')")
    wanted = [
        f"a{i}.requires_grad" if i in op.required else f"a{i} is not None and a{i}.requires_grad" for i in op.tensors
    ]
    source = f"""
def __call__(self, *args, **kwargs):
    if is_dynamo_compiling():
        return self._compiling(self.definition.bind(args, kwargs))
    if kwargs or len(args) != {op.arity}:
        args = op.bind(args, kwargs)
    if functorch_active() or dispatch_modes() or forward_ad._current_level >= 0 or tracing.active is not None:
        return self._otherwise(args)
    {named} = args
    if {" or ".join(elsewhere)}:
        return self._otherwise(args)
    if ({" or ".join(wanted)}) and is_grad_enabled():
        return self._differentiable({named})
    try:
        return op.launch_forward({named})[0]
    except CupyopsError as error:
        op.add_note(error, "forward")
        raise
"""
    return _function("__call__", source, op)


def forward(op: Definition) -> Callable[..., Any]:
    """The forward of an autograd.Function, of an operator with one output that changes nothing in place."""
    kept = op.kept_by_kernels
    saved = "".join([f"a{i}, " for i in kept.inputs] + ["y, " for _ in kept.outputs])
    values = ", ".join("None" if i in op.tensors else f"a{i}" for i in range(op.arity))
    needs = "needs_grad=op.named(ctx.needs_input_grad)" if op.forward_asks else ""
    source = f"""
def forward(ctx, {_names(op)}):
    try:
        y, saved = op.launch_forward({_names(op)}{needs})
    except CupyopsError as error:
        op.add_note(error, "forward")
        raise
    ctx.call = [{values}], (y.stride(),)
    ctx.save_for_backward({saved}*saved)
    return y
"""
    return _function("forward", source, op)


def _names(op: Definition) -> str:
    return "".join(f"a{index}, " for index in range(op.arity))


def _not_plain(index: int) -> str:
    return f"type(a{index}) is not Tensor and type(a{index}) is not Parameter"


def _function(name: str, source: str, op: Definition) -> Callable[..., Any]:
    found: dict[str, Any] = {**_KNOWN, "op": op}
    exec(compile(source, f"<{name} of {op.name}>", "exec"), found)
    function: Callable[..., Any] = found[name]
    return function
