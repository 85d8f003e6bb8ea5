"""Cases to measure, as files of `benchmarks/` declare them."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError

SMALL = 1e6  # bytes or flops that a CPU, or the simulator, may be asked for
UNITS = ("GB/s", "TFLOP/s", "us")
_PACKAGE = Path(__file__).resolve().parents[1]  # cupyops/


@dataclass(frozen=True)
class Case:
    """One row: an operator on arguments of one size and dtype, beside what else computes the same.

    Attributes:
        op: the operator's name.
        size: the size, as the table shows it.
        dtype: of the arguments, and as the table shows it.
        make: (device, dtype) -> the arguments of the callables. Floating tensors that require grad get gradients.
        ours: the call that is measured.
        eager: the same by PyTorch, which torch.compile compiles and float64 tells the truth about.
        liger: the same by Liger, or another peer.
        others: further peers, by name.
        forward_bytes, backward_bytes: the least that must be read and written, for GB/s.
        forward_flops, backward_flops: for TFLOP/s.
        unit: "GB/s", "TFLOP/s" or "us"; by default what bytes or flops make it.
        want: the figures to reach, forward and backward, in `unit`; None for none.
        lost: why `want` is not reached, which the report says; by default what the head of the operator's .cu file has after
            "Lost:".
        together: forward and backward are one figure, of which `want` has one.
        compiled: torch.compile is a peer too.
        same: all give the same numbers, which are compared first; not so for random ones and for optimizers' steps.
        wall: the host's time counts too: call after call, without a wait between them.
        small: the same on a few numbers, for --dry-run; or a function that makes it; or None.
        beside: a case of a rounder size, to whose rate this one's is compared; of it ours alone is measured.

    Raises:
        InputError: a unit that there is not.

    Example:
        >>> from cupyops.bench import Case
        >>> def make(device, dtype):
        ...     return (torch.randn(1 << 20, device=device, dtype=dtype, requires_grad=True),)
        >>> case = Case("relu", "2^20", torch.float32, make, cupyops.relu, torch.relu, forward_bytes=8 << 20)
        >>> case.unit
        'GB/s'
    """

    op: str
    size: str
    dtype: torch.dtype
    make: Callable[[Any, torch.dtype], tuple[Any, ...]]
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    liger: Callable[..., Any] | None = None
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    unit: str = ""
    want: tuple[float | None, ...] | float | None = None
    lost: str = ""
    together: bool = False
    compiled: bool = True
    same: bool = True
    wall: bool = False
    small: Case | Callable[[], Case] | None = None
    beside: Case | None = None

    def __post_init__(self) -> None:
        for name in ("forward_bytes", "backward_bytes", "forward_flops", "backward_flops"):
            object.__setattr__(self, name, float(getattr(self, name) or 0))
        derived = "TFLOP/s" if self.forward_flops else "GB/s" if self.forward_bytes else "us"
        object.__setattr__(self, "unit", self.unit or derived)
        if self.unit not in UNITS:
            raise InputError(f"{self}: unit is {self.unit!r}, expected one of {', '.join(UNITS)}")

    @property
    def dtype_name(self) -> str:
        """ "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def wanted(self, way: str) -> float | None:
        """The figure to reach, of "forward", "backward" or "together"."""
        wants = self.want if isinstance(self.want, tuple) else (self.want,)
        index = 1 if way == "backward" else 0
        return wants[index] if index < len(wants) else None

    def work(self, way: str) -> tuple[float, float]:
        """(bytes, flops)."""
        forward, backward = (self.forward_bytes, self.forward_flops), (self.backward_bytes, self.backward_flops)
        if way == "together":
            return forward[0] + backward[0], forward[1] + backward[1]
        return forward if way == "forward" else backward

    def peers(self) -> dict[str, Callable[..., Any]]:
        """Functions that the case is compared with, but for torch.compile's."""
        found = {"eager": self.eager, **self.others}
        return found if self.liger is None else {**found, "liger": self.liger}

    def twin(self) -> Case | None:
        """Return the case in sizes small enough for a CPU: `small`, or the case itself if it moves little; else None."""
        if self.small is not None:
            return self.small if isinstance(self.small, Case) else self.small()
        work = max(*self.work("forward"), *self.work("backward"))
        return self if 0 < work <= SMALL else None

    def __str__(self) -> str:
        return f"{self.op} {self.size} {self.dtype_name}"


