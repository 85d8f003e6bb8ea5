"""Graphs in AOTAutograd's cache on disk, by which later processes trace no model again.

To trace a model, derive its backward and divide the two takes most of a first step. AOTAutograd keeps what that gave under
a key of Dynamo's graph, the inputs, PyTorch's settings and the tag of `cache_tag`, in the folder that Inductor has for it.
An entry holds the two graphs. Their programs are made again, which is quick, and their kernels come from the kernel cache.
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

from .._kernel.launch.executors import executors
from .._operator.derivation import cache_tag
from .._util import observed
from . import cudagraphs
from .runner import Kind

log = logging.getLogger("cupyops.compile")

Make = Callable[[GraphModule, Kind], Callable[..., Any]]

PACKAGE = __name__.partition(".")[0]
READ = ("val", "original_aten", "stack_trace")  # what is read of a node's meta


class UnderWay(threading.local):
    """The function that makes what runs a graph, while this thread compiles a graph of Dynamo."""

    make: Make | None = None


_under_way = UnderWay()


class Saved(OutputCode):
    """A function that runs a graph of AOTAutograd, called with the list of its inputs; pickled, it is the graph alone."""

    def __init__(self, graph: GraphModule, kind: Kind, make: Make) -> None:
        super().__init__()
        self._boxed_call = True
        self.kind: Kind = kind
        graph.meta[cudagraphs.STATIONARY] = cudagraphs.stationary(graph)
        if kind == "backward":
            _may_run_again()
        self.graph = _pickled(graph)  # before `make` changes it
        self.run: Callable[..., Any] | None = make(graph, kind)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.run(inputs)  # type: ignore[misc]

    def prepare_for_serialization(self) -> None:
        """PyTorch calls it of a copy that it is about to pickle."""
        if self.graph is None:
            raise BypassAOTAutogradCache("its graph cannot be pickled")
        self.run = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """PyTorch calls it of what it has read from the cache."""
        assert self.graph is not None and _under_way.make is not None
        mode = detect_fake_mode(example_inputs) or FakeTensorMode()
        graph = GraphPickler.loads(self.graph, mode)
        assert isinstance(graph, GraphModule)
        graph.recompile()
        self.run = _under_way.make(graph, self.kind)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Take nothing: there are no kernels of Triton."""


def compiler(make: Make, kind: Kind) -> Callable[..., Any]:
    """The compiler of a kind of graphs, inside `kept` in the form of which AOTAutograd keeps what it gives."""
    if _under_way.make is None:
        return lambda graph, inputs: make(graph, kind)
    return SerializableAOTDispatchCompiler(Saved, lambda graph, inputs: Saved(graph, kind, make))


@contextlib.contextmanager
def kept(graph: GraphModule, inputs: Sequence[Any], make: Make, options: object) -> Iterator[None]:
    """While a graph of Dynamo is compiled: have AOTAutograd keep the graphs, and make programs of those that it has kept."""
    is_on = config.enable_autograd_cache and not torch.compiler.config.force_disable_caches
    if not is_on or any(map(is_traceable_wrapper_subclass, inputs)):
        yield
        return
    cache_tag.put()
    before, _under_way.make = _under_way.make, make
    tag = f"{torch.compiler.config.cache_key_tag}|{options}|{_settings()}"
    ours = {name: tag for name in map(_function_of_ours, graph.graph.nodes) if name}
    known = inductor.unsafe_marked_cacheable_functions
    try:
        with (
            # the entry holds both graphs, so backward is compiled at once
            config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True),
            torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
            inductor.patch(unsafe_marked_cacheable_functions={**known, **ours}),
        ):
            yield
    finally:
        _under_way.make = before


def _settings() -> tuple[Any, ...]:
    """Settings that tracing reads and that PyTorch's own key does not hold."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    attention = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    return *attention, cudnn.allow_tf32, observed.prefers_library, getattr(executors.get("cpu"), "arch", None)


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


def _pickled(graph: GraphModule) -> bytes | None:
    try:
        with unset_fake_temporarily():
            return GraphPickler.dumps(graph, PickleOptions(ops_filter=None, node_metadata_key_filter=READ.__contains__))
    except Exception as error:
        log.info("a graph is not kept for later processes: %s", error)
        return None
