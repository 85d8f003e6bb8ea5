"""All that cupyops uses of PyTorch that is not public, each name with what it is for; no other file names any.

Where a name that recorded plans need is missing, `available` is False and every call is made the plain way; what has a
public twin falls back to it. `TRIED` are the versions that the tests have run with; of a newer one `doctor` says that
nobody has tried.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import forward_ad as forward_ad
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from torch.nn._reduction import legacy_get_string as legacy_reduction  # noqa: F401
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # noqa: F401
from torch.optim import optimizer as _optimizer
from torch.optim.optimizer import _use_grad_for_differentiable as use_grad_for_differentiable  # noqa: F401
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes  # noqa: F401
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

TRIED = ((2, 11), (2, 13))  # the oldest and the newest
RUN_BACKWARD = "_engine_run_backward"
LEVEL = "_current_level"  # of forward_ad: how many levels of forward mode are open, less one; read each time


def _found(*path: str) -> Any:
    value: Any = torch._C
    for name in path:
        value = getattr(value, name, None)
    return value


_TensorGuards = _found("_dynamo", "guards", "TensorGuards")
_empty_strided_cuda = _found("_dynamo", "guards", "_empty_strided_cuda")
_reinterpret_tensor = _found("_dynamo", "guards", "_reinterpret_tensor")
_modes: Any = getattr(torch.overrides, "_get_current_function_mode_stack", None)

function_mode_enabled: Callable[[], bool] = _found("_is_torch_function_mode_enabled")
"""Return True if a torch-function mode is open in this thread."""
scaled_mm: Callable[..., Tensor] = torch._scaled_mm
"""The product of float8 matrices, times their scales."""
functorch_active: Callable[[], bool] = _found("_are_functorch_transforms_active")
"""Return True if a transform of torch.func is under way in this thread."""
is_functorch_wrapped: Callable[[Tensor], bool] = _found("_functorch", "is_functorch_wrapped_tensor")
"""Return True if a tensor is one that a transform of torch.func has made."""
is_jit_tracing: Callable[[], bool] = _found("_is_tracing")
"""Return True if torch.jit.trace, or torch.onnx.export(dynamo=False), records in this thread."""
dispatch_modes: Callable[[], int] = _found("_len_torch_dispatch_stack")
"""Return the number of dispatch modes open in this thread."""
any_autocast: Callable[[], bool] = _found("_is_any_autocast_enabled") or (lambda: True)
"""Return True if autocast is on in this thread for some type of device, or may be."""
deterministic: Callable[[], bool] = _found("_get_deterministic_algorithms")
"""Return True if PyTorch is asked for deterministic algorithms."""
saved_tensors_hooks: Callable[[bool], Any] = _found("_autograd", "_top_saved_tensors_default_hooks")
"""The pair of hooks that tensors saved for backward go through, or None; True: also those that tracing ignores."""
keeps_graph: Callable[[], bool] = _found("_autograd", "_get_current_graph_task_keep_graph")
"""Return True if the backward under way keeps the graph, or none is under way."""
_will_execute: Callable[[Any], bool] | None = _found("_will_engine_execute_node")
without_function_modes: Any = _found("DisableTorchFunction")
"""A context manager, inside which no torch-function mode and no subclass sees anything."""
below_autograd: Any = _found("_AutoDispatchBelowAutograd")
"""A context manager, inside which the dispatcher goes past autograd."""
is_legacy_batched: Callable[[Tensor], bool] = _found("_functorch", "is_legacy_batchedtensor")
"""Return True if a gradient stands for a batch of them, as `is_grads_batched=True` has it."""
set_grad_enabled: Any = _found("_set_grad_enabled")
"""Function that `torch.no_grad` and its like call; modes see it."""
current_stream: Callable[[int], int] = _found("_cuda_getCurrentRawStream")
"""The handle of the current stream of a CUDA device; None in a PyTorch without CUDA."""
current_device: Callable[[], int] = _found("_cuda_getDevice")
"""The current CUDA device; None in a PyTorch without CUDA."""
increment_versions: Callable[[Iterable[Tensor]], None] = _found("_increment_version")
"""Raise the version of each tensor, as `torch.autograd.graph.increment_version`, without 0.15 us of Python."""
registered_operators: Callable[[], list[str]] = _found("_dispatch_get_all_op_names")
"""The qualified names of all operators of the dispatcher."""
has_kernel: Callable[[str, str], bool] = _found("_dispatch_has_kernel_for_dispatch_key")
"""Return True if an operator has a kernel of its own for a dispatch key."""

_is_functorch_wrapped: Any = _found("_functorch", "is_functorch_wrapped_tensor")
_get_dispatch_mode: Any = _found("_get_dispatch_mode")
_proxy_key: Any = _found("_TorchDispatchModeKey", "PROXY")
_no_torch_dispatch: Any = _found("_disabled_torch_dispatch_impl")
_no_say = (Tensor.__torch_function__.__func__, _found("_disabled_torch_function_impl"))  # type: ignore[attr-defined]

available = hasattr(forward_ad, LEVEL) and None not in (
    *(_TensorGuards, _modes, function_mode_enabled, functorch_active, dispatch_modes, deterministic),
    *(saved_tensors_hooks, keeps_graph, without_function_modes),
)


def will_use_gradient(node: Any) -> bool:
    """Return True if the backward under way will use a node's gradient: `torch.autograd.grad` may ask for others alone."""
    if node is None or _will_execute is None:
        return node is not None
    try:
        return _will_execute(node)
    except RuntimeError:  # it is one of the leaves that were asked for
        return True


