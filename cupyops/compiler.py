"""NVRTC: CUDA text, a kernel's name, options and an architecture in; cubin, PTX and typed parameters out.

Needs no GPU and no driver. A compiled kernel is a `Binary`. It is looked for, in this order: in this process, among
precompiled folders (`cubins/` beside the .cu file, `CUPYOPS_CUBIN_PATH`), in the user's own cache; else NVRTC compiles.

A cubin is code. In the cache only that counts which no other user can have written; the precompiled folders are named by
the user, or lie beside the user's source, and are trusted as that source is, whoever owns them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import backend
from .errors import CompileError, InputError
from .source import UNREADABLE, Source

BASE_OPTIONS = ("-std=c++17", "-lineinfo", "--device-int128")
_FORMAT = 2  # of the cache's entries: raise it when their meaning changes


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter as the PTX declares it: `u64`, `s32`, `f32` ..., or `b8` with a size for a struct."""

    kind: str
    size: int
    align: int


@dataclass(frozen=True)
class Binary:
    """One compiled kernel."""

    name: str  # as written: "relu_fwd<float>"
    symbol: str  # as the cubin names it (mangled)
    arch: str
    ptx: str
    parameters: tuple[Parameter, ...]
    path: Path | None = None  # the .cubin file; None until one is written
    origin: str = "nvrtc"  # "nvrtc", "cache" or "precompiled"


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
    parts = json.dumps([_FORMAT, source.digest, name, arch, BASE_OPTIONS, options])
    readable = re.sub(r"\W+", "-", f"{Path(source.name).stem}.{name}", flags=re.ASCII).strip("-")[:80]
    return f"{readable}.{arch}.{hashlib.sha256(parts.encode()).hexdigest()[:32]}"


_FOR_ARCH = re.compile(r"--?(arch|gpu-architecture)\b")
_NAMES_FILES = re.compile(r"--?(I|include|pre-include|((create|use)-)?pch)")


def checked_options(options: Iterable[str]) -> tuple[str, ...]:
    """Options for NVRTC, as a tuple. Raises `InputError` for what is none, and for another architecture."""
    if isinstance(options, (str, bytes)) or not isinstance(options, Iterable):
        raise InputError(f"options is {options!r}, expected a tuple of strings")
    chosen = tuple(options)
    for option in chosen:
        if not isinstance(option, str) or not option.strip() or UNREADABLE.search(option):
            raise InputError(f"option {option!r} is none that NVRTC could read")
        if _FOR_ARCH.match(option):
            raise InputError(f"option {option!r}: a kernel is compiled for the device that it is launched on")
    return chosen


def _cache_for(options: tuple[str, ...]) -> Path | None:
    """The cache folder; None where an option names files, whose text is in no entry's key."""
    return None if any(_NAMES_FILES.match(option) for option in options) else cache_folder()


def _find(source: Source, stem: str, options: tuple[str, ...]) -> Binary | None:
    for folder in _precompiled_folders(source):
        if (binary := read_entry(folder, stem)) is not None:
            return replace(binary, origin="precompiled")
    if (cache := _cache_for(options)) is not None and (binary := read_entry(cache, stem, private=True)) is not None:
        return replace(binary, origin="cache")
    return None


def _find_compatible(source: Source, name: str, arch: str, options: tuple[str, ...]) -> Binary | None:
    """A precompiled cubin for a lower minor of the same major (sm_80 runs on sm_86), as CUDA guarantees."""
    folders = list(_precompiled_folders(source))
    match = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if not folders or match is None:
        return None
    major, minor = match.groups()
    for lower in range(int(minor) - 1, -1, -1):
        stem = entry_name(source, name, f"sm_{major}{lower}", options)
        for folder in folders:
            if (binary := read_entry(folder, stem)) is not None:
                return replace(binary, origin="precompiled")
    return None


def _precompiled_folders(source: Source) -> Iterator[Path]:
    for folder in os.environ.get("CUPYOPS_CUBIN_PATH", "").split(os.pathsep):
        if folder:
            yield Path(folder).absolute()
    if source.path is not None and (beside := source.path.parent / "cubins").is_dir():
        yield beside


def _fresh(source: Source, name: str, arch: str, options: tuple[str, ...], stem: str) -> Binary:
    binary, cubin = compile(source, name, arch, options)
    folder = _cache_for(options)
    if folder is not None:
        try:
            return write_entry(folder, stem, binary, cubin)
        except OSError as error:
            warnings.warn(f"the kernel cache {folder} cannot be written ({error}); kept in memory", stacklevel=2)
    return replace(binary, path=_in_memory(stem, cubin))


