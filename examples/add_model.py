"""Train two vectors through an operator of your own: loss = sum(add(a^2, b^2)), which sinks to zero.

A kernel reaches a program in three ways:

    python examples/add_model.py --kernel inline    its text stands in the program
    python examples/add_model.py --kernel file      it stands in a .cu file beside the program
    python examples/add_model.py --kernel wheel     it was compiled ahead of time, and only the cubin is loaded

Without a GPU the vectors train through the operator's PyTorch reference; the kernels are compiled all the same.
`--simulate 3` then runs three steps of the kernels in the simulator, and compares them with the reference. With
CUPYOPS_SIMULATE=1 the simulator runs all of them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import cupyops

console = Console()

INLINE = r"""
template <typename T> __global__ void vector_add_fwd(const T* a, const T* b, T* y, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = a[i] + b[i];
}

template <typename T> __global__ void vector_add_bwd(const T* grad_y, T* grad_a, T* grad_b, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) grad_a[i] = grad_b[i] = grad_y[i];
}
"""

BLOCK = 256


class Way(StrEnum):
    """How the kernel reaches the program."""

    inline = "inline"
    file = "file"
    wheel = "wheel"


def kernels(code: str) -> tuple[cupyops.Kernel, cupyops.Kernel]:
    """The forward and the backward kernel."""
    types = (torch.float32, torch.float64)
    return cupyops.Kernel(code, "vector_add_fwd<T>", T=types), cupyops.Kernel(code, "vector_add_bwd<T>", T=types)


KERNELS = {"text": kernels(INLINE), "file": kernels("vector_add.cu")}  # read when they are first needed


def kernels_of(way: Way) -> tuple[cupyops.Kernel, cupyops.Kernel]:
    """Those of the text, or those of the file; a cubin is of the file too."""
    return KERNELS["text" if way is Way.inline else "file"]


@functools.cache
def add_operator(way: Way) -> cupyops.Operator:
    """The operator: what it means, then how its kernels are launched."""
    vector_add_fwd, vector_add_bwd = kernels_of(way)

    @cupyops.operator(f"add_model::add_{way.value}")
    def add(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @add.forward
    def forward(a, b):
        a, b = a.contiguous(), b.contiguous()
        y = torch.empty_like(a)
        vector_add_fwd[cupyops.ceil_div(y.numel(), BLOCK), BLOCK](a, b, y, y.numel(), T=y.dtype)
        return y, ()

    @add.backward
    def backward(saved, grad_y):
        grad_a, grad_b = torch.empty_like(grad_y), torch.empty_like(grad_y)
        blocks = cupyops.ceil_div(grad_y.numel(), BLOCK)
        vector_add_bwd[blocks, BLOCK](grad_y, grad_a, grad_b, grad_y.numel(), T=grad_y.dtype)
        return grad_a, grad_b

    @add.unsupported
    def unsupported(a, b):
        if a.shape != b.shape:
            return "the kernel adds vectors of one shape"
        return None if a.dtype in (torch.float32, torch.float64) else f"no kernel for {a.dtype}"

    return add


class AddModel(torch.nn.Module):
    """Two trainable vectors and the sum of their squares."""

    def __init__(self, way: Way, size: int) -> None:
        super().__init__()
        self.add = add_operator(way)
        self.a = torch.nn.Parameter(torch.randn(size))
        self.b = torch.nn.Parameter(torch.randn(size))

    def forward(self) -> Tensor:
        return self.add(self.a**2, self.b**2).sum()


def compile_ahead(arch: str, folder: Path) -> None:
    """Compile the kernels of this file for `arch` into `folder`, as one would when building a wheel."""
    command = [
        sys.executable,
        "-m",
        "cupyops",
        "compile",
        __file__,
        "--arch",
        arch,
        "--out",
        str(folder),
        "--jobs",
        "1",
    ]
    subprocess.run(command, check=True)
    console.print(f"compiled ahead of time into {folder}:", *sorted(p.name for p in folder.glob("*.cubin")), sep="\n  ")


def show_binaries(way: Way, arch: str) -> None:
    """Build, or find, the kernels that the training runs, and say where they came from."""
    for kernel in kernels_of(way):
        start = time.perf_counter()
        binary = kernel.instance(T=torch.float32).binary(arch)
        milliseconds = 1000 * (time.perf_counter() - start)
        console.print(f"{binary.name} for {arch}: origin [bold]{binary.origin}[/], {milliseconds:.0f} ms")


def train(model: AddModel, epochs: int, lr: float, trace: bool) -> float:
    """Plain gradient descent; the last loss."""
    optimizer = cupyops.optim.SGD(model.parameters(), lr=lr)

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training", total=epochs)
        for epoch in range(1, epochs + 1):
            with cupyops.trace() if trace and epoch == 1 else nullcontext() as seen:
                optimizer.zero_grad()
                loss = model()
                loss.backward()
                optimizer.step()
            if seen is not None:
                progress.console.print(str(seen), soft_wrap=True, markup=False)
            progress.advance(task)
            if epoch % 25 == 0 or epoch == epochs:
                progress.console.print(f"epoch {epoch:4d}  loss {loss.item():.6g}")
    return model().item()


def simulate(way: Way, size: int, steps: int, lr: float) -> None:
    """Train anew for a few steps by the kernels, in the simulator, and by the reference: both come to the same vectors."""
    by_kernels, by_reference = AddModel(way, size), AddModel(way, size)
    by_reference.load_state_dict(by_kernels.state_dict())
    with cupyops.simulate(), cupyops.trace() as seen:
        train(by_kernels, steps, lr, trace=False)
    train(by_reference, steps, lr, trace=False)
    for ours, expected in zip(by_kernels.parameters(), by_reference.parameters()):
        torch.testing.assert_close(ours, expected)
    names = sorted({launch.kernel for launch in seen.launches()})
    console.print(f"{steps} steps in the simulator end as by the reference. It ran {', '.join(names)}", soft_wrap=True)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    kernel: Annotated[Way, typer.Option(help="How the kernel reaches the program.")] = Way.inline,
    epochs: Annotated[int, typer.Option(min=1)] = 500,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 0.01,
    size: Annotated[int, typer.Option(min=1, help="Length of the two vectors.")] = 1000,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    arch: Annotated[str, typer.Option(help="Architecture to compile for where there is no GPU.")] = "sm_80",
    cubins: Annotated[Path | None, typer.Option(help="Folder for --kernel wheel; else a temporary one.")] = None,
    seed: int = 0,
    trace: Annotated[bool, typer.Option(help="Print which kernels the first step ran.")] = False,
    steps: Annotated[
        int, typer.Option("--simulate", min=0, help="Then so many steps of the kernels, in the simulator.")
    ] = 0,
) -> None:
    """Train the model and print its loss."""
    torch.manual_seed(seed)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda":
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(where))
    else:
        runs = "the kernels, in the simulator" if cupyops.simulating() else "the PyTorch reference"
        console.print(f"no GPU in use: training on {where} through {runs}")
    with tempfile.TemporaryDirectory() as temporary:
        if kernel is Way.wheel:
            folder = cubins or Path(temporary)
            compile_ahead(arch, folder)
            os.environ["CUPYOPS_CUBIN_PATH"] = str(folder)  # or a folder `cubins` beside the .cu file
        show_binaries(kernel, arch)
        loss = train(AddModel(kernel, size).to(where), epochs, lr, trace)
    console.print(f"loss after {epochs} epochs: {loss:.6g}")
    if steps:
        simulate(kernel, size, steps, lr)


if __name__ == "__main__":
    app()
