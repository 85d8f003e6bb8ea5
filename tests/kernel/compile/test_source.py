"""Finding .cu text, gathering what it includes, digesting the whole."""

import os
from pathlib import Path

import pytest

from cupyops._kernel.compile import compiler, source
from cupyops.errors import CupyopsError, SourceError

KERNEL = '#include "scale.cuh"\n__global__ void f(float* x) { x[0] = scale(x[0]); }\n'
ALONE = "__global__ void k(float* x) {}\n"
HEADER = "__device__ float scale(float x) { return 2.0f * x; }\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "f.cu").write_text(KERNEL)
    (tmp_path / "scale.cuh").write_text(HEADER)
    return tmp_path


def test_built_in_kernels_are_found():
    assert (source.cuda_src() / "relu.cu").is_file()
    loaded = source.load("relu.cu")
    assert loaded.path == source.cuda_src() / "relu.cu" and loaded.name == "relu.cu"
    assert "common/elementwise/elementwise.cuh" in loaded.includes


def test_a_built_in_file_is_read_once_until_it_is_edited(folder, monkeypatch):
    monkeypatch.setattr(source, "cuda_src", lambda: folder)
    first = source.load("f.cu", folder)
    assert source.load(folder / "f.cu") is first
    (folder / "scale.cuh").write_text(HEADER.replace("2.0f", "3.0f * 1.0f"))
    second = source.load("f.cu", folder)
    assert second is not first and "3.0f" in second.includes["scale.cuh"] and second.digest != first.digest
    assert source.load("f.cu", folder) is second


def test_another_file_is_read_each_time(folder):
    assert source.load("f.cu", folder) is not source.load("f.cu", folder)


def test_load_gathers_includes(folder):
    loaded = source.load("f.cu", folder)
    assert loaded.text == KERNEL
    assert loaded.includes == {"scale.cuh": HEADER}
    assert loaded.path == folder / "f.cu"


@pytest.mark.parametrize("as_path", [False, True])
def test_absolute_path(folder, as_path):
    path = folder / "f.cu"
    assert source.load(path if as_path else str(path)).text == KERNEL


def test_search_order(tmp_path, monkeypatch):
    """Beside the caller, then the working folder, then the built-in kernels."""
    beside, working = tmp_path / "beside", tmp_path / "working"
    for place in (beside, working):
        place.mkdir()
    monkeypatch.chdir(working)
    assert source.find("relu.cu", beside) == source.cuda_src() / "relu.cu"
    (working / "relu.cu").write_text("// working\n")
    assert source.find("relu.cu", beside) == working / "relu.cu"
    (beside / "relu.cu").write_text("// beside\n")
    assert source.find("relu.cu", beside) == beside / "relu.cu"
    assert source.find("relu.cu") == working / "relu.cu"


def test_missing_file_lists_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as caught:
        source.load("nothing_here.cu", tmp_path / "beside")
    message = str(caught.value)
    for place in ("nothing_here.cu", str(tmp_path / "beside"), str(tmp_path), str(source.cuda_src())):
        assert place in message
    assert isinstance(caught.value, CupyopsError) and isinstance(caught.value, FileNotFoundError)


def test_missing_absolute_file_names_that_path_alone(tmp_path):
    with pytest.raises(SourceError) as caught:
        source.find(tmp_path / "gone.cu")
    assert str(tmp_path / "gone.cu") in str(caught.value) and str(source.cuda_src()) not in str(caught.value)


def test_text_is_told_from_a_file_name():
    assert source.is_text("__global__ void f(int* x) {}")
    assert source.is_text("// one\nvoid g();")
    assert not source.is_text("kernels/f.cu")


def test_text_includes_from_the_folder_given(folder):
    loaded = source.load(KERNEL, folder)
    assert loaded.name == "<text>.cu" and loaded.path is None and loaded.includes == {"scale.cuh": HEADER}


def test_built_in_headers_serve_user_code(tmp_path):
    loaded = source.load('#include "common/core/types.cuh"\n__global__ void f(int* x) {}\n', tmp_path)
    assert loaded.includes["common/core/types.cuh"] == (source.cuda_src() / "common" / "core" / "types.cuh").read_text()


