"""The machinery under stress: processes, threads, forks, signals, damage. A right result or a miss, never a wrong cubin."""

import errno
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python

import cupyops
from cupyops import Kernel
from cupyops._kernel.compile import cache as disk
from cupyops._kernel.compile import compiler, source
from cupyops._kernel.compile.binary import Binary
from cupyops.errors import CompileError, LaunchError

ARCH = "sm_80"
TEXT = """
template <typename T> __global__ void scale(const T* x, T* y, T factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * factor;
}
"""
SOURCE = source.load(TEXT)
NAMES = ("scale<float>", "scale<double>", "scale<int>")
NAME = NAMES[0]
STEM = compiler.entry_name(SOURCE, NAME, ARCH, ())


@pytest.fixture(scope="module")
def compiled():
    """What NVRTC says of each kernel, no cache being asked."""
    return {name: compiler.compile(SOURCE, name, ARCH) for name in NAMES}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a process that remembers nothing."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(folder))
    monkeypatch.delenv("CUPYOPS_CUBIN_PATH", raising=False)
    monkeypatch.setattr(compiler, "_memory", {})
    return folder


@pytest.fixture
def runs(compiled, monkeypatch):
    """NVRTC answers at once with what it has said before; the list has the names of the kernels that it was asked for."""
    calls = []

    def known(source, name, arch, options=()):
        calls.append(name)
        return compiled[name]

    monkeypatch.setattr(compiler, "compile", known)
    return calls


def build(name=NAME):
    return compiler.build(SOURCE, name, ARCH)


def rebuild(name=NAME):
    """As a new process would: only the disk remembers."""
    compiler._memory.clear()
    return build(name)


def is_right(binary, compiled, name=NAME):
    """Whether binary and the file that the driver would load are NVRTC's own, whatever way they came."""
    expected, cubin = compiled[name]
    return replace(binary, path=None, origin="nvrtc") == expected and binary.path.read_bytes() == cubin


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def pair(folder, stem=STEM):
    return folder / f"{stem}.cubin", folder / f"{stem}.json"


