"""Misspelt names, and the hints at what was meant: of CUDA, of kernels and their files, of template values, of cupyops."""

import inspect
import warnings

import numpy as np
import pytest
import torch

import cupyops
from cupyops import CompileError, InputError, LaunchError, SourceError
from cupyops._operator.derivation.schema import bind
from cupyops._util.near import meant, near

TEMPLATE = "template <typename T, int N> __global__ void f(T* x) { x[0] = N; }"


def launched(code, name="f", args=(), **template):
    with cupyops.simulate():
        cupyops.Kernel(code, name)[1, 8](torch.zeros(8), *args, **template)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("__syncthread();", "did you mean __syncthreads?"),
        ("x[threadIdx.X] = 1;", "its members are x, y, z; did you mean x?"),
        ("x[blockDim.w] = 1;", "its members are x, y, z"),
        ("float4 v; v.W = 1;", "its members are x, y, z, w; did you mean w?"),
        ("int2 v; v.z = 1;", "its members are x, y"),
        ("x[threadidx.x] = 1;", "did you mean threadIdx?"),
        ("atomicadd(x, 1.0f);", "did you mean atomicAdd?"),
        ("x[0] = __shfl_down_synch(~0u, x[0], 1);", "did you mean __shfl_down_sync?"),
        ("x[0] = __expff(x[0]);", "did you mean __expf?"),
        ("__shared float s[8]; x[0] = s[0];", "did you mean __shared__?"),
        ("x[0] = sqrft(x[0]);", "did you mean sqrt?"),
        ("x[0] = FLT_MXA;", "did you mean FLT_MAX?"),
        ("flaot y = 1;", "did you mean float?"),
        ("retrun;", "did you mean return?"),
    ],
)
def test_names_of_cuda(line, hint):
    with pytest.raises(CompileError) as caught:
        launched(f"__global__ void f(float* x) {{ {line} }}")
    assert f"hint: {hint}" in str(caught.value)


@pytest.mark.parametrize("line", ["x[0] = factr;", "x[0] = n0;", "total(x);"])
def test_names_that_are_like_none_have_no_hint(line):
    with pytest.raises(CompileError) as caught:
        launched(f"__global__ void f(float* x) {{ {line} }}")
    assert "did you mean" not in str(caught.value)


def test_a_kernel_that_is_not_there_is_told_when_it_is_made():
    with pytest.raises(
        InputError, match="^<text>.cu has no __global__ function scal; it has scale; did you mean scale\\?$"
    ):
        cupyops.Kernel("__global__ void scale(float* x) {}", "scal")
    with pytest.raises(InputError, match="has no __global__ function ns::g; it has f$"):
        cupyops.Kernel("namespace ns { __global__ void f(float* x) {} }", "ns::g<T>")


def test_a_file_that_is_not_there_is_told_when_the_kernel_is_made():
    with pytest.raises(SourceError, match="no CUDA source named 'rleu.cu'; did you mean 'relu.cu'?"):
        cupyops.Kernel("rleu.cu", "relu_fwd<T>")
    with pytest.raises(InputError, match="relu.cu has no __global__ function relu_fw; .*did you mean relu_fwd?"):
        cupyops.Kernel("relu.cu", "relu_fw<T>")


def test_a_kernel_in_a_header_and_one_of_a_macro_may_be_there(tmp_path):
    (tmp_path / "a.cuh").write_text("__global__ void inside(float* x) { x[0] = 1; }")
    (tmp_path / "a.cu").write_text('#include "a.cuh"\n')
    cupyops.Kernel(tmp_path / "a.cu", "inside")
    with pytest.raises(InputError, match="a.cu has no __global__ function outside; it has inside"):
        cupyops.Kernel(tmp_path / "a.cu", "outside")
    made = "#define MAKE(name) __global__ void name##_fwd(float* x) { x[0] = 7; }\nMAKE(relu)"
    x = torch.zeros(8)
    with cupyops.simulate():
        cupyops.Kernel(made, "relu_fwd")[1, 1](x)
    assert x[0] == 7


def test_a_file_that_is_edited_before_the_first_launch_is_read_as_it_is_then(tmp_path):
    code = "__global__ void f(float* x) { x[0] = %d; }"
    (tmp_path / "a.cu").write_text(code % 1)
    kernel, x = cupyops.Kernel(tmp_path / "a.cu", "f"), torch.zeros(1)
    (tmp_path / "a.cu").write_text(code % 2)
    with cupyops.simulate():
        kernel[1, 1](x)
    assert x.item() == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_a_dtype_in_quotes(dtype):
    with pytest.raises(CompileError) as caught:
        launched("template <typename T> __global__ void f(T* x) { x[0] = 1; }", "f<T>", T=dtype)
    assert f"hint: {dtype} is a dtype, and no type of C: launch with T=torch.{dtype}, without quotes" in str(
        caught.value
    )


def test_a_type_of_the_source_that_is_called_as_a_dtype():
    launched("typedef float float32; template <typename T> __global__ void f(T* x) { x[0] = 1; }", "f<T>", T="float32")


@pytest.mark.parametrize(
    ("value", "dtype"), [("float", "float32"), ("torch.float16", "float16"), (float, "float32"), (np.int64, "int64")]
)
def test_a_type_in_place_of_a_dtype(value, dtype):
    with pytest.raises(LaunchError, match=f"got .*; of a type give the dtype, torch.{dtype}$"):
        launched("template <typename T> __global__ void f(T* x) {}", "f<T>", T=value)


