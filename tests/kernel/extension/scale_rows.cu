// A C++ extension of our own, in the style of those that people have: y[r][c] = x[r][c] * w[c], and the gradients.
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>

#include <vector>

#include "scale_rows.h"

namespace {

constexpr int kThreads = 64;
const char* const kAbout = R"(a string with a " and a brace { in it)";

template <typename scalar_t>
__device__ __forceinline__ scalar_t product(scalar_t a, scalar_t b) {
  return a * b;
}

// a macro that stands for the mark of device code
HELPER float clamped(float x) { return std::min(std::max(x, -std::numeric_limits<float>::max()), FLT_MAX); }

struct HostOnly {
  at::Tensor x;
  std::vector<int> sizes{1, 2};
};

template <typename scalar_t>
__global__ void scale_rows_forward_kernel(
    const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> x, const scalar_t* __restrict__ w,
    torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> y) {
  static_assert(!std::is_same<scalar_t, int>::value, "numbers with a fraction");
  const int rows = x.size(0), columns = x.size(1);
  CUDA_KERNEL_LOOP(i, rows * columns) {
    const int r = i / columns, c = i % columns;
    y[r][c] = product(x[r][c], w[c]);
  }
}

template <typename scalar_t>
__global__ void scale_rows_backward_kernel(
    const scalar_t* __restrict__ grad_y, const scalar_t* __restrict__ x, const scalar_t* __restrict__ w,
    scalar_t* __restrict__ grad_x, float* __restrict__ grad_w, int64_t rows, int64_t columns) {
  CUDA_1D_KERNEL_LOOP(i, rows * columns) {
    const int c = i % columns;
    grad_x[i] = grad_y[i] * w[c];
    gpuAtomicAdd(grad_w + c, clamped(static_cast<float>(grad_y[i]) * static_cast<float>(x[i])));
  }
}

}  // namespace

at::Tensor scale_rows_forward(at::Tensor x, at::Tensor w) {
  CHECK_INPUT(x);
  TORCH_CHECK(x.size(1) == w.size(0), "x and w must have as many columns");
  auto y = at::empty_like(x);
  const int threads = kThreads;
  const dim3 blocks((x.numel() + threads - 1) / threads);
  if (x.numel() == 0) return y;
  AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "scale_rows_forward", ([&] {
    scale_rows_forward_kernel<scalar_t><<<blocks, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(), w.data_ptr<scalar_t>(),
        y.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>());
  }));
  AT_CUDA_CHECK(cudaGetLastError());
  return y;
}

std::vector<at::Tensor> scale_rows_backward(at::Tensor grad_y, at::Tensor x, at::Tensor w) {
  CHECK_INPUT(grad_y);
  auto grad_x = torch::empty_like(x);
  auto grad_w = torch::zeros({w.size(0)}, x.options().dtype(torch::kFloat32));
  AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "scale_rows_backward", [&] {
    scale_rows_backward_kernel<<<BLOCKS(x.numel(), kThreads), kThreads>>>(
        grad_y.data_ptr<scalar_t>(), x.data_ptr<scalar_t>(), w.data_ptr<scalar_t>(), grad_x.data_ptr<scalar_t>(),
        grad_w.data_ptr<float>(), x.size(0), x.size(1));
  });
  return {grad_x, grad_w.to(w.scalar_type())};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &scale_rows_forward, "scale rows, forward");
  m.def("backward", &scale_rows_backward, "scale rows, backward");
}
