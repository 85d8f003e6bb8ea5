"""NVRTC, typed parameters and the disk cache; no GPU is needed for any of it."""

import errno
import json
import multiprocessing
import os
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from processes import run_python

from cupyops._kernel.compile import backend, compiler, source, trust
from cupyops._kernel.compile import cache as disk
from cupyops._kernel.compile.binary import Parameter, parameters
from cupyops.errors import CompileError

ARCH = "sm_80"
SCALE = """
template <typename T> __global__ void scale(const T* x, T* y, T factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * factor;
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a process that remembers nothing."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(folder))
    monkeypatch.delenv("CUPYOPS_CUBIN_PATH", raising=False)
    forget(monkeypatch)
    return folder


def forget(monkeypatch):
    """As a new process would see it: only the disk remembers."""
    monkeypatch.setattr(compiler, "_memory", {})


def entries(folder, suffix=".cubin"):
    return sorted(path for path in folder.rglob(f"*{suffix}"))


def is_cubin(content: bytes) -> bool:
    return content[:4] == b"\x7fELF"


@pytest.fixture
def count_compiles(monkeypatch):
    """A list that grows by one each time NVRTC runs."""
    calls, genuine = [], compiler.compile

    def counted(*args, **kwargs):
        calls.append(args)
        return genuine(*args, **kwargs)

    monkeypatch.setattr(compiler, "compile", counted)
    return calls


# --- what NVRTC gives --------------------------------------------------------------------------------------------


def test_compile_gives_cubin_ptx_and_parameters():
    binary, cubin = compiler.compile(source.load(SCALE), "scale<float>", ARCH)
    assert is_cubin(cubin)
    assert binary.name == "scale<float>" and binary.arch == ARCH and binary.origin == "nvrtc" and binary.path is None
    assert f".target {ARCH}" in binary.ptx and f".entry {binary.symbol}" in binary.ptx
    assert not binary.ptx.endswith("\0")
    pointer, number = Parameter("u64", 8, 8), Parameter("u32", 4, 4)
    assert binary.parameters == (pointer, pointer, Parameter("f32", 4, 4), number)


EVERY_KIND = {
    "float* p": ("u64", 8, 8),
    "const void* p": ("u64", 8, 8),
    "bool b": ("u8", 1, 1),
    "char c": ("u8", 1, 1),
    "signed char c": ("u8", 1, 1),
    "unsigned char c": ("u8", 1, 1),
    "short s": ("u16", 2, 2),
    "unsigned short s": ("u16", 2, 2),
    "int i": ("u32", 4, 4),
    "unsigned u": ("u32", 4, 4),
    "long l": ("u64", 8, 8),
    "long long l": ("u64", 8, 8),
    "unsigned long long l": ("u64", 8, 8),
    "size_t z": ("u64", 8, 8),
    "float f": ("f32", 4, 4),
    "double d": ("f64", 8, 8),
    "__half h": ("b8", 2, 2),
    "__nv_bfloat16 h": ("b8", 2, 2),
    "Pair s": ("b8", 16, 8),
    "Five s": ("b8", 32, 16),
    "Three s": ("b8", 3, 1),
    "const __grid_constant__ Pair s": ("b8", 16, 8),
    "const __grid_constant__ TensorMap s": ("b8", 128, 64),
    "int2 i": ("b8", 8, 8),
}
TYPES = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
struct Pair { int a; double b; };
struct __align__(16) Five { float v[5]; };
struct Three { char v[3]; };
struct __align__(64) TensorMap { unsigned long long opaque[16]; };
"""


def test_parameters_of_every_kind():
    declared = ", ".join(re.sub(r"\w+$", f"p{i}", text) for i, text in enumerate(EVERY_KIND))
    text = f"{TYPES}__global__ void every({declared}) {{}}\n"
    binary, _ = compiler.compile(source.load(text), "every", ARCH)
    for (text, expected), found in zip(EVERY_KIND.items(), binary.parameters, strict=True):
        assert found == Parameter(*expected), text


def test_parameters_may_be_absent():
    binary, _ = compiler.compile(source.load("__global__ void nothing() {}\n"), "nothing", ARCH)
    assert binary.parameters == ()


