"""Check of programs with `CUPYOPS_DEBUG=1`: each runs beside PyTorch, and the first result that differs is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..errors import CompileError
from .program import Program

# Largest difference of a result, as a part of its largest element: a sum in another order, halves that are not rounded
# between two operators that share a kernel.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
FLIPPED = 0.01  # part of the integers and booleans that may differ, where they follow from floating-point numbers


def compared(label: str, graph: GraphModule, program: Program, args: list[Any]) -> Any:
    """The results of the program, once PyTorch has computed the graph on copies of the same inputs.

    Raises:
        CompileError: a result, or an input that is overwritten, differs.
    """
    given = list(args)
    copies = [_copy(one) for one in given]
    device = program.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        expected = list(graph(*copies))
    found = program.run(args)
    floats = any(isinstance(one, Tensor) and one.is_floating_point() for one in given)
    names = [str(one) for one in next(iter(graph.graph.find_nodes(op="output"))).args[0]]  # type: ignore[union-attr]
    inputs = [str(node) for node in graph.graph.find_nodes(op="placeholder")]
    pairs = [(f"output {k} ({name})", *both) for k, (name, *both) in enumerate(zip(names, expected, found))]
    pairs += [(f"the input {name}, afterwards,", *both) for name, *both in zip(inputs, copies, given)]
    for name, want, got in pairs:
        if reason := _difference(want, got, floats):
            raise CompileError(
                f"{name} of {label} differs from PyTorch's: {reason}; report it with the text below, and use "
                f'backend="aot_eager" meanwhile\n{program.text()}'
            )
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if not isinstance(value, Tensor):
        return value
    if value.layout is not torch.strided or torch._debug_has_internal_overlap(value):
        return value.detach().clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _difference(want: Any, got: Any, floats: bool) -> str:
    """Describe how two results differ; "" where they do not."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return "" if type(want) is type(got) else f"{got!r}, expected {want!r}"
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        return f"{_shown(got)}, expected {_shown(want)}"
    if want.layout is not torch.strided or not want.numel() or want.dtype not in TOLERANCE:
        return _flipped(want, got, floats)
    finite = want.isfinite()
    if want.dtype not in (torch.float32, torch.float64):
        got = torch.where(finite, got, want)  # halves that are not rounded between operators need not overflow there
    allowed = TOLERANCE[want.dtype] * float(torch.where(finite, want.double(), 0.0).abs().max())
    try:
        torch.testing.assert_close(got, want, rtol=0, atol=allowed, equal_nan=True, msg=lambda text: text)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _flipped(want: Tensor, got: Tensor, floats: bool) -> str:
    if want.layout is not torch.strided or want.dtype.is_complex or want.dtype.itemsize == 0:
        return ""
    count = int((want != got).sum()) if want.numel() else 0
    if count > (1 + FLIPPED * want.numel() if floats else 0):
        return f"{count} of {want.numel()} elements of {_shown(want)}"
    return ""


def _shown(value: Tensor) -> str:
    shape: Sequence[int] = value.shape
    return f"{str(value.dtype).removeprefix('torch.')} {list(shape)}"
