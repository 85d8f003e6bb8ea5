"""The examinations, each a generator of findings about what `Machine` holds."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from .._util.settings import ALL as SETTINGS
from .._util.torch_private import TRIED
from ..errors import InputError
from .finding import Finding, absent, fault, ok, warning
from .machine import Facts, Machine

_CUPY = re.compile(r"cupy(-cuda(\d+)x|-cuda\d+|-rocm-.+)?")
_LEAST = (7, 5)  # compute capability: Turing
_FREE = 1 << 28  # bytes of memory or of a disk without which little runs; about what all built-in kernels take
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


# --- what is installed ---


def python(machine: Machine) -> Iterator[Finding]:
    """Check the version of Python."""
    version = ".".join(map(str, machine.python))
    if machine.python < (3, 11):
        yield fault("Python", f"{version}; 3.11 or later is needed", "install Python 3.11 or later, and cupyops in it")
    else:
        yield ok("Python", version)


def pytorch(machine: Machine) -> Iterator[Finding]:
    """Check the version of PyTorch, and that it was built for the CUDA of the driver."""
    version, cuda = machine.torch
    found = f"{version}, " + (f"for CUDA {cuda}" if cuda else "for the CPU only")
    driver, own = machine.driver_major, map(Requirement, machine.requirements.get("", ()))
    least = next((requirement for requirement in own if requirement.name == "torch"), None)
    plain = Version(version).base_version
    if least is not None and not least.specifier.contains(plain, prereleases=True):
        yield fault("PyTorch", f"{found}; expected {least.specifier}", f'pip install -U "{least}"')
    elif not cuda and machine.seen.get("driver", {}).get("devices"):
        # pip takes a build of the same version for the same thing, so that one goes
        wish = "a GPU is here, which this build cannot use"
        yield fault("PyTorch", f"{found}; {wish}", f"pip uninstall -y torch && pip install torch=={plain}")
    elif driver and _torch_major(machine) > driver:
        wish = f"the driver serves CUDA {driver} at most"
        yield fault("PyTorch", f"{found}; {wish}", f"update the GPU's driver to one for CUDA {cuda}")
    elif Version(version).release[:2] > TRIED[1]:
        tried = ".".join(map(str, TRIED[1]))
        newer = f"{found}; cupyops was tested with {tried} at most, which is the one to take if something fails"
        yield warning("PyTorch", newer, f'pip install "torch=={tried}.*"')
    else:
        yield ok("PyTorch", found)


def cupy(machine: Machine) -> Iterator[Finding]:
    """Check that there is one CuPy, of a CUDA that is served, new enough, and that it imports."""
    wheels, install = _cupys(machine), _install(machine)
    trouble = machine.seen.get("torch, cupy", {}).get("error")
    listed = ", ".join(f"{name} {machine.packages[name]}" for name in wheels)
    served = {r.name: r for texts in machine.requirements.values() for r in map(Requirement, texts)}
    if not wheels:
        missing = "not installed: kernels can be neither compiled nor run"
        yield (fault if machine.gpus else warning)("CuPy", missing, install)
    elif len(wheels) > 1:
        yield fault("CuPy", f"{listed}: they overwrite each other's files", install)
    elif served and wheels != ["cupy"] and wheels[0] not in served:  # "cupy" was built here from source
        known = " or ".join(sorted(name for name in served if name.startswith("cupy")))
        yield fault("CuPy", f"{listed}; expected {known}", f"pip uninstall -y {wheels[0]} && {install}")
    elif wheels[0] in served and not served[wheels[0]].specifier.contains(
        machine.packages[wheels[0]], prereleases=True
    ):
        wanted = served[wheels[0]]
        yield fault("CuPy", f"{listed}; expected {wanted.specifier}", f'pip install -U "{wanted}"')
    elif trouble is not None and _NO_ROOM.search(trouble):
        # not in the home, which is what cannot be written; and a new one, since CuPy trusts what it finds there
        yield fault("CuPy", f"{listed} does not import: {trouble}", 'export CUPY_CACHE_DIR="$(mktemp -d)"')
    elif trouble is not None:
        yield fault("CuPy", f"{listed} does not import: {trouble}", f"pip uninstall -y {wheels[0]} && {install}")
    else:
        yield ok("CuPy", listed)


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
    wheels = "nvidia-cuda-{}-cu12" if major == 12 else f'"nvidia-cuda-{{}}=={major}.*"'
    return f"pip install {options} {wheels.format('nvrtc')} {wheels.format('runtime')}"


# --- what compiles ---


def nvrtc(machine: Machine) -> Iterator[Finding]:
    """Check that NVRTC loads, and say its version."""
    facts = machine.seen.get("nvrtc", {})
    if "error" in facts and _cupys(machine) and "error" in machine.seen.get("torch, cupy", {}):
        yield absent("NVRTC", "not examined: CuPy, by which it is loaded, does not import")
    elif "error" in facts:
        missing = not _cupys(machine) and not machine.gpus
        yield (absent if missing else fault)("NVRTC", facts["error"], _again(machine, _cupy_major(machine)))
    elif facts:
        version, archs = ".".join(map(str, facts["version"])), facts["archs"]
        yield ok("NVRTC", f"{version}, for {archs[0]} to {archs[-1]}")
    else:
        yield _unseen("NVRTC")


def _unseen(name: str) -> Finding:
    """Row of a stage that was not come to because one before it ended the survey."""
    return absent(name, "not examined: an examination before it ended too soon")


def headers(machine: Machine) -> Iterator[Finding]:
    """Check that there are CUDA headers of NVRTC's major version, and not newer than it."""
    name, facts, major = "CUDA headers", machine.seen.get("headers"), machine.nvrtc_major
    if major is None:
        yield absent(name, "not examined: NVRTC does not load")
    elif facts is None:
        yield _unseen(name)
    elif "error" in facts:
        wheel = "nvidia-cuda-runtime-cu12" if major == 12 else f'"nvidia-cuda-runtime=={major}.*"'
        yield fault(name, facts["error"], f"pip install {wheel}")
    else:
        version = facts["version"] // 1000, facts["version"] % 1000 // 10
        found = f"{version[0]}.{version[1]} in {facts['folder']}"
        if version > tuple(machine.seen["nvrtc"]["version"]):
            yield warning(name, f"{found}: newer than NVRTC", _again(machine, major, "--upgrade"))
        else:
            yield ok(name, found)


