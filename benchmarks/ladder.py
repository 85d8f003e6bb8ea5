"""What every CUDA tutorial says, measured: a loop against a GPU, the steps of an optimisation, the cost of an access.

    python benchmarks/ladder.py --csv benchmarks/results/ladder.csv --plots docs/assets      on a GPU
    python benchmarks/ladder.py --dry-run                                                     small sizes, in the simulator
    python benchmarks/ladder.py --from benchmarks/results/ladder.csv --write docs/ladder.md  the tables, from a file

Every result is compared with NumPy's or PyTorch's before it is timed.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import cupyops
from cupyops._kernel.kernel import Kernel, ceil_div

console = Console()
HERE = Path(__file__).parent
BLOCKS = 132 * 8  # of 256 threads: as many as a large GPU runs at once


def kernel(name: str, **domain: Any) -> Kernel:
    return Kernel("ladder.cu", name, **domain)


def launching(result: Tensor, of: Kernel, grid: Any, block: Any, *args: Any, **template: Any) -> Callable[[], Tensor]:
    """A function that launches, and gives the tensor that the kernel writes."""

    def run() -> Tensor:
        of[grid, block](*args, **template)
        return result

    return run


@dataclass
class Step:
    """One line of a table: a way to do it, and how to run it. `flops` or `bytes` make a rate of its time."""

    table: str
    name: str
    run: Callable[[], Any]
    right: Callable[[Any], bool]
    on: str = "gpu"  # or "cpu"
    flops: float = 0.0
    bytes: float = 0.0
    part: float = 1.0  # of the whole problem, where the whole would take minutes


@dataclass
class Result:
    table: str
    name: str
    on: str
    us: float
    rate: float  # GB/s or TFLOP/s; 0 where neither is meant
    unit: str
    estimated: bool  # a part was run, and its time multiplied


def keep(path: Path, about: dict[str, str], results: list[Result]) -> None:
    """The figures as CSV, a line each, below what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in about.items())
        table = csv.DictWriter(file, [one.name for one in fields(Result)], lineterminator="\n")
        table.writeheader()
        for one in results:
            us, rate = (f"{number:.6g}" for number in (one.us, one.rate))
            table.writerow(asdict(one) | {"us": us, "rate": rate, "estimated": "yes" if one.estimated else ""})


