"""Hostile strings and files: names, values, options, sources, arguments. A right result or an error that names it."""

import enum
import os
import time

import numpy as np
import pytest
import torch
from toys import Recorder, executor

from cupyops import Kernel
from cupyops._kernel.compile import backend, compiler, source
from cupyops._kernel.compile.declarations import function
from cupyops.errors import CompileError, InputError, LaunchError, SourceError

ARCH = "sm_80"
PLAIN = "__global__ void f(float* x) { x[0] = 1; }\n"
NUMBER = "template <%s N> __global__ void f(%s* x) { x[0] = N; }\n"


@pytest.fixture(autouse=True)
def nothing_is_written_elsewhere(tmp_path, monkeypatch):
    """The working folder is empty before and after; the cache is the test's own."""
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPYOPS_CUBIN_PATH", raising=False)
    monkeypatch.setattr(compiler, "_memory", {})
    yield
    assert not working.exists() or not list(working.iterdir())


@pytest.fixture
def cpu():
    """Launches on CPU tensors are checked, compiled and recorded."""
    with executor("cpu", Recorder()) as recorder:
        yield recorder


def brief(value):
    """A short name of a test's parameter, the same in every process."""
    if type(value) is int:
        return f"{value:#x}"[:24]
    return ascii(value)[:24] if isinstance(value, (str, bytes, int, float)) else type(value).__name__


def build(text, name="f", options=(), folder=None):
    return compiler.build(source.load(text, folder), name, ARCH, options)


class within:
    """A text of the length that is used here takes far less; one that is gone through again and again takes minutes."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        self.start = time.process_time()

    def __exit__(self, kind, *exception):
        assert kind is not None or time.process_time() - self.start < self.seconds


@pytest.mark.parametrize(
    "name",
    [
        "relu_fwd<float>; system(...)", 'f"', "f'", "f\\", "f\0", "f\0x", "\ud800", "f<T>\nint g", "f<T>()", "f()",
        "&f", "f<T>>", "f<T=1>", "f<typename T>;", "../f", "f(" * 10_000, "f" + "<" * 10_000, None, 3, b"f", ["f"],
    ],
    ids=brief,
)  # fmt: skip
def test_names_of_kernels(name):
    with pytest.raises(InputError, match="kernel name"):
        Kernel(PLAIN, name)


@pytest.mark.parametrize(
    "part", ["class", "lambda", "T T", "T\nimport os", "_T", "__x", "None", "T, T", "²"], ids=brief
)
def test_names_of_template_parameters(part):
    """Each is the name of an argument of the launch."""
    with pytest.raises(InputError, match="kernel name"):
        Kernel(PLAIN, f"f<{part}>")


@pytest.mark.parametrize("name", ["ядро", "operator", "int", "asm", "main"], ids=brief)
def test_names_that_the_compiler_refuses(name):
    with pytest.raises((CompileError, InputError)) as caught:
        build(PLAIN.replace(" f(", f" {name}("), name)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "name", ["f<float>(0); evil<int>", 'f"', "f\n\n}", "", " ", "(" * 50_000, "f<" * 1000, "f, f"], ids=brief
)
def test_name_expressions_below_the_checks(name):
    """`Kernel` lets none of these through; NVRTC has its own word for them."""
    with pytest.raises(CompileError):
        compiler.compile(source.load(PLAIN), name, ARCH)


@pytest.mark.parametrize(
    "name",
    ["../../../tmp/x", "/etc/passwd", "a/b\\c", "内核" * 100, "\ud800", "\0\n", "x" * 1000],
    ids=brief,
)
def test_every_entry_has_a_plain_short_name(name):
    for stem in (
        compiler.entry_name(source.Source(name.replace("\ud800", "?"), PLAIN), "f", ARCH, ()),
        compiler.entry_name(source.load(PLAIN), name, ARCH, (name,)),
    ):
        assert stem.isascii() and stem.replace("-", "").replace(".", "").replace("_", "").isalnum() and len(stem) < 200


def test_a_long_name(tmp_path):
    """It compiles, and the file's name is a short one."""
    name = "f" * 20_000
    binary = build(PLAIN.replace(" f(", f" {name}("), name)
    assert name in binary.symbol and tmp_path in binary.path.parents and len(binary.path.name) < 200


class Loud(int):
    def __str__(self):
        return "3>(); evil<4"

    __repr__ = __format__ = __str__