def tensor_guard(examples: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function of as many tensors that tells if they have these tensors' metadata and are different objects."""
    guards = _TensorGuards(*examples, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check


def empty_strided(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]:
    """`empty_strided(size, strides, dtype)` on `device`, which for CUDA is to be the current one.

    Where PyTorch is asked for deterministic algorithms now, it fills what is allocated, as PyTorch does.
    """
    if device.type == "cuda" and _empty_strided_cuda is not None and not deterministic():
        found: Callable[..., Tensor] = _empty_strided_cuda
        return found
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def reinterpreted() -> Callable[[Tensor, Sequence[int], Sequence[int], int], Tensor]:
    """`view(x, size, stride, offset)`: memory of x, as a tensor that autograd does not know to be a view of it."""
    if _reinterpret_tensor is None:
        return lambda x, size, stride, offset: x.as_strided(size, stride, int(x.storage_offset()) + offset)
    found: Callable[..., Tensor] = _reinterpret_tensor
    return found


def artifact_logger(name: str) -> logging.Logger:
    """The logger of an artifact that `TORCH_LOGS` names, such as "output_code"."""
    return torch._logging.getArtifactLogger("torch.cupyops", name)  # its handlers are those of "torch"


def ask_when_missing(namespace: str, names: Sequence[str], register: Callable[[], Any]) -> None:
    """Have `register()` called when one of these names is asked of `torch.ops.<namespace>` and is not there."""
    if _Namespace is None:
        register()
        return
    found = getattr(torch.ops, namespace)
    if not isinstance(found, _Namespace):
        lazy = _Namespace(namespace)
        lazy.__dict__.update(found.__dict__)
        setattr(torch.ops, namespace, lazy)
        found = lazy
    found.__dict__.setdefault("_cupyops_waiting", {}).update(dict.fromkeys(names, register))


def ask_library(namespace: str, load: Callable[[], Any]) -> None:
    """Have `load()` called before the first name of `torch.ops.<namespace>` is looked for that is not there."""
    if _Namespace is None:
        load()
        return
    ask_when_missing(namespace, (), lambda: None)
    getattr(torch.ops, namespace).__dict__["_cupyops_library"] = load


def ask_for_family(namespace: str, prefix: str, register: Callable[[str], Any]) -> None:
    """Have `register(name)` called when a name of this prefix is asked of `torch.ops.<namespace>` and is not there."""
    ask_when_missing(namespace, (), lambda: None)
    getattr(torch.ops, namespace).__dict__.setdefault("_cupyops_families", {})[prefix] = register


def _namespace() -> Any:
    base: Any = getattr(torch._ops, "_OpNamespace", None)
    if base is None:
        return None

    class Namespace(base):  # type: ignore[misc, valid-type]
        """`torch.ops.<name>`, some of whose operators are registered when they are asked for."""

        def __getattr__(self, op_name: str) -> Any:
            if not op_name.startswith("_") and (load := self.__dict__.get("_cupyops_library")) is not None:
                load()
                self.__dict__.pop("_cupyops_library", None)  # not before: another thread is to wait for it
            if (register := self.__dict__.get("_cupyops_waiting", {}).pop(op_name, None)) is not None:
                register()
            for prefix, make in self.__dict__.get("_cupyops_families", {}).items():
                if op_name.startswith(prefix):
                    make(op_name)
                    if (register := self.__dict__.get("_cupyops_waiting", {}).pop(op_name, None)) is not None:
                        register()
            # to register it may have been to look for it: another look would make another op of the same name
            return self.__dict__[op_name] if op_name in self.__dict__ else super().__getattr__(op_name)

    Namespace.__module__ = base.__module__  # of which the names of operators are made
    return Namespace


_Namespace: Any = _namespace()


def opaque_modes() -> bool:
    """Return True if a torch-function mode is open that may change what functions give.

    One that says of itself that it is `transparent` does not, nor does the default device for functions that are told one.
    """
    return any(not (isinstance(mode, DeviceContext) or getattr(mode, "transparent", False)) for mode in _modes())


def exporting() -> bool:
    """Return True if torch.export traces. The public function is constantly True under torch.compile in PyTorch 2.11."""
    return torch.compiler._is_exporting_flag


def asks_function_modes() -> bool:
    """Return True if a torch-function mode is open that is neither PyTorch's own, as tracers have them, nor ours.

    Ours say of themselves that they are `ours`: they watch kernels, which are therefore to run.
    """
    found = (mode for mode in _modes() if not (getattr(mode, "transparent", False) or getattr(mode, "ours", False)))
    return any(not type(mode).__module__.startswith("torch.") for mode in found)


def has_torch_function(kind: type) -> bool:
    """Return True if a class sees PyTorch's functions of its objects, by a `__torch_function__` of its own."""
    found = getattr(kind, "__torch_function__", None)
    return found is not None and getattr(found, "__func__", found) not in _no_say


def has_torch_dispatch(kind: type) -> bool:
    """Return True if a class sees what PyTorch's functions do with its objects, by a `__torch_dispatch__` of its own."""
    found = getattr(kind, "__torch_dispatch__", None)
    return found is not None and found is not _no_torch_dispatch


def proxy_mode() -> bool:
    """Return True if make_fx, torch.export or torch.compile records in this thread what PyTorch's operators do."""
    asked = (_get_dispatch_mode, getattr(torch._ops, "_get_dispatch_mode_pre_dispatch", None))
    return any(mode is not None and mode(_proxy_key) is not None for mode in asked)


def recorded() -> bool:
    """Return True if PyTorch's dispatch modes record a graph of ops in this thread, or run one without values."""
    if proxy_mode():
        return True
    keys = _found("_TorchDispatchModeKey")
    return bool(dispatch_modes()) and any(_get_dispatch_mode(one) is not None for one in (keys.FAKE, keys.FUNCTIONAL))


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, a launch, which torch.compile calls between two graphs and does not look into; that is not imported."""
    skipped_by_dynamo(function)
    return function


def skipped_by_dynamo(function: Callable[..., Any]) -> None:
    """Dynamo leaves `function` alone, and all that it calls, without a wrapper that each call would pass."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = LAUNCH  # type: ignore[attr-defined]
    skip_code(function.__code__)


LAUNCH = "a launch; make it an operator to have it in a graph"


def skip_code(code: types.CodeType) -> None:
    """Dynamo does not trace calls of functions of this code, nor what they call."""
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))


