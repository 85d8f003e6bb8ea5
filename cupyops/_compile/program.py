"""The program of a graph: what is called in its place, and how it came to be.

Pickled, a program is its texts: a later process that is given them needs neither lowering nor schedule to run them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.fx import GraphModule

from .._kernel.kernel import Kernel
from .._kernel.launch import faults, versions
from .._util import observed
from ..errors import CupyopsError, LaunchError
from .lowering import Lowering, name_of
from .schedule import Schedule
from .sizes import Sizes
from .writer import Machine, Run, Writer

log = logging.getLogger("cupyops.compile")

INCLUDE = '#include "compiled/elements.cuh"\n\n'
COMPILERS = 8  # threads that NVRTC runs in

# held while a program gets its function for the driver, which has one state for all threads
_binding = threading.Lock()


@functools.lru_cache(maxsize=4096)
def kernel_of(text: str, name: str, exact: bool) -> Kernel:
    """The kernel of a text: equal texts are one kernel, so equal layers of a model share theirs."""
    options = ("--fmad=false",) if exact else ()
    return Kernel(INCLUDE + text, name, strided=True, options=options)


class Program:
    """Program that replaces a graph.

    Attributes:
        texts: the forms of the function, without and with the driver; on devices without one there is the first alone.
        device: whose tensors the kernels compute.
        symbols: names of the graph's symbols.
        values: those of the symbols for which it was made.
        constant: True if it is for these values alone.
        conditions: Python expressions of the symbols that hold wherever it serves.
        left: (overload, why no kernel computes it) of each call that stays PyTorch's.
        origin: function that gives the graph and its sizes, which an unpickled program is told by its runner.
    """

    def __init__(self, graph: GraphModule, sizes: Sizes | None = None, *, exact: bool = False) -> None:
        self.exact, sizes = exact, sizes or Sizes()
        self.symbols, self.values, self.constant = [*map(str, sizes.places)], [*sizes.values.values()], sizes.constant
        self.origin: Callable[[], tuple[GraphModule, Sizes]] = lambda: (graph, sizes)
        self.device = self.lowering.device
        self.left = [(name_of(node.target), reason) for node, reason in self.lowering.left]
        forms = (False, True) if self.device.type in MACHINES else (False,)
        self.texts = [Writer(self.lowering, self.schedule, driver=driver).text for driver in forms]
        self.conditions = list(sizes.conditions.texts)  # which grow as the texts are written
        self._by_driver: Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"origin", "_made", "_in_full", "kernels", "serves"}
        return {name: one for name, one in vars(self).items() if name not in left_out} | {"_by_driver": None}

    @functools.cached_property
    def _made(self) -> tuple[Lowering, Schedule]:
        lowering = Lowering(*self.origin(), exact=self.exact)
        return lowering, Schedule(lowering)

    @property
    def lowering(self) -> Lowering:
        """The values of the graph."""
        return self._made[0]

    @property
    def schedule(self) -> Schedule:
        """The steps that became of them."""
        return self._made[1]

    @property
    def source(self) -> str:
        """The Python text of the function."""
        return self.texts[0].source

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """The kernel of each launch, in order."""
        return [self._kernel(one.text, one.name) for one in self.texts[0].launches.values()]

    @functools.cached_property
    def serves(self) -> Callable[..., bool]:
        """A function that tells if it is for calls with given values of the graph's symbols."""
        return eval(f"lambda {', '.join(self.symbols)}: {' and '.join(self.conditions) or 'True'}")  # type: ignore[no-any-return]

    @functools.cached_property
    def _in_full(self) -> Run:
        return self.texts[0].bound(self._kernel)

    def _kernel(self, text: str, name: str) -> Kernel:
        return kernel_of(text, name, self.exact)

    def run(self, args: list[Any]) -> Sequence[Any]:
        """The results of the graph, for a list of its inputs, which is emptied."""
        run = self._by_driver
        if run is None or observed.watching or faults.debug:
            return self._looked_at(args)
        try:
            return run(args)
        except Exception as error:
            raise self._explained(error) from None

    def _looked_at(self, args: list[Any]) -> Sequence[Any]:
        """A run whose launches are checked in full; on a GPU the first, after which they go to the driver."""
        with versions.in_role():  # AOTAutograd raises the versions of what is written, where autograd is to see it
            result = self._in_full(args)
        if len(self.texts) > 1 and not faults.debug:
            with _binding:
                if self._by_driver is None:
                    self._by_driver = self.texts[1].bound(self._kernel, MACHINES[self.device.type](self.device))
        return result

    def _explained(self, error: Exception) -> Exception:
        """Return the driver's error of a launch as ours, with advice on its cause."""
        if isinstance(error, CupyopsError) or type(error).__name__ not in ("CUDADriverError", "DriverError"):
            return error
        return LaunchError(
            f"a program of {len(self.kernels)} compiled kernels: {error}; run with CUPYOPS_DEBUG=1 to see which one"
            f"{faults.hint(error)}"
        )

    def text(self) -> str:
        """The kernels, each once, and the function that launches them: what `TORCH_LOGS=output_code` prints."""
        return "\n".join([*dict.fromkeys(one.text for one in self.texts[0].launches.values()), self.source])

    def compile(self, arch: str) -> None:
        """Make the function, and compile all its kernels for an architecture, several at a time.

        Raises:
            CompileError: NVRTC refuses one.
        """
        self._in_full  # noqa: B018
        distinct = list({id(k): k for k in self.kernels}.values())
        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(lambda kernel: kernel.instance().binary(arch), distinct))


# By type of device, how a program allocates and launches once its kernels are loaded; on others each launch is in full.
MACHINES: dict[str, type[Machine]] = {"cuda": Machine}
