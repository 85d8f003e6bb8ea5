"""The tag in torch.compiler's cache keys that says what our operators are.

PyTorch keys a compiled graph by the names of its operators. What was traced into the graph beside them, such as the gradient
of a reference, would be served from the cache after an edit. So the tag holds a digest of this package, and one of each
operator of an author that PyTorch knows: the code of its roles, what they name and what they close over.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import Kernel
from .public import author_of

_PACKAGE = __name__.partition(".")[0]
_OURS = re.compile(r"\|?cupyops:[0-9a-f]{32}$")
_LITERALS = (type(None), type(...), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_VALUES = 4096  # elements of a tensor that count by their values; a larger one counts by its shape

_digests: dict[str, str] = {}  # of each operator that PyTorch knows
_tag = ""


def enter(name: str, roles: Sequence[Any]) -> None:
    """Add the digest of an operator's roles to the tag; those of this package are in its own digest."""
    global _tag
    if not all(_is_ours(role) for role in roles if callable(role)) or not name.startswith(f"{_PACKAGE}::"):
        _digests[name] = _digest(roles)
        _tag = ""
    put()


def put() -> None:
    """Have the tag behind what the user has set as `torch.compiler.config.cache_key_tag`."""
    global _tag
    if not _tag:
        whole = hashlib.sha256(
            "\n".join([_package(), *(f"{one} {_digests[one]}" for one in sorted(_digests))]).encode()
        )
        _tag = f"cupyops:{whole.hexdigest()[:32]}"
    config = torch.compiler.config
    if not config.cache_key_tag.endswith(_tag):
        users = _OURS.sub("", config.cache_key_tag)
        config.cache_key_tag = f"{users}|{_tag}" if users else _tag


@functools.cache
def _package() -> str:
    """A digest of this package's own Python; what a kernel computes is in no graph."""
    sha = hashlib.sha256()
    folder = Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        sha.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return sha.hexdigest()


def _is_ours(role: Any) -> bool:
    return (getattr(role, "__module__", None) or "").partition(".")[0] == _PACKAGE


def _digest(roles: Sequence[Any]) -> str:
    sha = hashlib.sha256()
    for part in _parts(list(roles), {}):
        sha.update(part.encode() + b"\0")
    return sha.hexdigest()


def _parts(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[str]:
    """Yield strings that tell a value apart from others of its kind, the same in every process."""
    if isinstance(value, _LITERALS):
        yield repr(value)
        return
    if id(value) in seen:
        yield f"#{seen[id(value)][0]}"
        return
    seen[id(value)] = len(seen), value  # which lives as long as its id counts
    yield type(value).__qualname__
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _parts(one, seen)
    elif isinstance(value, (dict, types.MappingProxyType)):
        for key, one in value.items():
            yield from _parts(key, seen)
            yield from _parts(one, seen)
    elif isinstance(value, types.CodeType):
        yield value.co_code.hex()
        yield repr((value.co_names, value.co_varnames, value.co_freevars, value.co_argcount, value.co_flags))
        yield from _parts(value.co_consts, seen)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value, seen)
    elif isinstance(value, types.MethodType):
        yield from _parts([value.__func__, value.__self__], seen)
    elif isinstance(value, Kernel):
        yield f"{value} {value.domain} {value.options}"
    elif isinstance(value, functools.partial):
        yield from _parts([value.func, value.args, value.keywords], seen)
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {value.device}"
        if value.device.type == "cpu" and value.layout is torch.strided and value.numel() <= _VALUES:
            yield repr(value.tolist())
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}"
        if not _is_library(value.__module__) and not _is_ours(value):
            for name, one in vars(value).items():
                if isinstance(one, (types.FunctionType, staticmethod, classmethod, property, *_LITERALS)):
                    yield name
                    yield from _parts(_unwrapped(one), seen)
    else:
        yield from _parts_of_object(value, seen)


def _parts_of_function(function: types.FunctionType, seen: dict[int, tuple[int, Any]]) -> Iterator[str]:
    """Yield strings for a function: its code, defaults, closure, and the globals that it names."""
    module = function.__module__ or ""
    if (author := author_of(function)) is not None:  # its own code is written at the first call
        yield from _parts(author, seen)
        return
    if _is_library(module):
        yield f"{module}.{function.__qualname__}"
        return
    yield from _parts([function.__code__, function.__defaults__, function.__kwdefaults__], seen)
    for cell in function.__closure__ or ():
        try:
            yield from _parts(cell.cell_contents, seen)
        except ValueError:  # not assigned yet
            yield "empty"
    if function.__globals__ is getattr(sys.modules.get(module), "__dict__", None) and _is_ours(function):
        return
    names = _names(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        yield name
        found = function.__globals__[name]
        yield from _parts(found, seen)
        if isinstance(found, types.ModuleType) and not _is_library(found.__name__):
            for attribute in sorted(names & vars(found).keys()):
                yield attribute
                yield from _parts(vars(found)[attribute], seen)


def _parts_of_object(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[str]:
    from .definition import Definition

    definition = getattr(value, "definition", None)
    if isinstance(definition, Definition):  # an operator that a reference calls
        value = definition
    if isinstance(value, Definition):
        yield from _parts([value.name, *value.roles()], seen)
        return
    if callable(wrapped := getattr(value, "__wrapped__", None)):  # as functools.cache has it
        yield from _parts(wrapped, seen)
        return
    if _is_library(type(value).__module__):
        yield f"{type(value).__module__} {getattr(value, '__qualname__', getattr(value, '__name__', ''))}"
        return
    yield from _parts(type(value), seen)
    for name, one in sorted(getattr(value, "__dict__", {}).items()):
        if not name.startswith("_"):
            yield name
            yield from _parts(one, seen)


def _unwrapped(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def _names(code: types.CodeType) -> set[str]:
    """The global names and the attributes that code mentions, with the functions inside it."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


@functools.cache
def _is_library(module: str) -> bool:
    """Return True if a module is PyTorch's, Python's or another installed one, whose versions are not ours to tell."""
    top = (module or "").partition(".")[0]
    if top == _PACKAGE or top == "__main__":
        return False
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    found = getattr(sys.modules.get(top), "__file__", None) or inspect.getattr_static(
        sys.modules.get(top), "__path__", [""]
    )
    first = found if isinstance(found, str) else next(iter(found), "")
    return "site-packages" in first or "dist-packages" in first