class Mode(enum.IntEnum):
    FAST = 3

    def __str__(self):
        return "fast"


class Equal:
    """Equal to everything, and not to be hashed."""

    __hash__ = None

    def __eq__(self, other):
        return True


@pytest.mark.parametrize(
    "value",
    [
        "relu_fwd<float>; system(...)", 'float"', "float\n", b"float", np.dtype("complex64"), np.float32,
        np.float32(1), np.zeros(3), torch.ones(()), torch.complex64, float("nan"), float("inf"), 3.0, 1j, None,
        Equal(), [3], {3}, torch.float32.__class__, lambda: 3,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@pytest.mark.parametrize("domain", [{}, {"N": (1, 2, 3)}], ids=["any", "domain"])
def test_template_values_that_are_none(cpu, value, domain):
    f = Kernel(NUMBER % ("int", "float"), "f<N>", **domain)
    with pytest.raises(LaunchError, match="a template value is a dtype"):
        f[1, 1](torch.ones(3), N=value)
    assert not cpu.launches


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30, -(10**30), 10**5000], ids=brief)
def test_template_values_beyond_64_bits(cpu, value):
    """The compiler would take some of them for others: -9223372036854775809 for 9223372036854775807."""
    with pytest.raises(LaunchError, match=r"template value of \d+ bits fits no integer type"):
        Kernel(NUMBER % ("long long", "float"), "f<N>")[1, 1](torch.ones(3), N=value)
    assert not cpu.launches


@pytest.mark.parametrize(
    ("ctype", "value"),
    [
        ("long long", 2**63 - 1), ("long long", -(2**63)), ("unsigned long long", 2**64 - 1),
        ("unsigned long long", 2**63), ("int", -(2**31)), ("int", 2**31 - 1), ("bool", True), ("int", Loud(3)),
        ("int", Mode.FAST),
    ],
    ids=brief,
)  # fmt: skip
def test_template_values_reach_the_kernel_as_they_are(ctype, value):
    """The compiler compares."""
    same = int.__index__(value)
    literal = f"({same + 1} - 1)" if same == -(2**63) else f"{same}{'ull' if same >= 2**63 else ''}"
    text = f'template <{ctype} N> __global__ void f(int* x) {{ static_assert(N == {literal}, "another"); }}\n'
    kernel = Kernel(text, "f<N>")
    assert "evil" not in kernel.expression((value,)) and "fast" not in kernel.expression((value,))
    compiler.compile(kernel.source, kernel.expression((value,)), ARCH)


@pytest.mark.parametrize(
    ("ctype", "value"), [("int", 2**31), ("bool", 2), ("unsigned", -1), ("long long", 2**63)], ids=brief
)
def test_template_values_that_the_type_cannot_hold(cpu, ctype, value):
    with pytest.raises(CompileError, match=f"kernel f<{value}> does not compile"):
        Kernel(NUMBER % (ctype, "float"), "f<N>")[1, 1](torch.ones(3), N=value)


def test_a_bool_for_an_int(cpu):
    """True is 1 in Python and in C++: one instance serves."""
    f = Kernel(NUMBER % ("int", "float"), "f<N>")
    for value in (1, True):
        f[1, 1](torch.ones(3), N=value)
    assert [launch[0] for launch in cpu.launches] == ["f<1>", "f<1>"]


@pytest.mark.parametrize(
    "options",
    ["--use_fast_math", b"-G", None, 3, [None], [3], [b"-G"], [""], [" "], ["-DA\0B"], ["-DA=\ud800"], [("-G",)]],
    ids=brief,
)
def test_options_that_are_none(options):
    with pytest.raises(InputError, match="option"):
        Kernel(PLAIN, "f", options=options)


@pytest.mark.parametrize("option", ["-arch=sm_90", "--gpu-architecture=sm_90", "-arch", "-arch=compute_80"], ids=brief)
def test_options_for_another_architecture(option):
    """NVRTC takes the last one without a word: the cubin would not be what its entry says."""
    with pytest.raises(InputError, match="compiled for the device"):
        Kernel(PLAIN, "f", options=(option,))


