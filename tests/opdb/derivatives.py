"""The suites that differentiate: PyTorch's own checks, with the options that its tests take from the database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_utils import gradcheck, gradgradcheck

from cupyops.testing import Call

from .comparison import call_of, mine, tensors, theirs

Checked = tuple[Callable[..., Any], tuple[Tensor, ...]]  # a function, and what it is differentiated in


def of_tensors(info: Any, sample: Any) -> Checked:
    """Our function of the sample's tensors that want a gradient alone."""
    call = call_of(sample)
    inputs = tuple(call.tensors())

    def function(*values: Tensor) -> Any:
        return sample.output_process_fn_grad(mine(info, replaced(call, inputs, values)))

    return function, inputs


def replaced(call: Call, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Call:
    """The call with some of its tensors exchanged."""
    exchange = {id(old): new for old, new in zip(tensors, values, strict=True)}
    return call.map(lambda tensor: exchange.get(id(tensor), tensor))


def first(info: Any, sample: Any) -> None:
    """The gradients are those of finite differences."""
    gradcheck(*of_tensors(info, sample), check_batched_grad=False, check_undefined_grad=True, **_options(info))


def second(info: Any, sample: Any) -> None:
    """So are the gradients of the gradients; for gradients of outputs laid out in two ways."""
    for strided in (False, True):
        gradgradcheck(
            *of_tensors(info, sample), gen_non_contig_grad_outputs=strided, check_batched_grad=False, **_options(info)
        )


def forward_mode(info: Any, sample: Any) -> None:
    """Forward mode, batched where the database says so, and forward over backward."""
    options = {"check_undefined_grad": True, "check_batched_forward_grad": info.check_batched_forward_grad}
    gradcheck(
        *of_tensors(info, sample),
        check_forward_ad=True,
        check_backward_ad=False,
        check_batched_grad=False,
        **options,
        **_options(info),
    )
    if info.supports_fwgrad_bwgrad:
        gradgradcheck(
            *of_tensors(info, sample),
            check_fwd_over_rev=True,
            check_rev_over_rev=False,
            check_undefined_grad=False,
            check_batched_grad=False,
            **_options(info),
        )


def batched(info: Any, sample: Any) -> None:
    """Many gradients of an output at once, as is_grads_batched=True and a vmap over backward have them."""
    gradcheck(*of_tensors(info, sample), check_batched_grad=info.check_batched_grad, **_options(info))
    gradgradcheck(*of_tensors(info, sample), check_batched_grad=info.check_batched_gradgrad, **_options(info))


def vmap(info: Any, sample: Any) -> None:
    """torch.vmap over all tensors of the sample gives what PyTorch gives for each slice."""
    call = call_of(sample).map(torch.Tensor.detach)
    inputs = call.all_tensors()
    batches = [torch.stack([t, t.flip(-1) if t.dim() else t]) for t in inputs]
    ours = torch.vmap(lambda *values: tensors(mine(info, replaced(call, inputs, values))))(*batches)
    slices = [tensors(theirs(info, replaced(call, inputs, values))) for values in zip(*batches)]
    for a, b in zip(ours, zip(*slices), strict=True):
        torch.testing.assert_close(a, torch.stack(b), equal_nan=True)


SUITES = {
    "gradcheck": first, "gradgradcheck": second, "forward AD": forward_mode, "batched gradients": batched,
    "vmap": vmap,
}  # fmt: skip


def _options(info: Any) -> dict[str, Any]:
    return {
        "check_grad_dtypes": True,
        "nondet_tol": info.gradcheck_nondet_tol,
        "fast_mode": info.gradcheck_fast_mode,
    }
