"""What the normalisations share: launches of the forms that common/norm.cuh lists, and checks of arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import check
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import is_dry
from . import clusters
from .rows import PACKS, SMALL_BYTES, SMALL_ROWS, WIDEST, grid, is_symbolic, share
from .segments import is_aligned

SHORT_PACKS = (4, 16)  # of a row whose lanes have a pack each, of several rows at once
SHORT_FORWARD, SHORT_BACKWARD = 4, 2  # those rows
SHORT_THREADS = 256  # of a block, at most
SHORT_BLOCKS = 3  # of a multiprocessor
CENTRED_THREADS = 512  # of a row of a half type in layer_norm: see its kernel
FORWARD_ROWS = 2  # that a block takes where there are many and they are long: one is read while the other is reduced
FORWARD_AHEAD = 256  # threads of a row from which on that pays: of shorter ones, other blocks' are read meanwhile
_ENOUGH_BLOCKS = 16  # for each multiprocessor: only then do blocks of forward take several rows
BACKWARD_THREADS = 512  # of a block, at most; of a multiprocessor those that hold rows
LATE_THREADS = 512  # of a row from which on backward asks late for statistics: see norm_rows_bwd
WIDE_THREADS = 512  # of a block for a long row: two blocks run at once, one reads while the other reduces
SHIFT_THREADS = 256  # of a block that lays out parameters
ROWS_EACH = 4  # that a block of backward takes at least before there are parts for all of the wave
SMALL_WAVE = 4  # blocks of small rows for each multiprocessor in backward
_WARP = 32
_CLUSTER_SMS = 16  # multiprocessors, at least, among some of which a cluster's blocks lie
_RESERVED = 5376  # bytes of shared memory that a block takes besides, at most
_DRIVER = 1024  # of these, the driver's: a block cannot have them, a multiprocessor has
_ROW_SUMS = 256  # numbers of each row sum in backward: see RowRoom
_MBARRIERS = 16  # bytes of those that are with them, of rows off 16-byte boundaries


class Kernels(NamedTuple):
    """The kernels of a normalisation."""

    fwd: Kernel
    fwd_small: Kernel
    fwd_short: Kernel
    fwd_held: Kernel
    fwd_wide: Kernel
    fwd_shift: Kernel
    bwd: Kernel
    bwd_small: Kernel
    bwd_short: Kernel
    bwd_wide: Kernel
    bwd_columns: Kernel
    bwd_sum: Kernel


def kernels(name: str) -> Kernels:
    """Those of cuda_src/`name`.cu."""
    file = f"{name}.cu"
    both = (False, True)
    special = {
        "fwd": Kernel(file, f"{name}_fwd<T, K, VECTORS>", T=FLOATING, K=PACKS, VECTORS=both),
        "bwd": Kernel(
            file,
            f"{name}_bwd<T, K, VECTORS, PARAMETERS, LATE>",
            T=FLOATING,
            K=PACKS,
            VECTORS=both,
            PARAMETERS=both,
            LATE=both,
            where=lambda T, K, VECTORS, PARAMETERS, LATE: not LATE or (VECTORS and K == clusters.PACKS),
        ),
    }
    return Kernels(
        **{form: special.get(form) or Kernel(file, f"{name}_{form}<T>", T=FLOATING) for form in Kernels._fields}
    )


class Plan(NamedTuple):
    """A launch: `packs` of a row in each thread of a block, or of a cluster of `cluster` blocks. No packs: rows of
    another form; or, without groups, rows that are not held."""

    packs: int = 0
    groups: int = 0  # blocks, or clusters
    block: tuple[int, int] = (0, 0)
    shared: int = 0
    stages: int = 0
    cluster: int = 1
    form: str = ""  # its kernel
    late: bool = False  # LATE of norm_rows_bwd

    def launch(self, kernel: Kernel, overlap: bool = False) -> Callable[..., None]:
        """The launch of `kernel`, which with `overlap` may begin while the kernel before ends."""
        if self.cluster == 1 and not overlap:
            return kernel[self.groups, self.block, self.shared]
        cluster = None if self.cluster == 1 else self.cluster
        return kernel.configure(
            self.groups * self.cluster, self.block, shared=self.shared, cluster=cluster, overlap=overlap
        )


def _is_small(size: int, itemsize: int) -> bool:
    """Whether a thread takes a row: a short one off 16-byte boundaries."""
    return size * itemsize % 16 != 0 and size * itemsize <= SMALL_BYTES


def _whole_packs(size: int, itemsize: int) -> int:
    """Elements of those packs of a row that threads share: as many threads as take, one each, what is not of whole packs."""
    width = 16 // itemsize
    least = 2 * width if size % width else 0
    return max(size // width, least) * width


def _short_plan(rows: int, size: int, itemsize: int, each: int, vectors: bool, form: str, sms: int) -> Plan | None:
    """For short rows, `each` of a thread at once: one wave of blocks, on all multiprocessors sooner than large."""
    packs = size * itemsize // 16
    if not vectors or not SHORT_PACKS[0] <= packs <= SHORT_PACKS[1]:
        return None
    lanes = 1 << (packs - 1).bit_length()
    threads = SHORT_THREADS
    while threads > _WARP and ceil_div(rows, each * (threads // lanes)) < sms:
        threads //= 2
    groups = _count(rows, each * (threads // lanes), SHORT_BLOCKS * sms)
    return Plan(0, groups, (lanes, threads // lanes), form=form)


def _whole(size: int) -> int:
    """Bytes for `size`, whose end may be read 16 at a time: of shared memory by machine code, where C reads less."""
    return -(-size // 16) * 16


def _vectors(size: int, itemsize: int, tensors: Iterable[Tensor | None]) -> bool:
    """Whether each pack of 16 bytes is one access: of rows, and tensors, that begin at such boundaries."""
    return size * itemsize % 16 == 0 and all(tensor is None or is_aligned(tensor) for tensor in tensors)


def _wave(plan: Plan, rows: int, vectors: bool, itemsize: int, sums: int, device: torch.device) -> int:
    """Groups of backward that run at one time, none without `rows` rows; where rows are off 16-byte boundaries so many that
    every group has rows that begin alike within a pack."""
    sms, room = card(device)
    period = 1 if vectors else 16 // itemsize
    besides = _ROW_SUMS * sums * max(itemsize, 4) + (0 if vectors else _MBARRIERS) + _DRIVER
    if plan.block[1] > 1:
        besides = _RESERVED  # one more such block that just fits is slower: its rows wait for no barrier
    resident = BACKWARD_THREADS // math.prod(plan.block)
    blocks = max(1, min(resident, (room + _DRIVER) // (plan.shared + besides)))
    wave = sms * blocks // plan.cluster
    if not vectors and plan.cluster > 1:  # of any number of blocks: each part of the GPU may have some to spare
        wave = sms // _CLUSTER_SMS * (_CLUSTER_SMS * blocks // plan.cluster)
    wave = max(wave // period, 1) * period
    return -(-max(1, min(ceil_div(rows, plan.block[1]), wave)) // period) * period


# --- forward ---


def forward(
    kernels: Kernels, read: Sequence[Tensor], rest: Sequence[Tensor | None], rows: int, size: int, eps: float
) -> None:
    """`read`, all of the shape of the first, and `rest`, parameters first, are the tensors of the kernel in its order,
    contiguous."""
    x = read[0]
    if is_symbolic(rows, size) or is_dry(x) or not x.numel():
        return
    itemsize = x.element_size()
    vectors = _vectors(size, itemsize, (*read, *rest))
    centred = len(rest) > 4
    plan = _forward_plan(rows, size, itemsize, len(read), vectors, centred, x.device)
    shifting = False
    if plan.groups and plan.form != "fwd_small" and not vectors:
        parameters = 2 if centred else 1
        shifting = any(parameter is not None for parameter in rest[:parameters])  # while rows are read already
        rest = (*_shifted(kernels, rest[:parameters], x), *rest[parameters:])
    args = (*read, *rest, rows, size, eps)
    if plan.packs:
        plan.launch(kernels.fwd, shifting)(*args, plan.stages, T=x.dtype, K=plan.packs, VECTORS=vectors)
    elif plan.groups:
        plan.launch(getattr(kernels, plan.form), shifting)(*args, T=x.dtype)
    else:
        kernels.fwd_wide[grid(rows), WIDE_THREADS](*args, T=x.dtype)


def _shifted(kernels: Kernels, parameters: Sequence[Tensor | None], x: Tensor) -> list[Tensor | None]:
    """The parameters laid out for rows off 16-byte boundaries: see shift_parameter()."""
    given = [parameter for parameter in parameters if parameter is not None]
    if not given:
        return list(parameters)
    width = 16 // x.element_size()
    size = given[0].numel()
    packs = ceil_div(size, width)
    shifted = [x.new_empty(width * packs * width) for _ in given]
    none = [None] * (len(parameters) - len(given))
    launch = kernels.fwd_shift[(ceil_div(packs, SHIFT_THREADS), width, len(given)), SHIFT_THREADS]
    launch(*given, *none, *shifted, *none, size, T=x.dtype)
    places = iter(shifted)
    return [None if parameter is None else next(places) for parameter in parameters]


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    rows: int, size: int, itemsize: int, tensors: int, vectors: bool, centred: bool, device: torch.device
) -> Plan:
    sms, room = card(device)
    if _is_small(size, itemsize):
        shared = SMALL_ROWS * size * itemsize * tensors + _whole(2 * size * max(itemsize, 4))
        return Plan(0, grid(rows, SMALL_ROWS), (SMALL_ROWS, 1), shared, form="fwd_small")
    if short := _short_plan(rows, size, itemsize, SHORT_FORWARD, vectors, "fwd_short", sms):
        return short
    fetched = not centred and vectors  # see norm_rows
    each = 16 * tensors if fetched else 0  # bytes of shared memory for a pack of a row
    most = CENTRED_THREADS if centred and itemsize == 2 else WIDEST
    whole = _whole_packs(size, itemsize)
    division = share(whole, itemsize, min(most, (room - _RESERVED) // (each * PACKS[-1]) // 32 * 32) if each else most)
    if not division.packs:
        shared = 16 * (size * itemsize // 16)
        if shared + _RESERVED > room:
            return Plan()
        return Plan(0, grid(rows), (WIDE_THREADS, 1), shared, form="fwd_held")
    packs = division.packs * division.threads * division.rows
    plan = Plan(division.packs, 0, division.block, each * packs, 1)
    many = rows >= FORWARD_ROWS * _ENOUGH_BLOCKS * sms * division.rows
    if fetched and many and division.threads >= FORWARD_AHEAD:
        stages = 2 if 2 * each * packs <= room - _RESERVED else 1
        return plan._replace(
            groups=grid(rows, FORWARD_ROWS * division.rows), shared=stages * each * packs, stages=stages
        )
    return plan._replace(groups=grid(rows, division.rows))


# --- backward ---


class Gradients(NamedTuple):
    """The tensors of backward, in the kernels' order; None where there is none."""

    read: tuple[Tensor | None, ...]  # grad_y, x, weight; and grad_summed
    statistics: tuple[Tensor, ...]  # mean, rstd; or rstd
    grad_x: Tensor | None
    parameters: tuple[Tensor | None, ...]  # grad_weight, grad_bias; or grad_weight


