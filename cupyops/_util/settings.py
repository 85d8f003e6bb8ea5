"""The settings of this package: environment variables that begin with CUPYOPS_, each read by one parser.

A variable that is empty is not set. A value of another kind is an `InputError` where it is read, mostly at the import; in
`python -m cupyops doctor` it is a finding, and counts as not set.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError

_ON, _OFF = ("1", "on", "true", "yes"), ("0", "off", "false", "no")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def flag(text: str) -> bool:
    """True or False. Raises `ValueError`."""
    text = text.strip().lower()
    if text not in _ON + _OFF:
        raise ValueError(text)
    return text in _ON


def size(text: str) -> int | None:
    """Number of bytes, with a unit of 1024 if one is given: `500M`, `2 GiB`; None for `off`. Raises `ValueError`."""
    text = text.strip()
    if text.lower() in _OFF[1:]:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.lower())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2]])


def folder(text: str) -> Path:
    """A folder, `~` being the home; a name may end in a space."""
    return Path(os.path.expanduser(text)).absolute()


def folders(text: str) -> list[Path]:
    """Folders, separated as in PATH."""
    return [folder(one) for one in text.split(os.pathsep) if one.strip()]


def _architecture(text: str) -> bool | str:
    return text.strip() if re.fullmatch(r"sm_\d+[af]?", text.strip()) else flag(text)


def _in_doctor() -> bool:
    """Return True in a process of the doctor: Python imports the package before it runs `doctor`, which is to go on."""
    return any("cupyops" in module and word == "doctor" for module, word in zip(sys.orig_argv, sys.orig_argv[1:]))


_FLAG = f"{', '.join(_ON)}, or {', '.join(_OFF)}"


@dataclass(frozen=True)
class Setting:
    """An environment variable.

    Attributes:
        name: the variable.
        meaning: what it does, for `doctor` and the documentation.
        parse: the value that a text stands for; raises `ValueError` for one that stands for none.
        expected: the texts that it takes, in words.
    """

    name: str
    meaning: str
    parse: Callable[[str], Any] = flag
    expected: str = _FLAG

    def read(self, environ: Mapping[str, str] | None = None, default: Any = None) -> Any:
        """The value, `default` where it is not set. Raises `InputError`."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text.strip():
            return default
        try:
            return self.parse(text)
        except ValueError:
            if environ is None and _in_doctor():
                return default
            raise InputError(
                f"{self.name} is {text!r}, expected {self.expected}; unset {self.name} otherwise"
            ) from None


CACHE_DIR = Setting("CUPYOPS_CACHE_DIR", "where compiled kernels are kept", folder, "a folder")
CACHE_LIMIT = Setting(
    "CUPYOPS_CACHE_LIMIT",
    "largest size of the kernel cache; the kernels used least recently are removed first",
    size,
    "a number of bytes such as 500M or 2G, or off",
)
CUBIN_PATH = Setting(
    "CUPYOPS_CUBIN_PATH", "folders of kernels compiled ahead of time", folders, "folders, separated as in PATH"
)
DEBUG = Setting(
    "CUPYOPS_DEBUG", "whether each launch waits for its kernel, so that a fault is reported where it happens"
)
PLANS = Setting("CUPYOPS_PLANS", "whether calls are replayed from recorded plans")
RELOAD = Setting("CUPYOPS_RELOAD", "whether an edited .cu file is compiled again in the running process")
SIMULATE = Setting(
    "CUPYOPS_SIMULATE",
    "whether kernels run on the CPU, in the simulator, and for which architecture",
    _architecture,
    f"{_FLAG}, or an architecture such as sm_90",
)
STRICT = Setting("CUPYOPS_STRICT", "whether a graph that the backend of torch.compile cannot compile is an error")
ALL = {one.name: one for one in (CACHE_DIR, CACHE_LIMIT, CUBIN_PATH, DEBUG, PLANS, RELOAD, SIMULATE, STRICT)}