@pytest.mark.parametrize("head", [
    'extern "C" __global__ void f', "__global__ void __launch_bounds__(256) f",
    "__global__ void __launch_bounds__(256, 2) f", 'extern "C" __global__ __launch_bounds__(256) void f',
    "static __global__ void f", "__global__ void __cluster_dims__(2, 1, 1) f",
])  # fmt: skip
def test_heads_of_kernels(head):
    arch = "sm_90" if "cluster" in head else ARCH
    binary, cubin = compiler.compile(source.load(f"{head}(float* x, int n) {{ x[n] = 1; }}\n"), "f", arch)
    assert [p.kind for p in binary.parameters] == ["u64", "u32"] and is_cubin(cubin)
    assert (binary.symbol == "f") == ('extern "C"' in head)


@pytest.mark.parametrize("name", ["f<__half, true, 3>", "f<double, false, -1>", "f<__nv_bfloat16, true, 0>"])
def test_template_arguments(name):
    text = (
        TYPES + "template <typename T, bool B, int N> __global__ void f(T* x, T y) { if (B) x[threadIdx.x + N] = y; }\n"
    )
    binary, cubin = compiler.compile(source.load(text), name, ARCH)
    assert binary.name == name and is_cubin(cubin) and binary.symbol.startswith("_Z1f")


def test_parameters_of_the_right_entry():
    """Two kernels in one file, one's name the beginning of the other's."""
    text = (
        'extern "C" __global__ void ab(float* x, int n) {}\n'
        'extern "C" __global__ void a(double d, float* x, short s) {}\n'
    )
    loaded = source.load(text)
    assert [p.kind for p in compiler.compile(loaded, "ab", ARCH)[0].parameters] == ["u64", "u32"]
    assert [p.kind for p in compiler.compile(loaded, "a", ARCH)[0].parameters] == ["f64", "u64", "u16"]


def test_unknown_entry_is_an_error():
    with pytest.raises(CompileError, match="no entry nothing"):
        parameters(".visible .entry something()\n", "nothing")


def test_pointer_attributes_in_ptx():
    """Newer compilers annotate pointers: `.param .u64 .ptr .global .align 16 p`."""
    pointers = ".param .u64 .ptr .global .align 16 f_param_0,\n\t.param .u64 .ptr .align 1 f_param_1"
    ptx = f".visible .entry f(\n\t{pointers},\n\t.param .u32 f_param_2\n)"
    assert [(p.kind, p.size) for p in parameters(ptx, "f")] == [("u64", 8), ("u64", 8), ("u32", 4)]


def test_options_reach_the_compiler():
    text = source.load("__global__ void f(float* x) { x[0] = FACTOR / x[1]; }\n")
    with pytest.raises(CompileError, match="FACTOR"):
        compiler.compile(text, "f", ARCH)
    exact, _ = compiler.compile(text, "f", ARCH, ("-DFACTOR=2.0f",))
    fast, _ = compiler.compile(text, "f", ARCH, ("-DFACTOR=2.0f", "--use_fast_math"))
    assert "div.rn.f32" in exact.ptx and "div.approx.ftz.f32" in fast.ptx


def test_denormals_are_kept_by_default():
    """No option adds -ftz behind our back."""
    binary, _ = compiler.compile(source.load(SCALE), "scale<float>", ARCH)
    assert ".ftz" not in binary.ptx


def test_ptx_names_the_lines_of_the_source():
    binary, _ = compiler.compile(source.load("relu.cu"), "relu_fwd<float>", ARCH)
    files = re.findall(r'\.file\s+\d+ "([^"]+)"', binary.ptx)
    assert any(f.endswith("relu.cu") for f in files) and any(
        f.endswith("common/elementwise/elementwise.cuh") for f in files
    )
    assert ".loc" in binary.ptx


def test_architectures():
    archs = compiler.supported_archs()
    assert {"sm_75", "sm_80", "sm_90", "sm_120"} <= set(archs)
    numbers = [int(arch.removeprefix("sm_")) for arch in archs]
    assert numbers == sorted(numbers)


def test_unknown_architecture_is_a_compile_error():
    with pytest.raises(CompileError, match="sm_11"):
        compiler.compile(source.load(SCALE), "scale<float>", "sm_11")