def test_nested_includes_are_looked_for_beside_their_includer(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.cuh").write_text('#include "b.cuh"\n')
    (tmp_path / "inner" / "b.cuh").write_text("// b\n")
    loaded = source.load('#include "inner/a.cuh"\n', tmp_path)
    assert loaded.includes == {"inner/a.cuh": '#include "b.cuh"\n', "b.cuh": "// b\n"}


def test_a_cycle_of_includes_ends(tmp_path):
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a.cuh"\n')
    assert set(source.load('#include "a.cuh"\n', tmp_path).includes) == {"a.cuh", "b.cuh"}


@pytest.mark.parametrize(
    "spelling",
    ['#include "x.cuh"', '  #include "x.cuh"', '#  include  "x.cuh"', '\t#\tinclude\t"x.cuh" // why'],
)
def test_spellings_of_include(tmp_path, spelling):
    (tmp_path / "x.cuh").write_text("// x\n")
    assert set(source.load(f"int a;\n{spelling}\n", tmp_path).includes) == {"x.cuh"}


@pytest.mark.parametrize("text", ['// #include "x.cuh"\n', '/* \n#include "x.cuh"\n*/\n', "#include <x.cuh>\n"])
def test_comments_and_angle_brackets_are_left_alone(tmp_path, text):
    assert source.load(text, tmp_path).includes == {}


def test_missing_include_names_the_line_that_asks_for_it(tmp_path):
    (tmp_path / "a.cuh").write_text('\n\n#include "gone.cuh"\n')
    with pytest.raises(SourceError, match=r'a\.cuh:3: #include "gone\.cuh" not found in .*'):
        source.load('#include "a.cuh"\n', tmp_path)


def test_a_missing_include_says_where_it_may_lie(tmp_path):
    (tmp_path / "my_types.cuh").write_text("")
    with pytest.raises(SourceError) as caught:
        source.load('#include "my_type.cuh"\n', tmp_path)
    head, remedy = str(caught.value).splitlines()
    assert head.endswith(f"not found in {tmp_path} or {source.cuda_src()}; did you mean 'my_types.cuh'?")
    assert remedy.startswith("  put it beside <text>.cu, or write #include <my_type.cuh> and give its folder: Kernel(")
    with pytest.raises(SourceError, match="did you mean 'types.cuh'"):
        source.load('#include "common/core/type.cuh"\n', tmp_path)


def test_the_folder_that_the_remedy_names_is_looked_in(tmp_path):
    (tmp_path / "mine.cuh").write_text("__device__ float two() { return 2; }\n")
    text = "#include <mine.cuh>\n__global__ void f(float* x) { x[0] = two(); }\n"
    assert compiler.compile(source.load(text), "f", "sm_80", (f"-I{tmp_path}",))


def test_a_missing_file_is_looked_for_once_in_each_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_op.cu").write_text("")
    with pytest.raises(SourceError, match=r"named 'myop\.cu'; did you mean 'my_op\.cu'\? Looked for:") as caught:
        source.find("myop.cu", tmp_path)
    assert str(caught.value).splitlines()[1:] == [f"  {tmp_path / 'myop.cu'}", f"  {source.cuda_src() / 'myop.cu'}"]
    with pytest.raises(SourceError, match=r"named 'nothing_like_it\.cu'\. Looked for:"):
        source.find("nothing_like_it.cu", tmp_path)


CONDITIONS = [
    '#if 0\n#include "absent.h"\n#endif\n',
    '#ifndef __CUDACC_RTC__\n#include "absent.h"\n#endif\n',
    '#if !defined(__CUDACC_RTC__)\n#include "absent.h"\n#endif\n',
    '#ifdef HOST\n# include "absent.h"\n#else\n#define HERE\n#endif\n',
    '#if 1\n#if 0\n#include "absent.h"\n#endif\n#endif\n',
    '#if __has_include("absent.h")\n#include "absent.h"\n#endif\n',
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_an_include_that_is_never_asked_for_is_not_missed(condition):
    compiler.compile(source.load(condition + ALONE), "k", "sm_80")


@pytest.mark.parametrize(
    "condition", ["#if 1", "#ifdef __CUDACC_RTC__", "#ifndef GUARD\n#define GUARD", "#ifdef ASKED"]
)
def test_one_that_is_asked_for_is(tmp_path, condition):
    (tmp_path / "k.cu").write_text(f'{condition}\n#include "absent.h"\n{ALONE}#endif\n')
    text = source.load(tmp_path / "k.cu")
    with pytest.raises(SourceError, match=r'k.cu:\d: #include "absent.h" not found in .*\n  put it beside k.cu'):
        compiler.compile(text, "k", "sm_80", ("-DASKED",))
    (tmp_path / "absent.h").write_text("")
    assert source.load(tmp_path / "k.cu").digest != text.digest
    compiler.compile(source.load(tmp_path / "k.cu"), "k", "sm_80", ("-DASKED",))


def test_an_include_that_one_file_misses_and_another_finds(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.h").write_text('#include "c.h"\n')
    (tmp_path / "inner" / "c.h").write_text("// found\n")
    (tmp_path / "k.cu").write_text(f'#if 0\n#include "c.h"\n#endif\n#include "inner/b.h"\n{ALONE}')
    text = source.load(tmp_path / "k.cu")
    assert text.includes["c.h"] == "// found\n" and not text.missing


def test_missing_include_after_a_comment_of_several_lines(tmp_path):
    with pytest.raises(SourceError, match=r"<text>\.cu:4: "):
        source.load('/* one\n two */\n\n#include "gone.cuh"\n', tmp_path)


def test_one_spelling_for_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.cuh").write_text(f"// {name}\n")
        (tmp_path / name / "top.cuh").write_text('#include "same.cuh"\n')
    with pytest.raises(SourceError, match=r'"same\.cuh" means both .*rename one'):
        source.load('#include "a/top.cuh"\n#include "b/top.cuh"\n', tmp_path)


class TestDigest:
    def test_equal_for_equal_content_in_another_folder(self, folder, tmp_path):
        other = tmp_path / "copy"
        other.mkdir()
        (other / "f.cu").write_text(KERNEL)
        (other / "scale.cuh").write_text(HEADER)
        assert source.load("f.cu", folder).digest == source.load("f.cu", other).digest

    def test_differs_with_the_text(self, folder):
        before = source.load("f.cu", folder).digest
        (folder / "f.cu").write_text(KERNEL + " ")
        assert source.load("f.cu", folder).digest != before

    def test_differs_with_an_included_text(self, folder):
        before = source.load("f.cu", folder).digest
        (folder / "scale.cuh").write_text(HEADER.replace("2.0f", "3.0f"))
        assert source.load("f.cu", folder).digest != before

    def test_differs_with_the_name(self, folder):
        os.rename(folder / "f.cu", folder / "g.cu")
        (folder / "f.cu").write_text(KERNEL)
        assert source.load("f.cu", folder).digest != source.load("g.cu", folder).digest

    def test_parts_cannot_run_into_each_other(self):
        first = source.Source("ab", "c", None, {"d": "ef"})
        for other in (
            source.Source("a", "bc", None, {"d": "ef"}),
            source.Source("ab", "cd", None, {"": "ef"}),
            source.Source("ab", "c", None, {"de": "f"}),
        ):
            assert first.digest != other.digest

    def test_order_of_includes_does_not_matter(self):
        one, two = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
        assert source.Source("n", "t", None, one).digest == source.Source("n", "t", None, two).digest


def test_line(folder):
    loaded = source.load("f.cu", folder)
    assert loaded.line("f.cu", 1) == '#include "scale.cuh"'
    assert loaded.line("scale.cuh", 1) == HEADER.rstrip("\n")
    assert loaded.line("f.cu", 0) is None and loaded.line("f.cu", 99) is None
    assert loaded.line("another.cu", 1) is None


def test_strip_comments_keeps_lines_and_columns():
    text = "a /* b\nc */ d // e\nf"
    stripped = source.strip_comments(text)
    assert [len(line) for line in stripped.split("\n")] == [len(line) for line in text.split("\n")]
    assert stripped.split() == ["a", "d", "f"]


def test_comment_marks_inside_strings_are_no_comments(tmp_path):
    """A `//` or `/*` between quotes hides nothing that follows."""
    (tmp_path / "x.cuh").write_text("// x\n")
    text = 'const char* a = "/*";\n#include "x.cuh"\nconst char* b = "*/";\n'
    assert set(source.load(text, tmp_path).includes) == {"x.cuh"}
    assert source.strip_comments('f("a//b", x); // c').rstrip() == 'f("a//b", x);'
    assert source.strip_comments("char c = '\"'; // d").rstrip() == "char c = '\"';"


def test_every_built_in_include_resolves():
    for path in sorted(source.cuda_src().glob("*.cu")):
        for included in source.load(path).includes:
            assert Path(included).suffix == ".cuh"


@pytest.mark.parametrize(
    "code", ["void f(float* x) { x[0] = 1; }", "int n = 3;", "__device__ float f(float x) { return x; }"]
)
def test_a_line_of_code_without_a_kernel_is_no_file(code):
    with pytest.raises(SourceError, match="nor CUDA C with a kernel in it: a kernel begins with `__global__ void`"):
        source.load(code)
