"""group_norm: normalise groups of channels of each image."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import check
from ..common import clusters, segments
from ..common.gemm import divisor
from ..common.segments import accumulator, gradient_room, is_aligned, is_empty, is_there, spatial
from ..errors import InputError
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import suggested_format
from ..operator import operator

EIGHT = ((1, 128), (2, 256), (4, 1024), (8, 2048))  # packs of a thread, and of a block with those at most
FOUR = ((1, 128), (2, 256), (4, 2048))
HELD: dict[str, Any] = {"T": FLOATING, "K": (1, 2, 4, 8), "WHOLE": (False, True)}

group_norm_fwd = Kernel(
    "group_norm.cu", "group_norm_fwd<T, K, WHOLE>", **HELD, where=lambda T, K, WHOLE: WHOLE or K < 8
)
group_norm_moments = Kernel("group_norm.cu", "group_norm_moments<T>", T=FLOATING)
group_norm_fwd_wide = Kernel("group_norm.cu", "group_norm_fwd_wide<T>", T=FLOATING)
group_norm_bwd = Kernel(
    "group_norm.cu",
    "group_norm_bwd<T, K, WHOLE>",
    **HELD,
    where=lambda T, K, WHOLE: WHOLE or K < 8 or T is not torch.float64,
)
group_norm_bwd_sums = Kernel("group_norm.cu", "group_norm_bwd_sums<T>", T=FLOATING)
group_norm_bwd_wide = Kernel("group_norm.cu", "group_norm_bwd_wide<T>", T=FLOATING)
group_norm_bwd_parameters = Kernel("group_norm.cu", "group_norm_bwd_parameters<T>", T=FLOATING)


@operator("cupyops::group_norm", autocast="fp32")
def _group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # as in layer_norm: PyTorch's double backward asks for it
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _in_steps(x, num_groups, weight, bias, eps)
    return torch.nn.functional.group_norm(x, num_groups, weight, bias, eps)


def _in_steps(x, num_groups, weight, bias, eps):
    """The same of elementary operations."""
    wide = x.double() if x.dtype is torch.float64 else x.float()
    grouped = wide.reshape(x.shape[0], num_groups, x.shape[1] // num_groups * spatial(x))
    centred = grouped - grouped.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    shape = (x.shape[1], *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)).to(x.dtype)


@_group_norm.forward
def _(x, num_groups, weight, bias, eps):
    memory = _memory_format(x)
    x, weight, bias = _contiguous(x, weight, bias)
    y = torch.empty_like(x)
    rows = x.shape[0] * num_groups
    mean, rstd = (x.new_empty(shape, dtype=accumulator(x.dtype)) for shape in ((rows, 2), (rows,)))  # and its rounding
    if not is_there(x):
        return y.contiguous(memory_format=memory), (mean, rstd)
    size = x.shape[1] // num_groups * spatial(x)
    aligned = is_aligned(x) and is_aligned(y)
    division = _groups(num_groups, x.shape[1] // num_groups, spatial(x))
    whole = aligned and spatial(x) * x.element_size() % 16 == 0
    if held := _held(rows, size, x.element_size(), aligned, whole, clusters.exist(x.device)):
        args = (x, weight, bias, y, mean, rstd, division, rows, size, eps)
        held.launch(group_norm_fwd)(*args, T=x.dtype, K=held.packs, WHOLE=whole)
    else:
        plan = segments.runs(rows, 1, size, x.element_size(), aligned)
        parts = x.new_empty(plan.grid * 3, dtype=mean.dtype)
        group_norm_moments[plan.grid, plan.block](x, parts, plan.packed, T=x.dtype)
        launch = group_norm_fwd_wide[plan.grid, plan.block]
        launch(x, weight, bias, y, parts, mean, rstd, plan.packed, division, eps, T=x.dtype)
    return y.contiguous(memory_format=memory), (mean, rstd)


@_group_norm.backward
def _(saved, grad_y, x, num_groups, weight, bias, needs_grad):
    memory = _memory_format(x)
    grad_y, x, weight = _contiguous(grad_y, x, weight)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grad_weight, grad_bias = (
        gradient_room(p, x) if need else None for need, p in ((needs_grad.weight, weight), (needs_grad.bias, bias))
    )
    if is_there(x):
        sums, count = _sum_planes(grad_y, x, num_groups, weight, saved, grad_x)
        if grad_weight is not None or grad_bias is not None:
            images, channels = x.shape[:2]
            block = (8, min(128, max(8, 1 << (images - 1).bit_length())))
            launch = group_norm_bwd_parameters[ceil_div(channels, 8), block]
            launch(sums, grad_weight, grad_bias, images, channels, count, T=x.dtype)
    elif grad_weight is not None and is_empty(x) and x.shape[0]:
        grad_weight.fill_(float("nan"))  # images without pixels: 0 times their rstd, which is NaN
    return None if grad_x is None else grad_x.contiguous(memory_format=memory), grad_weight, grad_bias


def _sum_planes(grad_y, x, num_groups, weight, saved, grad_x):
    """grad_x, where it is wanted, and the sums of each plane, of so many parts."""
    images, channels, pixels = x.shape[0], x.shape[1], spatial(x)
    aligned = is_aligned(x) and is_aligned(grad_y) and (grad_x is None or is_aligned(grad_x))
    rows, size, itemsize = images * num_groups, channels // num_groups * pixels, x.element_size()
    division = _groups(num_groups, channels // num_groups, pixels)
    whole = aligned and pixels * itemsize % 16 == 0
    held = pixels * itemsize >= 16 and _held(rows, size, itemsize, aligned, whole, clusters.exist(x.device), True)
    if held:
        sums = x.new_empty(images * channels * held.blocks * 2, dtype=saved[0].dtype)
        pairs = held.packs * held.block[0] * held.block[1] * (1 if whole else 2)
        lanes = min(32, held.block[0] & -held.block[0], 1 << (pixels * itemsize // 64).bit_length())
        args = (grad_y, x, weight, *saved, grad_x, sums, division, rows, size, lanes)
        held.launch(group_norm_bwd, pairs * 2 * saved[0].element_size())(*args, T=x.dtype, K=held.packs, WHOLE=whole)
        return sums, held.blocks
    planes = _planes(images * channels, pixels, itemsize, aligned)
    sums = x.new_empty(images * channels * planes.parts * 2, dtype=saved[0].dtype)
    launch = group_norm_bwd_sums[planes.grid, planes.block]
    launch(grad_y, x, *saved, sums, planes.packed, channels // num_groups, images * channels, T=x.dtype)
    if grad_x is not None:
        plan = segments.runs(rows, 1, size, itemsize, aligned)
        launch = group_norm_bwd_wide[plan.grid, plan.block]
        launch(grad_y, x, weight, *saved, sums, grad_x, plan.packed, division, planes.parts, T=x.dtype)
    return sums, planes.parts


@_group_norm.unsupported
def _(x, num_groups, weight, bias, eps):
    return "2^31 elements of a group" if x.shape[1] // num_groups * spatial(x) >= 1 << 31 else None


@_group_norm.interface
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalisation over groups of channels; as `torch.nn.functional.group_norm` (arXiv:1803.08494).

    Args:
        input: shape (n, channels, *); fp16, bf16, fp32 or fp64.
        num_groups: into which the channels are split.
        weight: factors of shape (channels,), or None for 1.
        bias: summands of shape (channels,), or None for 0.
        eps: added to the (biased) variance.

    Returns:
        Tensor of the shape and dtype of `input`; on a GPU contiguous, as PyTorch's.

    Raises:
        InputError: an argument is no tensor, or of a wrong shape, dtype or device; `num_groups` does not divide the
            channels; a group is a single value.

    Example:
        >>> cupyops.group_norm(torch.tensor([[1.0, 3.0, 5.0, 9.0]]), 2)
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """
    check.floating("input", input)
    if input.dim() < 2:
        check.fail("input", input, "shape (n, channels, *)")
    if isinstance(num_groups, bool) or not isinstance(num_groups, (int, torch.SymInt)) or num_groups < 1:
        check.fail("num_groups", num_groups, "an int of at least 1")
    channels = input.shape[1]
    if channels % num_groups:
        check.fail("num_groups", num_groups, f"a divisor of the {channels} channels of input")
    if input.numel() and input.shape[0] * channels // num_groups * spatial(input) == 1:
        check.fail("input", input, "more than 1 value per channel")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        check.fail("eps", eps, "a number")
    given = {name: value for name, value in (("weight", weight), ("bias", bias)) if value is not None}
    for name, value in given.items():
        check.floating(name, value)
        if value.dim() != 1 or value.shape[0] != channels:
            check.fail(name, value, f"shape ({channels},), the channels of input")
        check.same_device(input=input, **{name: value})
    _check_dtypes(input, given)
    return _group_norm(input, num_groups, weight, bias, float(eps))


