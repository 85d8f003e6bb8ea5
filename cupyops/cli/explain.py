"""`python -m cupyops explain`: which kernels a call launches on a GPU, and why these. Needs no GPU and runs none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .. import ops
from .._dispatch.core.cards import CARDS, Card, card
from .._kernel.compile import cubin
from .._util.progress import Bar
from .._warmup.explanation import Direction, Planned, explain
from ..errors import CupyopsError, InputError, MissingDependencyError
from ..testing import Call
from . import outputs, sample, words
from .occupancy import Occupancy, occupancy
from .words import near


@dataclass(frozen=True)
class Request:
    """The command line."""

    operator: str
    shapes: Sequence[str] = ()
    args: Sequence[str] = ()
    dtype: str = "float32"
    strides: Sequence[str] = ()
    card: str | None = None
    gradient: bool = True
    compile: bool = True
    json: Path | None = None


@dataclass(frozen=True)
class Facts:
    """Facts about one launch."""

    kernel: str
    file: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    cluster: tuple[int, ...] | None
    overlap: bool
    bytes: int
    floor: float  # microseconds, at the bandwidth of the card
    registers: int | None = None
    stack: int | None = None
    occupancy: Occupancy | None = None


def run(request: Request) -> int:
    """The command; returns its exit code: 0, or 2 for bad arguments."""
    try:
        outputs.files({"--json": request.json})
        on = _card(request.card)
        function, call = _function(request.operator), _call(request)
        directions = explain(function, call.args, call.kwargs, on)
        facts = _facts(directions, on, request.compile)
        if request.json is not None:
            request.json.write_text(json.dumps(_as_json(directions, facts, on), indent=1) + "\n", encoding="utf-8")
    except (CupyopsError, OSError) as error:
        words.complain(error)
        return 2
    console = Console()
    console.print(Text(f"{request.operator}({_shown(call)}) on {on.name} ({on.arch})", "bold"), soft_wrap=True)
    for direction, of in zip(directions, facts):
        _show(console, direction, of, on)
    return 0


# --- the call ------------------------------------------------------------------------------------------------------


def _card(name: str | None) -> Card:
    """The card that is named; else that of this machine, where it is known, else an H100."""
    if name is not None:
        return card(name)
    if torch.cuda.is_available():
        there = torch.cuda.get_device_name(0)
        major, minor = torch.cuda.get_device_capability(0)
        named = [one for one in CARDS if re.search(rf"\b{re.escape(one.name)}\b", there)]
        return named[0] if named else card(f"sm_{major}{minor}")
    return card("H100")


def _function(name: str) -> Callable[..., Any]:
    if ":" in name:
        return sample.load(name)
    found = getattr(ops, name, None)
    if not callable(found):
        known = [one for one in vars(ops) if not one.startswith("_")]
        raise InputError(f"there is no operator {name!r}; give one of your own as MODULE:NAME{near(name, known)}")
    return found


def _call(request: Request) -> Call:
    """Make the call: tensors of the shapes, then the values of --arg or the operator's usual other arguments."""
    dtype = getattr(torch, request.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"--dtype is {request.dtype!r}, expected one such as bfloat16 or float32")
    tensors = [
        _tensor(shape, dtype, request.strides[index] if index < len(request.strides) else None, request.gradient)
        for index, shape in enumerate(request.shapes)
    ]
    if len(request.strides) > len(tensors):
        raise InputError("--strides: more than there are --shape, expected at most one for each")
    if request.args:
        given = sample.parsed(request.args, torch.Generator().manual_seed(0))
        return Call(*tensors, *given.args, **given.kwargs)
    if not tensors:
        raise InputError("give --shape 4096x1024, once for each tensor, or the arguments with --arg")
    made = _USUAL.get(request.operator.removeprefix("cupyops:"))
    return Call(*(made(*tensors) if made is not None and len(tensors) == 1 else tensors))


def _tensor(shape: str, dtype: torch.dtype, strides: str | None, gradient: bool) -> Tensor:
    sizes = _numbers("--shape", shape)
    if strides is None:
        made = torch.empty(sizes, dtype=dtype)
    else:
        steps = _numbers("--strides", strides)
        if len(steps) != len(sizes):
            raise InputError(f"--strides is {strides!r}, expected {len(sizes)} numbers, as --shape {shape} has")
        made = torch.empty_strided(sizes, steps, dtype=dtype)
    return made.requires_grad_(gradient and dtype.is_floating_point)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = re.split(r"[x,]", text)
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"{option} is {text!r}, expected sizes such as 4096x1024")
    return tuple(int(part) for part in parts)


