"""What is drawn for each operator beyond what its annotations say, so that most calls mean something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

import cupyops
from cupyops.kernel import FLOATING
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
def normalised(draw: st.DrawFn) -> Call:
    dtype, rows = draw(_dtypes), draw(st.sampled_from([(), (3,), (2, 3), (0,), (19,)]))
    shape = draw(st.sampled_from([(1,), (5,), (8,), (33,), (2, 3), (300,), (0,)]))
    parameters = [draw(st.one_of(st.none(), tensors(shape, dtype))) for _ in range(2)]
    return Call(draw(tensors((*rows, *shape), dtype)), shape, *parameters, draw(st.sampled_from([1e-5, 0.1, 0.0])))


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


# function, PyTorch's, the calls
FUZZED: dict[str, tuple[Callable[..., Any], Callable[..., Any], st.SearchStrategy[Call]]] = {
    "relu": (cupyops.relu, F.relu, calls(cupyops.relu)),
    "gelu": (cupyops.gelu, F.gelu, gelus()),
    "silu": (cupyops.silu, F.silu, calls(cupyops.silu)),
    "add": (cupyops.add, torch.add, calls(cupyops.add)),
    "scale_shift": (cupyops.scale_shift, _scale_shift, calls(cupyops.scale_shift)),
    "softmax": (cupyops.softmax, F.softmax, calls(cupyops.softmax)),
    "log_softmax": (cupyops.log_softmax, F.log_softmax, calls(cupyops.log_softmax)),
    "layer_norm": (cupyops.layer_norm, F.layer_norm, normalised()),
    "sum": (cupyops.sum, torch.sum, sums()),
    "mean": (cupyops.mean, torch.mean, sums()),
    "matmul": (cupyops.matmul, torch.matmul, products()),
    "linear": (cupyops.linear, F.linear, affine()),
    "conv2d": (cupyops.conv2d, F.conv2d, convolutions()),
    "max_pool2d": (cupyops.max_pool2d, F.max_pool2d, sound_pools()),
    "nll_loss": (cupyops.nll_loss, F.nll_loss, losses(smoothing=False)),
    "cross_entropy": (cupyops.cross_entropy, F.cross_entropy, losses(smoothing=True)),
}
