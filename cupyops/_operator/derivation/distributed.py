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


def alike(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, a plain one, or where `like` is a DTensor that of the mesh's first process, on all of them."""
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim)


def call(function: Callable[..., Any], name: str, args: Sequence[Any], changed: Sequence[int] = ()) -> Any:
    """`function(*args)` on the whole of each DTensor; DTensors out. Differentiable.

    Of the arguments that are `changed` in place it is given copies, and what becomes of them is written back.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(value.device_mesh for value in args if is_spread(value))
    if any(isinstance(value, Tensor) and not is_spread(value) for value in args):
        raise InputError(f"{name}: plain tensors beside DTensors; distribute them over the same mesh")
    everywhere = [Replicate()] * mesh.ndim
    whole = [value.redistribute(mesh, everywhere).to_local() if is_spread(value) else value for value in args]
    for index in changed:
        whole[index] = None if whole[index] is None else whole[index].clone()
    result = function(*whole)
    written: dict[int, Tensor] = {}  # by the identity of the copy
    for index in changed:
        if (copy := whole[index]) is not None:
            written[id(copy)] = args[index].copy_(DTensor.from_local(copy, mesh, everywhere, run_check=False))
    if result is None:
        return None
    results = [
        written[id(one)] if id(one) in written else DTensor.from_local(one, mesh, everywhere, run_check=False)
        for one in ((result,) if isinstance(result, Tensor) else result)
    ]
    return results[0] if isinstance(result, Tensor) else tuple(results)
