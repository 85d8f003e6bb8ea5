"""`python -m cupyops port`: a C++ extension's host code becomes Python, and what could not is listed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .._port.port import port
from ..errors import CupyopsError, InputError
from . import words


def run(files: Sequence[Path], out: Path, options: Sequence[str]) -> int:
    """The command; its exit code: 0, 1 where something has no translation, 2 where nothing was written."""
    try:
        if absent := [str(one) for one in files if not one.is_file()]:
            raise InputError(f"there is no file {', '.join(absent)}; name a .cu file, and the .cpp that binds it")
        if files[0].suffix not in (".cu", ".cuh"):
            raise InputError(f"the first file is {files[0]}, expected the .cu file with the kernels")
        source = os.path.relpath(files[0].resolve(), out.resolve())
        found = port(list(files), Path(source).as_posix(), tuple(options))
        if there := [name for name in found.files if (out / name).exists()]:
            raise InputError(f"{', '.join(there)} would be overwritten; give another folder with --out")
        out.mkdir(parents=True, exist_ok=True)
        for name, content in found.files.items():
            (out / name).write_text(content, encoding="utf-8")
    except (CupyopsError, OSError, UnicodeDecodeError) as error:
        words.complain(error)
        return 2
    console = Console()
    for name in found.files:
        console.print(f"wrote {out / name}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"functions: {', '.join(found.functions)}", highlight=False, soft_wrap=True, markup=False)
    for operator, forward, backward in found.operators:
        pair = f"{forward}, {backward}" if backward else f"{forward}, no backward"
        console.print(f"operator {operator}: {pair}", highlight=False, soft_wrap=True, markup=False)
    if found.problems:
        console.print(f"left to do: {len(found.problems)}", highlight=False)
        for problem in found.problems:
            console.print(f"  {problem}", highlight=False, soft_wrap=True, markup=False)
    return 1 if any("not translated" in problem for problem in found.problems) else 0