@pytest.mark.parametrize(
    "option",
    [
        "-", "--", "nonsense", "--pre-include", "--pre-include=/nowhere.h", "-include", "-D", "-DA B=3", "-D\nA",
        '-D"A"=3', "-DA(=3", "@/etc/passwd", "-o=x", "-maxrregcount=x", "--ptxas-options=--output-file,x", "-dlto",
        "-std=c++98", "; rm -rf x", "$(touch x)", "x" * 100_000,
    ],
    ids=brief,
)  # fmt: skip
def test_options_that_the_compiler_refuses(cpu, option):
    with pytest.raises(CompileError, match="f does not compile"):
        Kernel(PLAIN, "f", options=(option,))[1, 1](torch.ones(3))
    assert not cpu.launches


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ('-DA="q"', '"q"'), ('-DA="two words"', '"two words"'), (r'-DA="a\\b"', r'"a\\b"'), ("-DA='x'", "'x'"),
        ("-DA=$(id)`id`;#", None), ('-DA="ядро"', '"ядро"'), ("-DA=%s%n", None),
    ],
    ids=brief,
)  # fmt: skip
def test_macros_are_text_and_nothing_else(option, expected):
    """No shell and no second parser sees them: the compiler has exactly what stands after the equals sign."""
    check = (
        "" if expected is None else f"constexpr const auto& a = A; static_assert(sizeof(a) == sizeof({expected}));\n"
    )
    compiler.compile(source.load(check + PLAIN), "f", ARCH, (option,))


@pytest.mark.parametrize("code", [None, 3, b"f.cu", ["f.cu"], 1.5, object()], ids=brief)
def test_code_that_is_none(code):
    with pytest.raises(InputError, match="neither CUDA C nor the name of a .cu file"):
        Kernel(code, "f").source  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "", ".", "..", "/", "x" * 300, "x" * 5000, "a\0b", "\ud800.cu", "../" * 50 + "etc", "/dev/null", "/dev/zero",
        "/proc/self", "~", "%s%n.cu", "-I.cu", "file:///etc/passwd", "a" + "/a" * 3000,
    ],
    ids=brief,
)  # fmt: skip
def test_names_of_files_that_are_none(code):
    with pytest.raises(SourceError, match="no CUDA source named"):
        source.load(code)


@pytest.mark.parametrize("name", ["f.cu", "../working/f.cu", "./f.cu", "link.cu", "a/../f.cu"], ids=brief)
def test_ways_to_a_file(tmp_path, name):
    (tmp_path / "working" / "a").mkdir()
    path = tmp_path / "working" / "f.cu"
    path.write_text(PLAIN)
    (tmp_path / "working" / "link.cu").symlink_to(path)
    try:
        assert source.load(name).path == path and source.load(name).name == "f.cu"
    finally:
        path.unlink()
        (tmp_path / "working" / "link.cu").unlink()
        (tmp_path / "working" / "a").rmdir()


NAMES_OF_FILES = {
    "spaces": "my kernel .cu", "parentheses": "f (1).cu", "quotes": "we\"i'rd.cu", "newline": "two\nlines.cu",
    "percent": "%s%n.cu", "unicode": "ядро.cu", "backslash": "a\\nb\\.cu", "an option": "--pre-include=nowhere.cu",
    "a short option": "-Dx.cu", "shell": "$(touch x);`touch x`.cu", "no suffix": "kernel",
    "longest": "x" * 252 + ".cu", "not utf-8": os.fsdecode(b"\xff\xfe.cu"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_FILES.values(), ids=NAMES_OF_FILES)
def test_names_of_files(tmp_path, name):
    """It compiles; and where it does not, the line is told."""
    path = tmp_path / name
    path.write_text(PLAIN)
    assert build(path).symbol == "_Z1fPf"
    path.write_text("\n" + PLAIN.replace("= 1", "= nothing"))
    with pytest.raises(CompileError) as caught:
        build(path)
    assert ':2: error: identifier "nothing" is undefined\n' in str(caught.value), str(caught.value)
    assert "      2 | __global__ void f(float* x) { x[0] = nothing; }\n" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + PLAIN.encode(),
        PLAIN.replace("\n", "\r\n").encode(),
        b"#define ONE \\\r\n  1\r\n" + PLAIN.replace("= 1", "= ONE").encode(),
        b"// Macintosh\r" + PLAIN.replace("\n", "\r").encode(),
        PLAIN.strip().encode(),
        b"\xef\xbb\xbf// \xd1\x8f\xd0\xb4\xd1\x80\xd0\xbe \xf0\x9f\xa7\x8a\r\n" + PLAIN.encode(),
    ],
    ids=["BOM", "CRLF", "CRLF in a macro", "CR", "no last newline", "UTF-8"],
)
def test_ways_to_write_a_text(tmp_path, content):
    path = tmp_path / "f.cu"
    path.write_bytes(content)
    (tmp_path / "h.cuh").write_bytes(content)
    assert build(path).parameters == build('#include "h.cuh"\n', folder=tmp_path).parameters == build(PLAIN).parameters
    assert function(source.load(path), "f").parameters == [("float*", "x")]