def backward(kernels: Kernels, to: Gradients, rows: int, size: int) -> None:
    """All gradients that are wanted; everything is contiguous."""
    x: Any = to.read[1]
    if is_symbolic(rows, size) or is_dry(x) or not size:
        return
    wanted = any(grad is not None for grad in to.parameters)
    itemsize = x.element_size()
    vectors = _vectors(size, itemsize, to.read)
    counts = len(to.read) - 1, len(to.statistics)
    plan = _backward_plan(rows, size, itemsize, *counts, wanted, vectors, x.device, clusters.exist(x.device))
    if not plan.groups:
        _backward_wide(kernels, to, rows, size)
    elif wanted or to.grad_x is not None:
        parts, *each = _parts(plan.groups, size, to.parameters, x)
        args = (*to.read, *to.statistics, to.grad_x, *each, rows, size)
        if plan.form:
            plan.launch(getattr(kernels, plan.form))(*args, T=x.dtype)
        else:
            template = {"K": plan.packs, "VECTORS": vectors, "PARAMETERS": wanted, "LATE": plan.late}
            plan.launch(kernels.bwd)(*args, plan.stages, T=x.dtype, **template)
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
def _backward_plan(
    rows: int,
    size: int,
    itemsize: int,
    tensors: int,
    sums: int,
    parameters: bool,
    vectors: bool,
    device: torch.device,
    in_clusters: bool,  # of a CPU that depends on what is simulated
) -> Plan:
    sms, room = card(device)
    if _is_small(size, itemsize):
        shared = SMALL_ROWS * size * itemsize * tensors + _whole(size * max(itemsize, 4))
        return Plan(0, _count(rows, SMALL_ROWS, SMALL_WAVE * sms), (SMALL_ROWS, 1), shared, form="bwd_small")
    if short := _short_plan(rows, size, itemsize, SHORT_BACKWARD, vectors, "bwd_short", sms):
        return short
    least = 16 * (tensors + 1)  # bytes for a pack of each tensor and of the weight
    room -= _RESERVED
    most = min(BACKWARD_THREADS, room // (least * PACKS[-1]) // 32 * 32)
    whole = _whole_packs(size, itemsize)
    division = share(whole, itemsize, most, 256)
    each = ROWS_EACH if parameters else 1

    def launched(plan: Plan) -> Plan:
        packs = plan.packs * math.prod(plan.block)
        stages = 2 if packs * (least + 16 * tensors) <= room else 1
        wide = plan.cluster > 1 or plan.block[0] >= LATE_THREADS
        late = vectors and stages == 2 and plan.packs == clusters.PACKS and wide
        plan = plan._replace(shared=packs * (least + 16 * tensors * (stages - 1)), stages=stages, late=late)
        return plan._replace(groups=_wave(plan, ceil_div(rows, each), vectors, itemsize, sums, device))

    if division.packs:
        half = ceil_div(division.threads, 2 * _WARP) * _WARP
        if most // division.threads == 1 and most // half >= 3 and in_clusters:
            # three halves of rows fit on a multiprocessor, on which a second row does not
            return launched(Plan(clusters.PACKS, 0, (half, 1), cluster=2))
        return launched(Plan(division.packs, 0, division.block))
    if not in_clusters:
        return Plan()
    # a cluster may hold what a block does not: that of which most run at one time
    shares = [clusters.share(size, itemsize)] if vectors else clusters.shares(whole, itemsize)
    plans = (
        launched(Plan(clusters.PACKS, 0, (among.threads, 1), cluster=among.blocks))
        for among in shares
        if among and among.threads <= BACKWARD_THREADS
    )
    return max(plans, key=lambda plan: (plan.groups, plan.cluster), default=Plan())


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
    """Room for the parts, (parameters wanted, count, pitch_of(size)), then that of each parameter, None where not wanted."""
    wanted = sum(grad is not None for grad in grads)
    dtype = acc(x.dtype)
    parts = x.new_empty((wanted, count, _whole(size * dtype.itemsize) // dtype.itemsize), dtype=dtype)
    places = iter(parts.unbind())
    return [parts, *[None if grad is None else next(places) for grad in grads]]


def _add(kernels: Kernels, parts: Tensor, grads: tuple[Tensor | None, ...]) -> None:
    """The parameters' gradients from their parts."""
    wanted, count = parts.shape[:2]
    across = _WARP * parts.element_size() // 16  # threads for _WARP columns
    down = 1 << max(3, (count // 4).bit_length() - 1)  # four parts or more for a thread
    one = next(grad for grad in grads if grad is not None)
    grid, block = (ceil_div(one.numel(), _WARP), wanted), (across, min(down, 1024 // across))
    launch = kernels.bwd_sum.configure(grid, block, overlap=True)
    launch(parts, *grads, count, one.numel(), T=one.dtype)


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


def rms_checked(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[list[int], float | None]:
    """`normalized_shape` and `eps`, when all arguments have been checked."""
    floating("input", input)
    sizes = shape(normalized_shape, input)
    parameter("weight", weight, sizes, input)
    return sizes, None if eps is None else number("eps", eps)


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
