"""Every operator against PyTorch's, forward and backward: first the result, then the time.

    python benchmarks/compare.py                      all of it, on a GPU under two minutes
    python benchmarks/compare.py --ops relu,softmax --dtype bfloat16 --json out/compare.json
    python benchmarks/compare.py --device cpu         wall times of the reference, which is PyTorch itself

On a GPU: device time between CUDA events, median of many, ours and PyTorch's in turn, L2 flushed before each, the host
ahead of the GPU so that launch times do not count. TF32 is off on both sides. A result that is farther from float64 than
twice PyTorch's error and a unit in the last place gets no time, and the program ends with status 1.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import cupyops

console = Console(width=None if sys.stdout.isatty() else 150)  # a log is as wide as the table
BF16, FP32 = torch.bfloat16, torch.float32
Call = Callable[[], Any]


# --- what is measured ---


@dataclass(frozen=True)
class Case:
    """One operator at one size: how its arguments are made, both functions, and the least work it has to do."""

    op: str
    shape: str
    dtype: torch.dtype
    make: Callable[..., tuple[Any, ...]]  # (device, dtype) -> arguments; floating tensors get gradients
    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    elements: float  # elements that forward must move, or 0 where flops count
    backward_elements: float = 0
    flops: float = 0  # of forward; backward has twice as many


def randn(*shapes: tuple[int, ...]) -> Callable[..., tuple[Any, ...]]:
    return lambda device, dtype: tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


def scores(rows: int, classes: int, log: bool = False) -> Callable[..., tuple[Any, ...]]:
    def make(device: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        x = torch.randn(rows, classes, device=device, dtype=dtype)
        return (x.log_softmax(1) if log else x), torch.randint(classes, (rows,), device=device)

    return make


def elementwise(
    op: str, size: int, dtype: torch.dtype, theirs: Callable[..., Tensor], inputs: int = 1, **kwargs: Any
) -> Case:
    ours = getattr(cupyops, op)
    # add's gradient is grad_y itself; the others read grad_y and x (or y), and write grad_x
    backward = 0 if op == "add" else 3 * size
    return Case(
        op, " ".join([str(size), *map(str, kwargs.values())]), dtype, randn(*[(size,)] * inputs),
        lambda *a: ours(*a, **kwargs), lambda *a: theirs(*a, **kwargs), (inputs + 1) * size, backward,
    )  # fmt: skip


def rowwise(op: str, rows: int, columns: int, dtype: torch.dtype, theirs: Callable[..., Tensor]) -> Case:
    ours = getattr(cupyops, op)
    size = rows * columns
    return Case(
        op,
        f"{rows}x{columns}",
        dtype,
        randn((rows, columns)),
        lambda x: ours(x, -1),
        lambda x: theirs(x, -1),
        2 * size,
        3 * size,
    )


def layer_norm(rows: int, columns: int, dtype: torch.dtype) -> Case:
    size = rows * columns
    return Case(
        "layer_norm", f"{rows}x{columns}", dtype, randn((rows, columns), (columns,), (columns,)),
        lambda x, w, b: cupyops.layer_norm(x, (columns,), w, b), lambda x, w, b: F.layer_norm(x, (columns,), w, b),
        2 * size, 3 * size,
    )  # fmt: skip


def scale_shift(rows: int, columns: int, dtype: torch.dtype, per_feature: bool) -> Case:
    size, shape = rows * columns, (columns,) if per_feature else ()
    kind = "per feature" if per_feature else "scalar"
    return Case(
        "scale_shift", f"{rows}x{columns} {kind}", dtype, randn((rows, columns), shape, shape),
        cupyops.scale_shift, lambda x, w, b: x * w + b, 2 * size, 3 * size,
    )  # fmt: skip


def loss(op: str, rows: int, classes: int, dtype: torch.dtype) -> Case:
    # nll_loss reads one score a row; its gradient is written in full
    log = op == "nll_loss"
    size = rows * classes
    ours, theirs = getattr(cupyops, op), getattr(F, op)
    return Case(
        op,
        f"{rows}x{classes}",
        dtype,
        scores(rows, classes, log),
        ours,
        theirs,
        rows if log else size,
        size if log else 2 * size,
    )


def max_pool2d(shape: tuple[int, ...], kernel: int, dtype: torch.dtype) -> Case:
    size = math.prod(shape)
    small = size / kernel**2
    return Case(
        "max_pool2d", f"{'x'.join(map(str, shape))} k{kernel}", dtype, randn(shape),
        lambda x: cupyops.max_pool2d(x, kernel), lambda x: F.max_pool2d(x, kernel), size + small, size + small,
    )  # fmt: skip


def linear(m: int, n: int, k: int, dtype: torch.dtype) -> Case:
    # the weights are scaled so that outputs stay near 1, as a trained network's do
    def make(device: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        x, w, b = randn((m, k), (n, k), (n,))(device, dtype)
        return x, w / math.sqrt(k), b

    return Case("linear", f"{m}x{n}x{k}", dtype, make, cupyops.linear, F.linear, 0, flops=2.0 * m * n * k)


def matmul(m: int, n: int, k: int, dtype: torch.dtype) -> Case:
    return Case(
        "matmul", f"{m}x{n}x{k}", dtype, randn((m, k), (k, n)), cupyops.matmul, torch.matmul, 0, flops=2.0 * m * n * k
    )


def conv2d(n: int, channels: int, filters: int, size: int, dtype: torch.dtype) -> Case:
    return Case(
        "conv2d", f"n{n} {channels}->{filters} {size}x{size} k3", dtype,
        randn((n, channels, size, size), (filters, channels, 3, 3), (filters,)),
        lambda x, w, b: cupyops.conv2d(x, w, b, padding=1), lambda x, w, b: F.conv2d(x, w, b, padding=1),
        0, flops=2.0 * n * filters * size * size * channels * 9,
    )  # fmt: skip


def cases(small: bool) -> list[Case]:
    """Sizes as in large models, with some that are odd; `small` ones for a CPU or a quick look."""
    much = 2**20 if small else 2**27
    found = [
        elementwise("relu", much, BF16, F.relu),
        elementwise("relu", much // 8 + 1, FP32, F.relu),
        elementwise("gelu", much, BF16, F.gelu),
        elementwise("gelu", much, BF16, F.gelu, approximate="tanh"),
        elementwise("silu", much, BF16, F.silu),
        elementwise("add", much, BF16, torch.add, inputs=2),
    ]
    widths = [(256, 1000), (64, 4096)] if small else [(65536, 4096), (2048, 131072), (16383, 1001)]
    found += [rowwise(op, *size, BF16, getattr(F, op)) for op in ("softmax", "log_softmax") for size in widths]
    widths = [(256, 1000)] if small else [(131072, 1024), (32768, 4096), (8192, 16384), (16383, 1001)]
    found += [layer_norm(*size, BF16) for size in widths]
    found += [
        scale_shift(*(256, 1000) if small else (131072, 1024), BF16, per_feature) for per_feature in (True, False)
    ]
    widths = [(128, 1000)] if small else [(4096, 32000), (4096, 128256)]
    found += [loss("cross_entropy", *size, BF16) for size in widths] + [loss("nll_loss", *widths[0], FP32)]
    found += [max_pool2d((8, 16, 28, 28) if small else (256, 64, 112, 112), 2, FP32)]
    if small:
        found += [linear(128, 256, 256, FP32), matmul(256, 256, 256, FP32), conv2d(8, 16, 32, 14, FP32)]
    else:
        found += [linear(4096, 4096, 4096, BF16), linear(8192, 14336, 4096, BF16), linear(64, 128, 3136, FP32)]
        found += [matmul(4096, 4096, 4096, dtype) for dtype in (BF16, FP32)] + [matmul(1001, 999, 1003, BF16)]
        found += [conv2d(64, 1, 32, 28, FP32), conv2d(64, 32, 64, 14, FP32), conv2d(64, 256, 256, 14, BF16)]
    return found


# --- right before fast ---


def wrong(ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]) -> str:
    """What is wrong with our results, or nothing."""
    for index, (a, b, c) in enumerate(zip(ours, theirs, exact)):
        what = "output" if index == 0 else f"gradient {index - 1}"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{what} is {tuple(a.shape)} {a.dtype}, PyTorch's {tuple(b.shape)} {b.dtype}"
        error, reference = ((t.double() - c).abs().max().item() for t in (a, b))
        ulp = torch.finfo(a.dtype).eps * c.abs().max().item()
        if not error <= 2 * reference + ulp:
            return f"{what}: error {error:.3g}, PyTorch's {reference:.3g}"
    return ""


def results(function: Callable[..., Tensor], args: Sequence[Any], grad: Tensor | None) -> list[Tensor]:
    """The output and the gradients."""
    y = function(*args)
    if grad is None:
        return [y.detach()]
    return [y.detach(), *torch.autograd.grad(y, differentiable(args), grad.to(y.dtype))]


def differentiable(args: Sequence[Any]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad]


def verify(case: Case, args: Sequence[Any], grad: Tensor) -> str:
    exact = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args]
    return wrong(results(case.ours, args, grad), results(case.theirs, args, grad), results(case.theirs, exact, grad))


# --- time ---


class Clock:
    """Times calls in turn: device time on a GPU, wall time on a CPU."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.gpu = device.type == "cuda"
        if self.gpu:
            self.flush = torch.empty(2**28, dtype=torch.uint8, device=device)  # several times any L2

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        """The median of each, in microseconds, from as many rounds as fit the time."""
        for call in calls:
            call()
        start = time.perf_counter()
        self.round(calls)
        rounds = max(5, min(100, int(self.seconds / (time.perf_counter() - start + 1e-9))))
        return [median(times) for times in zip(*(self.round(calls) for _ in range(rounds)))]

    def round(self, calls: Sequence[Call]) -> list[float]:
        return self.device_times(calls) if self.gpu else [1e6 * wall(call) for call in calls]

    def device_times(self, calls: Sequence[Call]) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        for call, (start, end) in zip(calls, events):
            self.flush.zero_()
            torch.cuda._sleep(400_000)  # a quarter of a millisecond, in which the host enqueues what follows
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return [1e3 * start.elapsed_time(end) for start, end in events]


