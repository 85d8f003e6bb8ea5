"""A Python module as the command line names it: `mylib.kernels`, or a path, `src/mylib/kernels.py`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from ..errors import CupyopsError, InputError
from .words import near


def load(name: str) -> ModuleType:
    """Import it. A file in a package is imported as a part of the package.

    Raises `InputError` where there is none, or where it cannot be imported.
    """
    if name.endswith(".cu"):
        raise InputError(
            f"MODULE is {name!r}, which is CUDA; give the Python module that declares "
            f'Kernel("{Path(name).name}", ...), such as {Path(name).with_suffix(".py")}'
        )
    if name.endswith(".py") or os.sep in name:
        return _load_file(Path(name))
    _search(Path.cwd())
    return _imported(name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        beside = [str(path.with_name(one)) for one in _python_files(path.parent)]
        raise InputError(
            f"MODULE {str(path)!r}: there is no such file in {os.getcwd()}; give its path{near(str(path), beside)}"
        )
    path = path.resolve()
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    _search(folder)
    module = _imported(dotted)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise InputError(f"MODULE {str(path)!r}: {dotted!r} is another module already, {found}; rename the file")
    return module


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except CupyopsError:
        raise
    except Exception as error:  # whatever the module does when it is imported
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{name}.".startswith(f"{absent}."):
            here = [Path(one).stem for one in _python_files(Path())]
            raise InputError(
                f"MODULE {name!r} cannot be found, neither in {os.getcwd()} nor among the installed ones; "
                f"expected a name such as mylib.kernels, or a path such as src/kernels.py{near(name, here)}"
            ) from error
        raise InputError(
            f"cannot import {name}: {type(error).__name__}: {error}{_place(error)}\n  run it alone to see all of it"
        ) from error


def _place(error: Exception) -> str:
    """The line of Python that raised it, on a line of its own; a syntax error has its line in its text."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    return f"\n  {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def _python_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.py"))


def _search(folder: Path) -> None:
    """Look for modules in `folder` too, before all others."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
