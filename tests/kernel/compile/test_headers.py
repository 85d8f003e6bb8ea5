"""Headers to which an option leads: their texts are in the key, so that such kernels are kept on the disk."""

from pathlib import Path

import pytest

from cupyops._kernel.compile import backend, cache, compiler, headers, source

ARCH = "sm_80"
TEXT = "#include <h.cuh>\n__global__ void f(float* x) { x[0] = H; }\n"
PLAIN = "__global__ void f(float* x) { x[0] = H; }\n"


@pytest.fixture(autouse=True)
def kernel_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_memory", {})


def build(options, text=TEXT):
    """As a new process would."""
    compiler._memory.clear()
    return compiler.build(source.load(text), "f", ARCH, options)


def digest(options, text=TEXT):
    return headers.digest(source.load(text), options)


def write(folder, **texts):
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in texts.items():
        (folder / f"{name}.cuh").write_text(text)


@pytest.mark.parametrize(("form", "text"), [
    ("-I{0}", TEXT), ("-I {0}", TEXT), ("-I={0}", TEXT), ("-I|{0}", TEXT), ("--include-path={0}", TEXT),
    ("--include-path|{0}", TEXT), ("-include={0}/h.cuh", PLAIN), ("-include|{0}/h.cuh", PLAIN),
    ("--pre-include|{0}/h.cuh", PLAIN), ("--pre-include=h.cuh|-I{0}", PLAIN),
])  # fmt: skip
def test_kept_until_the_header_is_edited(tmp_path, form, text):
    options = tuple(form.format(tmp_path).split("|"))
    write(tmp_path, h="#define H 1.0f\n")
    first = build(options, text)
    assert (first.origin, build(options, text).origin) == ("nvrtc", "cache")
    write(tmp_path, h="#define H 2.0f\n")
    second = build(options, text)
    assert second.origin == "nvrtc" and second.ptx != first.ptx
    write(tmp_path, h="#define H 1.0f\n")
    assert build(options, text).path == first.path, "the old entry is still there"


def test_what_a_header_includes_counts_too(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, h='#include "sub/inner.cuh"\n', unused="")
    write(
        tmp_path / "sub", inner='#  include "beside.cuh"\n', beside="#if 0\n#include <far.cuh>\n#endif\n#define H 1\n"
    )
    write(tmp_path / "other", far="")
    options = (f"-I{tmp_path}", f"-I{tmp_path / 'other'}")
    seen = {digest(options)}
    write(tmp_path, unused="#define A\n")
    assert digest(options) in seen, "no one includes it"
    for path in ("sub/inner.cuh", "sub/beside.cuh", "other/far.cuh", "h.cuh"):
        (tmp_path / path).write_text((tmp_path / path).read_text() + "// edited\n")
        assert digest(options) not in seen, path
        seen.add(digest(options))


def test_a_header_that_comes_to_be_found_first_counts(tmp_path):
    write(tmp_path / "second", h="#define H 1\n")
    options = (f"-I{tmp_path / 'first'}", f"-I{tmp_path / 'second'}")
    before = digest(options)
    write(tmp_path / "first", h="#define H 2\n")
    assert digest(options) != before


def test_a_header_that_is_only_asked_after_counts(tmp_path):
    options, text = (f"-I{tmp_path}",), "#if __has_include(<h.cuh>)\n#define H 1\n#endif\n" + PLAIN
    before = digest(options, text)
    write(tmp_path, h="")
    assert digest(options, text) != before


def test_a_quoted_include_of_the_source_leads_on(tmp_path):
    write(tmp_path / "mine", own="#include <h.cuh>\n")
    write(tmp_path / "theirs", h="#define H 1\n")
    text, options = source.load('#include "own.cuh"\n' + PLAIN, tmp_path / "mine"), (f"-I{tmp_path / 'theirs'}",)
    before = headers.digest(text, options)
    write(tmp_path / "theirs", h="#define H 2\n")
    assert headers.digest(text, options) != before


def test_cudas_headers_lead_on(tmp_path):
    """cooperative_groups.h asks for nv/target, which an option may lead to."""
    text, options = "#include <cooperative_groups.h>\n" + PLAIN, (f"-I{tmp_path}",)
    before = digest(options, text)
    (tmp_path / "nv").mkdir()
    (tmp_path / "nv" / "target").write_text("")
    assert digest(options, text) != before


def test_a_circle_of_includes_has_an_end(tmp_path):
    write(tmp_path, h='#include <h.cuh>\n#include "sub/../h.cuh"\n')
    (tmp_path / "sub").mkdir()
    assert digest((f"-I{tmp_path}",))


def test_options_that_name_no_file_cost_nothing(monkeypatch):
    monkeypatch.setattr(backend, "cuda_include", lambda: pytest.fail("no folder is looked into"))
    assert digest(("-DINCLUDE=3", "--use_fast_math", "-G", "-default-device")) == ""


MACRO = "#define NAME <inner.cuh>\n#include NAME\n#define H 1\n"


@pytest.mark.parametrize(
    ("header", "option"),
    [(MACRO, "-I{0}"), (MACRO.replace("include", "/* */ include"), "-I{0}"), ("#define H 1\n", "--pch")],
    ids=["named by a macro", "behind a comment", "precompiled"],
)
def test_what_cannot_be_followed_is_kept_in_memory(tmp_path, header, option):
    write(tmp_path, h=header, inner="")
    options = (f"-I{tmp_path}", option.format(tmp_path))
    assert digest(options) is None
    if option != "--pch":
        first = build(options)
        assert compiler.build(source.load(TEXT), "f", ARCH, options) is first
        assert build(options).origin == "nvrtc" and not list(cache.folder().iterdir())


def test_an_include_that_only_a_comment_names_by_a_macro_is_none(tmp_path):
    write(tmp_path, h="/*\n#include NAME\n*/\n#define H 1\n")
    assert digest((f"-I{tmp_path}",))


def test_a_header_that_cannot_be_read(tmp_path, monkeypatch):
    write(tmp_path, h="")

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read anything
    assert digest((f"-I{tmp_path}",)) is None


def test_a_header_edited_during_the_compilation_is_not_kept(tmp_path, monkeypatch):
    """The key was of the text before, the cubin may be of the one after."""
    write(tmp_path, h="#define H 1\n")
    genuine = compiler.compile

    def compile(*args):
        found = genuine(*args)
        write(tmp_path, h="#define H 2\n")
        return found

    monkeypatch.setattr(compiler, "compile", compile)
    build((f"-I{tmp_path}",))
    assert not list(cache.folder().iterdir())


@pytest.mark.parametrize("include", ["<mma.h>", "<curand_kernel.h>"])
def test_headers_of_wheels_that_are_installed(tmp_path, monkeypatch, include):
    """`mma.h` asks for a header of nvcc's wheel; that of cuRAND is in a wheel as a whole."""
    wheels = {"cuda_nvcc/include/crt/mma.h": "nvcuda", "curand/include/curand_kernel.h": "curand"}
    for path, namespace in wheels.items():
        header = tmp_path / "nvidia" / path
        header.parent.mkdir(parents=True)
        header.write_text(f"namespace {namespace} {{ __device__ float one() {{ return 1.0f; }} }}\n")
    monkeypatch.syspath_prepend(tmp_path)
    backend.library_includes.cache_clear()
    try:
        namespace = "nvcuda" if "mma" in include else "curand"
        build((), f"#include {include}\n__global__ void f(float* x) {{ x[0] = {namespace}::one(); }}\n")
    finally:
        backend.library_includes.cache_clear()
