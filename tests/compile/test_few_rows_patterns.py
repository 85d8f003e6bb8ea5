"""Layers of few rows in compiled graphs: of one input in one launch, with the norm in front and the residual behind."""

import pytest
import torch
import torch.nn.functional as F
from compiled import compiled

import cupyops
from cupyops._compile.backend import programs
from cupyops._dispatch.gemm import few_rows

HALF, WIDTH = torch.bfloat16, 64
LAYERS, GATE = "cupyops.linears", "cupyops.gated_linear"
RESIDUAL = "cupyops.linear_act.default"


@pytest.fixture(autouse=True)
def any_weight(monkeypatch):
    """Weights of any size are worth it."""
    monkeypatch.setattr(few_rows, "LEAST_WEIGHT", 1)
    few_rows.launch_of.cache_clear()


def norm(x, weight, eps=1e-5):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def made(*shapes, dtype=HALF):
    torch.manual_seed(0)
    return [(torch.randn(shape) / (shape[-1] ** 0.5 if len(shape) == 2 else 1)).to(dtype) for shape in shapes]


def called(function, *given):
    """Compare with float64, beside eager's own error; return the calls that are left."""
    programs.clear()
    with torch.no_grad():
        true = function(*(one.double() if one.is_floating_point() else one for one in given))
        want = function(*(one.clone() for one in given))
        with cupyops.simulate("sm_90"):
            found = compiled(function)(*(one.clone() for one in given))
    for ours, theirs, right in zip(*(y if isinstance(y, tuple) else (y,) for y in (found, want, true)), strict=True):
        assert ours.shape == theirs.shape and ours.dtype is theirs.dtype
        error, allowed = ((one.double() - right).norm() for one in (ours, theirs))
        assert error <= 2 * allowed + 1e-6 * right.norm()
    return sorted(name for program in programs for name, _ in program.left)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [(2, 1), (3, 5)])
def test_a_layer_of_a_language_model(rows, dtype):
    def layer(x, first, q, k, v, o, second, gate, up, down):
        y = norm(x, first)
        x = x + F.linear(F.linear(y, q) * F.linear(y, k).sigmoid() + F.linear(y, v), o)
        y = norm(x, second)
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    wide = (96, WIDTH)
    weights = made((WIDTH,), wide, wide, wide, (WIDTH, 96), (WIDTH,), wide, wide, (WIDTH, 96), dtype=dtype)
    gate = [GATE] if dtype is HALF else [LAYERS]
    assert called(layer, *made((*rows, WIDTH), dtype=dtype), *weights) == sorted([LAYERS, *gate, RESIDUAL, RESIDUAL])


def test_layers_with_biases_and_without_a_norm():
    def layers(x, a, b, c, of_a, of_c):
        x = x.relu()
        return F.linear(x, a, of_a), F.linear(x, b), F.linear(x, c, of_c), x

    given = made((4, WIDTH), (96, WIDTH), (33, WIDTH), (8, WIDTH), (96,), (8,))
    assert called(layers, *given) == [LAYERS]


def test_a_norm_that_something_else_reads_stays():
    def layers(x, weight, a, b):
        y = norm(x, weight)
        return F.linear(y, a), F.linear(y, b), y

    assert called(layers, *made((4, WIDTH), (WIDTH,), (96, WIDTH), (33, WIDTH))) == [LAYERS]


@pytest.mark.parametrize(
    "why", ["one weight", "many rows", "another residual", "a scaled residual", "another input", "exact"]
)
def test_what_stays_a_product(why, monkeypatch):
    rows = 65 if why == "many rows" else 4
    x, other, a, b, residual = made((rows, WIDTH), (rows, WIDTH), (32, WIDTH), (32, WIDTH), (rows, 32))

    def function(x, other, a, b, residual):
        if why == "one weight":
            return F.linear(x, a)
        if why in ("many rows", "exact"):
            equal = (
                (x == other).to(x.dtype) if why == "exact" else x
            )  # values are compared: halves are rounded as in eager
            return F.linear(x, a), F.linear(x, b), equal
        if why == "another residual":
            return F.linear(x, a) + residual[:1]
        if why == "a scaled residual":
            return torch.add(F.linear(x, a), residual, alpha=2)
        return F.linear(x, a), F.linear(other, b)

    names = called(function, x, other, a, b, residual)
    assert set(names) == {"aten.mm.default"}


def test_a_product_reads_what_was_there_before_a_write():
    """The operator reads where the sum stands, behind the write of some rows of what it multiplies."""

    def function(x, cache, at, rows, residual):
        y = F.linear(x, cache)
        cache.index_copy_(0, at, rows)
        return y + (residual + cache.amax())  # which reads what was written

    x, cache, rows, residual = made((4, WIDTH), (32, WIDTH), (1, WIDTH), (4, 32))
    assert RESIDUAL in called(function, x, cache, torch.tensor([3]), 9 * rows, residual)
