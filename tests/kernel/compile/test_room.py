"""The size of the kernel cache: what goes when there is too much, and that nothing is damaged meanwhile."""

import os
import sys
import threading
import time

import pytest

import cupyops
from cupyops._kernel.compile import cache, compiler, room, source
from cupyops._kernel.compile.binary import Binary

ARCH = "sm_80"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(room, "_looked", -1e9)
    monkeypatch.setattr(compiler, "_memory", {})
    return tmp_path


def written(root, stem, size=1000, age=0.0, version="nvrtc-1"):
    """An entry that was last used so many seconds ago."""
    folder = root / version
    folder.mkdir(exist_ok=True)
    cache.write_entry(folder, stem, Binary(stem, stem, ARCH, "ptx", ()), b"x" * size)
    for suffix in (".json", ".cubin"):
        then = time.time() - age
        os.utime(folder / f"{stem}{suffix}", (then, then))
    return folder


def stems(root):
    return [entry.stem for entry in room.entries(root)]


def test_entries_are_listed_by_their_last_use(root):
    for stem, age, version in (("b", 50, "nvrtc-1"), ("a", 9000, "nvrtc-2"), ("c", 5, "nvrtc-1")):
        written(root, stem, age=age, version=version)
    (root / "autotune").mkdir()
    (root / "autotune" / "x.json").write_text("{}")
    (root / "nvrtc-1" / "README.txt").write_text("kept")
    assert stems(root) == ["a", "b", "c"]
    assert all(entry.bytes > 1000 for entry in room.entries(root))


def test_those_used_least_recently_go_first(root):
    for number in range(5):
        written(root, f"k{number}", age=10_000 - 1000 * number)
    each = room.entries(root)[0].bytes
    gone = room.shrink(room.entries(root), 2 * each)
    assert [entry.stem for entry in gone] == ["k0", "k1", "k2"] and stems(root) == ["k3", "k4"]
    assert cache.read_entry(root / "nvrtc-1", "k4") is not None
    assert not list((root / "nvrtc-1").glob("k0*"))


def test_what_the_simulator_made_of_a_kernel_counts_and_goes_with_it(root, monkeypatch):
    folder = written(root, "k", age=9000)
    monkeypatch.setattr(cache, "folder", lambda: folder)
    before = room.entries(root)[0].bytes
    place = cache.beside(cache.read_entry(folder, "k"))
    assert place.read() is None
    place.write(b"x" * 500)
    assert place.read() == b"x" * 500
    (entry,) = room.entries(root)
    assert entry.bytes == before + 500
    assert entry.remove() and not list(folder.iterdir())


def test_a_translation_that_another_can_write_is_none(root, monkeypatch):
    folder = written(root, "k")
    monkeypatch.setattr(cache, "folder", lambda: folder)
    place = cache.beside(cache.read_entry(folder, "k"))
    place.write(b"x")
    (folder / "k.translated").chmod(0o666)
    assert place.read() is None


def test_what_was_used_of_late_stays(root, monkeypatch):
    written(root, "old", age=9000)
    written(root, "new", age=10)
    monkeypatch.setenv("CUPYOPS_CACHE_LIMIT", "1")
    room.hold_limit(root)
    assert stems(root) == ["new"]


@pytest.mark.parametrize("limit", ["off", "1G"])
def test_nothing_goes_within_the_limit(root, monkeypatch, limit):
    written(root, "old", age=1e7)
    monkeypatch.setenv("CUPYOPS_CACHE_LIMIT", limit)
    room.hold_limit(root)
    assert stems(root) == ["old"]


def test_an_entry_used_after_it_was_listed_stays(root):
    folder = written(root, "k", age=9000)
    (entry,) = room.entries(root)
    room.note_use(folder, "k")
    assert not entry.remove() and stems(root) == ["k"]


def test_halves_of_entries_are_counted_and_removed(root):
    folder = written(root, "k", age=9000)
    (folder / "k.json").unlink()
    assert [entry.stem for entry in room.shrink(room.entries(root), 0)] == ["k"] and not stems(root)


def test_what_links_lead_to_is_left_alone(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    written(elsewhere, "k", age=9000)
    (root / "nvrtc-1").symlink_to(elsewhere / "nvrtc-1")
    assert not stems(root) and stems(elsewhere) == ["k"]


CODE = 'extern "C" __global__ void fill(float* x) { x[threadIdx.x] = %d; }'


def test_a_hit_counts_as_use_and_a_new_kernel_makes_room(root, monkeypatch):
    """By the compiler itself, in the place of two processes."""
    first = compiler.build(source.load(CODE % 1, None), "fill", ARCH)
    written(root, "old", age=9000, version=first.path.parent.name)
    then = time.time() - 9000
    os.utime(first.path.with_suffix(".json"), (then, then))
    os.utime(first.path, (then, then))
    compiler._memory.clear()
    assert compiler.build(source.load(CODE % 1, None), "fill", ARCH).origin == "cache"
    assert first.path.with_suffix(".json").stat().st_mtime > time.time() - 60
    monkeypatch.setenv("CUPYOPS_CACHE_LIMIT", "1")
    room._looked = -1e9
    second = compiler.build(source.load(CODE % 2, None), "fill", ARCH)
    assert set(stems(root)) == {first.path.stem, second.path.stem}


def test_a_kernel_that_has_gone_is_compiled_again(root):
    first = compiler.build(source.load(CODE % 3, None), "fill", ARCH)
    room.shrink(room.entries(root), 0)
    again = compiler.build(source.load(CODE % 3, None), "fill", ARCH)
    assert again.origin == "nvrtc" and again.path == first.path and again.path.exists()


def test_writers_readers_and_removers_at_once(root):
    """An entry is whole or a miss; nobody sees an error."""
    folder = root / "nvrtc-1"
    folder.mkdir()
    done, errors, wrong = threading.Event(), [], []
    content = {f"k{number}": bytes([number]) * 5000 for number in range(6)}

    def work(action):
        try:
            while not done.is_set():
                action()
        except Exception as error:
            errors.append(error)

    def write():
        for stem, cubin in content.items():
            cache.write_entry(folder, stem, Binary(stem, stem, ARCH, "ptx", ()), cubin)

    def read():
        for stem in content:
            found = cache.read_entry(folder, stem, private=True)
            if found is not None and found.name != stem:
                wrong.append(stem)

    def remove():
        room.shrink(room.entries(root), 0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(one,)) for one in (write, write, read, remove, remove)]
        for one in threads:
            one.start()
        time.sleep(0.5)
        done.set()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors and not wrong
    write()
    assert {stem: cache.read_entry(folder, stem).path.read_bytes() for stem in content} == content


def test_a_wrong_limit_is_said(monkeypatch):
    monkeypatch.setenv("CUPYOPS_CACHE_LIMIT", "all")
    with pytest.raises(cupyops.InputError, match="CUPYOPS_CACHE_LIMIT is 'all'"):
        room.limit()