def compile(source: Source, name: str, arch: str, options: tuple[str, ...] = ()) -> tuple[Binary, bytes]:
    """Run NVRTC and nothing else: no cache is read or written."""
    nvrtc = backend.nvrtc()
    flags = (*BASE_OPTIONS, f"-arch={arch}", f"-I{backend.cuda_include()}", *options)
    headers = [text.encode() for text in source.includes.values()]
    with backend.nvrtc_at_work():
        program = nvrtc.createProgram(source.text, source.name, headers, [name.encode() for name in source.includes])
        try:
            nvrtc.addNameExpression(program, name)
            nvrtc.compileProgram(program, flags)
            ptx = nvrtc.getPTX(program)
            symbol = nvrtc.getLoweredName(program, name)
            cubin = nvrtc.getCUBIN(program)
        except RuntimeError as error:  # NVRTC's own, or CuPy's where the options leave no cubin
            log = nvrtc.getProgramLog(program)
            raise CompileError(explain(source, name, arch, log or str(error))) from None
        finally:
            nvrtc.destroyProgram(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    symbol = symbol.decode() if isinstance(symbol, bytes) else symbol
    return Binary(name, symbol, arch, ptx.rstrip("\0"), parameters(ptx, symbol)), cubin


def supported_archs() -> list[str]:
    """The architectures that this NVRTC can compile for, oldest first."""
    return [f"sm_{number}" for number in sorted(backend.nvrtc().getSupportedArchs())]


# --- what the PTX says -------------------------------------------------------------------------------------------

_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr\b[^,\[]*?)?\s+\w+(?:\[(\d+)\])?\s*(?:,|$)"
)


def parameters(ptx: str, symbol: str) -> tuple[Parameter, ...]:
    """The parameter list of the entry `symbol`: types and sizes, as the compiler laid them out."""
    match = re.search(rf"\.entry\s+{re.escape(symbol)}(?![\w$])\s*(?:\(([^)]*)\))?", ptx)
    if match is None:
        raise CompileError(f"the PTX has no entry {symbol}")
    found = []
    for align, kind, count in _PARAMETER.findall(match.group(1) or ""):
        size = int(re.sub(r"\D", "", kind)) // 8
        found.append(Parameter(kind, size * int(count or 1), int(align or size)))
    return tuple(found)


# --- a compile error, told from the .cu file ---------------------------------------------------------------------

_MESSAGE = re.compile(
    r"^(?P<file>\S[^\n]*?)\((?P<line>\d+)\): (?P<severity>(?:catastrophic )?error|warning).*?: (?P<text>.*)$"
)


# What a message means that names neither the cause nor the cure.
_HINTS = {
    'identifier "__half" is undefined': "hint: a kernel for torch.float16 needs #include <cuda_fp16.h>",
    'identifier "__nv_bfloat16" is undefined': "hint: a kernel for torch.bfloat16 needs #include <cuda_bf16.h>",
    'identifier "INFINITY" is undefined': "hint: NVRTC has no INFINITY; write __int_as_float(0x7f800000)",
    "could not open source file": "hint: NVRTC has the CUDA runtime's headers only, not those of the C++ library",
}


def explain(source: Source, name: str, arch: str, log: str) -> str:
    """NVRTC's log as a message: file:line, the excerpt with a caret, the template arguments, then NVRTC's own words."""
    parts = [f"{source.name}: kernel {name} does not compile for {arch}"]
    lines = log.rstrip("\0").splitlines()
    for index, line in enumerate(lines):
        match = _MESSAGE.match(line)
        if match is None or "error" not in match["severity"]:
            continue
        file, number = match["file"], int(match["line"])
        parts.append(f"\n{file}:{number}: {match['severity']}: {match['text']}")
        excerpt = source.line(file, number)
        if excerpt is not None:
            caret = next((text.index("^") for text in lines[index + 1 : index + 4] if text.strip() == "^"), None)
            # NVRTC strips the excerpt's indent and indents by two; the caret stands under that text
            shown = excerpt.strip()
            parts.append(f"  {number:>5} | {shown}")
            if caret is not None:
                printed = next((t for t in lines[index + 1 : index + 3] if t.strip() == shown), "")
                parts.append("        | " + " " * max(0, caret - (len(printed) - len(printed.lstrip()))) + "^")
    parts += [f"\n{hint}" for sign, hint in _HINTS.items() if sign in log]
    parts.append("\nNVRTC's log:\n" + "\n".join("  " + line for line in lines if line.strip()))
    return "\n".join(parts)


