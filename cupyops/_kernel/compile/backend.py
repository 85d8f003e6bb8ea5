"""The one importer of CuPy, and the finder of the CUDA headers: lazily, with an error that says what to install."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ...errors import MissingDependencyError
from . import temporary

_INSTALL = 'pip install "cupyops[cuda12x]"   (or "cupyops[cuda13x]" for CUDA 13)'


@functools.cache
def cupy() -> ModuleType:
    """The module `cupy`, imported at the first launch and never before."""
    _find_room_for_cupy()
    try:
        import cupy
    except ImportError as error:
        cause = error.__cause__ or error  # before what was the matter, CuPy's own text has a page of what may be
        raise MissingDependencyError(f"CUDA kernels need CuPy, which does not import: {cause}\n  {_INSTALL}") from error
    except OSError as error:
        raise MissingDependencyError(
            f"CuPy could not create its cache folder: {error}\n  set CUPY_CACHE_DIR to a folder that can be written"
        ) from error
    return cupy


def _find_room_for_cupy() -> None:
    """CuPy makes a cache folder in the home when it is imported, and fails where it cannot: then it is to be elsewhere."""
    home = os.path.expanduser("~/.cupy/kernel_cache")
    if "CUPY_CACHE_DIR" in os.environ or os.path.isdir(home):
        return
    try:
        os.makedirs(home, exist_ok=True)
    except OSError:
        if (folder := temporary.private()) is not None:
            os.environ["CUPY_CACHE_DIR"] = str(folder / "cupy")


@functools.cache
def nvrtc() -> ModuleType:
    """CuPy's binding of NVRTC, with the library itself loaded; needs no GPU and no driver."""
    cupy()
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy raises what the dynamic loader raised, of any type
        raise MissingDependencyError(f"NVRTC does not load: {error}\n  {_INSTALL}") from error
    return nvrtc


_at_work: set[int] = set()  # the threads that are inside NVRTC
_begin = threading.Lock()
_changed = threading.Condition(threading.Lock())


@contextmanager
def nvrtc_at_work() -> Iterator[None]:
    """Around each compilation. A process is not forked meanwhile: it would inherit locks of NVRTC that nobody releases."""
    with _begin, _changed:
        _at_work.add(threading.get_ident())
    try:
        yield
    finally:
        with _changed:
            _at_work.discard(threading.get_ident())
            _changed.notify_all()


def _before_fork() -> None:
    _begin.acquire()  # nobody begins, and nobody ends, until it has been forked
    _changed.acquire()
    _changed.wait_for(lambda: _at_work <= {threading.get_ident()}, timeout=60)


def _after_fork() -> None:
    _changed.release()
    _begin.release()


def _after_fork_in_child() -> None:
    _at_work.clear()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC in use."""
    major, minor = nvrtc().getVersion()
    return major, minor


@functools.cache
def cuda_include() -> Path:
    """The folder of the CUDA runtime headers (`cuda_fp16.h` ...) of the same major version as NVRTC."""
    wanted = nvrtc_version()[0]
    seen = []
    for folder in _include_candidates():
        version = runtime_version(folder)
        if version is not None and version // 1000 == wanted:
            return folder
        seen.append(f"  {folder}: " + ("no CUDA headers" if version is None else f"CUDA {version // 1000}"))
    wheel = "nvidia-cuda-runtime-cu12" if wanted == 12 else f"nvidia-cuda-runtime=={wanted}.*"
    raise MissingDependencyError(
        f"NVRTC is of CUDA {wanted}, but no headers of CUDA {wanted} were found:\n"
        + "\n".join(seen)
        + f"\n  pip install {wheel}"
    )


@functools.cache
def library_includes() -> tuple[Path, ...]:
    """The folders of the headers of CUDA's C++ library, of cuRAND and of nvcc, where they are installed, and of CuPy's own.

    Of CUDA's C++ library that of its wheel or of a toolkit; where there is none, the copy that comes with CuPy.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    wheels = ("cuda_cccl/include", "cu13/include/cccl") if nvrtc_version()[0] == 12 else ("cu13/include/cccl",)
    beside = cuda_include()
    cccl = [*(root / name for root in roots for name in wheels), beside / "cccl", beside]
    curand = [*(root / name / "include" for root in roots for name in ("curand", "cu13")), beside]
    nvcc = [beside, *(root / "cuda_nvcc" / "include" for root in roots)]  # of CUDA 13 it is beside the others
    marks = ((cccl, "cuda/std/cstdint"), (curand, "curand_kernel.h"), (nvcc, "crt/mma.h"))
    found = (next((one for one in folders if os.path.isfile(one / mark)), None) for folders, mark in marks)
    of_cccl, of_curand, of_nvcc = found
    own = Path(importlib.util.find_spec("cupy").origin or "").parent / "_core" / "include"  # type: ignore[union-attr]
    copies = [own / "cupy" / "_cccl" / part for part in ("libcudacxx", "cub", "thrust")]
    cccl_folders = copies if of_cccl is None else [of_cccl]
    return tuple(one for one in (*cccl_folders, of_curand, of_nvcc, own) if one is not None and os.path.isdir(one))


@functools.lru_cache(maxsize=64)
def runtime_version(include: Path) -> int | None:
    """CUDART_VERSION (12090 for 12.9) as the headers in `include` state it, or None where there are none."""
    header = include / "cuda_runtime_api.h"
    if not (os.path.isfile(header) and os.path.isfile(include / "cuda_fp16.h")):
        return None
    try:
        match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return int(match.group(1)) if match else None


def _include_candidates() -> list[Path]:
    """Folders where the headers may be: the pip wheels first, then toolkits that the environment names, then the default."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    folders = [root / name / "include" for root in wheels for name in ("cuda_runtime", "cu12", "cu13")]
    toolkits = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return folders + [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
