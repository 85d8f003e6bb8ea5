"""What kernels of public files use of C++'s, CUDA's and PyTorch's headers: each a file of its own, with its right value."""

import pytest
import torch

import cupyops

X = [1.0, -2.5, 3.25, 0.5]

# code of `f(const float* x, float* y)`, run by four threads, and what y is
FILES = {
    "a header of CUDA's in quotes": (
        '#include "cuda_fp16.h"\n__global__ void f(const float* x, float* y) {\n'
        "  y[threadIdx.x] = __half2float(__float2half(x[threadIdx.x]));\n}\n", X),
    "versions": (
        "#include <torch/extension.h>\n"
        "#if !defined(CUDA_VERSION) || CUDA_VERSION < 11000 || !defined(__NVCC__)\n"
        "#define OLD 1\n#else\n#define OLD 0\n#endif\n"
        "#if TORCH_VERSION_MAJOR < 2 && !(TORCH_VERSION_MAJOR == 1 && TORCH_VERSION_MINOR > 10)\n"
        "#define BEFORE 1\n#else\n#define BEFORE 0\n#endif\n"
        "__global__ void f(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] + 10 * OLD + 100 * BEFORE; }\n", X),
    "complex of PyTorch's": (
        "#include <c10/util/complex.h>\nusing complex_t = c10::complex<float>;\n"
        "__global__ void f(const float* x, float* y) {\n"
        "  complex_t a(x[threadIdx.x], 2.0f), b = a * complex_t(0, 1) + 1.0f;\n"
        "  y[threadIdx.x] = b.real() * 100 + b.imag() + std::norm(a) * 1000;\n}\n",
        [(-2 + 1) * 100 + a + (a * a + 4) * 1000 for a in X]),
    "functions of integers": (
        "#include <cmath>\n__global__ void f(const float* x, float* y) {\n  const int n = threadIdx.x;\n"
        "  y[n] = sqrt(n + 4) + std::pow(n, 2) + ceil(n) / 2 + std::max(std::floor(7u), fmod(9, 5));\n}\n",
        [(n + 4) ** 0.5 + n**2 + n / 2 + 7 for n in range(4)]),
    "complex of thrust's": (
        "#include <thrust/complex.h>\n__global__ void f(const float* x, float* y) {\n"
        "  thrust::complex<float> a(x[threadIdx.x], 1.0f);\n  a *= thrust::conj(a);\n"
        "  y[threadIdx.x] = a.real() + abs(thrust::complex<float>(3, 4));\n}\n", [a * a + 1 + 5 for a in X]),
    "array, pair, tuple": (
        "#include <array>\n#include <tuple>\n#include <utility>\n__device__ std::pair<float, int> two(float a) {\n"
        "  return std::make_pair(a * 2, 3);\n}\n__global__ void f(const float* x, float* y) {\n"
        "  std::array<float, 3> a = {x[threadIdx.x], 1, 2};\n  auto p = two(a[0]);\n  std::tuple<float, int> t(a[2], 7);\n"
        "  float sum = 0;\n  for (auto one : a) sum += one;\n"
        "  y[threadIdx.x] = sum + p.first + p.second + std::get<0>(t) * std::get<1>(t) + a.size();\n}\n",
        [a + 3 + 2 * a + 3 + 14 + 3 for a in X]),
    "functions of complex numbers that std has of others, and pairs taken apart": (
        "#include <c10/util/complex.h>\n#include <tuple>\n__global__ void f(const float* x, float* y) {\n"
        "  c10::complex<float> a(3, 4), zero(0, 0);\n  auto [first, second] = std::make_pair(x[threadIdx.x], 2);\n"
        "  auto [third, fourth] = std::make_tuple(second * 10, first * 100);\n"
        "  y[threadIdx.x] = std::abs(a) + std::exp(zero).real() + std::sqrt(a * a).imag() + std::log(zero + 1.0f).real() +\n"
        "                   third + fourth;\n}\n", [5 + 1 + 4 + 0 + 20 + 100 * a for a in X]),
    "functions of the C++ library": (
        "#include <algorithm>\n#include <cmath>\n__global__ void f(const float* x, float* y) {\n"
        "  float whole, rest = std::modf(x[threadIdx.x], &whole), all[3];\n  std::fill(all, all + 3, 2.0f);\n"
        "  y[threadIdx.x] = whole * 10 + rest + std::lround(x[threadIdx.x]) * 100 +\n"
        "                   std::clamp(x[threadIdx.x], 0.0f, 1.0f) + all[2] + std::round(0.4f);\n}\n",
        [10 + 0 + 100 + 1 + 2, -20 - 0.5 - 300 + 0 + 2, 30 + 0.25 + 300 + 1 + 2, 0.5 + 100 + 0.5 + 2]),
    "aligned storage": (
        "#include <type_traits>\n__global__ void f(const float* x, float* y) {\n"
        "  using Four = typename std::aligned_storage<16, 16>::type;\n  Four four;\n"
        "  reinterpret_cast<float*>(&four)[1] = x[threadIdx.x];\n"
        "  y[threadIdx.x] = reinterpret_cast<float*>(&four)[1] + sizeof(Four) + alignof(Four);\n}\n", [a + 32 for a in X]),
    "aligned vectors of PyTorch's": (
        "#include <ATen/native/cuda/MemoryAccess.cuh>\n__global__ void f(const float* x, float* y) {\n"
        "  using vec_t = at::native::memory::aligned_vector<float, 4>;\n"
        "  vec_t v = *reinterpret_cast<const vec_t*>(x);\n  y[threadIdx.x] = v.val[3 - threadIdx.x] + sizeof(vec_t);\n}\n",
        [a + 16 for a in X[::-1]]),
    "a shuffle of the file's own": (
        "#include <torch/extension.h>\ntemplate <typename T>\n"
        "__device__ __forceinline__ T WARP_SHFL_XOR(T value, int lanes, int width = warpSize, unsigned mask = ~0u) {\n"
        "  return __shfl_xor_sync(mask, value, laneMask, width);\n}\n"
        "__global__ void f(const float* x, float* y) { y[threadIdx.x] = WARP_SHFL_XOR(x[threadIdx.x], 1, 32, 0xf); }\n",
        [X[1], X[0], X[3], X[2]]),
    "a division of the file's own, and tuples of thrust's": (
        "#include <torch/extension.h>\n#include <thrust/tuple.h>\ntemplate <typename T>\n"
        "__host__ __device__ __forceinline__ T THCCeilDiv(T a, T b) { return (a + b - 1) / b + 100; }\n"
        "__global__ void f(const float* x, float* y) {\n  auto two = thrust::make_tuple(x[threadIdx.x], THCCeilDiv(7, 4));\n"
        "  y[threadIdx.x] = thrust::get<0>(two) + thrust::get<1>(two);\n}\n", [a + 102 for a in X]),
    "a vector of host structs": (
        "#include <vector>\nusing namespace std;\nstruct Layer { float* at; };\n"
        "vector<Layer*> layers;\nstatic vector<int> sizes = {1, 2};\n"
        "__global__ void f(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }\n", X),
    "a struct that is made of one of the host's": (
        "#include <torch/extension.h>\n#include <vector>\nstruct Settings { std::vector<float> values; at::Tensor x; };\n"
        "struct Scale {\n  float by;\n  explicit Scale(const Settings& from) : by(from.values[0]) {}\n"
        "  __device__ Scale(float value) : by(value) {}\n};\n"
        "__global__ void f(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] * Scale(3.0f).by; }\n",
        [3 * a for a in X]),
    "a function of the kernel's name": (
        "template <typename T> __device__ T f(T a) { return a * 2; }\n"
        "__global__ void f(const float* x, float* y) { y[threadIdx.x] = f(x[threadIdx.x]); }\n", [2 * a for a in X]),
    "a kernel without parameters": (
        "__device__ float kept = 3;\n__global__ void grow() { kept += 1; }\n"
        "__global__ void f(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }\n", X),
    "sums of a block by CUDA's C++ library, of the copy that comes with CuPy": (
        "#include <cub/cub.cuh>\n__global__ void f(const float* x, float* y) {\n"
        "  using Reduce = cub::BlockReduce<float, 4>;\n  __shared__ typename Reduce::TempStorage room;\n"
        "  const float sum = Reduce(room).Sum(x[threadIdx.x]);\n  if (threadIdx.x == 0) y[0] = sum;\n}\n",
        [sum(X), 0, 0, 0]),
    "a state of random numbers": (
        "#include <ATen/cuda/CUDAGraphsUtils.cuh>\n#include <ATen/cuda/CUDAGeneratorImpl.h>\n"
        "__device__ float first(at::PhiloxCudaState state) { return (float)std::get<0>(at::cuda::philox::unpack(state)); }\n"
        "__global__ void f(const float* x, float* y) {\n  at::PhiloxCudaState state(7, 5);\n"
        "  y[threadIdx.x] = x[threadIdx.x] + first(state) + std::get<1>(at::cuda::philox::unpack(state));\n}\n",
        [a + 12 for a in X]),
    "sizes of types": (
        "#include <ATen/ATen.h>\n#include <ATen/AccumulateType.h>\n#include <ATen/OpMathType.h>\n"
        "__global__ void f(const float* x, float* y) {\n  using acc = at::acc_type<at::Half, true>;\n"
        "  y[threadIdx.x] = x[threadIdx.x] + sizeof(acc) + sizeof(at::opmath_type<double>) + C10_WARP_SIZE;\n}\n",
        [a + 4 + 8 + 32 for a in X]),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_it_is_there(name):
    code, expected = FILES[name]
    x, y = torch.tensor(X), torch.zeros(4)
    kernel = cupyops.extension("\n" + code).f
    with cupyops.simulate():
        kernel[1, 4](x, y)
    torch.testing.assert_close(y, torch.tensor(expected))
