"""The examinations, each a generator of findings about what `Machine` holds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Generator, Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from .._util.near import meant
from .._util.settings import ALL as SETTINGS
from .._util.torch_private import TRIED
from ..errors import InputError
from .finding import ABSENT, FAULT, OK, WARNING, Finding
from .machine import Facts, Machine

_CUPY = re.compile(r"cupy(-cuda(\d+)x|-cuda\d+|-rocm-.+)?")
_LEAST = (7, 5)  # compute capability: Turing
_FREE = 1 << 28  # bytes of memory or of a disk without which little runs; about what all built-in kernels take
_REINSTALL = "pip install --force-reinstall --no-deps cupyops"
# not in the home: that cannot be written, or somebody else has made the cache in it
_ANOTHER = 'export CUPYOPS_CACHE_DIR="/var/tmp/cupyops-$(id -u)"'
# what CuPy, which makes a cache folder when it is imported, says where it cannot
_NO_ROOM = re.compile(r"CUPY_CACHE_DIR|PermissionError|NotADirectoryError|Read-only file system")
# what cuInit says where a driver is installed and does not work
_INIT = {
    3: ("its driver is being shut down", "try again"),
    803: ("its parts are of different versions, as after an update", "reboot the machine"),
    804: ("the forward-compatibility package does not serve this GPU", "remove the cuda-compat package"),
    802: ("the GPUs' fabric is not up", "sudo systemctl restart nvidia-fabricmanager"),
    999: ("it reports an unknown error", "reboot the machine"),
}
# stages of the survey that a stage needs, and how a finding names them
_NEEDS = {
    "headers": ("nvrtc",),
    "compile": ("nvrtc", "headers"),
    "cache": ("nvrtc", "headers"),
    "run": ("nvrtc", "compile"),
}
_LABELS = {"nvrtc": "NVRTC", "headers": "the CUDA headers", "compile": "the compiler"}


def _facts(
    machine: Machine, name: str, stage: str, remedy: str, needs: str = ""
) -> Generator[Finding, None, Facts | None]:
    """Facts of a stage of the survey; where there are none the finding that says why is yielded, and None returned."""
    facts = machine.seen.get(stage)
    for need in _NEEDS.get(needs or stage, ()):
        before = machine.seen.get(need)
        if "error" in (before or {}) or (before is None and need == "nvrtc"):
            yield Finding(name, ABSENT, f"not examined: {_LABELS[need]} did not work")
            return None
    if facts is None:
        yield Finding(name, ABSENT, "not examined: an examination before it ended too soon")
    elif "error" in facts:
        yield Finding(name, FAULT, facts["error"], remedy)
        return None
    return facts


# --- what is installed ---


def python(machine: Machine) -> Iterator[Finding]:
    """Check the version of Python."""
    version = ".".join(map(str, machine.python))
    if machine.python < (3, 11):
        remedy = "install Python 3.11 or later, and cupyops in it"
        yield Finding("Python", FAULT, f"{version}; 3.11 or later is needed", remedy)
    else:
        yield Finding("Python", OK, version)


def pytorch(machine: Machine) -> Iterator[Finding]:
    """Check the version of PyTorch, and that it was built for the CUDA of the driver."""
    version, cuda = machine.torch
    found = f"{version}, " + (f"for CUDA {cuda}" if cuda else "for the CPU only")
    driver, own = machine.driver_major, map(Requirement, machine.requirements.get("", ()))
    least = next((requirement for requirement in own if requirement.name == "torch"), None)
    plain, tried = Version(version).base_version, ".".join(map(str, TRIED[1]))
    verdict, why, remedy = OK, "", ""
    if least is not None and not least.specifier.contains(plain, prereleases=True):
        verdict, why, remedy = FAULT, f"; expected {least.specifier}", f'pip install -U "{least}"'
    elif not cuda and machine.seen.get("driver", {}).get("devices"):
        # pip takes a build of the same version for the same thing, so that one goes
        remedy = f"pip uninstall -y torch && pip install torch=={plain}"
        verdict, why = FAULT, "; a GPU is here, which this build cannot use"
    elif driver and _torch_major(machine) > driver:
        verdict, why = FAULT, f"; the driver serves CUDA {driver} at most"
        remedy = f"update the GPU's driver to one for CUDA {cuda}"
    elif Version(version).release[:2] > TRIED[1]:
        why = f"; cupyops was tested with {tried} at most, which is the one to take if something fails"
        verdict, remedy = WARNING, f'pip install "torch=={tried}.*"'
    yield Finding("PyTorch", verdict, found + why, remedy)


def cupy(machine: Machine) -> Iterator[Finding]:
    """Check that there is one CuPy, of a CUDA that is served, new enough, and that it imports."""
    wheels, install = _cupys(machine), _install(machine)
    trouble = machine.seen.get("torch, cupy", {}).get("error")
    found = ", ".join(f"{name} {machine.packages[name]}" for name in wheels)
    served = {r.name: r for texts in machine.requirements.values() for r in map(Requirement, texts)}
    wanted = served.get(wheels[0]) if wheels else None
    verdict, why, remedy = FAULT, "", install
    if not wheels:
        verdict, why = FAULT if machine.gpus else WARNING, "not installed: kernels can be neither compiled nor run"
    elif len(wheels) > 1:
        why = ": they overwrite each other's files"
    elif served and wheels != ["cupy"] and wanted is None:  # "cupy" was built here from source
        known = " or ".join(sorted(name for name in served if name.startswith("cupy")))
        why, remedy = f"; expected {known}", f"pip uninstall -y {wheels[0]} && {install}"
    elif wanted is not None and not wanted.specifier.contains(machine.packages[wheels[0]], prereleases=True):
        why, remedy = f"; expected {wanted.specifier}", f'pip install -U "{wanted}"'
    elif trouble is not None:
        why, remedy = f" does not import: {trouble}", f"pip uninstall -y {wheels[0]} && {install}"
        if _NO_ROOM.search(trouble):
            # not in the home, which is what cannot be written; and a new one, since CuPy trusts what it finds there
            remedy = 'export CUPY_CACHE_DIR="$(mktemp -d)"'
    else:
        verdict, remedy = OK, ""
    yield Finding("CuPy", verdict, found + why, remedy)


def _cupys(machine: Machine) -> list[str]:
    """Names of what is installed of CuPy: one at most, if all is well."""
    return sorted(name for name in machine.packages if _CUPY.fullmatch(name))


def _torch_major(machine: Machine) -> int:
    """CUDA major version that PyTorch was built for; 0 for none."""
    return int((machine.torch[1] or "0").partition(".")[0])


def _cupy_major(machine: Machine) -> int:
    """CUDA major version of CuPy, and so of the NVRTC that it loads; 0 where that is not known, as of a build."""
    found = (_CUPY.fullmatch(name) for name in _cupys(machine))
    return min((int(match.group(2)) for match in found if match is not None and match.group(2)), default=0)


def _install(machine: Machine, major: int = 0) -> str:
    """Return the command for the extra with CuPy, NVRTC and the headers of a CUDA major version.

    By default that of the driver, else of PyTorch, else of CuPy. Several CuPys are removed first, always by the same
    command, whatever else they break.
    """
    several = len(_cupys(machine)) > 1
    if not major or several:
        known = (machine.driver_major or 0, _torch_major(machine), _cupy_major(machine))
        major = min(max(next(filter(None, known), 12), 12), 13)
    command = f'pip install "cupyops[cuda{major}x]"'
    return f"pip uninstall -y {' '.join(_cupys(machine))} && {command}" if several else command


def _again(machine: Machine, major: int, options: str = "--force-reinstall --no-deps") -> str:
    """Return the command for NVRTC and the headers of a CUDA major version that are installed and do not work."""
    if len(_cupys(machine)) > 1 or not major:
        return _install(machine, major)
    return f"pip install {options} {_wheel('nvrtc', major)} {_wheel('runtime', major)}"


def _wheel(part: str, major: int) -> str:
    """Name for pip of NVIDIA's wheel with a part of CUDA."""
    return f"nvidia-cuda-{part}-cu12" if major == 12 else f'"nvidia-cuda-{part}=={major}.*"'


