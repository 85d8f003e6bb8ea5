"""An extension's file, with the headers that it includes, as a `Source`: device code alone, and the prelude before it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...errors import SourceError
from ..compile import backend, source
from ..compile.source import Source, Stamp
from . import device
from .known import PRELUDE, STANDARD, THRUST, is_host_header
from .tokens import Token, line_of, tokens

# a macro that is defined anew, as CUDA_KERNEL_LOOP is in many files, is worth no warning
_VERSION = [re.sub(r"\D.*", "", one) or "0" for one in torch.__version__.partition("+")[0].split(".")]
OPTIONS = (
    f"-include={PRELUDE}",
    "-default-device",
    "-diag-suppress=47",
    *(f"-DTORCH_VERSION_{part}={one}" for part, one in zip(("MAJOR", "MINOR", "PATCH"), _VERSION)),
)
_INCLUDE = re.compile(r'#\s*include\s*(?:<([^<>"\n]+)>|"([^"\n]+)")')
_INSTEAD = {"cub/cub.cuh": "extension/cub.cuh"}


@dataclass
class _Reader:
    """State of a pass over headers, each where it is included: its definitions hold for the text below."""

    folders: Sequence[Path]
    macros: dict[str, frozenset[str]] = field(default_factory=dict)
    includes: dict[str, str] = field(default_factory=dict)
    names: dict[Path, str] = field(default_factory=dict)  # one file has one name, however it is spelled
    stamps: dict[Path, Stamp | None] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    uncertain: bool = False  # whether what is read stands under an `#if`, which may leave it out

    def reduced(self, text: str, name: str, folder: Path) -> str:
        """The device code of a text; the headers of its own are read before it."""
        lines = [one for one in tokens(text) if one.kind == "directive"]
        blank: list[tuple[int, int]] = []
        replaced: list[tuple[int, int, str]] = []
        for line in lines:
            match = _INCLUDE.match(line.text)
            if match is None:
                continue
            spelled = match[1] or match[2]
            instead = self._instead(line, spelled, match[2] is not None, text, name, folder)
            if instead is None:
                blank.append((line.start, line.end))
            elif instead != line.text:
                replaced.append((line.start, line.end, instead))
        found = device.split(text, self.macros)
        self.macros = found.macros
        self.kernels += [one for one in found.kernels if one not in self.kernels]
        parts = list(found.text)
        for start, end in blank:
            parts[start:end] = [one if one in "\r\n" else " " for one in parts[start:end]]
        for start, end, instead in [*replaced, *found.renamed]:
            parts[start:end] = [instead, *[""] * (end - start - 1)]
        return "".join(parts)

    def _instead(self, line: Token, spelled: str, quoted: bool, text: str, name: str, folder: Path) -> str | None:
        """The directive in the place of an `#include`; None where kernels do not need it."""
        if spelled in _INSTEAD or spelled.startswith("thrust/"):
            return self._shipped(_INSTEAD.get(spelled, THRUST))
        beside = [folder, folder / "include", folder.parent / "include", folder.parent]  # as their setup.py names them
        candidates = [one / spelled for one in (*beside, *self.folders)]
        path = next((one for one in candidates if os.path.isfile(one)), None)
        uncertain = self.uncertain or bool(line.branch) or _is_conditional(text, line.start)
        if path is not None and (quoted or not is_host_header(spelled)):
            return self._own(spelled, path.resolve(), uncertain)
        if is_host_header(spelled):
            return None
        if quoted and os.path.isfile(backend.cuda_include() / spelled):  # a header of CUDA's, in quotes
            return f"#include <{spelled}>"
        if not quoted or os.path.isfile(source.cuda_src() / spelled):
            return line.text if not quoted else self._shipped(spelled)
        if uncertain:
            return None
        looked = ", ".join(dict.fromkeys(str(one.parent) for one in candidates))
        raise SourceError(
            f'{name}:{line_of(text, line.start)}: #include "{spelled}" not found, expected in {looked}; it is a header '
            f"of the extension's own repository: {_cure(spelled, folder)}"
        )

    def _own(self, spelled: str, path: Path, uncertain: bool) -> str:
        if path not in self.names:
            name = self.names[path] = spelled if spelled not in self.includes else f"{path.parent.name}/{path.name}"
            while list(self.names.values()).count(name) > 1:
                name = self.names[path] = f"other/{name}"
            self.includes[name] = ""  # while it is read, for headers that include each other
            self.stamps[path] = source.stamp(path)
            before, self.uncertain = self.uncertain, uncertain
            self.includes[name] = self.reduced(source.read(path), name, path.parent)
            self.uncertain = before
        return f'#include "{self.names[path]}"'

    def _shipped(self, spelled: str) -> str:
        if spelled not in self.includes:
            path = source.cuda_src() / spelled
            self.stamps[path] = source.stamp(path)
            self.includes[spelled] = text = source.read(path)
            for inner in _INCLUDE.finditer(text):
                if inner[2]:
                    self._shipped(inner[2])
        return f'#include "{spelled}"'


@dataclass(frozen=True)
class Extension:
    """An extension's file as it is compiled, and the kernels that were found in it, with their namespaces."""

    source: Source
    kernels: tuple[str, ...]


