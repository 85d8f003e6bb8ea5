"""Kernels by the names and calls of other programs."""

import numpy as np
import pytest
import torch

import cupyops
from cupyops import CompileError, InputError, LaunchError, SourceError

CODE = """
namespace ns { template <typename T, int N> __global__ void fill(T* x, int n) { if (threadIdx.x < n) x[threadIdx.x] = N; } }
template <typename T> __global__ void twice(T* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }
extern "C" __global__ void add(const float* x1, const float* x2, float* y) {
  int tid = blockDim.x * blockIdx.x + threadIdx.x;
  y[tid] = x1[tid] + x2[tid];
}
struct Pair { float a, b; };
__global__ void both(float* x, Pair pair) { extern __shared__ float s[]; s[0] = pair.a; x[0] = s[0] + pair.b; }
"""


class TestModule:
    def test_every_kernel_is_an_attribute(self):
        module = cupyops.module(CODE)
        assert list(module) == ["fill", "twice", "add", "both"] and "add" in module and "twice" in dir(module)
        assert module.twice is module.twice and module.twice.template == ("T",)
        x = torch.ones(3)
        with cupyops.simulate():
            module.twice[1, 32](x, 3, T=torch.float32)
            module.add[1, 3](x, x, x1 := torch.empty(3))
            module["twice<float>"][1, 32](x1, 3)
            assert x1.tolist() == [8.0] * 3
            module["ns::fill<float, 7>"][1, 32](x, 2)
        assert x.tolist() == [7.0, 7.0, 2.0]
        with pytest.raises(AttributeError, match="no kernel 'thrice'; it has fill, twice, add, both"):
            module.thrice  # noqa: B018

    def test_a_file_and_its_includes_are_found_beside_the_caller(self, tmp_path, monkeypatch):
        (tmp_path / "head.cuh").write_text("#define VALUE 5\n")
        (tmp_path / "some.cu").write_text('#include "head.cuh"\n__global__ void set(float* x) { x[0] = VALUE; }\n')
        monkeypatch.chdir(tmp_path)
        x = torch.zeros(1)
        with cupyops.simulate():
            cupyops.module("some.cu").set[1, 1](x)
        assert x.item() == 5.0
        with pytest.raises(SourceError, match="no CUDA source named 'other.cu'"):
            cupyops.module("other.cu")

    def test_options_and_constants(self):
        code = "__global__ void set(float* x) { x[0] = VALUE + MORE; }"
        x = torch.zeros(1)
        with cupyops.simulate():
            cupyops.module(code, define={"VALUE": 4}, options=("-DMORE=2",)).set[1, 1](x)
        assert x.item() == 6.0

    def test_views_are_told_as_of_any_kernel(self):
        """The kernels are the caller's, and not of this package."""
        with cupyops.simulate(), pytest.raises(cupyops.SimulatorError, match="between the elements"):
            cupyops.module(CODE)["twice<float>"][1, 32](torch.ones(8)[::2], 4)


class TestRaw:
    def test_the_example_of_cupy_s_documentation(self):
        """Moved by its import, on NumPy's arrays for CuPy's."""
        add_kernel = cupyops.RawKernel(CODE, "add", ("-std=c++11",), backend="nvrtc")
        x1, x2 = np.arange(25, dtype=np.float32).reshape(5, 5), np.arange(25, dtype=np.float32).reshape(5, 5)
        y = np.zeros((5, 5), dtype=np.float32)
        with cupyops.simulate():
            add_kernel((5,), (5,), (x1, x2, y))
        np.testing.assert_array_equal(y, x1 + x2)

    def test_name_expressions(self):
        module = cupyops.RawModule(
            code=CODE, options=("--std=c++17",), name_expressions=["ns::fill<float, 4>", "twice<double>"]
        )
        x, z = torch.zeros(2), np.ones(2)
        with cupyops.simulate():
            module.get_function("ns::fill<float, 4>")((1,), (32,), (x, np.int32(2)))
            module.get_function("twice<double>")((1, 1, 1), (32,), (z, 2))
        assert x.tolist() == [4.0, 4.0] and z.tolist() == [2.0, 2.0]

    def test_structs_and_shared_memory(self):
        x, pair = torch.zeros(1), np.array((1.5, 2.0), np.dtype([("a", np.float32), ("b", np.float32)]))
        with cupyops.simulate():
            cupyops.RawKernel(CODE, "both")((1,), (1,), (x, pair), shared_mem=16)
        assert x.item() == 3.5

    def test_a_path(self, tmp_path):
        (tmp_path / "some.cu").write_text(CODE)
        x = torch.ones(2)
        with cupyops.simulate():
            cupyops.RawModule(path=tmp_path / "some.cu").get_function("twice<float>")((1,), (32,), (x, 2))
        assert x.tolist() == [2.0, 2.0]

    def test_refusals(self):
        with cupyops.simulate(), pytest.raises(LaunchError, match="expected a tensor of torch.float32"):
            cupyops.RawKernel(CODE, "add")((1,), (2,), (np.ones(2), np.ones(2), np.ones(2)))
        with pytest.raises(InputError, match="code or path"):
            cupyops.RawModule()


