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

HELD = ((4, 512), (8, 2048))  # packs of a thread, and of a block with those at most
LANES = (1, 4)  # threads of a small plane
# (threads, packs of 16 bytes in each) that hold a short group, of which the first that does is taken: in forward the fewest,
# in backward rather fewer packs
SHORT_FORWARD = ((8, 7), (16, 4), (16, 7), (32, 4), (32, 7), (64, 4), (64, 7), (128, 4), (128, 7))
SHORT_BACKWARD = ((16, 4), (32, 4), (64, 4), (128, 4), (128, 7))
SHORTER = {8: ((8, 7), (16, 7)), 4: ((8, 7), (16, 7), (32, 7))}  # the same of packs of 8 bytes, or 4

DOMAIN: dict[str, Any] = dict(
    T=FLOATING, K=(1, 4, 8), MIXED=(False, True), where=lambda T, K, MIXED: K > 1 or not MIXED
)
SMALL: dict[str, Any] = dict(T=FLOATING, LANES=LANES, where=lambda T, LANES: LANES == 1 or T.itemsize != 4)


def _short_domain(divisions: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    there = {16: divisions, **SHORTER}
    return dict(
        T=FLOATING,
        BYTES=(4, 8, 16),
        THREADS=(8, 16, 32, 64, 128),
        K=(4, 7),
        where=lambda T, BYTES, THREADS, K: T.itemsize <= 4 and (THREADS, K) in there[BYTES],
    )


group_norm_fwd = Kernel("group_norm.cu", "group_norm_fwd<T, K, MIXED>", **DOMAIN)
group_norm_fwd_short = Kernel(
    "group_norm_short.cu", "group_norm_fwd_short<T, BYTES, THREADS, K>", **_short_domain(SHORT_FORWARD)
)
group_norm_fwd_small = Kernel("group_norm.cu", "group_norm_fwd_small<T, LANES>", **SMALL)
group_norm_moments = Kernel("group_norm_wide.cu", "group_norm_moments<T>", T=FLOATING)
group_norm_fwd_wide = Kernel("group_norm_wide.cu", "group_norm_fwd_wide<T>", T=FLOATING)
group_norm_bwd = Kernel("group_norm.cu", "group_norm_bwd<T, K, MIXED>", **DOMAIN)
group_norm_bwd_short = Kernel(
    "group_norm_short.cu", "group_norm_bwd_short<T, BYTES, THREADS, K>", **_short_domain(SHORT_BACKWARD)
)
group_norm_bwd_small = Kernel("group_norm.cu", "group_norm_bwd_small<T, LANES>", **SMALL)
group_norm_bwd_sums = Kernel("group_norm_wide.cu", "group_norm_bwd_sums<T>", T=FLOATING)
group_norm_bwd_wide = Kernel("group_norm_wide.cu", "group_norm_bwd_wide<T>", T=FLOATING)
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
    channels, pixels, itemsize = x.shape[1] // num_groups, spatial(x), x.element_size()
    size, aligned, in_clusters = channels * pixels, is_aligned(x) and is_aligned(y), clusters.exist(x.device)
    division = _groups(num_groups, channels, pixels)
    given, options = (x, weight, bias, y, mean, rstd), (division, rows, size, eps)
    if aligned and (short := _short(rows, channels, pixels, itemsize, SHORT_FORWARD)):
        launch = group_norm_fwd_short[short.grid, short.block, short.block[1] * (channels + 1) * (4 * itemsize)]
        rest = division, _images(num_groups), rows, size, eps
        launch(*given, *rest, T=x.dtype, BYTES=short.bytes, THREADS=short.block[0], K=short.packs)
    elif aligned and (held := _held(rows, channels, pixels, itemsize, in_clusters)):
        held.launch(group_norm_fwd)(*given, *options, T=x.dtype, K=held.packs, MIXED=held.mixed)
    elif aligned and (small := _small(rows, channels, pixels, itemsize, in_clusters, 1)):
        launch = small.launch(group_norm_fwd_small, small.room * 16)
        launch(*given, small.of_block, *options, T=x.dtype, LANES=small.lanes)
    else:
        plan = segments.runs(rows, 1, size, itemsize, aligned)
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
            _add(sums, grad_weight, grad_bias, x.shape[0], x.shape[1], count, x.dtype)
    elif grad_weight is not None and is_empty(x) and x.shape[0]:
        grad_weight.fill_(float("nan"))  # images without pixels: 0 times their rstd, which is NaN
    return None if grad_x is None else grad_x.contiguous(memory_format=memory), grad_weight, grad_bias


def _sum_planes(grad_y, x, num_groups, weight, saved, grad_x):
    """grad_x, where it is wanted, and the sums of each plane, of so many parts."""
    images, channels, pixels = x.shape[0], x.shape[1], spatial(x)
    aligned = is_aligned(x) and is_aligned(grad_y) and (grad_x is None or is_aligned(grad_x))
    rows, each, itemsize = images * num_groups, channels // num_groups, x.element_size()
    size, in_clusters, kept = each * pixels, clusters.exist(x.device), saved[0].dtype
    division = _groups(num_groups, each, pixels)
    given = (grad_y, x, weight, *saved, grad_x)
    if aligned and (short := _short(rows, each, pixels, itemsize, SHORT_BACKWARD)):
        sums = x.new_empty(images * channels * 2, dtype=kept)
        shared = short.block[1] * (short.packs * short.block[0] + 3 * (each + 1)) * 2 * kept.itemsize
        options = division, _images(num_groups), rows, size, _summing(short.block[0], pixels, itemsize)
        launch = group_norm_bwd_short[short.grid, short.block, shared]
        launch(*given, sums, *options, T=x.dtype, BYTES=short.bytes, THREADS=short.block[0], K=short.packs)
        return sums, 1
    if aligned and (held := _held(rows, each, pixels, itemsize, in_clusters)):
        sums = x.new_empty(images * channels * held.blocks * 2, dtype=kept)
        shared = held.block[1] * held.packs * held.block[0] * 2 * kept.itemsize
        lanes = _summing(held.block[0], pixels, itemsize)
        launch = held.launch(group_norm_bwd, shared)
        launch(*given, sums, division, rows, size, lanes, T=x.dtype, K=held.packs, MIXED=held.mixed)
        return sums, held.blocks
    if aligned and (small := _small(rows, each, pixels, itemsize, in_clusters, 2)):
        sums = x.new_empty(images * channels * 2, dtype=kept)
        launch = small.launch(group_norm_bwd_small, small.room * 32)
        launch(*given, sums, small.of_block, division, rows, size, small.room, T=x.dtype, LANES=small.lanes)
        return sums, 1
    planes = _planes(images * channels, pixels, itemsize, aligned)
    sums = x.new_empty(images * channels * planes.parts * 2, dtype=kept)
    launch = group_norm_bwd_sums[planes.grid, planes.block]
    launch(grad_y, x, *saved, sums, planes.packed, each, images * channels, T=x.dtype)
    if grad_x is not None:
        plan = segments.runs(rows, 1, size, itemsize, aligned)
        launch = group_norm_bwd_wide[plan.grid, plan.block]
        launch(grad_y, x, weight, *saved, sums, grad_x, plan.packed, division, planes.parts, T=x.dtype)
    return sums, planes.parts


def _summing(threads, pixels, itemsize):
    """How many of a row's threads sum what packs hold of a channel."""
    return min(32, threads & -threads, 1 << (pixels * itemsize // 64).bit_length())


def _add(sums, grad_weight, grad_bias, images, channels, count, dtype):
    """The gradients of the parameters; of many images and few channels, parts of the images first."""
    blocks = ceil_div(channels, FINISHED)
    each = max(MOST_IMAGES, ceil_div(images, max(1, FINISHERS // blocks)))
    if images > each:
        parts = sums.new_empty(ceil_div(images, each) * channels * 2)
        launch = group_norm_bwd_parameters.configure((blocks, ceil_div(images, each)), (FINISHED, 128), overlap=True)
        launch(sums, None, None, parts, images, each, channels, count, T=dtype)
        sums, images, count = parts, ceil_div(images, each), 1
    block = (FINISHED, min(128, max(8, 1 << (images - 1).bit_length())))
    launch = group_norm_bwd_parameters.configure(blocks, block, overlap=True)
    launch(sums, grad_weight, grad_bias, None, images, images, channels, count, T=dtype)


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
    _check(input, num_groups, weight, bias, eps)
    return _group_norm(input, num_groups, weight, bias, float(eps))


def _check(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
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
    """How registers hold groups: `packs` in each thread of a block of (threads of a row, rows), `blocks` that
    share a row; mixed: a pack may have elements of two channels."""

    packs: int
    mixed: bool
    block: tuple[int, int]
    blocks: int
    grid: int

    def launch(self, kernel: Kernel, shared: int = 0) -> Callable[..., None]:
        return _launch(kernel, self.grid, self.block, self.blocks, shared)


class Short(NamedTuple):
    """How a few threads hold a short group: `packs` of so many `bytes` in each, in a block of (threads of a group,
    groups)."""

    packs: int
    bytes: int
    block: tuple[int, int]
    grid: int


class Small(NamedTuple):
    """How shared memory holds groups of small planes: a block has so many, `lanes` threads each, and `room` packs for a
    tensor."""

    of_block: int
    lanes: int
    room: int
    block: tuple[int, int]
    blocks: int
    grid: int

    def launch(self, kernel: Kernel, shared: int) -> Callable[..., None]:
        return _launch(kernel, self.grid, self.block, self.blocks, shared)


def _launch(kernel: Kernel, grid: int, block: tuple[int, int], blocks: int, shared: int) -> Callable[..., None]:
    if blocks == 1:
        return kernel[grid, block, shared] if shared else kernel[grid, block]
    return kernel.configure(grid, block, shared=shared, cluster=blocks)


@functools.lru_cache(maxsize=4096)
def _held(rows: int, channels: int, pixels: int, itemsize: int, in_clusters: bool) -> Held | None:
    """None: a group is too long, or there are so few that more blocks are to share each; or it is short or small."""
    size, mixed = channels * pixels * itemsize, pixels * itemsize % 16 != 0
    total = size // 16
    if _is_small(channels * pixels, pixels, itemsize):
        return None
    if total <= WARP_PACKS:
        packs = SMALL_PACKS if total > 8 else 1
        threads = 1 << (ceil_div(total, packs) - 1).bit_length()
        return Held(packs, mixed, (threads, 128 // threads), 1, ceil_div(rows, 128 // threads))
    blocks = 1
    while blocks < segments.CLUSTER and in_clusters and total > blocks * PREFERRED:
        blocks *= 2
    each = ceil_div(total, blocks)
    packs = next((k for k, most in HELD if each <= most), 0)
    if not packs or (rows * blocks < FEWEST and total > 4 * PREFERRED):
        return None
    return Held(packs, mixed, (ceil_div(each, 32 * packs) * 32, 1), blocks, rows * blocks)


@functools.lru_cache(maxsize=4096)
def _short(
    rows: int, channels: int, pixels: int, itemsize: int, divisions: tuple[tuple[int, int], ...]
) -> Short | None:
    """None: planes are whole packs, or small; a group is too long, or is no whole packs of 4 bytes and more; or there are
    more than an int counts."""
    size, plane = channels * pixels * itemsize, pixels * itemsize
    if plane % 16 == 0 or plane < 16 or size < SHORTEST or size % 4 or itemsize > 4 or rows >= 1 << 30:
        return None
    pack = min(16, size & -size)
    if pack < 16:
        if not _is_short(size):
            return None
        divisions = SHORTER[pack]
    threads, packs = next(((n, k) for n, k in divisions if size <= n * k * pack), (0, 0))
    if not threads:
        return None
    return Short(packs, pack, (threads, 128 // threads), ceil_div(rows, 128 // threads))


@functools.lru_cache(maxsize=4096)
def _small(rows: int, channels: int, pixels: int, itemsize: int, in_clusters: bool, tensors: int) -> Small | None:
    """None: a group is too long, or there are so few, as `_held` has it; or it is that one's. `_short` goes first."""
    size = channels * pixels
    if not _is_small(size, pixels, itemsize):
        return None
    lanes = next((n for n in LANES if pixels * itemsize <= FEW * n), LANES[-1])
    if itemsize == 4:
        lanes = 1  # larger planes of floats are short groups, but for 2^30 of them
    blocks, most = 1, ROOM[in_clusters] // (16 * tensors)  # packs
    while blocks < segments.CLUSTER and in_clusters and _room(ceil_div(channels, blocks) * pixels, itemsize) > most:
        blocks *= 2
    of_block = ceil_div(channels, blocks)
    if _room(of_block * pixels, itemsize) > most or (rows * blocks < FEWEST and size * itemsize // 16 > 4 * PREFERRED):
        return None
    threads, together = min(SMALL_THREADS, ceil_div(of_block * lanes, 32) * 32), 1
    if blocks == 1 and of_block * lanes <= 32:
        threads = 1 << (of_block * lanes - 1).bit_length()
        together = 128 // threads
        while together * threads > 32 and _room(together * size, itemsize) > most:
            together //= 2
    room = _room(together * min(of_block * pixels, size), itemsize)
    return Small(of_block, lanes, room, (threads, together), blocks, ceil_div(rows, together) * blocks)


def _is_small(size: int, pixels: int, itemsize: int) -> bool:
    """Of `size` elements: many packs of 16 bytes would have several channels; or a short group that is no whole packs."""
    plane = pixels * itemsize
    return (plane < SMALL_PLANE and plane % 16 != 0) or _is_short(size * itemsize)


def _is_short(size: int) -> bool:
    """Of so many bytes: no whole packs of 16, but whole ones that are shorter may do."""
    return size % 16 != 0 and size // 16 <= NOT_WHOLE


def _room(size: int, itemsize: int) -> int:
    return segments.packs_of(size, itemsize, False)


WARP_PACKS = 128  # of a group, at most, that a warp holds, or a part of one
SMALL_PACKS = 4  # in each thread of such a group
NOT_WHOLE = 32  # packs of 16 bytes, at most, of a group that shorter ones may hold
SHORTEST = 64  # bytes of one for which that is worth while
PREFERRED = 2048  # packs of a group that a block holds: more blocks find room
FEWEST = 64  # blocks that are worth while
FEW = 128  # bytes of a thread
SMALL_PLANE = 128  # bytes, below which one that is no whole packs is such
SMALL_THREADS = 512  # of a block, at most
FINISHED = 8  # channels of a block that adds up what images have of them: kFinished
FINISHERS = 256  # such blocks, at most, where images are dealt out over several
MOST_IMAGES = 1024  # that one has alone
ROOM = {True: 72 << 10, False: 48 << 10}  # bytes of shared memory of a block: three to a multiprocessor, with clusters


@functools.lru_cache(maxsize=4096)
def _groups(num_groups: int, channels: int, pixels: int) -> np.ndarray:
    """`struct Groups`."""
    return np.array([num_groups, channels, *divisor(pixels)], dtype=np.int64)


@functools.lru_cache(maxsize=4096)
def _images(num_groups: int) -> np.ndarray:
    """`struct Divisor`."""
    return np.array(divisor(num_groups), dtype=np.int64)


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
