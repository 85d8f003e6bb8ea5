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

from ..._kernel.kernel import FLOATING
from ..._kernel.launch.versions import this_thread
from ..._util import tracing
from ..._util.strides import restride
from ...errors import CupyopsError
from .backward import Backward
from .definition import Definition

functorch_active = torch._C._are_functorch_transforms_active
is_jit_tracing = torch._C._is_tracing  # by torch.jit.trace and torch.onnx.export(dynamo=False)
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # of retain_graph; True outside of a backward
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor

_KNOWN = {
    "Tensor": Tensor,
    "Parameter": Parameter,
    "FLOATING": frozenset(FLOATING),
    "CupyopsError": CupyopsError,
    "tracing": tracing,
    "this_thread": this_thread,
    "forward_ad": forward_ad,
    "is_dynamo_compiling": is_dynamo_compiling,
    "functorch_active": functorch_active,
    "is_jit_tracing": is_jit_tracing,
    "keeps_graph": keeps_graph,
    "is_legacy_batched": is_legacy_batched,
    "restride": restride,
    "dispatch_modes": torch._C._len_torch_dispatch_stack,
    "is_grad_enabled": torch.is_grad_enabled,
    "is_autocast_enabled": torch.is_autocast_enabled,
}


def call(op: Definition, autocasts: bool, differentiable: Callable[..., Any]) -> Callable[..., Any]:
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
    elsewhere.append("launch is None")
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
    if functorch_active() or dispatch_modes() or forward_ad._current_level >= 0:
        return self._otherwise(args)
    if tracing.active is not None or is_jit_tracing():
        return self._otherwise(args)
    {named} = args
    launch = op.launch_forward
    if {" or ".join(elsewhere)}:
        return self._otherwise(args)
    if ({" or ".join(wanted)}) and is_grad_enabled():
        return differentiable({named})
    outer, this_thread.in_role = this_thread.in_role, True
    try:
        return launch({named})[0]
    except CupyopsError as error:
        op.add_note(error, "forward")
        raise
    finally:
        this_thread.in_role = outer
"""
    return _function("__call__", source, op, differentiable=differentiable)


def forward(op: Definition) -> Callable[..., Any]:
    """The forward of an autograd.Function, of an operator with one output that changes nothing in place."""
    kept = op.kept_by_kernels
    saved = "".join([f"a{i}, " for i in kept.inputs] + ["y, " for _ in kept.outputs])
    values = ", ".join("None" if i in op.tensors else f"a{i}" for i in range(op.arity))
    asked = f"needs_grad={_needs(op)}" if op.forward_asks else ""
    source = f"""
def forward(ctx, {_names(op)}):
    launch = op.launch_forward  # which a call may change
    outer, this_thread.in_role = this_thread.in_role, True
    try:
        y, saved = launch({_names(op)}{asked})
    except CupyopsError as error:
        op.add_note(error, "forward")
        raise
    finally:
        this_thread.in_role = outer
    {f"ctx.values = [{values}]" if len(op.tensors) < op.arity else ""}
    {"if saved: " if _keeps_output(op) else ""}ctx.strides = (y.stride(),)
    ctx.to_save = ({saved}*saved,)  # as save_for_backward does
    return y
"""
    return _function("forward", source, op)


def backward(op: Definition, role: Backward, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd.Function by kernels; a call that asks for more goes to `otherwise(ctx, *grads)`."""
    kept, most = op.kept_by_kernels, len(op.tensors)
    tensors = [("input", index) for index in kept.inputs] + [("output", index) for index in kept.outputs]
    places = {one: f"tensors[{place}]" for place, one in enumerate(tensors)}
    places |= {("needs", 0): _needs(op), ("last", 0): "not keeps_graph()"}
    extra = ", ".join(places.get(one, f"ctx.values[{one[1]}]") for one in role.wants)
    names = [f"g{index}" for index in range(op.outputs)]
    grads = ", ".join(names)
    batched = " or ".join(f"{name} is not None and is_legacy_batched({name})" for name in names)
    watched = "op.launch_backward is not role"  # as a check of the operator puts another in its place
    strides = "ctx.strides" + (f" or ({places[tensors[-1]]}.stride(),)" if _keeps_output(op) else "")
    laid_out = "".join(
        f"""
    if {name} is not None and ({name}.stride() != strides[{index}] or {name}.is_neg()):
        {name} = restride({name}, strides[{index}])"""
        for index, name in enumerate(names)
    )
    rest = ", None" * (op.arity - most)
    usual = f"""
    if found.__class__ is tuple and len(found) == {most}:
        return {f"(*found{rest})" if rest else "found"}
    if found.__class__ is Tensor and {most} == 1:
        return (found,{rest[1:]})"""
    source = f"""
def backward(ctx, {grads}):
    if is_grad_enabled() or functorch_active() or tracing.active is not None or {batched} or {watched}:
        return otherwise(ctx, {grads})
    tensors = ctx.saved_tensors
    strides = {strides}{laid_out}
    outer, this_thread.in_role = this_thread.in_role, True
    try:
        found = launch(tensors[{len(tensors)}:], {grads}, {extra})
    except CupyopsError as error:
        op.add_note(error, "backward")
        raise
    finally:
        this_thread.in_role = outer{usual if op.tensors == tuple(range(most)) else ""}
    return tuple(placed(found, ctx.needs_input_grad))
"""
    return _function("backward", source, op, role=role, launch=role.launch, placed=role.placed, otherwise=otherwise)


def _needs(op: Definition) -> str:
    """needs_grad of a call that is recorded: where there is one tensor, it is the one that wants a gradient."""
    return "needs_of_one" if len(op.tensors) == 1 else "op.named(ctx.needs_input_grad)"


def _keeps_output(op: Definition) -> bool:
    """Whether backward can see how the one output was laid out: as it is then, after hooks that may have copied it, which
    suits what is kept beside it but not what forward `saved`."""
    return op.outputs == 1 and not op.mutated and op.kept_by_kernels.outputs == (0,)


def _names(op: Definition) -> str:
    return "".join(f"a{index}, " for index in range(op.arity))


def _not_plain(index: int) -> str:
    return f"type(a{index}) is not Tensor and type(a{index}) is not Parameter"


def _function(name: str, source: str, op: Definition, **known: Any) -> Callable[..., Any]:
    needs_of_one = op.named(tuple(index in op.tensors for index in range(op.arity)))
    found: dict[str, Any] = {**_KNOWN, "op": op, "needs_of_one": needs_of_one, **known}
    exec(compile(source, f"<{name} of {op.name}>", "exec"), found)
    function: Callable[..., Any] = found[name]
    return function