def compiling(machine: Machine) -> Iterator[Finding]:
    """Check that NVRTC compiles a kernel, for which it loads its builtins."""
    name, facts = "compile a kernel", machine.seen.get("compile")
    if machine.nvrtc_major is None or "error" in machine.seen.get("headers", {}):
        yield absent(name, "not examined: NVRTC or the headers are missing")
    elif facts is None:
        yield _unseen(name)
    elif "error" in facts:
        yield fault(name, facts["error"], _again(machine, machine.nvrtc_major))
    else:
        yield ok(name, f"{facts['bytes']:,} bytes for {facts['arch']}")


# --- what runs ---


def driver(machine: Machine) -> Iterator[Finding]:
    """Check that the driver works, and serves the CUDA of NVRTC."""
    facts, major = machine.seen.get("driver"), machine.driver_major
    if facts is None:
        yield _unseen("driver")
    elif "error" in facts:
        yield fault("driver", facts["error"], "reinstall the GPU's driver")
    elif not facts["here"] and facts["kernel_module"]:
        found = "the kernel's part is there, libcuda.so.1 is not: a container that was given no GPU?"
        yield fault("driver", found, "docker run --gpus all ...   (or reinstall the GPU's driver)")
    elif not facts["here"]:
        yield absent("driver", "none: the references and the simulator are used")
    elif facts["status"]:
        unknown = (f"it answers error {facts['status']}", "reinstall the GPU's driver")
        reason, remedy = _INIT.get(facts["status"], unknown)
        yield fault("driver", f"it does not work: {reason}", remedy)
    elif major is not None and machine.nvrtc_major is not None and machine.nvrtc_major > major:
        found = f"it serves CUDA {major} at most; NVRTC is of CUDA {machine.nvrtc_major}"
        older = f"pip uninstall -y {' '.join(_cupys(machine))} && {_install(machine, major)}"
        yield fault("driver", found, older if major >= 12 else "update the GPU's driver")
    else:
        yield ok("driver", f"for CUDA {facts['cuda'] // 1000}.{facts['cuda'] % 1000 // 10} and before")


