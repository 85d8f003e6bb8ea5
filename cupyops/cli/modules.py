"""A Python module as the command line names it: `mylib.kernels`, or a path, `src/mylib/kernels.py`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from ..errors import InputError


def load(name: str) -> ModuleType:
    """Import it. A file in a package is imported as a part of the package. Raises `InputError` where there is none."""
    if name.endswith(".py") or os.sep in name:
        return _load_file(Path(name))
    _search(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise InputError(f"MODULE {name!r} cannot be found from {os.getcwd()}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"MODULE {str(path)!r}: there is no such file in {os.getcwd()}")
    path = path.resolve()
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    _search(folder)
    module = importlib.import_module(dotted)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise InputError(f"MODULE {str(path)!r}: {dotted!r} is another module already, {found}; rename the file")
    return module


def _search(folder: Path) -> None:
    """Look for modules in `folder` too, before all others."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
