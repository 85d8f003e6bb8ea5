"""docs/gallery.md: what each program of examples/gallery is, and the picture that it prints.

python tools/docs_gallery.py      runs them, in the simulator where there is no GPU, and writes the page anew
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "gallery.md"
_ROW = re.compile(r"^\| \[(\w+)\.py\]\(\w+\.py\) \| (.*?) \| (.*?) \|$", re.MULTILINE)
_HEAD = """\
# A gallery

This page has one operator for each kind of kernel, with a small task that it solves and what the program prints. Each is one
file of `examples/gallery`, with CUDA, reference, forward, backward and task. Its kernels run on a GPU, or else in the
simulator.
`python benchmarks/gallery.py` measures each beside plain PyTorch, on problems of a real size.

<!-- gallery -->
"""


def programs() -> list[tuple[str, str, str]]:
    """(name, kind, task) of each, as the gallery's own table has them."""
    return _ROW.findall((PROGRAMS / "README.md").read_text(encoding="utf-8"))


def section(name: str, kind: str, task: str, printed: str) -> str:
    """One program on the page."""
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    return f"\n## {name}: {kind}\n\nThe task: {task}.\n\n{textwrap.indent(lines, '    ')}\n"


def write() -> None:
    """Run all programs, and write the page."""
    parts = [_HEAD]
    for name, kind, task in programs():
        done = subprocess.run([sys.executable, PROGRAMS / f"{name}.py"], capture_output=True, text=True, check=True)
        parts.append(section(name, kind, task, done.stdout))
    PAGE.write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    write()
