"""What the normalisations share: launches of the kernels of norm.cuh and norm_bwd.cuh, and checks of arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import check
from ..kernel import FLOATING, Kernel, ceil_div
from .rows import PACKS, WIDEST, grid, is_symbolic, share

BACKWARD_THREADS = 512  # of a block, at most
BACKWARD_RESIDENT = 512  # threads of a multiprocessor: their sums of the parameters' gradients fill its registers
WIDE_THREADS = 512  # of a block for a long row: two blocks run at once, one reads while the other reduces
FORWARD_ROWS = 2  # that a block takes where there are many and they are long: one is read while the other is reduced
FORWARD_AHEAD = 256  # threads of a row from which on that pays: of shorter ones, other blocks' are read meanwhile
ROWS_EACH = 4  # that a block of backward takes at least before there are parts for all of the wave
_ENOUGH_BLOCKS = 16  # for each multiprocessor: only then do blocks of forward take several rows
_RESERVED = 1280  # bytes of shared memory that a block takes besides


class Kernels(NamedTuple):
    """The kernels of a normalisation."""

    fwd: Kernel
    fwd_wide: Kernel
    bwd: Kernel
    bwd_wide: Kernel
    bwd_columns: Kernel
    bwd_sum: Kernel


def kernels(name: str) -> Kernels:
    """Those of cuda_src/`name`.cu."""
    file = f"{name}.cu"
    wide, backward_wide, columns, add = (
        Kernel(file, f"{name}_{form}<T>", T=FLOATING) for form in ("fwd_wide", "bwd_wide", "bwd_columns", "bwd_sum")
    )
    return Kernels(
        Kernel(file, f"{name}_fwd<T, K>", T=FLOATING, K=PACKS),
        wide,
        Kernel(file, f"{name}_bwd<T, K, PARAMETERS>", T=FLOATING, K=PACKS, PARAMETERS=(False, True)),
        backward_wide,
        columns,
        add,
    )


# --- forward ---


def forward(
    kernels: Kernels, read: Sequence[Tensor], rest: Sequence[Tensor | None], rows: int, size: int, eps: float
) -> None:
    """`read`, all of the shape of the first, and `rest` are the tensors of the kernel in its order, contiguous."""
    x = read[0]
    if is_symbolic(rows, size) or not x.numel():
        return
    plan = _forward_plan(rows, size, x.element_size(), len(read), x.device)
    if plan.packs:
        launch = kernels.fwd[grid(rows, plan.rows), plan.block, plan.shared]
        launch(*read, *rest, rows, size, eps, plan.stages, T=x.dtype, K=plan.packs)
    else:
        kernels.fwd_wide[grid(rows), WIDE_THREADS](*read, *rest, rows, size, eps, T=x.dtype)


class Plan(NamedTuple):
    """The launch of a kernel of rows in registers: `rows` for a block, or a wave of `blocks`. No packs: they are too
    long."""

    packs: int
    block: tuple[int, int] = (0, 0)
    rows: int = 0
    blocks: int = 0
    shared: int = 0
    stages: int = 0


@functools.lru_cache(maxsize=4096)
def _forward_plan(rows: int, size: int, itemsize: int, tensors: int, device: torch.device) -> Plan:
    sms, room = card(device)
    division = share(size, itemsize, _threads(WIDEST, _bytes(1, tensors, PACKS[-1]), room))
    if not division.packs:
        return Plan(0)
    many = rows >= FORWARD_ROWS * _ENOUGH_BLOCKS * sms * division.rows
    each = FORWARD_ROWS if many and division.threads >= FORWARD_AHEAD else 1
    threads = division.threads * division.rows
    stages = 2 if each > 1 and threads * _bytes(2, tensors, division.packs) <= room - _RESERVED else 1
    shared = threads * _bytes(stages, tensors, division.packs)
    return Plan(division.packs, division.block, division.rows * each, 0, shared, stages)


def _threads(most: int, each: int, room: int) -> int:
    """How many threads share a row at most, where each takes so many bytes of shared memory."""
    return min(most, (room - _RESERVED) // each // 32 * 32)


def _bytes(stages: int, tensors: int, packs: int) -> int:
    """Shared memory of a thread: see fetched.cuh."""
    return 16 * stages * tensors * packs


# --- backward ---


class Gradients(NamedTuple):
    """The tensors of backward, in the kernels' order; None where there is none."""

    read: tuple[Tensor | None, ...]  # grad_y, x, weight; and grad_summed
    statistics: tuple[Tensor, ...]  # mean, rstd; or rstd
    grad_x: Tensor | None
    parameters: tuple[Tensor | None, ...]  # grad_weight, grad_bias; or grad_weight


