#pragma once
#include <torch/extension.h>

#define CHECK_CONTIGUOUS(x) TORCH_CHECK(x.is_contiguous(), #x " must be contiguous")
#define CHECK_INPUT(x) CHECK_CONTIGUOUS(x)
#define HELPER static __device__ __forceinline__
#define BLOCKS(n, threads) (((n) + (threads) - 1) / (threads))

at::Tensor scale_rows_forward(at::Tensor x, at::Tensor w);