def test_a_text_with_a_byte_order_mark():
    assert source.load("\ufeff" + PLAIN).text == PLAIN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PLAIN.encode("utf-16"), "is not UTF-8 text"),
        (PLAIN.encode() + b"// \xff\n", "is not UTF-8 text: .*0xff in position 45"),
        (b"\xed\xa0\x80" + PLAIN.encode(), "is not UTF-8 text"),
        (PLAIN.encode() + b"\0", r":2: '\\x00' has no place in CUDA C"),
        (b"\n\0\n" + PLAIN.encode(), r":2: '\\x00' has no place in CUDA C"),
        (b"\x7fELF\0" * 100, "has no place in CUDA C"),
    ],
    ids=["UTF-16", "Latin 1", "surrogate", "NUL at the end", "NUL", "binary"],
)
def test_files_that_are_no_text(tmp_path, content, message):
    """A NUL would end the text for the compiler, in silence."""
    (tmp_path / "f.cu").write_bytes(content)
    with pytest.raises(InputError, match=rf"f\.cu.*{message}"):
        source.load(tmp_path / "f.cu")
    with pytest.raises(InputError, match=rf"f\.cu.*{message}"):
        source.load('#include "f.cu"\n' + PLAIN, tmp_path)


@pytest.mark.parametrize("text", [PLAIN + "\0", PLAIN + "// \ud800\n"], ids=brief)
def test_texts_that_are_none(text):
    with pytest.raises(InputError, match=r"<text>\.cu:2: .* has no place in CUDA C"):
        source.load(text)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    """Whatever the system says of it."""
    (tmp_path / "f.cu").write_text(PLAIN)

    def refuse(path, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(type(tmp_path), "read_text", refuse)
        with pytest.raises(SourceError, match=r"f\.cu cannot be read: .*Permission denied"):
            source.load(tmp_path / "f.cu")
    with pytest.raises(SourceError, match=r"/proc/\d+/mem cannot be read"):
        source.load("/proc/self/mem")


def test_a_working_folder_that_is_gone(tmp_path):
    """A long-lived process may have lost it; built-in kernels and texts need none."""
    os.rmdir(tmp_path / "working")
    assert source.load("relu.cu").path.parent == source.cuda_src()
    assert source.load(PLAIN).text == PLAIN
    with pytest.raises(SourceError, match="no CUDA source named 'gone.cu'"):
        source.load("gone.cu")
    with pytest.raises(SourceError, match='"gone.cuh" not found'):
        source.load('#include "gone.cuh"\n')


def test_a_file_of_the_working_folder_is_no_built_in_kernel(tmp_path):
    """Named like one of ours, by accident or by another user of /tmp: cupyops.relu stays what it is."""
    from cupyops.ops._relu import relu_fwd

    fakes = [tmp_path / "working" / name for name in ("relu.cu", "elementwise.cuh")]
    for fake in fakes:
        fake.write_text("#error another file\n")
    vars(relu_fwd).pop("source", None)  # read anew
    try:
        assert relu_fwd.source.path == source.cuda_src() / "relu.cu"
        assert source.load("relu.cu").path == fakes[0], "for a user's kernel the working folder goes first"
    finally:
        for fake in fakes:
            fake.unlink()


@pytest.mark.parametrize(
    "spelled",
    [
        "../" * 30 + "etc/nothing-there", "/dev/zero", "/dev/stdin", ".", "/", "x" * 300, "d/" * 3000, "%s%n",
        "~/h.cuh", "h.cuh ", "$HOME/h.cuh", "http://example.org/h.cuh", "a\\b",
    ],
    ids=brief,
)  # fmt: skip
def test_includes_that_are_none(tmp_path, spelled):
    with pytest.raises(SourceError, match=r"<text>\.cu:2: #include .* not found"):
        source.load(f'\n#include "{spelled}"\n' + PLAIN, tmp_path)


def test_include_of_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "h.cuh")
    with pytest.raises(SourceError, match="not found"):
        source.load('#include "h.cuh"\n' + PLAIN, tmp_path)


