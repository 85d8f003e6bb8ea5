"""What the tools share that are for a machine with a GPU."""

from __future__ import annotations

from collections.abc import Collection

import torch
from operator_samples import operator_of
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from cupyops._kernel.compile import cache
from cupyops._kernel.compile.source import cuda_src
from cupyops._kernel.kernel import Kernel, kernels
from cupyops.cli import jobs


def built_in(operators: Collection[str] | None = None) -> list[Kernel]:
    """The kernels of cuda_src, or of the files of these operators."""
    own = kernels(cuda_src())
    return [kernel for kernel in own if operators is None or operator_of(kernel.source.name) in operators]


def compile_ahead(console: Console, operators: Collection[str]) -> None:
    """Compile the kernels of these operators for this GPU into the user's cache, one process a core.

    Exits where there is no such cache, or where a kernel does not compile.
    """
    folder = cache.folder()
    if folder is None:
        raise SystemExit("no kernel cache: set CUPYOPS_CACHE_DIR to a folder of your own that can be written")
    major, minor = torch.cuda.get_device_capability()
    planned = jobs.plan(built_in(operators), [f"sm_{major}{minor}"])
    with Progress(console=console, transient=True) as progress:
        for outcome in progress.track(jobs.run(planned, folder), total=len(planned), description="compiling"):
            if outcome.error:
                raise SystemExit(outcome.error)


def placed(tensor: Tensor, device: str) -> Tensor:
    """A copy on a device, with the very strides, offset and surroundings; copied as bytes, so that no kernel runs."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())
    storage = whole.to(device, copy=True).untyped_storage()
    fresh = torch.empty(0, dtype=tensor.dtype, device=device)
    fresh.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return fresh.requires_grad_(tensor.requires_grad)
