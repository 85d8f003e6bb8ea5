"""Python's garbage collection, put off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Disable garbage collection inside: for an import, whose objects stay.

    A collection looks at all objects of the process, which after `import torch` takes as long as the import of cupyops.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            count_as_old()
            gc.enable()


def count_as_old() -> None:
    """Keep collections of young objects from what there is now: the first would look through all that was imported.

    Where a program has frozen objects nothing is done, since these would be no longer frozen.
    """
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()  # into the oldest generation, wherever they were before
