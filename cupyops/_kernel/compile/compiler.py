"""NVRTC: CUDA text, a kernel's name, options and an architecture in; cubin, PTX and typed parameters out.

Needs no GPU and no driver. A compiled kernel is a `Binary`. It is looked for, in this order: in this process, among
precompiled folders (`cubins/` beside the .cu file, `CUPYOPS_CUBIN_PATH`), in the user's own cache; else NVRTC compiles.

A cubin is code. Which of the precompiled ones are run, `trust.py` says; which of those in the cache, `cache.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..._util import settings
from ...errors import CompileError, InputError, SourceError
from . import architecture, backend, cache, headers, mangled, room, trust
from .binary import Binary, parameters
from .diagnosis import explain
from .source import UNREADABLE, Source

BASE_OPTIONS = ("-std=c++17", "-lineinfo", "--device-int128")
_FORMAT = 3  # of the cache's entries: raise it when their meaning changes


_memory: dict[str, Binary] = {}
_locks: dict[str, threading.Lock] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)  # what the parent's other threads held, nobody will release


def build(source: Source, name: str, arch: str, options: tuple[str, ...] = ()) -> Binary:
    """The `Binary` of kernel `name` (a name expression such as "relu_fwd<float>") for `arch` ("sm_90").

    Thread-safe; two processes may build the same kernel at once. Raises `CompileError`.
    """
    stem = entry_name(source, name, arch, options)
    with _locks.setdefault(stem, threading.Lock()):
        binary = _memory.get(stem)
        if binary is None or not os.path.exists(binary.path or ""):  # gone where the cache has been emptied since
            binary = _memory[stem] = (
                _find(source, stem, options)
                or _find_compatible(source, name, arch, options)
                or _fresh(source, name, arch, options, stem)
            )
        return binary


def entry_name(source: Source, name: str, arch: str, options: tuple[str, ...]) -> str:
    """The file stem under which this kernel is kept; its digest covers every text that goes into it."""
    outside = headers.digest(source, _with_libraries(source, options))
    parts = json.dumps([_FORMAT, source.digest, name, arch, BASE_OPTIONS, options, *([outside] if outside else [])])
    readable = re.sub(r"\W+", "-", f"{Path(source.name).stem}.{name}", flags=re.ASCII).strip("-")[:80]
    return f"{readable}.{arch}.{hashlib.sha256(parts.encode()).hexdigest()[:32]}"


def defines(constants: Mapping[str, int]) -> tuple[str, ...]:
    """The options that define integer constants, in the order of their names. Raises `InputError` for what is none."""
    for name, value in constants.items():
        if not (isinstance(name, str) and name.isidentifier()) or isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"define has {name!r}: {value!r}, expected the name of a macro and an int")
    return tuple(f"-D{name}={value}" for name, value in sorted(constants.items()))


def _with_libraries(source: Source, options: tuple[str, ...]) -> tuple[str, ...]:
    """The options, with the folders of CUDA's other libraries behind them where the text includes a header of theirs."""
    if not source.asks_libraries:
        return options
    return (*options, *(f"-I{folder}" for folder in backend.library_includes()))


_FOR_ARCH = re.compile(r"--?(arch|gpu-architecture)\b")


def checked_options(options: Iterable[str]) -> tuple[str, ...]:
    """Options for NVRTC, as a tuple. Raises `InputError` for what is none, and for another architecture."""
    if isinstance(options, (str, bytes)) or not isinstance(options, Iterable):
        raise InputError(f"options is {options!r}, expected a tuple of strings")
    chosen = tuple(options)
    for option in chosen:
        if not isinstance(option, str) or not option.strip() or UNREADABLE.search(option):
            raise InputError(f'option {option!r} is none that NVRTC could read; expected text such as "-DN=4"')
        if _FOR_ARCH.match(option):
            raise InputError(
                f"option {option!r}: a kernel is compiled for the device that it is launched on; for a specific target "
                'give arch="sm_90a" to Kernel'
            )
    return chosen


def _cache_for(source: Source, options: tuple[str, ...]) -> Path | None:
    """The cache folder; None where an option leads to text that is in no entry's key."""
    return None if headers.digest(source, _with_libraries(source, options)) is None else cache.folder()


def _find(source: Source, stem: str, options: tuple[str, ...]) -> Binary | None:
    for folder in _precompiled_folders(source):
        if (binary := _precompiled(folder, stem, source)) is not None:
            return binary
    kept = _cache_for(source, options)
    if kept is not None and (binary := cache.read_entry(kept, stem, private=True)) is not None:
        room.note_use(kept, stem)
        return replace(binary, origin="cache")
    return None


