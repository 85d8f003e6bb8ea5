"""The examinations of what compiles and runs: imports, NVRTC, headers, the driver, each GPU, the trial kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .finding import Finding, absent, fault, ok, warning
from .machine import Machine
from .software import cupy_major, cupys, install_for, reinstall, reinstall_this, upgrade_nvrtc

_LEAST = (7, 5)  # compute capability: Turing
# what CuPy, which makes a cache folder when it is imported, says where it cannot
_NO_ROOM = re.compile(r"CUPY_CACHE_DIR|PermissionError|NotADirectoryError|Read-only file system")
_FREE = 1 << 28  # bytes of GPU memory without which little runs
# What cuInit says where a driver is installed and does not work.
_INIT = {
    3: ("its driver is being shut down", "try again"),
    803: ("its parts are of different versions, as after an update", "reboot the machine"),
    804: ("the forward-compatibility package does not serve this GPU", "remove the cuda-compat package"),
    802: ("the GPUs' fabric is not up", "sudo systemctl restart nvidia-fabricmanager"),
    999: ("it reports an unknown error", "reboot the machine"),
}


def imports(machine: Machine) -> Iterator[Finding]:
    """PyTorch and CuPy in one process, whichever comes first."""
    for order in ("torch, cupy", "cupy, torch"):
        name, trouble = f"import {order}", machine.seen.get(order, {}).get("error")
        if trouble is None:
            yield _unseen(machine, order, name) or ok(name, "both are there")
        elif "No module named 'cupy'" in trouble:
            yield absent(name, "CuPy is not installed")
        elif _NO_ROOM.search(trouble):
            # not in the home, which is what cannot be written; and a new one, since CuPy trusts what it finds there
            yield fault(name, trouble, 'export CUPY_CACHE_DIR="$(mktemp -d)"')
        else:
            yield fault(name, trouble, _anew(machine))


def _anew(machine: Machine, major: int | None = None) -> str:
    """The command that removes CuPy and installs it again."""
    found, install = cupys(machine), install_for(machine, major)
    return install if len(found) != 1 else f"pip uninstall -y {found[0]} && {install}"


def _unseen(machine: Machine, stage: str, name: str) -> Finding | None:
    """The row of a stage that was not come to because one before it ended the survey."""
    if stage in machine.seen:
        return None
    return absent(name, "not examined: an examination before it ended too soon")


def nvrtc(machine: Machine) -> Iterator[Finding]:
    """Examine that NVRTC loads, and its version."""
    facts = machine.seen.get("nvrtc", {})
    if "error" in facts and cupys(machine) and "error" in machine.seen.get("torch, cupy", {}):
        yield absent("NVRTC", "not examined: CuPy, by which it is loaded, does not import")
    elif "error" in facts:
        missing = not cupys(machine)
        how = absent if missing and not machine.gpus else fault
        major = cupy_major(machine)
        yield how("NVRTC", facts["error"], install_for(machine) if major is None else reinstall(machine, major))
    elif facts:
        first, last = facts["archs"][0], facts["archs"][-1]
        yield ok("NVRTC", f"{'.'.join(map(str, facts['version']))}, for {first} to {last}")
    else:
        yield absent("NVRTC", "not examined: an examination before it ended too soon")


def headers(machine: Machine) -> Iterator[Finding]:
    """CUDA headers of NVRTC's major version, and not newer than it."""
    facts, major = machine.seen.get("headers", {}), machine.nvrtc_major
    if major is None:
        yield absent("CUDA headers", "not examined: NVRTC does not load")
    elif "error" in facts:
        wheel = "nvidia-cuda-runtime-cu12" if major == 12 else f'"nvidia-cuda-runtime=={major}.*"'
        yield fault("CUDA headers", facts["error"], f"pip install {wheel}")
    elif (row := _unseen(machine, "headers", "CUDA headers")) is not None:
        yield row
    else:
        headers, minor = divmod(facts["version"], 1000)
        found = f"{headers}.{minor // 10} in {facts['folder']}"
        if (headers, minor // 10) > tuple(machine.seen["nvrtc"]["version"]):
            yield warning("CUDA headers", f"{found}: newer than NVRTC", upgrade_nvrtc(machine, major))
        else:
            yield ok("CUDA headers", found)


def compiling(machine: Machine) -> Iterator[Finding]:
    """A kernel through NVRTC, which loads its builtins for it."""
    facts = machine.seen.get("compile", {})
    if machine.nvrtc_major is None or "error" in machine.seen.get("headers", {}):
        yield absent("compile a kernel", "not examined: NVRTC or the headers are missing")
    elif "error" in facts:
        found = facts["error"]
        if "builtins" in found:
            found = f"NVRTC's builtins (libnvrtc-builtins) are not found, or of another version\n{found}"
        yield fault("compile a kernel", found, reinstall(machine, machine.nvrtc_major))
    elif (row := _unseen(machine, "compile", "compile a kernel")) is not None:
        yield row
    else:
        yield ok("compile a kernel", f"{facts['bytes']:,} bytes for {facts['arch']}")


def driver(machine: Machine) -> Iterator[Finding]:
    """Examine that the driver works, and serves the CUDA of NVRTC."""
    facts, major = machine.seen.get("driver", {}), machine.driver_major
    if (row := _unseen(machine, "driver", "driver")) is not None:
        yield row
    elif "error" in facts:
        yield fault("driver", facts["error"], "reinstall the GPU's driver")
    elif not facts["here"] and facts["kernel_module"]:
        found = "the kernel's part is there, libcuda.so.1 is not: a container that was given no GPU?"
        yield fault("driver", found, "docker run --gpus all ...   (or reinstall the GPU's driver)")
    elif not facts["here"]:
        yield absent("driver", "none: the references and the simulator are used")
    elif facts["status"]:
        reason, remedy = _INIT.get(
            facts["status"], (f"it answers error {facts['status']}", "reinstall the GPU's driver")
        )
        yield fault("driver", f"it does not work: {reason}", remedy)
    elif major is not None and machine.nvrtc_major is not None and machine.nvrtc_major > major:
        found = f"it serves CUDA {major} at most; NVRTC is of CUDA {machine.nvrtc_major}"
        older = _anew(machine, major)
        yield fault("driver", found, older if major >= 12 else "update the GPU's driver")
    else:
        yield ok("driver", f"for CUDA {facts['cuda'] // 1000}.{facts['cuda'] % 1000 // 10} and before")


def gpus(machine: Machine) -> Iterator[Finding]:
    """Each GPU: what it is, and whether NVRTC compiles for it."""
    facts = machine.seen.get("gpus", {})
    if (row := _unseen(machine, "gpus", "GPU")) is not None:
        yield row
    elif "error" in facts:
        yield fault("GPU", facts["error"], "reboot the machine, or reinstall the GPU's driver")
    elif not machine.gpus:
        yield absent("GPU", "no GPU: the references and the simulator are used")
    archs = machine.seen.get("nvrtc", {}).get("archs", [])
    for index, gpu in enumerate(machine.gpus):
        name, (major, minor) = f"GPU {index}", gpu["capability"]
        memory = f"{gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free"
        mig = ", a MIG slice" if re.search(r"\bMIG\b", gpu["name"]) else ""
        found = f"{gpu['name']}{mig}, compute capability {major}.{minor}, {memory}"
        if (major, minor) < _LEAST:
            yield fault(name, f"{found}; 7.5 or later is needed", _without_old(machine))
        elif archs and f"sm_{major}{minor}" not in archs:
            newer = upgrade_nvrtc(machine, machine.nvrtc_major or 12)
            yield fault(name, f"{found}; this NVRTC does not compile for sm_{major}{minor}", newer)
        elif gpu["free"] < _FREE:
            yield warning(name, found, "end other programs on this GPU; nvidia-smi lists them")
        else:
            yield ok(name, found)


def _without_old(machine: Machine) -> str:
    """The setting that hides the GPUs that are too old."""
    names = machine.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = names if len(names) == len(machine.gpus) and all(names) else [str(i) for i in range(len(machine.gpus))]
    new = [name for name, gpu in zip(names, machine.gpus) if tuple(gpu["capability"]) >= _LEAST]
    return f"export CUDA_VISIBLE_DEVICES={','.join(new) or '-1'}"


def visible(machine: Machine) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES: CUDA takes no notice of what follows the first name that it does not know."""
    name = "CUDA_VISIBLE_DEVICES"
    value = machine.environ.get(name)
    if value is None:
        yield ok(name, "not set: every GPU is seen")
        return
    named = [part.strip() for part in value.split(",") if part.strip()]
    here = machine.seen.get("driver", {}).get("here", False)
    if not named or named[0] == "-1":
        found = f"{value!r}: it hides every GPU"
        yield warning(name, found, f"unset {name}") if here else absent(name, found)
    elif here and len(named) > (count := len(machine.gpus)):
        yield fault(name, f"{value!r}, but {count} of these are seen: {named[count]!r} is none", f"unset {name}")
    else:
        yield ok(name, repr(value))


def trials(machine: Machine) -> Iterator[Finding]:
    """The kernel run in the simulator and on each GPU, its results compared."""
    stages = {"run in the simulator": "simulator"}
    stages |= {f"run on GPU {index}": f"run on GPU {index}" for index in range(len(machine.gpus))}
    for name, stage in stages.items():
        facts = machine.seen.get(stage, {})
        if machine.nvrtc_major is None or "error" in machine.seen.get("compile", {}):
            yield absent(name, "not examined: nothing can be compiled")
        elif (row := _unseen(machine, stage, name)) is not None:
            yield row
        elif "error" not in facts:
            yield ok(name, "the results are right")
        elif stage == "simulator":
            yield fault(name, facts["error"], reinstall_this(machine))
        else:
            where = f"CUDA_VISIBLE_DEVICES={stage.rpartition(' ')[2]}"
            yield fault(name, facts["error"], f"{where} compute-sanitizer python -m {__package__}.survey")
