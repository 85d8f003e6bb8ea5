"""clip_grad_norm_: torch.nn.utils' own, with the gradients of a dtype read and scaled by one launch each."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from ..common.multi_tensor import BLOCK, launches, why_not
from ..kernel import FLOATING, Kernel
from ..tracing import operator as traced

_NORMS = ("Squares", "Largest")
grad_norm_partial = Kernel("grad_norm.cu", "grad_norm_partial<T, NORM>", T=FLOATING, NORM=_NORMS)
grad_norm = Kernel("grad_norm.cu", "grad_norm<T, NORM>", T=FLOATING, NORM=_NORMS)
grad_clip = Kernel("grad_norm.cu", "grad_clip<T>", T=FLOATING)

FOLDERS = 1024  # threads that fold what the blocks found

_NAME = "cupyops.nn.utils.clip_grad_norm_"


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm, as of one vector, is at most `max_norm`; as `torch.nn.utils`' own.

    Gradients on one GPU of floating dtypes (fp16, bf16 and fp32, or fp64) are read once for the norm, and written only
    where it is too large, in two launches per dtype and one in all, with no wait: a step in a CUDA graph may have it. The
    norm is summed, and the gradients are scaled, in fp32 (fp64 in fp64). All else, other norms than 2 and inf, and where
    `foreach` is asked for, is PyTorch's.

    Args:
        parameters: the parameters, or one; those without a gradient are left out.
        max_norm: the largest norm allowed.
        norm_type: 2, or `inf` for the largest magnitude; other norms by PyTorch.
        error_if_nonfinite: raise where the norm is NaN or infinite, for which this waits.
        foreach: as in PyTorch, whose function then runs.

    Returns:
        Tensor: the norm as it was, of the gradients' dtype.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> cupyops.nn.utils.clip_grad_norm_(weight, max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)
    else:
        parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    reason = _why_not(grads, float(norm_type), foreach)
    if reason is not None:
        with traced(_NAME, "reference", note=reason):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    with traced(_NAME, "kernel"):
        return _by_kernels(grads, float(max_norm), float(norm_type), error_if_nonfinite)


def _by_kernels(grads: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    kind = "Squares" if norm_type == 2 else "Largest"
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    planned = [(dtype, group, launches((group,))) for dtype, group in by_dtype.items()]
    wide = torch.float64 if torch.float64 in by_dtype else torch.float32
    partials = grads[0].new_empty(sum(one.blocks for *_, plan in planned for one in plan), dtype=wide)
    begin = 0
    for dtype, group, plan in planned:
        for table, start, count, blocks in plan:
            here = partials[begin : begin + blocks]
            grad_norm_partial[blocks, BLOCK](group[start], table, count, here, T=dtype, NORM=kind)
            begin += blocks
    norm = partials.new_empty(())
    grad_norm[1, FOLDERS](partials, norm, begin, T=grads[0].dtype, NORM=kind)
    total = norm.to(_common(by_dtype))
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    torch.autograd.graph.increment_version(grads)
    for dtype, group, plan in planned:
        for table, start, count, blocks in plan:
            grad_clip[blocks, BLOCK](group[start], table, count, max_norm, norm, T=dtype)
    return total


def _common(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """What the norms of these dtypes have together."""
    first, *others = dtypes
    for other in others:
        first = torch.promote_types(first, other)
    return first


def _why_not(grads: list[Tensor], norm_type: float, foreach: bool | None) -> str | None:
    """Why PyTorch must do it; None where it need not."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return "traced"
    if foreach is not None:
        return "foreach was asked for"
    if norm_type not in (2.0, math.inf):
        return f"norm_type {norm_type}"
    sizes = [grad.numel() for grad in grads]
    if not any(sizes):
        return "no gradients"
    if norm_type == math.inf and 0 in sizes:
        return "an empty gradient, which has no largest magnitude"
    dtypes = {grad.dtype for grad in grads}
    if torch.float64 in dtypes and len(dtypes) > 1:
        return "float64 beside other dtypes"
    if len({grad.device for grad in grads}) > 1:
        return "gradients on different devices"
    return next((reason for grad in grads if (reason := why_not((grad,))) is not None), None)