def fork(work, seconds=60):
    """(process number, pipe) of a forked process that runs `work`; it is killed if it hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: that is what is tested
        pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            result = True, work()
        except BaseException:
            result = False, traceback.format_exc()
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(result, pipe)
    finally:
        os._exit(0)


def answer(child):
    """What the `work` of the process gave; what it raised, or the signal that killed it, fails here."""
    pid, reading = child
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the process ended with {os.waitstatus_to_exitcode(status)}"
    fine, result = pickle.loads(content)
    assert fine, result
    return result


def at_once(count, work):
    """What `work(index)` gives in each of `count` processes, none of which begins before all are there."""
    waiting, go = os.pipe()

    def begin(index):
        os.close(go)
        os.read(waiting, 1)  # until the last writer has closed it
        return work(index)

    children = [fork(lambda index=index: begin(index)) for index in range(count)]
    os.close(go)
    os.close(waiting)
    return [answer(child) for child in children]


def as_an_ordinary_user():
    """Give up what root may: to write where no one may."""
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def test_sixteen_processes_into_one_cold_cache(cache, compiled):
    def work(index):
        names = [NAMES[(index + turn) % len(NAMES)] for turn in range(len(NAMES))]
        return all(is_right(build(name), compiled, name) for name in names)

    assert at_once(16, work) == [True] * 16
    folder = disk.folder()
    stems = [compiler.entry_name(SOURCE, name, ARCH, ()) for name in NAMES]
    assert files(folder) == sorted(f"{stem}.{suffix}" for stem in stems for suffix in ("cubin", "json"))
    for name in NAMES:
        binary = rebuild(name)
        assert binary.origin == "cache" and is_right(binary, compiled, name)


def test_sixteen_threads(cache, compiled):
    """Three kernels and one that does not compile, all at once: the error is everyone's, and no one's hindrance."""
    barrier = threading.Barrier(16)
    bad = source.load("__global__ void bad(float* x) { x[0] = y; }\n")

    def work(index):
        barrier.wait(60)
        if index % 4 == 3:
            with pytest.raises(CompileError, match='"y" is undefined'):
                compiler.build(bad, "bad", ARCH)
        return [is_right(build(NAMES[(index + turn) % 3]), compiled, NAMES[(index + turn) % 3]) for turn in range(3)]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [[True] * 3] * 16
    assert len(files(disk.folder())) == 6


def test_readers_while_others_write(tmp_path):
    """Writers whose cubins differ, as those of two compilers would, over one entry: a reader sees one of them or a miss."""
    versions = [(Binary(NAME, "f", ARCH, letter * 20_000, ()), letter.encode() * 100_000) for letter in "abcd"]

    def work(index):
        if index < 4:
            for _ in range(60):
                disk.write_entry(tmp_path, STEM, *versions[index])
            return None
        found = [disk.read_entry(tmp_path, STEM) for _ in range(250)]
        return {binary.ptx for binary in found if binary is not None}

    seen = at_once(8, work)[4:]
    assert set().union(*seen) <= {binary.ptx for binary, _ in versions}
    assert files(tmp_path) == [f"{STEM}.cubin", f"{STEM}.json"]


def killed_in_the_write(number):
    """Half of the `number`-th file is on the disk."""
    genuine, opened = os.fdopen, []

    class Half:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self.file.close()

        def write(self, content):
            opened.append(self)
            if len(opened) == number:
                self.file.write(content[: len(content) // 2])
                self.file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            self.file.write(content)

    disk.os.fdopen = lambda descriptor, mode: Half(genuine(descriptor, mode))


def killed_at_the_rename(number):
    """The `number`-th file is whole, and still under its temporary name."""
    genuine, calls = os.replace, []

    def replace(temporary, final):
        calls.append(final)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        genuine(temporary, final)

    disk.os.replace = replace


@pytest.mark.parametrize("number", [1, 2], ids=["cubin", "record"])
@pytest.mark.parametrize("kill", [killed_in_the_write, killed_at_the_rename])
def test_a_writer_is_killed(cache, compiled, runs, kill, number):
    def work():
        kill(number)
        build()

    pid, reading = fork(work)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    folder = disk.folder()
    (leftover,) = [name for name in files(folder) if name.startswith(".")]
    assert len(files(folder)) == number
    assert disk.read_entry(folder, STEM) is None

    assert build().origin == "nvrtc" and runs == [NAME]
    binary = rebuild()
    assert binary.origin == "cache" and is_right(binary, compiled)
    assert leftover in files(folder), "it may be the file of a writer at work"
    hours_ago = time.time() - 7200
    os.utime(folder / leftover, (hours_ago, hours_ago))
    build(NAMES[1])
    assert len(files(folder)) == 4 and leftover not in files(folder)


def test_what_cannot_be_swept_hinders_no_writer(cache, compiled, runs):
    folder = disk.folder()
    (folder / ".writing-folder").mkdir()
    os.utime(folder / ".writing-folder", (0, 0))
    (folder / ".writing-dangling").symlink_to("nowhere")
    assert is_right(build(), compiled) and rebuild().origin == "cache"


@pytest.fixture(scope="module")
def entry(compiled, tmp_path_factory):
    """(binary, content of the .cubin, content of the .json, a folder for damaged ones)."""
    folder = tmp_path_factory.mktemp("entry")
    binary = disk.write_entry(folder, STEM, *compiled[NAME])
    return binary, *(path.read_bytes() for path in pair(folder)), folder


def is_a_miss(entry, cubin, record):
    """The entry with these contents is not found; or is found to be what it was."""
    binary, *_, folder = entry
    for path, content in zip(pair(folder), (cubin, record)):
        path.write_bytes(content)
    found = disk.read_entry(folder, STEM)
    return found is None or (found == replace(binary, origin=found.origin) and cubin == entry[1])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_flipped_bit(entry, data):
    which = data.draw(st.sampled_from([1, 2]))
    damaged = bytearray(entry[which])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    contents = {1: entry[1], 2: entry[2]} | {which: bytes(damaged)}
    assert is_a_miss(entry, contents[1], contents[2])


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_cut_or_a_piece_too_much(entry, data):
    contents = list(entry[1:3])
    which = data.draw(st.sampled_from([0, 1]))
    place = data.draw(st.integers(0, len(contents[which])))
    end = data.draw(st.sampled_from([b"", b"\0", contents[which][:50], contents[1 - which]]))
    contents[which] = contents[which][:place] + end
    assert is_a_miss(entry, *contents)


CHANGES = {
    "name": "scale<double>", "symbol": "another", "arch": "sm_90", "ptx": "",
    "parameters": [{"kind": "u64", "size": 8, "align": 4}] * 4, "path": "/etc/passwd", "origin": "precompiled",
    "typed": "_Z1fPf", "stem": "another", "sha256": "0" * 64,
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_of_the_record_is_vouched_for(entry, field):
    """Also those that would go unnoticed until the launch: a parameter's alignment, the symbol."""
    _, cubin, content, folder = entry
    record = json.loads(content)
    assert set(record) == set(CHANGES) and record[field] != CHANGES[field]
    for path, damaged in zip(pair(folder), (cubin, json.dumps(record | {field: CHANGES[field]}).encode())):
        path.write_bytes(damaged)
    assert disk.read_entry(folder, STEM) is None


