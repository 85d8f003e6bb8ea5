"""The kernel cache on disk, in the user's own folder. A compiled kernel is a .cubin and a .json that vouches for it, and
where it was simulated a .translated, what the simulator made of it.

A cubin is code. In the user's own folder only that counts which no other user can have written. A damaged entry is a miss;
a file appears under its name only when it is whole. How large the cache may become is in `room.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..._util import settings
from . import backend, temporary, trust
from .binary import Binary, Parameter


def folder() -> Path | None:
    """The user's compiled kernels, one folder per NVRTC version and CUDA headers, or None where none can be had."""
    major, minor = backend.nvrtc_version()
    return own_folder(f"nvrtc-{major}.{minor}-{backend.runtime_version(backend.cuda_include())}")


def own_folder(name: str) -> Path | None:
    """`name` in the user's own cache (0700), made if need be, or None where none can be had, of which a warning says why.

    A root that was there before keeps its mode, for it may serve others too; but no one else may write to it. It may be a
    link, as where a cluster has its room elsewhere than in the home; see `trust.followed`. Where the home cannot be used, a
    private folder among the temporary files is; for what CUPYOPS_CACHE_DIR names there is no substitute.
    """
    named = location()
    if named is None:
        return None
    root, why = usable(named)
    if root is None and settings.CACHE_DIR.read() is None:
        root = _substitute(named)
    elif root is None:
        _tell(named, why)
    if root is None:
        return None
    why = _objection(root / name, 0o077, close=True)
    if why:
        _tell(root / name, why)
    return None if why else root / name


def usable(root: Path) -> tuple[Path | None, str]:
    """Return where a root leads, if it may be used, and why not, else empty."""
    try:
        real = trust.followed(root)
    except (OSError, ValueError) as error:
        return None, f"it cannot be looked at: {error}"
    if real is None:
        return None, "it is a link that another user has made, or can turn elsewhere"
    why = _objection(real, 0o022)
    return (None if why else real), why


def _tell(folder: Path, why: str) -> None:
    """Say once that nothing is kept, since every process will then compile for itself."""
    if folder not in _told:
        _told.add(folder)
        warnings.warn(
            f"the kernel cache {folder!s:.300} is not used, and each process compiles for itself: {why}. Set "
            "CUPYOPS_CACHE_DIR to a folder of yours that only you can write to",
            stacklevel=3,
        )


def location() -> Path | None:
    """The folder that CUPYOPS_CACHE_DIR names, else the place for caches in the user's home, if there is one."""
    chosen: Path | None = settings.CACHE_DIR.read()
    if chosen is not None:
        return chosen
    try:
        import platformdirs
    except ImportError:
        warnings.warn(
            "kernels are compiled anew by each process: pip install platformdirs, or set CUPYOPS_CACHE_DIR",
            stacklevel=2,
        )
        return None
    try:
        root = Path(platformdirs.user_cache_dir("cupyops", appauthor=False))
    except RuntimeError:  # a user without a home
        return None
    return root if root.is_absolute() else None  # older versions of platformdirs give "~" as it stands


_told: set[Path] = set()  # the folders of which it was said already that they are not used


def _substitute(root: Path) -> Path | None:
    """The private temporary folder in the place of `root`, which is said once; None where there is none."""
    folder = temporary.private()
    if folder is not None and root not in _told:
        _told.add(root)
        warnings.warn(
            f"the kernel cache {root} cannot be written, or is not yours alone; kernels are kept in {folder}. Set "
            "CUPYOPS_CACHE_DIR to a folder of yours that lasts",
            stacklevel=2,
        )
    return folder


def _objection(folder: Path, forbidden: int, close: bool = False) -> str:
    """Make `folder` if need be; return why it is not ours alone (without the `forbidden` bits), or ""."""
    try:
        str(folder).encode()  # as in `read_entry`
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return "it is no folder"
        if is_foreign(status):
            return "it belongs to another user"
        if status.st_mode & forbidden:
            if not close:
                return f"others can write there (chmod go-w; it has mode {stat.S_IMODE(status.st_mode):04o})"
            folder.chmod(0o700)
        return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"
    except (OSError, UnicodeEncodeError) as error:
        return f"it cannot be made or written: {error!s:.300}"