def load(code: str | Path, beside: Path | None, options: Sequence[str]) -> Extension:
    """The device code of a file, or of a text, and of the headers beside it or in the folders of `-I`.

    Raises:
        SourceError: the file, or a header of its own repository, is not found; the message has its line.
    """
    reader = _Reader([Path(one[2:].strip()) for one in options if one.startswith("-I")])
    reader._shipped(PRELUDE)
    reader.includes |= dict.fromkeys(STANDARD, f'#include "{PRELUDE}"\n')
    if isinstance(code, str) and source.is_text(code):
        text = source.checked(code.removeprefix("\ufeff"), "<text>.cu")
        reduced = reader.reduced(text, "<text>.cu", beside or source.working_folder())
        return Extension(Source("<text>.cu", reduced, None, reader.includes, {}, reader.stamps), tuple(reader.kernels))
    path = source.find(code, beside)
    before = source.stamp(path)
    reduced = reader.reduced(source.read(path), path.name, path.parent)
    stamps = {path: before} | reader.stamps
    return Extension(Source(source.plain(path.name), reduced, path, reader.includes, {}, stamps), tuple(reader.kernels))


_LOOKED_THROUGH = 4_000  # files below a folder, in which a missing header is looked for


def _cure(spelled: str, folder: Path) -> str:
    """Advise on a missing header: the folder for `-I`, if the header lies elsewhere in the same repository."""
    for root in (folder, *list(folder.parents)[:5]):
        left = _LOOKED_THROUGH
        for at, folders, files in os.walk(root):
            folders[:] = sorted(one for one in folders if not one.startswith("."))
            if Path(spelled).name in files and (found := Path(at, Path(spelled).name).as_posix()).endswith(
                f"/{spelled}"
            ):
                return f'it is in {at}, so give options=("-I{found[: -len(spelled) - 1]}",), or --option'
            left -= len(files) + 1
            if left < 0:
                break
        if left < 0 or any((root / one).exists() for one in (".git", "setup.py", "pyproject.toml")):
            break
    return 'put it there, or give its folder, options=("-I...",), or --option=-I... on the command line'


_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|endif)\b(.*)", re.MULTILINE)


def _is_conditional(text: str, at: int) -> bool:
    """Return True if the offset `at` lies inside an `#if` block; the include guard of a header is none."""
    conditions = _CONDITION.findall(text, 0, at)
    guards = sum(word == "ifndef" and re.search(r"_H\w*\s*$", rest) is not None for word, rest in conditions)
    return 2 * sum(word == "endif" for word, _ in conditions) < len(conditions) - guards