def test_a_template_whose_name_leaves_its_parameters_out():
    with pytest.raises(LaunchError, match=r'; the kernel is a template: Kernel\(code, "f<T, N>"\)$'):
        launched(TEMPLATE, "f", T=torch.float32)


def test_a_misspelt_parameter():
    with pytest.raises(LaunchError, match=r"no parameter and no template parameter cuont, .*; did you mean count\?$"):
        launched("__global__ void f(float* x, int count) {}", cuont=8)


@pytest.mark.parametrize(
    ("value", "cure"), [(8 / 2, "divide with //, or convert it with int()"), (torch.tensor(8), "its .item()")]
)
def test_a_number_that_is_no_integer(value, cure):
    with pytest.raises(LaunchError) as caught:
        launched("__global__ void f(float* x, int n) {}", args=(value,))
    assert str(caught.value).endswith(f"expected an integer: {cure}")


def test_dynamic_shared_memory_without_bytes():
    with pytest.raises(cupyops.SimulatorError, match=r"\(0 bytes\); the launch gives .*: kernel\[grid, block, bytes\]"):
        launched("__global__ void f(float* x) { extern __shared__ float s[]; s[threadIdx.x] = 1; x[0] = s[0]; }")


@pytest.mark.parametrize(("arch", "meant"), [("80", "sm_80"), (90, "sm_90"), ("sm_9", "sm_90")])
def test_an_architecture(arch, meant):
    with pytest.raises(InputError, match=f'expected one such as "sm_80"; did you mean {meant}\\?$'):
        cupyops.simulate(arch)


@pytest.mark.parametrize(
    ("name", "hint", "values"),
    [
        (
            "f<N, T>",
            "the template's parameters are <typename T, N>, in this order; write",
            {"N": 4, "T": torch.float32},
        ),
        ("f<T>", "the template has 2 parameters, of which 1 came; write", {"T": torch.float32}),
        ("f", "the kernel is a template<typename T, N>; name its parameters, as in", {}),
    ],
)
def test_template_parameters_that_do_not_suit(name, hint, values):
    with pytest.raises(CompileError) as caught:
        launched(TEMPLATE, name, **values)
    assert f'hint: {hint} Kernel(code, "f<T, N>")' in str(caught.value)


def test_one_argument_is_one_argument():
    with pytest.raises(LaunchError, match="^f: 1 argument given, 2 declared"):
        launched("__global__ void f(float* x, int n) {}")
    with pytest.raises(LaunchError, match="^f: 2 arguments given, 1 declared"):
        launched("__global__ void f(float* x) {}", args=(1,))


@pytest.mark.parametrize(("name", "other"), [
    ("layernorm", "layer_norm"), ("Softmx", "softmax"), ("crossentropy", "cross_entropy"),
    ("LayerNorm", "nn.LayerNorm"), ("simulat", "simulate"),
])  # fmt: skip
def test_names_of_cupyops(name, other):
    with pytest.raises(AttributeError, match=f"^module 'cupyops' has no attribute '{name}'; did you mean {other}\\?$"):
        getattr(cupyops, name)


@pytest.mark.parametrize(
    ("module", "name", "other"),
    [("nn", "Layernorm", "LayerNorm"), ("optim", "Adamw", "AdamW"), ("testing", "chek", "check")],
)
def test_names_of_its_packages(module, name, other):
    hint = f"^module 'cupyops.{module}' has no attribute '{name}'; did you mean {other}\\?$"
    with pytest.raises(AttributeError, match=hint):
        getattr(getattr(cupyops, module), name)
    with pytest.raises(AttributeError, match="has no attribute '_near'$"):
        getattr(cupyops, module)._near  # noqa: B018


def test_an_operator_says_which_arguments_it_got():
    with pytest.raises(TypeError, match="^cupyops::relu misses the argument 'input'; it got y$"):
        bind("cupyops::relu", list(inspect.signature(cupyops.relu).parameters.values()), (), {"y": 1})


def test_a_name_like_none_has_no_hint():
    with pytest.raises(AttributeError, match="^module 'cupyops' has no attribute 'quicksort'$"):
        cupyops.quicksort  # noqa: B018
    assert not hasattr(cupyops, "_nothing")


def test_an_expanded_output_is_called_so():
    y = torch.zeros(1).expand(8)
    with cupyops.simulate(), pytest.raises(cupyops.SimulatorError) as caught:
        cupyops.Kernel("__global__ void f(float* y) { y[threadIdx.x] = 1; }", "f")[1, 8](y)
    (note,) = caught.value.__notes__
    assert note.startswith(
        "`y` is expanded, of shape (8,) with strides (0,): its elements share memory; allocate an output"
    )


def test_simulate_without_with_is_told():
    with pytest.warns(UserWarning, match="simulate\\(\\) by itself does nothing: write `with cupyops.simulate\\(\\):`"):
        cupyops.simulate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cupyops.simulate():
            pass
        kept = cupyops.simulate("sm_90")
        with kept:
            pass
        del kept


def test_what_is_near():
    assert near("LAYER_NORM", ["layer_norm", "rms_norm"]) == "layer_norm" and near("xyz", ["abc"]) is None
    assert (meant("rlu", ["relu", "gelu"]), meant("xyz", ["relu"])) == ("; did you mean relu?", "")