# --- the disk ----------------------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """The user's own kernel cache (0700), one folder per NVRTC version, or None where none can be had.

    A root that was there before keeps its mode, for it may serve others too; but no one else may write to it.
    """
    root = _cache_root()
    if root is None:
        return None
    major, minor = backend.nvrtc_version()
    folder = root / f"nvrtc-{major}.{minor}-{backend.runtime_version(backend.cuda_include())}"
    return folder if _ours(root, 0o022) and _ours(folder, 0o077, close=True) else None


def _cache_root() -> Path | None:
    """What CUPYOPS_CACHE_DIR says, else the place for caches in the user's home, if there is one."""
    chosen = os.environ.get("CUPYOPS_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    try:
        import platformdirs
    except ImportError:
        warnings.warn(
            "kernels are compiled anew by each process: pip install platformdirs, or set CUPYOPS_CACHE_DIR",
            stacklevel=2,
        )
        return None
    try:
        root = Path(platformdirs.user_cache_dir("cupyops", appauthor=False))
    except RuntimeError:  # a user without a home
        return None
    return root if root.is_absolute() else None  # older versions of platformdirs give "~" as it stands


def _ours(folder: Path, forbidden: int, close: bool = False) -> bool:
    """Make `folder` if need be; whether it is a real folder of ours without the `forbidden` bits (or rid of them)."""
    try:
        str(folder).encode()  # as in `read_entry`
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or _foreign(status):
            return False
        if status.st_mode & forbidden:
            if not close:
                return False
            folder.chmod(0o700)
        return os.access(folder, os.W_OK | os.X_OK)
    except (OSError, UnicodeEncodeError):
        return False


def _foreign(status: os.stat_result) -> bool:
    return hasattr(os, "getuid") and status.st_uid != os.getuid()


_TEMPORARY = ".writing-"  # how the names of unfinished files begin
_ABANDONED = 3600  # seconds; no writer is at work for so long


def write_entry(folder: Path, stem: str, binary: Binary, cubin: bytes) -> Binary:
    """Write the .cubin, then the .json that vouches for it, each under a temporary name first."""
    _sweep(folder)
    record = asdict(replace(binary, path=None)) | {"stem": stem}
    _replace(folder / f"{stem}.cubin", cubin)
    _replace(folder / f"{stem}.json", json.dumps(record | {"sha256": _seal(record, cubin)}).encode())
    return replace(binary, path=folder / f"{stem}.cubin")


def _seal(record: dict[str, Any], cubin: bytes) -> str:
    """SHA-256 over all that an entry says, and the cubin of which it says it."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode() + cubin).hexdigest()


def _sweep(folder: Path) -> None:
    """Remove what writers left behind that were killed."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED:
                path.unlink()


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_entry(folder: Path, stem: str, private: bool = False) -> Binary | None:
    """The entry, if both its files are there, whole, and belong together; anything else is a miss.

    In a `private` folder a file that another user can have written is not there.
    """
    path = folder / f"{stem}.cubin"
    try:
        str(path).encode()  # as CuPy does, before it hands the path to the driver
        record = json.loads(_read(folder / f"{stem}.json", private))
        seal = record.pop("sha256")
        if seal != _seal(record, _read(path, private)) or record.pop("stem") != stem:
            return None
        record["parameters"] = tuple(Parameter(**parameter) for parameter in record["parameters"])
        return Binary(**record | {"path": path})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _read(path: Path, private: bool) -> bytes:
    """The content of a regular file; a FIFO is not waited for. `private`: of a file of ours alone, and through no link."""
    extra = getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if private else 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or (private and (_foreign(status) or status.st_mode & 0o022)):
            raise PermissionError(f"{path} is not to be trusted")
        return file.read()


def _in_memory(stem: str, cubin: bytes) -> Path:
    """A path from which the driver can load `cubin` though no cache folder can be written."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(stem[:200])
        with os.fdopen(
            descriptor, "wb", closefd=False
        ) as file:  # open for as long as the process: the path leads to it
            file.write(cubin)
        return Path(f"/proc/self/fd/{descriptor}")  # the same file in a process that is forked from this one
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as temporary:
        temporary.write(cubin)
    return Path(temporary.name)
