"""Precompiled kernels: run where nobody else can have written them, said once where somebody can."""

import os
import stat
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupyops._kernel.compile import cache as disk
from cupyops._kernel.compile import compiler, source, trust

SCALE = "__global__ void scale(float* x) { x[threadIdx.x] *= 2; }\n"
ME, STRANGER, AUTHOR = 1000, 2000, 3000

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no owners here")


@pytest.fixture
def places(monkeypatch):
    """Owner, mode and group of each folder and file; those not named are root's, 0755."""
    described = {}

    def lstat(path):
        owner, mode, group = (*described.get(str(path), (0, 0o755)), 100)[:3]
        kind = stat.S_IFREG if str(path).endswith(".cubin") else stat.S_IFDIR
        return SimpleNamespace(st_uid=owner, st_gid=group, st_mode=kind | mode)

    monkeypatch.setattr(trust.os, "getuid", lambda: ME)
    monkeypatch.setattr(trust.os, "lstat", lstat)
    return described


def verdict(path="/data/cubins/f.cubin"):
    return trust.objection(Path(path), frozenset((ME, 0, AUTHOR)))


@pytest.mark.parametrize("owner", [0, ME, AUTHOR], ids=["root", "me", "author"])
def test_a_trusted_owner(places, owner):
    places |= {"/data/cubins": (owner, 0o755), "/data/cubins/f.cubin": (owner, 0o644)}
    assert verdict() is None and verdict("/data/cubins") is None


@pytest.mark.parametrize("place", ["/data/cubins", "/data/cubins/f.cubin"])
@pytest.mark.parametrize("mode", [0o755, 0o700, 0o644])
def test_a_stranger(places, place, mode):
    places[place] = (STRANGER, mode)
    found = verdict()
    assert f"{place} belongs to user {STRANGER} and has mode {mode:04o}" in found.found and "--out" in found.remedy


@pytest.mark.parametrize(
    ("place", "remedy"),
    [("/data/cubins", "chmod -R go-w /data/cubins"), ("/data/cubins/f.cubin", "chmod go-w /data/cubins/f.cubin")],
)
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777, 0o2775])
def test_what_others_can_write(places, place, remedy, mode):
    """Whoever can write to the folder can put another file there; its sticky bit does not keep new ones out."""
    places[place] = (ME, mode)
    found = verdict()
    assert found.found.startswith(f"{place} belongs to") and f"{mode:04o}" in found.found and found.remedy == remedy


@pytest.mark.parametrize(
    ("owner", "mode", "trusted"),
    [
        (0, 0o1777, True),  # as /tmp
        (ME, 0o1777, True),
        (STRANGER, 0o1777, False),  # whose owner may rename what is in it
        (0, 0o777, False),
        (ME, 0o777, False),
        (0, 0o775, True),  # a group's, which the source lies in as well
        (STRANGER, 0o755, True),
    ],
)
@pytest.mark.parametrize("above", ["/data", "/"])
def test_the_folders_above(places, above, owner, mode, trusted):
    places |= {above: (owner, mode), "/data/cubins": (ME, 0o755), "/data/cubins/f.cubin": (ME, 0o644)}
    assert (verdict() is None) is trusted


def group(monkeypatch, name="me", members=(), primary=100):
    monkeypatch.setattr("grp.getgrgid", lambda number: SimpleNamespace(gr_name=name, gr_mem=list(members)))
    monkeypatch.setattr("pwd.getpwuid", lambda number: SimpleNamespace(pw_name="me", pw_gid=primary))


@pytest.mark.parametrize(("known", "trusted"), [
    ({}, True), ({"members": ("me",)}, True), ({"members": ("me", "you")}, False), ({"name": "users"}, False),
    ({"primary": 7}, False),
])  # fmt: skip
def test_a_group_of_one(places, monkeypatch, known, trusted):
    """Where each user has a group alone, files are made so that it can write."""
    group(monkeypatch, **known)
    places |= {"/data/cubins": (ME, 0o775), "/data/cubins/f.cubin": (ME, 0o664)}
    assert (verdict() is None) is trusted
    places["/data/cubins"] = (ME, 0o777)
    assert verdict() is not None


def test_owners(tmp_path, monkeypatch):
    path = tmp_path / "f.cu"
    path.write_text(SCALE)
    monkeypatch.setattr(trust.os, "getuid", lambda: ME)
    assert trust.owners() == {0, ME} == trust.owners(tmp_path / "absent")
    assert trust.owners(path) == {0, ME, path.stat().st_uid}


