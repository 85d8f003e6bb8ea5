"""Calls that are drawn at random for each operator, so that most of them mean something.

An operator whose arguments may be of any shape and value needs no line here: its calls are drawn by its annotations, and
compared with the function of PyTorch in its contract (samples.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attentions
import byte_products
import gemms
import groups
import normalisations
import quantized_layers
import samples
import torch
from decoding import by_cache
from hypothesis import strategies as st

import cupyops
from cupyops._dispatch.gemm.scaled import E5M2, PAIRS
from cupyops._kernel.kernel import FLOATING
from cupyops.ops._group_norm import group_norm_alike
from cupyops.ops._linear_lowered import linear_lowered
from cupyops.ops._packed_attention import packed_attention, parts_of
from cupyops.testing.call import Call
from cupyops.testing.fuzz import calls, tensors

F = torch.nn.functional

_small = st.integers(1, 9)
_dtypes = st.sampled_from(FLOATING)


def _scale_shift(input: Any, weight: Any, bias: Any = None) -> Any:
    given = [t for t in (input, weight, bias) if t is not None]
    if len({t.dtype for t in given}) == 1:  # in full before it is multiplied: no gradient of elements there are none of
        input = input.expand(torch.broadcast_shapes(*(t.shape for t in given)))
    return input * weight if bias is None else input * weight + bias


def gelus() -> st.SearchStrategy[Call]:
    """Without infinities: of those PyTorch's own on a CPU makes NaN or not as the layout has it."""
    drawn = calls(cupyops.gelu, approximate=st.sampled_from(["none", "tanh", "other"]))
    return drawn.filter(lambda call: not any(bool(t.isinf().any()) for t in call.all_tensors()))


def gated(**options: Any) -> st.SearchStrategy[Call]:
    """Two tensors alike, or one that is packed, perhaps oddly; without what is not finite."""

    @st.composite
    def draw_call(draw: st.DrawFn) -> Call:
        dtype, shape = draw(_dtypes), draw(st.sampled_from([(7,), (3, 8), (2, 3, 33), (0, 4), (5, 0), (3, 300)]))
        keywords = {name: draw(st.sampled_from(values)) for name, values in options.items()}
        packed = (*shape[:-1], 2 * shape[-1])
        count, size = draw(st.sampled_from([(1, packed), (1, shape), (2, shape)]))
        return Call(*(draw(tensors(size, dtype, special=False)) for _ in range(count)), **keywords)

    return draw_call()


@st.composite
def biased(draw: st.DrawFn) -> Call:
    """A bias of the last dimension, now and then of another; without what is not finite."""
    dtype, shape = draw(_dtypes), draw(st.sampled_from([(7,), (3, 8), (2, 3, 33), (0, 4), (5, 0), (3, 300)]))
    size = draw(st.sampled_from([shape[-1], shape[-1], shape[-1] + 1]))
    form = draw(st.sampled_from(["none", "tanh"]))
    return Call(draw(tensors(shape, dtype, special=False)), draw(tensors((size,), dtype, special=False)), form)


def _bias_gelu(input: Any, bias: Any, approximate: str) -> Any:
    if bias.shape != input.shape[-1:]:
        raise ValueError("a bias of another size")
    return F.gelu(input + bias, approximate=approximate)


def _gated(f: Callable[..., Any]) -> Callable[..., Any]:
    def function(gate: Any, up: Any = None, **options: Any) -> Any:
        if up is None and gate.shape[-1] % 2:
            raise ValueError("halves of an odd dimension")
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return f(gate, **options) * up

    return function


@st.composite
def products(draw: st.DrawFn) -> Call:
    """Matrices, vectors and batches, mostly of sizes that fit."""
    dtype, batch = draw(_dtypes), draw(st.sampled_from([(), (2,), (1,), (3, 1), (0,)]))
    m, k, n = (draw(st.sampled_from([0, 1, 2, 5, 8, 16, 17, 33])) for _ in range(3))
    left = draw(st.sampled_from([(*batch, m, k), (m, k), (k,)]))
    right = draw(st.sampled_from([(*batch, k, n), (k, n), (k,), (k + 1, n)]))
    return Call(draw(tensors(left, dtype, special=False)), draw(tensors(right, dtype, special=False)))


