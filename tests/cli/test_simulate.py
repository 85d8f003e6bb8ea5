"""`python -m cupyops simulate`: arguments, findings, measures, and the report in the terminal, as JSON and as a page."""

import html.parser
import json
import re
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cupyops import Kernel
from cupyops.cli.app import app
from cupyops.cli.occupancy import occupancy

TEXT = r"""
#include "helper.cuh"
struct Three { int a[3]; };

// <b>no markup</b> & "quotes" [bold]here[/bold]
/* over
   lines */
template <typename T, int N = 2> __global__ void times(const T* x, T* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * T(N);
}

extern "C" __global__ void add(const float* x, const float* other, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + (other ? other[i] : 0.f);
}

extern "C" __global__ void scalars(double* y, float f, double d, int i, unsigned char u, long long l, bool b, Three s) {
  double all[] = {f, d, double(i), double(u), double(l), double(b), double(s.a[0]), double(s.a[2])};
  for (int k = 0; k < 8; ++k) y[k] = all[k];
}

extern "C" __global__ void untyped(const void* x, char* y, const unsigned int* u, float4* v) {
  int i = threadIdx.x;
  reinterpret_cast<float*>(y)[i] = static_cast<const float*>(x)[i] + u[i] + v[0].x;
}

extern "C" __global__ void measured(const float* x, float* y) {
  __shared__ float tile[1024];
  int t = threadIdx.x;
  tile[t % 32 * 32 + t / 32] = x[t * 32];
  __syncthreads();
  float v = tile[t];
  if (t % 8 == 0) v = slow(v);
  y[t] = v;
}

extern "C" __global__ void past(const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i];
}

extern "C" __global__ void race(float* y) {
  __shared__ float s[64];
  s[threadIdx.x] = y[threadIdx.x];
  y[threadIdx.x] = s[63 - threadIdx.x];
}

extern "C" __global__ void endless(float* y) {
  while (*static_cast<volatile float*>(y) == 0.f);
}

extern "C" __global__ void prints(float* y) {
  if (threadIdx.x < 2) printf("[bold]thread %d has <%g>\n", threadIdx.x, y[threadIdx.x]);
}

extern "C" __global__ void order(float* y) {
  if (threadIdx.x == 0) printf("%d ", blockIdx.x);
}

extern "C" __global__ void dynamic(float* y) {
  extern __shared__ float s[];
  s[threadIdx.x] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[blockDim.x * blockDim.y - 1 - threadIdx.x];
}
"""

HELPER = """
__device__ float slow(float v) {
  for (int i = 0; i < 20; ++i) v = v * 1.0001f + 0.5f;
  return v;
}
"""

