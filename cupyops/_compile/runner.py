"""Runners of AOTAutograd's graphs: programs on a GPU or in the simulator, PyTorch elsewhere and where there is none."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from .. import _simulate
from .._kernel.kernel import executors
from .._kernel.launch import faults
from .._util import observed, settings, torch_private, tracing
from . import debug
from .cudagraphs import Facts
from .lowering import Unsupported, device_of
from .program import Program
from .sizes import Sizes, Symbols

log = logging.getLogger("cupyops.compile")
output_code = torch_private.artifact_logger("output_code")  # TORCH_LOGS="output_code"

Kind = Literal["forward", "backward", "inference"]
MOST_KEPT = 64
MOST_PROGRAMS = 64  # of a graph
AT_ONCE = 8  # programs of a graph that are made at the first call that needs one
MOST_KNOWN = 4096  # values of symbols of which a graph remembers the program, or that there is none yet
REPORT = (
    "CUPYOPS_STRICT=1 raises it as an error; please report that traceback, with the graph, which TORCH_LOGS=aot_graphs "
    "prints"
)

programs: list[Program] = []  # of this process, newest last
listeners: list[Callable[[Runner], None]] = []  # are told of each graph


class Runner:
    """Runs a graph, called with the list of its inputs, which it empties.

    Attributes:
        kind: "forward", "backward", or "inference" of a graph without gradient.
        nodes: number of the graph's nodes.
        programs: each for the sizes that it `serves`; of a graph without symbols there is one.
        reason: why PyTorch runs the graph, if it does.
        facts: what CUDA graphs need to know of the graph, where there are any.
    """

    def __init__(self, graph: GraphModule, kind: Kind, *, exact: bool) -> None:
        self.graph, self.kind, self.exact = graph, kind, exact
        self.device, self.nodes = device_of(graph), len(graph.graph.nodes)
        self.symbols = Symbols(graph)
        self.programs: list[Program] = []
        self.facts: Facts | None = None
        self.reason = self._unfit()
        self._begin()

    def _begin(self) -> None:
        self.only: Program | None = None  # of a graph without symbols on a GPU
        self._known: dict[tuple[Any, ...], Program] = {}
        self._seen: set[tuple[Any, ...]] = set()  # values without a program
        self._preparing = threading.RLock()
        self._boxed_call = True
        if self.reason is not None:
            log.info("PyTorch runs %s: %s", self, self.reason)
        for listen in listeners:
            listen(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("kind", "exact", "device", "nodes", "symbols", "programs", "reason", "facts")
        return {name: vars(self)[name] for name in kept}

    def begin_again(self, load: Callable[[], GraphModule]) -> None:
        """Prepare an unpickled runner for calls. `load` gives the graph, where a call needs more than the kept programs."""
        self._load = load
        for program in self.programs:
            program.origin = functools.partial(self._origin, program)
            self._enter(program)
        self._begin()

    def _origin(self, program: Program) -> tuple[GraphModule, Sizes]:
        return self.graph, Sizes(self.symbols, program.values, constant=program.constant)

    @functools.cached_property
    def graph(self) -> GraphModule:
        """The graph."""
        return self._load()

    def __str__(self) -> str:
        return f"a {self.kind} graph of {self.nodes} nodes"

    def _unfit(self) -> str | None:
        """Return why no program can run the graph, whatever its calls, or None."""
        if self.device.type not in ("cpu", "cuda"):
            return f"its tensors are on {self.device}, kernels run on CUDA devices"
        for node in self.graph.graph.nodes:
            if getattr(node.target, "namespace", "") == "streams":
                return f"{node.target} is called in it: its calls run on several streams"
            if node.target is torch.ops.aten._unique.default and isinstance(node.meta["val"][0].shape[0], int):
                # its FakeTensor is made by a call with zeros, in some versions of PyTorch
                return f"{node.target} is called in it, and PyTorch's trace has a size of its own for the result"
        return None

    # -- programs ------------------------------------------------------------------------------------------------------

    def prepare_early(self) -> None:
        """Make the program of the call that the graph was made for while PyTorch compiles, on a GPU or if simulated."""
        values, is_cuda = self.symbols.hinted(), self.device.type == "cuda"
        if (is_cuda or _simulate.simulating()) and self.reason is None and None not in values:
            program = self.prepare(values)
            self.only = program if is_cuda and not values else None

    def prepare(self, values: tuple[Any, ...]) -> Program | None:
        """Make the program for values and compile its kernels; where that fails, PyTorch runs the graph from now on."""
        program = self.make(values)
        arch = self._arch()
        if program is None or arch is None:
            return program
        try:
            program.compile(arch)
        except Exception as error:
            self._fail(error)
            return None
        return program

    def make(self, values: tuple[Any, ...]) -> Program | None:
        """The program for values of the symbols, kept for calls that it serves; None where PyTorch runs the graph."""
        with self._preparing:
            found = self._served(values)
            if found is not None or self.reason is not None:
                return found
            try:
                program = self._made(values)
            except Unsupported as reason:
                self.reason = str(reason)
                log.info("PyTorch runs %s: %s", self, reason)
                return None
            except Exception as error:
                self._fail(error)
                return None
            self.programs.append(program)
            self._known[values] = program
        self._enter(program)
        return program

    def _enter(self, program: Program) -> None:
        programs.append(program)
        del programs[:-MOST_KEPT]
        log.info("%s: %s", self, summary(program))
        output_code.debug("%s", program.text())

    def _made(self, values: tuple[Any, ...]) -> Program:
        """A program with sizes as numbers of its kernels; where that cannot be, with the values of this call in them."""
        try:
            return Program(self.graph, Sizes(self.symbols, values), exact=self.exact)
        except Unsupported:
            raise
        except Exception as error:
            if not self.symbols.places:
                raise
            log.info("%s gets a program for the sizes %s alone: %s", self, values, error, exc_info=error)
            return Program(self.graph, Sizes(self.symbols, values, constant=True), exact=self.exact)

    def _served(self, values: tuple[Any, ...]) -> Program | None:
        """The program that serves a call with these values of the symbols, if there is one."""
        program = next((one for one in self.programs if one.serves(*values)), None)
        if program is not None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[values] = program
        return program

    def _arch(self) -> str | None:
        """Architecture that kernels are compiled for; None where none run."""
        if self.device.type == "cuda" and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(self.device)
            return f"sm_{major}{minor}"
        return getattr(executors.get(self.device.type), "arch", None)

    def _fail(self, error: Exception) -> None:
        if settings.STRICT.read(default=False):
            raise error
        if self.reason is not None:
            return
        self.reason = ". ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])[:1000]
        log.info("PyTorch runs %s: %s", self, self.reason, exc_info=error)
        warnings.warn(
            f"backend cupyops: PyTorch runs {self}, which is right but slow: {self.reason}. {REPORT}", stacklevel=2
        )

    # -- calls ---------------------------------------------------------------------------------------------------------

    def __call__(self, args: list[Any]) -> Any:
        program = self.only
        if program is None:
            program = self._program(args)
        if observed.watching or faults.debug:
            return self._looked_at(program, args)
        return self._by_pytorch(args) if program is None else program.run(args)

    def _program(self, args: list[Any]) -> Program | None:
        if self.reason is not None or (self.device.type == "cpu" and not _simulate.simulating()):
            return None
        values = self.symbols.values(args)
        program = self._known.get(values)
        if program is None:
            with self._preparing:
                program = self._served(values)
            if program is None and self._is_worth_it(values):
                program = self.prepare(values)
        return program

    def _is_worth_it(self, values: tuple[Any, ...]) -> bool:
        """Return True if values get a program of their own: the first at once, later ones when they come again."""
        with self._preparing:
            if len(self.programs) < AT_ONCE or values in self._seen:
                return len(self.programs) < MOST_PROGRAMS
            if len(self._seen) >= MOST_KNOWN:
                self._seen.clear()
            self._seen.add(values)
            return False

    def _looked_at(self, program: Program | None, args: list[Any]) -> Any:
        """A call inside `cupyops.trace()`, or with `CUPYOPS_DEBUG=1`."""
        if program is None:
            alone = self.device.type == "cpu" and not _simulate.simulating()
            reason = self.reason or ("tensors on cpu" if alone else "sizes that were not called often enough yet")
            with self._traced("reference", reason):
                return self._by_pytorch(args)
        with self._traced("kernel", _left(program)):
            if faults.debug and not _is_capturing(self.device):
                return debug.compared(str(self), self.graph, program, args)
            return program.run(args)

    def _traced(self, route: str, note: str) -> AbstractContextManager[Any]:
        if tracing.active is None:
            return nullcontext()
        return tracing.operator(f"torch.compile: {self.kind}", route, note=note)

    def _by_pytorch(self, args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return self.graph(*given)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _left(program: Program) -> str:
    """The calls that stay PyTorch's, in words."""
    counts = Counter(name for name, _ in program.left)
    named = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts.most_common())
    return f"by PyTorch: {named}" if named else ""


def summary(program: Program) -> str:
    """Summarise a program in one line."""
    distinct = len({id(kernel) for kernel in program.kernels})
    text = f"{len(program.kernels)} kernels, {distinct} of them distinct"
    left = _left(program)
    where = f"where {' and '.join(program.conditions)}" if program.conditions else ""
    return "; ".join(filter(None, (text, left, where)))