class TestLoadInline:
    def test_kernels(self):
        kernels = cupyops.load_inline(
            name="mine",
            cpp_sources="torch::Tensor twice(torch::Tensor x);  // a declaration",
            cuda_sources=[CODE, "__global__ void one(float* x) { x[0] = 1; }"],
            functions=["add", "one"],
            extra_cuda_cflags=["-O3", "--use_fast_math", "-std=c++17"],
            verbose=True,
        )
        x = torch.zeros(1)
        with cupyops.simulate():
            kernels.one[1, 1](x)
        assert x.item() == 1.0 and kernels.one.options[0] == "--use_fast_math"

    def test_host_code_is_left_out(self):
        """Texts as people give them: a host function that launches, and its name in `functions`."""
        cuda = """
        #include <torch/extension.h>
        __global__ void triple_kernel(const float* x, float* y, int n) {
          const int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i < n) y[i] = std::max(x[i], 0.0f) * 3;
        }
        torch::Tensor triple(torch::Tensor x) {
          auto y = torch::empty_like(x);
          triple_kernel<<<(x.numel() + 31) / 32, 32>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
          return y;
        }
        """
        host = "torch::Tensor triple(torch::Tensor x);\nint seven() { return 7; }"
        kernels = cupyops.load_inline(
            "mine", cpp_sources=host, cuda_sources=cuda, functions=["triple", "triple_kernel"]
        )
        x, y = torch.tensor([1.0, -2.0]), torch.zeros(2)
        with cupyops.simulate():
            kernels.triple_kernel[1, 32](x, y, 2)
        assert list(kernels) == ["triple_kernel"] and y.tolist() == [3.0, 0.0]
        with pytest.raises(AttributeError, match="triple is a function of the host.*python -m cupyops port"):
            kernels.triple  # noqa: B018
        with pytest.raises(InputError, match="functions names thrice, of which there is no function in the text"):
            cupyops.load_inline("mine", cuda_sources=CODE, functions=["thrice"])


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("const int n = ${n};", "n"),
        ("{{type}} sum = 0;", "type"),
        ("float sum = %(value)s;", "value"),
        ("float sum = $value;", "value"),
    ],
)
def test_a_placeholder_is_told(line, name):
    code = f"__global__ void f(float* x) {{\n  {line}\n  x[0] = 1;\n}}"
    with (
        cupyops.simulate(),
        pytest.raises(CompileError, match=rf"to be filled in by another program.*\(\.\.\., define={{'{name}'"),
    ):
        cupyops.Kernel(code, "f")[1, 1](torch.ones(1))


class TestAddresses:
    """As programs for CuPy have them: `args=[x.data_ptr()]`."""

    def test_an_address_is_the_memory_that_lies_there(self):
        add = cupyops.RawKernel(CODE, "add")
        x, y = torch.arange(8.0), torch.zeros(4)
        with cupyops.simulate():
            add((1,), (4,), [x.data_ptr(), x[4:].data_ptr(), y.data_ptr()])
            assert y.tolist() == [4.0, 6.0, 8.0, 10.0]
            add((1,), (4,), (x, x.data_ptr() + 4, y))
            assert y.tolist() == [1.0, 3.0, 5.0, 7.0]
            with pytest.raises(cupyops.SimulatorError):  # past its end
                add((1,), (4,), [x.data_ptr() + 20, x.data_ptr(), y.data_ptr()])
            with pytest.raises(LaunchError, match="expected the address of a tensor that is alive"):
                add((1,), (4,), [x, 4096, y])

    def test_a_reference_is_given_an_array(self):
        code = "__global__ void f(const float& edge, float* y, int &n) { y[threadIdx.x] = edge; n = blockDim.x; }"
        edge, y, n = np.array([2.5], np.float32), torch.zeros(3), np.zeros(1, np.int32)
        with cupyops.simulate():
            cupyops.RawKernel(code, "f")((1,), (3,), (edge, y, n))
        assert y.tolist() == [2.5] * 3 and n[0] == 3

    def test_a_variable_of_the_module(self):
        code = "__constant__ float by[2];\n__global__ void f(float* y) { y[threadIdx.x] *= by[threadIdx.x]; }"
        module, y = cupyops.RawModule(code=code), torch.ones(2)
        with cupyops.simulate():
            module.get_global("by").set([3, 4])
            module.get_function("f")((1,), (2,), (y,))
            with pytest.raises(InputError, match="no __device__ or __constant__ variable 'other'"):
                module.get_global("other")
        assert y.tolist() == [3, 4]

    def test_complex_numbers_of_cupy_s_headers(self):
        code = """#include <cupy/complex.cuh>
        __global__ void f(const float* x, float* y) {
          complex<float> a(x[threadIdx.x], 1.0f);
          y[threadIdx.x] = (a * a).imag();
        }
        """
        x, y = torch.arange(3.0), torch.zeros(3)
        with cupyops.simulate():
            cupyops.RawKernel(code, "f")((1,), (3,), (x, y))
        assert y.tolist() == [0, 2, 4]

    def test_attributes(self):
        kernel = cupyops.RawKernel(CODE, "add")
        kernel.max_dynamic_shared_size_bytes = 65536  # for which a launch asks itself
        if torch.cuda.is_available():
            assert kernel.attributes["num_regs"] > 0 and kernel.attributes["max_threads_per_block"] >= 256
        else:
            with pytest.raises(LaunchError, match="expected one, found none"):
                kernel.attributes  # noqa: B018
