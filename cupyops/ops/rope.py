"""rope: rotary position embedding, each pair of elements of a row turned by an angle that goes with its position."""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import check
from ..common.broadcast import merged, packed_layout
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import alignment, is_dry
from ..operator import operator

rope_rows = Kernel("rope.cu", "rope<T>", T=FLOATING)
rope_even = Kernel("rope.cu", "rope_even<T>", T=FLOATING)
rope_heads = Kernel(
    "rope.cu",
    "rope_heads<T, INTERLEAVED, N>",
    T=FLOATING,
    INTERLEAVED=(False, True),
    N=(1, 2, 4, 8),
    where=lambda T, INTERLEAVED, N: N * T.itemsize <= (16 if INTERLEAVED else 8),
)
rope_staged = Kernel("rope.cu", "rope_staged<T>", T=FLOATING, where=lambda T: T.itemsize < STAGED_BELOW)

BLOCK = 128
STAGED = 256  # kSmallRows: threads of rope_staged()
STAGED_EACH = {2: 16, 4: 8}  # kStagedEach: pairs of a thread, at most, by the size of an element
STAGED_WHOLE = 8  # so many rows are whole vectors
STAGED_BYTES = 16384  # of a block's rows, at most
STAGED_CHUNK = 4  # runs of a block, at most
STAGED_BLOCKS = 2048  # or fewer, if that makes fewer blocks
STAGED_BELOW = 8  # bytes that rows let a thread read at once
FILL = 132 * 2048  # threads: where there are more units, a thread has several heads
CHUNK = 8  # heads of a thread, at most


Walk = tuple[int, tuple[int, ...]]  # of a dimension: its size, and strides


@operator("cupyops::rope")
def _rope(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, seq_dim: int, back: bool
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (_rows_for(x, table, positions, seq_dim).to(wide) for table in (cos, sin))
    s = -s if back else s
    rotary = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary].to(wide), x[..., rotary:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned.to(x.dtype), rest), -1).contiguous()


@_rope.forward
def _(x, cos, sin, positions, interleaved, seq_dim, back):
    return _launch(x, cos, sin, positions, interleaved, seq_dim, back), ()


@_rope.backward
def _(saved, grad_y, cos, sin, positions, interleaved, seq_dim, back):
    return _launch(grad_y, cos, sin, positions, interleaved, seq_dim, not back)


@_rope.reference_backward
def _(saved, grad_y, cos, sin, positions, interleaved, seq_dim, back):
    return _rope(grad_y, cos, sin, positions, interleaved, seq_dim, not back)


@_rope.interface
def rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    seq_dim: int = -2,
) -> Tensor:
    """Rotary position embedding: pairs of elements turned by an angle that grows with the position, in one pass.

    Of a row at position p, pair j becomes (a cos[p, j] - b sin[p, j], b cos[p, j] + a sin[p, j]). From "RoFormer: Enhanced
    Transformer with Rotary Position Embedding", Su and others, 2021.

    Args:
        input: (..., seq, head_dim), or with `seq_dim=-3` (..., seq, heads, head_dim); any floating-point dtype; kernels
            serve fp16, bf16, fp32 and fp64. Slices of a packed projection and transposed heads are read where they are.
        cos: (max_positions, rotary_dim / 2), one column for each pair; taken in the dtype of `input`. What has each column
            twice, as Hugging Face makes it, is given as `cos[:, :rotary_dim // 2]`. Elements of a row beyond rotary_dim
            pass as they are.
        sin: the same of the sine.
        positions: integers, (seq,) or (batch, seq) with batch the first dimension of `input`; None for 0, 1, 2 ...
        interleaved: whether neighbours are pairs, as in GPT-J and the paper; else j and j + rotary_dim / 2 are, as in
            GPT-NeoX and Llama.
        seq_dim: the dimension that counts positions.

    Returns:
        Tensor of the shape and dtype of `input`, contiguous. Gradients flow to `input` by the same kernel, and to `cos` and
        `sin`, where they want one, by PyTorch.

    Raises:
        InputError: an argument is of the wrong kind, dtype, shape or device; there are more positions than the tables have
            rows. A position out of range stops the kernel, as it does an index of PyTorch.

    Example:
        >>> cos, sin = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
        >>> cupyops.rope(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), cos, sin)
        tensor([[ 1.,  2.],
                [-4.,  3.]])
    """
    dim = _checked_dim(input, cos, sin, positions, seq_dim)
    cos, sin = cos.to(input.dtype), sin.to(input.dtype)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return _rope.reference(input, cos, sin, positions, interleaved, dim, False)
    return _rope(input, cos, sin, positions, interleaved, dim, False)


