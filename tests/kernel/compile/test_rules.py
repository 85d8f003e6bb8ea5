"""Each rule of the table in docs/shipping.md holds: what is used counts, and what breaks the rule is not used."""

import json
import os
import re
import stat
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupyops._kernel.compile import cache as disk
from cupyops._kernel.compile import compiler, source, temporary, trust

PAGE = Path(__file__).resolve().parents[3] / "docs" / "shipping.md"
TEXT = '#include "twice.cuh"\n__global__ void ruled(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }\n'
HEADER = "__device__ float twice(float x) { return 2 * x; }\n"
ARCH = "sm_80"

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no owners here")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A .cu file with its header, an empty cache, a folder of temporary files, and nothing said yet."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    folders = SimpleNamespace(top=home, cache=home / "cache", code=home / "code", tmp=home / "tmp", patch=monkeypatch)
    folders.code.mkdir()
    folders.tmp.mkdir()
    folders.tmp.chmod(0o1777)
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(folders.cache))
    monkeypatch.setenv("TMPDIR", str(folders.tmp))
    monkeypatch.delenv("CUPYOPS_CUBIN_PATH", raising=False)
    for module in (disk, trust):
        monkeypatch.setattr(module, "_told", set())
    (folders.code / "ruled.cu").write_text(TEXT)
    (folders.code / "twice.cuh").write_text(HEADER)
    return folders


def build(place, options=(), text="ruled.cu"):
    """(where the kernel came from, what was said), as in a new process."""
    compiler._memory.clear()
    disk._told.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        binary = compiler.build(source.load(place.code / text), "ruled", ARCH, options)
    return binary, [str(one.message) for one in said]


def origin(place, **more):
    return build(place, **more)[0].origin


def files(place):
    """The cubin and the record of the one entry of the cache."""
    (record,) = place.cache.rglob("*.json")
    return record.with_suffix(".cubin"), record


def of_somebody_else(place, *paths):
    """These are another user's, as far as anyone is told who asks."""
    inodes = {path.lstat().st_ino for path in paths}

    def changed(status):
        other = (*status[:4], status.st_uid + 7, *status[5:])
        return os.stat_result(other) if status.st_ino in inodes else status

    genuine = os.lstat, os.fstat, Path.lstat
    place.patch.setattr(os, "lstat", lambda path: changed(genuine[0](path)))
    place.patch.setattr(os, "fstat", lambda number: changed(genuine[1](number)))
    place.patch.setattr(Path, "lstat", lambda path: changed(genuine[2](path)))


def the_folder(place):
    assert origin(place) == "nvrtc" and origin(place) == "cache"
    place.cache.chmod(0o770)
    binary, said = build(place)
    assert binary.origin == "nvrtc" and place.cache not in binary.path.parents
    assert len(said) == 1 and "each process compiles for itself: others can write there" in said[0]
    place.cache.chmod(0o755)
    assert origin(place) == "cache"
    place.patch.delenv("CUPYOPS_CACHE_DIR")
    place.patch.setenv("XDG_CACHE_HOME", str(place.top / "xdg"))
    (place.top / "xdg" / "cupyops").mkdir(parents=True)
    (place.top / "xdg" / "cupyops").chmod(0o777)
    binary, said = build(place)
    assert place.tmp / f"cupyops-{os.getuid()}" in binary.path.parents and "kernels are kept in" in said[0]
    place.patch.setenv("CUPYOPS_CACHE_DIR", str(place.cache))
    of_somebody_else(place, place.cache)
    assert origin(place) == "nvrtc"


def a_link(place):
    (place.top / "scratch").mkdir(mode=0o700)
    place.cache.symlink_to(place.top / "scratch")
    assert origin(place) == "nvrtc" and origin(place) == "cache"
    place.top.chmod(0o777)
    assert origin(place) == "nvrtc"
    place.top.chmod(0o1777)
    assert origin(place) == "cache"
    of_somebody_else(place, place.cache)
    assert origin(place) == "nvrtc"


def the_folder_of_a_version(place):
    assert origin(place) == "nvrtc"
    (inner,) = place.cache.iterdir()
    inner.chmod(0o777)
    assert origin(place) == "cache" and stat.S_IMODE(inner.stat().st_mode) == 0o700
    inner.rename(place.top / "moved")
    inner.symlink_to(place.top / "moved")
    assert origin(place) == "nvrtc"
    inner.unlink()
    (place.top / "moved").rename(inner)
    of_somebody_else(place, inner)
    assert origin(place) == "nvrtc"


def a_file(place):
    for index in range(2):
        for spoil in (0o602, 0o620, "a link"):
            origin(place)
            path = files(place)[index]
            assert origin(place) == "cache"
            if spoil == "a link":
                path.rename(place.top / "moved")
                path.symlink_to(place.top / "moved")
            else:
                path.chmod(spoil)
            assert origin(place) == "nvrtc"
            assert origin(place) == "cache" and not path.is_symlink()
    of_somebody_else(place, files(place)[0])
    assert origin(place) == "nvrtc"