def test_compiling_needs_no_gpu():
    """With every GPU hidden, in a process of its own."""
    code = (
        "from cupyops._kernel.compile import compiler, source\n"
        "binary, cubin = compiler.compile(source.load('relu.cu'), 'relu_fwd<__half>', 'sm_90')\n"
        "print(len(binary.parameters), cubin[:4])\n"
    )
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run_python("-c", code, env=env)
    assert done.stdout.split() == ["4", "b'\\x7fELF'"]


def test_the_headers_match_the_compiler():
    major, _ = backend.nvrtc_version()
    include = backend.cuda_include()
    assert (include / "cuda_fp16.h").is_file() and backend.runtime_version(include) // 1000 == major


def test_headers_of_another_major_are_refused(tmp_path, monkeypatch):
    (tmp_path / "cuda_fp16.h").write_text("")
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  11080\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(backend, "_include_candidates", lambda: [tmp_path, tmp_path / "empty"])
    backend.cuda_include.cache_clear()
    try:
        with pytest.raises(ImportError) as caught:
            backend.cuda_include()
    finally:
        backend.cuda_include.cache_clear()
    message = str(caught.value)
    assert f"{tmp_path}: CUDA 11" in message and f"{tmp_path / 'empty'}: no CUDA headers" in message
    assert "pip install nvidia-cuda-runtime" in message


# --- the cache ---------------------------------------------------------------------------------------------------


def test_second_build_is_the_same_object(cache, count_compiles):
    text = source.load(SCALE)
    assert compiler.build(text, "scale<float>", ARCH) is compiler.build(text, "scale<float>", ARCH)
    assert len(count_compiles) == 1


def test_a_new_process_reads_the_disk(cache, monkeypatch, count_compiles):
    text = source.load(SCALE)
    first = compiler.build(text, "scale<float>", ARCH)
    forget(monkeypatch)
    second = compiler.build(text, "scale<float>", ARCH)
    assert (first.origin, second.origin) == ("nvrtc", "cache") and len(count_compiles) == 1
    assert replace(first, origin="") == replace(second, origin="")
    assert is_cubin(second.path.read_bytes()) and cache in second.path.parents


