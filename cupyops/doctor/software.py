"""The examinations of what is installed: Python, PyTorch, CuPy, NVIDIA's wheels, the extras."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from .._util.torch_private import TRIED
from .finding import Finding, absent, fault, ok, warning
from .machine import Machine

_PYTHON = (3, 11)
_CUPY = re.compile(r"cupy(-cuda(\d+)x|-cuda\d+|-rocm-.+)?")
_NVIDIA = re.compile(r"nvidia-(.+?)(?:-cu(\d+))?")
_DEVELOPERS = ("test", "dev", "docs")  # extras for work on this package


def python(machine: Machine) -> Iterator[Finding]:
    """Its version."""
    version = ".".join(map(str, machine.python))
    if machine.python < _PYTHON:
        yield fault("Python", f"{version}; 3.11 or later is needed", "install Python 3.11 or later, and cupyops in it")
    else:
        yield ok("Python", version)


def pytorch(machine: Machine) -> Iterator[Finding]:
    """Its version, and whether it was built for the CUDA of the driver."""
    version, cuda = machine.torch
    found = f"{version}, " + (f"for CUDA {cuda}" if cuda else "for the CPU only")
    driver = machine.driver_major
    own = map(Requirement, machine.requirements.get("", ()))
    least = next((requirement for requirement in own if requirement.name == "torch"), None)
    if least is not None and not least.specifier.contains(Version(version).base_version, prereleases=True):
        yield fault("PyTorch", f"{found}; expected {least.specifier}", f'pip install -U "{least}"')
    elif not cuda and machine.seen.get("driver", {}).get("devices"):
        wish = "a GPU is here, which this build cannot use"
        plain = Version(
            version
        ).base_version  # pip takes a build of the same version for the same thing, so that one goes
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
    """One CuPy, of a CUDA that is served, and new enough."""
    wheels = cupys(machine)
    install = install_for(machine)
    if not wheels:
        missing = "not installed: kernels can be neither compiled nor run"
        yield (fault if machine.gpus else warning)("CuPy", missing, install)
        return
    listed = ", ".join(f"{name} {machine.packages[name]}" for name in wheels)
    served = {r.name: r for texts in machine.requirements.values() for r in map(Requirement, texts)}
    if len(wheels) > 1:
        yield fault("CuPy", f"{listed}: they overwrite each other's files", install)
    elif wheels == ["cupy"]:
        yield ok("CuPy", f"{listed}, built here from source")
    elif served and wheels[0] not in served:
        known = " or ".join(sorted(name for name in served if name.startswith("cupy")))
        yield fault("CuPy", f"{listed}; expected {known}", f"pip uninstall -y {wheels[0]} && {install}")
    elif served and not served[wheels[0]].specifier.contains(machine.packages[wheels[0]], prereleases=True):
        wanted = served[wheels[0]]
        yield fault("CuPy", f"{listed}; expected {wanted.specifier}", f'pip install -U "{wanted}"')
    else:
        yield ok("CuPy", listed)


def compile_backend(machine: Machine) -> Iterator[Finding]:
    """Examine that torch.compile finds the backend by its name."""
    if "cupyops" in machine.backends:
        yield ok("torch.compile", 'backend="cupyops": NVRTC compiles its kernels, no C compiler is needed')
    else:
        found = 'does not find backend="cupyops": this package was installed before it had one'
        yield warning("torch.compile", found, reinstall_this(machine))


def cupys(machine: Machine) -> list[str]:
    """The names of what is installed of CuPy: one at most, if all is well."""
    return sorted(name for name in machine.packages if _CUPY.fullmatch(name))


def install_for(machine: Machine, major: int | None = None) -> str:
    """The command for the extra with CuPy, NVRTC and the headers of a CUDA major version.

    By default of the one that the driver, else PyTorch, else CuPy is of. Where there are several CuPys it is always the same
    command, which leaves that one of them.
    """
    several = len(cupys(machine)) > 1
    if major is None or several:
        known = [machine.driver_major or 0, _torch_major(machine), *sorted(_cupy_majors(machine))]
        major = min(max(next((number for number in known if number), 12), 12), 13)
    command = f'pip install "cupyops[cuda{major}x]"'
    return f"pip uninstall -y {' '.join(cupys(machine))} && {command}" if several else command


def reinstall(machine: Machine, major: int) -> str:
    """The command for NVRTC and the headers of a CUDA major version that are installed and do not work.

    They alone, in the versions that are there: pip is not to bring all that they and this package depend on, PyTorch above
    all, anew.
    """
    wheels = _wheels(machine).get(major, {})
    if len(cupys(machine)) > 1 or not any("nvrtc" in name for name in wheels):
        return install_for(machine, major)
    return "pip install --force-reinstall --no-deps " + " ".join(f"{name}=={at}" for name, at in wheels.items())


def reinstall_this(machine: Machine) -> str:
    """The command for this package, whose own files do not do what they should."""
    return f"pip install --force-reinstall --no-deps {machine.origin}"


def upgrade_nvrtc(machine: Machine, major: int) -> str:
    """The command for the newest NVRTC of a CUDA major version; to upgrade the extra would leave the one that is there."""
    if len(cupys(machine)) > 1:
        return install_for(machine, major)
    return "pip install --upgrade " + ("nvidia-cuda-nvrtc-cu12" if major == 12 else f'"nvidia-cuda-nvrtc=={major}.*"')


def _wheels(machine: Machine) -> dict[int, dict[str, str]]:
    """NVIDIA's wheels of NVRTC and the headers: CUDA major version -> name -> version."""
    found: dict[int, dict[str, str]] = {}
    for name, version in sorted(machine.packages.items()):
        match = _NVIDIA.fullmatch(name)
        if match is not None and match.group(1) in ("cuda-nvrtc", "cuda-runtime"):
            found.setdefault(int(match.group(2) or version.partition(".")[0]), {})[name] = version
    return found


