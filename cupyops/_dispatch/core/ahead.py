"""Kernels that will be wanted are compiled beside the one that is wanted now: each takes NVRTC a second or two."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress

import torch

from ..._kernel.launch.specialised import Specialised
from ...errors import CupyopsError
from .forms import Launch

_begun: set[Specialised] = set()  # which have had a thread: their launch finds, or waits for, what it makes


def compile_beside(launches: Iterable[Launch], arch: str) -> list[threading.Thread]:
    """Begin to compile the kernels of launches, once each, in threads. What cannot be compiled is told by its launch."""
    threads = []
    for launch in launches:
        specialised = launch.kernel.instance(**launch.template)
        if specialised not in _begun and not specialised.loaded:
            _begun.add(specialised)
            threads.append(threading.Thread(target=_compile, args=(specialised, arch)))
            threads[-1].start()
    return threads


def _compile(specialised: Specialised, arch: str) -> None:
    with suppress(CupyopsError):
        specialised.binary(arch)


def arch_of(device: torch.device) -> str:
    """Return the architecture that NVRTC compiles for on a device, such as "sm_90"."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
