"""cupyops: a .cu file becomes a differentiable PyTorch operator, with pip alone."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from ._util.garbage import collected_later as _collected_later
from ._util.near import meant as _meant
from ._util.progress import of_command as _of_command

with _collected_later(), _of_command("check", "importing PyTorch"):
    import torch

    from ._dispatch.core.forms import use_form
    from ._dispatch.core.gpu import never_slower
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
    from ._util import by_need as _by_need
    from ._util import torch_private as _torch_private
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

if TYPE_CHECKING:
    from . import nn as nn
    from . import ops as ops
    from . import optim as optim
    from . import testing as testing
    from ._compile.explanation import explain_compile as explain_compile
    from ._expression.linear_epilogue import linear_epilogue as linear_epilogue
    from .nn._swap import swap as swap
    from .ops import *  # noqa: F403 - the one list of operators is ops/__init__.py

__version__ = "0.1.0"

# Sizes that our checks compare while torch.jit.trace records make no difference to what is recorded. PyTorch hushes this
# warning of its own modules in the same way.
warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module=r"cupyops\.")

simulate_if_asked()
off_if_asked()

_PACKAGES = ("nn", "ops", "optim", "testing")


def _library() -> None:
    """The operators, and what is made of them, as names of this module."""
    with _collected_later():
        ops = importlib.import_module(".ops", __name__)
        importlib.import_module(".optim", __name__)
        swap = importlib.import_module(".nn._swap", __name__).swap
        linear_epilogue = importlib.import_module("._expression.linear_epilogue", __name__).linear_epilogue
        explain_compile = importlib.import_module("._compile.explanation", __name__).explain_compile
    globals().update({name: value for name, value in vars(ops).items() if not name.startswith("_")})
    globals().update(swap=swap, linear_epilogue=linear_epilogue, explain_compile=explain_compile)


_by_need.loaded_by(_library)
_torch_private.ask_library("cupyops", _by_need.load)


def __getattr__(name: str) -> Any:
    """Operators, modules and optimizers when one of them is first asked for: an import does not wait for them."""
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if not name.startswith("_") or name == "__all__":  # which `from cupyops import *` asks for
        _by_need.load()
        if name == "__all__":
            return [one for one in __dir__() if not one.startswith("_")]
        if name in globals():
            return globals()[name]
        modules = [one for one in vars(importlib.import_module(".nn", __name__)) if not one.startswith("_")]
        known = [f"nn.{name}"] if name in modules else [*globals(), *(f"nn.{one}" for one in modules)]
        hint = _meant(f"nn.{name}" if name in modules else name, (one for one in known if not one.startswith("_")))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    _by_need.load()
    return sorted(globals())
