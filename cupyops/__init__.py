"""cupyops: a .cu file becomes a differentiable PyTorch operator, with pip alone."""

import importlib
from typing import TYPE_CHECKING, Any

from . import nn, optim
from .arrays import vjp
from .autotune import autotune
from .derivation.plans import off_if_asked, plans
from .elementwise import elementwise
from .errors import (
    CompileError,
    CupyopsError,
    InputError,
    LaunchError,
    MissingDependencyError,
    SimulatorError,
    SourceError,
)
from .graph import Graphed, graph
from .kernel import Kernel, ceil_div
from .layout import aligned, alignment
from .magic import load_ipython_extension, unload_ipython_extension
from .nn.swap import swap
from .operator import Operator, operator, operators
from .ops import *  # noqa: F403 - the one list of operators is ops/__init__.py
from .reduction import reduction
from .simulation import Simulation, simulate, simulate_if_asked, simulating
from .tracing import Trace, trace
from .warmup import Warmup, warmup

if TYPE_CHECKING:
    from . import testing as testing

__version__ = "0.1.0"

simulate_if_asked()
off_if_asked()


def __getattr__(name: str) -> Any:
    """`cupyops.testing` when it is first asked for: who only computes does not wait for it."""
    if name == "testing":
        return importlib.import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