@st.composite
def affine(draw: st.DrawFn) -> Call:
    dtype, rows = draw(_dtypes), draw(st.sampled_from([(), (3,), (2, 3), (0,), (17,)]))
    k, n = draw(st.sampled_from([0, 1, 5, 8, 33])), draw(st.sampled_from([0, 1, 4, 9, 40]))
    bias = draw(st.sampled_from([None, (n,), (1,), (n + 1,)]))
    return Call(
        draw(tensors((*rows, k), dtype, special=False)),
        draw(tensors((n, k), dtype, special=False)),
        None if bias is None else draw(tensors(bias, dtype, special=False)),
    )


@st.composite
def lowered(draw: st.DrawFn) -> Call:
    """An input of a half type, and parameters of float32."""
    dtype, rows = draw(st.sampled_from(FLOATING[:2])), draw(st.sampled_from([(), (3,), (2, 3), (0,), (17,)]))
    k, n = draw(st.sampled_from([0, 1, 5, 8, 33])), draw(st.sampled_from([0, 1, 4, 9, 40]))
    weight, bias = (draw(tensors(shape, torch.float32, special=False)) for shape in ((n, k), (n,)))
    return Call(draw(tensors((*rows, k), dtype, special=False)), weight, draw(st.sampled_from([None, bias])))


def _linear_lowered(input: Any, weight: Any, bias: Any) -> Any:
    return F.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))


@st.composite
def packed(draw: st.DrawFn) -> Call:
    """Queries, keys and values of one layer, as most models lay them out, or by heads."""
    dtype, by_heads = draw(st.sampled_from(FLOATING[:2])), draw(st.booleans())
    b, h, n, d = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 40)),
        draw(st.sampled_from([8, 12, 64])),
    )
    row, step = 3 * h * d, d if by_heads else h * d
    strides = [n * row, 3 * d if by_heads else d, row, 1]
    whole = draw(tensors((b, n, row), dtype, special=False))
    return Call(whole, [b, h, n, d], strides, [0, step, 2 * step], draw(st.booleans()), None)


def _packed_attention(whole: Any, sizes: Any, strides: Any, offsets: Any, is_causal: bool, scale: Any) -> Any:
    parts = parts_of(whole.contiguous(), sizes, strides, offsets)
    return F.scaled_dot_product_attention(*parts, is_causal=is_causal, scale=scale)


def _add_rms_norm(input: Any, residual: Any, shape: Any, weight: Any, eps: Any) -> Any:
    summed = (input + residual).contiguous()
    return F.rms_norm(summed, shape, weight, eps), summed


@st.composite
def activated(draw: st.DrawFn) -> Call:
    """Linear layers; now and then a residual of another shape."""
    call = draw(affine())
    x, weight, bias = call.args
    activation = draw(st.sampled_from(["none", "relu", "gelu", "gelu_tanh", "silu"]))
    shape = draw(st.sampled_from([None, (*x.shape[:-1], weight.shape[0]), (*x.shape[:-1], weight.shape[0] + 1)]))
    residual = None if shape is None else draw(tensors(shape, x.dtype, special=False))
    return Call(x, weight, bias, activation, residual)


def _activated(input: Any, weight: Any, bias: Any, activation: str, residual: Any) -> Any:
    if residual is not None and residual.shape != (*input.shape[:-1], weight.shape[0]):
        raise ValueError("a residual of another shape")
    return gemms.linear_act(input, weight, bias, activation, residual)