def test_where_there_are_no_owners(tmp_path, monkeypatch):
    monkeypatch.delattr(trust.os, "getuid")
    tmp_path.chmod(0o777)
    assert trust.objection(tmp_path, trust.owners()) is None


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """A .cu file with `cubins` beside it, and the two files of an entry; nothing has been said yet."""
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPYOPS_CUBIN_PATH", raising=False)
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(trust, "_told", set())
    path, folder = tmp_path / "scale.cu", tmp_path / "cubins"
    path.write_text(SCALE)
    folder.mkdir(mode=0o755)
    text = source.load(path)
    stem = compiler.entry_name(text, "scale", "sm_80", ())
    disk.write_entry(folder, stem, *compiler.compile(text, "scale", "sm_80"))
    return SimpleNamespace(text=text, folder=folder, cubin=folder / f"{stem}.cubin", record=folder / f"{stem}.json")


def origin(entry, arch="sm_80"):
    compiler._memory.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return compiler.build(entry.text, "scale", arch).origin, [str(one.message) for one in caught]


@pytest.mark.parametrize("which", ["folder", "cubin", "record"])
@pytest.mark.parametrize("mode", [0o777, 0o722])
@pytest.mark.parametrize("named", [False, True], ids=["beside the source", "CUPYOPS_CUBIN_PATH"])
def test_it_is_compiled_anew_and_said_once(entry, monkeypatch, which, mode, named):
    if named:
        monkeypatch.setenv("CUPYOPS_CUBIN_PATH", str(entry.folder))
    place = getattr(entry, which)
    place.chmod(mode)
    found, said = origin(entry)
    assert found == "nvrtc" and len(said) == 1
    assert str(place) in said[0] and f"{mode:04o}" in said[0] and "chmod" in said[0]
    assert origin(entry) == ("cache", [])
    place.chmod(0o755 if which == "folder" else 0o644)
    assert origin(entry) == ("precompiled", [])


def test_for_a_later_architecture_too(entry):
    entry.folder.chmod(0o777)
    assert origin(entry, "sm_86")[0] == "nvrtc"
    entry.folder.chmod(0o755)
    assert origin(entry, "sm_89")[0] == "precompiled"


def test_nothing_is_said_of_a_folder_without_the_entry(entry):
    entry.folder.chmod(0o777)
    entry.cubin.unlink()
    assert origin(entry) == ("nvrtc", [])


def test_what_belongs_to_somebody_else(entry, monkeypatch):
    """In a folder with the sticky bit somebody has made `cubins` beside our file."""
    genuine, inside = os.lstat, {entry.folder.stat().st_ino, entry.cubin.stat().st_ino, entry.record.stat().st_ino}

    def lstat(path):
        status = genuine(path)
        return os.stat_result((*status[:4], STRANGER, *status[5:])) if status.st_ino in inside else status

    monkeypatch.setattr(trust.os, "lstat", lstat)
    found, (said,) = origin(entry)
    assert found == "nvrtc" and f"belongs to user {STRANGER}" in said and "compile --out" in said
    monkeypatch.setattr(trust, "owners", lambda path: frozenset((STRANGER, 0, os.getuid())))  # the author's
    assert origin(entry) == ("precompiled", [])


def test_links_lead_to_what_is_looked_at(entry, tmp_path):
    """A link's own place does not matter, but for the folder's: there another link could be put."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    moved = elsewhere / entry.cubin.name
    entry.cubin.rename(moved)
    entry.cubin.symlink_to(moved)
    assert origin(entry) == ("precompiled", [])
    elsewhere.chmod(0o777)
    assert origin(entry)[0] != "precompiled"
    elsewhere.chmod(0o755)
    entry.folder.chmod(0o777)
    assert origin(entry)[0] != "precompiled"


def test_a_folder_named_by_a_link(entry, tmp_path, monkeypatch):
    """It is looked at, and loaded from, where the link leads now."""
    link = tmp_path / "link"
    link.symlink_to(entry.folder)
    text = source.load(SCALE)
    stem = compiler.entry_name(text, "scale", "sm_80", ())
    disk.write_entry(entry.folder, stem, *compiler.compile(text, "scale", "sm_80"))
    monkeypatch.setenv("CUPYOPS_CUBIN_PATH", str(link))
    binary = compiler.build(text, "scale", "sm_80")
    assert binary.origin == "precompiled" and binary.path.parent == entry.folder.resolve()
