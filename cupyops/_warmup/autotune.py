"""A launch in several configurations: the fastest is found at the first call on a GPU, and kept on the disk.

A choice is about speed alone: any of the configurations gives a right result, and where nothing can be timed the first does.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import statistics
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._kernel.compile import backend, cache
from .._util import observed
from .._util.by_name import ByName
from .._util.strides import is_dry
from ..errors import CompileError, InputError, LaunchError
from .reachable import kernels_of

_ROUNDS = 9  # the median of so many; configurations take turns, so that a change of clock meets all of them
_BATCH_MS = 0.2  # launches between two events take about so long
_MAX_BATCH = 100

_locks: dict[str, threading.Lock] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)


def autotune(
    function: Callable[..., Any] | None = None,
    *,
    configs: Mapping[str, Mapping[str, Any]],
    key: Callable[..., Hashable] | None = None,
    mutates: Iterable[str] = (),
) -> Any:
    """Make a function that launches kernels choose among named configurations; a decorator, or a call around the function.

    The function takes a configuration's values as keyword arguments; callers leave them out. The first call on a GPU for a
    `key` times every configuration with these very arguments and keeps the fastest: in this process, and in the kernel cache
    for the next ones, by GPU, NVRTC, kernels, configurations and key. Configurations that do not compile or launch there are
    left out. The first one runs, with nothing timed, on the CPU and in the simulator, in a dry run, during the capture of a
    CUDA graph where no choice has been made before, and under `torch.use_deterministic_algorithms(True)`.

    Args:
        configs: name -> keyword arguments of the function, the safe choice first.
        key: of the arguments, what the choice depends on: hashable, with a `repr` that says it all. Without one, the dtype
            and shape of each tensor.
        mutates: the parameters whose tensors the function changes in place. While it is timed it gets copies of them; all
            others it must only read, or overwrite as a whole.

    Returns:
        The function without the configuration's parameters. `.choices` maps (device, key) to a configuration's name.

    Raises:
        InputError: configurations or names that do not fit the function; a key whose `repr` holds an address.
        CompileError, LaunchError: no configuration can be launched.

    Example:
        >>> @cupyops.autotune(configs={"small": dict(block=128), "large": dict(block=512)}, key=lambda x, y: x.dtype)
        ... def launch(x, y, *, block):
        ...     return y.copy_(x * 2)  # kernel[cupyops.ceil_div(x.numel(), block), block](x, y, x.numel())
        >>> launch(torch.ones(3), torch.empty(3))
        tensor([2., 2., 2.])
    """
    if function is None:
        return functools.partial(autotune, configs=configs, key=key, mutates=mutates)
    return Autotuned(function, configs, key, mutates)


class Autotuned(ByName):
    """Function with a choice of configurations, as made by `autotune`."""

    def __init__(
        self,
        function: Callable[..., Any],
        configs: Mapping[str, Mapping[str, Any]],
        key: Callable[..., Hashable] | None,
        mutates: Iterable[str],
    ) -> None:
        functools.update_wrapper(self, function)
        self._defined_in = function.__module__
        self.function = function
        self.name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        self.signature = inspect.signature(function)
        self.configs = _checked(function, self.signature, configs)
        self.key = key or _dtypes_and_shapes
        self.mutates = _checked_mutates(self.signature, mutates)
        self.choices: dict[tuple[int, Hashable], str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs, **self.configs[self.choose(*args, **kwargs)])

    def choose(self, *args: Any, **kwargs: Any) -> str:
        """The name of the configuration for these arguments; found first, if need be."""
        first = next(iter(self.configs))
        device = _gpu([*args, *kwargs.values()])
        if device is None or torch.are_deterministic_algorithms_enabled():
            return first
        key = self.key(*args, **kwargs)
        try:
            choice = self.choices.get((device, key))
        except TypeError as error:
            raise InputError(f"{self.name}: key gives {key!r}, which is not hashable; give plain values") from error
        if choice is not None:
            return choice
        if re.search(r" at 0x[0-9a-f]+", repr(key)):
            raise InputError(f"{self.name}: key gives {key!r}, which no other process would; give plain values")
        stem = self._stem(device, repr(key))
        observed.refuse("its configuration has not been chosen yet", passing=True)
        with _locks.setdefault(stem, threading.Lock()):
            choice = self.choices.get((device, key)) or self._stored_choice(stem)
            if choice is None:
                if torch.cuda.is_current_stream_capturing():
                    return first
                with torch.cuda.device(device):
                    choice = self._tune(stem, args, kwargs)
            self.choices[device, key] = choice
        return choice

    def _tune(self, stem: str, args: Any, kwargs: Any) -> str:
        """Time every configuration, keep the fastest on the disk and give its name."""
        calls, errors = self._that_launch(*self._apart(args, kwargs))
        if not calls:
            error = next(iter(errors.values()))
            for name, other in errors.items():
                error.add_note(f"configuration {name!r} of {self.name}: {other}")
            raise error
        found = microseconds(calls)
        choice = min(found, key=lambda name: found[name])
        folder = cache.own_folder("autotune")
        if folder is not None:
            try:
                cache.write_record(folder, stem, {"choice": choice, "microseconds": found})
            except OSError as error:
                warnings.warn(f"the choice of {self.name} cannot be kept in {folder} ({error})", stacklevel=2)
        return choice

    def _that_launch(
        self, args: Any, kwargs: Any
    ) -> tuple[dict[str, Callable[[], Any]], dict[str, CompileError | LaunchError]]:
        """The configurations that compile and launch, as calls, and the errors of the others."""
        calls: dict[str, Callable[[], Any]] = {}
        errors: dict[str, CompileError | LaunchError] = {}
        for name, config in self.configs.items():
            call = functools.partial(self.function, *args, **kwargs, **config)
            try:
                call()
            except (CompileError, LaunchError) as error:
                errors[name] = error
            else:
                calls[name] = call
        return calls, errors

    def _apart(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with copies of those that the function changes in place."""
        bound = self.signature.bind_partial(*args, **kwargs)
        for name in self.mutates & bound.arguments.keys():
            if isinstance(bound.arguments[name], Tensor):
                bound.arguments[name] = bound.arguments[name].detach().clone()
        return bound.args, bound.kwargs

    def _stored_choice(self, stem: str) -> str | None:
        """The choice of another process; a damaged file, or one of another's making, is a miss."""
        folder = cache.own_folder("autotune")
        record = None if folder is None else cache.read_record(folder, stem, private=True)
        return next((name for name in self.configs if record and record.get("choice") == name), None)

    def _stem(self, device: int, key: str) -> str:
        """The name of the file for this key; its digest covers whatever the choice may depend on."""
        configs = {name: repr(config) for name, config in self.configs.items()}
        gpu = _name(device)
        parts = json.dumps([gpu, backend.nvrtc_version(), self.name, _kernels(self.function), configs, key])
        readable = re.sub(r"\W+", "-", f"{self.name}.{gpu}", flags=re.ASCII).strip("-")[:80]
        return f"{readable}.{hashlib.sha256(parts.encode()).hexdigest()[:32]}"


def microseconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The median device time of each call on the current stream, in turns; each has been run once before."""
    batches = {name: min(_MAX_BATCH, 1 + int(_BATCH_MS / max(_timed(call, 3), 1e-3))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            samples[name].append(1000 * _timed(call, batches[name]))
    return {name: statistics.median(found) for name, found in samples.items()}


def _timed(call: Callable[[], Any], times: int) -> float:
    """Milliseconds of one call, averaged over `times`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def _gpu(values: Iterable[Any]) -> int | None:
    """The CUDA device of the first tensor; None where there is none, and in a dry run."""
    first = next((value for value in values if isinstance(value, Tensor)), None)
    return first.get_device() if first is not None and first.is_cuda and not is_dry(first) else None


def _name(device: int) -> str:
    return torch.cuda.get_device_name(device)


def _dtypes_and_shapes(*args: Any, **kwargs: Any) -> Hashable:
    return tuple((value.dtype, tuple(value.shape)) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _kernels(function: Callable[..., Any]) -> list[list[str]]:
    """Identify the kernels that the function's code shows: the digest of the text, the name and the options of each."""
    try:
        found = kernels_of(function)
    except InputError:  # none that can be seen
        return []
    return sorted([kernel.source.digest, kernel.base, *kernel.options] for kernel in found)


def _checked(
    function: Callable[..., Any], signature: inspect.Signature, configs: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The configurations, each of which the function can take."""
    if not isinstance(configs, Mapping) or not configs:
        raise InputError(f"configs is {configs!r}, expected at least one name with its keyword arguments")
    for name, config in configs.items():
        if not isinstance(name, str) or not isinstance(config, Mapping):
            raise InputError(f"configs has {name!r}: {config!r}, expected a name and a dictionary of keyword arguments")
        try:
            signature.bind_partial(**config)
        except TypeError as error:
            raise InputError(
                f"configuration {name!r} does not fit {getattr(function, '__qualname__', function)}{signature}: {error}; "
                "name its parameters"
            ) from None
    return {name: dict(config) for name, config in configs.items()}


def _checked_mutates(signature: inspect.Signature, mutates: Iterable[str]) -> frozenset[str]:
    names = frozenset([mutates] if isinstance(mutates, str) else mutates)
    if unknown := names - signature.parameters.keys():
        raise InputError(
            f"mutates names {sorted(unknown)[0]!r}; the parameters are {', '.join(signature.parameters)}: name some of these"
        )
    return names
