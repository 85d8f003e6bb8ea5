"""grouped_mm: products of groups of rows, each with a matrix of its own, as of the experts of a mixture."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch.core import library, shardings
from .._dispatch.core.gpu import gpu
from .._dispatch.core.rows import is_symbolic
from .._dispatch.gemm import gemm, grouped
from .._operator.define import operator
from .._util import arguments, torch_private
from .._util.strides import aligned, is_dry
from ..errors import InputError


@operator("cupyops::grouped_mm", autocast="lower", dtypes=gemm.HALF, sharding=shardings.grouped_mm)
def _grouped_mm(input: Tensor, mat2: Tensor, offs: Tensor | None, turned: bool = False) -> Tensor:
    if offs is None:
        return torch.bmm(input, mat2)
    if not torch_private.functorch_active() and _pytorch_takes(input) and _pytorch_takes(mat2):
        return F.grouped_mm(input, mat2, offs=offs)
    if _hidden():
        return _by_masks(input, mat2, offs)
    return _of_one_group(input, mat2, offs) if is_dry(offs) else _by_slices(input, mat2, offs)


@_grouped_mm.forward
def forward(input, mat2, offs, turned):
    if input.dim() == 2 and mat2.dim() == 3:
        return grouped.multiply_rows(input, mat2, offs), ()
    # a dry run alone: the reference computes the others
    groups = (
        mat2.shape[:1] if mat2.dim() == 3 and input.dim() == 3 else offs.shape if mat2.dim() == 2 == input.dim() else ()
    )
    return input.new_empty((*groups, input.shape[-2], mat2.shape[-1])), ()


@_grouped_mm.backward(reads={"input": ("mat2",), "mat2": ("input",)}, apart=True)
def backward(saved, grad_y, input, mat2, offs, turned, needs_grad):
    grad_input = grad_mat2 = None
    if input.dim() == 3 or mat2.dim() == 2:  # as above
        return input.new_empty(input.shape), mat2.new_empty(mat2.shape)
    if needs_grad.input:
        grad_input = grouped.multiply_rows(grad_y, mat2.mT, offs)
    if needs_grad.mat2 and turned:  # as a transposed weight lies
        grad_mat2 = grouped.multiply_shares(grad_y, input, offs).mT
    elif needs_grad.mat2:
        grad_mat2 = grouped.multiply_shares(input, grad_y, offs)
    return grad_input, grad_mat2


@_grouped_mm.unsupported
def unsupported(input, mat2, offs, turned):
    if input.dim() != 2 or mat2.dim() != 3:
        return "other than groups of rows, each with a matrix of its own"
    if is_symbolic(*input.shape, *mat2.shape):
        return None
    problem, card = grouped.rows_problem(input, mat2), gpu(input.device)
    if reason := grouped.ROWS.list[0].why_not(problem, card):
        return reason
    return library.faster(grouped.ROWS, problem, input.device) if input.is_cuda else None


def _pytorch_takes(x: Tensor) -> bool:
    """Return True if PyTorch has a kernel for an operand, without waiting for the device to know the groups."""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    steps = sorted(x.stride()[-2:])
    return steps[0] == 1 and steps[1] % grouped.VECTOR == 0 and steps[1] >= min(x.shape[-2:]) and aligned(x)


def _hidden() -> bool:
    """Return True if the values of offs must not be read, or may not be those of later calls of what is recorded."""
    recorded = torch_private.proxy_mode() or torch.jit.is_tracing() or torch.compiler.is_compiling()
    return recorded or torch_private.functorch_active()


def _by_slices(input: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:
    """One product after the other; rows or columns of no group are zeros."""
    size = _shared_size(input, mat2)
    ends = [0, *offs.tolist(), size]
    sizes = [end - first for first, end in itertools.pairwise(ends)]
    if any(one < 0 for one in sizes):
        raise InputError(f"offs is {ends[1:-1]}, expected ends of groups that do not decrease, from 0 to {size}")
    if mat2.dim() == 3:
        parts = [a @ b for a, b in zip(input.split(sizes), mat2.unbind())]
        return torch.cat([*parts, input.new_zeros((sizes[-1], mat2.shape[2]))])
    if input.dim() == 3:
        parts = [a @ b for a, b in zip(input.unbind(), mat2.split(sizes, 1))]
        return torch.cat([*parts, mat2.new_zeros((input.shape[1], sizes[-1]))], 1)
    if len(sizes) == 1:
        return input.new_zeros((0, input.shape[0], mat2.shape[1]))
    return torch.stack([a @ b for a, b in zip(input.split(sizes, 1)[:-1], mat2.split(sizes))])


def _by_masks(input: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:
    """Compute the products whatever the values of offs: for each group one of all rows, masked to zero outside the group."""
    at = torch.arange(_shared_size(input, mat2), device=offs.device)
    firsts = torch.cat([torch.zeros_like(offs[:1]), offs[:-1]])
    inside = (at >= firsts[:, None]) & (at < offs[:, None])
    a = input if input.dim() == 3 else torch.where(inside[:, :, None] if mat2.dim() == 3 else inside[:, None], input, 0)
    b = mat2 if mat2.dim() == 3 else torch.where(inside[:, :, None] if input.dim() == 2 else inside[:, None], mat2, 0)
    if input.dim() == mat2.dim():
        return a @ b
    return torch.where(inside[:, :, None] if mat2.dim() == 3 else inside[:, None], a @ b, 0).sum(0)


def _of_one_group(input: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:
    """Make a result of the right shape by as many operations as all groups take together."""
    y = input.flatten(0, -2)[: input.shape[-2]] @ mat2.flatten(0, -2)[: mat2.shape[-2]]
    return y.expand(*offs.shape, *y.shape).contiguous() if input.dim() == mat2.dim() else y


def _shared_size(input: Tensor, mat2: Tensor) -> int:
    """Size of the dimension that groups divide."""
    return input.shape[0] if mat2.dim() == 3 else mat2.shape[0 if input.dim() == 2 else 1]


@_grouped_mm.interface
def grouped_mm(
    input: Tensor,
    mat2: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of groups, as of the experts of a mixture; as `torch.nn.functional.grouped_mm`.

    Group g is what lies from offs[g - 1], or 0, to offs[g] of the dimension that a matrix shares with all groups:

        (rows, k) with (groups, k, n)     each group's rows with its matrix          (rows, n)
        (groups, m, k) with (k, columns)  each group's matrix with its columns       (m, columns)
        (m, k) with (k, n)                each group's share of k                    (groups, m, n)
        (groups, m, k) with (groups, k, n), without offs                             (groups, m, n)

    On Hopper a kernel computes the first in fp16 and bf16, and its gradients, without waiting for the device to know the
    groups. Rows and columns of no group, from offs[-1] on, are zeros where PyTorch's own function is not taken, which leaves
    there whatever memory held.

    Args:
        input: a matrix of all groups, or one of each; any dtype, summed in fp32 in half types.
        mat2: the same, of the dtype of `input`. It may be a transposed view: its gradient is then laid out as it is.
        offs: int32, (groups,): where each group ends, on the device of `input`. It does not decrease, which is checked where
            that costs no wait for a GPU.
        bias: None: as in PyTorch, none is added.
        out_dtype: None, or the dtype of `input`, as in PyTorch.

    Returns:
        Tensor, of the shape above.

    Raises:
        InputError: shapes, dtypes or devices do not fit; `offs` is missing, not int32, or given for two of three dimensions;
            `bias` or another `out_dtype` is given.

    Example:
        >>> x, experts = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.stack([torch.eye(2), 10 * torch.eye(2)])
        >>> cupyops.grouped_mm(x, experts, offs=torch.tensor([1, 3], dtype=torch.int32))
        tensor([[ 1.,  2.],
                [30., 40.],
                [50., 60.]])
    """
    arguments.tensor("input", input)
    arguments.tensor("mat2", mat2)
    arguments.optional_tensor("offs", offs)
    arguments.same_device(input=input, mat2=mat2, offs=offs)
    gemm.check_dtypes(input=input, mat2=mat2)
    _check(input, mat2, offs)
    if bias is not None:
        raise InputError("bias is given, expected None: as in PyTorch, none is added; add each row's to the result")
    if out_dtype is not None and out_dtype != input.dtype:
        raise InputError(f"out_dtype is {out_dtype}, expected that of input, {input.dtype}; cast the result")
    return _grouped_mm(input, mat2, offs, mat2.dim() == 3 and mat2.stride(1) == 1 != mat2.stride(2))