def read(path: Path) -> list[Result]:
    """The figures that `keep` has written."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("# ")]
    return [
        Result(
            one["table"],
            one["name"],
            one["on"],
            float(one["us"]),
            float(one["rate"]),
            one["unit"],
            bool(one["estimated"]),
        )
        for one in csv.DictReader(lines)
    ]


# --- a loop against a GPU ---------------------------------------------------------------------------------------------


def loops(device: str, small: bool) -> Iterator[Step]:
    """Vector addition, matrix product and convolution: a Python loop, NumPy, PyTorch on the CPU, naive and our kernels."""
    yield from additions(device, 1 << (10 if small else 24))
    yield from products(device, 32 if small else 2048)
    yield from convolutions(device, 16 if small else 1024)


def additions(device: str, n: int) -> Iterator[Step]:
    a, b = torch.randn(n), torch.randn(n)
    x, z, y = a.to(device), b.to(device), torch.empty(n, device=device)
    expected, size = a + b, 12.0 * n
    part = min(1.0, 2**20 / n)
    few = [v[: int(n * part)].tolist() for v in (a, b)]
    title = f"vector addition, {n:,} numbers"
    yield Step(
        title,
        "Python loop",
        lambda: [p + q for p, q in zip(*few)],
        lambda r: close(r, expected[: len(r)]),
        "cpu",
        bytes=size,
        part=part,
    )
    yield Step(title, "NumPy", lambda: a.numpy() + b.numpy(), lambda r: close(r, expected), "cpu", bytes=size)
    yield Step(title, "PyTorch on the CPU", lambda: a + b, lambda r: close(r, expected), "cpu", bytes=size)
    naive = kernel("vector_add")
    yield Step(
        title,
        "naive kernel",
        launching(y, naive, ceil_div(n, 256), 256, x, z, y, n),
        lambda r: close(r, expected),
        bytes=size,
    )
    yield Step(title, "cupyops.add", lambda: cupyops.add(x, z), lambda r: close(r, expected), bytes=size)
    yield Step(title, "PyTorch on the GPU", lambda: x + z, lambda r: close(r, expected), bytes=size)


def products(device: str, n: int) -> Iterator[Step]:
    a, b = torch.randn(n, n), torch.randn(n, n)
    x, z, y = a.to(device), b.to(device), torch.empty(n, n, device=device)
    expected, flops = (a.double() @ b.double()).float(), 2.0 * n**3
    rows = max(1, min(n, (1 << 22) // n**2))  # of the result, by the loop
    left, right = a[:rows].tolist(), b.T.contiguous().tolist()
    title = f"matrix product, {n} x {n}, fp32"

    def loop() -> list[list[float]]:
        return [[sum(p * q for p, q in zip(row, column)) for column in right] for row in left]

    yield Step(title, "Python loop", loop, lambda r: close(r, expected[:rows], 1e-3), "cpu", flops, part=rows / n)
    yield Step(title, "NumPy", lambda: a.numpy() @ b.numpy(), lambda r: close(r, expected, 1e-3), "cpu", flops)
    yield Step(title, "PyTorch on the CPU", lambda: a @ b, lambda r: close(r, expected, 1e-3), "cpu", flops)
    naive = kernel("matmul_coalesced")
    grid, block = (n // 32, n // 8), (32, 8)
    yield Step(
        title,
        "naive kernel",
        launching(y, naive, grid, block, x, z, y, n),
        lambda r: close(r, expected, 1e-3),
        flops=flops,
    )
    yield Step(title, "cupyops.matmul", lambda: cupyops.matmul(x, z), lambda r: close(r, expected, 1e-3), flops=flops)
    yield Step(title, "PyTorch on the GPU", lambda: x @ z, lambda r: close(r, expected, 1e-3), flops=flops)


def convolutions(device: str, n: int) -> Iterator[Step]:
    k = 5
    out = n - k + 1
    image, taps = torch.randn(n, n), torch.randn(k, k)
    x, w, y = image.to(device), taps.to(device), torch.empty(out, out, device=device)
    planes = x[None, None], w[None, None]
    expected = torch.nn.functional.conv2d(image[None, None].double(), taps[None, None].double())[0, 0].float()
    flops = 2.0 * out**2 * k**2
    rows = max(1, min(out, (1 << 16) // out))
    pixels, filter = image.tolist(), taps.tolist()
    title = f"convolution, {n} x {n} by {k} x {k}, fp32"

    def loop() -> list[list[float]]:
        span = range(k)
        return [
            [sum(pixels[h + i][c + j] * filter[i][j] for i in span for j in span) for c in range(out)]
            for h in range(rows)
        ]

    def by_numpy() -> np.ndarray:
        windows = np.lib.stride_tricks.sliding_window_view(image.numpy(), (k, k))
        return np.einsum("hwij,ij->hw", windows, taps.numpy())

    conv = torch.nn.functional.conv2d
    yield Step(title, "Python loop", loop, lambda r: close(r, expected[:rows], 1e-4), "cpu", flops, part=rows / out)
    yield Step(title, "NumPy", by_numpy, lambda r: close(r, expected, 1e-4), "cpu", flops)
    yield Step(
        title,
        "PyTorch on the CPU",
        lambda: conv(image[None, None], taps[None, None])[0, 0],
        lambda r: close(r, expected, 1e-4),
        "cpu",
        flops,
    )
    naive, grid = kernel("convolve"), (ceil_div(out, 32), ceil_div(out, 8))
    yield Step(
        title,
        "naive kernel",
        launching(y, naive, grid, (32, 8), x, w, y, n, k),
        lambda r: close(r, expected, 1e-4),
        flops=flops,
    )
    yield Step(
        title, "cupyops.conv2d", lambda: cupyops.conv2d(*planes)[0, 0], lambda r: close(r, expected, 1e-4), flops=flops
    )
    yield Step(
        title, "PyTorch on the GPU", lambda: conv(*planes)[0, 0], lambda r: close(r, expected, 1e-4), flops=flops
    )


# --- the steps of an optimisation -------------------------------------------------------------------------------------


def matmul_steps(device: str, small: bool) -> Iterator[Step]:
    """Each kernel is the one before with one thing changed."""
    n = 128 if small else 4096
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    c, flops = torch.empty(n, n, device=device), 2.0 * n**3
    expected = (a.double() @ b.double()).float()
    halves = a.bfloat16(), b.bfloat16()
    of_halves = (halves[0].double() @ halves[1].double()).float()
    title = f"matrix product step by step, {n} x {n}"
    forms: list[tuple[str, Any, Any, Any, dict[str, Any]]] = [
        ("naive: neighbours in a column", kernel("matmul_uncoalesced"), (n // 16, n // 16), (16, 16), {}),
        ("coalesced: neighbours in a row", kernel("matmul_coalesced"), (n // 32, n // 8), (32, 8), {}),
        ("tiles in shared memory", kernel("matmul_shared"), (n // 32, n // 32), (32, 32), {}),
        (
            "8 x 8 results in registers, unrolled",
            kernel("matmul_registers<VECTORS>"),
            (n // 128, n // 128),
            256,
            {"VECTORS": False},
        ),
        ("vectors of four", kernel("matmul_registers<VECTORS>"), (n // 128, n // 128), 256, {"VECTORS": True}),
    ]
    for name, of, grid, block, template in forms:
        run = launching(c, of, grid, block, a, b, c, n, **template)
        yield Step(title, name, run, lambda r: close(r, expected, 1e-3), flops=flops)
    yield Step(
        title, "cupyops.matmul, fp32", lambda: cupyops.matmul(a, b), lambda r: close(r, expected, 1e-3), flops=flops
    )
    yield Step(title, "cuBLAS, fp32", lambda: a @ b, lambda r: close(r, expected, 1e-3), flops=flops)
    cores = kernel("matmul_tensor_cores")
    yield Step(
        title,
        "tensor cores, bf16",
        launching(c, cores, (n // 64, n // 64), 128, *halves, c, n),
        lambda r: close(r, of_halves, 1e-3),
        flops=flops,
    )
    yield Step(
        title, "cupyops.matmul, bf16", lambda: cupyops.matmul(*halves), lambda r: close(r, of_halves, 1e-2), flops=flops
    )
    yield Step(title, "cuBLAS, bf16", lambda: halves[0] @ halves[1], lambda r: close(r, of_halves, 1e-2), flops=flops)


def sum_steps(device: str, small: bool) -> Iterator[Step]:
    n = 1 << (14 if small else 28)
    x = torch.randn(n, device=device)
    parts, y = (torch.empty(max(BLOCKS, ceil_div(n, 256)), device=device) for _ in range(2))
    expected, size = x.double().sum().float(), 4.0 * n
    title = f"sum step by step, {n:,} numbers, fp32"
    slack = 1e-6 * float(x.abs().double().sum())  # rounding: a part in a million of what is added

    def right(result: Tensor) -> bool:
        return abs(float(result) - float(expected)) <= slack

    def each(of: Kernel) -> Tensor:
        count, source, target = n, x, parts
        while count > 1:
            blocks = ceil_div(count, 256)
            of[blocks, 256](source, target, count)
            # the next launch must not write what it reads
            count, source, target = blocks, target, y if target is parts else parts
        return source[0]

    def few(of: Kernel, **template: Any) -> Tensor:
        of[BLOCKS, 256](x, parts, n, **template)
        of[1, 256](parts, y, BLOCKS, **template)
        return y[0]

    yield Step(
        title, "shared memory, neighbours first: divergent", lambda: each(kernels["divergent"]), right, bytes=size
    )
    yield Step(title, "halves: whole warps work", lambda: each(kernels["halves"]), right, bytes=size)
    yield Step(title, "warp shuffles", lambda: each(kernels["warps"]), right, bytes=size)
    yield Step(title, "many numbers in each thread", lambda: few(kernels["strided"]), right, bytes=size)
    yield Step(title, "vectors of four", lambda: few(kernels["vectors"], UNROLL=1), right, bytes=size)
    yield Step(title, "four loads under way", lambda: few(kernels["vectors"], UNROLL=4), right, bytes=size)
    yield Step(title, "PyTorch", lambda: x.sum(), right, bytes=size)


kernels = {name: kernel(f"sum_{name}") for name in ("divergent", "halves", "warps", "strided")}
kernels["vectors"] = kernel("sum_vectors<UNROLL>")


# --- access -----------------------------------------------------------------------------------------------------------


def accesses(device: str, small: bool) -> Iterator[Step]:
    """A copy of one array, which reads it in different orders; it writes in order."""
    n = 1 << (12 if small else 27)
    x, y = torch.randn(n, device=device), torch.empty(n, device=device)
    size = 8.0 * n
    title = f"a copy of {n:,} numbers, by the order in which it reads"
    strided, offset, indexed = kernel("read_strided"), kernel("read_offset"), kernel("read_indexed")
    vectors, runs = kernel("read_vectors"), kernel("read_runs")

    def step(name: str, of: Kernel, threads: int, *args: Any, right: Callable[[], Tensor], moved: float = size) -> Step:
        run = launching(y, of, ceil_div(threads, 256), 256, *args)
        return Step(title, name, run, lambda r: torch.equal(r[: len(right())], right()), bytes=moved)

    yield step("sixteen bytes a thread", vectors, n // 4, x, y, n, right=lambda: x)
    yield step("contiguous: coalesced", offset, n, x, y, n, 0, right=lambda: x)
    for by in (1, 8):
        yield step(f"misaligned by {by}", offset, n, x, y, n, by, right=lambda by=by: x[by:])
    for stride in (2, 4, 8, 32):
        read = partial(torch.reshape, x.view(-1, stride).T, (-1,))
        yield step(f"strided by {stride}", strided, n, x, y, n, stride, right=read)
    for run in (4, 32):
        yield step(f"runs of {run} in each thread", runs, n // run, x, y, n, run, right=lambda: x)
    order = torch.randperm(n, device=device, dtype=torch.int32)
    yield step("random", indexed, n, x, order, y, n, right=lambda: x[order.long()], moved=12.0 * n)


TABLES = (loops, matmul_steps, sum_steps, accesses)


# --- time -------------------------------------------------------------------------------------------------------------


def close(result: Any, expected: Tensor, tolerance: float = 1e-6) -> bool:
    """To `tolerance` of the largest number expected."""
    found = torch.as_tensor(result, dtype=torch.float32).cpu()
    expected = expected.cpu()
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def cpu_time(run: Callable[[], Any], seconds: float = 1.0) -> float:
    """Median us of a call; of one where that takes longer than `seconds`."""
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < 20):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def gpu_time(run: Callable[[], Any], flush: Tensor, samples: int = 15) -> float:
    """Median us on the GPU, with caches flushed and the host ahead."""
    for _ in range(3):
        run()
    times = []
    for _ in range(samples):
        flush.zero_()
        torch.cuda._sleep(400_000)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure(small: bool) -> list[Result]:
    """Every step, compared first. Small ones run in the simulator and are not timed."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = "cpu" if small else "cuda"
    flush = torch.empty(0 if small else 1 << 28, dtype=torch.uint8, device=device)
    found = []
    with cupyops.simulate() if small else nullcontext():
        for table in TABLES:
            for step in track(table(device, small), description=table.__name__, console=console, transient=True):
                if not step.right(step.run()):
                    raise SystemExit(f"{step.table}: {step.name}: the result is wrong")
                us = (
                    0.0
                    if small
                    else (cpu_time(step.run) / step.part if step.on == "cpu" else gpu_time(step.run, flush))
                )
                work, unit = (step.flops / 1e6, "TFLOP/s") if step.flops else (step.bytes / 1e3, "GB/s")
                found.append(Result(step.table, step.name, step.on, us, work / us if us else 0.0, unit, step.part < 1))
    return found


