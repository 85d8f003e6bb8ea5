"""CUDA source text: find a .cu file, gather what it includes, digest the whole.

A `Source` is complete: it holds the text of the file and of every quoted include, so that what is hashed is what is
compiled. Angle-bracket includes (`<cuda_fp16.h>`) belong to the CUDA runtime headers and are left to the compiler.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ...errors import InputError, SourceError

_own: dict[Path, Source] = {}  # the built-in files that were read: a file has many kernels
_PACKAGE = Path(__file__).resolve().parents[2]  # cupyops/

# A comment, or a literal: what stands between quotes begins no comment. One that does not end is taken to the end of the
# text or of the line, and a character is short: so no text is gone through twice, however long and strange it is.
_COMMENT_OR_LITERAL = re.compile(
    r"""//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*+"?|'(?:\\.|[^'\\\n]){1,10}'""", re.DOTALL
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_OF_LIBRARIES = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*<(cub|cuda|cupy|nv|thrust|cooperative_groups|curand\w*|mma|crt)\b", re.MULTILINE
)
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|endif)\b", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\\\n]|\\.)*", re.MULTILINE | re.DOTALL)
_ALIGNMENT = re.compile(r"\b(?:__align__|alignas)\s*\([^()]*\)")
_ABSENT = "#error a file that was not found\n"  # the text of a header that only a condition asks for
# an include whose text would be missing from the digest: its name is a macro's, or leads past the compiler's own folders
_HIDDEN = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:[^"<\s]|<[ \t]*/)[^\n]*', re.MULTILINE)
_CODE = re.compile(r"\(.*\{.*\}|;\s*$")  # what no file is called
# no UTF-8 has a surrogate, and for the compiler a text ends at the first NUL
UNREADABLE = re.compile("[\0\ud800-\udfff]")


def cuda_src() -> Path:
    """The folder of the built-in kernels: inside an installed package, beside it in a source tree."""
    inside = _PACKAGE / "cuda_src"
    return inside if inside.is_dir() else _PACKAGE.parent / "cuda_src"


def strip_comments(text: str) -> str:
    """`text` with each comment blanked out; line numbers stay as they were."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group()) if match.group().startswith("/") else match.group()

    return _COMMENT_OR_LITERAL.sub(blank, text)


Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp | None:
    """State of a file that changes when it is written or replaced; None where there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True)
class Source:
    """One translation unit: its text and the text of each quoted include, keyed as the `#include` line spells it."""

    name: str
    text: str
    path: Path | None = None
    includes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(
        default_factory=dict, compare=False
    )  # those not found, and what there is to say of it
    stamps: dict[Path, Stamp | None] = field(
        default_factory=dict, compare=False
    )  # of each file, taken before it was read

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the name, the text and every included text."""
        sha = hashlib.sha256()
        for part in (self.name, self.text, *(piece for item in sorted(self.includes.items()) for piece in item)):
            encoded = part.encode()
            sha.update(len(encoded).to_bytes(8, "little") + encoded)
        return sha.hexdigest()

    @cached_property
    def code(self) -> tuple[str, ...]:
        """Texts of the source and of its includes, without comments, directives and alignments."""
        pieces = (_DIRECTIVE.sub("", strip_comments(piece)) for piece in (self.text, *self.includes.values()))
        return tuple(_ALIGNMENT.sub(" ", piece) for piece in pieces)

    @cached_property
    def asks_libraries(self) -> bool:
        """Return True if the text includes a header of CUDA's C++ library, of cuRAND or of nvcc."""
        return any(map(_OF_LIBRARIES.search, (self.text, *self.includes.values())))

    def absent(self, log: str) -> str | None:
        """Return the message for an include that was not found, if the compiler's log says that it came to it."""
        for spelled, message in self.missing.items():
            if re.search(rf"(?:^|/){re.escape(spelled)}\(1\): [a-z ]*error: #error", log, re.MULTILINE):
                return message
        return None

    def line(self, file: str, number: int) -> str | None:
        """Line `number` (from 1) of this source or of one of its includes, or None where there is no such line."""
        text = self.text if file == self.name else self.includes.get(file)
        lines = text.splitlines() if text is not None else []
        return lines[number - 1] if 0 < number <= len(lines) else None


def is_own(folder: Path | None) -> bool:
    """Return True if a folder is one of this package."""
    return folder is not None and folder.is_relative_to(_PACKAGE)


def is_text(source: str) -> bool:
    """Return True if `source` is CUDA C itself and not a file's name."""
    return "\n" in source or "__global__" in source


def load(source: str | Path, beside: Path | None = None) -> Source:
    """The `Source` for a piece of CUDA C, or for a file found beside `beside` or among the built-in kernels."""
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(f"{source!r} is neither CUDA C nor the name of a .cu file; give one of the two")
    if isinstance(source, str) and is_text(source):
        text = checked(source.removeprefix("\ufeff"), "<text>.cu")
        return Source("<text>.cu", text, None, *_gather(text, "<text>.cu", beside or working_folder()))
    path = find(source, beside)
    if (kept := _own.get(path)) is not None and all(stamp(one) == was for one, was in kept.stamps.items()):
        return kept
    before = stamp(path)
    text = read(path)
    includes, missing, stamps = _gather(text, path.name, path.parent)
    loaded = Source(plain(path.name), text, path, includes, missing, {path: before} | stamps)
    if path.parent == cuda_src():
        _own[path] = loaded
    return loaded