def _checked_dim(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, seq_dim: int) -> int:
    """`seq_dim` from the front, when all arguments have been checked."""
    check.floating("input", input)
    check.floating("cos", cos)
    check.floating("sin", sin)
    check.optional_tensor("positions", positions)
    check.same_device(input=input, cos=cos, sin=sin, positions=positions)
    if input.dim() < 2:
        check.fail("input", input, "(..., seq, head_dim)")
    dim = check.dim("seq_dim", seq_dim, input.dim())
    if dim == input.dim() - 1:
        check.fail("seq_dim", seq_dim, "a dimension before the last, which is that of a row")
    _check_tables(input, cos, sin, positions, dim)
    return dim


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, dim: int) -> None:
    if cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        check.fail("cos", cos, f"(max_positions, at most {x.shape[-1] // 2}): half of head_dim")
    if sin.shape != cos.shape:
        check.fail("sin", sin, f"the shape of cos, {tuple(cos.shape)}")
    if positions is None:
        if x.shape[dim] > cos.shape[0]:
            check.fail("cos", cos, f"at least {x.shape[dim]} rows, the positions of input")
        return
    if positions.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        check.fail("positions", positions, "a tensor of integers")
    shapes = [(x.shape[dim],)] if dim == 0 else [(x.shape[dim],), (x.shape[0], x.shape[dim])]
    if tuple(positions.shape) not in shapes:
        check.fail("positions", positions, f"shape {' or '.join(map(str, shapes))}")


def _rows_for(x: Tensor, table: Tensor, positions: Tensor | None, dim: int) -> Tensor:
    """The rows of a table that go with the rows of `x`, to broadcast with them."""
    rows = table[: x.shape[dim]] if positions is None else table[positions.long()]
    between = (1,) * (x.dim() - 2 - dim)
    if rows.dim() == 2:
        return rows.view(rows.shape[0], *between, rows.shape[-1])
    return rows.view(rows.shape[0], *(1,) * (dim - 1), rows.shape[1], *between, rows.shape[-1])


class Plan(NamedTuple):
    """A launch for an input of certain sizes and strides; no layout where they take a copy first."""

    config: tuple[int, int | tuple[int, int]] | tuple[int, int, int]
    layout: np.ndarray | None
    width: int = 0  # N of rope_heads()
    sizes: np.ndarray | None = None  # Heads, Staged or Even; of rope() none
    rows: int = 0
    staged: bool = False


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dim: int,
    positions: tuple[int, ...] | None,
    half: int,
    most: int,
    interleaved: bool,
    vector: int,
) -> Plan:
    """`positions`: its strides; None where they are those of the sequence. `most`: elements that all are aligned to."""
    leading, size = shape[:-1], shape[-1]
    steps = [0] * len(leading)
    steps[dim] = 1 if positions is None else positions[-1]
    if positions is not None and len(positions) == 2:
        steps[0] = positions[0]
    dense = tuple(math.prod(shape[d + 1 :]) for d in range(len(leading)))
    apart = [stride for count, stride in zip(leading, strides) if count > 1]
    width = math.gcd(most, size, 2 * half if interleaved else half, *apart)
    if width == vector and not interleaved:
        walked = merged(leading, dense, (strides[:-1], tuple(steps)))
        return _of_rows(walked, half, size, width, strides[-1], positions is not None)
    dense_x = strides[-1] == 1 and all(s == d for count, s, d in zip(leading, strides, dense) if count > 1)
    itemsize = 16 // vector
    fits = 0 < half <= STAGED and STAGED_WHOLE * size * itemsize <= STAGED_BYTES
    if dense_x and fits and width * itemsize < STAGED_BELOW:
        staged = _staged(merged(leading, dense, (strides[:-1], tuple(steps))), half, size, itemsize, interleaved)
        if staged.layout is not None:
            return staged
    walked = merged(leading, dense, (strides[:-1], tuple(steps), dense))
    return _of_heads(walked, half, size, width, strides[-1], interleaved and width > 1)