def _find_compatible(source: Source, name: str, arch: str, options: tuple[str, ...]) -> Binary | None:
    """A precompiled cubin for a lower minor of the same major (sm_80 runs on sm_86), as CUDA guarantees."""
    folders = list(_precompiled_folders(source))
    wanted = architecture.read(arch)
    if not folders or wanted is None or wanted.suffix:
        return None
    for lower in range(wanted.minor - 1, -1, -1):
        stem = entry_name(source, name, wanted._replace(minor=lower).plain, options)
        for folder in folders:
            if (binary := _precompiled(folder, stem, source)) is not None:
                return binary
    return None


def _precompiled(folder: Path, stem: str, source: Source) -> Binary | None:
    binary = cache.read_entry(folder, stem) if trust.allows(folder, stem, source.path) else None
    return None if binary is None else replace(binary, origin="precompiled")


def _precompiled_folders(source: Source) -> Iterator[Path]:
    for folder in settings.CUBIN_PATH.read(default=[]):
        yield Path(os.path.realpath(folder))  # not through a link that leads elsewhere later
    if source.path is not None and (beside := source.path.parent / "cubins").is_dir():
        yield Path(os.path.realpath(beside))


def _fresh(source: Source, name: str, arch: str, options: tuple[str, ...], stem: str) -> Binary:
    binary, cubin = compile(source, name, arch, options)
    folder = _cache_for(source, options)
    if folder is not None and entry_name(source, name, arch, options) == stem:  # no header has been edited meanwhile
        try:
            written = cache.write_entry(folder, stem, binary, cubin)
            room.hold_limit(folder.parent)
            return written
        except OSError as error:
            warnings.warn(f"the kernel cache {folder} cannot be written ({error}); kept in memory", stacklevel=2)
    return replace(binary, path=cache.in_memory(stem, cubin))


def compile(source: Source, name: str, arch: str, options: tuple[str, ...] = ()) -> tuple[Binary, bytes]:
    """Run NVRTC and nothing else: no cache is read or written. For "compute_90" the PTX of sm_90, and no machine code."""
    flags = (*BASE_OPTIONS, f"-arch={arch}", f"-I{backend.cuda_include()}", *_with_libraries(source, options))
    try:
        ptx, cubin, (symbol, asked) = _compiled(source, source.text + _TYPES, (name, _TYPES_OF.format(name)), flags)
    except (
        _Failed
    ):  # two kernels of the name, or a text that does not end outside of everything; or an error of its own
        asked = ""
        try:
            ptx, cubin, (symbol,) = _compiled(source, source.text, (name,), flags)
        except _Failed as failed:
            if (absent := source.absent(failed.log)) is not None:
                raise SourceError(absent) from None
            raise CompileError(explain(source, name, arch, failed.log)) from None
    known = mangled.parameters(symbol) is not None or mangled.parameters(asked) is None
    if asked:
        ptx = re.sub(_ENTRY.format(re.escape(asked)), "", ptx, flags=re.MULTILINE | re.DOTALL)
    return Binary(name, symbol, arch, ptx, parameters(ptx, symbol), typed="" if known else asked), cubin


# A kernel whose symbol tells what another takes, where that one's own does not: `extern "C"` functions have no types in
# their symbols, and templates may have there what hangs on their parameters. It does nothing, and costs a tenth of a program
# of its own.
_TYPES = "\ntemplate <typename> __global__ void cupyops_types_() {}\n"
_TYPES_OF = "cupyops_types_<decltype(&{})>"
_ENTRY = r"(^[ \t]*//[^\n]*{0}\s*\n)?^\.weak \.entry {0}\(\)\n\{{.*?^\}}\n"


class _Failed(Exception):
    """NVRTC's own error, or CuPy's where the options leave no cubin."""

    def __init__(self, log: str) -> None:
        self.log = log


def _compiled(
    source: Source, text: str, names: tuple[str, ...], flags: tuple[str, ...]
) -> tuple[str, bytes, tuple[str, ...]]:
    """PTX, cubin and the symbols of `names`, of `text` in the place of the source's own."""
    nvrtc = backend.nvrtc()
    includes = [included.encode() for included in source.includes.values()]
    with backend.nvrtc_at_work():
        program = nvrtc.createProgram(text, source.name, includes, [path.encode() for path in source.includes])
        try:
            for name in names:
                nvrtc.addNameExpression(program, name)
            nvrtc.compileProgram(program, flags)
            ptx = _text(nvrtc.getPTX(program)).rstrip("\0")
            symbols = tuple(_text(nvrtc.getLoweredName(program, name)) for name in names)
            return ptx, b"" if any(map(_PTX_ALONE.match, flags)) else nvrtc.getCUBIN(program), symbols
        except RuntimeError as error:
            raise _Failed(nvrtc.getProgramLog(program) or str(error)) from None
        finally:
            nvrtc.destroyProgram(program)


_PTX_ALONE = re.compile("-arch=compute_")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def supported_archs() -> list[str]:
    """The architectures that this NVRTC can compile for, oldest first."""
    return [f"sm_{number}" for number in sorted(backend.nvrtc().getSupportedArchs())]