def trace_without_our_modes() -> None:
    """Dynamo is tracing into a torch-function mode of ours: have it trace the frame anew, and leave such modes alone."""
    from torch._dynamo import exc
    from torch._dynamo.symbolic_convert import InstructionTranslator

    leave_our_modes_alone()
    InstructionTranslator.current_tx().speculation_log.clear()
    raise exc.RestartAnalysis(restart_reason="a mode of cupyops, which is not for tracing")


trace_without_our_modes._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run, and not traced


def leave_our_modes_alone() -> None:
    """Have Dynamo trace no torch-function mode of ours, in any frame from the next on.

    It inlines a mode with every function of the frame, which breaks graphs that are whole without it, and in some takes one
    property of a tensor for another. The frame's guards still compare which modes are open.
    """
    from torch._dynamo.variables import torch_function

    state: Any = torch_function.SymbolicTorchFunctionState
    if not hasattr(state, "_cupyops_begin"):
        state._cupyops_begin = state.__init__

        def begin(self: Any, py_stack: Iterable[Any], *args: Any, **kwargs: Any) -> None:
            stack = list(py_stack)
            self._cupyops_begin(stack, *args, **kwargs)
            traced = [variable for mode, variable in zip(stack, self.mode_stack) if not getattr(mode, "ours", False)]
            self.mode_stack = type(self.mode_stack)(traced)

        state.__init__ = begin