def _check_dtypes(input: Tensor, given: dict[str, Tensor]) -> None:
    """One dtype for all; or, as in PyTorch, what autocast will cast, and on a CPU float32 parameters for a half type."""
    on_cpu = input.device.type == "cpu"
    if not on_cpu and check.autocast(input.device):
        return
    wide = on_cpu and input.dtype.itemsize == 2 and all(value.dtype == torch.float32 for value in given.values())
    for name, value in given.items():
        if not wide and value.dtype != input.dtype:
            raise InputError(f"{name} is {value.dtype}, but input is {input.dtype}")


# --- layouts -----------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """How groups are held: `packs` in each thread of a block of (threads of a row, rows), `blocks` that share a row."""

    packs: int
    block: tuple[int, int]
    blocks: int
    grid: int

    def launch(self, kernel: Kernel, shared: int = 0) -> Callable[..., None]:
        if self.blocks == 1:
            return kernel[self.grid, self.block, shared] if shared else kernel[self.grid, self.block]
        return kernel.configure(self.grid, self.block, shared=shared, cluster=self.blocks)


@functools.lru_cache(maxsize=4096)
def _held(
    rows: int, size: int, itemsize: int, aligned: bool, whole: bool, in_clusters: bool, backward: bool = False
) -> Held | None:
    """None: a group is too long, or there are so few that more blocks are to share each."""
    total = segments.packs_of(size, itemsize, aligned)
    if total <= 32:
        packs = SMALL_PACKS if total > 8 else 1
        threads = 1 << (ceil_div(total, packs) - 1).bit_length()
        return Held(packs, (threads, 128 // threads), 1, ceil_div(rows, 128 // threads))
    blocks, fewer = (
        1,
        2 if itemsize == 8 and not whole else 1,
    )  # else backward asks for more shared memory than some have
    while blocks < segments.CLUSTER and in_clusters and total > blocks * PREFERRED // fewer:
        blocks *= 2
    each = ceil_div(total, blocks)
    table = EIGHT if whole or (backward and itemsize < 8) else FOUR
    packs = next((k for k, most in table if each <= (most // fewer if table is FOUR and k == 4 else most)), 0)
    if not packs or (rows * blocks < FEWEST and total > 4 * PREFERRED):
        return None
    return Held(packs, (ceil_div(each, 32 * packs) * 32, 1), blocks, rows * blocks)


SMALL_PACKS = 4  # in each thread of a group of at most 32: several groups share a warp
PREFERRED = 2048  # packs of a group that a block holds: more blocks find room
FEWEST = 64  # blocks that are worth while


@functools.lru_cache(maxsize=4096)
def _groups(num_groups: int, channels: int, pixels: int) -> np.ndarray:
    """`struct Groups`."""
    return np.array([num_groups, channels, *divisor(pixels)], dtype=np.int64)


@functools.lru_cache(maxsize=4096)
def _planes(planes, pixels, itemsize, aligned):
    """How planes are summed: several to a block where they are small."""
    plan = segments.runs(planes, 1, pixels, itemsize, aligned)
    total = segments.packs_of(pixels, itemsize, aligned)
    if total > 32:
        return plan._replace(block=(plan.block, 1))
    threads = 1 << (total - 1).bit_length()
    return plan._replace(block=(threads, 128 // threads), grid=ceil_div(planes, 128 // threads))


def _memory_format(x: Tensor) -> torch.memory_format:
    """Of the result: PyTorch keeps that of the input on a CPU alone."""
    return suggested_format(x) if x.device.type == "cpu" else torch.contiguous_format


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
