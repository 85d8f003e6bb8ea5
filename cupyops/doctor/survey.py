"""The child process of the doctor: `python -m cupyops.doctor.survey`.

What may crash or hang, broken libraries and drivers above all, is done here, a stage at a time. Each stage prints one line
of JSON as soon as it is done: {"stage": name, ...facts} or {"stage": name, "error": text}. Where the process dies, the last
line, {"stage": name, "begun": true}, says in which stage.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch

from .._kernel.compile import backend, cache, compiler, room
from .._kernel.kernel import Kernel
from .._simulate import simulate
from ..errors import LaunchError

Facts = dict[str, Any]

_TRIAL = Kernel(
    """
#include <cuda_fp16.h>
__global__ void doctor_trial(const __half* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * __half2float(x[i]) + 1;
}
""",
    "doctor_trial",
)
_SIZE = 1000
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def imports() -> Facts:
    """CuPy, in a process that has PyTorch."""
    return {"version": backend.cupy().__version__}


def nvrtc() -> Facts:
    """NVRTC's version, and the architectures that it compiles for."""
    return {"version": backend.nvrtc_version(), "archs": compiler.supported_archs()}


def headers() -> Facts:
    """Find the CUDA headers, and their CUDA version."""
    folder = backend.cuda_include()
    return {"folder": str(folder), "version": backend.runtime_version(folder)}


def compile_trial() -> Facts:
    """Compile a kernel, past every cache: this loads NVRTC's builtins too."""
    arch = "sm_80" if "sm_80" in compiler.supported_archs() else compiler.supported_archs()[0]
    _, cubin = compiler.compile(_TRIAL.source, _TRIAL.base, arch)
    return {"arch": arch, "bytes": len(cubin)}


def cache_folder() -> Facts:
    """Say where the kernel cache is and why it may not be used, what it holds, and what room there is."""
    root = cache.location()
    if root is None:
        return {"root": None, "folder": None}
    real, why = cache.usable(root)
    facts: Facts = {"root": str(real or root), "why": why, "folder": None}
    if (folder := cache.folder()) is not None:
        sizes = [entry.bytes for entry in room.entries(folder.parent) if entry.folder == folder]
        free = shutil.disk_usage(folder).free
        facts |= {"folder": str(folder), "entries": len(sizes), "bytes": sum(sizes), "free": free}
    return facts


def simulator() -> Facts:
    """Run the kernel on the CPU."""
    with simulate():
        return _run(torch.device("cpu"))


def driver() -> Facts:
    """Versions and devices that the driver reports, asked without PyTorch or CuPy in between."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return {"here": False, "kernel_module": os.path.exists("/proc/driver/nvidia/version")}
    number = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(number))
    facts = {"here": True, "cuda": number.value, "status": library.cuInit(0), "devices": 0}
    if facts["status"] == 0:
        library.cuDeviceGetCount(ctypes.byref(number))
        facts["devices"] = number.value
    elif facts["status"] == _NO_DEVICE:
        facts["status"] = 0
    return facts


def gpus() -> Facts:
    """Return the GPUs that PyTorch sees."""
    found = []
    for device in range(torch.cuda.device_count()):
        its, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
        found.append({"name": its.name, "capability": [its.major, its.minor], "free": free, "total": total})
    return {"gpus": found}


def _run(device: torch.device) -> Facts:
    """The kernel launched on `device`, its results compared."""
    x = torch.arange(_SIZE, device=device, dtype=torch.float16)
    y = torch.empty(_SIZE, device=device)
    _TRIAL[4, 256](x, y, _SIZE)
    error = (y.double() - (2 * x.double() + 1)).abs().max().item()
    if error:
        raise LaunchError(f"the kernel ran, but its results are wrong by up to {error:g}; expected none to differ")
    return {"elements": _SIZE}


_STAGES: dict[str, Callable[[], Facts]] = {
    "torch, cupy": imports,
    "nvrtc": nvrtc,
    "headers": headers,
    "compile": compile_trial,
    "cache": cache_folder,
    "simulator": simulator,
    "driver": driver,
    "gpus": gpus,
}


def main() -> None:
    """All stages, then the kernel on each GPU."""
    seen = {name: _stage(name, work) for name, work in _STAGES.items()}
    for index in range(len(seen["gpus"].get("gpus", []))):
        device = torch.device("cuda", index)
        _stage(f"run on GPU {index}", functools.partial(_run, device))


def _stage(name: str, work: Callable[[], Facts]) -> Facts:
    """One stage, told when it begins and when it ends."""
    _tell({"stage": name, "begun": True})
    try:
        facts = work()
    except Exception as error:  # whatever a broken library raises is what was found
        facts = {"error": f"{type(error).__name__}: {str(error).strip()}"}
    _tell({"stage": name} | facts)
    return facts


def _tell(facts: Facts) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
