"""What softmax and log_softmax have in common: the forms of their kernels, their launches and their arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import check
from ..kernel import FLOATING, Kernel
from ..layout import aligned, is_dry
from . import clusters, held
from .rows import PACKS, WIDEST, Share, grid, share, split

_BOTH = (False, True)
_WIDEST = WIDEST  # threads of one block that hold a row in registers
_WARP = 32
_WIDE_THREADS = 512, 1024  # of a block that reads rows twice: two blocks on a multiprocessor, or one
_VERY_WIDE = 192 * 1024  # bytes of a row from which on one is better, since what it reads again is still in L2
_ENOUGH_THREADS = 1 << 16  # for a large GPU: only then do threads take several columns each
_SMALL_THREADS = 256  # of a block whose rows are in shared memory
_SMALL_SLOTS = {2: 16, 4: 16, 8: 8}  # by itemsize: elements, or pairs of a half type, that each holds of a row at most
_SMALL_BLOCK = 6144  # bytes of a tensor that such a block reads at a time, at least
_SMALL_BLOCKS = 1024  # of them first, for a large GPU


def widens(dtype: torch.dtype, to: torch.dtype | None) -> bool:
    """Whether the kernels cast: from a half type to float32."""
    return to is torch.float32 and dtype in (torch.float16, torch.bfloat16)


def why_not(dtype: torch.dtype, to: torch.dtype | None) -> str | None:
    """Why the kernels do not cast from `dtype` to `to`; None where they do, or need not."""
    return None if to in (None, dtype) or widens(dtype, to) else f"no kernel from {dtype} to {to}"


class Forms(NamedTuple):
    """The forms of a kernel, forward or backward."""

    rows: Kernel
    small: Kernel
    held: Kernel
    wide: Kernel
    columns: Kernel


def forms(file: str, name: str) -> Forms:
    """The kernels `name`, `name`_small, `name`_held, `name`_wide and `name`_columns of a file."""
    domain: dict[str, Any] = {
        "T": FLOATING,
        "WIDEN": _BOTH,
        "where": lambda T, WIDEN, **_: not WIDEN or T.itemsize == 2,
    }
    threads = (held.MANY,) if name.endswith("_bwd") else held.THREADS
    return Forms(
        Kernel(file, f"{name}<T, WIDEN, K>", K=PACKS, **domain),
        Kernel(file, f"{name}_small<T, WIDEN>", **domain),
        Kernel(file, f"{name}_held<T, WIDEN, THREADS>", THREADS=threads, **domain),
        Kernel(file, f"{name}_wide<T, WIDEN>", **domain),
        Kernel(file, f"{name}_columns<T, WIDEN, VECTORS>", VECTORS=_BOTH, **domain),
    )


def launch(kernels: Forms, dim: int, *tensors: Tensor, **template: Any) -> None:
    """Launch the form that fits the shape of `tensors`, which are contiguous; packs are cut for the first."""
    outer, size, inner = split(tensors[0], dim)
    if is_dry(tensors[0]) or not tensors[0].numel():
        return
    if inner > 1:
        block, columns, vectors = _share_columns(outer * inner, size, inner, template["T"].itemsize)
        launch = kernels.columns[grid(columns, block[0]), block]
        launch(*tensors, outer, size, inner, VECTORS=vectors, **template)
        return
    itemsize, device = tensors[0].element_size(), tensors[0].device
    division, threads = _share_row(size, itemsize, _WIDEST), _WIDE_THREADS[size * itemsize >= _VERY_WIDE]
    if division.packs == 1 and size * itemsize % 16:
        small = _share_small(outer, size, itemsize, len(tensors) - 1, tensors[-1].element_size())
        launch = kernels.small[small.groups, small.block, small.shared]
        launch(*tensors, outer, size, small.rows, **template)
        return
    if division.packs == 1 or (division.packs and all(aligned(tensor) for tensor in tensors)):
        kernels.rows[grid(outer, division.rows), division.block](*tensors, outer, size, K=division.packs, **template)
        return
    if division.packs:  # packs would straddle boundaries: read twice, the second time from a cache
        threads = max(division.threads, _WARP)
    elif plan := held.plan(size, itemsize, len(tensors) - 1, device, clusters.exist(device)):
        plan.launch(kernels.held, outer)(*tensors, outer, size, plan.packs, THREADS=plan.threads, **template)
        return
    kernels.wide[grid(outer), threads](*tensors, outer, size, **template)


def _share_row(size: int, itemsize: int, most: int) -> Share:
    """Threads for a row. Where one has several packs, they are for the whole packs of a row, whose ends go by elements."""
    width = 16 // itemsize
    division = share(size, itemsize, most)
    return division if division.packs == 1 else share(max(size // width, _WARP + 1) * width, itemsize, most)


class _Small(NamedTuple):
    """A launch for rows in shared memory, `rows` of them at a time in each of `groups` blocks."""

    groups: int
    block: tuple[int, int]
    shared: int
    rows: int


@functools.lru_cache(maxsize=4096)
def _share_small(rows: int, size: int, itemsize: int, read: int, written: int) -> _Small:
    """For `read` tensors whose elements have `itemsize` bytes; those of the result, `written`, take their place if alike."""
    each = size * (itemsize * read + (written if written != itemsize else 0))
    threads = _power_of_two(-(-(size // (2 if itemsize == 2 else 1)) // _SMALL_SLOTS[itemsize]))
    at_once = _SMALL_THREADS // threads
    times = min(-(-_SMALL_BLOCK // (at_once * size * itemsize)), max(rows // (at_once * _SMALL_BLOCKS), 1))
    return _Small(-(-rows // (at_once * times)), (threads, at_once), at_once * times * each, at_once * times)


@functools.lru_cache(maxsize=4096)
def _share_columns(columns: int, size: int, inner: int, itemsize: int) -> tuple[tuple[int, int], int, bool]:
    """The block, (neighbouring columns, threads to a column), the columns in units of a thread's, and whether those are
    as many as make 16 bytes."""
    width = 16 // itemsize
    neighbours = min(_power_of_two(columns), 32)
    sharing = min(_power_of_two(-(-size // 8)), 512 // neighbours)
    vectors = inner % width == 0 and columns // width * sharing >= _ENOUGH_THREADS
    if vectors:
        columns //= width
    return (min(_power_of_two(columns), max(neighbours, 128 // sharing)), sharing), columns, vectors


def arguments(
    name: str, input: Tensor, dim: int | None, dtype: torch.dtype | None
) -> tuple[Tensor, int, torch.dtype | None]:
    """The arguments of the function `name`, checked: `dim` from 0 on, `input` cast where the kernels do not."""
    check.tensor("input", input)
    check.choice("dtype", dtype, (None, *FLOATING))
    if dtype is None and input.dtype not in FLOATING:
        check.fail("input", input, "a tensor of dtype float16, bfloat16, float32 or float64, or a dtype to cast it to")
    if dtype is not None and input.is_complex():
        check.fail("input", input, "a tensor of a real dtype")
    dim = check.dim("dim", _implicit_dim(name, input.dim()) if dim is None else dim, input.dim())
    if dtype is not None and not widens(input.dtype, dtype):
        input = input.to(dtype)
    return input, dim, dtype


def _implicit_dim(name: str, ndim: int) -> int:
    """PyTorch's choice where `dim` is not given, with PyTorch's warning."""
    check.warn(
        f"Implicit dimension choice for {name} has been deprecated. Change the call to include dim=X as an argument."
    )
    return 0 if ndim in (0, 1, 3) else 1


def _power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
