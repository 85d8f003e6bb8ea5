"""Trust in precompiled kernels: whose are run.

A cubin is code, and a folder beside a .cu file may be anybody's: in a shared folder with the sticky bit each user can make
what is not there yet. So a file counts only where it and its folder belong to us, to root or to the owner of the .cu file,
whose code runs anyway, and where nobody else can write to them. Of the folders above those that everybody can write to
count too: with the sticky bit of a trusted owner, as /tmp has it, nobody can put another folder in the place of ours.

Windows has neither owners nor modes of this kind: there a folder is trusted as the source beside it, or the setting that
names it, is.
"""

from __future__ import annotations

import os
import shlex
import stat
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_told: set[Path] = set()  # the folders of which it was said already that they are not used


class Objection(NamedTuple):
    """Reason why something is not run, and the command that mends it."""

    found: str
    remedy: str


def owners(source: Path | None = None) -> frozenset[int]:
    """The users whose cubins are run: us, root, and the owner of the .cu file `source`."""
    if not hasattr(os, "getuid"):
        return frozenset()
    trusted = {os.getuid(), 0}
    if source is not None:
        with suppress(OSError):  # it has been removed since it was read
            trusted.add(os.stat(source).st_uid)
    return frozenset(trusted)


def objection(path: Path, trusted: frozenset[int]) -> Objection | None:
    """Return why the file or folder `path` is not to be run, or None.

    Raises:
        OSError: there is no such file or folder, or none that may be looked at.
    """
    if not hasattr(os, "getuid"):
        return None
    real = Path(os.path.realpath(path))
    kind = os.lstat(real).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise FileNotFoundError(f"{path} is neither a file nor a folder")
    folder = real if stat.S_ISDIR(kind) else real.parent
    for place in dict.fromkeys((real, folder, *folder.parents)):
        status = os.lstat(place)
        inside = place in (real, folder)
        writable = _writable_by_others(status) if inside else status.st_mode & stat.S_IWOTH
        sticky = not inside and status.st_mode & stat.S_ISVTX
        known = status.st_uid in trusted
        said = f"{place} belongs to {_name(status.st_uid)} and has mode {stat.S_IMODE(status.st_mode):04o}"
        if not known and (inside or writable):
            return Objection(said, "python -m cupyops compile --out FOLDER, a folder of your own")
        if writable and not sticky:
            everything = "-R " if place == folder else ""
            return Objection(said, f"chmod {everything}go-w {shlex.quote(str(place))}")
    return None


def followed(path: Path) -> Path | None:
    """Follow `path` through links that only we or root can have made or can turn; None where a link is of another kind.

    A link counts that belongs to us or to root, in a folder where nobody else can put another in its place: one that is
    ours or root's and that others cannot write to, or that has the sticky bit.
    """
    for _ in range(40):
        if not path.is_symlink():
            return path
        if hasattr(os, "getuid"):
            link, above = os.lstat(path), os.stat(path.parent)
            turned = _writable_by_others(above) and not above.st_mode & stat.S_ISVTX
            if turned or not {link.st_uid, above.st_uid} <= owners():
                return None
        path = Path(os.path.realpath(path.parent)) / os.readlink(path)
    return None


def allows(folder: Path, stem: str, source: Path | None) -> bool:
    """Return True if the entry `stem` of a precompiled folder may be run; warn once for each folder that is refused."""
    trusted, files = owners(source), [folder / f"{stem}{suffix}" for suffix in (".cubin", ".json")]
    try:
        found = [objection(place, trusted) for place in (*files, folder)]
    except OSError:  # there is no such entry
        return False
    why = next(filter(None, found), None)
    if why and folder not in _told:
        _told.add(folder)
        warnings.warn(
            f"precompiled kernels of {folder} are not used, since others can have written them: {why.found}; "
            f"remedy: {why.remedy}",
            stacklevel=2,
        )
    return why is None


def _writable_by_others(status: os.stat_result) -> int:
    """The bits by which others can write there: not the group's, where the owner has a group alone, as many systems do."""
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return writable & ~stat.S_IWGRP if writable and _is_private(status.st_gid, status.st_uid) else writable


def _is_private(group: int, user: int) -> bool:
    """Return True if the group is the user's own: the primary one, of the same name, without other members."""
    import grp
    import pwd

    try:
        entry, owner = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    alone = set(entry.gr_mem) <= {owner.pw_name}
    return owner.pw_gid == group and entry.gr_name == owner.pw_name and alone


def _name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
