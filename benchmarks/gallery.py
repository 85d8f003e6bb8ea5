"""The operators of examples/gallery beside plain PyTorch, which is their reference on the same device.

    python benchmarks/gallery.py --csv benchmarks/results/h100_gallery.csv     on a GPU
    python benchmarks/gallery.py --dry-run                                      small sizes, in the simulator

Every result, and every gradient, is compared before it is timed. A time is the median, between two events of CUDA.
"""

from __future__ import annotations

import csv
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import cupyops

GALLERY = Path(__file__).resolve().parents[1] / "examples" / "gallery"
FEWEST, LONGEST = 5, 1.0  # runs of a function, and seconds for all of them


@dataclass
class Case:
    """A call: what it is, ours and theirs, and the tensors whose gradients are wanted."""

    name: str
    problem: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    leaves: tuple[Tensor, ...] = ()
    agree: Callable[[Any, Any], bool] | None = None  # where equal up to rounding is not the question


@dataclass
class Result:
    """One line of the table, in microseconds."""

    operator: str
    problem: str
    direction: str
    cupyops_us: float
    pytorch_us: float
    ratio: float


def module(name: str) -> Any:
    """A program of the gallery as a module."""
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", GALLERY / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(found, "main"):
        spec.loader.exec_module(found)
    return found


def both(name: str, problem: str, *args: Any, agree: Callable[[Any, Any], bool] | None = None) -> Case:
    """The operator of a program, and its reference, on the same arguments."""
    operator = getattr(module(name), name)
    flat = [one for arg in args for one in (arg if isinstance(arg, list) else [arg])]
    leaves = tuple(one for one in flat if isinstance(one, Tensor) and one.requires_grad)
    return Case(name, problem, lambda: operator(*args), lambda: operator.reference(*args), leaves, agree)