def backward(kernels: Kernels, to: Gradients, rows: int, size: int) -> None:
    """All gradients that are wanted; everything is contiguous."""
    if is_symbolic(rows, size) or not size:
        return
    x: Any = to.read[1]
    wanted = any(grad is not None for grad in to.parameters)
    plan = _backward_plan(rows, size, x.element_size(), len(to.read) - 1, wanted, x.device)
    if not plan.packs:
        _backward_wide(kernels, to, rows, size)
    elif wanted or to.grad_x is not None:
        parts, *each = _parts(plan.blocks, size, to.parameters, x)
        launch = kernels.bwd[plan.blocks, plan.block, plan.shared]
        template = {"T": x.dtype, "K": plan.packs, "PARAMETERS": wanted}
        launch(*to.read, *to.statistics, to.grad_x, *each, rows, size, plan.stages, **template)
        if wanted:
            _add(kernels, parts, to.parameters)


def _backward_wide(kernels: Kernels, to: Gradients, rows: int, size: int) -> None:
    """grad_x and the gradients of the parameters apart."""
    x: Any = to.read[1]
    if to.grad_x is not None:
        launch = kernels.bwd_wide[grid(rows), BACKWARD_THREADS]
        launch(*to.read, *to.statistics, to.grad_x, rows, size, T=x.dtype)
    if any(grad is not None for grad in to.parameters):
        tiles = ceil_div(size, BACKWARD_THREADS * 16 // x.element_size())
        count = _count(rows, ROWS_EACH, 2 * card(x.device)[0] // tiles)
        parts, *each = _parts(count, size, to.parameters, x)
        launch = kernels.bwd_columns[(tiles, count), BACKWARD_THREADS]
        launch(*to.read[:2], *to.statistics, *each, rows, size, T=x.dtype)
        _add(kernels, parts, to.parameters)


@functools.lru_cache(maxsize=4096)
def _backward_plan(rows: int, size: int, itemsize: int, tensors: int, parameters: bool, device: torch.device) -> Plan:
    sms, room = card(device)
    weight = _bytes(1, 1, 1)  # of each pack
    most = _threads(BACKWARD_THREADS, _bytes(1, tensors, PACKS[-1]) + weight * PACKS[-1], room)
    division = share(size, itemsize, most, 256)
    if not division.packs:
        return Plan(0)
    threads, weights = division.threads * division.rows, weight * division.packs
    stages = 2 if threads * (_bytes(2, tensors, division.packs) + weights) <= room - _RESERVED else 1
    shared = threads * (_bytes(stages, tensors, division.packs) + weights)
    resident = max(1, min(BACKWARD_RESIDENT // threads, room // (shared + _RESERVED)))
    period = 1 if size % (16 // itemsize) == 0 else 16 // itemsize  # see norm_rows_bwd
    wave = max(sms * resident // period, 1) * period
    blocks = _count(rows, division.rows * (ROWS_EACH if parameters else 1), wave)
    return Plan(division.packs, division.block, 0, -(-blocks // period) * period, shared, stages)


@functools.cache
def card(device: torch.device) -> tuple[int, int]:
    """The number of multiprocessors, and the bytes of shared memory that a block can have."""
    if device.type != "cuda":
        return 64, 101376
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _count(rows: int, rows_each: int, most: int) -> int:
    """How many parts of the parameters' gradients there are: one even for no rows, whose sum is 0."""
    return max(1, min(ceil_div(rows, rows_each), most))


def _parts(count: int, size: int, grads: tuple[Tensor | None, ...], x: Tensor) -> list[Any]:
    """Room for the parts, (parameters wanted, count, size), then that for each parameter, None where not wanted."""
    wanted = sum(grad is not None for grad in grads)
    parts = x.new_empty((wanted, count, size), dtype=acc(x.dtype))
    places = iter(parts)
    return [parts, *[None if grad is None else next(places) for grad in grads]]


def _add(kernels: Kernels, parts: Tensor, grads: tuple[Tensor | None, ...]) -> None:
    """The parameters' gradients from their parts."""
    wanted, count, size = parts.shape
    block = (32, 32 if count > 32 else 8)
    dtype = next(grad.dtype for grad in grads if grad is not None)
    kernels.bwd_sum[(ceil_div(size, 32), wanted), block](parts, *grads, count, size, T=dtype)


# --- arguments ---


def floating(name: str, value: Tensor) -> None:
    """A tensor of a dtype that there are kernels for."""
    check.tensor(name, value)
    if value.dtype not in FLOATING:
        check.fail(name, value, "a tensor of dtype float16, bfloat16, float32 or float64")


def shape(normalized_shape: Sequence[int], input: Tensor) -> list[int]:
    """`normalized_shape` as a list, with which the shape of `input` ends."""
    if not isinstance(normalized_shape, (tuple, list)) or not normalized_shape:
        check.fail("normalized_shape", normalized_shape, "a sequence of at least one int")
    sizes = check.ints("normalized_shape", normalized_shape, len(normalized_shape), 0)
    if list(input.shape[-len(sizes) :]) != sizes:
        check.fail("input", input, f"a tensor of shape (*, {', '.join(map(str, sizes))}), as normalized_shape says")
    return sizes


def parameter(name: str, value: Tensor | None, sizes: list[int], input: Tensor) -> None:
    """`weight` or `bias`: of shape `sizes`, on the device of `input`."""
    if value is None:
        return
    floating(name, value)
    if list(value.shape) != sizes:
        check.fail(name, value, f"a tensor of shape {tuple(sizes)}, normalized_shape")
    check.same_device(input=input, **{name: value})


def number(name: str, value: Any) -> float:
    """A real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        check.fail(name, value, "a number")
    return float(value)


def split(x: Tensor, normalized_shape: Sequence[int]) -> tuple[int, int]:
    """(rows, elements of a row)."""
    return math.prod(x.shape[: x.dim() - len(normalized_shape)]), math.prod(normalized_shape)


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """Each as a flat array; None stays."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def acc(dtype: torch.dtype) -> torch.dtype:
    """What the kernels compute in: acc_t."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- rms_norm ---

# what this PyTorch's autocast does with it: an older one leaves it alone
RMS_AUTOCAST = "fp32" if torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA") else None


def rms_eps(eps: float | None, dtype: torch.dtype) -> float:
    """PyTorch's default: the machine epsilon of what is computed in."""
    return torch.finfo(acc(dtype)).eps if eps is None else eps


def mixed(x: Tensor, weight: Tensor | None) -> str | None:
    """Why the kernels do not take `weight`."""
    return f"weight is {weight.dtype}, input {x.dtype}" if weight is not None and weight.dtype != x.dtype else None


def rms_in_steps(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """rms_norm of elementary operations, for transforms: PyTorch's fused one has no forward mode."""
    wide = x.to(acc(x.dtype))
    dims = tuple(range(-len(normalized_shape), 0))
    y = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + rms_eps(eps, x.dtype))
    return (y if weight is None else y * weight).to(x.dtype)