def an_entry(place):
    origin(place)
    for path in files(place):
        whole = path.read_bytes()
        for damaged in (whole[:-1], b"", whole.replace(whole[100:101], bytes([whole[100] ^ 1]), 1)):
            path.write_bytes(damaged)
            assert origin(place) == "nvrtc"
    cubin, record = files(place)
    told = json.loads(record.read_text())
    other = record.with_name(f"other-{record.name}")
    other.write_bytes(record.read_bytes())
    other.with_suffix(".cubin").write_bytes(cubin.read_bytes())
    assert disk.read_entry(other.parent, other.stem, private=True) is None
    assert disk.read_entry(record.parent, record.stem, private=True) is not None
    record.write_text(json.dumps(told | {"symbol": "another"}))
    assert disk.read_entry(record.parent, record.stem) is None


def a_file_that_is_being_written(place):
    seen, genuine = [], os.replace

    def replace(temporary, final):
        seen.append(
            (Path(temporary).name.startswith(".writing-"), Path(final).exists(), Path(temporary).stat().st_size)
        )
        if len(seen) == 2:
            raise KeyboardInterrupt  # between the cubin and the record that vouches for it
        genuine(temporary, final)

    place.patch.setattr(disk.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        build(place)
    assert [one[:2] for one in seen] == [(True, False)] * 2 and all(size for *_, size in seen)
    place.patch.setattr(disk.os, "replace", genuine)
    assert origin(place) == "nvrtc" and origin(place) == "cache"


def the_key(place):
    keys = {build(place)[0].path.name, build(place, ("-DOTHER",))[0].path.name}
    (place.code / "twice.cuh").write_text(HEADER.replace("2 *", "3 *"))
    keys.add(build(place)[0].path.name)
    (place.code / "ruled.cu").write_text(TEXT + "// more\n")
    keys.add(build(place)[0].path.name)
    compiler._memory.clear()
    keys.add(compiler.build(source.load(place.code / "ruled.cu"), "ruled", "sm_90").path.name)
    before = disk.folder()
    place.patch.setattr(disk.backend, "nvrtc_version", lambda: (99, 1))
    assert len(keys) == 5 and disk.folder() != before


def headers_of_an_option(place):
    (place.top / "include").mkdir()
    header, option = place.top / "include" / "given.h", (f"-I{place.top / 'include'}",)
    (place.code / "with.cu").write_text(f"#include <given.h>\n{TEXT}")
    header.write_text("#define GIVEN 1\n")
    first = build(place, option, "with.cu")[0]
    assert build(place, option, "with.cu")[0].origin == "cache"
    header.write_text("#define GIVEN 2\n")
    second = build(place, option, "with.cu")[0]
    assert second.origin == "nvrtc" and second.path.name != first.path.name
    header.write_text("#define NAMED <given2.h>\n#include NAMED\n")
    (place.top / "include" / "given2.h").write_text("\n")
    assert [build(place, option, "with.cu")[0].origin for _ in range(2)] == ["nvrtc", "nvrtc"]


def a_precompiled_kernel(place):
    cubins, text = place.code / "cubins", source.load(place.code / "ruled.cu")
    cubins.mkdir(mode=0o755)
    stem = compiler.entry_name(text, "ruled", ARCH, ())
    disk.write_entry(cubins, stem, *compiler.compile(text, "ruled", ARCH))
    assert origin(place) == "precompiled"
    for path, usual in ((cubins, 0o755), *((cubins / f"{stem}{suffix}", 0o644) for suffix in (".cubin", ".json"))):
        path.chmod(0o777)
        found, said = build(place)
        assert found.origin != "precompiled" and len(said) == 1 and "others can have written them" in said[0]
        assert build(place)[1] == []
        path.chmod(usual)
        assert origin(place) == "precompiled"
        trust._told.clear()
    place.top.chmod(0o777)
    assert origin(place) != "precompiled"
    place.top.chmod(0o1777)
    assert origin(place) == "precompiled"
    of_somebody_else(place, cubins)
    assert origin(place) != "precompiled"


def the_temporary_folder(place):
    private = temporary.private()
    assert private == place.tmp / f"cupyops-{os.getuid()}" and stat.S_IMODE(private.stat().st_mode) == 0o700
    private.chmod(0o750)
    assert temporary.private() is None
    private.rename(place.top / "moved")
    (place.top / "moved").chmod(0o700)
    private.symlink_to(place.top / "moved")
    assert temporary.private() is None
    private.unlink()
    place.tmp.chmod(0o777)
    assert temporary.private() is None
    place.tmp.chmod(0o1777)
    of_somebody_else(place, temporary.private())
    assert temporary.private() is None


RULES = {
    "the cache's folder": the_folder,
    "a link in its place": a_link,
    "the folder of a version in it": the_folder_of_a_version,
    "a file in the cache": a_file,
    "an entry": an_entry,
    "a file that is being written": a_file_that_is_being_written,
    "the key": the_key,
    "headers of `-I`": headers_of_an_option,
    "a precompiled kernel": a_precompiled_kernel,
    "the temporary folder": the_temporary_folder,
}


def test_the_table_has_these_rules():
    table = PAGE.read_text(encoding="utf-8").partition("### The rules")[2].partition("\n\nWhere you have a group")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", table, re.MULTILINE)
    assert rows[1:] == list(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule(place, rule):
    RULES[rule](place)
