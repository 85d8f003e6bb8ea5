"""Files that a command is to write: examined before its work, so that no work is done in vain, and nothing overwritten."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

from ..errors import InputError


def files(
    options: dict[str, Path | None], inputs: Iterable[Path | None] = (), *, folders_are_made: bool = False
) -> None:
    """Each file that an option names can be written, and is none that the command reads or writes otherwise.

    What is there stays as it is. `inputs` may be costly to list: they are asked for where an output is there already.

    Raises:
        InputError: it cannot, and why; or it is an input, under whatever name.
    """
    given = {option: path for option, path in options.items() if path is not None}
    for option, path in given.items():
        _writable(option, path, folders_are_made)
    for (option, path), (other, same) in combinations(given.items(), 2):
        if os.path.realpath(path) == os.path.realpath(same) or _is_same(path, same):
            raise InputError(f"{option} and {other} both write {str(path)!r}; expected two files")
    there = {option: path for option, path in given.items() if os.path.exists(path)}
    for read in inputs if there else ():
        for option, path in there.items():
            if read is not None and _is_same(path, read):
                raise InputError(
                    f"{option} is {str(path)!r}, which the command reads ({read}) and would overwrite; expected another file"
                )


def folder(option: str, path: Path) -> Path:
    """`path`, a folder into which can be written, or which can be made. Raises `InputError` where it cannot."""
    _room(option, path, path)
    return path


def _room(option: str, path: Path, folder: Path) -> None:
    """`path` can be made in `folder`, which may have to be made itself."""
    there = next((one for one in (folder, *folder.parents) if os.path.exists(one)), folder)
    if not os.path.isdir(there):
        raise InputError(f"{option} is {str(path)!r}: {str(there)!r} is a file, expected a folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise InputError(
            f"{option} is {str(path)!r}: {str(there)!r} cannot be written: {_reason(error)}; give another path"
        ) from error


def _writable(option: str, path: Path, folders_are_made: bool) -> None:
    if os.path.isdir(path):
        raise InputError(f"{option} is {str(path)!r}, a folder; expected a file")
    if not os.path.exists(path.parent):
        if not folders_are_made:
            raise InputError(f"{option} is {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
        return _room(option, path, path.parent)
    if os.path.exists(path) and not os.path.isfile(path):
        return  # a device or a pipe: opened once, when there is something to write
    new = None if os.path.exists(path) else os.path.realpath(path)  # where a link leads, if it is one
    try:
        with open(path, "ab"):
            pass
    except (OSError, ValueError) as error:
        raise InputError(
            f"{option} is {str(path)!r}, which cannot be written: {_reason(error)}; give another path"
        ) from error
    if new is not None:
        os.unlink(new)


def _is_same(path: Path, other: Path) -> bool:
    """True if both are one file, by links of either kind too."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return False


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
