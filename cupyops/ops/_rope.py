"""rope: rotary position embedding, each pair of elements of a row turned by an angle that goes with its position."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.core import shardings
from .._dispatch.core.gpu import gpu
from .._dispatch.rope import ROTATION, Problem, is_walkable
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import aligned, is_dry


@operator("cupyops::rope", sharding=shardings.rope)
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
        pairs = torch.stack((a * c - b * s, b * c + a * s), -1)
        turned = pairs.reshape(turned.shape)  # and not flatten, which has no rule for gradients in batches
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned.to(x.dtype), rest), -1).contiguous()


@_rope.forward
def forward(x, cos, sin, positions, interleaved, seq_dim, back):
    return _rotate(x, cos, sin, positions, interleaved, seq_dim, back), ()


@_rope.backward
def backward(saved, grad_y, cos, sin, positions, interleaved, seq_dim, back):
    return _rotate(grad_y, cos, sin, positions, interleaved, seq_dim, not back)


@_rope.reference_backward
def reference_backward(saved, grad_y, cos, sin, positions, interleaved, seq_dim, back):
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
            rows or, on the CPU, a position out of range. On a GPU such a position prints itself and stops the kernel.

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
    arguments.floating("input", input)
    arguments.floating("cos", cos)
    arguments.floating("sin", sin)
    arguments.optional_tensor("positions", positions)
    arguments.same_device(input=input, cos=cos, sin=sin, positions=positions)
    if input.dim() < 2:
        arguments.fail("input", input, "(..., seq, head_dim)")
    dim = arguments.dim("seq_dim", seq_dim, input.dim())
    if dim == input.dim() - 1:
        arguments.fail("seq_dim", seq_dim, "a dimension before the last, which is that of a row")
    _check_tables(input, cos, sin, positions, dim)
    return dim


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, dim: int) -> None:
    if cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        arguments.fail("cos", cos, f"(max_positions, at most {x.shape[-1] // 2}): half of head_dim")
    if sin.shape != cos.shape:
        arguments.fail("sin", sin, f"the shape of cos, {tuple(cos.shape)}")
    if positions is None:
        if x.shape[dim] > cos.shape[0]:
            arguments.fail("cos", cos, f"at least {x.shape[dim]} rows, the positions of input")
        return
    if positions.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        arguments.fail("positions", positions, "a tensor of integers")
    shapes = [(x.shape[dim],)] if dim == 0 else [(x.shape[dim],), (x.shape[0], x.shape[dim])]
    if tuple(positions.shape) not in shapes:
        arguments.fail("positions", positions, f"shape {' or '.join(map(str, shapes))}")


def _rows_for(x: Tensor, table: Tensor, positions: Tensor | None, dim: int) -> Tensor:
    """The rows of a table that go with the rows of `x`, to broadcast with them."""
    if positions is None:
        rows = table[: x.shape[dim]]
    else:
        arguments.in_range("positions, element {},", positions, table.shape[0], "one")
        # not table[positions], which would count a negative one from the end
        rows = table.index_select(0, positions.long().flatten()).view(*positions.shape, table.shape[1])
    between = (1,) * (x.dim() - 2 - dim)
    if rows.dim() == 2:
        return rows.view(rows.shape[0], *between, rows.shape[-1])
    return rows.view(rows.shape[0], *(1,) * (dim - 1), rows.shape[1], *between, rows.shape[-1])


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, dim: int, back: bool
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if is_dry(y) or y.numel() == 0:
        return y
    if cos.stride() != sin.stride() or (cos.shape[1] > 1 and cos.stride(1) != 1):
        cos, sin = cos.contiguous(), sin.contiguous()
    apart = cos.stride(0)
    if positions is not None:
        positions = positions.long()
    of_positions = None if positions is None else positions.stride()
    boundary = next(b for b in (16, 8, 4, 2) if b == x.itemsize or all(aligned(t, b) for t in (x, cos, sin)))
    sizes = (dim, of_positions, cos.shape[1], apart, boundary // x.itemsize, interleaved, x.dtype)
    problem = Problem(x.shape, x.stride(), *sizes)
    if not is_walkable(problem):
        x = x.contiguous()
        problem = Problem(x.shape, x.stride(), *sizes)
    ROTATION.launch(problem, gpu(x.device))(x, cos, sin, positions, y, cos.shape[0], apart, back)
    return y
