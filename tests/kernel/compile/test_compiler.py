"""NVRTC, typed parameters and the disk cache; no GPU is needed for any of it."""

import errno
import os
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from processes import run_python

from cupyops._kernel.compile import backend, compiler, source
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


def test_compile_gives_cubin_ptx_and_parameters():
    binary, cubin = compiler.compile(source.load(SCALE), "scale<float>", ARCH)
    assert is_cubin(cubin)
    assert binary.name == "scale<float>" and binary.arch == ARCH and binary.origin == "nvrtc" and binary.path is None
    assert f".target {ARCH}" in binary.ptx and f".entry {binary.symbol}" in binary.ptx
    assert not binary.ptx.endswith("\0")
    pointer, number = Parameter("u64", 8, 8), Parameter("u32", 4, 4)
    assert binary.parameters == (pointer, pointer, Parameter("f32", 4, 4), number)


EVERY_KIND = {
    "float* p": ("u64", 8, 8), "const void* p": ("u64", 8, 8), "bool b": ("u8", 1, 1), "char c": ("u8", 1, 1),
    "signed char c": ("u8", 1, 1), "unsigned char c": ("u8", 1, 1), "short s": ("u16", 2, 2),
    "unsigned short s": ("u16", 2, 2), "int i": ("u32", 4, 4), "unsigned u": ("u32", 4, 4), "long l": ("u64", 8, 8),
    "long long l": ("u64", 8, 8), "unsigned long long l": ("u64", 8, 8), "size_t z": ("u64", 8, 8),
    "float f": ("f32", 4, 4), "double d": ("f64", 8, 8), "__half h": ("b8", 2, 2), "__nv_bfloat16 h": ("b8", 2, 2),
    "Pair s": ("b8", 16, 8), "Five s": ("b8", 32, 16), "Three s": ("b8", 3, 1),
    "const __grid_constant__ Pair s": ("b8", 16, 8), "const __grid_constant__ TensorMap s": ("b8", 128, 64),
    "int2 i": ("b8", 8, 8),
}  # fmt: skip
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


def test_a_folder_that_was_there_keeps_its_mode(cache):
    """CUPYOPS_CACHE_DIR may name a folder that serves others too: only what we make in it is closed."""
    cache.mkdir(mode=0o755)
    cache.chmod(0o755)
    folder = disk.folder()
    assert folder.parent == cache and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755


def test_one_folder_for_each_version_of_the_headers(cache, monkeypatch):
    before = disk.folder()
    monkeypatch.setattr(backend, "runtime_version", lambda _: 99990)
    assert disk.folder() != before


def test_default_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("CUPYOPS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.folder().parent == tmp_path / "cupyops"


class TestKey:
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


def test_a_folder_in_the_place_of_a_record(cache, monkeypatch):
    """It cannot be replaced by a file: memory serves."""
    first = compiler.build(source.load(SCALE), "scale<float>", ARCH)
    cubin, record = first.path.read_bytes(), first.path.with_suffix(".json")
    record.unlink()
    record.mkdir()
    (record / "in the way").write_text("")
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="cannot be written"):
        assert compiler.build(source.load(SCALE), "scale<float>", ARCH).path.read_bytes() == cubin


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


def test_a_link_to_itself(cache):
    cache.symlink_to(cache)
    assert_memory_serves(cache)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777], ids=oct)
def test_folder_that_others_may_write(cache, mode):
    """Whoever can rename what is in it could put a cubin of their own there."""
    cache.mkdir()
    cache.chmod(mode)
    assert_memory_serves(cache)
    assert stat.S_IMODE(cache.stat().st_mode) == mode


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


def test_eight_threads_compile_once(cache, count_compiles):
    text, barrier = source.load(SCALE), threading.Barrier(8)

    def work(_):
        barrier.wait()
        return compiler.build(text, "scale<float>", ARCH)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert len(count_compiles) == 1 and all(binary is found[0] for binary in found)


def test_an_error_is_not_remembered(cache, count_compiles):
    text = source.load("__global__ void bad(float* x) { x[0] = y; }\n")
    for attempt in (1, 2):
        with pytest.raises(CompileError):
            compiler.build(text, "bad", ARCH)
        assert len(count_compiles) == attempt
    assert not entries(cache) and not entries(cache, ".json")


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
    entries(folder)[0].write_bytes(b"damaged")
    assert compiler.build(text, "scale<float>", "sm_80").origin == "nvrtc"