@pytest.mark.parametrize("spelled", ["../" * 30 + "etc/passwd", "/etc/passwd"], ids=brief)
def test_include_of_a_file_that_is_no_code(tmp_path, spelled):
    with pytest.raises(CompileError, match="/etc/passwd:1: error"):
        build(f'#include "{spelled}"\n' + PLAIN, folder=tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "#include HEADER", "# include HEADER", "#include </etc/passwd>", '#include R"(h.cuh)"', "#include/**/HEADER",
        "#include _X(h)",
    ],
    ids=brief,
)  # fmt: skip
def test_includes_that_cannot_be_followed(tmp_path, line):
    """The file would be in no key."""
    (tmp_path / "h.cuh").write_text(f'#define HEADER "h.cuh"\n{line}\n')
    for text in (f'#define HEADER "h.cuh"\n{line}\n{PLAIN}', f'#include "h.cuh"\n{PLAIN}'):
        with pytest.raises(SourceError, match=r":2: #\s*include.*: name the file"):
            source.load(text, tmp_path)


@pytest.mark.parametrize(
    "text", ['#include "h.cuh', "#include <h.cuh", "#include", '#include ""', "#include <>"], ids=brief
)
def test_includes_without_an_end(text):
    with pytest.raises(CompileError, match="f does not compile"):
        build(f"{text}\n{PLAIN}")


def test_cycles_of_includes(tmp_path):
    """Gathered once each; the compiler names what includes itself, or the guards end it."""
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "a.cuh"\n#include "a.cuh"\n')
    with pytest.raises(CompileError, match=r"b\.cuh:1: .*includes itself"):
        build('#include "a.cuh"\n' + PLAIN, folder=tmp_path)
    (tmp_path / "f.cu").write_text('#include "f.cu"\n' + PLAIN)
    with pytest.raises(CompileError, match=r"f\.cu:1: .*includes itself"):
        build(tmp_path / "f.cu")
    for name in ("a", "b"):
        path = tmp_path / f"{name}.cuh"
        path.write_text("#pragma once\n" + path.read_text())
    assert build('#include "a.cuh"\n' + PLAIN, folder=tmp_path).symbol == "_Z1fPf"


def test_a_chain_of_a_hundred_includes(tmp_path):
    for number in range(100):
        (tmp_path / f"{number}.cuh").write_text(f'#include "{number + 1}.cuh"\n' if number < 99 else "")
    assert build('#include "0.cuh"\n' + PLAIN, folder=tmp_path).symbol == "_Z1fPf"


def test_an_include_of_ten_megabytes(tmp_path):
    (tmp_path / "h.cuh").write_text(("// " + "x" * 76 + "\n") * 125_000 + "#define H 1\n")
    with within(20):
        assert build('#include "h.cuh"\n' + PLAIN.replace("= 1", "= H"), folder=tmp_path).symbol == "_Z1fPf"


LONG = 50_000
TANGLES = {
    "comments without an end": "/*" * LONG, "quotes without an end": '"' + '\\"' * LONG, "apostrophes": "'a" * LONG,
    "escaped apostrophes": "'" + "\\'" * LONG, "lines that go on": '"\\\n' * LONG, "slashes": "/" * LONG,
    "stars": "/" + "*" * LONG, "backslashes": "\\" * LONG,
}  # fmt: skip


@pytest.mark.parametrize("text", TANGLES.values(), ids=TANGLES)
def test_comments_and_literals_are_gone_through_once(text):
    with within(5):
        stripped = source.strip_comments(text)
    assert [len(line) for line in stripped.split("\n")] == [len(line) for line in text.split("\n")]


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("a /* b", "a     "),
        ("a /* b\n c", "a     \n  "),
        ('a "b // c\nd // e', 'a "b // c\nd     '),
        ("int n = 1'000'000; // c", "int n = 1'000'000;     "),
        ("int n = 1'000; /* c */ d", "int n = 1'000;         d"),
        ("char c = '\\U0001F9CA'; // d", "char c = '\\U0001F9CA';     "),
        (r"char c = '\''; // d", r"char c = '\'';     "),
        (r'f("\\"); // d', r'f("\\");     '),
        ("// it's\nx // y", "       \nx     "),
    ],
    ids=brief,
)
def test_what_a_comment_is(text, stripped):
    assert source.strip_comments(text) == stripped