def cases(device: str, small: bool) -> Iterator[Case]:
    """Each operator on a problem of a real size, or on a small one."""

    def leaf(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return (low + (high - low) * torch.rand(shape, device=device)).requires_grad_()

    def pick(few: int, many: int) -> int:
        return few if small else many

    n = pick(500, 1 << 22)
    yield both("soup", f"8 tensors of {n}", [leaf(n, low=-1.0) for _ in range(8)], leaf(8))
    points, side = pick(300, 1 << 20), pick(9, 1024)
    at = leaf(points, 2, high=side - 1.0).detach()
    yield both("splat", f"{points} points, {side} x {side}", at, leaf(points), side, side)
    steps, channels = pick(9, 1024), pick(5, 4096)
    yield both("smooth", f"{steps} steps, {channels} channels", leaf(steps, channels, low=-1.0), leaf(channels))
    channels, states = pick(5, 1024), pick(3, 16)
    x, delta, a = leaf(steps, channels, low=-1.0), leaf(steps, channels), leaf(channels, states, low=-1.0, high=0.0)
    b, c = leaf(steps, states, low=-1.0), leaf(steps, states, low=-1.0)
    yield both("scan", f"{steps} steps, {channels} channels, {states} states", x, delta, a, b, c)
    side, radius = pick(12, 1024), pick(2, 4)
    yield both("bilateral", f"{side} x {side}, radius {radius}", leaf(side, side), radius, 2.0, 0.3)
    clouds, points, count = pick(2, 16), pick(150, 8192), pick(9, 1024)
    cloud = leaf(clouds, points, 3).detach()

    def as_far(ours: Tensor, theirs: Tensor) -> bool:
        return torch.allclose(_gap(cloud, ours), _gap(cloud, theirs), rtol=0.02)  # of two alike either may be taken

    yield both("farthest", f"{clouds} clouds of {points}, {count} taken", cloud, count, agree=as_far)
    side = pick(12, 512)
    yield both("label", f"{side} x {side}", torch.rand(side, side, device=device) < 0.55)
    points = pick(60, 8192)
    at, score = leaf(points, 2).detach(), leaf(points).detach()

    def nearly_all(ours: Tensor, theirs: Tensor) -> bool:
        return (
            len(set(ours.tolist()) ^ set(theirs.tolist())) <= points // 1000
        )  # where a distance is the radius, rounded

    yield both("suppress", f"{points} candidates", at, score, pick(20, 2) / 100, agree=nearly_all)
    side, steps = pick(9, 2048), pick(3, 100)
    plate, diffuse = leaf(side, side).detach(), module("diffuse").diffuse_
    yield Case(
        "diffuse",
        f"{side} x {side}, {steps} steps",
        lambda: diffuse(plate.clone(), steps),
        lambda: diffuse.reference(plate.clone(), steps),
    )
    width, height = pick(24, 1920), pick(12, 1080)
    scene = [((-0.7 + 0.1 * k, 0.2 - 0.05 * k, 0.0), 0.3) for k in range(pick(3, 32))]
    yield Case(
        "spheres",
        f"{len(scene)} spheres, {width} x {height}",
        lambda: module("spheres").render(scene, width, height, device),
        lambda: render(scene, width, height, device),
        agree=lambda ours, theirs: (ours - theirs).abs().gt(1e-3).float().mean().item() < 1e-3,  # edges, rounded
    )


def _gap(clouds: Tensor, taken: Tensor) -> Tensor:
    """How far a point of each cloud is, at most, from the nearest that was taken."""
    chosen = clouds.gather(1, taken.long()[..., None].expand(-1, -1, 3))
    return torch.stack([torch.cdist(one, some).amin(1).amax() for one, some in zip(clouds, chosen)])


def render(scene: list[tuple[tuple[float, ...], float]], width: int, height: int, device: str) -> Tensor:
    """What examples/gallery/spheres.py draws, in plain PyTorch: all rays, sphere after sphere."""
    y, x = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    ray = torch.stack(
        [
            (x + 0.5 - width / 2) / height / 2,
            (height / 2 - y - 0.5) / height,
            torch.full_like(x, 1.2, dtype=torch.float32),
        ],
        -1,
    )
    ray = torch.nn.functional.normalize(ray, dim=-1)
    nearest, light = torch.full((height, width), 1e30, device=device), torch.zeros(height, width, device=device)
    sun = torch.tensor([-0.5, 0.6, -0.62], device=device)
    for centre, radius in scene:
        c = torch.tensor(centre, device=device) - torch.tensor([0.0, 0.0, -4.0], device=device)
        along = ray @ c
        inside = radius * radius - (c @ c - along * along)
        t = along - inside.clamp(min=0).sqrt()
        met = (inside >= 0) & (t > 0) & (t < nearest)
        shade = (((t[..., None] * ray - c) / radius) @ sun).clamp(min=0.15)
        nearest, light = nearest.where(~met, t), light.where(~met, shade)
    return light


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def _backward(run: Callable[[], Any], leaves: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
    def step() -> list[Tensor]:
        return list(torch.autograd.grad(_tensors(run())[0].sum(), leaves))

    return step


def differ(case: Case) -> str:
    """What is not alike; nothing where all is."""
    ours, theirs = case.ours(), case.theirs()
    if case.agree is not None:
        return "" if case.agree(ours, theirs) else f"{case.name}: other results than PyTorch's"
    pairs = [("result", *pair) for pair in zip(_tensors(ours), _tensors(theirs), strict=True)]
    if case.leaves:
        gradients = (_backward(run, case.leaves)() for run in (case.ours, case.theirs))
        pairs += [("gradient", *pair) for pair in zip(*gradients, strict=True)]
    for what, a, b in pairs:
        error, most = (a.double() - b.double()).abs().max().item(), b.double().abs().max().item()
        if not error <= 2e-4 * most + 1e-6:
            return f"{case.name}: a {what} differs from PyTorch's by {error:.3g}, of {most:.3g}"
    return ""


def microseconds(run: Callable[[], Any]) -> float:
    """The median time of a function on the GPU, its launches included."""
    for _ in range(5):  # the fourth call is the first that replays a recorded plan
        run()
    times: list[float] = []
    while len(times) < FEWEST or (sum(times) < 1e6 * LONGEST and len(times) < 200):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def timed(case: Case) -> Iterator[Result]:
    """The case forward, and with its gradients where there are any."""
    ways = {"forward": (case.ours, case.theirs)}
    if case.leaves:
        ways["forward and backward"] = (_backward(case.ours, case.leaves), _backward(case.theirs, case.leaves))
    for direction, (ours, theirs) in ways.items():
        with torch.no_grad() if direction == "forward" else nullcontext():
            mine, other = microseconds(ours), microseconds(theirs)
        yield Result(case.name, case.problem, direction, mine, other, other / mine)


def keep(path: Path, gpu: str, results: list[Result]) -> None:
    """The figures as CSV, a line each, below what they were measured on."""
    about = {"gpu": gpu, "torch": torch.__version__, "python": sys.version.split()[0]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in about.items())
        table = csv.DictWriter(file, [one.name for one in fields(Result)], lineterminator="\n")
        table.writeheader()
        for one in results:
            table.writerow(
                {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in asdict(one).items()}
            )


def main(
    csv_file: Annotated[Path | None, typer.Option("--csv", help="write the figures here")] = None,
    dry_run: Annotated[bool, typer.Option(help="small sizes, in the simulator; nothing is timed")] = False,
) -> None:
    """Compare and measure each; the exit code is 1 where a result differs."""
    console, results, wrong = Console(), [], 0
    if not dry_run and not torch.cuda.is_available():
        console.print("no CUDA GPU; --dry-run compares small ones in the simulator")
        raise typer.Exit(2)
    torch.manual_seed(0)
    with cupyops.simulate() if dry_run else nullcontext():
        for case in cases("cpu" if dry_run else "cuda", dry_run):
            said = differ(case)
            wrong += bool(said)
            console.print(said or f"{case.name}: as PyTorch", highlight=False)
            if not said and not dry_run:
                results += timed(case)
    if results:
        table = Table("operator", "problem", "direction", "cupyops, us", "PyTorch, us", "times as fast")
        for one in results:
            figures = f"{one.cupyops_us:.1f}", f"{one.pytorch_us:.1f}", f"{one.ratio:.1f}"
            table.add_row(one.operator, one.problem, one.direction, *figures)
        console.print(table)
    if csv_file is not None and results:
        keep(csv_file, torch.cuda.get_device_name(), results)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