def declared(paths: Iterable[Path], only: str = "") -> list[Case]:
    """The cases of files, in order; those in whose name and size `only`, a regular expression, is found."""
    try:
        wanted = re.compile(only)
    except re.error as error:
        raise InputError(f"{only!r} is no regular expression: {error}; see the module re of Python") from None
    return [case for path in paths for case in _cases(path) if wanted.search(str(case))]


def shipped() -> Path:
    """The declarations of the built-in operators: inside an installed package, beside it in a source tree."""
    inside = _PACKAGE / "_benchmarks"
    return inside if inside.is_dir() else _PACKAGE.parent / "benchmarks"


def figures_file(path: Path) -> Path:
    """A file of figures; for a name without a folder that is not here, the file of cupyops's own results.

    Raises:
        InputError: there is no such file.
    """
    results = shipped() / "results"
    own = results / path.name
    if path.is_file():
        return path
    if path.parent == Path() and own.is_file():
        return own
    names = ", ".join(sorted(one.name for one in results.glob("*.csv")))
    raise InputError(f"there is no file {path}; give the path of what --csv wrote, or one of cupyops's own: {names}")


def here() -> Path:
    """Default folder of declarations: `benchmarks` of the working folder, else the built-in operators'."""
    own = Path("benchmarks")
    return own if own.is_dir() else shipped()


def files(names: Iterable[str], folder: Path) -> list[Path]:
    """The files of declarations of operators, or given by path; all of `folder` where none is named.

    Raises:
        InputError: there is no such file.
    """
    if not folder.is_dir() and not all(name.endswith(".py") for name in names or [""]):
        raise InputError(
            f"there is no folder {folder} of declarations; name files bench_OP.py, or a folder by --folder"
        )
    there = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    found = []
    for name in names:
        if (path := Path(name)).suffix == ".py":
            if not path.is_file():
                raise InputError(f"{name} is no file; give its path from {Path.cwd()}")
            found.append(path)
        elif name in there:
            found.append(there[name])
        else:
            raise InputError(f"{folder} declares no benchmark of {name!r}; it has {', '.join(there) or 'none at all'}")
    return found or list(there.values())


def _cases(path: Path) -> Iterator[Case]:
    module = module_of(path)
    if not callable(getattr(module, "cases", None)):
        raise InputError(f"{path} has no function cases(); write one that returns a list of cupyops.bench.Case")
    yield from module.cases()


def module_of(path: Path) -> Any:
    """Import a file of declarations. Raises `InputError`."""
    spec = importlib.util.spec_from_file_location(_name(path), path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported, expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where torch.compile looks for what the functions of a file name
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a file of the user's raises
        del sys.modules[spec.name]
        raise InputError(
            f"{path} cannot be imported: {type(error).__name__}: {error}; run it alone to see where"
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _name(path: Path) -> str:
    """Name of the module for a file, which no other file's module has; a file read again replaces its own."""
    stem = path.stem.replace(".", "_")
    names = (f"{stem}_{number}" if number else stem for number in itertools.count())
    return next(name for name in names if _where(name) in (None, str(path.resolve())))


def _where(name: str) -> str | None:
    """The file of the module of that name, or what else it is; None where there is none."""
    if name in sys.modules:
        return str(getattr(sys.modules[name], "__file__", None) or name)
    spec = importlib.util.find_spec(name)
    return None if spec is None else spec.origin or name