# --- what compiles ---


def nvrtc(machine: Machine) -> Iterator[Finding]:
    """Check that NVRTC loads, and say its version."""
    facts = machine.seen.get("nvrtc", {})
    if "error" in facts and _cupys(machine) and "error" in machine.seen.get("torch, cupy", {}):
        yield Finding("NVRTC", ABSENT, "not examined: CuPy, by which it is loaded, does not import")
    elif "error" in facts and not _cupys(machine) and not machine.gpus:
        yield Finding("NVRTC", ABSENT, facts["error"], _install(machine))
    elif found := (yield from _facts(machine, "NVRTC", "nvrtc", _again(machine, _cupy_major(machine)))):
        version, archs = ".".join(map(str, found["version"])), found["archs"]
        yield Finding("NVRTC", OK, f"{version}, for {archs[0]} to {archs[-1]}")


def headers(machine: Machine) -> Iterator[Finding]:
    """Check that there are CUDA headers of NVRTC's major version, and not newer than it."""
    name, major = "CUDA headers", machine.nvrtc_major or 0
    if facts := (yield from _facts(machine, name, "headers", f"pip install {_wheel('runtime', major)}")):
        version = facts["version"] // 1000, facts["version"] % 1000 // 10
        found = f"{version[0]}.{version[1]} in {facts['folder']}"
        if version > tuple(machine.seen["nvrtc"]["version"]):
            yield Finding(name, WARNING, f"{found}: newer than NVRTC", _again(machine, major, "--upgrade"))
        else:
            yield Finding(name, OK, found)


