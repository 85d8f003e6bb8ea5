"""The entries of op_db that are of our operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core

import cupyops

from .known import FUNCTIONS

common_utils.extract_test_fn = core.extract_test_fn = lambda: None  # it looks through the stack for unittest's

OPS = [info for info in op_db if info.name in FUNCTIONS]
WITH_ERRORS = [info for info in OPS if info.error_inputs_func is not None and any(info.error_inputs("cpu"))]
DIFFERENTIABLE = [info for info in OPS if info.supports_autograd]


def ours(info: Any) -> Any:
    """The function here, with its arguments in the order of the database."""
    function = getattr(cupyops, FUNCTIONS[info.name])
    if info.name == "nn.functional.embedding":
        return lambda weight, indices, **options: function(indices, weight, **options)
    return function


def pytorchs(info: Any) -> Any:
    """PyTorch's function. Attention of half types by its fused one: of four dimensions, contiguous, without shared heads.

    Of others it makes float32 on a CPU, and its own fused functions are then as far off as ours.
    """
    if info.name != "nn.functional.scaled_dot_product_attention":
        return info.op

    def fused(query: Any, key: Any, value: Any, *args: Any, enable_gqa: bool = False, **options: Any) -> Any:
        if query.dtype.itemsize > 2 or query.dim() not in (3, 4) or args:
            return info.op(query, key, value, *args, enable_gqa=enable_gqa, **options)
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        tensors, mask = [x.contiguous() for x in (query, key, value)], options.pop("attn_mask", None)
        tensors = tensors if query.dim() == 4 else [x.unsqueeze(0) for x in tensors]
        # a gradient of the mask is none of the fused function's
        fixed = None if mask is None else mask.detach().contiguous()
        y = info.op(*tensors, attn_mask=fixed, **options)
        if mask is not None and mask.requires_grad:
            by_mask = info.op(*(x.detach() for x in tensors), attn_mask=mask, **options)
            y = y + (by_mask - by_mask.detach())
        return y if query.dim() == 4 else y.squeeze(0)

    return fused


def kinds_of_samples(info: Any, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, list[Any]]]:
    """(suite, samples), the tensors of which want a gradient where PyTorch has one."""
    options = {"requires_grad": dtype in info.supported_backward_dtypes(device.type)}
    yield "sample inputs", not_random(info.sample_inputs(device, dtype, **options))
    if info.reference_inputs_func is not None:
        yield "reference inputs", not_random(info.reference_inputs(device, dtype, **options))


def not_random(samples: Iterable[Any]) -> list[Any]:
    """Without those that drop what is drawn at random, and have another result each time."""
    return [sample for sample in samples if not sample.kwargs.get("dropout_p")]
