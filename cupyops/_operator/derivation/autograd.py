"""The eager route with a gradient: one autograd.Function around forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._util import tracing
from ...errors import InputError
from . import results, written
from .definition import Definition, like_outputs
from .written import functorch_active, is_legacy_batched, keeps_graph


def differentiable(op: Definition) -> Callable[..., Any]:
    """The operator as a function with a gradient, for plain tensors that the kernels serve.

    `forward(ctx, ...)` is merged, since a `setup_context` of its own costs 8 us a call.
    """
    kept = op.kept_by_kernels

    def forward(ctx: Any, *args: Any) -> Any:
        outputs, saved = op.run_forward(args, ctx.needs_input_grad)
        ctx.values, ctx.strides = kept.values(args), [y.stride() for y in outputs]
        ctx.save_for_backward(*kept.pack(args, outputs, saved))
        ctx.mark_non_differentiable(*[y for y in outputs if not y.dtype.is_floating_point])
        return outputs

    def forward_in_place(ctx: Any, *args: Any) -> Any:
        ctx.mark_dirty(*op.changed(args))
        return forward(ctx, *args)

    def otherwise(ctx: Any, *grads: Tensor) -> Any:
        needs = ctx.needs_input_grad
        args, outputs, saved = kept.unpack(ctx.values, ctx.saved_tensors)
        if torch.is_grad_enabled() or _batched(grads):
            return tuple(op.differentiable_backward(grads, outputs, saved, args, needs))
        laid_out = like_outputs(grads, ctx.strides or [y.stride() for y in outputs])
        last = op.backward_asks and not keeps_graph()
        with tracing.operator(f"{op.name} (backward)", "reference" if op.launch_backward is None else "kernel"):
            return tuple(op.run_backward(laid_out, outputs, saved, args, needs, last))

    backward = otherwise if op.launch_backward is None else written.backward(op, op.launch_backward, otherwise)

    def backward_looked_at(ctx: Any, *grads: Tensor) -> Any:
        # until the kernels have given gradients as they should be: from then on it is `backward` alone
        found = backward(ctx, *grads)
        if not (torch.is_grad_enabled() or _batched(grads)):
            results.check_gradients(op.name, [one.name for one in op.parameters], ctx, found)
            # what autograd calls; PyTorch's own looks for a vjp first, for half a microsecond
            node.apply = backward
        return found

    name = "".join(part.capitalize() for part in op.name.partition("::")[2].split("_"))
    chosen = forward_in_place if op.mutated else written.forward(op) if op.outputs == 1 else forward
    functions = {"forward": staticmethod(chosen), "backward": staticmethod(backward_looked_at)}
    function = type(name, (torch.autograd.Function,), functions)
    node: Any = function._backward_cls  # type: ignore[attr-defined]
    node.values, node.strides = kept.values((None,) * op.arity), ()  # of a call that has none to keep
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
        if grad is not None and is_legacy_batched(grad):
            return True
    return bool(functorch_active())