def _like(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=x.dtype).requires_grad_(x.requires_grad)


def _positions(x: Tensor) -> Tensor:
    """Class targets for logits."""
    return torch.zeros((*x.shape[:1], *x.shape[2:]), dtype=torch.int64)


# Arguments of operators that take more than one tensor.
_USUAL: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "add": lambda x: (x, _like(x, *x.shape)),
    "add_rms_norm": lambda x: (x, _like(x, *x.shape), x.shape[-1:], _like(x, x.shape[-1])),
    "amax": lambda x: (x, -1),
    "avg_pool2d": lambda x: (x, 2),
    "batch_norm": lambda x: (
        *(x, torch.zeros(x.shape[1], dtype=x.dtype), torch.ones(x.shape[1], dtype=x.dtype)),
        *(_like(x, x.shape[1]), _like(x, x.shape[1]), True),
    ),
    "batch_norm_act": lambda x: (
        *(x, torch.zeros(x.shape[1], dtype=x.dtype), torch.ones(x.shape[1], dtype=x.dtype)),
        *(_like(x, x.shape[1]), _like(x, x.shape[1]), True, 0.1, 1e-5, "relu", _like(x, *x.shape)),
    ),
    "bias_gelu": lambda x: (x, _like(x, x.shape[-1])),
    "conv2d": lambda x: (x, _like(x, x.shape[1], x.shape[1], 3, 3), _like(x, x.shape[1]), 1, 1),
    "cross_entropy": lambda x: (x, _positions(x)),
    "embedding": lambda x: (torch.zeros(16384, dtype=torch.int64), x),
    "gated_linear": lambda x: (x, _like(x, x.shape[-1], x.shape[-1]), _like(x, x.shape[-1], x.shape[-1])),
    "geglu": lambda x: (x, _like(x, *x.shape)),
    "group_norm": lambda x: (x, math.gcd(x.shape[1], 32), _like(x, x.shape[1]), _like(x, x.shape[1])),
    "kl_div": lambda x: (x, _like(x, *x.shape), None, None, "batchmean"),
    "layer_norm": lambda x: (x, x.shape[-1:], _like(x, x.shape[-1]), _like(x, x.shape[-1])),
    "linear": lambda x: (x, _like(x, x.shape[-1], x.shape[-1]), _like(x, x.shape[-1])),
    "linear_act": lambda x: (x, _like(x, x.shape[-1], x.shape[-1]), _like(x, x.shape[-1])),
    "log_softmax": lambda x: (x, -1),
    "matmul": lambda x: (x, _like(x, *x.shape[:-2], x.shape[-1], x.shape[-1])),
    "max_pool2d": lambda x: (x, 2),
    "mean": lambda x: (x, -1),
    "nll_loss": lambda x: (x, _positions(x)),
    "rms_norm": lambda x: (x, x.shape[-1:], _like(x, x.shape[-1])),
    "scale_shift": lambda x: (x, _like(x, x.shape[-1]), _like(x, x.shape[-1])),
    "softmax": lambda x: (x, -1),
    "sum": lambda x: (x, -1),
    "swiglu": lambda x: (x, _like(x, *x.shape)),
    "var": lambda x: (x, -1),
}