def test_folder_and_files_are_the_users_alone(cache):
    binary = compiler.build(source.load(SCALE), "scale<float>", ARCH)
    for folder in (cache, binary.path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in binary.path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_open_folder_of_ours_is_closed(cache):
    disk.folder().chmod(0o755)
    assert stat.S_IMODE(disk.folder().stat().st_mode) == 0o700


def test_a_folder_that_was_there_keeps_its_mode(cache):
    """CUPYOPS_CACHE_DIR may name a folder that serves others too: only what we make in it is closed."""
    cache.mkdir(mode=0o755)
    cache.chmod(0o755)
    folder = disk.folder()
    assert folder.parent == cache and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755


def test_one_folder_for_each_nvrtc(cache, monkeypatch):
    before = disk.folder()
    major, minor = backend.nvrtc_version()
    monkeypatch.setattr(backend, "nvrtc_version", lambda: (major, minor + 1))
    assert disk.folder() != before
    assert f"{major}.{minor}" in before.name


def test_one_folder_for_each_version_of_the_headers(cache, monkeypatch):
    before = disk.folder()
    monkeypatch.setattr(backend, "runtime_version", lambda _: 99990)
    assert disk.folder() != before


def test_default_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("CUPYOPS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.folder().parent == tmp_path / "cupyops"


class TestKey:
    def test_edited_header_is_another_entry(self, cache, tmp_path, count_compiles):
        (tmp_path / "h.cuh").write_text("__device__ float h(float x) { return x + 1; }\n")
        text = '#include "h.cuh"\n__global__ void f(float* x) { x[0] = h(x[0]); }\n'
        first = compiler.build(source.load(text, tmp_path), "f", ARCH)
        (tmp_path / "h.cuh").write_text("__device__ float h(float x) { return x + 2; }\n")
        second = compiler.build(source.load(text, tmp_path), "f", ARCH)
        assert first.path != second.path and first.ptx != second.ptx and len(count_compiles) == 2

    def test_every_part_counts(self):
        text, other = source.load(SCALE), source.load(SCALE + " ")
        stems = {
            compiler.entry_name(text, "scale<float>", "sm_80", ()),
            compiler.entry_name(other, "scale<float>", "sm_80", ()),
            compiler.entry_name(text, "scale<double>", "sm_80", ()),
            compiler.entry_name(text, "scale<float>", "sm_90", ()),
            compiler.entry_name(text, "scale<float>", "sm_80", ("-DA",)),
            compiler.entry_name(text, "scale<float>", "sm_80", ("-DA", "-DB")),
            compiler.entry_name(text, "scale<float>", "sm_80", ("-DA -DB",)),
        }
        assert len(stems) == 7

    def test_base_options_count(self, monkeypatch):
        text = source.load(SCALE)
        before = compiler.entry_name(text, "scale<float>", ARCH, ())
        monkeypatch.setattr(compiler, "BASE_OPTIONS", (*compiler.BASE_OPTIONS, "-G"))
        assert compiler.entry_name(text, "scale<float>", ARCH, ()) != before

    def test_file_names_are_safe(self):
        hostile = source.Source("../../evil name;rm -rf", SCALE)
        stem = compiler.entry_name(hostile, "scale<T, /etc/passwd>" + "x" * 500, ARCH, ())
        assert re.fullmatch(r"[\w.-]+", stem) and "/" not in stem and len(stem) < 200


def damage_truncate(cubin, record):
    cubin.write_bytes(cubin.read_bytes()[:100])


def damage_flip_a_bit(cubin, record):
    content = bytearray(cubin.read_bytes())
    content[len(content) // 2] ^= 1
    cubin.write_bytes(content)


def damage_empty(cubin, record):
    cubin.write_bytes(b"")
    record.write_bytes(b"")


def damage_bad_json(cubin, record):
    record.write_text(record.read_text()[:-7])


def damage_not_utf8(cubin, record):
    record.write_bytes(b"\xff\xfe\x00" * 9)


def damage_another_shape_of_json(cubin, record):
    record.write_text("[1, 2, 3]")


def damage_field_missing(cubin, record):
    content = json.loads(record.read_text())
    del content["symbol"]
    record.write_text(json.dumps(content))


def damage_parameters(cubin, record):
    content = json.loads(record.read_text())
    content["parameters"] = [{"kind": "u64"}]
    record.write_text(json.dumps(content))


def damage_unknown_field(cubin, record):
    record.write_text(json.dumps(json.loads(record.read_text()) | {"surprise": 1}))


def damage_no_cubin(cubin, record):
    cubin.unlink()


def damage_no_record(cubin, record):
    record.unlink()


def damage_a_folder_in_its_place(cubin, record):
    record.unlink()
    record.mkdir()
    (record / "in the way").write_text("")


DAMAGES = [value for name, value in list(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__.removeprefix("damage_"))
def test_a_damaged_entry_is_a_miss(cache, monkeypatch, count_compiles, damage):
    text = source.load(SCALE)
    first = compiler.build(text, "scale<float>", ARCH)
    cubin = first.path.read_bytes()
    damage(first.path, first.path.with_suffix(".json"))
    forget(monkeypatch)
    if damage is damage_a_folder_in_its_place:
        with pytest.warns(UserWarning, match="cannot be written"):
            second = compiler.build(text, "scale<float>", ARCH)
        assert second.path.read_bytes() == cubin
        return
    second = compiler.build(text, "scale<float>", ARCH)
    assert second.origin == "nvrtc" and len(count_compiles) == 2
    assert second.path.read_bytes() == cubin
    forget(monkeypatch)
    repaired = compiler.build(text, "scale<float>", ARCH)
    assert repaired.origin == "cache" and len(count_compiles) == 2


def test_an_entry_under_another_name_is_a_miss(cache, monkeypatch):
    """A valid pair of files copied over another kernel's is not taken for it."""
    text = source.load(SCALE)
    one, other = (compiler.build(text, f"scale<{t}>", ARCH) for t in ("float", "double"))
    for suffix in (".cubin", ".json"):
        other.path.with_suffix(suffix).write_bytes(one.path.with_suffix(suffix).read_bytes())
    forget(monkeypatch)
    again = compiler.build(text, "scale<double>", ARCH)
    assert again.name == "scale<double>" and again.symbol == other.symbol and again.origin == "nvrtc"


def test_leftovers_of_a_killed_writer_are_ignored(cache, monkeypatch, count_compiles):
    text = source.load(SCALE)
    folder = disk.folder()
    stem = compiler.entry_name(text, "scale<float>", ARCH, ())
    (folder / ".writing-abc").write_bytes(b"half a cubin")
    (folder / f"{stem}.cubin").write_bytes(b"half a cubin, whose record was never written")
    assert compiler.build(text, "scale<float>", ARCH).origin == "nvrtc"
    forget(monkeypatch)
    assert compiler.build(text, "scale<float>", ARCH).origin == "cache" and len(count_compiles) == 1


def test_a_file_appears_only_when_whole(cache, monkeypatch):
    """At the moment of each rename the temporary file holds everything; the final name is never open for writing."""
    seen = []
    genuine = os.replace

    def observed(temporary, final):
        content = open(temporary, "rb").read()
        seen.append((os.path.basename(temporary), os.path.basename(final), content, os.path.exists(final)))
        genuine(temporary, final)

    monkeypatch.setattr(disk.os, "replace", observed)
    binary = compiler.build(source.load(SCALE), "scale<float>", ARCH)
    (cubin, record) = seen
    assert cubin[1].endswith(".cubin") and record[1].endswith(".json"), "the record that vouches is written last"
    assert cubin[2] == binary.path.read_bytes() and json.loads(record[2])["name"] == "scale<float>"
    for temporary, final, _, existed in seen:
        assert not existed and not temporary.startswith(final[:8]) and temporary.startswith(".writing-")


@pytest.mark.parametrize("failing", [1, 2], ids=["cubin", "record"])
def test_a_full_disk_leaves_nothing_and_falls_back_to_memory(cache, monkeypatch, failing):
    genuine, calls = os.replace, []

    def full(temporary, final):
        calls.append(final)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        genuine(temporary, final)

    monkeypatch.setattr(disk.os, "replace", full)
    with pytest.warns(UserWarning, match="cannot be written .*No space left.*kept in memory"):
        binary = compiler.build(source.load(SCALE), "scale<float>", ARCH)
    assert is_cubin(binary.path.read_bytes()) and cache not in binary.path.parents
    assert not list(cache.rglob(".writing-*")) and not entries(cache, ".json")


def assert_memory_serves(cache):
    """With no folder to be had: a cubin that loads by its path, once more from memory."""
    text = source.load(SCALE)
    disk._told.clear()
    said = (
        r"the kernel cache .* is not used, and each process compiles for itself: (it|others) .*\. Set CUPYOPS_CACHE_DIR"
    )
    with pytest.warns(UserWarning, match=said):
        assert disk.folder() is None
    assert disk.folder() is None  # which is said once
    binary = compiler.build(text, "scale<float>", ARCH)
    content = binary.path.read_bytes()
    assert is_cubin(content) and content == compiler.compile(text, "scale<float>", ARCH)[1]
    assert cache not in binary.path.parents
    assert compiler.build(text, "scale<float>", ARCH) is binary


def test_file_in_the_folders_place(cache):
    cache.write_text("not a folder")
    assert_memory_serves(cache)
    assert cache.read_text() == "not a folder"


def test_file_in_the_parents_place(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert_memory_serves(cache)


@pytest.mark.parametrize("there", [True, False], ids=["there", "to be made"])
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
def test_symbolic_link_in_the_folders_place(cache, tmp_path, monkeypatch, count_compiles, there, relative):
    """As on clusters, where the room is not in the home. What is used is where it leads, whatever becomes of the link."""
    elsewhere = tmp_path / "scratch" / "elsewhere"
    elsewhere.parent.mkdir()
    if there:
        elsewhere.mkdir()
    (tmp_path / "second").symlink_to("scratch/elsewhere" if relative else elsewhere)
    cache.symlink_to(tmp_path / "second")
    binary = compiler.build(source.load(SCALE), "scale<float>", ARCH)
    assert elsewhere in binary.path.parents and stat.S_IMODE(binary.path.parent.stat().st_mode) == 0o700
    forget(monkeypatch)
    assert compiler.build(source.load(SCALE), "scale<float>", ARCH).origin == "cache" and len(count_compiles) == 1


def test_a_link_to_a_folder_that_others_may_write(cache, tmp_path):
    """The link is ours, and what it leads to is looked at as any other."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere").chmod(0o777)
    cache.symlink_to(tmp_path / "elsewhere")
    assert_memory_serves(cache)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_link_that_others_may_turn(cache, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "open").mkdir()
    cache.symlink_to(tmp_path / "open" / "link")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "open").chmod(0o777)
    assert_memory_serves(cache)
    (tmp_path / "open").chmod(0o1777)  # as in /tmp, nobody can rename what is ours there
    assert disk.folder().parent == tmp_path / "elsewhere"


def test_a_link_that_somebody_else_has_made(cache, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    genuine = os.lstat

    def lstat(path, *args, **kwargs):
        found = genuine(path, *args, **kwargs)
        return os.stat_result((*found[:4], found.st_uid + 7, *found[5:])) if str(path) == str(cache) else found

    monkeypatch.setattr(trust.os, "lstat", lstat)
    assert_memory_serves(cache)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_link_to_itself(cache):
    cache.symlink_to(cache)
    assert_memory_serves(cache)


def test_symbolic_link_in_the_place_of_the_folder_of_this_nvrtc(cache, tmp_path):
    folder = disk.folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert_memory_serves(folder)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_folder_of_someone_else(cache, monkeypatch):
    cache.mkdir(mode=0o700)
    real = os.getuid()
    monkeypatch.setattr(disk.os, "getuid", lambda: real + 1)
    assert_memory_serves(cache)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777], ids=oct)
def test_folder_that_others_may_write(cache, mode):
    """Whoever can rename what is in it could put a cubin of their own there."""
    cache.mkdir()
    cache.chmod(mode)
    assert_memory_serves(cache)
    assert stat.S_IMODE(cache.stat().st_mode) == mode


def test_read_only_folder(cache, monkeypatch):
    cache.mkdir(mode=0o500)
    monkeypatch.setattr(disk.os, "access", lambda path, mode: False)  # root may write anywhere
    assert_memory_serves(cache)


def test_folder_that_cannot_be_made(cache, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(type(cache), "mkdir", refuse)
    assert_memory_serves(cache)


@pytest.mark.parametrize("memfd", [True, False], ids=["memfd", "temporary file"])
def test_in_memory_is_whole_and_a_file(monkeypatch, memfd):
    if not memfd:
        monkeypatch.delattr(disk.os, "memfd_create", raising=False)
    content = bytes(range(256)) * 20_000
    path = disk.in_memory("x" * 400, content)
    assert path.read_bytes() == content
    if not memfd:
        path.unlink()


# --- at once -----------------------------------------------------------------------------------------------------


def test_eight_threads_compile_once(cache, count_compiles):
    text, barrier = source.load(SCALE), threading.Barrier(8)

    def work(_):
        barrier.wait()
        return compiler.build(text, "scale<float>", ARCH)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert len(count_compiles) == 1 and all(binary is found[0] for binary in found)


def test_threads_that_compile_different_kernels(cache):
    text, names = source.load(SCALE), [f"scale<{t}>" for t in ("float", "double", "int", "short")] * 2
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: compiler.build(text, name, ARCH), names))
    assert [binary.name for binary in found] == names
    assert len({binary.path for binary in found}) == 4


def test_an_error_is_not_remembered(cache, count_compiles):
    text = source.load("__global__ void bad(float* x) { x[0] = y; }\n")
    for attempt in (1, 2):
        with pytest.raises(CompileError):
            compiler.build(text, "bad", ARCH)
        assert len(count_compiles) == attempt
    assert not entries(cache) and not entries(cache, ".json")


def build_in_a_process(folder, barrier, results):
    os.environ["CUPYOPS_CACHE_DIR"] = folder
    barrier.wait()
    binary = compiler.build(source.load(SCALE), "scale<float>", ARCH)
    results.put((binary.symbol, str(binary.path), binary.path.read_bytes()))


def test_eight_processes_into_one_cold_cache(cache, monkeypatch):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cupyops._kernel.compile.compiler", "torch.distributed.tensor"])
    barrier, results = context.Barrier(8), context.Queue()
    workers = [context.Process(target=build_in_a_process, args=(str(cache), barrier, results)) for _ in range(8)]
    for worker in workers:
        worker.start()
    found = {results.get(timeout=100) for _ in workers}
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(found) == 1, "all have the same file with the same content"
    assert not list(cache.rglob(".writing-*")) and len(entries(cache)) == len(entries(cache, ".json")) == 1
    assert compiler.build(source.load(SCALE), "scale<float>", ARCH).origin == "cache"


# --- precompiled -------------------------------------------------------------------------------------------------


@pytest.fixture
def precompiled(cache, tmp_path):
    """A .cu file, and a folder with a cubin of it for sm_80."""
    path, folder = tmp_path / "scale.cu", tmp_path / "cubins"
    path.write_text(SCALE)
    folder.mkdir()
    text = source.load(path)
    binary, cubin = compiler.compile(text, "scale<float>", "sm_80")
    disk.write_entry(folder, compiler.entry_name(text, "scale<float>", "sm_80", ()), binary, cubin)
    return text, folder


def test_cubins_beside_the_source(precompiled, cache, count_compiles):
    text, folder = precompiled
    binary = compiler.build(text, "scale<float>", "sm_80")
    assert binary.origin == "precompiled" and binary.path.parent == folder and not count_compiles
    assert not entries(cache)


def test_cubin_path(precompiled, tmp_path, monkeypatch, count_compiles):
    text, folder = precompiled
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    monkeypatch.setenv("CUPYOPS_CUBIN_PATH", os.pathsep.join([str(tmp_path / "absent"), "", str(elsewhere)]))
    binary = compiler.build(text, "scale<float>", "sm_80")
    assert binary.origin == "precompiled" and binary.path.parent == elsewhere and not count_compiles


@pytest.mark.parametrize(("arch", "serves"), [("sm_86", True), ("sm_89", True), ("sm_90", False), ("sm_75", False)])
def test_a_lower_minor_serves(precompiled, count_compiles, arch, serves):
    """A cubin for sm_80 runs on sm_86 and sm_89, not on sm_90."""
    text, _ = precompiled
    binary = compiler.build(text, "scale<float>", arch)
    assert (binary.origin == "precompiled") == serves == (not count_compiles)
    assert binary.arch == ("sm_80" if serves else arch)


def test_a_higher_minor_does_not_serve(precompiled, count_compiles):
    text, folder = precompiled
    binary, cubin = compiler.compile(text, "scale<double>", "sm_86")
    disk.write_entry(folder, compiler.entry_name(text, "scale<double>", "sm_86", ()), binary, cubin)
    assert compiler.build(text, "scale<double>", "sm_80").origin == "nvrtc"


def test_the_exact_architecture_goes_first(precompiled):
    text, folder = precompiled
    binary, cubin = compiler.compile(text, "scale<float>", "sm_86")
    disk.write_entry(folder, compiler.entry_name(text, "scale<float>", "sm_86", ()), binary, cubin)
    assert compiler.build(text, "scale<float>", "sm_86").arch == "sm_86"
    assert compiler.build(text, "scale<float>", "sm_89").arch == "sm_86"


def test_three_digit_architectures(precompiled):
    text, folder = precompiled
    binary, cubin = compiler.compile(text, "scale<double>", "sm_120")
    disk.write_entry(folder, compiler.entry_name(text, "scale<double>", "sm_120", ()), binary, cubin)
    assert compiler.build(text, "scale<double>", "sm_121").arch == "sm_120"


def test_an_edited_source_does_not_use_stale_cubins(precompiled, count_compiles):
    text, _ = precompiled
    text.path.write_text(SCALE.replace("* factor", "+ factor"))
    assert compiler.build(source.load(text.path), "scale<float>", "sm_80").origin == "nvrtc"


def test_other_options_do_not_use_them(precompiled):
    text, _ = precompiled
    assert compiler.build(text, "scale<float>", "sm_80", ("--use_fast_math",)).origin == "nvrtc"


def test_a_damaged_precompiled_entry_is_compiled_anew(precompiled):
    text, folder = precompiled
    damage_flip_a_bit(entries(folder)[0], None)
    assert compiler.build(text, "scale<float>", "sm_80").origin == "nvrtc"