def find(source: str | Path, beside: Path | None = None) -> Path:
    """The path of a .cu file: absolute, else beside the caller, else in the working folder, else built in.

    For a caller inside this package the working folder does not count: the file of that name there is another one.
    """
    if isinstance(source, str) and _CODE.search(source):
        raise SourceError(
            f"{source[:80]!r} is neither the name of a file nor CUDA C with a kernel in it: a kernel begins with "
            "`__global__ void`"
        )
    inside = is_own(beside)
    folders = [folder for folder in (beside, None if inside else working_folder(), cuda_src()) if folder is not None]
    candidates = (
        [Path(source)] if Path(source).is_absolute() else [folder / source for folder in dict.fromkeys(folders)]
    )
    for candidate in candidates:
        if os.path.isfile(candidate):  # unlike Path.is_file it raises nothing, whatever the name
            return candidate.resolve()
    looked = "\n".join(f"  {candidate}" for candidate in candidates)
    meant = _meant(candidates) or "."
    raise SourceError(f"no CUDA source named {str(source)!r}{meant} Looked for:\n{looked}")


def _meant(candidates: Iterable[Path]) -> str:
    """`; did you mean 'known.cu'?` where beside one of the files that are not there is one that is called much the same."""
    for path in candidates:
        try:
            files = [Path(name) for name in os.listdir(path.parent)]
        except (OSError, ValueError):
            continue
        known = [file.stem for file in files if file.suffix == path.suffix]
        if near := difflib.get_close_matches(path.stem, known, 1):
            return f"; did you mean {near[0] + path.suffix!r}?"
    return ""


def working_folder() -> Path:
    """Working folder of the process."""
    try:
        return Path.cwd()
    except OSError:  # it has been removed
        return Path()


def plain(name: str) -> str:
    """A file's name as the compiler can be given it: it reads a leading dash as an option, and writes quotes as they are."""
    return re.sub(r'^-|["\r\n\ud800-\udfff]', "_", name)


def read(path: Path) -> str:
    """The text of a file, all of which the compiler will see."""
    try:
        return checked(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}; give a file that you can read") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error


def checked(text: str, name: str) -> str:
    """`text`, all of which the compiler will see."""
    if (bad := UNREADABLE.search(text)) is not None:
        raise InputError(
            f"{name}:{text.count(chr(10), 0, bad.start()) + 1}: {bad.group()!r} has no place in CUDA C; remove it"
        )
    return text


def _gather(text: str, name: str, folder: Path) -> tuple[dict[str, str], dict[str, str], dict[Path, Stamp | None]]:
    """Every quoted include reachable from `text`, each looked for beside its includer and then in cuda_src.

    Then those that are not there, and what there is to say of each; and the stamps of all. One that stands under a condition
    may never be asked for, as under `#if 0`: the compiler finds a text in its place that is an error if it is.
    """
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    stamps: dict[Path, Stamp | None] = {}
    origin: dict[str, Path] = {}
    pending = [(text, name, folder)]
    while pending:
        text, name, folder = pending.pop()
        clean = strip_comments(text)
        if (hidden := _HIDDEN.search(clean)) is not None:
            number, line = clean.count("\n", 0, hidden.start()) + 1, hidden.group().strip()
            raise SourceError(f'{name}:{number}: {line}: name the file, as #include "file" or #include <file>')
        for match in _INCLUDE.finditer(clean):
            spelled = match.group(1)
            candidates = [folder / spelled, cuda_src() / spelled]
            path = next((path for path in candidates if os.path.isfile(path)), None)
            if path is None:
                number = clean.count("\n", 0, match.start()) + 1
                message = (
                    f'{name}:{number}: #include "{spelled}" not found in {folder} or {cuda_src()}{_meant(candidates)}\n'
                    f"  put it beside {name}, or write #include <{spelled}> and give its folder: "
                    'Kernel(..., options=("-I...",))'
                )
                if not _is_conditional(clean, match.start()):
                    raise SourceError(message)
                # what asks whether there is such a file is to be told the truth
                if spelled not in found and f'__has_include("{spelled}")' not in clean.replace(" ", ""):
                    found[spelled], missing[spelled] = _ABSENT, message
                stamps |= dict.fromkeys(candidates)
                continue
            path = path.resolve()
            if origin.setdefault(spelled, path) != path:
                raise SourceError(f'#include "{spelled}" means both {origin[spelled]} and {path}; rename one of them')
            if spelled not in found or missing.pop(spelled, ""):
                stamps[path] = stamp(path)
                found[spelled] = read(path)
                pending.append((found[spelled], spelled, path.parent))
    return found, missing, stamps


def _is_conditional(text: str, at: int) -> bool:
    """Return True if the offset `at` lies inside an `#if` block."""
    conditions = _CONDITION.findall(text, 0, at)
    return 2 * conditions.count("endif") < len(conditions)
