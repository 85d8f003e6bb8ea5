"""The eager route with a gradient: one autograd.Function around forward and backward.

What it runs is its first argument: the roles themselves, or the code of a recorded plan. `ctx.call` says to backward what
forward has kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..._util import observed, torch_private, tracing
from ...errors import InputError
from . import results
from .constants import MISS
from .definition import Definition, like_outputs
from .kept import Kept, Pooled

_LARGE = 2**24  # elements of all tensors together, from which on a product takes fifty microseconds or more


class ForwardCall:
    """Record of a forward for its backward, besides the tensors kept."""

    def __init__(
        self, of: Definition, args: Sequence[Any], strides: Sequence[Any], kept: Kept, values: list[Any]
    ) -> None:
        self.of, self.kept, self.values, self.strides = of, kept, values, strides
        self.given = [index for index in of.tensors if args[index] is not None]
        self.saved: Sequence[int | Pooled] | None = None  # where each saved tensor is; None: each by itself, in order
        self.backwards: tuple[Callable[..., Any], ...] = ()  # the code of recorded backwards

    def backward(self, ctx: Any, tensors: Sequence[Any], grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Compute the gradients by the roles, for each tensor of the operator; None before them, for `run`."""
        last = self.of.backward_asks and not torch_private.keeps_graph()
        return (
            None,
            *self.checked(
                ctx, grads, self.gradients(tensors, grads, self.needs(self.asked(ctx, (*grads, *tensors))), last)
            ),
        )

    def needs(self, asked: Sequence[bool]) -> list[bool]:
        """Flags of the parameters: True if its gradient is wanted."""
        return _needs(self.of, asked)

    def chooses(self, values: Sequence[Any]) -> bool:
        """Return True if backward asks autograd; `values`: the gradients that come in and the tensors kept."""
        if not self.of.backward_chooses or len(self.given) < 2:
            return False
        return sum(one.numel() for one in values if one is not None) >= _LARGE

    def asked(self, ctx: Any, values: Sequence[Any]) -> tuple[bool, ...]:
        """Flags of the arguments of the autograd.Function: True if its gradient is wanted.

        Those are all that forward knew of. Of large tensors those that the backward under way will use, since
        `torch.autograd.grad` may ask for one alone: autograd is asked for each, which small calls would notice.
        """
        if not self.chooses(values):
            return ctx.needs_input_grad  # type: ignore[no-any-return]
        return will_be_used(ctx, tuple(index in self.given for index in self.of.tensors))

    def gradients(
        self, tensors: Sequence[Any], grads: Sequence[Tensor | None], needs: Sequence[bool], last: bool
    ) -> list[Tensor | None]:
        """The gradient of each tensor of the operator, by the roles."""
        op = self.of
        args, outputs, saved = self.kept.unpack(self.values, tensors, self.saved)
        if torch.is_grad_enabled() or batched(grads):
            found = op.differentiable_backward(grads, outputs, saved, args, needs)
        else:
            kept = self.kept
            # as the output is then, after hooks that may have copied it, which suits what is kept beside it, but not what
            # forward saved
            as_now = op.outputs == 1 and not op.mutated and kept.outputs == (0,) and not saved
            laid_out = like_outputs(grads, [outputs[0].stride()] if as_now else self.strides)
            route = "reference" if op.launch_backward is None else "kernel"
            with nullcontext() if tracing.active is None else tracing.operator(f"{op.name} (backward)", route):
                found = op.run_backward(laid_out, outputs, saved, args, needs, last)
        return [found[index] for index in op.tensors]

    def checked(self, ctx: Any, grads: Sequence[Tensor | None], found: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients, looked at until the kernels have given some as they should be."""
        op = self.of
        if not op.gives_gradients and not (torch.is_grad_enabled() or batched(grads)):
            given = [(op.parameters[i].name, one) for i, one in zip(op.tensors, found) if i in self.given]
            results.check_gradients(op.name, [name for name, _ in given], ctx.next_functions, [one for _, one in given])
            op.gives_gradients = True
        return found


def differentiable(op: Definition) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(function of the operator's arguments, by its roles; `apply(run, *tensors)`, which runs what `run` begins with).

    For plain tensors that the kernels serve. `forward(ctx, ...)` is merged, since a `setup_context` of its own costs 8 us.
    """

    forward, backward = _methods(len(op.tensors), op.outputs)
    name = "".join(part.capitalize() for part in op.name.partition("::")[2].split("_"))
    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), functions)
    node: Any = function._backward_cls  # type: ignore[attr-defined]
    nothing = [None] * op.arity
    node.call = ForwardCall(op, nothing, (), op.kept_by_kernels, nothing)  # of a node that has kept nothing
    node.apply = backward  # what autograd calls; PyTorch's own looks for a vjp first, for half a microsecond
    # Function.apply of Python only looks for functorch, as the router has done already: the C method saves 1 us
    apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def by_roles(*args: Any) -> Any:
        return apply((_run_roles, op, args), *[args[index] for index in op.tensors])

    return (_in_place(op, by_roles) if op.mutated else by_roles), apply