@st.composite
def gated_layers(draw: st.DrawFn) -> Call:
    """Two weights, or packed ones, now and then of an odd number of rows."""
    dtype, rows = draw(_dtypes), draw(st.sampled_from([(), (3,), (2, 3), (0,), (17,)]))
    k, n = draw(st.sampled_from([0, 1, 5, 8, 33])), draw(st.sampled_from([0, 1, 4, 9, 40]))
    weights = [draw(tensors((n, k), dtype, special=False)) for _ in range(draw(st.sampled_from([1, 2, 2])))]
    activation = draw(st.sampled_from(["silu", "gelu", "gelu_tanh"]))
    return Call(draw(tensors((*rows, k), dtype, special=False)), *weights, activation=activation)


@st.composite
def grouped_products(draw: st.DrawFn) -> Call:
    """Each kind, now and then with groups that end outside."""
    dtype, count = draw(_dtypes), draw(st.integers(1, 4))
    m, n, k, size = (draw(st.sampled_from([1, 5, 8, 16])) for _ in range(4))
    at = sorted(draw(st.integers(0, size + (draw(st.integers(0, 9)) == 0))) for _ in range(count))
    kinds = [
        ((size, k), (count, k, n)),
        ((count, m, k), (k, size)),
        ((m, size), (size, n)),
        ((count, m, k), (count, k, n)),
    ]
    kind = draw(st.sampled_from(kinds))
    offs = None if kind == kinds[3] else groups.ends(*at)
    return Call(*(draw(tensors(shape, dtype, special=False)) for shape in kind), offs=offs)


@st.composite
def products_of_bytes(draw: st.DrawFn) -> Call:
    """Of each pair of types, now and then one that there is not; with scales of each kind."""
    a, b = draw(st.sampled_from([*PAIRS, *PAIRS, (E5M2, E5M2)]))
    m, k, n = (draw(st.sampled_from([1, 5, 8, 16, 33])) for _ in range(3))
    by_row, out = draw(st.booleans()), draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    shapes = ((m, k), (n, k), *(((m, 1), (1, n)) if by_row else ((), ())), (n,))
    x, weight, *scales, bias = (draw(tensors(shape, torch.float32, special=False)).detach() for shape in shapes)
    bias = draw(st.sampled_from([None, bias]))
    types = byte_products.types_of(a, b, out)
    return Call(x, weight, *scales, bias, types=types, use_fast_accum=draw(st.booleans()))


@st.composite
def quantised_layers(draw: st.DrawFn) -> Call:
    """Each kind of number, with any number of groups that divides the columns."""
    kind, dtype = draw(st.sampled_from(quantized_layers.KINDS)), draw(_dtypes)
    rows, n, k = (
        draw(st.sampled_from([0, 1, 5, 33])),
        draw(st.sampled_from([1, 7, 16, 40])),
        draw(st.sampled_from([2, 8, 96, 256])),
    )
    groups = draw(st.sampled_from([count for count in (1, 2, 3, 8) if k % count == 0]))
    x, scale, zero_point, bias = (
        draw(tensors(shape, dtype, special=False)) for shape in ((rows, k), (n, groups), (n, groups), (n,))
    )
    weight = draw(tensors((n, k), torch.int64, high=256))
    shifted, biased = draw(st.booleans()), draw(st.booleans())
    return Call(x, weight, scale, zero_point if shifted else None, bias if biased else None, kind=kind)


@st.composite
def normalised(draw: st.DrawFn, inputs: int = 1, parameters: int = 1, eps: tuple[Any, ...] = (None, 0.1, 0.0)) -> Call:
    dtype, rows = draw(_dtypes), draw(st.sampled_from([(), (3,), (2, 3), (0,), (19,)]))
    shape = draw(st.sampled_from([(1,), (5,), (8,), (33,), (2, 3), (300,), (0,)]))
    given = [draw(st.one_of(st.none(), tensors(shape, dtype))) for _ in range(parameters)]
    return Call(
        *[draw(tensors((*rows, *shape), dtype)) for _ in range(inputs)], shape, *given, draw(st.sampled_from(eps))
    )


