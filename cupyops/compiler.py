"""NVRTC: CUDA text, a kernel's name, options and an architecture in; cubin, PTX and typed parameters out.

Needs no GPU and no driver. A compiled kernel is a `Binary`. It is looked for, in this order: in this process, among
precompiled folders (`cubins/` beside the .cu file, `CUPYOPS_CUBIN_PATH`), in the user's own cache; else NVRTC compiles.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import backend
from .errors import CompileError
from .source import Source

BASE_OPTIONS = ("-std=c++17", "-lineinfo", "--device-int128")
_FORMAT = 1  # of the cache's entries: raise it when their meaning changes


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
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


def build(source: Source, name: str, arch: str, options: tuple[str, ...] = ()) -> Binary:
    """The `Binary` of kernel `name` (a name expression such as "relu_fwd<float>") for `arch` ("sm_90").

    Thread-safe; two processes may build the same kernel at once. Raises `CompileError`.
    """
    stem = entry_name(source, name, arch, options)
    with _locks[stem]:
        if stem not in _memory:
            _memory[stem] = (
                _find(source, stem)
                or _find_compatible(source, name, arch, options)
                or _fresh(source, name, arch, options, stem)
            )
        return _memory[stem]


def entry_name(source: Source, name: str, arch: str, options: tuple[str, ...]) -> str:
    """The file stem under which this kernel is kept; its digest covers every text that goes into it."""
    parts = json.dumps([_FORMAT, source.digest, name, arch, BASE_OPTIONS, options])
    readable = re.sub(r"\W+", "-", f"{Path(source.name).stem}.{name}").strip("-")[:80]
    return f"{readable}.{arch}.{hashlib.sha256(parts.encode()).hexdigest()[:32]}"


def _find(source: Source, stem: str) -> Binary | None:
    for folder in _precompiled_folders(source):
        if (binary := read_entry(folder, stem)) is not None:
            return replace(binary, origin="precompiled")
    if (cache := cache_folder()) is not None and (binary := read_entry(cache, stem)) is not None:
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
            yield Path(folder)
    if source.path is not None and (beside := source.path.parent / "cubins").is_dir():
        yield beside


def _fresh(source: Source, name: str, arch: str, options: tuple[str, ...], stem: str) -> Binary:
    binary, cubin = compile(source, name, arch, options)
    folder = cache_folder()
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
    program = nvrtc.createProgram(source.text, source.name, headers, [name.encode() for name in source.includes])
    try:
        nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompileError(explain(source, name, arch, log or str(error))) from None
        ptx = nvrtc.getPTX(program)
        symbol = nvrtc.getLoweredName(program, name)
        cubin = nvrtc.getCUBIN(program)
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
    r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?P<severity>(?:catastrophic )?error|warning).*?: (?P<text>.*)$"
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
    lines = log.splitlines()
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
    chosen = os.environ.get("CUPYOPS_CACHE_DIR")
    if chosen:
        root = Path(chosen)
    else:
        try:
            import platformdirs
        except ImportError:
            warnings.warn(
                "kernels are compiled anew by each process: pip install platformdirs, or set CUPYOPS_CACHE_DIR",
                stacklevel=2,
            )
            return None
        root = Path(platformdirs.user_cache_dir("cupyops", appauthor=False))
    major, minor = backend.nvrtc_version()
    folder = root / f"nvrtc-{major}.{minor}-{backend.runtime_version(backend.cuda_include())}"
    return folder if _ours(root, 0o022) and _ours(folder, 0o077, close=True) else None


def _ours(folder: Path, forbidden: int, close: bool = False) -> bool:
    """Make `folder` if need be; whether it is a real folder of ours without the `forbidden` bits (or rid of them)."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
            return False
        if status.st_mode & forbidden:
            if not close:
                return False
            folder.chmod(0o700)
        return os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def write_entry(folder: Path, stem: str, binary: Binary, cubin: bytes) -> Binary:
    """Write the .cubin, then the .json that vouches for it, each under a temporary name first."""
    record = asdict(replace(binary, path=None)) | {"stem": stem, "sha256": hashlib.sha256(cubin).hexdigest()}
    _replace(folder / f"{stem}.cubin", cubin)
    _replace(folder / f"{stem}.json", json.dumps(record).encode())
    return replace(binary, path=folder / f"{stem}.cubin")


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_entry(folder: Path, stem: str) -> Binary | None:
    """The entry, if both its files are there, whole, and belong together; anything else is a miss."""
    path = folder / f"{stem}.cubin"
    try:
        record = json.loads((folder / f"{stem}.json").read_bytes())
        if record.pop("stem") != stem or record.pop("sha256") != hashlib.sha256(path.read_bytes()).hexdigest():
            return None
        record["parameters"] = tuple(Parameter(**parameter) for parameter in record["parameters"])
        return Binary(**record | {"path": path})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _in_memory(stem: str, cubin: bytes) -> Path:
    """A path from which the driver can load `cubin` though no cache folder can be written."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(stem[:200])
        with os.fdopen(
            descriptor, "wb", closefd=False
        ) as file:  # open for as long as the process: the path leads to it
            file.write(cubin)
        return Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as temporary:
        temporary.write(cubin)
    return Path(temporary.name)
