"""DTensor: an operator on tensors that are spread over a mesh of devices.

PyTorch cannot know how an operator of ours may be split. So each DTensor is gathered, the operator runs on plain tensors on
every device, and the result is a DTensor that each device has in full: no work is shared, and the value is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...errors import InputError


def is_spread(value: Any) -> bool:
    """Whether it is a DTensor, told without importing torch.distributed (and so that torch.compile can follow)."""
    return isinstance(value, Tensor) and type(value).__name__ == "DTensor"


def call(function: Callable[..., Any], name: str, args: Sequence[Any]) -> Any:
    """`function(*args)` on the whole of each DTensor; DTensors out. Differentiable."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(value.device_mesh for value in args if is_spread(value))
    if any(isinstance(value, Tensor) and not is_spread(value) for value in args):
        raise InputError(f"{name}: plain tensors beside DTensors; distribute them over the same mesh")
    everywhere = [Replicate()] * mesh.ndim
    whole = [value.redistribute(mesh, everywhere).to_local() if is_spread(value) else value for value in args]
    result = function(*whole)
    if isinstance(result, Tensor):
        return DTensor.from_local(result, mesh, everywhere, run_check=False)
    return tuple(DTensor.from_local(one, mesh, everywhere, run_check=False) for one in result)