def _cupy_majors(machine: Machine) -> set[int]:
    matches = (_CUPY.fullmatch(name) for name in machine.packages)
    return {int(match.group(2)) for match in matches if match is not None and match.group(2)}


def cupy_major(machine: Machine) -> int | None:
    """The CUDA major version of CuPy, and so of the NVRTC that it loads; None where that is not known, as of a build."""
    return min(_cupy_majors(machine), default=None)


def nvidia(machine: Machine) -> Iterator[Finding]:
    """NVIDIA's wheels: NVRTC and the headers of CuPy's CUDA; others are there for PyTorch, or for nobody."""
    by_major = _wheels(machine)
    if not by_major:
        yield absent("NVIDIA wheels", "neither cuda-nvrtc nor cuda-runtime; a CUDA toolkit may have both")
        return
    listed = "; ".join(
        f"CUDA {major}: " + ", ".join(f"{name} {version}" for name, version in wheels.items())
        for major, wheels in sorted(by_major.items())
    )
    asking = _cupy_majors(machine)
    left = sorted(name for major in set(by_major) - asking - {_torch_major(machine)} for name in by_major[major])
    lacking = [major for major in sorted(asking) if len(by_major.get(major, {})) < 2]
    if lacking:  # a CUDA toolkit may have what the wheels do not
        works = machine.nvrtc_major == lacking[0] and "error" not in machine.seen.get("headers", {})
        reason = f"CuPy, for CUDA {lacking[0]}, asks for cuda-nvrtc and cuda-runtime of that version"
        judge = warning if works else fault
        yield judge("NVIDIA wheels", f"{listed}; {reason}", install_for(machine, lacking[0]))
    elif left and asking:
        reason = "neither CuPy nor PyTorch uses " + ", ".join(left)
        yield warning("NVIDIA wheels", f"{listed}; {reason}", f"pip uninstall -y {' '.join(left)}")
    else:
        yield ok("NVIDIA wheels", listed)


def _torch_major(machine: Machine) -> int:
    """The CUDA major version that PyTorch was built for; 0 for none."""
    return int((machine.torch[1] or "0").partition(".")[0])


def extras(machine: Machine) -> Iterator[Finding]:
    """Optional packages in one row: those that are here, or could be added. The extras of CUDA are CuPy's matter."""
    here, missing = [], {}
    others = {"12x", "13x"} - {wheel.removeprefix("cupy-cuda") for wheel in cupys(machine)}
    for extra, texts in sorted(machine.requirements.items()):
        if not extra or extra in _DEVELOPERS or extra.startswith("cuda") or extra[-3:] in others:
            continue
        names = sorted({Requirement(text).name for text in texts})
        lacks = [name for name in names if re.sub(r"[-_.]+", "-", name).lower() not in machine.packages]
        if lacks:
            missing[extra] = f"{extra} ({', '.join(lacks)})"
        else:
            here.append(extra)
    if missing:
        one = f'pip install "cupyops[{next(iter(missing))}]"'
        remedy = one if len(missing) == 1 else f"{one}    # only where you want it, and so for the others"
        yield absent("extras", f"not installed: {', '.join(missing.values())}", remedy)
    elif here:
        yield ok("extras", ", ".join(here))