# --- tables and plots -------------------------------------------------------------------------------------------------


def grouped(results: list[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.table, []).append(result)
    return found


def shown_time(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:,.3g} {unit}" if us < 1000 * size else f"{us / size:,.0f} {unit}"
    return f"{us:.3g} us"


def shown(number: float) -> str:
    """Three digits, and never an exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number >= 1e-3 else f"{number:.6f}".rstrip("0")


def rows(results: list[Result]) -> Iterator[tuple[str, str, str, str, str]]:
    """(name, time, rate, against the first, against the line above)."""
    first = results[0].us
    for before, one in zip([results[0], *results], results):
        time_taken = shown_time(one.us) + (" (estimated)" if one.estimated else "")
        gains = (f"{shown(first / one.us)} x", f"{shown(before.us / one.us)} x")
        yield one.name, time_taken, f"{shown(one.rate)} {one.unit}", *gains


HEAD = ("", "time", "rate", "of the first", "of the line above")


def markdown(results: list[Result]) -> str:
    lines = [HEAD, ("---",) * len(HEAD), *rows(results)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write(path: Path, results: list[Result]) -> None:
    """The tables of a page, between its markers `<!-- ladder N -->` and `<!-- ladder end -->`."""
    text = path.read_text(encoding="utf-8")
    for index, found in enumerate(grouped(results).values()):
        begin, end = f"<!-- ladder {index} -->", "<!-- ladder end -->"
        before, mark, after = text.partition(begin)
        if not mark:
            raise typer.BadParameter(f"{path} has no {begin}")
        text = f"{before}{begin}\n\n**{found[0].table}**\n\n{markdown(found)}\n\n{end}{after.partition(end)[2]}"
    path.write_text(text, encoding="utf-8")


def plot(folder: Path, results: list[Result]) -> None:
    """One picture for each table: ladder_0.png ..."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for index, (title, found) in enumerate(grouped(results).items()):
        figure = Figure(figsize=(8, 0.42 * len(found) + 1.2), layout="constrained")
        axes = figure.subplots()
        names = [one.name for one in found]
        colours = [
            "#8a8f98"
            if one.on == "cpu"
            else "#2f6fde"
            if "PyTorch" not in one.name and "cuBLAS" not in one.name
            else "#e08a1e"
            for one in found
        ]
        bars = axes.barh(names, [one.rate for one in found], color=colours)
        axes.bar_label(bars, [shown(one.rate) for one in found], padding=4)
        axes.invert_yaxis()
        if max(one.rate for one in found) > 100 * min(one.rate for one in found):
            axes.set_xscale("log")
        axes.margins(x=0.12)
        axes.set(xlabel=found[0].unit, title=title)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"ladder_{index}.png", dpi=130)


def show(results: list[Result]) -> None:
    for title, found in grouped(results).items():
        table = Table(*HEAD, title=title, title_justify="left")
        for cells in rows(found):
            table.add_row(*cells)
        console.print(table)


def machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu_threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": sys.version.split()[0],
    }


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Small sizes in the simulator: right or wrong, no times.")
    ] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing; take the figures of this file.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--csv", help="Where to write the figures.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for the pictures.")] = None,
    page: Annotated[Path | None, typer.Option("--write", help="Markdown page whose tables to fill.")] = None,
) -> None:
    """Measure, print, and write what was asked for."""
    if source is not None:
        results = read(source)
    elif dry_run:
        console.print(f"{len(measure(small=True))} steps, all right")
        return
    elif not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA GPU here; --dry-run runs small sizes in the simulator")
    else:
        results = measure(small=False)
        if to is not None:
            keep(to, machine(), results)
    show(results)
    if plots is not None:
        plot(plots, results)
    if page is not None:
        write(page, results)


if __name__ == "__main__":
    app()
