"""The entries of op_db that are of our operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

import cupyops

from .known import FUNCTIONS

OPS = [info for info in op_db if info.name in FUNCTIONS]
WITH_ERRORS = [info for info in OPS if info.error_inputs_func is not None and any(info.error_inputs("cpu"))]
DIFFERENTIABLE = [info for info in OPS if info.supports_autograd]


def ours(info: Any) -> Any:
    """The function here, with its arguments in the order of the database."""
    function = getattr(cupyops, FUNCTIONS[info.name])
    if info.name == "nn.functional.embedding":
        return lambda weight, indices, **options: function(indices, weight, **options)
    return function


def kinds_of_samples(info: Any, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, list[Any]]]:
    """(suite, samples), the tensors of which want a gradient where PyTorch has one."""
    options = {"requires_grad": dtype in info.supported_backward_dtypes(device.type)}
    yield "sample inputs", list(info.sample_inputs(device, dtype, **options))
    if info.reference_inputs_func is not None:
        yield "reference inputs", list(info.reference_inputs(device, dtype, **options))