HEADS = {
    "nothing but heads": "__global__ " * LONG,
    "heads without a name": "__global__ void " * LONG,
    "parentheses": "__global__ void f(" + "(" * LONG,
    "angles": "__global__ void f(" + "<" * LONG + ")",
    "spaces": "__global__ void f(float" + " " * LONG + "*)",
    "spaces before the parameters": "__global__ void f" + " " * LONG + ";",
    "one long word": "__global__ void f(" + "a" * LONG + "!)",
    "stars": "__global__ void f(" + "*" * LONG + ")",
    "bounds": "__global__ void __launch_bounds__(" * LONG,
}


@pytest.mark.parametrize("text", HEADS.values(), ids=HEADS)
def test_signatures_that_cannot_be_read(text):
    """Refused, and soon."""
    with within(5), pytest.raises(InputError) as caught:
        function(source.Source("f.cu", text), "f").parameters  # noqa: B018
    assert len(str(caught.value)) < 1000


def test_signatures_that_are_long_and_right():
    comment = "/* " + "word " * 20_000 + "*/"
    text = f"__global__ void f({comment} const float* __restrict__ {comment} x, {comment}\n int n {comment}) {{}}\n"
    with within(5):
        assert function(source.load(text), "f").parameters == [("const float*", "x"), ("int", "n")]
    many = ", ".join(f"int n{number}" for number in range(5000))
    with within(5):
        assert len(function(source.load(f"__global__ void f({many}) {{}}\n"), "f").parameters) == 5000


@pytest.mark.parametrize(
    ("ctype", "value", "expected"),
    [
        ("float", 10**400, "a number that fits double"),
        ("double", -(10**5000), "a number that fits double"),
        ("float", 1j, "a number"),
        ("double", np.complex64(1 + 2j), "a number"),
        ("float", "nan", "a number"),
        ("int", 10**5000, "an integer that fits int"),
        ("unsigned long long", -1, "an integer that fits unsigned long long"),
        ("unsigned long long", 2**64, "an integer that fits unsigned long long"),
        ("long long", float("nan"), "an integer"),
        ("int", np.float64("inf"), "an integer"),
        ("bool", "True", "a bool"),
    ],
    ids=brief,
)
def test_numbers_that_do_not_fit(cpu, ctype, value, expected):
    f = Kernel(f"__global__ void f(float* x, {ctype} n) {{ x[0] = n; }}\n", "f")
    with pytest.raises(LaunchError, match=f"`{ctype} n` got .*, expected {expected}$"):
        f[1, 1](torch.ones(3), value)
    assert not cpu.launches


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e300, 2**1023, np.float16(0.5), True], ids=brief)
def test_numbers_that_do(cpu, value):
    f = Kernel("__global__ void f(float* x, float n, double d) { x[0] = n + d; }\n", "f")
    f[1, 1](torch.ones(3), value, value)
    with np.errstate(over="ignore"):
        expected = [float(np.float32(float(value))), float(value)]
    assert np.array_equal(cpu.last[4][1:], expected, equal_nan=True)


@pytest.mark.parametrize("name", ["with spaces", "quotes \"'", "$(touch x)", "%s", "ядро", "-I", "a\\b"], ids=brief)
def test_names_of_the_folder_of_headers(tmp_path, monkeypatch, name):
    """As it is where the user's name, and so every path, is of that kind."""
    (tmp_path / name).symlink_to(backend.cuda_include())
    monkeypatch.setattr(backend, "_include_candidates", lambda: [tmp_path / name])
    backend.cuda_include.cache_clear()
    try:
        assert build("#include <cuda_fp16.h>\n" + PLAIN.replace("float", "__half")).path is not None
    finally:
        backend.cuda_include.cache_clear()


def test_a_folder_of_headers_that_cannot_be_read(tmp_path, monkeypatch):
    """It is passed over; the next one serves."""
    (tmp_path / "cuda_fp16.h").write_text("")
    (tmp_path / "cuda_runtime_api.h").symlink_to("/proc/self/mem")
    assert backend.runtime_version(tmp_path) is None
    assert backend.runtime_version(tmp_path / ("x" * 300)) is None
