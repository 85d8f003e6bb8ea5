"""Architectures that kernels are compiled for: `sm_90`, or a specific target.

The code of `sm_90` runs on compute capability 9.0 and the later minors of 9. `sm_90a` may use what 9.0 alone has, and runs
there alone; `sm_100f` is for 10.0 and the later minors of its family.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ...errors import InputError

_NAME = re.compile(r"sm_(\d+)(\d)([af]?)")
_FIRST = {"": (5, 0), "a": (9, 0), "f": (10, 0)}  # the first compute capability that has such targets


class Architecture(NamedTuple):
    """An architecture's name, read."""

    major: int
    minor: int
    suffix: str = ""

    @property
    def plain(self) -> str:
        """The name without the suffix."""
        return f"sm_{self.major}{self.minor}"


def read(name: Any) -> Architecture | None:
    """The architecture of that name; None where there can be none."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return None
    found = Architecture(int(match[1]), int(match[2]), match[3])
    return found if found[:2] >= _FIRST[found.suffix] else None


def checked_specific(name: Any) -> str | None:
    """A kernel's own target, or None for none. Raises `InputError` where it is not specific."""
    found = None if name is None else read(name)
    if name is not None and (found is None or not found.suffix):
        raise InputError(
            f'arch is {name!r}, expected a specific target such as "sm_90a" or "sm_100f"; without one a kernel is compiled '
            "for the device that it is launched on"
        )
    return name


def target(own: str | None, device: str) -> str | None:
    """Return the target by which a kernel whose own target is `own` runs on `device`; None where it cannot run there."""
    if own is None:
        return device
    wanted, there = read(own), read(device)
    assert wanted is not None
    if there is None or wanted.major != there.major:
        return None
    fits = there.minor == wanted.minor or (wanted.suffix == "f" and there.minor > wanted.minor)
    return own if fits else None
