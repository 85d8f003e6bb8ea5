"""Observers of calls and launches: two counts that every call compares with zero, and this thread's recorder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from . import torch_private

watching = 0  # open traces and recordings: launches take the full path, which tells them
unplanned = 0  # these, and whoever asked for calls made the plain way: no recorded plan is replayed
prefers_library = True  # where no kernel is measured as fast, PyTorch's own function runs: see `never_slower`
_changing = threading.Lock()
_thread = threading.local()  # .recorder, of the recording that this thread has under way


def watch(by: int = 1) -> None:
    """Every launch of the process takes the full path and every call is made the plain way, until taken back by -1."""
    global watching, unplanned
    with _changing:
        watching += by
        unplanned += by


def go_plainly(by: int = 1) -> None:
    """Every call of the process is made the plain way, until that is taken back, by -1."""
    global unplanned
    with _changing:
        unplanned += by


def compiler_fuses() -> bool:
    """Return True if torch.compile traces, to which a swapped module is what it was; torch.export is shown our operators."""
    return prefers_library and torch.compiler.is_dynamo_compiling() and not torch_private.exporting()


def is_left_to_compilers(x: Any) -> bool:
    """Return True if torch.compile traces, and is to see PyTorch's functions of a tensor on a GPU."""
    return compiler_fuses() and isinstance(x, torch.Tensor) and x.is_cuda


_when_settings_change: list[Callable[[], None]] = []


def call_when_settings_change(function: Callable[[], None]) -> None:
    """`function()` is called whenever a setting has changed on which recorded plans depend without naming it."""
    _when_settings_change.append(function)


def settings_changed() -> None:
    """Call the functions that wait for a change of settings."""
    for function in _when_settings_change:
        function()


def recorder() -> Any:
    """The recorder of the call that this thread records, or None."""
    return getattr(_thread, "recorder", None)


def unseen() -> AbstractContextManager[Any]:
    """Keep what this thread does inside out of a recording."""
    return nullcontext() if (current := recorder()) is None else current.paused()


@contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Calls and launches of this thread inside are told to `recorder`."""
    watch()
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None
        watch(-1)


class Faster(str):
    """A reason why kernels of ours do not run: PyTorch's own function is faster."""


def refuse(reason: str, passing: bool = False) -> None:
    """Give up this thread's recording, if there is one: what it does now cannot be replayed.

    `passing`: the next call alike may be another matter.
    """
    if (current := recorder()) is not None:
        current.refuse(reason, passing)
