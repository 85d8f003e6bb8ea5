"""Linear layers of one input beside PyTorch's, in one launch or in several."""

import contextlib

import few_rows_calls
import pytest
import torch
import torch.nn.functional as F

import cupyops
from cupyops.ops._linears import linears


def layers(device, dtype, rows, k, features, without=()):
    """x, weights and biases that want gradients, results near 1."""
    torch.manual_seed(0)

    def make(*shape, scale=1.0):
        return (scale * torch.randn(shape, device=device)).to(dtype).requires_grad_()

    x, weights = make(*rows, k), [make(n, k, scale=k**-0.5) for n in features]
    return x, weights, [None if i in without else make(n) for i, n in enumerate(features)]


def by_torch(x, weights, biases):
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]


def tensors(x, weights, biases):
    return [x, *weights, *(bias for bias in biases if bias is not None)]


def in_float64(tensor):
    return None if tensor is None else tensor.detach().double().requires_grad_()


def on(device):
    return cupyops.simulate("sm_90") if device.type == "cpu" else contextlib.nullcontext()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("features", [(70,), (40, 33), (64, 16, 16), (5, 70, 32, 1)])
def test_one_launch(device, dtype, features):
    """Values and gradients are as near to float64 as PyTorch's, twice as far at most."""
    given = layers(device, dtype, (2, 3), 72, features, without=(1,))
    exact = in_float64(given[0]), [in_float64(w) for w in given[1]], [in_float64(b) for b in given[2]]
    grads = [torch.randn(2, 3, n, device=device).to(dtype) for n in features]
    with few_rows_calls.asked(device), on(device), cupyops.trace() as trace:
        found = linears(*given)
    (launch,) = trace.launches()
    assert launch.kernel.startswith("few_rows")
    assert launch.grid[0] % sum(-(-n // 32) for n in features) == 0
    with on(device):
        found += torch.autograd.grad(found, tensors(*given), grads)
    truth, theirs = by_torch(*exact), by_torch(*given)
    truth += torch.autograd.grad(truth, tensors(*exact), [grad.double() for grad in grads])
    theirs += torch.autograd.grad(theirs, tensors(*given), grads)
    for ours, other, right in zip(found, theirs, truth):
        least = torch.finfo(dtype).eps * right.abs().max().clamp(min=1)  # what is summed is near 1
        assert (ours.double() - right).abs().max() <= 2 * max((other.double() - right).abs().max(), least)


@pytest.mark.parametrize("rows, k, features", [((65,), 72, (8, 8)), ((3,), 71, (8, 8)), ((3,), 72, (8,) * 5)])
def test_several_launches(device, rows, k, features):
    """Too many rows, rows that are no whole vectors, too many weights: linear's products one after the other."""
    given = layers(device, torch.float32, rows, k, features)
    with on(device), cupyops.never_slower(False), cupyops.trace() as trace:
        found = linears(*given)
    assert len([one for one in trace.launches() if one.kernel.startswith("gemm_fwd")]) == len(features)
    torch.testing.assert_close(found, by_torch(*given))


def test_plans_compiled_and_frozen(device):
    """Calls alike, in torch.compile too; what nobody wants a gradient of has none."""
    x, weights, biases = layers(device, torch.float32, (3,), 40, (6, 9), without=(0,))
    expected = by_torch(x, weights, biases)
    weights[1] = weights[1].detach()
    with on(device):
        for _ in range(5):
            found = linears(x, weights, biases)
            torch.testing.assert_close(found, expected)
            (grad,) = torch.autograd.grad(found[1].sum(), [weights[0]], allow_unused=True)
            assert grad is None or not grad.any()
        compiled = torch.compile(linears, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, weights, biases), expected)


def test_the_reference(device):
    given = layers(torch.device("cpu"), torch.float32, (3,), 40, (6, 9))
    torch.testing.assert_close(linears(*given), by_torch(*given))
    torch.testing.assert_close(linears(*given[:2]), by_torch(*given[:2], [None, None]))


def test_bad_input(device):
    x, weights, biases = layers(device, torch.float32, (3,), 40, (6, 9))
    for args, words in [
        ((x, []), "expected at least one"),
        ((x, weights, biases[:1]), "weights has 2 and biases 1"),
        ((x, [weights[0][0]]), r"one of shape \(40,\), expected \(out_features, in_features\)"),
        ((x, [weights[0].T]), "expected in_features 40"),
        ((x, weights, [biases[1], None]), "bias has shape"),
        ((x, [weights[0].double(), weights[1]]), "torch.float64"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            linears(*args)
