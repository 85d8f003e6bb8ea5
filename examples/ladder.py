"""The steps by which a matrix product and a sum become fast, and what the order of memory accesses costs.

python examples/ladder.py                      each kernel of ladder.cu, compared with PyTorch; on a GPU timed as well

docs/ladder.md has the times of an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cupyops
from cupyops import ceil_div

BLOCKS = 132 * 8  # of 256 threads: as many as a large GPU runs at once
Step = tuple[str, Callable[[], Tensor], Tensor]  # name, what to run, what it is to give


def kernel(name: str) -> cupyops.Kernel:
    return cupyops.Kernel("ladder.cu", name)


def launching(y: Tensor, name: str, grid: Any, block: Any, *args: Any, **template: Any) -> Callable[[], Tensor]:
    """A function that launches, and returns the tensor that the kernel writes."""
    launch = kernel(name)[grid, block]

    def run() -> Tensor:
        launch(*args, **template)
        return y

    return run


def products(device: str, n: int) -> Iterator[Step]:
    """Each kernel is the one before with one thing changed."""
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    c, halves = torch.empty(n, n, device=device), (a.bfloat16(), b.bfloat16())
    expected, of_halves = ((x.double() @ y.double()).float() for x, y in ((a, b), halves))
    eight = n // 128, n // 128
    yield (
        "naive: neighbours in a column",
        launching(c, "matmul_uncoalesced", (n // 16,) * 2, (16, 16), a, b, c, n),
        expected,
    )
    yield (
        "coalesced: neighbours in a row",
        launching(c, "matmul_coalesced", (n // 32, n // 8), (32, 8), a, b, c, n),
        expected,
    )
    yield "tiles in shared memory", launching(c, "matmul_shared", (n // 32,) * 2, (32, 32), a, b, c, n), expected
    for name, vectors in (("8 x 8 results in registers, unrolled", False), ("vectors of four", True)):
        yield name, launching(c, "matmul_registers<VECTORS>", eight, 256, a, b, c, n, VECTORS=vectors), expected
    yield "tensor cores, bf16", launching(c, "matmul_tensor_cores", (n // 64,) * 2, 128, *halves, c, n), of_halves


def sums(device: str, n: int) -> Iterator[Step]:
    """First a block takes 256 numbers, in several launches; then a grid that fills the GPU takes all of them."""
    x = torch.randn(n, device=device)
    parts, more = (torch.empty(max(BLOCKS, ceil_div(n, 256)), device=device) for _ in range(2))
    expected = x.double().sum().float()

    def each(of: cupyops.Kernel) -> Tensor:
        count, source, target = n, x, parts
        while count > 1:
            blocks = ceil_div(count, 256)
            of[blocks, 256](source, target, count)
            # the next launch must not write what it reads
            count, source, target = blocks, target, more if target is parts else parts
        return source[0]

    def once(of: cupyops.Kernel, **template: Any) -> Tensor:
        of[BLOCKS, 256](x, parts, n, **template)
        of[1, 256](parts, more, BLOCKS, **template)
        return more[0]

    yield "shared memory, neighbours first: divergent", partial(each, kernel("sum_divergent")), expected
    yield "halves: whole warps work", partial(each, kernel("sum_halves")), expected
    yield "warp shuffles", partial(each, kernel("sum_warps")), expected
    yield "many numbers in each thread", partial(once, kernel("sum_strided")), expected
    for name, unroll in (("vectors of four", 1), ("four loads under way", 4)):
        yield name, partial(once, kernel("sum_vectors<UNROLL>"), UNROLL=unroll), expected


def copies(device: str, n: int) -> Iterator[Step]:
    """A copy of one array that reads it in different orders; it writes in order."""
    x, y = torch.randn(n, device=device), torch.empty(n, device=device)
    copy = partial(launching, y)
    yield "sixteen bytes a thread", copy("read_vectors", ceil_div(n // 4, 256), 256, x, y, n), x
    for by in (0, 1, 8):
        yield f"misaligned by {by}", copy("read_offset", ceil_div(n, 256), 256, x, y, n, by), x[by:]
    for stride in (2, 4, 8, 32):
        order = x.view(-1, stride).T.reshape(-1)
        yield f"strided by {stride}", copy("read_strided", ceil_div(n, 256), 256, x, y, n, stride), order
    for run in (4, 32):
        yield f"runs of {run} in each thread", copy("read_runs", ceil_div(n // run, 256), 256, x, y, n, run), x
    index = torch.randperm(n, device=device, dtype=torch.int32)
    yield "random", copy("read_indexed", ceil_div(n, 256), 256, x, index, y, n), x[index.long()]


def compare(step: Step) -> None:
    """Raise AssertionError where a kernel gives something else than PyTorch in float64."""
    name, run, expected = step
    found = run().flatten()[: expected.numel()].view(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2, msg=lambda text: f"{name}: {text}")


def milliseconds(run: Callable[[], Tensor]) -> float:
    """Median of fifteen runs on a GPU."""
    times = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[7]


def main() -> None:
    """Large problems on a GPU, else small ones in the simulator."""
    gpu = torch.cuda.is_available()
    if not gpu:
        print("no GPU: small problems in the simulator, which has no times")
    device, sizes = ("cuda", (4096, 1 << 28, 1 << 27)) if gpu else ("cpu", (128, 1 << 12, 1 << 12))
    with nullcontext() if gpu else cupyops.simulate():
        for steps, size in zip((products, sums, copies), sizes):
            print(f"\n{steps.__name__}, {size:,}")
            for step in steps(device, size):
                compare(step)
                print(f"  {step[0]:44}" + (f"{milliseconds(step[1]):10.3f} ms" if gpu else "  right"))


if __name__ == "__main__":
    main()