HALVES = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
template <typename T> __global__ void copy(const T* x, T* y, T last) {
  y[threadIdx.x] = threadIdx.x == 7 ? last : x[threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path, monkeypatch, cache):
    """A working folder with the kernels, and a kernel cache that this module's tests share."""
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.cu").write_text(TEXT)
    (tmp_path / "helper.cuh").write_text(HELPER)
    (tmp_path / "halves.cu").write_text(HALVES)
    return tmp_path


def command(kernel, *args, grid=1, block=64, file="k.cu", more=()):
    given = [word for arg in args for word in ("--arg", str(arg))]
    words = ["simulate", file, kernel, "--grid", str(grid), "--block", str(block), *given, *map(str, more)]
    return CliRunner().invoke(app, words)


def data(kernel, *args, exit_code=0, more=(), **launch):
    """The JSON of a run."""
    result = command(kernel, *args, more=(*more, "--json", "data.json"), **launch)
    assert result.exit_code == exit_code, result.output
    with open("data.json") as file:
        return json.load(file)


def array(facts, name):
    return next(one for one in facts["arrays"] if one["name"] == name)


def line(facts, piece, file="k.cu"):
    return next(one for one in facts["lines"] if one["file"] == file and piece in one["text"])


def test_a_file_goes_in_and_the_result_is_shown(folder):
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    np.save("x.npy", x)
    facts = data("times<float, 3>", "@x.npy", "empty(100)", 100, block=128)
    y = array(facts, "y")
    assert y["first"] == (x * 3)[:6].tolist()
    assert (y["minimum"], y["maximum"]) == ((x * 3).min(), (x * 3).max())
    assert (y["changed"], y["unwritten"], y["nans"], y["shape"]) == (100, 0, 0, [100])
    assert array(facts, "x")["changed"] == 0


FORMS = [
    ("zeros(2,3)", [0, 0, 0, 0, 0, 0]), ("ones(6)", [1, 1, 1, 1, 1, 1]), ("full(6,-2.5)", [-2.5] * 6),
    ("full((2, 3), 7)", [7] * 6), ("arange(2,3)", [0, 1, 2, 3, 4, 5]), ("arange(6):float32", [0, 1, 2, 3, 4, 5]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "values"), FORMS)
def test_forms_of_arrays(form, values, folder):
    facts = data("add", form, "null", "zeros(6)", 6)
    assert array(facts, "x")["first"] == values
    assert array(facts, "y")["first"] == values


@pytest.mark.parametrize(
    ("form", "low", "high"), [("rand(5000)", 0, 1), ("randn(5000)", -5, 5), ("randint(3,6,5000)", 3, 5)]
)
def test_random_numbers_are_the_same_in_every_run_and_differ_between_parameters(form, low, high, folder):
    first, again = (data("add", form, form, "zeros(5000)", 5000, block=32, grid=157) for _ in range(2))
    assert first["arrays"] == again["arrays"]
    x, other = array(first, "x"), array(first, "other")
    assert x["first"] != other["first"]
    assert low <= x["minimum"] < x["maximum"] <= high
    assert x["maximum"] - x["minimum"] > 0.9 * min(high - low, 6)


def test_scalars_and_a_struct(folder):
    facts = data("scalars", "empty(8)", 0.1, 0.1, -5, 200, -(2**62), "true", "arange(3):int32")
    struct_of_python = [float(np.float32(0.1)), 0.1, -5, 200, -(2.0**62), 1]
    assert array(facts, "y")["first"] == struct_of_python
    assert (array(facts, "y")["minimum"], array(facts, "y")["maximum"]) == (-(2.0**62), 200)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_sixteen_bit_floats(kind, folder):
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    np.save("x.npy", x.numpy())
    given = "@x.npy" if kind == "bfloat16" else "@x.npy:float16"  # NumPy has the one and not the other
    facts = data("copy", given, "empty(8)", 1.7, file="halves.cu", block=8, more=["--template", f"T={kind}"])
    y = array(facts, "y")
    rounded = x.to(getattr(torch, kind)).double()
    last = torch.tensor(1.7, dtype=getattr(torch, kind)).double()
    assert y["element"] == kind
    assert y["first"] == rounded[:6].tolist()
    assert y["maximum"] == max(rounded[:7].max().item(), last.item())


ELEMENTS = [
    ("double", "float64"), ("signed char", "int8"), ("unsigned char", "uint8"), ("short", "int16"),
    ("unsigned short", "uint16"), ("int", "int32"), ("unsigned int", "uint32"), ("long long", "int64"),
    ("unsigned long long", "uint64"),
]  # fmt: skip


@pytest.mark.parametrize(("ctype", "element"), ELEMENTS)
def test_elements_are_those_of_the_c_declaration(ctype, element, folder):
    facts = data(f"times<{ctype}>", "arange(6)", "empty(6)", 6)
    y = array(facts, "y")
    assert (y["element"], y["first"]) == (element, [0, 2, 4, 6, 8, 10])


def test_where_c_does_not_say_the_suffix_does(folder):
    facts = data("untyped", "ones(64):float32", "zeros(64):float32", "arange(64)", "full(4,0.5):float32")
    assert array(facts, "u")["element"] == "uint32"
    assert array(facts, "y")["first"] == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]


