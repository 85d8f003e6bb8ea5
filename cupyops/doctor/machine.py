"""Facts that the examinations judge, gathered once: packages, the environment, and what child processes have seen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from packaging.utils import canonicalize_name

Facts = dict[str, Any]

_LIMIT = 120.0  # seconds that a child process gets
_LAST = 6  # lines of a child's error that are told


@dataclass(frozen=True)
class Machine:
    """This machine, as far as the doctor is concerned.

    Attributes:
        python: the interpreter's version.
        torch: PyTorch's version, and the CUDA version that it was built for, or None.
        packages: name -> version of what is installed; names in lower case, with dashes.
        requirements: what each extra of this package asks for; under "", what the package itself does.
        environ: the environment.
        seen: stage -> what the survey found; a stage that failed has "error", one that was not come to is not there.
    """

    python: tuple[int, ...]
    torch: tuple[str, str | None]
    packages: Mapping[str, str]
    requirements: Mapping[str, tuple[str, ...]]
    environ: Mapping[str, str]
    seen: Mapping[str, Facts] = field(default_factory=dict)

    @property
    def nvrtc_major(self) -> int | None:
        """The CUDA major version of the NVRTC in use."""
        version = self.seen.get("nvrtc", {}).get("version")
        return int(version[0]) if version else None

    @property
    def driver_major(self) -> int | None:
        """The newest CUDA major version that the driver serves; None without a driver."""
        number = self.seen.get("driver", {}).get("cuda")
        return int(number) // 1000 if number else None

    @property
    def gpus(self) -> list[Facts]:
        """GPUs that PyTorch sees."""
        return list(self.seen.get("gpus", {}).get("gpus", []))


def look(limit: float = _LIMIT) -> Machine:
    """Gather the facts of this machine, in a child process where that may crash or hang, for `limit` seconds at most."""
    output, trouble = _child(("-m", f"{__package__}.survey", "doctor"), limit)
    return Machine(
        python=tuple(sys.version_info[:3]),
        torch=(torch.__version__, torch.version.cuda),
        packages=installed(),
        requirements=requirements(),
        environ=dict(os.environ),
        seen=read_survey(output.splitlines(), trouble),
    )


def installed(path: list[str] | None = None) -> dict[str, str]:
    """Name -> version of the distributions on `path`, by default `sys.path`. Of several of one name the first counts."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions(path=sys.path if path is None else path):
        name = distribution.metadata["Name"]
        if name:  # a folder that an interrupted removal left has none
            found.setdefault(canonicalize_name(name), distribution.version)
    return found


def requirements() -> dict[str, tuple[str, ...]]:
    """Extra (or "") -> the requirements in it, without their markers, as this package's metadata states them."""
    try:
        stated = metadata.requires(__package__.partition(".")[0]) or []
    except metadata.PackageNotFoundError:  # a source tree on the path, not installed
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for text in stated:
        requirement, _, marker = text.partition(";")
        match = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        extra = match.group(1) if match is not None else ""
        found[extra] = (*found.get(extra, ()), requirement.strip())
    return found


def read_survey(lines: Iterable[str], trouble: str | None) -> dict[str, Facts]:
    """The stages' facts, from what the survey printed; `trouble` is what ended it too soon, and goes to its last stage."""
    seen: dict[str, Facts] = {}
    for line in lines:
        try:
            facts = json.loads(line)
            seen[facts.pop("stage")] = facts
        except (ValueError, AttributeError, KeyError, TypeError):
            continue  # what a library has printed
    for facts in seen.values():
        if facts.pop("begun", False):
            facts["error"] = trouble or "it ended without a word"
    return seen or {"torch, cupy": {"error": trouble or "it ended without a word"}}


def _child(words: tuple[str, ...], limit: float) -> tuple[str, str | None]:
    """(standard output, what went wrong or None) of this interpreter with other arguments."""
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as late:
        return os.fsdecode(late.stdout or b""), f"it hung: stopped after {limit:g} seconds"
    except OSError as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout, None
    if done.returncode < 0:
        return done.stdout, f"it crashed: killed by signal {-done.returncode}"
    return done.stdout, _told(done.stderr) or f"exit status {done.returncode}"


_CHAIN = "The above exception was the direct cause of the following exception:"


def _told(stderr: str) -> str:
    """Summary of a child's last words: first what was the matter, then where.

    Of a traceback the exception is the matter, of a chain of them the one that caused the others.
    """
    lines = stderr.partition(_CHAIN)[0].strip().splitlines()
    begin = max((i for i, line in enumerate(lines) if line.startswith("Traceback (")), default=None)
    if begin is None:
        return "\n".join(lines[-_LAST:])
    end = next((i for i, line in enumerate(lines) if i > begin and line[:1].strip()), len(lines))
    return "\n".join([*lines[end : end + _LAST], *lines[max(begin, end - _LAST) : end]])
