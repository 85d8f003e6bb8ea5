"""cupyops: a .cu file becomes a differentiable PyTorch operator, with pip alone."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from ._util.garbage import collected_later as _collected_later

with _collected_later():
    from . import nn, optim
    from ._dispatch.forms import use_form
    from ._dispatch.gpu import never_slower
    from ._expression.elementwise import elementwise
    from ._expression.reduction import reduction
    from ._kernel.extensions import Extension, extension
    from ._kernel.graph import Graphed, graph
    from ._kernel.kernel import FLOATING, HALF, INTEGRAL, Kernel, ceil_div, grid_1d
    from ._kernel.launch.executors import address
    from ._kernel.launch.pointers import Pointers, pointers
    from ._kernel.launch.tensor_map import TensorMap, tensor_map
    from ._kernel.modules import Module, RawKernel, RawModule, load_inline, module
    from ._kernel.notebook import load_ipython_extension, unload_ipython_extension
    from ._operator.arrays import vjp
    from ._operator.define import operator
    from ._operator.derivation.plans import off_if_asked, plans
    from ._operator.derivation.registration import decompositions
    from ._operator.operator import Operator, operators
    from ._simulate import Simulation, simulate, simulate_if_asked, simulating
    from ._util.strides import aligned, alignment, alike, contiguous
    from ._util.tracing import Trace, trace
    from ._warmup.autotune import autotune
    from ._warmup.warmup import Warmup, warmup
    from .errors import (
        CompileError,
        CupyopsError,
        InputError,
        LaunchError,
        MissingDependencyError,
        SimulatorError,
        SourceError,
    )
    from .nn._swap import swap
    from .ops import *  # noqa: F403 - the one list of operators is ops/__init__.py

if TYPE_CHECKING:
    from . import testing as testing

__version__ = "0.1.0"

# Sizes that our checks compare while torch.jit.trace records make no difference to what is recorded. PyTorch hushes this
# warning of its own modules in the same way.
warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module=r"cupyops\.")

simulate_if_asked()
off_if_asked()


def __getattr__(name: str) -> Any:
    """`cupyops.testing` when it is first asked for: who only computes does not wait for it."""
    if name == "testing":
        return importlib.import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
