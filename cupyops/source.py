"""CUDA source text: find a .cu file, gather what it includes, digest the whole.

A `Source` is complete: it holds the text of the file and of every quoted include, so that what is hashed is what is
compiled. Angle-bracket includes (`<cuda_fp16.h>`) belong to the CUDA runtime headers and are left to the compiler.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .errors import SourceError

_PACKAGE = Path(__file__).resolve().parent

# a comment, or a literal: what stands between quotes begins no comment
_COMMENT_OR_LITERAL = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def cuda_src() -> Path:
    """The folder of the built-in kernels: inside an installed package, beside it in a source tree."""
    inside = _PACKAGE / "cuda_src"
    return inside if inside.is_dir() else _PACKAGE.parent / "cuda_src"


def strip_comments(text: str) -> str:
    """`text` with each comment blanked out; line numbers stay as they were."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group()) if match.group().startswith("/") else match.group()

    return _COMMENT_OR_LITERAL.sub(blank, text)


@dataclass(frozen=True)
class Source:
    """One translation unit: its text and the text of each quoted include, keyed as the `#include` line spells it."""

    name: str
    text: str
    path: Path | None = None
    includes: dict[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the name, the text and every included text."""
        sha = hashlib.sha256()
        for part in (self.name, self.text, *(piece for item in sorted(self.includes.items()) for piece in item)):
            encoded = part.encode()
            sha.update(len(encoded).to_bytes(8, "little") + encoded)
        return sha.hexdigest()

    def line(self, file: str, number: int) -> str | None:
        """Line `number` (from 1) of this source or of one of its includes, or None where there is no such line."""
        text = self.text if file == self.name else self.includes.get(file)
        lines = text.splitlines() if text is not None else []
        return lines[number - 1] if 0 < number <= len(lines) else None


def is_text(source: str) -> bool:
    """Whether `source` is CUDA C itself and not a file's name."""
    return "\n" in source or "__global__" in source


def load(source: str | Path, beside: Path | None = None) -> Source:
    """The `Source` for a piece of CUDA C, or for a file found beside `beside` or among the built-in kernels."""
    if isinstance(source, str) and is_text(source):
        folder = beside or Path.cwd()
        return Source("<text>.cu", source, None, _gather(source, "<text>.cu", folder))
    path = find(source, beside)
    text = path.read_text(encoding="utf-8")
    return Source(path.name, text, path, _gather(text, path.name, path.parent))


def find(source: str | Path, beside: Path | None = None) -> Path:
    """The path of a .cu file: absolute, else beside the caller, else in the working folder, else built in."""
    folders = [folder for folder in (beside, Path.cwd(), cuda_src()) if folder is not None]
    candidates = [Path(source)] if Path(source).is_absolute() else [folder / source for folder in folders]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    looked = "\n".join(f"  {candidate}" for candidate in candidates)
    raise SourceError(f"no CUDA source named {str(source)!r}. Looked for:\n{looked}")


def _gather(text: str, name: str, folder: Path) -> dict[str, str]:
    """Every quoted include reachable from `text`, each looked for beside its includer and then in cuda_src."""
    found: dict[str, str] = {}
    origin: dict[str, Path] = {}
    pending = [(text, name, folder)]
    while pending:
        text, name, folder = pending.pop()
        for match in _INCLUDE.finditer(strip_comments(text)):
            spelled = match.group(1)
            path = next((p for p in (folder / spelled, cuda_src() / spelled) if p.is_file()), None)
            if path is None:
                number = text.count("\n", 0, match.start()) + 1
                raise SourceError(f'{name}:{number}: #include "{spelled}" not found in {folder} or {cuda_src()}')
            path = path.resolve()
            if origin.setdefault(spelled, path) != path:
                raise SourceError(f'#include "{spelled}" means both {origin[spelled]} and {path}; rename one of them')
            if spelled not in found:
                found[spelled] = path.read_text(encoding="utf-8")
                pending.append((found[spelled], spelled, path.parent))
    return found