def gpus(machine: Machine) -> Iterator[Finding]:
    """Say of each GPU what it is, and check that NVRTC compiles for it."""
    facts, hidden = machine.seen.get("gpus"), machine.environ.get("CUDA_VISIBLE_DEVICES")
    if facts is None:
        yield _unseen("GPU")
    elif "error" in facts:
        yield fault("GPU", facts["error"], "reboot the machine, or reinstall the GPU's driver")
    elif not machine.gpus and hidden is not None and machine.seen.get("driver", {}).get("here"):
        yield warning("GPU", f"CUDA_VISIBLE_DEVICES={hidden!r}: it hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    elif not machine.gpus:
        yield absent("GPU", "no GPU: the references and the simulator are used")
    archs = machine.seen.get("nvrtc", {}).get("archs", [])
    for index, gpu in enumerate(machine.gpus):
        name, (major, minor) = f"GPU {index}", gpu["capability"]
        memory = f"{gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free"
        mig = ", a MIG slice" if re.search(r"\bMIG\b", gpu["name"]) else ""
        found = f"{gpu['name']}{mig}, compute capability {major}.{minor}, {memory}"
        if (major, minor) < _LEAST:
            yield fault(name, f"{found}; 7.5 or later is needed", "name the other GPUs in CUDA_VISIBLE_DEVICES")
        elif archs and f"sm_{major}{minor}" not in archs:
            newer = _again(machine, machine.nvrtc_major or 12, "--upgrade")
            yield fault(name, f"{found}; this NVRTC does not compile for sm_{major}{minor}", newer)
        elif gpu["free"] < _FREE:
            yield warning(name, found, "end other programs on this GPU; nvidia-smi lists them")
        else:
            yield ok(name, found)


def trials(machine: Machine) -> Iterator[Finding]:
    """Check the results of a kernel that ran in the simulator and on each GPU."""
    stages = {"run in the simulator": "simulator"}
    stages |= {f"run on GPU {index}": f"run on GPU {index}" for index in range(len(machine.gpus))}
    for name, stage in stages.items():
        facts = machine.seen.get(stage)
        if machine.nvrtc_major is None or "error" in machine.seen.get("compile", {}):
            yield absent(name, "not examined: nothing can be compiled")
        elif facts is None:
            yield _unseen(name)
        elif "error" not in facts:
            yield ok(name, "the results are right")
        elif stage == "simulator":
            yield fault(name, facts["error"], "pip install --force-reinstall --no-deps cupyops")
        else:
            where = f"CUDA_VISIBLE_DEVICES={stage.rpartition(' ')[2]}"
            yield fault(name, facts["error"], f"{where} compute-sanitizer python -m {__package__}.survey")


# --- the cache and the settings ---


def cache(machine: Machine) -> Iterator[Finding]:
    """Say where compiled kernels are kept, and check that they can be."""
    name, facts = "kernel cache", machine.seen.get("cache")
    if facts is None or machine.nvrtc_major is None or "error" in machine.seen.get("headers", {}):
        yield absent(name, "not examined: NVRTC or the headers are missing")
    elif "error" in facts:
        yield fault(name, facts["error"], _ANOTHER)
    elif facts["root"] is None:
        found = "there is none, each process compiles anew: platformdirs is missing, or the user has no home"
        yield warning(name, found, "pip install platformdirs")
    elif facts["folder"] is None:
        yield fault(name, f"{facts['root']}: {facts['why']}", _cache_remedy(facts))
    elif facts["why"]:
        found = f"{facts['root']}: {facts['why']}; kernels are kept in {facts['folder']}, for as long as that is there"
        yield warning(name, found, _cache_remedy(facts))
    else:
        found = f"{facts['folder']}: {facts['entries']:,} kernels, {facts['bytes'] / 2**20:.1f} MiB"
        found = f"{found}; {facts['free'] / 2**30:.1f} GiB free"
        full = facts["free"] < _FREE
        yield warning(name, found, "python -m cupyops cache clean") if full else ok(name, found)


def _cache_remedy(facts: Facts) -> str:
    return f"chmod go-w {shlex.quote(facts['root'])}" if "chmod" in facts["why"] else _ANOTHER


def settings(machine: Machine) -> Iterator[Finding]:
    """Check each CUPYOPS_ variable that is set: that there is such a setting, and that it takes that value."""
    given = {name: value for name, value in sorted(machine.environ.items()) if name.startswith("CUPYOPS_")}
    for name, value in given.items():
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1) or list(SETTINGS)
            meant = f"did you mean {near[0]}?" if len(near) == 1 else f"there are {', '.join(near)}"
            yield warning(name, f"{value!r}: there is no such setting; {meant}", f"unset {name}")
            continue
        try:
            SETTINGS[name].read({name: value})
            yield ok(name, f"{value!r}: {SETTINGS[name].meaning}")
        except InputError as error:
            yield fault(name, str(error), f"unset {name}")


# In the order of the report: each needs what those before it have found.
EXAMINATIONS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    *(python, pytorch, cupy, nvrtc, headers, compiling, driver, gpus, trials, cache, settings),
)