@pytest.mark.parametrize(
    ("kernel", "args", "said"),
    [
        ("add", ["ones(4)"], "takes 4 arguments; 1 given"),
        ("add", ["ones(4)", "null", "ones(4)", 4, 5], "takes 4 arguments; 5 given"),
        ("add", ["ones(4):float16", "null", "ones(4)", 4], "holds float16, expected float32"),
        ("add", ["ones(4)", "null", "ones(4)", 4.5], "got 4.5 (float), expected an integer"),
        ("add", ["ones(4)", "null", "ones(4)", 2**31], "an integer that fits int"),
        ("add", ["ones(4)", "null", "ones(4)", "four"], "expected a number, true or false"),
        ("add", [3, "null", "ones(4)", 4], "a pointer takes an array"),
        ("add", ["twos(4)", "null", "ones(4)", 4], "there is no twos()"),
        ("add", ["ones()", "null", "ones(4)", 4], "expected extents"),
        ("add", ["ones(-1)", "null", "ones(4)", 4], "expected extents"),
        ("add", ["ones(n)", "null", "ones(4)", 4], "takes numbers, not 'n'"),
        ("add", ["full(4)", "null", "ones(4)", 4], "expected full(n,value)"),
        ("add", ["randint(5,5,4)", "null", "ones(4)", 4], "low < high"),
        ("add", ["ones(100000,100000)", "null", "ones(4)", 4], "too large"),
        ("add", ["ones(4):float8", "null", "ones(4)", 4], "'float8' is no dtype"),
        ("add", ["@absent.npy", "null", "ones(4)", 4], "there is no file absent.npy"),
        ("add", ["@k.cu", "null", "ones(4)", 4], "k.cu is no .npy file"),
        ("add", ["@doubles.npy", "null", "ones(4)", 4], "holds float64, expected float32; @doubles.npy:float32"),
        ("add", ["@words.npy", "null", "ones(4)", 4], "words.npy holds <U3"),
        ("times<int>", ["randn(4)", "ones(4)", 4], "random int32 numbers are made by randint"),
        ("untyped", ["ones(4)", "ones(4)", "ones(4)", "ones(4):float32"], "does not say what it points to"),
        ("scalars", ["empty(8)", 1, 1, 1, 1, 1, "true", "ones(2):int32"], "a NumPy array of 12 bytes"),
        ("scalars", ["empty(8)", 1, 1, 1, 300, 1, "true", "ones(3):int32"], "an integer that fits unsigned char"),
    ],
)
def test_wrong_arguments_are_told_with_the_signature_and_an_example(kernel, args, said, folder):
    np.save("doubles.npy", np.zeros(4))
    np.save("words.npy", np.array(["one", "two"]))
    result = command(kernel, *args)
    assert result.exit_code == 2
    assert said in result.output
    assert f"signature: __global__ void {kernel}(" in result.output
    assert re.search(rf"example: .*simulate k.cu '?{re.escape(kernel)}'? --grid 4 --block 256 --arg", result.output)
    assert "Traceback" not in result.output


def test_the_example_runs(folder):
    said = command("times<float32>").output
    words = re.search(r"example: +python -m cupyops (.*)", said).group(1)
    assert CliRunner().invoke(app, [word.strip("'") for word in re.findall(r"'[^']*'|\S+", words)]).exit_code == 0


def test_what_is_not_given_is_told_step_by_step(folder):
    """The file, the kernel, its template arguments, the launch."""
    steps = [
        (["absent.cu"], "no CUDA source named 'absent.cu'"),
        (["k.cu"], "KERNEL not given; k.cu has\n  template <T, N> __global__ void times(const T* x, T* y, int n)\n"),
        (["helper.cuh"], "KERNEL not given; helper.cuh has\n  no __global__ function\n"),
        (["k.cu", "times"], "example:   python -m cupyops simulate k.cu times --template T=float32 --grid 4 --block"),
        (
            ["k.cu", "add"],
            "--grid and --block not given; give both, as below\n\nsignature: __global__ void add(const float* x",
        ),
        (["k.cu", "add", "--grid", "4"], "--block not given; give both, as below\n"),
        (["k.cu", "add"], "--arg 'randn(1024)' --arg 'randn(1024)' --arg 'empty(1024)' --arg 1024\n"),
    ]
    for words, said in steps:
        result = CliRunner().invoke(app, ["simulate", *words])
        assert result.exit_code == 2 and said in result.output, result.output


