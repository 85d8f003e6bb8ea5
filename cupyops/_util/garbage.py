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
            gc.enable()
