"""The GPU that a launch is planned for: asked of the card, of the architecture that is simulated, or of the caller."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..._kernel.launch.executors import capability
from ..._util import observed
from ...errors import InputError


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU on which forms and grids depend.

    Attributes:
        capability: the major compute capability; 0 where no kernel runs.
        multiprocessors: how many there are.
        shared: bytes of shared memory that a block can have, if it opts in.
        shared_total: bytes of shared memory of a multiprocessor.
        threads: that a multiprocessor holds.
        l2: bytes of the L2 cache.
        max_blocks: blocks of a grid at most; they stride over the rest, since fewer blocks cost less to start.
        scratch: bytes of memory that an operator may use beside what it returns and saves; alike on every GPU.
        library: whether PyTorch's own functions may be taken where they are faster; not where kernels are simulated.
    """

    capability: int
    multiprocessors: int
    shared: int
    shared_total: int
    threads: int
    l2: int
    max_blocks: int = 1 << 16
    scratch: int = 240 << 20
    library: bool = False

    @property
    def has_clusters(self) -> bool:
        """True if blocks can form clusters."""
        return self.capability >= 9


# The GPU for which launches on the CPU are planned: in the simulator the multiprocessors do not matter, and the shared
# memory is that of the smallest GPU since Ampere.
_SIMULATED = Gpu(capability=0, multiprocessors=64, shared=101376, shared_total=102400, threads=2048, l2=32 << 20)

_assumed: dict[str, Any] = {}


def gpu(device: torch.device) -> Gpu:
    """The GPU that launches on tensors of `device` are planned for."""
    found = _card(device) if device.type == "cuda" else _simulated(capability(device))
    if found.library and not observed.prefers_library:
        found = replace(found, library=False)
    return replace(found, **_assumed) if _assumed else found


def _simulated(capability: int) -> Gpu:
    return replace(_SIMULATED, capability=capability)


@functools.cache
def _card(device: torch.device) -> Gpu:
    if not torch.cuda.is_available():  # a dry run
        return _SIMULATED
    of = torch.cuda.get_device_properties(device)
    return Gpu(
        capability=of.major,
        multiprocessors=of.multi_processor_count,
        shared=of.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        shared_total=of.shared_memory_per_multiprocessor,  # type: ignore[attr-defined]
        threads=of.max_threads_per_multi_processor,
        l2=of.L2_cache_size,
        library=True,
    )


@contextmanager
def never_slower(enabled: bool = True) -> Iterator[None]:
    """Let operators take PyTorch's own function where no kernel of ours is measured as fast, or forbid it, process-wide.

    That is the default: `cupyops.linear` of float32 is cuBLAS. `cupyops.trace()` and `python -m cupyops explain` say where.

    Args:
        enabled: False to have kernels of ours alone: to test them, to measure them, or for their bits, which are the same
            each time.

    Example:
        >>> with cupyops.never_slower(False):
        ...     y = cupyops.linear(torch.randn(8, 64), torch.randn(32, 64))
    """
    before, observed.prefers_library = observed.prefers_library, enabled
    observed.settings_changed()
    try:
        yield
    finally:
        observed.prefers_library = before
        observed.settings_changed()


@contextmanager
def assume_gpu(**properties: int) -> Iterator[None]:
    """Plan launches inside a `with` block as for another GPU. They still run on the one that is there.

    Calls inside are made in full: no recorded plan is replayed, and none is recorded.

    Args:
        **properties: those of `Gpu` that are to be other than they are, such as `multiprocessors=1` or `shared=101376`.

    Raises:
        InputError: a property that there is not.

    Example:
        >>> with cupyops.testing.assume_gpu(multiprocessors=1):
        ...     y = cupyops.layer_norm(torch.randn(8, 64), (64,))
    """
    known = [field.name for field in fields(Gpu)]
    if unknown := set(properties) - set(known):
        raise InputError(f"a GPU has no property {sorted(unknown)[0]!r}; it has {', '.join(known)}")
    global _assumed
    before, _assumed = _assumed, {**_assumed, **properties}
    observed.go_plainly()
    try:
        yield
    finally:
        observed.go_plainly(-1)
        _assumed = before


def assumed() -> dict[str, int]:
    """The properties that are assumed now."""
    return _assumed
