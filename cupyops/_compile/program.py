"""The program of a graph: what is called in its place, and how it came to be."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.fx import GraphModule

from .._kernel.kernel import Kernel
from .._kernel.launch import faults, versions
from .._util import observed, torch_private
from ..errors import CupyopsError, LaunchError
from .kernel_group import Group
from .lowering import Lowering
from .schedule import Schedule
from .sizes import Sizes
from .writer import BOUNDARY, Machine, Writer, aligned

log = logging.getLogger("cupyops.compile")
output_code = torch_private.artifact_logger("output_code")  # TORCH_LOGS="output_code"

INCLUDE = '#include "compiled/elements.cuh"\n\n'
COMPILERS = 8  # threads that NVRTC runs in


@functools.lru_cache(maxsize=4096)
def kernel_of(text: str, name: str, exact: bool) -> Kernel:
    """The kernel of a text: equal texts are one kernel, so equal layers of a model share theirs."""
    options = ("--fmad=false",) if exact else ()
    return Kernel(INCLUDE + text, name, strided=True, options=options)


class Program:
    """Program that replaces a graph.

    Attributes:
        source: the Python text of the function.
        serves: whether it is for calls with given values of the graph's symbols.
        kernels: the kernel of each launch, in order.
        lowering, schedule: how it came to be.
    """

    def __init__(self, graph: GraphModule, sizes: Sizes | None = None, *, exact: bool = False) -> None:
        self.lowering = Lowering(graph, sizes, exact=exact)
        self.schedule = Schedule(self.lowering)
        for name, one in self.lowering.constants.items():
            if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.data_ptr() & (BOUNDARY - 1):
                self.lowering.constants[name] = aligned(one)
        writer = self._writer()
        self._in_full = writer.run()
        self.source = writer.source
        self.kernels = [kernel for kernel, _ in writer.launches]
        self._by_driver: Callable[[list[Any]], Sequence[Any]] | None = None
        self.serves = self.lowering.sizes.serves()
        output_code.debug("%s", self.text())

    def _writer(self, machine: Machine | None = None) -> Writer:
        exact = self.lowering.exact
        return Writer(self.lowering, self.schedule, lambda text, name: kernel_of(text, name, exact), machine)

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
        machine = MACHINES.get(self.lowering.device.type)
        if self._by_driver is None and machine is not None and not faults.debug:
            self._by_driver = self._writer(machine(self.lowering.device)).run()
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
        kernels = [unit.kernel for unit in self.schedule.units if isinstance(unit, Group) and unit.kernel is not None]
        return "\n".join([*dict.fromkeys(kernel.text for kernel in kernels), self.source])

    def compile(self, arch: str) -> None:
        """Compile all kernels for an architecture, several at a time.

        Raises:
            CompileError: NVRTC refuses one.
        """
        distinct = list({id(k): k for k in self.kernels}.values())
        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(lambda kernel: kernel.instance().binary(arch), distinct))


# By type of device, how a program allocates and launches once its kernels are loaded; on others each launch is in full.
MACHINES: dict[str, type[Machine]] = {"cuda": Machine}
