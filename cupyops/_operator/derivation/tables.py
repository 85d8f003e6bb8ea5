"""Floating-point operations of a registered op, and its decomposition into ops of PyTorch.

Both come from the reference: a count is what `torch.utils.flop_counter` finds in it, a decomposition what it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ..._util import torch_private
from .definition import Definition
from .unsaved import unknown


def enter(of: Definition, op: Any, backward_op: Any) -> None:
    """Enter the formulas of the op of an operator and of its backward; what a FlopCounterMode does not find is nothing."""

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = of.bind(args, kwargs)
        return _count(lambda: lambda: of.reference(*_without_memory(given)))

    def flops_of_backward(grads: Any, outputs: Any, saved: Any, *rest: Any, out_val: Any = None) -> int:
        return count_backward(of, grads, rest[:-1], rest[-1])

    for known in (flop_registry, *torch_private.open_flop_registries()):
        known[op.overloadpacket] = flops
        known[backward_op.overloadpacket] = flops_of_backward


def leave(op: Any, backward_op: Any) -> None:
    """Take out what `enter` has put in."""
    for one in (op, backward_op):
        flop_registry.pop(one.overloadpacket, None)


def count_backward(of: Definition, grads: Sequence[Any], args: Sequence[Any], needs: Sequence[bool]) -> int:
    """Count the operations of PyTorch's gradient of the reference."""

    def prepared() -> Callable[[], Any]:
        values = [
            value.requires_grad_() if need and isinstance(value, Tensor) else value
            for value, need in zip(_without_memory(args), needs)
        ]
        found = of.reference(*values)
        outputs = (found,) if isinstance(found, Tensor) else found
        pairs = [(y, grad) for y, grad in zip(outputs, _without_memory(grads)) if grad is not None and y.requires_grad]
        wanted = [value for value, need in zip(values, needs) if need]
        ys, grad_ys = [y for y, _ in pairs], [grad for _, grad in pairs]
        return lambda: torch.autograd.grad(ys, wanted, grad_ys, allow_unused=True)

    return _count(prepared)


def _count(prepared: Callable[[], Callable[[], Any]]) -> int:
    """The operations of the function that `prepared()` gives.

    They are counted in a thread of its own: there no mode is open, and autograd is at work, which it is not below the
    dispatcher.
    """

    def work() -> int:
        try:
            function = prepared()
            with FlopCounterMode(display=False) as counter:
                function()
            return int(counter.get_total_flops())
        except Exception:  # a reference that reads values, of which there are none: as of any op without a formula
            return 0

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _without_memory(values: Sequence[Any]) -> list[Any]:
    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return [one(value) for value in values]


def decomposition(of: Definition) -> Callable[..., list[Tensor]]:
    """Return the function that stands for the op in a table of decompositions."""
    return lambda *args, **kwargs: decompose(of, of.bind(args, kwargs))


def recording(of: Definition) -> Callable[..., Any]:
    """Return the handler of an op's calls while a graph is recorded: one node, except for ONNX, which has no such op.

    PyTorch's own table of decompositions would serve ONNX too. But of what stands there torch.compile says that it is an
    error to leave it whole, where the environment has CI.
    """

    def record(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if torch.onnx.is_in_onnx_export():
            with mode:
                return decompose(of, of.bind(args, kwargs))
        return mode.__torch_dispatch__(op, types, args, kwargs)

    return record


def decompose(of: Definition, args: Sequence[Any]) -> list[Tensor]:
    """Compute what the op returns by the reference: outputs, new values of what is updated, what forward would save.

    What is saved is for a backward of the same op alone, of which a decomposed one knows nothing: it is filled with NaN.
    """
    values = list(args)
    changing = [index for index in (*of.mutated, *of.updated) if args[index] is not None]
    for index in changing:
        values[index] = args[index].clone()
    saved: Sequence[Tensor] = ()
    if of.why_not(args) is None:
        _, saved = of.run_forward([value.clone() if i in changing else value for i, value in enumerate(args)])
    found = of.reference(*values)
    outputs = of.changed(values) if of.mutated else (found,) if of.outputs == 1 else found
    updated = [values[index] for index in changing if index in of.updated]
    return [*outputs, *updated, *map(unknown, saved)]