def open_flop_registries() -> list[dict[Any, Any]]:
    """The formulas of each FlopCounterMode that is open in this thread, which are those that were known when it was made."""
    counters: Iterator[Any] = (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack())
    return [counter.flop_registry for counter in counters if hasattr(counter, "flop_registry")]


def is_functional(tensor: Tensor) -> bool:
    """Return True if a tensor belongs to a graph that is being made functional, and has no memory of its own."""
    return torch._is_functional_tensor(tensor) or isinstance(tensor, FunctionalTensor)


def stands_for(tensor: Any) -> str:
    """Name the kind of PyTorch's stand-ins for tensors, without memory of their own, that a value is; else ""."""
    if isinstance(tensor, Proxy):
        return "a proxy of torch.fx"
    if not isinstance(tensor, Tensor):
        return ""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return "a tensor without memory, of torch.export, torch.compile or the device meta"
    if is_functional(tensor):
        return "a tensor of a graph that is being made functional"
    if _is_functorch_wrapped(tensor) or is_legacy_batched(tensor):
        return "a tensor of a torch.func transform, such as vmap or grad"
    return ""


def has_tangent(value: Any) -> bool:
    """Return True if a tensor has a derivative of its own, of forward-mode AD."""
    return forward_mode() and isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


@contextmanager
def above_autograd() -> Iterator[None]:
    """Let autograd record inside, in an op that the dispatcher has called below it."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
    ):
        yield


def forward_mode() -> bool:
    """Return True if a level of forward-mode AD is open."""
    return int(forward_ad._current_level) >= 0


def forget_signature(function: Any) -> None:
    """`function` has another code than before: torch.compile is not to bind arguments by what it has read of the old one."""
    functions = sys.modules.get("torch._dynamo.variables.functions")
    known = getattr(functions, "_spec_cache", None)
    if known is not None:
        known.pop(function, None)


def neg_view(x: Tensor) -> Tensor:
    """-x, as a view that has the negative bit."""
    return torch._neg_view(x)


def module_hooks() -> bool:
    """Return True if there are hooks on the calls, or on the backwards, of all modules."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return True if somebody reads the gradient of a tensor: by a hook of its own, or as its `.grad`."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


def pre_step_hooks() -> Any:
    """Hooks called before each step of any optimizer."""
    return _optimizer._global_optimizer_pre_hooks


def post_step_hooks() -> Any:
    """Hooks called after each step of any optimizer."""
    return _optimizer._global_optimizer_post_hooks


def is_forked_after_cuda() -> bool:
    """Return True if this process was forked from one that had used CUDA, which does not survive that."""
    return bool(torch.cuda._is_in_bad_fork())


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles."""
    torch.cuda._sleep(cycles)


def run_backward() -> Callable[..., Any]:
    """Return the function behind `backward()` and `torch.autograd.grad`: the attribute `RUN_BACKWARD` of torch.autograd."""
    found: Callable[..., Any] = getattr(torch.autograd, RUN_BACKWARD)
    return found


def version(tensor: Tensor) -> int:
    """Number of changes in place of a tensor; -1 of one that was made in inference mode, which counts none."""
    return -1 if tensor.is_inference() else tensor._version


def lookup_backend(name: str) -> Any:
    """A backend of torch.compile, by name."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def without_cse() -> AbstractContextManager[None]:
    """A context in which AOTAutograd merges no equal nodes: for that alone it imports all of Inductor."""
    from torch._functorch import config

    found: AbstractContextManager[None] = config.patch(cse=False)
    return found


@contextmanager
def without_code_generators() -> Iterator[None]:
    """Have the key of a compiled graph say nothing of Inductor's code generators: for that alone it imports them all."""
    from torch._inductor import codecache

    nothing: dict[str, Any] = {
        "init_backend_registration": lambda: None,
        "custom_backend_passes": {},
        "custom_backend_codegen_configs": {},
    }
    before = {name: getattr(codecache, name) for name in nothing if hasattr(codecache, name)}
    try:
        for name in before:
            setattr(codecache, name, nothing[name])
        yield
    finally:
        for name, one in before.items():
            setattr(codecache, name, one)
