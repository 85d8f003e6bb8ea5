"""`python -m cupyops explain --model FILE:FUNCTION`: what `torch.compile(backend="cupyops")` makes of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .._compile.explanation import explain_compile
from ..errors import CupyopsError, InputError
from . import outputs, sample, words

_EXPECTED = (
    "expected it to return a model, or a function, and the arguments of a call: (model, args) or (model, args, kwargs)"
)


@dataclass(frozen=True)
class Request:
    """The command line."""

    model: str
    gradient: bool = True
    code: bool = False
    json: Path | None = None


def run(request: Request) -> int:
    """The command; returns its exit code: 0, or 2 for bad arguments."""
    try:
        outputs.files({"--json": request.json})
        function, args, kwargs = _call(request.model)
        with torch.set_grad_enabled(request.gradient):
            found = explain_compile(function, *args, **kwargs)
        if request.json is not None:
            request.json.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    except (CupyopsError, OSError) as error:
        words.complain(error)
        return 2
    console = Console()
    console.print(str(found), markup=False, highlight=False, soft_wrap=True)
    if request.code:
        for graph in found.graphs:
            console.rule(f"{graph.kind} graph")
            for text in (*dict.fromkeys(kernel.text for kernel in graph.kernels), graph.program):
                console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _call(path: str) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """(model, args, kwargs) of the function that the command line names."""
    made = sample.load(path)()
    if not isinstance(made, (tuple, list)) or not 2 <= len(made) <= 3:
        raise InputError(f"--model {path}: it returned {type(made).__name__}, {_EXPECTED}")
    function, args, kwargs = (*made, {})[:3]
    if not callable(function) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        kinds = ", ".join(type(one).__name__ for one in made)
        raise InputError(f"--model {path}: it returned ({kinds}), {_EXPECTED}")
    return function, args, kwargs