@pytest.mark.parametrize("more", [("times<flaot>", []), ("times", ["--template", "T=flaot"])])
def test_a_type_that_there_is_not(more, folder):
    kernel, template = more
    result = command(kernel, "ones(4)", "ones(4)", 4, more=template)
    assert result.exit_code == 1
    assert "T is 'flaot'; did you mean float?\n  types: float16, bfloat16, float32," in result.output


@pytest.mark.parametrize(
    ("kernel", "launch", "more", "said"),
    [
        ("nothing", {}, (), "k.cu has no __global__ function nothing; it has"),
        ("no kernel", {}, (), "KERNEL is 'no kernel'"),
        ("times", {}, (), "times is a template: T not given"),
        ("times", {}, ("--template", "N=3"), "times is a template: T not given"),
        ("times", {}, ("--template", "M=3"), "no template parameter M; it has T, N"),
        ("times", {}, ("--template", "T"), "not of the form NAME=VALUE"),
        ("times<int>", {}, ("--template", "T=int"), "names them again"),
        ("add", {"grid": "0"}, (), "--grid is '0'"),
        ("add", {"grid": "1,2,3,4"}, (), "--grid is '1,2,3,4'"),
        ("add", {"block": "many"}, (), "--block is 'many'"),
        ("add", {"block": "2048"}, (), "2048 threads; CUDA allows 1 to 1024"),
        ("add", {"file": "absent.cu"}, (), "no CUDA source named 'absent.cu'"),
        ("add", {}, ("--arch", "sm_1"), "--arch is 'sm_1'"),
        ("add", {}, ("--arch", "ninety"), "--arch is 'ninety'"),
    ],
)
def test_what_cannot_be_launched(kernel, launch, more, said, folder):
    result = command(kernel, more=more, **launch)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("kernel", "more", "name", "factor"),
    [
        ("times<float>", [], "times<float>", 2),
        ("times<float, 5>", [], "times<float, 5>", 5),
        ("times<torch.float64,5>", [], "times<double, 5>", 5),
        ("times", ["--template", "T=float32"], "times<float>", 2),
        ("times", ["--template", "N=7", "--template", "T=torch.float64"], "times<double, 7>", 7),
        ("times", ["--template", "T=unsigned int"], "times<unsigned int>", 2),
    ],
)
def test_template_arguments(kernel, more, name, factor, folder):
    facts = data(kernel, "arange(6)", "empty(6)", 6, more=more)
    assert facts["kernel"] == name
    assert array(facts, "y")["first"] == [factor * i for i in range(6)]


def test_a_kernel_that_does_not_compile(folder):
    (folder / "broken.cu").write_text('extern "C" __global__ void f(float* y) {\n  y[0] = absent;\n}\n')
    result = command("f", "ones(1)", file="broken.cu")
    assert result.exit_code == 1
    assert "broken.cu:2: error:" in result.output and "y[0] = absent;" in result.output
    assert "types:" not in result.output


def test_further_options_reach_the_compiler(folder):
    (folder / "option.cu").write_text('extern "C" __global__ void f(float* y) { y[0] = VALUE; }')
    facts = data("f", "zeros(1)", file="option.cu", block=1, more=["--option=-DVALUE=11"])
    assert array(facts, "y")["first"] == [11]


def test_a_fault_is_told_in_full_and_marked_in_the_page(folder):
    result = command("past", "ones(128)", "zeros(100)", grid=2, more=["--html", "r.html", "--json", "r.json"])
    assert result.exit_code == 1
    for said in (
        "OutOfBounds",
        "write of 4 bytes outside `y`",
        "thread (36,0,0) of block (1,0,0), and 27 more threads",
    ):
        assert said in result.output
    number = TEXT.splitlines().index("  y[i] = x[i];") + 1
    assert f"k.cu:{number} |  y[i] = x[i];" in result.output
    assert "Traceback" not in result.output
    facts = json.loads((folder / "r.json").read_text())
    assert (facts["fault"]["kind"], facts["fault"]["file"], facts["fault"]["line"]) == ("OutOfBounds", "k.cu", number)
    assert facts["seconds"] is None and not facts["lines"]
    page = Page((folder / "r.html").read_text())
    assert "write of 4 bytes outside `y`" in page.text("fault")
    assert page.ids_of("row faulty") == [f"f0-{number}"]
    assert "past: write of 4 bytes outside `y`" in page.text("here")