def is_foreign(status: os.stat_result) -> bool:
    """Return True if a file belongs to another user."""
    return hasattr(os, "getuid") and status.st_uid != os.getuid()


_TEMPORARY = ".writing-"  # how the names of unfinished files begin
_ABANDONED = 3600  # seconds; no writer is at work for so long


def write_entry(folder: Path, stem: str, binary: Binary, cubin: bytes) -> Binary:
    """Write the .cubin, then the .json that vouches for it, each under a temporary name first."""
    _sweep(folder)
    _replace(folder / f"{stem}.cubin", cubin)
    write_record(folder, stem, asdict(replace(binary, path=None)), cubin)
    return replace(binary, path=folder / f"{stem}.cubin")


def write_record(folder: Path, stem: str, record: dict[str, Any], content: bytes = b"") -> None:
    """Write a .json that says `record`, of `content` where it vouches for that."""
    record = record | {"stem": stem}
    _replace(folder / f"{stem}.json", json.dumps(record | {"sha256": _seal(record, content)}).encode())


def _seal(record: dict[str, Any], cubin: bytes) -> str:
    """SHA-256 over all that an entry says, and the cubin of which it says it."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode() + cubin).hexdigest()


def _sweep(folder: Path) -> None:
    """Remove what writers left behind that were killed."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED:
                path.unlink()


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_entry(folder: Path, stem: str, private: bool = False) -> Binary | None:
    """The entry, if both its files are there, whole, and belong together; anything else is a miss.

    In a `private` folder a file that another user can have written is not there.
    """
    path = folder / f"{stem}.cubin"
    try:
        str(path).encode()  # as CuPy does, before it hands the path to the driver
        record = read_record(folder, stem, private, path)
        if record is None:
            return None
        record["parameters"] = tuple(Parameter(**parameter) for parameter in record["parameters"])
        return Binary(**record | {"path": path})
    except (ValueError, KeyError, TypeError):
        return None


def read_record(folder: Path, stem: str, private: bool = False, of: Path | None = None) -> dict[str, Any] | None:
    """Read the .json (of the file `of`), if it is whole and was written under this name; anything else is a miss."""
    try:
        record = json.loads(_read(folder / f"{stem}.json", private))
        seal = record.pop("sha256")
        if seal != _seal(record, b"" if of is None else _read(of, private)) or record.pop("stem") != stem:
            return None
        return dict(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _read(path: Path, private: bool) -> bytes:
    """The content of a regular file; a FIFO is not waited for. `private`: of a file of ours alone, and through no link."""
    extra = getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if private else 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or (private and (is_foreign(status) or status.st_mode & 0o022)):
            raise PermissionError(f"{path} is not to be trusted")
        return file.read()


class Beside:
    """A file beside a kernel's others: what the simulator has made of its PTX."""

    def __init__(self, folder: Path, stem: str) -> None:
        self._path = folder / f"{stem}.translated"

    def read(self) -> bytes | None:
        """Its content, if nobody else can have written it."""
        try:
            return _read(self._path, private=True)
        except OSError:
            return None

    def write(self, content: bytes) -> None:
        """Give it another content, if it can be written."""
        with suppress(OSError):
            _replace(self._path, content)


def beside(binary: Binary) -> Beside | None:
    """The place for it in the user's own folder; None for a kernel that has no file, or where no folder can be had."""
    if binary.path is None or binary.path.suffix != ".cubin":
        return None
    own = folder()
    return None if own is None else Beside(own, binary.path.stem)


def in_memory(stem: str, cubin: bytes) -> Path:
    """A path from which the driver can load `cubin` though no cache folder can be written."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(stem[:200])
        with os.fdopen(
            descriptor, "wb", closefd=False
        ) as file:  # open for as long as the process: the path leads to it
            file.write(cubin)
        return Path(f"/proc/self/fd/{descriptor}")  # the same file in a process that is forked from this one
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as temporary:
        temporary.write(cubin)
    return Path(temporary.name)
