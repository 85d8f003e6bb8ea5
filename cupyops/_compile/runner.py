"""Runners of AOTAutograd's graphs: programs on a GPU or in the simulator, PyTorch elsewhere and where there is none."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from .. import _simulate
from .._kernel.kernel import executors
from .._kernel.launch import faults
from .._util import observed, settings, tracing
from . import debug
from .lowering import Unsupported, device_of
from .program import Program
from .sizes import Sizes, Symbols

log = logging.getLogger("cupyops.compile")

Kind = Literal["forward", "backward", "inference"]
MOST_KEPT = 64
MOST_SIZES = 64  # for which a graph keeps programs: those that were called last
AT_ONCE = 8  # sizes that get a program at their first call
MOST_SEEN = 4096  # sizes without a program whose calls are counted
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
        programs: program by the values of the graph's symbolic sizes; of a graph without symbols there is one, by ().
        reason: why PyTorch runs the graph, if it does.
    """

    def __init__(self, graph: GraphModule, kind: Kind, *, exact: bool) -> None:
        self.graph, self.kind, self.exact = graph, kind, exact
        self.device = device_of(graph)
        self.symbols = Symbols(graph)
        self.programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
        self.only: Program | None = None  # of a graph without symbols on a GPU
        self.reason = self._unfit()
        self._calls: OrderedDict[tuple[Any, ...], int] = OrderedDict()  # of sizes without a program
        self._made = 0
        self._preparing = threading.RLock()
        self._boxed_call = True
        if self.reason is not None:
            log.info("PyTorch runs %s: %s", self, self.reason)
        for listen in listeners:
            listen(self)

    def __str__(self) -> str:
        return f"a {self.kind} graph of {len(self.graph.graph.nodes)} nodes"

    def _unfit(self) -> str | None:
        """Return why no program can run the graph, whatever its calls, or None."""
        if self.device.type not in ("cpu", "cuda"):
            return f"its tensors are on {self.device}, kernels run on CUDA devices"
        for node in self.graph.graph.nodes:
            if getattr(node.target, "namespace", "") == "streams":
                return f"{node.target} is called in it: its calls run on several streams"
        return None

    # -- programs ------------------------------------------------------------------------------------------------------

    def prepare_early(self) -> None:
        """Compile the kernels of a graph without symbols while PyTorch compiles, on a GPU."""
        if self.device.type == "cuda" and not self.symbols.places and self.reason is None:
            self.only = self.prepare(Sizes())

    def prepare(self, sizes: Sizes) -> Program | None:
        """Make the program for sizes and compile its kernels; where that fails, PyTorch runs the graph from now on."""
        program = self.make(sizes)
        arch = self._arch()
        if program is None or arch is None:
            return program
        try:
            program.compile(arch)
        except Exception as error:
            self._fail(error)
            return None
        return program

    def make(self, sizes: Sizes) -> Program | None:
        """The program for sizes, kept for calls with the same; None where PyTorch runs the graph."""
        with self._preparing:
            found = self.programs.get(sizes.key)
            if found is not None or self.reason is not None:
                return found
            try:
                program = Program(self.graph, sizes, exact=self.exact)
            except Unsupported as reason:
                self.reason = str(reason)
                log.info("PyTorch runs %s: %s", self, reason)
                return None
            except Exception as error:
                self._fail(error)
                return None
            self._made += 1
            self.programs[sizes.key] = program
            if len(self.programs) > MOST_SIZES:
                self.programs.popitem(last=False)
        programs.append(program)
        del programs[:-MOST_KEPT]
        log.info("%s: %s", self, summary(program))
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
        sizes = self.symbols.sizes(args)
        program = self.programs.get(sizes.key)
        if program is None:
            return self.prepare(sizes) if self._is_worth_it(sizes.key) else None
        if self.symbols.places:
            with self._preparing:
                if sizes.key in self.programs:
                    self.programs.move_to_end(sizes.key)
        return program

    def _is_worth_it(self, key: tuple[Any, ...]) -> bool:
        """Return True if sizes get a program: the more there have been, the more often they must have been called before.

        So sizes that change at each call do not compile at each call, and a cycle of more sizes than are kept ends soon.
        """
        with self._preparing:
            if self._made < AT_ONCE:
                return True
            count = self._calls.pop(key, 0)
            if count >= 2 ** (self._made // MOST_SIZES):
                return True
            self._calls[key] = count + 1
            if len(self._calls) > MOST_SEEN:
                self._calls.popitem(last=False)
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
    counts = Counter(str(node.target) for node, _ in program.lowering.left)
    named = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts.most_common())
    return f"by PyTorch: {named}" if named else ""


def summary(program: Program) -> str:
    """Summarise a program in one line."""
    distinct = len({id(kernel) for kernel in program.kernels})
    text = f"{len(program.kernels)} kernels, {distinct} of them distinct"
    left = _left(program)
    return f"{text}; {left}" if left else text