def wall(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass
class Row:
    """One line of the table: times in microseconds, `rate` in GB/s or TFLOP/s."""

    operator: str
    shape: str
    dtype: str
    what: str
    ours: float | None = None
    torch: float | None = None
    rate: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.torch / self.ours if self.ours and self.torch else None


def measure(case: Case, clock: Clock) -> Iterator[Row]:
    """The rows of one case; with no times where the result is wrong."""
    dtype = str(case.dtype).removeprefix("torch.")
    args = case.make(clock.device, case.dtype)
    args = [a.requires_grad_() if a.is_floating_point() else a for a in args]
    with torch.no_grad():
        grad = torch.randn_like(case.theirs(*args))
    if problem := verify(case, args, grad):
        yield Row(case.op, case.shape, dtype, "", note=f"WRONG: {problem}")
        return
    plain = [a.detach() for a in args]
    ours, theirs = clock([lambda: case.ours(*plain), lambda: case.theirs(*plain)])
    yield Row(case.op, case.shape, dtype, "forward", ours, theirs, rate(case, ours, case.elements, case.flops))
    outputs = [function(*args) for function in (case.ours, case.theirs)]
    leaves = differentiable(args)
    backwards = [lambda y=y: torch.autograd.grad(y, leaves, grad, retain_graph=True) for y in outputs]
    ours, theirs = clock(backwards)
    yield Row(
        case.op, case.shape, dtype, "backward", ours, theirs, rate(case, ours, case.backward_elements, 2 * case.flops)
    )


def rate(case: Case, microseconds: float, elements: float, flops: float) -> str:
    """Least bytes moved, or flops, over our time."""
    if flops:
        return f"{flops / microseconds / 1e6:.1f} TFLOP/s"
    return f"{elements * case.dtype.itemsize / microseconds / 1e3:.0f} GB/s" if elements else ""


# --- rows that are not about one operator ---


def host_rows(device: torch.device) -> Iterator[Row]:
    """Host time of one small call: what a program of many small operators pays."""
    calls = 1000 if device.type == "cuda" else 200
    for gradient in (False, True):
        x = torch.randn(1024, device=device, requires_grad=gradient)
        times: list[list[float]] = [[], []]
        for _ in range(20):
            for function, found in zip((cupyops.relu, torch.relu), times):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                start = time.perf_counter()
                for _ in range(calls):
                    function(x)
                found.append(1e6 * (time.perf_counter() - start) / calls)
        what = "host, gradient" if gradient else "host, no gradient"
        yield Row("relu", "1024", "float32", what, *(median(t) for t in times))


def training_rows(device: torch.device, quick: bool) -> Iterator[Row]:
    """One training step of the network of examples/mnist_cnn.py, host and device together."""
    path = Path(__file__).resolve().parents[1] / "examples" / "mnist_cnn.py"
    spec = importlib.util.spec_from_file_location("mnist_cnn", path)
    assert spec is not None and spec.loader is not None
    example = sys.modules["mnist_cnn"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    steps, rounds = (20, 10) if device.type == "cuda" and not quick else (2, 3)
    for batch in (64, 1024) if device.type == "cuda" else (64,):
        images = torch.randn(batch, 1, 28, 28, device=device)
        labels = torch.randint(10, (batch,), device=device)
        runs = example.trainers(device, 0.01, 0.9, compare=True)
        for run in runs:
            run.step(images, labels)
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for run, found in zip(runs, times):
                start = time.perf_counter()
                for _ in range(steps):
                    run.step(images, labels)
                run.losses[-1].item()  # waits for the GPU
                found.append(1e6 * (time.perf_counter() - start) / steps)
                run.losses.clear()
        yield Row("SimpleCNN", f"batch {batch}", "float32", "training step", *(median(t) for t in times))


FIRST_CALL = """
import time, torch
import cupyops
x = torch.ones(1024, device="cuda")
torch.relu(x); torch.cuda.synchronize()
def first():
    start = time.perf_counter()
    cupyops.relu(x); torch.cuda.synchronize()
    return time.perf_counter() - start
import cupy.cuda
cupy.cuda.nvrtc.getVersion()
print(1e6 * first())
"""
IMPORT = """
import time, torch
start = time.perf_counter()
import cupyops
print(1e6 * (time.perf_counter() - start))
"""


def process_rows(device: torch.device) -> Iterator[Row]:
    """What a process pays once: in processes of their own, so that nothing is warm."""
    times = [child(IMPORT) for _ in range(3)]
    yield Row("import cupyops", "", "", "after import torch", median(times))
    if device.type == "cuda":
        with tempfile.TemporaryDirectory() as cache:
            cold = child(FIRST_CALL, CUPYOPS_CACHE_DIR=cache)
            yield Row(
                "relu", "1024", "float32", "first call, cold", cold, note="compile, load, launch; CuPy is imported"
            )
            cached = median(child(FIRST_CALL, CUPYOPS_CACHE_DIR=cache) for _ in range(3))
            yield Row("relu", "1024", "float32", "first call, cached", cached, note="from the disk cache")


def child(code: str, **environment: str) -> float:
    path = os.pathsep.join([str(Path(cupyops.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    found = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run([sys.executable, "-c", code], env=found, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.split()[-1])


# --- the report ---


def table(rows: Sequence[Row], title: str) -> Table:
    """Times in microseconds; a ratio over 1 means that ours is the faster."""
    made = Table("operator", "shape", "dtype", "", title=title)
    for column in ("ours (us)", "torch (us)", "torch / ours", "ours, rate"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("note")
    for row in rows:
        ratio = "" if row.ratio is None else f"[{'green' if row.ratio >= 1 else 'red'}]{row.ratio:.2f}[/]"
        times = ["" if t is None else f"{t:.1f}" for t in (row.ours, row.torch)]
        made.add_row(row.operator, row.shape, row.dtype, row.what, *times, ratio, row.rate, row.note)
    return made


def environment(device: torch.device) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cupyops": cupyops.__version__,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        "tf32": "off",
    }


def run_cases(chosen: Sequence[Case], clock: Clock) -> Iterator[Row]:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=f"{case.op} {case.shape}")
            try:
                yield from measure(case, clock)
            except (cupyops.CupyopsError, RuntimeError) as error:
                dtype = str(case.dtype).removeprefix("torch.")
                yield Row(case.op, case.shape, dtype, "", note=f"FAILED: {str(error).splitlines()[0]}")
            gc.collect()
            if clock.gpu:
                torch.cuda.empty_cache()
            progress.advance(task)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    ops: Annotated[str, typer.Option(help="Operators, with commas between them; all if left out.")] = "",
    dtype: Annotated[str, typer.Option(help="One dtype for every case, such as float16.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows there.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
) -> None:
    """Compare, print, write."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    names = [name.strip() for name in ops.split(",") if name.strip()]
    every = cases(small=quick or where.type == "cpu")
    if unknown := set(names) - {case.op for case in every}:
        known = ", ".join(dict.fromkeys(case.op for case in every))
        raise typer.BadParameter(f"no operator {', '.join(sorted(unknown))}; there are {known}", param_hint="--ops")
    wanted = getattr(torch, dtype, None) if dtype else None
    if dtype and wanted not in (torch.float16, BF16, FP32, torch.float64):
        raise typer.BadParameter(f"{dtype!r} is not float16, bfloat16, float32 or float64", param_hint="--dtype")
    chosen = [case for case in every if not names or case.op in names]
    if wanted is not None:
        chosen = [Case(**{**vars(case), "dtype": wanted}) for case in chosen]
    clock = Clock(where, 0.05 if quick else 0.2)
    rows = list(run_cases(chosen, clock))
    if not names:
        for more in (host_rows(where), training_rows(where, quick), process_rows(where)):
            rows += more
    facts = environment(where)
    console.print(table(rows, ", ".join(f"{name} {value}" for name, value in facts.items())))
    if where.type == "cpu":
        console.print("No GPU in use: both columns are PyTorch, ours with the call of the operator around it.")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        content = {"environment": facts, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if any(row.note.startswith(("WRONG", "FAILED")) for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