def test_checks_can_be_left_out(folder):
    assert "Race" in command("race", "arange(64)").output
    facts = data("race", "arange(64)", more=["--no-check"])
    assert array(facts, "y")["first"] == [63, 62, 61, 60, 59, 58]
    assert facts["check"] is False


def test_a_seed_changes_the_order_and_is_repeatable(folder):
    def order(*more):
        return data("order", "ones(1)", grid=50, block=32, more=more)["output"].split()

    in_order = [str(block) for block in range(50)]
    drawn = order("--seed", 1)
    assert order() == in_order
    assert drawn != in_order and sorted(drawn, key=int) == in_order
    assert order("--seed", 1) == drawn != order("--seed", 2)


def test_an_endless_loop_ends(folder):
    result = command("endless", "zeros(1)", block=1, more=["--max-steps", "200"])
    assert result.exit_code == 1
    assert "StepLimit" in result.output and "no end after 200 steps" in result.output


def test_a_launch_that_the_hardware_refuses(folder):
    text = TEXT.replace("__global__ void past", "__global__ void __launch_bounds__(32) past")
    (folder / "bounds.cu").write_text(text)
    result = command("past", "ones(64)", "ones(64)", file="bounds.cu")
    assert result.exit_code == 1
    assert "expected at most 32, as __launch_bounds__ says" in result.output


@pytest.fixture
def measured(folder):
    return data("measured", "randn(32768)", "empty(1024)", block=1024)


def test_the_measures_of_each_line(measured):
    access = line(measured, "tile[t % 32 * 32 + t / 32] = x[t * 32];")
    counts = access["counts"]
    assert (counts["requests"], counts["sectors"], counts["least_sectors"]) == (32, 32 * 32, 32 * 4)
    assert (counts["shared_requests"], counts["wavefronts"], counts["least_wavefronts"]) == (32, 32 * 32, 32)
    assert [remark["kind"] for remark in access["remarks"]] == ["coalescing", "bank conflicts"]
    good = line(measured, "float v = tile[t];")["counts"]
    assert (good["shared_requests"], good["wavefronts"]) == (32, 32)
    store = line(measured, "y[t] = v;")["counts"]
    assert (store["requests"], store["sectors"], store["least_sectors"]) == (32, 128, 128)


def test_divergence_and_what_was_called_on_a_line(measured):
    inlined = line(measured, "for (int i = 0; i < 20; ++i)", file="helper.cuh")
    assert inlined["threads_per_warp"] == 4
    assert [remark["kind"] for remark in inlined["remarks"]] == ["divergence"]
    call = line(measured, "v = slow(v);")
    assert call["total_share"] == pytest.approx(call["share"] + inlined["share"])
    assert 0.9 < sum(one["share"] for one in measured["lines"]) <= 1


def test_the_resources_are_those_of_the_cubin(measured):
    assert measured["resources"]["shared"] == 4096
    assert measured["resources"]["stack"] == 0
    assert 8 <= measured["resources"]["registers"] <= 64
    assert measured["occupancy"]["warps"] == 64


def test_dynamic_shared_memory_and_two_dimensions(folder):
    facts = data("dynamic", "arange(64)", grid="1x1", block="64,1", more=["--shared", 256, "--seed", 3])
    assert array(facts, "y")["first"] == [63, 62, 61, 60, 59, 58]
    assert (facts["grid"], facts["block"], facts["shared"], facts["seed"]) == ([1, 1, 1], [64, 1, 1], 256, 3)
    assert command("dynamic", "arange(64)", more=["--shared", 252]).exit_code == 1


def test_unwritten_elements_are_counted_and_shown(folder):
    facts = data("add", "ones(10)", "null", "empty(12)", 4)
    y = array(facts, "y")
    assert (y["changed"], y["unwritten"], y["first"]) == (4, 8, [1, 1, 1, 1, None, None])
    assert "8 never written" in command("add", "ones(10)", "null", "empty(12)", 4).output


def test_an_array_without_elements(folder):
    facts = data("add", "ones(0)", "null", "zeros(0,3)", 0)
    assert (array(facts, "y")["shape"], array(facts, "y")["first"], array(facts, "y")["maximum"]) == ([0, 3], [], None)


