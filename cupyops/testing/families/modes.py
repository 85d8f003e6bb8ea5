"""Modes: what PyTorch can be told to do around a call, and arrays in the place of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from ..._kernel.compile import backend
from ..._util.torch_private import tree_leaves
from ..call import Outcome, gradients, tensors_of
from ..case import Case
from ..hazard import Failure, NotApplicable, hazard, told
from ..recast import cast
from ..tolerance import computable, name

_LOW = (torch.float16, torch.bfloat16)


@hazard("under autocast dtypes are those that the reference gives, and values and gradients are as good")
def autocast(case: Case) -> None:
    """Compare under autocast to either half type, for inputs as they are and for inputs in that type."""
    case.needs_floating()
    refusals = [refusal for low in _LOW for given in (None, low) if (refusal := _under_autocast(case, low, given))]
    if len(refusals) == 2 * len(_LOW):
        raise NotApplicable(refusals[0])


def _under_autocast(case: Case, low: torch.dtype, given: torch.dtype | None) -> str | None:
    """Try one pair of dtypes; returns why the reference does not take it."""
    call = case.call if given is None else case.call.map_floating(lambda t: cast(t, given))
    with torch.autocast(case.device.type, dtype=low):
        try:
            theirs = case.theirs(call)
        except NotApplicable as refusal:
            return str(refusal)
        leaves = call.relaid()
        outputs = tensors_of(leaves.of(case.target.function))
        without = case.inference(call.relaid())
    with told(f"under autocast to {name(low)}" + ("" if given is None else f", inputs in {name(given)}")):
        if [y.dtype for y in outputs] != [y.dtype for y in theirs.outputs]:
            found, expected = (", ".join(name(y.dtype) for y in ys) for ys in (outputs, theirs.outputs))
            raise Failure(f"outputs in {found}, PyTorch's in {expected}")
        grads = case.grads(outputs)
        ours = Outcome(outputs, gradients(outputs, leaves, grads), without)
        with torch.autocast(case.device.type, dtype=low):
            theirs = case.theirs(call, grads)
        case.compare(ours, theirs, case.truth(call, grads))
    return None


@hazard(
    "under torch.use_deterministic_algorithms(True) the result is right and the same bits twice, or PyTorch's error"
)
def deterministic_algorithms(case: Case) -> None:
    """Ask for another path where atomics are used otherwise."""
    operator = case.target.operator
    declared = operator is not None and operator.definition.nondeterministic
    for way in case.ways:
        with _deterministic(False):
            if not declared and not _same_bits(way(case.call), way(case.call)):
                raise NotApplicable("without it, too, the bits differ from one call to the next: see deterministic")
        with _deterministic(True):
            try:
                once, again = way(case.call), way(case.call)
            except RuntimeError as error:
                if "deterministic" not in str(error).lower():
                    raise
                raise NotApplicable(f"refused: {str(error)[:200]}") from error
        case.same_as_plain(once)
        if not _same_bits(once, again):
            raise Failure("other bits in the second call")


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@hazard("recomputed by torch.utils.checkpoint the call gives the same gradients")
def checkpoint(case: Case) -> None:
    """Forward runs once more, in the middle of backward."""
    case.needs_gradient()
    leaves = case.call.relaid()
    outputs = tensors_of(checkpointed(lambda: leaves.of(case.target.function), use_reentrant=False))
    case.same_as_plain(Outcome(outputs, gradients(outputs, leaves, case.grads(outputs))))


@hazard("tensors saved for backward may be copied away and back")
def saved_tensors_hooks(case: Case) -> None:
    """`torch.autograd.graph.save_on_cpu` does so: they come back elsewhere, and contiguous."""
    case.needs_gradient()
    leaves = case.call.relaid()
    device = case.device
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format),
        lambda packed: packed.to(device, copy=True),
    ):
        outputs = tensors_of(leaves.of(case.target.function))
    case.same_as_plain(Outcome(outputs, gradients(outputs, leaves, case.grads(outputs))))


@hazard("arrays in, arrays of the same library out")
def arrays(case: Case) -> None:
    """NumPy arrays, on a GPU CuPy's."""
    case.needs_new_outputs()
    case.needs_operator()
    if any(tensor.dtype is torch.bfloat16 for tensor in case.call.all_tensors()):
        raise NotApplicable("arrays have no bfloat16")
    kind: Any = np.ndarray
    if case.backend == "gpu":
        kind = backend.cupy().ndarray
        given = case.call.map(lambda t: backend.cupy().from_dlpack(t.detach()))
    else:
        given = case.call.map(lambda t: t.detach().numpy())
    found = [leaf for leaf in tree_leaves(given.of(case.target.function)) if leaf is not None]
    for array in found:
        if not isinstance(array, (kind, np.generic)):
            raise Failure(f"a result is a {type(array).__qualname__}, not a {kind.__qualname__}")
    tensor_of = torch.from_dlpack if case.backend == "gpu" else lambda array: torch.from_numpy(np.asarray(array))
    outputs = [tensor_of(array) for array in found]
    case.judge_outputs(outputs, case.call)


# --- means ---


def _same_bits(a: Outcome, b: Outcome) -> bool:
    pairs = zip(a.named(), b.named())
    return all(mine is None or other is None or _bits_equal(mine, other) for (_, mine), (_, other) in pairs)


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    """Return True if the bits are equal, also where there is NaN."""
    a, b = computable(a), computable(b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
