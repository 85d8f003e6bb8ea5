"""The eager route with a gradient: one autograd.Function around forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tracing
from ..errors import CupyopsError, InputError
from . import results, written
from .definition import Definition, like_outputs

_functorch_active = torch._C._are_functorch_transforms_active
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # of retain_graph; True outside of a backward
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def differentiable(op: Definition) -> Callable[..., Any]:
    """The operator as a function with a gradient, for plain tensors that the kernels serve.

    `forward(ctx, ...)` is merged, since a `setup_context` of its own costs 8 us a call.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        outputs, saved = op.run_forward(args, ctx.needs_input_grad)
        kept = op.kept_by_kernels
        ctx.call = kept.values(args), [y.stride() for y in outputs]
        ctx.save_for_backward(*kept.pack(args, outputs, saved))
        ctx.mark_non_differentiable(*[y for y in outputs if not y.dtype.is_floating_point])
        return outputs

    def forward_in_place(ctx: Any, *args: Any) -> Any:
        ctx.mark_dirty(*op.changed(args))
        return forward(ctx, *args)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        values, strides = ctx.call
        needs = ctx.needs_input_grad
        last = op.backward_asks and not _keeps_graph()
        plain = not (torch.is_grad_enabled() or _batched(grads))
        if plain and tracing.active is None and (direct := getattr(op.launch_backward, "direct", None)) is not None:
            try:
                return direct(like_outputs(grads, strides), ctx.saved_tensors, values, needs, last)
            except CupyopsError as error:
                op.add_note(error, "backward")
                raise
        args, outputs, saved = op.kept_by_kernels.unpack(values, ctx.saved_tensors)
        if not plain:
            return tuple(op.differentiable_backward(grads, outputs, saved, args, needs))
        with tracing.operator(f"{op.name} (backward)", "reference" if op.launch_backward is None else "kernel"):
            return tuple(op.run_backward(like_outputs(grads, strides), outputs, saved, args, needs, last))

    def backward_looked_at(ctx: Any, *grads: Tensor) -> Any:
        # until the kernels have given gradients as they should be: from then on it is `backward` alone
        found = backward(ctx, *grads)
        if not (torch.is_grad_enabled() or _batched(grads)):
            results.check_gradients(op.name, [one.name for one in op.parameters], ctx, found)
            # what autograd calls; PyTorch's own looks for a vjp first, for half a microsecond
            function._backward_cls.apply = backward  # type: ignore[attr-defined]
        return found

    name = "".join(part.capitalize() for part in op.name.partition("::")[2].split("_"))
    chosen = forward_in_place if op.mutated else written.forward(op) if op.outputs == 1 else forward
    functions = {"forward": staticmethod(chosen), "backward": staticmethod(backward_looked_at)}
    function = type(name, (torch.autograd.Function,), functions)
    # Function.apply of Python only looks for functorch, as the router has done already: the C method saves 1 us
    apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return _in_place(op, apply) if op.mutated else apply


def _in_place(op: Definition, apply: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` for what works in place, refused where PyTorch refuses it, and before anything is changed.

    The history of a view is that of its base: it is changed by PyTorch's own copy, from a copy that the kernels change.
    """

    def call(*args: Any) -> Any:
        if op.launch_backward is None:
            return op.call_reference(args)
        values = list(args)
        for name, index in zip(op.mutates, op.mutated):
            tensor = args[index]
            if tensor.requires_grad and tensor.is_leaf:
                raise InputError(
                    f"{op.name}: {name} is a leaf that requires a gradient, whose value cannot be changed in place; "
                    "give a copy of it, or call inside torch.no_grad()"
                )
            if tensor._is_view():
                values[index] = tensor.clone()
        apply(*values)
        for tensor, value in zip(op.changed(args), op.changed(values)):
            if value is not tensor:
                tensor.copy_(value)
        return op.returned(op.changed(args))

    return call


def _batched(grads: Sequence[Tensor | None]) -> bool:
    """Whether a vmap over backward alone is under way, for which no kernel is made: is_grads_batched=True, or torch.vmap."""
    for grad in grads:
        if grad is not None and _is_legacy_batched(grad):
            return True
    return bool(_functorch_active())