def compiling(machine: Machine) -> Iterator[Finding]:
    """Check that NVRTC compiles a kernel, for which it loads its builtins."""
    name = "compile a kernel"
    if facts := (yield from _facts(machine, name, "compile", _again(machine, machine.nvrtc_major or 0))):
        yield Finding(name, OK, f"{facts['bytes']:,} bytes for {facts['arch']}")


# --- what runs ---


def driver(machine: Machine) -> Iterator[Finding]:
    """Check that the driver works, and serves the CUDA of NVRTC."""
    reinstall = "reinstall the GPU's driver"
    facts, major = (yield from _facts(machine, "driver", "driver", reinstall)), machine.driver_major
    if facts is None:
        return
    verdict, found, remedy = OK, "", ""
    if not facts["here"] and facts["kernel_module"]:
        found = "the kernel's part is there, libcuda.so.1 is not: a container that was given no GPU?"
        verdict, remedy = FAULT, f"docker run --gpus all ...   (or {reinstall})"
    elif not facts["here"]:
        verdict, found = ABSENT, "none: the references and the simulator are used"
    elif facts["status"]:
        reason, remedy = _INIT.get(facts["status"], (f"it answers error {facts['status']}", reinstall))
        verdict, found = FAULT, f"it does not work: {reason}"
    elif major is not None and machine.nvrtc_major is not None and machine.nvrtc_major > major:
        older = f"pip uninstall -y {' '.join(_cupys(machine))} && {_install(machine, major)}"
        found = f"it serves CUDA {major} at most; NVRTC is of CUDA {machine.nvrtc_major}"
        verdict, remedy = FAULT, older if major >= 12 else "update the GPU's driver"
    else:
        found = f"for CUDA {facts['cuda'] // 1000}.{facts['cuda'] % 1000 // 10} and before"
    yield Finding("driver", verdict, found, remedy)


