"""`graph`: a whole training step as a CUDA graph, launched at once."""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._util import arguments
from .._util.torch_private import tree_flatten, tree_map_only, tree_unflatten
from ..errors import InputError, LaunchError

_NOT_THE_CALLER_S = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def capturing() -> bool:
    """Return True if a CUDA graph is being captured; False under torch.compile, which could not trace the question."""
    return not is_dynamo_compiling() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass
class _Captured:
    """State of one signature: how often it has run, then the graph between its inputs and outputs."""

    runs: int = 0
    graph: Any = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: Any = None


class Graphed:
    """Step as returned by `cupyops.graph`: called as the original is."""

    def __init__(self, step: Callable[..., Any], warmup: int) -> None:
        if not callable(step):
            arguments.fail("step", step, "a function, or anything else that can be called")
        if not isinstance(warmup, int) or warmup < 1:
            arguments.fail("warmup", warmup, "an integer of at least 1: the first call makes what a graph cannot make")
        self.step, self.warmup = step, warmup
        self._captured: dict[Any, _Captured] = {}
        self._pool: Any = None
        self._streams: dict[torch.device, Any] = {}
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = _device(tensors)
        if device is None:
            return _detached(self.step(*args, **kwargs))
        key = _signature(leaves, spec, device)
        with torch.cuda.device(device):
            captured = self._captured.setdefault(key, _Captured())
            if captured.graph is None:
                if captured.runs < self.warmup:
                    outputs = self._eagerly(device, args, kwargs)
                    captured.runs += 1
                    return outputs
                self._capture(captured, device, leaves, spec)
            elif tensors:
                torch._foreach_copy_(captured.inputs, tensors)
            captured.graph.replay()
        return captured.outputs

    def _eagerly(self, device: torch.device, args: Any, kwargs: Any) -> Any:
        """A step of the caller's own, on the stream that the graph is to be captured on."""
        stream = self._stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = _detached(self.step(*args, **kwargs))
        torch.cuda.current_stream().wait_stream(stream)
        return outputs

    def _capture(self, captured: _Captured, device: torch.device, leaves: list[Any], spec: Any) -> None:
        """Record the step on inputs of its own, which hold what was given."""
        inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(inputs, spec)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(
            torch.cuda.current_stream()
        ):  # to be restored: a capture that fails leaves its own current
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream(device)):
                    outputs = _detached(self.step(*args, **kwargs))
            except Exception as error:
                _leave(self._stream(device))
                raise _explained(error, self.step) from None
        # A capture begins with writing, on its stream, where random numbers start: a replay writes there too, later.
        torch.cuda.current_stream().wait_stream(self._stream(device))
        captured.inputs = [one for one in inputs if isinstance(one, Tensor)]
        captured.graph, captured.outputs = graph, outputs

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _leave(stream: torch.cuda.Stream) -> None:
    """Take PyTorch's random numbers out of a failed capture, by one that succeeds: else the next capture would raise."""
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            pass


def graph(step: Callable[..., Any], *, warmup: int = 3) -> Graphed:
    """A training step, or any other function of tensors on a GPU, as a CUDA graph: launched at once, with no Python.

    The first `warmup` calls run `step` as it is, on a stream of their own: they are steps like any other. The next one
    captures it, and from then on a call copies the tensors that it is given to where the graph reads them, and launches
    the graph. Each signature has a graph of its own, in memory that all share: the shapes, strides and dtypes of the
    tensors, the values of all other arguments, and whether gradients and autocast are on. With tensors that are not on a
    GPU, or where there is none, every call runs `step` as it is.

    What Python does besides is done once, at the capture: a number that changes from step to step must be a tensor, as
    the learning rate of an optimizer, `lr=torch.tensor(1e-3, device="cuda")`; an optimizer that counts its steps must
    do that on the GPU (`capturable=True`); random numbers differ from replay to replay.

    Args:
        step: takes tensors and whatever can be hashed, also in lists, tuples and dicts; returns tensors, or lists, tuples
            or dicts of them, or None. It must not wait for the GPU, as `.item()` does.
        warmup: how many calls of each signature run before the capture; at least 1. With `DistributedDataParallel`, 11.

    Returns:
        Graphed: called as `step`. What it returns is detached, and is overwritten by the next call: `.clone()` what is to
        last.

    Raises:
        InputError: wrong arguments; when called: tensors on several GPUs, one that requires a gradient, or an argument
            that has no hash.
        LaunchError: when called: what `step` does cannot be captured.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = cupyops.optim.AdamW(model.parameters(), lr=0.1, capturable=torch.cuda.is_available())
        >>> def step(x, target):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), target)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> fast = cupyops.graph(step)
        >>> loss = fast(torch.ones(4, 3), torch.zeros(4, 1))
    """
    return Graphed(step, warmup)


def _device(tensors: list[Tensor]) -> torch.device | None:
    """The GPU of a call; None where the step is to run as it is."""
    for tensor in tensors:
        if tensor.requires_grad:
            arguments.fail("an argument", tensor, "one that requires no gradient: none flows out of a graph")
    if not torch.cuda.is_available() or any(not tensor.is_cuda for tensor in tensors):
        return None
    if torch.cuda.is_current_stream_capturing():
        return None  # part of the graph that is being captured
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise InputError(f"the tensors are on {', '.join(sorted(map(str, devices)))}, expected one GPU")
    return devices.pop() if devices else torch.device("cuda", torch.cuda.current_device())


def _signature(leaves: list[Any], spec: Any, device: torch.device) -> Any:
    """Key of the graph that serves a call: device, modes, and the metadata or values of its arguments."""
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    parts = [
        (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves
    ]
    key = (device, modes, str(spec), *parts)
    try:
        hash(key)
    except TypeError:
        wrong = next(leaf for leaf in leaves if not isinstance(leaf, Tensor) and type(leaf).__hash__ is None)
        arguments.fail("an argument", wrong, "a tensor, or something with a hash, by which graphs are told apart")
    return key


def _detached(outputs: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, outputs)


def _explained(error: BaseException, step: Any) -> BaseException:
    """The error of a capture, by the line of the step that began it; an error of the step's own as it is."""
    while error.__context__ is not None:
        error = error.__context__  # what went wrong first
    if "captur" not in str(error) or isinstance(error, LaunchError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    if any(Path(frame.filename).name == "grad_scaler.py" for frame in frames):
        return LaunchError(
            "the step cannot be captured in a CUDA graph: GradScaler.step() waits for the GPU, to see whether a gradient is "
            "infinite, unless the optimizer heeds that itself: take one of cupyops.optim, or fused=True of PyTorch's; or "
            "bfloat16, which needs no scaler"
        )
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_CALLER_S)]
    where = f"{own[-1].filename}:{own[-1].lineno}: `{own[-1].line}`" if own else repr(step)
    return LaunchError(
        f"the step cannot be captured in a CUDA graph: {where}: {str(error).splitlines()[0]}. A step must not wait for the "
        "GPU (.item(), .cpu(), print or a condition of a tensor), and must not do what the host alone does"
    )