@st.composite
def batch_normalised(draw: st.DrawFn) -> Call:
    dtype, channels = draw(_dtypes), draw(st.sampled_from([1, 3, 8]))
    shape = (draw(st.integers(0, 5)), channels, *draw(st.sampled_from([(), (5,), (8,), (3, 4), (2, 1, 3)])))
    training = draw(st.booleans())
    mean, var, weight, bias = (draw(tensors((channels,), dtype, special=False)) for _ in range(4))
    running = (None, None) if training else (mean.detach(), var.detach().abs() + 0.5)
    parameters = [draw(st.sampled_from([None, parameter])) for parameter in (weight, bias)]
    return Call(draw(tensors(shape, dtype, special=False)), *running, *parameters, training)


@st.composite
def batch_normalised_and_activated(draw: st.DrawFn) -> Call:
    """Channels of whole vectors, and others; now and then a residual."""
    call = draw(batch_normalised())
    x, *more = call.args
    residual = draw(st.sampled_from([None, draw(tensors(x.shape, x.dtype, special=False))]))
    return Call(x, *more, activation=draw(st.sampled_from(["relu", None])), residual=residual)


@st.composite
def group_normalised(draw: st.DrawFn) -> Call:
    dtype, groups = draw(_dtypes), draw(st.sampled_from([1, 2, 3]))
    channels = groups * draw(st.integers(1, 3))
    shape = (draw(st.integers(0, 3)), channels, *draw(st.sampled_from([(5,), (8,), (3, 4), (2, 1, 3), (33,)])))
    weight = draw(st.one_of(st.none(), tensors((channels,), dtype)))
    # without a weight PyTorch's own backward of a bias raises
    bias = None if weight is None else draw(st.one_of(st.none(), tensors((channels,), dtype)))
    return Call(draw(tensors(shape, dtype)), groups, weight, bias, draw(st.sampled_from([1e-5, 0.1])))


@st.composite
def group_normalised_alike(draw: st.DrawFn) -> Call:
    """Of channels_last, most in rows of whole vectors."""
    dtype, groups = draw(_dtypes), draw(st.sampled_from([1, 2, 4]))
    channels = groups * draw(st.sampled_from([3, 4, 8, 40]))
    shape = (draw(st.integers(0, 2)), channels, draw(st.sampled_from([1, 5, 33])), draw(st.sampled_from([1, 16, 19])))
    x = draw(tensors(shape, dtype, special=False)).to(memory_format=torch.channels_last)
    weight, bias = (draw(tensors((channels,), dtype)) for _ in range(2))
    return Call(x, groups, weight, bias, draw(st.sampled_from([1e-5, 0.1])))


def _group_norm(x: Any, *more: Any) -> Any:
    """Of channels_last laid out alike."""
    return cupyops.group_norm(x, *more) if x.is_contiguous() else group_norm_alike(x, *more)


def _group_norm_by_torch(x: Any, *more: Any) -> Any:
    """On a CPU PyTorch ends the process in backward of channels_last where x wants no gradient."""
    return F.group_norm(x.flatten(2), *more).reshape(x.shape)


