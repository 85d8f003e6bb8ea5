"""A private folder among the temporary files, for a user whose home cannot be written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from . import trust


def private() -> Path | None:
    """The folder, one for each user, made if need be; None where there is none that is ours alone.

    Its name is known to all, so another user may have made it before us: then it is not used.
    """
    if not hasattr(os, "getuid"):  # nothing would tell whose it is
        return None
    folder = Path(os.environ.get("TMPDIR") or "/tmp").absolute() / f"cupyops-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        alone = ours and trust.objection(folder, trust.owners()) is None
        return folder if alone and os.access(folder, os.W_OK | os.X_OK) else None
    except OSError:
        return None
