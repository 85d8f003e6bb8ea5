"""Layers of one input of few rows, with an RMS norm in front and without, beside PyTorch's in float64: one launch."""

import contextlib

import few_rows_calls
import pytest
import torch
import torch.nn.functional as F

import cupyops
from cupyops._dispatch.gemm.few_rows_layers import gated_linear, linears

EPS = 1e-3
DTYPES = [torch.bfloat16, torch.float32]
by_torch, gated_by_torch = few_rows_calls.normalised, few_rows_calls.normalised_gate


def made(device, dtype, rows, k, features, without=()):
    """x, the norm's weight, eps, weights and biases; the mean of the squares of a row is between 1e-3 and 10."""
    torch.manual_seed(0)
    x = torch.randn(*rows, k, device=device) * torch.logspace(-1.5, 0.5, rows[-1], device=device)[:, None]
    weights = [torch.randn(n, k, device=device) / k**0.5 for n in features]
    biases = [None if i in without else torch.randn(n, device=device).to(dtype) for i, n in enumerate(features)]
    return x.to(dtype), (torch.rand(k, device=device) + 0.5).to(dtype), EPS, [w.to(dtype) for w in weights], biases


@contextlib.contextmanager
def one_launch(device, operator="linear", norm=True, **card):
    """Calls inside are one launch of few rows each."""
    on = cupyops.simulate("sm_90") if device.type == "cpu" else contextlib.nullcontext()
    with few_rows_calls.asked(device, operator, **card), on, cupyops.trace() as trace:
        yield
    assert [one.kernel.startswith("few_rows") and one.kernel.endswith("true>") is norm for one in trace.launches()] == [
        True
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, features", [((1,), (70,)), ((10,), (40, 33)), ((20,), (64, 16, 16)), ((50,), (40,))])
@pytest.mark.parametrize("size", [704, 8224])
def test_layers(device, dtype, rows, features, size):
    """Rows of so many bytes, the longer of which blocks of a cluster share, and with them the squares."""
    given = made(device, dtype, rows, size // dtype.itemsize, features, without=(1,))
    with one_launch(device, multiprocessors=32):
        found = linears(*given)
    few_rows_calls.compare(found, by_torch, given)


@pytest.mark.parametrize("dtype", [torch.float16, *DTYPES])
@pytest.mark.parametrize("features", [(40, 33), (64, 16, 16), (5, 70, 32, 1)])
def test_layers_without_a_norm(device, dtype, features):
    x, _, _, weights, biases = made(device, dtype, (6,), 72, features, without=(1,))
    with one_launch(device, norm=False):
        found = linears(x, None, 0.0, weights, biases)
    few_rows_calls.compare(found, lambda x, *of: [F.linear(x, w, b) for w, b in zip(*of)], (x, weights, biases))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate(device, dtype, activation):
    x, norm, eps, weights, _ = made(device, dtype, (12,), 328, (70, 70))
    given = x, norm, eps, *weights, activation
    with one_launch(device, "gated_linear"):
        found = gated_linear(*given)
    few_rows_calls.compare(found, lambda *args: [gated_by_torch(*args)], given)


@pytest.mark.parametrize("dtype, rows, k", [(torch.float16, 3, 72), (torch.float32, 65, 72), (torch.float32, 3, 71)])
def test_without_a_kernel(dtype, rows, k):
    """Half types of too small a range, too many rows, rows that are no whole vectors: PyTorch's functions run."""
    given = made(torch.device("cpu"), dtype, (rows,), k, (8, 9))
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        found = linears(*given)
    assert not trace.launches()
    torch.testing.assert_close(found, by_torch(*given), rtol=0, atol=0)


def test_special_values(device):
    """A row that is not finite leaves the others alone; a row of zeros is divided by the root of eps."""
    x, norm, eps, weights, biases = made(device, torch.float32, (4,), 40, (6,))
    x[1], x[2, 3] = 0, float("nan")
    with one_launch(device):
        (y,) = linears(x, norm, eps, weights, biases)
    assert y[2].isnan().all() and torch.equal(y[1], biases[0])
    torch.testing.assert_close(y[[0, 3]], by_torch(x, norm, eps, weights, biases)[0][[0, 3]])