def _of_rows(walked: list[Walk], half: int, size: int, width: int, unit: int, given: bool) -> Plan:
    rows = math.prod(count for count, _ in walked)
    layout, units = _layout(walked, 2, size, unit), half // width
    if layout is not None and len(walked) == 1 and not given and size == 2 * half and not units & (units - 1):
        x_row, step = walked[0][1]
        if max(rows * units, x_row, step * half) < 2**31 - BLOCK:
            even = struct.pack("=3Ii", rows, x_row, step * half, units.bit_length() - 1)
            return Plan((ceil_div(rows * units, BLOCK), BLOCK), layout, sizes=np.frombuffer(even, np.uint8))
    return Plan(_blocks(max(half, size - 2 * half) // width, rows), layout, rows=rows)


def _staged(walked: list[Walk], half: int, size: int, itemsize: int, interleaved: bool) -> Plan:
    times = walked.pop()[0] if len(walked) > 1 and walked[-1][1][1] == 0 else 1  # the same positions again
    rows = math.prod(count for count, _ in walked)
    sharers, most = STAGED // half, min(STAGED, STAGED_BYTES // (size * itemsize))
    each = min(STAGED_EACH[itemsize] * sharers, most // STAGED_WHOLE * STAGED_WHOLE)
    apart, step = (1, 2) if interleaved else (half, 1)
    tiles = ceil_div(rows, each)
    chunk = max(1, min(STAGED_CHUNK, tiles * times // STAGED_BLOCKS))
    sizes = np.frombuffer(struct.pack("=2q6i", rows, times, each, sharers, apart, step, tiles, chunk), np.uint8)
    config = (tiles * ceil_div(times, chunk), STAGED, 2 * each * size * itemsize)
    return Plan(config, _layout(walked, 2, size, 1), sizes=sizes, staged=True)


def _of_heads(walked: list[Walk], half: int, size: int, width: int, unit: int, neighbours: bool) -> Plan:
    turned = half * (2 if neighbours else 1) // width
    units = turned + (size - 2 * half) // width
    rows = math.prod(count for count, _ in walked)
    _, (threads, together) = _blocks(units, rows)
    # the heads: the dimension with most rows of one position, unless that leaves too few positions to fill a block
    heads, x_stride, y_stride = 1, 0, 0
    for count, (of_x, of_position, of_y) in sorted(walked, reverse=True):
        if of_position == 0 and rows // count >= together:
            heads, x_stride, y_stride = count, of_x, of_y
            walked.remove((count, (of_x, 0, of_y)))
            break
    rows //= heads
    chunk = max(1, min(CHUNK, heads, units * rows * heads // FILL))
    groups = ceil_div(rows, together)
    sizes = struct.pack("=4q4i", rows, heads, x_stride, y_stride, groups, chunk, turned, units)
    config = (groups * ceil_div(heads, chunk), (threads, together))
    return Plan(config, _layout(walked, 3, size, unit), width, np.frombuffer(sizes, np.uint8))


def _blocks(units: int, rows: int) -> tuple[int, tuple[int, int]]:
    """(grid, block) where a row is so many units."""
    threads = min(max(units, 1), BLOCK)
    together = max(1, BLOCK // threads)
    return ceil_div(rows, together), (threads, together)


def _layout(walked: list[Walk], inputs: int, size: int, unit: int) -> np.ndarray | None:
    """The `Layout` of what is walked: dimensions with their strides in so many inputs. None if it cannot be."""
    if unit != 1 and size > 1:
        return None
    counts, order = tuple(count for count, _ in walked), tuple(range(1, len(walked) + 1))
    found = packed_layout(counts, order, 1, *[tuple(step[j] for _, step in walked) for j in range(inputs)])
    return found[0] if found else None


def _launch(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, dim: int, back: bool
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if is_dry(y) or y.numel() == 0:
        return y
    cos, sin = cos.contiguous(), sin.contiguous()
    if positions is not None:
        positions = positions.long()
    of_positions = None if positions is None else positions.stride()
    half, vector = cos.shape[1], 16 // x.itemsize
    most = min(map(alignment, (x, cos, sin))) // x.itemsize
    plan = _plan(x.shape, x.stride(), dim, of_positions, half, most, interleaved, vector)
    if plan.layout is None:
        x = x.contiguous()
        plan = _plan(x.shape, x.stride(), dim, of_positions, half, most, interleaved, vector)
    given, rest = (x, cos, sin, positions, y), (cos.shape[0], back, plan.layout)
    if plan.staged:
        rope_staged[plan.config](*given, plan.sizes, half, x.shape[-1], *rest, T=y.dtype)
    elif plan.width:
        rope_heads[plan.config](*given, plan.sizes, half, *rest, T=y.dtype, INTERLEAVED=interleaved, N=plan.width)
    elif plan.sizes is not None:
        rope_even[plan.config](x, cos, sin, y, plan.sizes, back, T=y.dtype)
    else:
        rope_rows[plan.config](*given, plan.rows, half, x.shape[-1], *rest, T=y.dtype)
    return y