@st.composite
def sums(draw: st.DrawFn) -> Call:
    """Up to four dimensions, any of them reduced."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17, 33]), max_size=4).map(tuple))
    dims = draw(st.sampled_from([None, (), *range(-len(shape), len(shape)), *([(0, -1)] if len(shape) > 1 else [])]))
    return Call(draw(tensors(shape, draw(_dtypes), special=False)), dims, draw(st.booleans()))


@st.composite
def convolutions(draw: st.DrawFn) -> Call:
    dtype, groups = draw(_dtypes), draw(st.sampled_from([1, 1, 1, 2, 3]))
    batch, channels, out = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    image, window = (draw(_small), draw(_small)), (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    pair = lambda values: st.one_of(values, st.tuples(values, values))
    padding = st.one_of(pair(st.integers(0, 3)), st.sampled_from(["same", "valid"]))
    input_shape = (channels * groups, *image) if draw(st.integers(0, 4)) == 0 else (batch, channels * groups, *image)
    return Call(
        draw(tensors(input_shape, dtype, special=False)),
        draw(tensors((out * groups, channels, *window), dtype, special=False)),
        draw(st.one_of(st.none(), tensors((out * groups,), dtype, special=False))),
        draw(pair(st.integers(1, 3))),
        draw(padding),
        draw(pair(st.integers(1, 3))),
        groups,
    )


@st.composite
def pools(draw: st.DrawFn) -> Call:
    dtype, pair = draw(_dtypes), lambda values: st.one_of(values, st.tuples(values, values))
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(_small), draw(_small))
    shape = shape[1:] if draw(st.integers(0, 4)) == 0 else shape
    return Call(
        draw(tensors(shape, dtype)),
        draw(pair(st.integers(1, 4))),
        draw(st.one_of(st.none(), pair(st.integers(1, 4)))),
        draw(pair(st.integers(0, 2))),
        draw(pair(st.integers(1, 3))),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@st.composite
def average_pools(draw: st.DrawFn) -> Call:
    window = draw(pools()).args[:4]
    override = draw(st.sampled_from([None, None, 3, -2, 0]))
    return Call(*window, draw(st.booleans()), draw(st.booleans()), override)


def sound_pools() -> st.SearchStrategy[Call]:
    """Without those on which PyTorch's own backward on a CPU writes outside its array: windows that hold nothing."""
    return pools().filter(lambda call: call.args[4] in (1, (1, 1)) or call.args[3] in (0, (0, 0)))


@st.composite
def losses(draw: st.DrawFn, smoothing: bool) -> Call:
    dtype, classes = draw(_dtypes), draw(st.sampled_from([1, 2, 5, 33, 300]))
    rows = draw(st.sampled_from([(), (1,), (4,), (0,), (2, 3), (3, 2, 2)]))
    shape = (*rows[:1], classes, *rows[1:])
    target: Any = draw(tensors(rows, torch.int64, high=classes))
    # of one sample that is ignored, without a batch, PyTorch's mean is NaN on a CPU and 0 on a GPU
    ignored = draw(st.sampled_from([-100, 0, 2])) if rows else -100
    if rows and draw(st.booleans()) and target.numel():
        target = torch.where(torch.arange(target.numel()).view(target.shape) % 3 == 0, ignored, target)
    options: dict[str, Any] = {
        "weight": draw(st.one_of(st.none(), tensors((classes,), dtype, special=False).map(lambda t: t.detach().abs()))),
        "ignore_index": ignored,
        "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
    }
    if smoothing:
        options["label_smoothing"] = draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))
        if draw(st.integers(0, 3)) == 0:
            target = draw(tensors(shape, dtype, special=False)).detach().float().softmax(min(1, len(shape) - 1))
            target = target.to(dtype)
    return Call(draw(tensors(shape, dtype, special=False)), target, **options)


@st.composite
def divergences(draw: st.DrawFn) -> Call:
    """Targets that are positive, or logarithms; broadcast in part."""
    dtype, log = draw(_dtypes), draw(st.booleans())
    shape = draw(st.sampled_from([(), (5,), (0,), (3, 33), (2, 3, 4)]))
    other = draw(st.sampled_from([shape, shape[1:], (1,) * len(shape)]))
    target = draw(tensors(other, dtype, special=False))
    if not log:
        target = (target.detach().abs() + 0.25).requires_grad_(target.requires_grad)
    reduction = draw(st.sampled_from(["none", "sum", "batchmean"]))
    return Call(draw(tensors(shape, dtype, special=False)), target, reduction=reduction, log_target=log)


@st.composite
def linear_losses(draw: st.DrawFn) -> Call:
    dtype, classes, size = draw(_dtypes), draw(st.sampled_from([1, 5, 33])), draw(st.sampled_from([1, 7, 16]))
    rows = draw(st.sampled_from([(), (1,), (9,), (0,), (2, 3)]))
    target: Any = draw(tensors(rows, torch.int64, high=classes))
    options = {"ignore_index": draw(st.sampled_from([-100, 0])) if target.numel() > 1 else -100}
    return Call(
        draw(tensors((*rows, size), dtype, special=False)),
        draw(tensors((classes, size), dtype, special=False)),
        target,
        draw(st.one_of(st.none(), tensors((classes,), dtype, special=False))),
        draw(st.one_of(st.none(), tensors((classes,), dtype, special=False).map(lambda t: t.detach().abs()))),
        reduction=draw(st.sampled_from(["none", "mean", "sum"])),
        label_smoothing=draw(st.sampled_from([0.0, 0.1])),
        **options,
    )