def _check(input: Tensor, mat2: Tensor, offs: Tensor | None) -> None:
    for name, value in (("input", input), ("mat2", mat2)):
        if value.dim() not in (2, 3):
            arguments.fail(name, value, "2 or 3 dimensions")
    shape = f"input of shape {tuple(input.shape)}"
    if mat2.shape[-2] != input.shape[-1]:
        raise InputError(f"mat2 has shape {tuple(mat2.shape)}, expected (..., {input.shape[-1]}, n) to fit {shape}")
    if input.dim() == mat2.dim() == 3:
        if offs is not None:
            raise InputError("offs is given, expected None where input and mat2 have a matrix for each group")
        if input.shape[0] != mat2.shape[0]:
            raise InputError(f"mat2 has shape {tuple(mat2.shape)}, expected ({input.shape[0]}, ...) to fit {shape}")
        return
    if offs is None:
        raise InputError("offs is None, expected where each group ends, as input or mat2 is a matrix of all groups")
    if offs.dtype is not torch.int32 or offs.dim() != 1:
        arguments.fail("offs", offs, "torch.int32 and 1 dimension")
    groups = mat2.shape[0] if mat2.dim() == 3 else input.shape[0] if input.dim() == 3 else offs.shape[0]
    if offs.shape[0] != groups:
        raise InputError(f"offs has shape {tuple(offs.shape)}, expected ({groups},), an end for each matrix")
