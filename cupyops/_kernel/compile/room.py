"""The room that the kernel cache takes: its entries, when each was last used, and the limit that it is held to.

Processes need no lock. An entry whose .json or .cubin is gone is a miss, which compiles again; whoever writes an entry while
it is being removed loses it at worst. A kernel that a process has loaded stays loaded.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..._util import settings
from .cache import is_foreign

DEFAULT_LIMIT = 4 << 30  # bytes
_FILLED = 0.9  # of the limit, which the entries that stay may fill: not every new one is to remove another
_RECENT = 3600.0  # seconds; what was used since may be about to be loaded, and stays whatever the limit
_OFTEN = 60.0  # seconds between two looks at the size in one process, and between two notes of one entry's use
_SUFFIXES = (".json", ".cubin", ".translated")  # in the order of removal: nothing vouches for a lone cubin

_looked = -_OFTEN  # when this process last looked at the size


@dataclass(frozen=True)
class Entry:
    """A compiled kernel in the cache, or what is left of one."""

    folder: Path  # of its NVRTC version and CUDA headers
    stem: str  # its files' name without suffixes
    bytes: int  # that its files take
    used: float  # when it was written or last found, in seconds since the epoch

    def remove(self) -> bool:
        """Remove the entry, unless it has been used since it was listed; return True if it is gone."""
        files = [self.folder / f"{self.stem}{suffix}" for suffix in _SUFFIXES]
        with suppress(OSError):
            if any(file.lstat().st_mtime > self.used for file in files if os.path.lexists(file)):
                return False
        for file in files:
            with suppress(OSError):
                file.unlink(missing_ok=True)
        return not any(map(os.path.lexists, files))


def entries(root: Path) -> list[Entry]:
    """The compiled kernels in a cache, those used least recently first."""
    found: dict[tuple[Path, str], Entry] = {}
    for folder in root.glob("nvrtc-*"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        with suppress(OSError):
            for file in folder.iterdir():
                if file.suffix in _SUFFIXES and not file.name.startswith("."):
                    with suppress(OSError):
                        status = file.lstat()
                        if stat.S_ISREG(status.st_mode) and not is_foreign(status):
                            before = found.get((folder, file.stem), Entry(folder, file.stem, 0, 0.0))
                            taken, used = before.bytes + status.st_size, max(before.used, status.st_mtime)
                            found[folder, file.stem] = Entry(folder, file.stem, taken, used)
    return sorted(found.values(), key=lambda entry: entry.used)


def note_use(folder: Path, stem: str) -> None:
    """The entry has been found, and is to be used."""
    file = folder / f"{stem}.json"
    with suppress(OSError):
        if time.time() - file.stat().st_mtime > _OFTEN:
            os.utime(file)


def limit() -> int | None:
    """Largest size of the cache in bytes; None for no limit. Raises `InputError`."""
    found: int | None = settings.CACHE_LIMIT.read(default=DEFAULT_LIMIT)
    return found


def hold_limit(root: Path) -> None:
    """Remove the least recently used entries where the cache has outgrown its limit; looked at now and then."""
    global _looked
    most = limit()
    if most is None or time.monotonic() - _looked < _OFTEN:
        return
    _looked = time.monotonic()
    there = entries(root)
    if sum(entry.bytes for entry in there) > most:
        shrink(there, int(_FILLED * most), before=time.time() - _RECENT)


def shrink(there: Iterable[Entry], most: int, before: float = float("inf")) -> list[Entry]:
    """Remove entries in this order until the others take `most` bytes, none that was used later than `before`.

    Returns:
        list[Entry]: those that are gone.
    """
    there, gone = list(there), []
    taken = sum(entry.bytes for entry in there)
    for entry in there:
        if taken <= most or entry.used > before:
            break
        if entry.remove():
            gone.append(entry)
            taken -= entry.bytes
    return gone
