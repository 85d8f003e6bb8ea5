"""The headers to which a compiler option leads (`-I`, `-include`): their texts belong to a kernel's key.

The compiler reads them itself, so which of them it takes is not known here: every file that an `#include` could mean counts,
whatever `#if` it stands under. That is more than is compiled, never less.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from . import backend
from .source import Source, strip_comments

_FOLDER = re.compile(r"(?:-I|--include-path(?==|$))[= ]*(.*)", re.DOTALL)
_HEADER = re.compile(r"(?:-include|--pre-include)(?:=(.*)|$)", re.DOTALL)
_PRECOMPILED = re.compile(r"--?((create|use)-)?pch")
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\r?\n)*[^\n]*", re.MULTILINE)
_NAME = re.compile(r"""<([^<>"\n]+)>|"([^"\n]+)\"""")  # also in #if __has_include(<name>)
_BY_MACRO = re.compile(r"[ \t]*#(?:[ \t]|/\*.*?\*/)*(?:include|include_next|import)\b[ \t]*[^<\"\s]")

_known: dict[bytes, list[str] | None] = {}  # what is in the directives of a text, by its SHA-256


def digest(source: Source, options: tuple[str, ...]) -> str | None:
    """SHA-256 over every header outside `source` to which `options` lead.

    Empty where they lead to none; None where it cannot be told: a precompiled header, an include that a macro names.
    """
    named = _names_of_options(options)
    if named is None or not any(named):
        return None if named is None else ""
    folders = [Path(), backend.cuda_include(), *map(Path, named[0])]  # CUDA's own headers ask for others: nv/target
    found: dict[Path, bytes] = {}
    pending: list[tuple[list[str] | None, Path | None]] = [(named[1], None)]
    pending += [(_included(text.encode()), None) for text in (source.text, *source.includes.values())]
    try:
        while pending:
            names, beside = pending.pop()
            if names is None:
                return None
            for path in _files(names, [beside, *folders] if beside else folders):
                if path not in found:
                    content = path.read_bytes()
                    found[path] = hashlib.sha256(content).digest()
                    pending.append((_included(content), path.parent))
    except OSError:
        return None
    parts = (os.fsencode(path) + b"\0" + content for path, content in sorted(found.items()))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _names_of_options(options: tuple[str, ...]) -> tuple[list[str], list[str]] | None:
    """The folders and the headers that the options name, the latter as the compiler is to include them first."""
    folders: list[str] = []
    headers: list[str] = []
    left = iter(options)
    for option in left:
        if _PRECOMPILED.match(option):
            return None
        for pattern, values in ((_FOLDER, folders), (_HEADER, headers)):
            if (match := pattern.fullmatch(option)) is not None:
                values.append(match[1] or next(left, ""))  # in one option, or in two
                break
    return folders, headers


def _included(content: bytes) -> list[str] | None:
    """The names that stand in the directives of a text, or None where an include has none."""
    key = hashlib.sha256(content).digest()
    if key not in _known:
        text = content.decode(errors="surrogateescape")
        directives = _DIRECTIVE.findall(text)
        if any(map(_BY_MACRO.match, directives)):
            directives = _DIRECTIVE.findall(strip_comments(text))  # which takes longest, and is rarely needed
        hidden = any(map(_BY_MACRO.match, directives))
        _known[key] = None if hidden else [a or b for line in directives for a, b in _NAME.findall(line)]
    return _known[key]


def _files(names: list[str], folders: list[Path]) -> Iterator[Path]:
    """Every file that one of the names can mean, each under one name however it is spelled."""
    for name in names:
        for folder in folders:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                place, base = os.path.split(path)
                yield Path(os.path.realpath(place), base)