RECORDS = {
    "nested": b"[" * 200_000,
    "nested objects": b'{"stem":' * 100_000,
    "number of many digits": b'{"stem": ' + b"9" * 10_000 + b"}",
    "infinity": b'{"stem": 1e999, "sha256": Infinity}',
    "nan": b'{"stem": NaN, "sha256": NaN, "parameters": NaN}',
    "null": b"null",
    "text": b'"stem"',
    "empty object": b"{}",
    "bom": b"\xef\xbb\xbf{}",
    "surrogate": b'{"stem": "\\ud800", "sha256": "\\ud800"}',
    "many elements": b"[" + b"0," * 300_000 + b"0]",
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_records_of_another_kind(entry, record):
    for path, content in zip(pair(entry[3]), (entry[1], record)):
        path.write_bytes(content)
    assert disk.read_entry(entry[3], STEM) is None


def test_an_emptied_cache(cache, compiled, runs):
    """By the user or a cleaner of old files, while this process goes on: a second device has yet to load the kernel."""
    build()
    shutil.rmtree(cache)
    assert is_right(build(), compiled)
    assert rebuild().origin == "cache"


def test_a_cache_emptied_while_nvrtc_is_at_work(cache, compiled, monkeypatch):
    def compile(*args):
        shutil.rmtree(cache)
        return compiled[NAME]

    monkeypatch.setattr(compiler, "compile", compile)
    assert is_right(build(), compiled)


def fifo(path):
    os.mkfifo(path, 0o600)


def endless(path):
    path.symlink_to("/dev/zero")


def link_to_itself(path):
    path.symlink_to(path)


def dangling(path):
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize("which", ["cubin", "json", "both"])
@pytest.mark.parametrize("put", [fifo, endless, link_to_itself, dangling])
@pytest.mark.parametrize("precompiled", [False, True], ids=["cache", "precompiled"])
def test_no_file_in_an_entrys_place(cache, compiled, runs, tmp_path, monkeypatch, put, which, precompiled):
    """Nothing is waited for, nothing read without end; in the cache a true entry takes the place."""
    if precompiled:
        folder = tmp_path / "precompiled"
        folder.mkdir()
        monkeypatch.setenv("CUPYOPS_CUBIN_PATH", str(folder))
    else:
        folder = disk.folder()
    disk.write_entry(folder, STEM, *compiled[NAME])
    for path in pair(folder):
        if which in ("both", path.suffix[1:]):
            path.unlink()
            put(path)
    assert answer(fork(lambda: is_right(build(), compiled), seconds=20))
    if not precompiled:
        assert rebuild().origin == "cache" and all(stat.S_ISREG(path.lstat().st_mode) for path in pair(folder))


@pytest.mark.parametrize("which", ["cubin", "json", "both"])
def test_links_for_entries(cache, compiled, runs, tmp_path, monkeypatch, which):
    """In the cache a link is a miss, for what it leads to may change hands; in a folder that the user names it is not."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = disk.folder()
    build()
    for path in pair(folder):
        if which in ("both", path.suffix[1:]):
            path.rename(elsewhere / path.name)
            path.symlink_to(elsewhere / path.name)
    before = {path: path.read_bytes() for path in elsewhere.iterdir()}
    monkeypatch.setenv("CUPYOPS_CUBIN_PATH", str(folder))
    assert rebuild().origin == "precompiled"
    monkeypatch.delenv("CUPYOPS_CUBIN_PATH")
    binary = rebuild()
    assert binary.origin == "nvrtc" and is_right(binary, compiled) and not binary.path.is_symlink()
    assert {path: path.read_bytes() for path in elsewhere.iterdir()} == before, "the link is replaced, not its target"


def test_the_folder_of_an_administrator_is_trusted(cache, compiled, runs):
    """Root's files, in root's folder, named by an ordinary user."""
    if os.getuid() != 0:
        pytest.skip("only root can make what belongs to root")
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    try:
        disk.write_entry(place, STEM, *compiled[NAME])
        for path in pair(place):
            path.chmod(0o644)

        def work():
            as_an_ordinary_user()
            os.environ["CUPYOPS_CUBIN_PATH"] = str(place)
            return build().origin, is_right(build(), compiled)

        assert answer(fork(work)) == ("precompiled", True)
    finally:
        shutil.rmtree(place)


NAMES_OF_FOLDERS = {
    "spaces": "a folder of mine ", "quotes": '"it\'s" `here`', "percent": "%s%n%d", "newline": "two\nlines",
    "unicode": "ядро-内核-🧊", "shell": "$(touch pwned);&|*?", "dash": "-Isomewhere", "backslash": "a\\b\\",
    "longest": "x" * 255, "deep": "/".join(["d" * 200] * 10),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_FOLDERS.values(), ids=NAMES_OF_FOLDERS)
def test_names_of_the_folder(cache, compiled, runs, tmp_path, monkeypatch, name):
    folder = tmp_path / name
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(folder))
    binary = build()
    assert is_right(binary, compiled) and binary.path.parent.parent == folder
    assert rebuild().origin == "cache" and len(runs) == 1
    assert files(tmp_path) == [name.split("/")[0]], "nothing else is written"


@pytest.mark.filterwarnings("ignore:the kernel cache .* is not used:UserWarning")
@pytest.mark.parametrize("name", ["x" * 256, "/".join(["d" * 250] * 20), "/dev/null/cache", os.fsdecode(b"\xff\xfe")])
def test_names_that_no_folder_can_have(cache, compiled, runs, tmp_path, monkeypatch, name):
    """Too long, under a file, or of bytes that CuPy cannot hand to the driver: memory serves."""
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / name))
    binary = build()
    assert is_right(binary, compiled) and disk.folder() is None
    assert tmp_path not in binary.path.parents and not files(tmp_path)


def test_a_precompiled_folder_whose_name_cupy_cannot_write(cache, compiled, runs, tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    disk.write_entry(folder, STEM, *compiled[NAME])
    monkeypatch.setenv("CUPYOPS_CUBIN_PATH", str(folder))
    binary = build()
    assert binary.origin == "nvrtc" and is_right(binary, compiled)


@pytest.mark.parametrize("variable", ["CUPYOPS_CACHE_DIR", "CUPYOPS_CUBIN_PATH"])
def test_a_relative_folder_stays_where_it_is(cache, compiled, runs, tmp_path, monkeypatch, variable):
    """The program may go elsewhere before a second device loads the kernel."""
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    disk.write_entry(Path("here"), STEM, *compiled[NAME])
    monkeypatch.setenv(variable, "here")
    binary = build()
    monkeypatch.chdir("/")
    assert is_right(binary, compiled) and tmp_path / "here" in binary.path.parents


def test_a_tilde_is_the_home(cache, compiled, runs, tmp_path, monkeypatch):
    """As in a file of settings, where no shell has written it out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", "~/kernels")
    assert build().path.parent.parent == tmp_path / "kernels"


@pytest.mark.parametrize("home", [None, "nowhere/../~"])
def test_no_home(cache, compiled, runs, tmp_path, monkeypatch, home):
    """A user without a home, as in a container: nothing is written, least of all into the working folder."""
    import pwd

    def nobody(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("CUPYOPS_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.chdir(tmp_path)
    assert is_right(build(), compiled) and disk.folder() is None and not files(tmp_path)


@pytest.fixture
def temporary_files(tmp_path, monkeypatch):
    """A folder of them, a home in which nothing can be written, and nothing said about that yet."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    for name in ("CUPYOPS_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/self")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(disk, "_told", set())
    return folder


def test_a_home_that_cannot_be_written(cache, compiled, runs, temporary_files):
    """A private temporary folder serves, and later processes too; that it does is said once."""
    with pytest.warns(UserWarning, match=r"/proc/self/\.cache/cupyops cannot be written.* CUPYOPS_CACHE_DIR") as said:
        binary = build()
    assert is_right(binary, compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rebuild().origin == "cache" and len(runs) == 1
    private = temporary_files / f"cupyops-{os.getuid()}"
    assert len(said) == 1 and str(private) in str(said[0].message)
    assert private in build().path.parents and stat.S_IMODE(private.stat().st_mode) == 0o700
    assert files(temporary_files) == [private.name]


@pytest.mark.filterwarnings("ignore:the kernel cache .* is not used:UserWarning")
def test_a_folder_that_is_named_has_no_substitute(cache, compiled, runs, temporary_files, monkeypatch):
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", "/proc/self/cache")
    assert is_right(build(), compiled) and disk.folder() is None and not files(temporary_files)


def test_a_file_in_the_place_of_the_temporary_folder(cache, compiled, runs, temporary_files):
    """Its name is known to everybody."""
    (temporary_files / f"cupyops-{os.getuid()}").write_text("")
    assert is_right(build(), compiled) and disk.folder() is None
    assert files(temporary_files) == [f"cupyops-{os.getuid()}"]


def test_cupy_where_the_home_cannot_be_written(tmp_path):
    """CuPy makes a folder of its own when it is imported, and is told of the private one."""
    tmp_path.chmod(0o700)
    code = "from cupyops._kernel.compile import backend; print(backend.nvrtc_version()[0] > 10)"
    unset = ("CUPY_CACHE_DIR", "CUPYOPS_CACHE_DIR", "XDG_CACHE_HOME")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env |= {"HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    done = run_python("-c", code, env=env, bare=True)
    assert done.stdout.strip() == "True", done.stdout + done.stderr
    assert (tmp_path / f"cupyops-{os.getuid()}" / "cupy").is_dir()


def test_cupy_without_a_home():
    """Where no temporary folder can be had either, the error says how to name another."""
    code = (
        "from cupyops import errors\n"
        "from cupyops._kernel.compile import compiler, source\n"
        "try:\n"
        f"    print(len(compiler.build(source.load({TEXT!r}), {NAME!r}, {ARCH!r}).parameters))\n"
        "except errors.MissingDependencyError as error:\n"
        "    print(4 if 'CUPY_CACHE_DIR' in str(error) else error)\n"
    )
    unset = ("CUPY_CACHE_DIR", "CUPYOPS_CACHE_DIR", "XDG_CACHE_HOME")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env |= {"HOME": "/dev/null", "TMPDIR": "/dev/null"}
    done = run_python("-c", code, env=env, bare=True)
    assert done.stdout.strip() == "4", done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore:the kernel cache .* is not used:UserWarning")
def test_a_folder_that_is_read_only(cache, compiled, runs):
    """For a user who is not root, and not through a stand-in."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o777)
    try:

        def work():
            as_an_ordinary_user()
            folder = place / "cache"
            folder.mkdir(mode=0o500)
            os.environ["CUPYOPS_CACHE_DIR"] = str(folder)
            return is_right(build(), compiled), disk.folder(), files(folder)

        assert answer(fork(work)) == (True, None, [])
    finally:
        shutil.rmtree(place)


def full_device(monkeypatch):
    """The kernel's own answer, when the last bytes are written."""
    genuine = tempfile.mkstemp

    def mkstemp(**kwargs):
        descriptor, name = genuine(**kwargs)
        os.close(descriptor)
        return os.open("/dev/full", os.O_WRONLY), name

    monkeypatch.setattr(disk.tempfile, "mkstemp", mkstemp)


def no_file_left(number):
    def act(monkeypatch):
        def mkstemp(**kwargs):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(disk.tempfile, "mkstemp", mkstemp)

    return act


@pytest.mark.parametrize(
    "act",
    [full_device, no_file_left(errno.ENOSPC), no_file_left(errno.EDQUOT), no_file_left(errno.EROFS)],
    ids=["full device", "no space", "quota", "became read-only"],
)
def test_a_disk_that_takes_no_more(cache, compiled, runs, monkeypatch, act):
    """What is there already is read as before; what is new is kept in memory."""
    build(NAMES[1])
    act(monkeypatch)
    with pytest.warns(UserWarning, match="cannot be written .*kept in memory"):
        assert is_right(build(), compiled)
    assert rebuild(NAMES[1]).origin == "cache"
    assert len(files(disk.folder())) == 2


def test_fork_while_another_thread_compiles(cache, compiled, monkeypatch):
    """The child has no such thread: a lock that it held must not be waited for."""
    inside, enough = threading.Event(), threading.Event()

    def compile(*args):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            enough.wait(60)
        return compiled[NAME]

    monkeypatch.setattr(compiler, "compile", compile)
    thread = threading.Thread(target=build)
    thread.start()
    try:
        assert inside.wait(60)
        assert answer(fork(lambda: is_right(build(), compiled), seconds=20))
    finally:
        enough.set()
        thread.join()
    assert is_right(build(), compiled)


def test_fork_while_another_thread_specialises(cache):
    scale = Kernel(TEXT, "scale<T>")
    with scale._lock, ThreadPoolExecutor(1) as pool:  # held by this thread, and not by that of the child
        child = pool.submit(fork, lambda: scale.instance(T=torch.float32).name, 20).result()
        assert answer(child) == "scale<float>"


SLOW = """
template <int N> __device__ float g(float x) { return sinf(x) * g<N - 1>(x) + powf(x, N); }
template <> __device__ float g<0>(float x) { return x; }
__global__ void slow(float* x) { x[0] = g<5>(x[0]); }
"""


def test_fork_while_nvrtc_is_at_work(compiled):
    """NVRTC has locks of its own, which a child would wait for without end."""
    enough, texts = threading.Event(), []

    def work(number):
        while not enough.is_set():
            texts.append(f"{SLOW}// {number} {len(texts)}\n")
            compiler.compile(source.load(texts[-1]), "slow", ARCH)

    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(work, number) for number in range(2)]
        try:
            for _ in range(3):
                before = len(texts)
                while len(texts) == before and not any(thread.done() for thread in threads):
                    time.sleep(0.001)
                assert answer(fork(lambda: compiler.compile(SOURCE, NAME, ARCH), seconds=30)) == compiled[NAME]
        finally:
            enough.set()
        assert [thread.result() for thread in threads] == [None, None]


def test_fork_after_a_kernel_was_compiled(cache, compiled, runs):
    build()

    def work():
        return [is_right(build(name), compiled, name) for name in NAMES]

    assert answer(fork(work)) == [True] * 3
    assert runs == [NAME], "the child has its own list"


@pytest.mark.filterwarnings("ignore:the kernel cache .* is not used:UserWarning")
def test_a_cubin_in_memory_outlives_the_process_that_made_it(cache, compiled, runs):
    """A child has the file too, under the same path, when its parent is gone."""
    cache.write_text("no folder")

    def work():
        binary, parent = build(), os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.01)
        return is_right(binary, compiled)

    assert answer(fork(work)) is True


class Pretended(torch.Tensor):
    is_cuda = True


def test_a_launch_after_fork_says_why_it_cannot_be(cache, monkeypatch):
    scale, x = Kernel(TEXT, "scale<T>"), torch.ones(8).as_subclass(Pretended)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(LaunchError, match="scale<float>: this process was forked .*spawn"):
        scale[1, 8](x, x, 1.0, 8, T=torch.float32)


def test_a_child_takes_no_fast_path(cache):
    """It leads to functions that were loaded for the parent."""
    scale = Kernel(TEXT, "scale<T>")
    scale._table[torch.float32] = ("an entry",)
    assert answer(fork(lambda: dict(scale._table))) == {}
    assert scale._table


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return cupyops.relu(torch.arange(-8.0, 8.0) + index)


def test_workers_of_a_data_loader(cache, compiled, runs):
    """Forked, as by default on Linux, from a process that has compiled; on the CPU they work as ever."""
    build()
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = torch.cat(list(loader))
    assert torch.equal(found, torch.relu(torch.arange(-8.0, 8.0) + torch.arange(32.0)[:, None]))


@pytest.mark.gpu
def test_fork_after_cuda():
    """With a tensor of the parent's, on which PyTorch is asked for nothing: the error is ours, in either path."""
    code = (
        "import os, sys, torch, cupyops\n"
        f"scale = cupyops.Kernel({TEXT!r}, 'scale<T>')\n"
        "x = torch.ones(8, device='cuda')\n"
        "for _ in range(2):\n"
        "    scale[1, 8](x, x, 2.0, 8, T=torch.float32)\n"
        "integers = x.view(torch.int32)\n"
        "torch.cuda.synchronize()\n"
        "if os.fork() == 0:\n"
        "    for dtype, y in ((torch.float32, x), (torch.int32, integers)):\n"
        "        try:\n"
        "            scale[1, 8](y, y, 2, 8, T=dtype)\n"
        "            os._exit(2)\n"
        "        except cupyops.LaunchError as error:\n"
        "            if 'forked' not in str(error): os._exit(3)\n"
        "    os._exit(0)\n"
        "_, status = os.wait()\n"
        "scale[1, 8](x, x, 2.0, 8, T=torch.float32)\n"
        "assert x.tolist() == [8.0] * 8\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_fork_while_another_thread_simulates():
    """The child has a lock of its own, and may touch all of each tensor."""
    code = """
        __global__ void slow(const float* x, float* y, int rounds) {
            for (int i = 0; i < rounds; ++i) y[threadIdx.x] += x[threadIdx.x];
        }
    """
    slow, whole = cupyops.Kernel(code, "slow"), torch.ones(64)
    begun = threading.Event()

    def simulate(rounds, y):
        with cupyops.simulate():
            slow[1, 1](whole[:1], y, 1)
            begun.set()
            slow[1, 1](whole[:1], y, rounds)
        return y.tolist()

    thread = threading.Thread(target=simulate, args=(40_000, torch.zeros(1)))
    thread.start()
    assert begun.wait(60)
    time.sleep(0.1)

    def work():
        y = torch.zeros(64)
        with cupyops.simulate():
            slow[1, 64](whole, y, 2)
        return y.tolist()

    child = fork(work, seconds=60)
    thread_was_at_it = thread.is_alive()
    assert answer(child) == [2.0] * 64 and thread_was_at_it
    thread.join()


def interrupted_at(line, work):
    """Run `work` with a KeyboardInterrupt at the `line`-th line of compiler or cache; whether there were so many.

    Not at the lines of `with`: tracing passes them once more before the exit, where no signal is ever delivered.
    """
    passed, texts = 0, {one.__file__: Path(one.__file__).read_text().splitlines() for one in (compiler, disk)}

    def trace(frame, event, argument):
        nonlocal passed
        text = texts.get(frame.f_code.co_filename)
        if text is None:
            return None
        if event == "line" and not text[frame.f_lineno - 1].lstrip().startswith("with "):
            passed += 1
            if passed == line:
                raise KeyboardInterrupt
        return trace

    def traced():
        sys.settrace(trace)
        with suppress(KeyboardInterrupt):
            work()

    # in a thread of its own: what a trace function raises in an `except` leaves the exception of that as the one being
    # handled, and all that is raised in the thread from then on has it as its context
    with ThreadPoolExecutor(1) as pool:
        pool.submit(traced).result()
    return passed >= line


def test_an_interrupt_at_every_line(cache, compiled, runs):
    """Control-C wherever it falls: no lock stays held, and what is on the disk is right or not there."""
    line, folder = 1, disk.folder()
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        compiler._memory.clear()
        if not interrupted_at(line, build):
            break
        assert not any(lock.locked() for lock in compiler._locks.values())
        left = set(files(folder)) if folder.exists() else set()
        unfinished = {name for name in left if name.startswith(".writing-")}
        assert left - unfinished <= {f"{STEM}.cubin", f"{STEM}.json"} and len(unfinished) <= 1
        found = disk.read_entry(folder, STEM)
        assert found is None or is_right(found, compiled)
        assert is_right(build(), compiled) and is_right(rebuild(), compiled)
        line += 1
    assert line > 50, "the lines of a build"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit, ZeroDivisionError])
def test_an_exception_in_a_thread_poisons_nothing(cache, compiled, monkeypatch, error):
    """Others wait for the same kernel meanwhile: they get it."""
    first, waiting = threading.Lock(), threading.Barrier(5)

    def compile(*args):
        if first.acquire(blocking=False):
            time.sleep(0.05)  # the others are at the lock by now
            raise error
        return compiled[NAME]

    def work(_):
        waiting.wait(60)
        try:
            return is_right(build(), compiled)
        except error:
            return "raised"

    monkeypatch.setattr(compiler, "compile", compile)
    with ThreadPoolExecutor(5) as pool:
        assert sorted(pool.map(work, range(5)), key=str) == [True] * 4 + ["raised"]


def test_an_interrupt_while_nvrtc_is_at_work(cache, compiled):
    """A true signal, during a true compilation."""

    def work():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

        def interrupted():
            compiler.build(source.load(SLOW), "slow", ARCH)
            time.sleep(30)  # where the compilation was quicker

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        return is_right(build(), compiled), compiler.build(source.load(SLOW), "slow", ARCH).name

    assert answer(fork(work)) == (True, "slow")
    assert not [name for name in files(disk.folder()) if name.startswith(".")]
