"""Products of fp32 for which PyTorch's flags allow TF32: cuBLAS has a third of its speed where rows are no whole vectors.

PyTorch's own and the product of copies on an H100, in us, in turns, where both gradients are asked for:

    m, n, k            forward        gradients
    4097x4095x4088     1029    569    2184   1320
    4096x4096x4095     1040    461    2127   1109
    4096x4095x4096     1068    449    2118   1088
    8192x4097x4096     2045    899    4217   2239
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._kernel.kernel import ceil_div
from ..._util.strides import aligned
from ..core import library
from ..core.forms import Form, Library
from ..core.gpu import Gpu
from . import gemm

WIDTH = 4  # numbers of a vector
LEAST = 4097 * 4095 * 4088  # multiply-adds: the smallest product that is measured to gain


class InVectors(Form[gemm.Problem]):
    """PyTorch's own product, which follows its flags; where it would be slow, of copies."""

    name = "pytorch_in_vectors"
    measured = "1.81 to 2.38 times as fast as PyTorch's own forward, 1.65 to 1.95 times in both gradients, on an H100"
    summary = "PyTorch's own product of copies whose rows begin at 16 bytes, where its flags allow TF32"

    def why_not(self, problem: gemm.Problem, gpu: Gpu) -> str | None:
        """It runs on GPUs, where PyTorch's own functions are allowed."""
        if not gpu.library:
            return "kernels of ours alone are to run, as in the simulator"
        if problem.dtype is not torch.float32 or problem.batches != 1 or not problem.n:
            return "it is for matrices of fp32"
        return None

    def why_slower(self, problem: gemm.Problem, gpu: Gpu) -> str | None:
        """Measured on an H100."""
        if not problem.tf32:
            return "PyTorch's flags ask for products of fp32 without TF32, which are as fast in any rows"
        if gpu.capability != 9 or problem.m * problem.n * problem.k < LEAST:
            return "copies are measured to pay in large products on Hopper alone"
        whole = all(problem.in_vectors) and problem.out.i % 4 == 0
        return "its rows are whole vectors already" if whole else None

    def launch(self, problem: gemm.Problem, gpu: Gpu) -> Library:
        """Nothing of ours."""
        return Library(self.name)


def asked(problem: gemm.Problem) -> gemm.Problem:
    """The problem under PyTorch's flags."""
    if problem.dtype is not torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return problem
    return problem._replace(tf32=True)


def of_convolutions(x: Tensor) -> bool:
    """Return True if PyTorch's flags allow cuDNN to round this tensor to TF32, as they do by default."""
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return x.dtype is torch.float32 and precision == "tf32"


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = a b + bias of matrices, y contiguous: of copies, in which zeros fill every size up to a multiple of a vector."""
    a, b, y = _filled(a), _filled(b), y.view(a.shape[0], b.shape[1])
    if bias is not None:
        bias = torch.nn.functional.pad(bias, (0, b.shape[1] - bias.shape[0]))
    if y.shape == (a.shape[0], b.shape[1]) and aligned(y):
        return library.multiply(a, b, bias, y)
    whole = y.new_empty(a.shape[0], b.shape[1])
    library.multiply(a, b, bias, whole)
    y.copy_(whole[: y.shape[0], : y.shape[1]])


def _filled(matrix: Tensor) -> Tensor:
    """Return the matrix padded to whole vectors in both dimensions, or itself if it has them."""
    if matrix.stride(0) == 1 and matrix.stride(1) != 1:
        return _filled(matrix.T).T
    rows, columns = matrix.shape
    sizes = ceil_div(rows, WIDTH) * WIDTH, ceil_div(columns, WIDTH) * WIDTH
    if matrix.shape == sizes and matrix.stride(1) == 1 and matrix.stride(0) % WIDTH == 0 and aligned(matrix):
        return matrix
    copy = matrix.new_empty(sizes)
    copy[:rows, :columns].copy_(matrix)
    copy[:rows, columns:].zero_()
    copy[rows:].zero_()
    return copy
