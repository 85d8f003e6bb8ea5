"""Graphs and their programs in AOTAutograd's cache on disk, by which later processes trace no model again.

To trace a model, derive its backward and divide the two takes most of a first step. AOTAutograd keeps what that gave under
a key of Dynamo's graph, the inputs, PyTorch's settings and the tag of `cache_tag`, in the folder that Inductor has for it.
An entry holds the two graphs and their programs, and the kernel cache their kernels. A program runs without its graph, which
is read where somebody asks for it: for sizes that no program serves, `explain_compile` or `CUPYOPS_DEBUG`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor import config as inductor
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PickleOptions
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._dispatch.core import forms
from .._dispatch.core.gpu import gpu
from .._kernel.launch.executors import executors
from .._operator.derivation import cache_tag
from .._util import observed, torch_private
from . import cudagraphs
from .compiler import Compiler
from .runner import Kind, Runner

log = logging.getLogger("cupyops.compile")

PACKAGE = __name__.partition(".")[0]
READ = ("val", "original_aten", "stack_trace")  # what is read of a node's meta


class UnderWay(threading.local):
    """The compiler of the graph of Dynamo that this thread compiles."""

    compiler: Compiler | None = None


_under_way = UnderWay()


class Saved(OutputCode):
    """A function that runs a graph of AOTAutograd, called with the list of its inputs; pickled, graph and programs alone."""

    def __init__(self, graph: GraphModule, kind: Kind, compiler: Compiler) -> None:
        super().__init__()
        self._boxed_call = True
        self.kind: Kind = kind
        graph.meta[cudagraphs.STATIONARY] = cudagraphs.stationary(graph)
        if kind == "backward":
            _may_run_again()
        self.graph = _pickled(graph)  # before the compiler changes it
        self.programs: bytes | None = None
        self.runner: Runner | None = compiler.runner(graph, kind)
        self.run: Callable[..., Any] | None = compiler.run(self.runner)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.run(inputs)  # type: ignore[misc]

    def prepare_for_serialization(self) -> None:
        """PyTorch calls it of a copy that it is about to pickle."""
        if self.graph is None:
            raise BypassAOTAutogradCache("its graph cannot be pickled")
        assert self.runner is not None
        if self.runner.programs and self.runner.reason is None:
            self.programs = _pickled(self.runner)
        self.run = self.runner = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """PyTorch calls it of what it has read from the cache."""
        compiler = _under_way.compiler
        assert self.graph is not None and compiler is not None
        mode = detect_fake_mode(example_inputs) or FakeTensorMode()

        def load() -> GraphModule:
            return _recompiled(_unpickled(self.graph, mode))

        self.runner = self._kept(mode)
        if self.runner is None:
            self.runner = compiler.runner(load(), self.kind)
        else:
            self.runner.begin_again(lambda: compiler.lowered(load())[0])
        self.run = compiler.run(self.runner)

    def _kept(self, mode: FakeTensorMode) -> Runner | None:
        """The runner with the programs that were kept; None where there are none, or none that can be read."""
        if self.programs is None:
            return None
        try:
            runner: Runner = _unpickled(self.programs, mode)
        except Exception as error:
            log.info("programs are made again: %s", error)
            return None
        for text in (text for program in runner.programs for text in program.texts):
            for constant in text.constants.values():
                _recompiled(constant)
        return runner

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Take nothing: there are no kernels of Triton."""


def compiling(compiler: Compiler, kind: Kind) -> Callable[..., Any]:
    """The function that compiles a kind of graphs, inside `kept` one of which AOTAutograd keeps what it gives."""
    if _under_way.compiler is None:
        return lambda graph, inputs: compiler.run(compiler.runner(graph, kind))
    return SerializableAOTDispatchCompiler(Saved, lambda graph, inputs: Saved(graph, kind, compiler))


@contextlib.contextmanager
def kept(graph: GraphModule, inputs: Sequence[Any], compiler: Compiler) -> Iterator[None]:
    """While a graph of Dynamo is compiled: have AOTAutograd keep what becomes of it, and take what it has kept."""
    is_on = config.enable_autograd_cache and not torch.compiler.config.force_disable_caches
    if not is_on or any(map(is_traceable_wrapper_subclass, inputs)):
        yield
        return
    cache_tag.put()
    before, _under_way.compiler = _under_way.compiler, compiler
    tag = f"{torch.compiler.config.cache_key_tag}|{compiler.options}|{_settings(inputs)}"
    ours = {name: tag for name in map(_function_of_ours, graph.graph.nodes) if name}
    known = inductor.unsafe_marked_cacheable_functions
    try:
        with (
            # the entry holds both graphs, so backward is compiled at once
            config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True),
            torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
            inductor.patch(unsafe_marked_cacheable_functions={**known, **ours}),
            torch_private.without_code_generators(),
        ):
            yield
    finally:
        _under_way.compiler = before


def _settings(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Settings and GPUs that graphs and programs depend on, and that PyTorch's own key does not hold."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    attention = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    gpus = {str(gpu(one.device)): None for one in inputs if isinstance(one, torch.Tensor)}
    arch = getattr(executors.get("cpu"), "arch", None)
    return *attention, cudnn.allow_tf32, observed.prefers_library, arch, forms.asked(), *gpus


def _function_of_ours(node: Node) -> str:
    """The name of a function of this package that a pattern has put into the graph; its code is in the tag."""
    module, name = getattr(node.target, "__module__", None) or "", getattr(node.target, "__name__", "")
    known = module.startswith(f"{PACKAGE}.") and getattr(sys.modules.get(module), name, None) is node.target
    return f"{module}.{name}" if known else ""


def _may_run_again() -> None:
    """Tell AOTAutograd that nothing which backward is given is lost: a program copies what it would overwrite if asked.

    Else backward with `retain_graph=True` would be an error: compiled before it is called, it cannot know of that.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _recompiled(value: Any) -> Any:
    """Return a value; of a graph, and of the graphs that it calls, the code is made again, which is not pickled."""
    for module in value.modules() if isinstance(value, GraphModule) else ():
        if isinstance(module, GraphModule):
            module.recompile()
    return value


def _pickled(one: GraphModule | Runner) -> bytes | None:
    try:
        with unset_fake_temporarily():
            return GraphPickler.dumps(one, PickleOptions(ops_filter=None, node_metadata_key_filter=READ.__contains__))
    except Exception as error:
        log.info("a %s is not kept for later processes: %s", type(one).__name__, error)
        return None


def _unpickled(pickled: bytes | None, mode: FakeTensorMode) -> Any:
    """Read what was pickled: its FakeTensors belong to the mode, and its other tensors are none whatever mode is on."""
    assert pickled is not None
    with unset_fake_temporarily():
        return GraphPickler.loads(pickled, mode)