def _shown(call: Call) -> str:
    def one(value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(tuple(value) if isinstance(value, torch.Size) else value)
        dense = "" if value.is_contiguous() else f" strides {'x'.join(map(str, value.stride()))}"
        return f"{'x'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}{dense}"

    return ", ".join([*map(one, call.args), *(f"{name}={one(value)}" for name, value in call.kwargs.items())])


def _microseconds(us: float) -> str:
    """No time is said to be none."""
    return f"{us:,.1f} us" if us >= 0.1 else "less than 0.1 us"


# --- what is known -------------------------------------------------------------------------------------------------


def _facts(directions: Sequence[Direction], on: Card, compiled: bool) -> list[list[Facts]]:
    """Registers and occupancy of each launch of each direction. Compiles missing kernels, unless told not to."""
    planned = [one for direction in directions for one in direction.launches]
    known: dict[Any, tuple[int, int, int] | None] = {}
    with Bar("compiling") as bar:
        for index, one in enumerate(planned):
            if compiled and one.instance not in known:
                known[one.instance] = _resources(one, on)
            bar.update(index + 1, len(planned))
    return [[_facts_of(one, on, known.get(one.instance)) for one in direction.launches] for direction in directions]


def _resources(planned: Planned, on: Card) -> tuple[int, int, int] | None:
    """(registers, stack, static shared memory); None where pyelftools is not installed."""
    binary = planned.instance.binary(on.arch)
    assert binary.path is not None
    try:
        found = cubin.resources(binary.path.read_bytes(), binary.symbol)
    except MissingDependencyError:
        return None
    return found.registers, found.stack, found.shared


def _facts_of(planned: Planned, on: Card, resources: tuple[int, int, int] | None) -> Facts:
    launch = planned.configuration
    registers, stack, static = resources or (None, None, 0)
    fits = None
    if registers is not None:
        fits = occupancy(on.arch, launch.threads, registers, launch.shared + static)
    return Facts(
        kernel=planned.instance.name,
        file=planned.instance.source.name,
        grid=launch.grid,
        block=launch.block,
        shared=launch.shared + static,
        cluster=launch.cluster,
        overlap=launch.overlap,
        bytes=planned.bytes,
        floor=planned.bytes / on.bandwidth / 1e3,
        registers=registers,
        stack=stack,
        occupancy=fits,
    )


# --- shown ---------------------------------------------------------------------------------------------------------


def _show(console: Console, direction: Direction, facts: Sequence[Facts], on: Card) -> None:
    console.rule(direction.name, align="left")
    for choice in direction.choices:
        chosen = Text(f"{choice.forms.family}: ") + Text(choice.chosen.name, "bold green")
        about = ": ".join(filter(None, (choice.chosen.summary, choice.chosen.measured)))
        console.print(chosen + Text(f"  {about}", "dim"), soft_wrap=True)
        for form, reason in choice.passed_over:
            console.print(Text(f"  not {form.name}: {reason}", "dim"), soft_wrap=True)
    for name in direction.references:
        console.print(Text(f"{name}: ") + Text("by PyTorch, through the reference", "bold green"), soft_wrap=True)
    for one in facts:
        console.print(Text(one.kernel, "bold") + Text(f"  {one.file}", "dim"), soft_wrap=True)
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, value in _rows(one, on):
            table.add_row(f"  {name}", value)
        console.print(table)


def _rows(one: Facts, on: Card) -> list[tuple[str, str]]:
    shape = f"grid {_dims(one.grid)}, block {_dims(one.block)}"
    shape += f", cluster {_dims(one.cluster)}" if one.cluster is not None else ""
    shape += ", may begin while the kernel before it ends" if one.overlap else ""
    rows = [("launch", shape), ("shared memory", f"{one.shared:,} bytes a block")]
    if one.registers is not None:
        spills = f"{one.stack:,} bytes of stack: spilled registers or local arrays" if one.stack else "no spills"
        rows.append(("registers", f"{one.registers} a thread, {spills}"))
    if one.occupancy is not None:
        limits = ", ".join(one.occupancy.limited_by)
        rows.append(
            (
                "occupancy",
                f"{one.occupancy.share:.0%}: {one.occupancy.blocks} blocks a multiprocessor, limited by {limits}",
            )
        )
    rows.append(
        (
            "moves at least",
            f"{one.bytes / 1e6:,.3f} MB: {_microseconds(one.floor)} at the {on.bandwidth:,} GB/s of {on.name}",
        )
    )
    return rows


def _dims(dims: tuple[int, ...] | None) -> str:
    shown = list(dims or ())
    while len(shown) > 1 and shown[-1] == 1:
        shown.pop()
    return " x ".join(f"{extent:,}" for extent in shown)


def _as_json(directions: Sequence[Direction], facts: Sequence[Sequence[Facts]], on: Card) -> dict[str, Any]:
    def launch(one: Facts) -> dict[str, Any]:
        held = None if one.occupancy is None else one.occupancy.share
        return {**{key: value for key, value in vars(one).items() if key != "occupancy"}, "occupancy": held}

    def forms(direction: Direction) -> list[dict[str, Any]]:
        return [
            {
                "family": choice.forms.family,
                "form": choice.chosen.name,
                "not": {form.name: reason for form, reason in choice.passed_over},
            }
            for choice in direction.choices
        ]

    return {
        "card": on.name,
        "arch": on.arch,
        **{
            direction.name: {
                "forms": forms(direction),
                "launches": [launch(one) for one in of],
                "references": direction.references,
            }
            for direction, of in zip(directions, facts)
        },
    }