def gpus(machine: Machine) -> Iterator[Finding]:
    """Say of each GPU what it is, and check that NVRTC compiles for it."""
    hidden, remedy = machine.environ.get("CUDA_VISIBLE_DEVICES"), "reboot the machine, or reinstall the GPU's driver"
    if (yield from _facts(machine, "GPU", "gpus", remedy)) is None:
        return
    if not machine.gpus and hidden is not None and machine.seen.get("driver", {}).get("here"):
        found = f"CUDA_VISIBLE_DEVICES={hidden!r}: it hides every GPU"
        yield Finding("GPU", WARNING, found, "unset CUDA_VISIBLE_DEVICES")
    elif not machine.gpus:
        yield Finding("GPU", ABSENT, "no GPU: the references and the simulator are used")
    archs = machine.seen.get("nvrtc", {}).get("archs", [])
    for index, gpu in enumerate(machine.gpus):
        major, minor = gpu["capability"]
        memory = f"{gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free"
        mig = ", a MIG slice" if re.search(r"\bMIG\b", gpu["name"]) else ""
        found = f"{gpu['name']}{mig}, compute capability {major}.{minor}, {memory}"
        verdict, why, remedy = OK, "", ""
        if (major, minor) < _LEAST:
            verdict, why, remedy = FAULT, "; 7.5 or later is needed", "name the other GPUs in CUDA_VISIBLE_DEVICES"
        elif archs and f"sm_{major}{minor}" not in archs:
            verdict, why = FAULT, f"; this NVRTC does not compile for sm_{major}{minor}"
            remedy = _again(machine, machine.nvrtc_major or 12, "--upgrade")
        elif gpu["free"] < _FREE:
            verdict, remedy = WARNING, "end other programs on this GPU; nvidia-smi lists them"
        yield Finding(f"GPU {index}", verdict, found + why, remedy)


def trials(machine: Machine) -> Iterator[Finding]:
    """Check the results of a kernel that ran in the simulator and on each GPU."""
    stages = [("run in the simulator", "simulator", _REINSTALL)]
    for index in range(len(machine.gpus)):
        command = f"CUDA_VISIBLE_DEVICES={index} compute-sanitizer python -m {__package__}.survey"
        stages.append((f"run on GPU {index}", f"run on GPU {index}", command))
    for name, stage, remedy in stages:
        if (yield from _facts(machine, name, stage, remedy, "run")) is not None:
            yield Finding(name, OK, "the results are right")


# --- the cache and the settings ---


def cache(machine: Machine) -> Iterator[Finding]:
    """Say where compiled kernels are kept, and check that they can be."""
    facts = yield from _facts(machine, "kernel cache", "cache", _ANOTHER)
    if facts is None:
        return
    why, verdict, found = facts.get("why", ""), OK, f"{facts['root']}: {facts.get('why')}"
    remedy = f"chmod go-w {shlex.quote(facts['root'])}" if "chmod" in why else _ANOTHER
    if facts["root"] is None:
        found = "there is none, each process compiles anew: platformdirs is missing, or the user has no home"
        verdict, remedy = WARNING, "pip install platformdirs"
    elif facts["folder"] is None:
        verdict = FAULT
    elif why:
        verdict, found = WARNING, f"{found}; kernels are kept in {facts['folder']}, for as long as that is there"
    else:
        found = f"{facts['folder']}: {facts['entries']:,} kernels, {facts['bytes'] / 2**20:.1f} MiB"
        found = f"{found}; {facts['free'] / 2**30:.1f} GiB free"
        verdict, remedy = (WARNING, "python -m cupyops cache clean") if facts["free"] < _FREE else (OK, "")
    yield Finding("kernel cache", verdict, found, remedy)


def settings(machine: Machine) -> Iterator[Finding]:
    """Check each CUPYOPS_ variable that is set: that there is such a setting, and that it takes that value."""
    given = {name: value for name, value in sorted(machine.environ.items()) if name.startswith("CUPYOPS_")}
    for name, value in given.items():
        if name not in SETTINGS:
            hint = meant(name, SETTINGS) or f"; there are {', '.join(SETTINGS)}"
            yield Finding(name, WARNING, f"{value!r}: there is no such setting{hint}", f"unset {name}")
            continue
        try:
            SETTINGS[name].read({name: value})
            yield Finding(name, OK, f"{value!r}: {SETTINGS[name].meaning}")
        except InputError as error:
            yield Finding(name, FAULT, str(error), f"unset {name}")


# In the order of the report: each needs what those before it have found.
EXAMINATIONS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    *(python, pytorch, cupy, nvrtc, headers, compiling, driver, gpus, trials, cache, settings),
)