def test_nan_and_infinity_are_valid_json(folder):
    np.save("x.npy", np.array([np.nan, np.inf, -np.inf, 1], np.float32))
    y = array(data("add", "@x.npy", "null", "zeros(4)", 4), "y")
    assert (y["first"], y["minimum"], y["maximum"], y["nans"]) == (["nan", "inf", "-inf", 1.0], "-inf", "inf", 1)


# Of CUDA's own calculation (cuda_occupancy.h): architecture, threads, registers, shared memory -> blocks.
@pytest.mark.parametrize(("arch", "threads", "registers", "shared", "blocks"), [
    ("sm_75", 1024, 64, 0, 1), ("sm_80", 256, 32, 0, 8), ("sm_80", 256, 255, 0, 1), ("sm_80", 1000, 72, 0, 0),
    ("sm_80", 128, 40, 49152, 3), ("sm_86", 1024, 32, 0, 1), ("sm_86", 32, 16, 10000, 9),
    ("sm_89", 32, 16, 0, 24), ("sm_90a", 384, 168, 90000, 1), ("sm_120", 640, 32, 33000, 2),
])  # fmt: skip
def test_occupancy(arch, threads, registers, shared, blocks):
    found = occupancy(arch, threads, registers, shared)
    assert (found.blocks, found.warps) == (blocks, blocks * -(-threads // 32))


def test_occupancy_of_an_unknown_architecture():
    assert occupancy("sm_999", 32, 32, 0) is None


def test_the_summary_and_the_table(folder):
    output = command("measured", "randn(32768)", "empty(1024)", block=1024).output
    for said in ("warps", "4,096 bytes static, 0 dynamic", "100% in theory", "1,024 of 1,024 changed", "helper.cuh"):
        assert said in output
    row = next(text for text in output.splitlines() if "tile[t % 32 * 32 + t / 32] = x[t * 32];" in text)
    assert row.lstrip().startswith("> ")  # among the hottest
    assert "32 (4)" in row and "32 (1)" in row
    assert "coalescing: 32 sectors per request, where 4 would do" in output


def test_a_narrow_terminal_keeps_the_numbers(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    output = command("measured", "randn(32768)", "empty(1024)", block=1024).output
    row = next(text for text in output.splitlines() if "32 (4)" in text)
    assert "32 (1)" in row and "%" in row and "tile" in row


def test_what_the_kernel_prints_is_left_as_it_is(folder):
    result = command("prints", "arange(64)", more=["--html", "r.html"])
    assert "[bold]thread 0 has <0>\n[bold]thread 1 has <1>\n" in result.output
    assert "no array has changed" in result.output
    assert "[bold]thread 1 has &lt;1&gt;" in (folder / "r.html").read_text()


def test_without_pyelftools_it_runs_and_says_what_is_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    result = command("add", "ones(4)", "null", "zeros(4)", 4, more=["--html", "r.html"])
    assert result.exit_code == 0
    assert 'pip install "cupyops[cli]"' in result.output
    assert "occupancy, in theory" not in (folder / "r.html").read_text()


def test_a_report_that_cannot_be_written(folder):
    result = command("add", "ones(4)", "null", "zeros(4)", 4, more=["--html", "absent/r.html"])
    assert result.exit_code == 2
    assert "there is no folder 'absent'" in result.output and "Traceback" not in result.output


class Page(html.parser.HTMLParser):
    """A page taken apart: elements that are opened are closed, in the right order."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "attributes": dict(attributes), "text": ""}
        self.elements.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1]["tag"] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, text):
        for element in self.open:
            element["text"] += text

    def of_class(self, name):
        return [one for one in self.elements if one["attributes"].get("class") == name]

    def text(self, name):
        return "\n".join(one["text"] for one in self.of_class(name))

    def ids_of(self, name):
        return [one["attributes"].get("id") for one in self.of_class(name)]


@pytest.fixture
def page(folder):
    assert command("measured", "randn(32768)", "empty(1024)", block=1024, more=["--html", "r.html"]).exit_code == 0
    return Page((folder / "r.html").read_text(encoding="utf-8"))


def test_the_page_is_complete_in_itself(page, folder):
    tags = {one["tag"] for one in page.elements}
    assert not tags & {"script", "link", "img", "iframe"}
    for element in page.elements:
        assert "src" not in element["attributes"]
        assert element["attributes"].get("href", "#").startswith("#")
    text = (folder / "r.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_every_link_leads_somewhere(page):
    ids = [one["attributes"]["id"] for one in page.elements if "id" in one["attributes"]]
    assert len(ids) == len(set(ids))
    links = [one["attributes"]["href"] for one in page.elements if "href" in one["attributes"]]
    assert links and {link.removeprefix("#") for link in links} <= set(ids)


def test_the_page_shows_each_file_whole(page):
    sections = [one for one in page.elements if (one["attributes"].get("class") or "") == "file"]
    assert [one["attributes"]["id"] for one in sections] == ["f0", "f1"]
    for section, text in zip(sections, (TEXT, HELPER)):
        lines = text.split("\n")[:-1]
        for number, content in enumerate(lines, 1):
            row = next(
                one for one in page.elements if one["attributes"].get("id") == f"{section['attributes']['id']}-{number}"
            )
            assert content in row["text"]
    assert '// <b>no markup</b> & "quotes" [bold]here[/bold]' in sections[0]["text"]
    assert not [one for one in page.elements if one["tag"] == "b" and one["text"] == "no markup"]


def test_the_page_shows_the_measures_and_what_they_mean(page):
    number = TEXT.splitlines().index("  tile[t % 32 * 32 + t / 32] = x[t * 32];") + 1
    row = next(one for one in page.elements if one["attributes"].get("id") == f"f0-{number}")
    assert row["tag"] == "details"
    assert "st.shared.f32" in row["text"] and "32 x" in row["text"]  # its PTX, folded
    bad = [one for one in page.of_class("bad") if one["text"] in ("32 (4)", "32 (1)")]
    assert {one["text"] for one in bad} == {"32 (4)", "32 (1)"}
    assert all("would do" in one["attributes"]["title"] for one in bad)
    heats = [float(h) for h in re.findall(r"--heat:([\d.]+)", str([one["attributes"] for one in page.elements]))]
    assert max(heats) == 1 and all(0 <= heat <= 1 for heat in heats)
    assert "coalescing: 32 sectors per request, where 4 would do" in page.elements[0]["text"]


def test_the_page_is_the_same_in_every_run(folder):
    texts = []
    for name in ("a.html", "b.html"):
        assert command("measured", "randn(32768)", "empty(1024)", block=1024, more=["--html", name]).exit_code == 0
        texts.append(re.sub(r"<b class=\"\">[\d.e-]+ s</b>", "", (folder / name).read_text()))
    assert texts[0] == texts[1]


def test_a_built_in_kernel_with_its_includes(folder):
    result = command(
        "relu_fwd<float>",
        "randn(1000)",
        "empty(1000)",
        "null",
        1000,
        file="relu.cu",
        grid=4,
        block=256,
        more=["--html", "r.html"],
    )
    assert result.exit_code == 0, result.output
    page = Page((folder / "r.html").read_text(encoding="utf-8"))
    summaries = [one["text"] for one in page.elements if one["tag"] == "summary"]
    assert any(text.startswith("common/elementwise/elementwise.cuh") for text in summaries)


def test_constants_of_built_in_kernels_come_from_python(tmp_path):
    """A Kernel that defines constants tells the command line what they are; one that is given there is left alone."""
    (tmp_path / "put.cu").write_text("__global__ void put(float* y) { y[threadIdx.x] = VALUE; }\n")
    kernel = Kernel(tmp_path / "put.cu", "put", define={"VALUE": 7})  # noqa: F841 - it is alive
    words = ["simulate", str(tmp_path / "put.cu"), "put", "--grid", "1", "--block", "4", "--arg", "zeros(4)"]
    for more, mean in (([], 7.0), (["--option=-DVALUE=8"], 8.0)):
        path = tmp_path / "found.json"
        done = CliRunner().invoke(app, [*words, *more, "--json", str(path)])
        assert done.exit_code == 0, done.output
        (array,) = json.loads(path.read_text())["arrays"]
        assert array["first"] == [mean] * 4
