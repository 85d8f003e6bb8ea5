"""cupyops: a .cu file becomes a differentiable PyTorch operator, with pip alone."""

from . import nn, optim, testing
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

__version__ = "0.1.0"

simulate_if_asked()
off_if_asked()