def _linear_cross_entropy(input: Any, weight: Any, target: Any, bias: Any, class_weight: Any, **options: Any) -> Any:
    logits = F.linear(input.reshape(-1, input.shape[-1]), weight, bias)
    logits = logits.float() if logits.dtype.itemsize == 2 else logits
    class_weight = None if class_weight is None else class_weight.to(logits.dtype)
    y = F.cross_entropy(logits, target.reshape(-1), class_weight, **options)
    return y.reshape(target.shape) if options["reduction"] == "none" else y


def _dropped(input: torch.Tensor, p: float) -> torch.Tensor:
    seed = torch.full((), 2**62 + 11, dtype=torch.int64, device=input.device)
    result: torch.Tensor = cupyops.operators()["cupyops::dropout"](input, seed, p)
    return result


def _masked(input: torch.Tensor, p: float) -> torch.Tensor:
    """By the mask of ones: it hangs neither on the values nor on how they lie in memory."""
    return input * _dropped(torch.ones(input.shape, dtype=input.dtype, device=input.device), p)


@st.composite
def rotations(draw: st.DrawFn) -> Call:
    dtype, seq, pairs = draw(_dtypes), draw(_small), draw(st.sampled_from([1, 3, 8, 16]))
    size = 2 * pairs + draw(st.sampled_from([0, 0, 1, 8]))
    shape, seq_dim = draw(st.sampled_from([((seq, size), -2), ((2, 3, seq, size), -2), ((2, seq, 3, size), -3)]))
    table = [draw(tensors((9, pairs), dtype, special=False)).detach() for _ in range(2)]
    places = draw(st.sampled_from([None, (seq,), (shape[0], seq)]))
    places = (seq,) if places is not None and len(shape) == 2 else places
    positions = None if places is None else draw(tensors(places, torch.int64, high=9))
    interleaved = draw(st.booleans())
    return Call(draw(tensors(shape, dtype, special=False)), *table, positions, interleaved=interleaved, seq_dim=seq_dim)


def _rope(x: Any, cos: Any, sin: Any, positions: Any = None, *, interleaved: bool = False, seq_dim: int = -2) -> Any:
    """One pair of columns after the other."""
    moved, half = x.movedim(seq_dim, -2), cos.shape[-1]
    if positions is None:
        positions = torch.arange(moved.shape[-2], device=x.device)
    columns = list(moved.unbind(-1))
    for j in range(half):
        first, second = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        a, b, c, s = columns[first], columns[second], cos[:, j][positions], sin[:, j][positions]
        if positions.dim() == 2:
            c, s = (t.view(t.shape[0], *(1,) * (a.dim() - 2), t.shape[1]) for t in (c, s))
        columns[first], columns[second] = a * c - b * s, b * c + a * s
    return torch.stack(columns, -1).movedim(-2, seq_dim).contiguous()


def maxima() -> st.SearchStrategy[Call]:
    """As sums, over dimensions that are named."""
    return sums().map(lambda call: Call(call.args[0], call.args[1] if call.args[1] is not None else (), call.args[2]))


@st.composite
def variances(draw: st.DrawFn) -> Call:
    """As sums, of more elements than the correction; not over `()`: PyTorch's own gradient is wrong then."""
    x, dims, keepdim = draw(sums()).args
    dims = None if dims == () else dims
    reduced = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    elements = math.prod(x.shape[dim] for dim in reduced)
    corrections = [one for one in (0, 1, 2.5) if one < elements] or [0]
    return Call(x, dims, keepdim=keepdim, correction=draw(st.sampled_from(corrections)))


