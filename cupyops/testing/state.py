"""State of the process, which a call must leave as it was: PyTorch's and NumPy's settings, and generators of numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_SMALLEST = 5e-324  # a denormal
_UNLIKELY = 0x5EED_CAFE  # a seed


@dataclass(frozen=True)
class Setting:
    """A setting: how it is read, and how it is set back."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _attribute(path: str) -> Setting:
    """`torch.backends.cudnn.benchmark` and its kind."""
    first, *rest, last = path.split(".")
    owner: Any = torch
    for part in rest:
        owner = getattr(owner, part)
    return Setting(path, lambda: getattr(owner, last), lambda value: setattr(owner, last, value))


def _sdp(kind: str) -> Setting:
    """Setting that lets scaled_dot_product_attention take one of its ways."""
    cuda = torch.backends.cuda
    return Setting(
        f"torch.backends.cuda.{kind}_sdp_enabled()",
        getattr(cuda, f"{kind}_sdp_enabled"),
        getattr(cuda, f"enable_{kind}_sdp"),
    )


def _autocast(device: str) -> tuple[Setting, Setting]:
    return (
        Setting(
            f"torch.is_autocast_enabled({device!r})",
            lambda: torch.is_autocast_enabled(device),
            lambda value: torch.set_autocast_enabled(device, value),
        ),
        Setting(
            f"torch.get_autocast_dtype({device!r})",
            lambda: torch.get_autocast_dtype(device),
            lambda value: torch.set_autocast_dtype(device, value),
        ),
    )


SETTINGS = (
    Setting("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
    Setting("torch.get_default_device()", torch.get_default_device, torch.set_default_device),
    Setting(
        "torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    Setting(
        "torch.get_deterministic_debug_mode()", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    Setting("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
    Setting("torch.is_grad_enabled()", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("torch.is_anomaly_enabled()", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Setting("whether denormals are flushed", lambda: _SMALLEST * float(1) == 0, torch.set_flush_denormal),
    Setting("numpy.geterr()", np.geterr, lambda value: np.seterr(**value)),
    Setting("the working folder", os.getcwd, os.chdir),
    _attribute("torch.utils.deterministic.fill_uninitialized_memory"),
    _attribute("torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    _attribute("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
    *map(_attribute, (f"torch.backends.cudnn.{name}" for name in ("enabled", "benchmark", "deterministic"))),
    *map(_attribute, (f"torch.backends.{name}.allow_tf32" for name in ("cuda.matmul", "cudnn"))),
    *map(_sdp, ("flash", "mem_efficient", "math", "cudnn")),
    *_autocast("cpu"),
    *_autocast("cuda"),
)


def settings() -> dict[Setting, Any]:
    """The value of each setting."""
    return {one: value for one in SETTINGS if (value := _read(one)) is not None}


def restored(before: dict[Setting, Any]) -> list[str]:
    """The settings that are no longer as they were, in words; they are set back."""
    found = []
    for one, value in before.items():
        now = _read(one)
        if now != value:
            found.append(f"{one.name} was {value}, and is {now}")
            one.set(value)
    return found


def _read(one: Setting) -> Any:
    try:
        return one.get()
    except (RuntimeError, OSError):  # PyTorch does not say it in this way where a newer one was used to set it
        return None


# --- random numbers ---------------------------------------------------------------------------------------------------

GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.get_rng_state()": (torch.get_rng_state, torch.set_rng_state),
    "random.getstate()": (random.getstate, random.setstate),
    "numpy.random.get_state()": (np.random.get_state, np.random.set_state),
}
_CUDA = "torch.cuda.get_rng_state()"


def generators() -> dict[str, Any]:
    """The state of each generator of random numbers that all of the process shares."""
    found = {name: get() for name, (get, _) in GENERATORS.items()}
    if torch.cuda.is_available():
        found[_CUDA] = torch.cuda.get_rng_state()
    return found


def scramble(number: int) -> None:
    """Bring each generator into a state that hardly any program has set, another for another number."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(_UNLIKELY + number)


def set_back(states: dict[str, Any]) -> None:
    """Set the generators to these states."""
    for name, state in states.items():
        (torch.cuda.set_rng_state if name == _CUDA else GENERATORS[name][1])(state)


def moved(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The names of the generators whose state differs."""
    return {name for name, state in before.items() if not _same(state, after[name])}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