@functools.cache
def _methods(tensors: int, outputs: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Write forward and backward of an autograd.Function for `tensors` and `outputs`: with `*args` they would be slower."""
    listed, grads = (
        "".join(f"{letter}{i}, " for i in range(count)) for letter, count in (("a", tensors), ("g", outputs))
    )
    source = f"""
def forward(ctx, run, {listed}):
    return run[0](ctx, run, {listed})

def backward(ctx, {grads}):
    tensors, call = ctx.saved_tensors, ctx.call
    if not observed.unplanned and not is_grad_enabled():
        for replay in call.backwards:
            found = replay(ctx, tensors, {grads})
            if found is not MISS:
                return found
    return call.backward(ctx, tensors, ({grads}))
"""
    scope: dict[str, Any] = {"observed": observed, "is_grad_enabled": torch.is_grad_enabled, "MISS": MISS}
    exec(compile(source, "<autograd.Function>", "exec"), scope)
    torch_private.skipped_by_dynamo(scope["backward"])  # which compiled autograd would trace, with launches in it
    return scope["forward"], scope["backward"]


def _run_roles(ctx: Any, run: tuple[Any, ...], *tensors: Any) -> Any:
    """The forward of the autograd.Function, by the operator's roles."""
    _, op, args = run
    if op.mutated:
        ctx.mark_dirty(*op.changed(args))
    needs = _needs(op, ctx.needs_input_grad) if op.forward_asks or op.kept_by_gradient else ()
    kept = op.kept(needs)
    if (recorder := observed.recorder()) is None:
        outputs, saved = op.run_forward(args, needs)
    else:
        outputs, saved = recorder.differentiable(op, args, kept, lambda: op.run_forward(args, needs))
    ctx.call = ForwardCall(op, args, [y.stride() for y in outputs], kept, kept.values(args))
    ctx.to_save = kept.pack(args, outputs, saved)  # as save_for_backward does
    if op.outputs > 1 or op.mutated:
        ctx.mark_non_differentiable(*op.exact(outputs))
        return outputs
    if op.constant:
        ctx.mark_non_differentiable(outputs[0])
    return outputs[0]


def will_be_used(ctx: Any, given: tuple[bool, ...], likely: tuple[bool, ...] = ()) -> tuple[bool, ...]:
    """`ctx.needs_input_grad`, of which the backward under way will use these; `given`: which of the tensors there are.

    `likely`: what it was before. PyTorch raises where a leaf is asked of whose gradient is used, which takes much of the
    host's time; so those are asked of first that were not used. The last one that is left is: for it this node runs.
    """
    edges = iter(ctx.next_functions)  # of these alone
    first, *needs = ctx.needs_input_grad
    nodes = [next(edges)[0] if there else None for there in given]
    left = sum(needs)
    for index in sorted(range(len(needs)), key=lambda index: bool(likely) and likely[1 + index]):
        if needs[index] and left > 1:
            needs[index] = torch_private.will_use_gradient(nodes[index])
            left -= not needs[index]
    return (first, *needs)


def _needs(op: Definition, asked: Sequence[bool]) -> list[bool]:
    needs = [False] * op.arity
    for index, need in zip(op.tensors, asked[1:]):
        needs[index] = need
    return needs


def _in_place(op: Definition, by_roles: Callable[..., Any]) -> Callable[..., Any]:
    """`by_roles` for what works in place, refused where PyTorch refuses it, and before anything is changed.

    The history of a view is that of its base: it is changed by PyTorch's own copy, from a copy that the kernels change.
    """

    def call(*args: Any) -> Any:
        if op.launch_backward is None:
            return op.call_reference(args)
        observed.refuse("it changes its arguments, and a gradient is wanted")
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
        by_roles(*values)
        for tensor, value in zip(op.changed(args), op.changed(values)):
            if value is not tensor:
                tensor.copy_(value)
        return op.returned(op.changed(args))

    return call


def batched(grads: Sequence[Tensor | None]) -> bool:
    """Return True inside a vmap over backward alone (is_grads_batched=True, torch.vmap), for which no kernel is made."""
    for grad in grads:
        if grad is not None and torch_private.is_legacy_batched(grad):
            return True
    return bool(torch_private.functorch_active())