@st.composite
def lookups(draw: st.DrawFn) -> Call:
    """Rows of a table, some of them over and over."""
    dtype, rows, size = draw(_dtypes), draw(st.sampled_from([1, 3, 33])), draw(st.sampled_from([0, 1, 5, 8, 33]))
    indices = draw(tensors(draw(st.sampled_from([(), (0,), (5,), (2, 3), (70,)])), torch.int64, high=rows))
    padding, by_freq = draw(st.sampled_from([None, 0, -1])), draw(st.booleans())
    weight = draw(tensors((rows, size), dtype, special=False))
    return Call(indices, weight, padding, scale_grad_by_freq=by_freq)


@st.composite
def attended(draw: st.DrawFn) -> Call:
    """Heads that are shared, either diagonal, windows; rows that see no key."""
    dtype, width = draw(_dtypes), draw(st.sampled_from([1, 5, 8, 16, 72]))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    queries, keys = draw(st.sampled_from([0, 1, 5, 33])), draw(st.sampled_from([1, 7, 40]))
    sizes = (kv_heads * group, queries), (kv_heads, keys), (kv_heads, keys)
    given = [draw(tensors((batch, *size, width), dtype, special=False)) for size in sizes]
    window = draw(st.sampled_from([None, None, (3, 2), (None, 1), (4, None)]))
    causal, scale = draw(st.sampled_from([None, "top_left", "bottom_right"])), draw(st.sampled_from([None, 0.3]))
    return Call(*given, causal=causal, window=window, scale=scale, return_lse=draw(st.booleans()))


def _attention(
    q: Any, k: Any, v: Any, causal: Any = None, window: Any = None, scale: Any = None, return_lse: bool = False
) -> Any:
    y, lse = attentions.eager(q, k, v, attentions.sees(q.shape[2], k.shape[2], causal, window), scale)
    return (y, lse) if return_lse else y


