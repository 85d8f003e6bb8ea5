"""The examinations of folders and settings."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator
from pathlib import Path

from .._kernel.compile import trust
from .._util.settings import ALL as SETTINGS
from .._util.settings import CUBIN_PATH, Setting
from ..errors import InputError
from .finding import Finding, absent, fault, ok, warning
from .machine import Facts, Machine

# not in the home: that cannot be written, or somebody else has made the cache in it
_ANOTHER = 'export CUPYOPS_CACHE_DIR="/var/tmp/cupyops-$(id -u)"'
_FREE = 1 << 28  # bytes: about what all built-in kernels take


def cache(machine: Machine) -> Iterator[Finding]:
    """Examine the folder of compiled kernels: where it is, and that it can be used."""
    name, facts = "kernel cache", machine.seen.get("cache")
    if facts is None or machine.nvrtc_major is None or "error" in machine.seen.get("headers", {}):
        yield absent(name, "not examined: NVRTC or the headers are missing")
    elif "error" in facts:
        yield fault(name, facts["error"], _ANOTHER)
    elif facts["root"] is None:
        found = "there is none, each process compiles anew: platformdirs is missing, or the user has no home"
        yield warning(name, found, "pip install platformdirs")
    elif facts["folder"] is None:
        yield fault(name, *_refused(facts))
    elif not Path(facts["folder"]).is_relative_to(facts["root"]):
        found, remedy = _refused(facts)
        yield warning(name, f"{found}; kernels are kept in {facts['folder']}, for as long as that is there", remedy)
    else:
        room = f"{facts['free'] / 2**30:.1f} GiB free"
        found = f"{facts['folder']}: {_kernels(facts['entries'])}, {facts['bytes'] / 2**20:.1f} MiB; {room}"
        if facts["free"] < _FREE:
            yield warning(name, found, "python -m cupyops cache clean")
        else:
            yield ok(name, found)


def _refused(facts: Facts) -> tuple[str, str]:
    """Return why the folder is not used (another user could put kernels there, it cannot be written), and the remedy."""
    folder = shlex.quote(facts["nearest"])
    if facts["is_link"] and facts["nearest"] == facts["root"]:
        return f"{folder} is a link that another user has made, or can turn elsewhere", _ANOTHER
    if not facts["is_folder"]:
        return f"{folder} is no folder", _ANOTHER
    if facts["nearest"] == facts["root"] and facts["owner"] != facts["user"]:
        return f"{folder} belongs to user {facts['owner']}, not to you", _ANOTHER
    if not facts["writable"]:
        return f"{folder} cannot be written", _ANOTHER
    if facts["mode"] & 0o022:
        return f"{folder} can be written by others ({facts['mode']:o})", f"chmod go-w {folder}"
    return f"{facts['root']} cannot be used", _ANOTHER


def settings(machine: Machine) -> Iterator[Finding]:
    """Each CUPYOPS_ variable that is set: what it does, whether its value is understood, whether there is such a setting."""
    given = {name: value for name, value in sorted(machine.environ.items()) if name.startswith("CUPYOPS_")}
    if not given:
        yield ok("settings", "no CUPYOPS_ setting is set")
    for name, value in given.items():
        if name in SETTINGS:
            yield _setting(SETTINGS[name], value)
            continue
        near = difflib.get_close_matches(name, SETTINGS, 1)
        meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(SETTINGS)}"
        yield warning(name, f"{value!r}: there is no such setting{meant}", f"unset {name}")


def _setting(setting: Setting, value: str) -> Finding:
    try:
        meant = setting.read({setting.name: value})
    except InputError as error:
        return fault(setting.name, str(error), f"unset {setting.name}")
    missing = [folder for folder in meant or () if not folder.is_dir()] if setting is CUBIN_PATH else []
    if missing:
        build = f"python -m cupyops compile --out {shlex.quote(str(missing[0]))}"
        return warning(setting.name, f"{value!r}: there is no folder {missing[0]}", build)
    state = {True: "on, ", False: "off, "}.get(meant, "") if isinstance(meant, bool) else ""
    return ok(setting.name, f"{value!r}: {state}{setting.meaning}")


def precompiled(machine: Machine) -> Iterator[Finding]:
    """Each folder of kernels compiled ahead of time: whose it is, what it holds, and whether it is used."""
    name = "precompiled kernels"
    named = CUBIN_PATH.read(machine.environ, default=[])
    folders = [folder for folder in dict.fromkeys((*named, *machine.precompiled)) if folder.is_dir()]
    if not folders:
        yield ok(name, "none: kernels are compiled when they are first called")
    for folder in folders:
        try:
            count = sum(entry.suffix == ".cubin" for entry in folder.iterdir())
            found = f"{folder}: {_kernels(count)}" + trust.belongs_to(folder)
            # beside a .cu file what its owner wrote counts as well, whose code runs anyway
            why = trust.objection(folder, trust.owners(None if folder in named else folder.parent))
        except OSError as error:
            yield warning(
                name, f"{folder}: {error.strerror}; none is taken from there", f"chmod u+rx {shlex.quote(str(folder))}"
            )
            continue
        if why is None:
            yield ok(name, found)
        else:
            yield warning(name, f"{found}; none is taken from there, since others can write: {why.found}", why.remedy)


def _kernels(count: int) -> str:
    return f"{count:,} kernel{'s' if count != 1 else ''}"
