"""PyTorch's own functions as a form: cuBLAS and cuDNN, where no kernel of ours is measured as fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..._kernel.launch.executors import executors
from ..._util import observed, torch_private, tracing
from ..._util.strides import is_dry
from .forms import Form, Forms, Library
from .gpu import Gpu, gpu

_dispatch_modes = torch_private.dispatch_modes
FASTER = observed.Faster("PyTorch's own function is faster here: cupyops.never_slower(False) has the kernels run")


class ByPyTorch(Form[Any]):
    """A form without a kernel: who launches it calls PyTorch.

    Args:
        unless: why kernels of ours are faster for a problem, None where none is measured to be.
    """

    name = "pytorch"
    summary = "PyTorch's own function, where none of the kernels is measured as fast"

    def __init__(self, unless: Callable[[Any, Gpu], str | None]) -> None:
        self._unless = unless

    def why_not(self, problem: Any, gpu: Gpu) -> str | None:
        """It runs on GPUs, where it is allowed."""
        return None if gpu.library else "kernels of ours alone are to run, as in the simulator"

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """Return why kernels are measured to be as fast, or None."""
        return self._unless(problem, gpu)

    def launch(self, problem: Any, gpu: Gpu) -> Library:
        """Nothing of ours."""
        return Library(self.name)


def is_wanted(tensor: Tensor) -> bool:
    """Return True if PyTorch's own functions may be taken for a tensor."""
    return tensor.is_cuda and gpu(tensor.device).library


def at_once(tensor: Tensor) -> bool:
    """Return True if a module may call PyTorch's own function, where that is as fast, with nothing of ours around it.

    That is on a GPU, while nobody compiles, traces or records, and no dispatch mode is open, which would know our operator
    by its name.
    """
    if is_dynamo_compiling() or not tensor.is_cuda or observed.unplanned:
        return False
    return observed.prefers_library and not _dispatch_modes()


def faster(forms: Forms[Any], problem: Any, device: torch.device) -> str | None:
    """Return the reason not to launch kernels where PyTorch's own function is the chosen form; else None."""
    if isinstance(forms.choose(problem, gpu(device)), ByPyTorch):
        return FASTER
    return None


def call(name: str, on: Tensor, function: Callable[[], Any]) -> None:
    """`function()`, which is PyTorch's `name` on tensors of the device of `on`; a trace has a record of it."""
    if (instead := getattr(executors.get(on.device.type), "library", None)) is not None:
        instead(name)
    elif tracing.active is None:
        function()
    else:
        with tracing.launch(name, (), (), on) as record, tracing.timed(record if on.is_cuda else None):
            function()


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = a b + bias of matrices, y contiguous."""
    y = y.view(a.shape[0], b.shape[1])
    if bias is None:
        call("torch.mm", y, lambda: torch.mm(a, b, out=y))
    else:
        call("torch.addmm", y, lambda: torch.addmm(bias, a, b, out=y))


def multiply_in_full(a: Tensor, b: Tensor, y: Tensor) -> None:
    """y = a b of matrices of a half type, y contiguous and of float32: nothing is rounded in between."""
    if y.is_cuda:
        call("torch.mm", y, lambda: torch.mm(a, b, out_dtype=y.dtype, out=y))
    else:  # where PyTorch has no such function
        call("torch.mm", y, lambda: torch.mm(a.to(y.dtype), b.to(y.dtype), out=y))


def product_in_full(a: Tensor, b: Tensor) -> list[Tensor]:
    """[a b] of matrices of a half type, in float32: as a call of a compiled graph, which gives a list of tensors."""
    y = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)
    if not is_dry(a):
        multiply_in_full(a, b, y)
    return [y]