@st.composite
def decoded(draw: st.DrawFn) -> Call:
    """A few queries against a cache, paged or not, of sequences that may be empty."""
    dtype, width = draw(_dtypes), draw(st.sampled_from([1, 8, 16, 72]))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3, 17]))
    queries, rows = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 7, 40]))
    block_size = draw(st.sampled_from([0, 0, 3, 16]))
    blocks = -(-rows // block_size) if block_size else 0
    shape = (batch * blocks, block_size) if block_size else (batch, rows)
    q = draw(tensors((batch, queries, kv_heads * group, width), dtype, special=False))
    k, v = (draw(tensors((*shape, kv_heads, width), dtype, special=False)) for _ in range(2))
    lengths = draw(st.sampled_from([None, draw(tensors((batch,), torch.int64, high=rows + 1))]))
    table = torch.arange(batch * blocks).flip(0).view(batch, blocks) if block_size else None
    window, softcap = draw(st.sampled_from([None, None, 0, 5])), draw(st.sampled_from([None, 2.0]))
    mask = None
    if window is None and draw(st.booleans()):
        mask = (
            draw(tensors((batch, queries, k.shape[1] * (table.shape[1] if block_size else 1)), torch.int64, high=2)) > 0
        )
    return Call(q, k, v, lengths, table, mask=mask, window=window, softcap=softcap, return_lse=draw(st.booleans()))


@st.composite
def scaled_products(draw: st.DrawFn) -> Call:
    """With a mask, or causal, or neither; of three dimensions too."""
    dtype, width = draw(_dtypes), draw(st.sampled_from([1, 5, 8, 16, 72]))
    lead = draw(st.sampled_from([(2,), (1, 2), (2, 1)]))
    queries, keys = draw(st.sampled_from([1, 5, 33])), draw(st.sampled_from([1, 7, 40]))
    given = [draw(tensors((*lead, rows, width), dtype, special=False)) for rows in (queries, keys, keys)]
    mask, causal = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    bias = draw(tensors((queries, keys), dtype, special=False)).detach() if mask else None
    return Call(*given, bias, is_causal=causal, scale=draw(st.sampled_from([None, 0.3])))


# function, PyTorch's, the calls
Drawn = tuple[Callable[..., Any], Callable[..., Any], st.SearchStrategy[Call]]
_DRAWN: dict[str, Drawn] = {
    "dropout": (_dropped, _masked, calls(_dropped, p=st.sampled_from([0.0, 0.3, 1.0]))),
    "attention": (cupyops.attention, _attention, attended()),
    "decode_attention": (cupyops.decode_attention, by_cache, decoded()),
    "packed_attention": (packed_attention, _packed_attention, packed()),
    "scaled_dot_product_attention": (
        cupyops.scaled_dot_product_attention,
        F.scaled_dot_product_attention,
        scaled_products(),
    ),
    "bias_gelu": (cupyops.bias_gelu, _bias_gelu, biased()),
    "geglu": (cupyops.geglu, _gated(F.gelu), gated(approximate=["none", "tanh"])),
    "gelu": (cupyops.gelu, F.gelu, gelus()),
    "rope": (cupyops.rope, _rope, rotations()),
    "swiglu": (cupyops.swiglu, _gated(F.silu), gated()),
    "scale_shift": (cupyops.scale_shift, _scale_shift, calls(cupyops.scale_shift)),
    "layer_norm": (cupyops.layer_norm, F.layer_norm, normalised(parameters=2, eps=(1e-5, 0.1, 0.0))),
    "rms_norm": (cupyops.rms_norm, F.rms_norm, normalised()),
    "add_rms_norm": (cupyops.add_rms_norm, _add_rms_norm, normalised(inputs=2)),
    "batch_norm": (cupyops.batch_norm, F.batch_norm, batch_normalised()),
    "batch_norm_act": (
        cupyops.batch_norm_act,
        normalisations.batch_norm_act,
        batch_normalised_and_activated(),
    ),
    "group_norm": (_group_norm, _group_norm_by_torch, st.one_of(group_normalised(), group_normalised_alike())),
    "embedding": (cupyops.embedding, F.embedding, lookups()),
    "amax": (cupyops.amax, torch.amax, maxima()),
    "sum": (cupyops.sum, torch.sum, sums()),
    "var": (cupyops.var, torch.var, variances()),
    "mean": (cupyops.mean, torch.mean, sums()),
    "matmul": (cupyops.matmul, torch.matmul, products()),
    "linear": (cupyops.linear, F.linear, affine()),
    "linear_lowered": (linear_lowered, _linear_lowered, lowered()),
    "linear_act": (cupyops.linear_act, _activated, activated()),
    "gated_linear": (cupyops.gated_linear, gemms.gated_linear, gated_layers()),
    "grouped_mm": (cupyops.grouped_mm, groups.by_torch, grouped_products()),
    "quantized_linear": (quantized_layers.linear, quantized_layers.by_torch, quantised_layers()),
    "scaled_mm": (byte_products.of_numbers, byte_products.of_numbers_by_torch, products_of_bytes()),
    "conv2d": (cupyops.conv2d, F.conv2d, convolutions()),
    "avg_pool2d": (cupyops.avg_pool2d, F.avg_pool2d, average_pools()),
    "max_pool2d": (cupyops.max_pool2d, F.max_pool2d, sound_pools()),
    "fused_linear_cross_entropy": (cupyops.fused_linear_cross_entropy, _linear_cross_entropy, linear_losses()),
    "kl_div": (cupyops.kl_div, F.kl_div, divergences()),
    "nll_loss": (cupyops.nll_loss, F.nll_loss, losses(smoothing=False)),
    "cross_entropy": (cupyops.cross_entropy, F.cross_entropy, losses(smoothing=True)),
}


def _by_annotations(name: str) -> Drawn:
    return getattr(cupyops, name), samples.contract(name).torch_function, calls(getattr(cupyops, name))


_MODULES = sorted(path.stem[1:] for path in Path(cupyops.ops.__file__).parent.glob("_[!_]*.py"))
FUZZED = {name: _DRAWN[name] if name in _DRAWN else _by_annotations(name) for name in _MODULES}
