import gemms
import pytest
import torch
import torch.nn.functional as F
from contract import Make, OperatorContract, Sample

import cupyops
from cupyops._dispatch.gemm import gemm

# Errors allowed, in units in the last place of the largest result: 16-bit results are rounded once; the sum of some
# hundred products in fp32 or fp64 has errors of its own.
UNITS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 8, torch.float64: 8}


class TestLinear(OperatorContract):
    function = staticmethod(cupyops.linear)
    torch_function = staticmethod(F.linear)
    kernels = {"gemm_fwd", "gemm_sum"}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(64, 128), make(10, 128), make(10))
        yield Sample(make(5, 300), make(3, 300), make(3))  # k split, forward
        yield Sample(make(300, 5), make(7, 5), make(7))  # k split, grad_weight and grad_bias
        yield Sample(make(7, 64), make(65, 64), make(65))  # the column of ones begins a tile
        yield Sample(make(2, 3, 16), make(24, 16), bias=make(24))

    def small_samples(self, make: Make):
        yield Sample(make(3, 4), make(5, 4), make(5))
        yield Sample(make(3, 4), make(5, 4))
        yield Sample(make(4), make(5, 4), make(5))
        yield Sample(make(2, 3, 2), make(2))
        yield Sample(make(2, 1, 3), make(1, 3), make(1))

    def test_signature_is_torch_s(self):
        """F.linear is built in and shows no signature."""
        for call in [lambda f: f(input=x, weight=w, bias=None), lambda f: f(x, w, b), lambda f: f(x, w)]:
            x, w, b = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
            torch.testing.assert_close(call(cupyops.linear), call(F.linear))


@pytest.mark.parametrize("tile", gemm.TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_tile(device, dtype, tile):
    """130 rows and columns: four tiles of 128, with tails."""
    shapes = ((130, 136), (130, 136), (130,))
    x, weight, bias = (torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    truth = F.linear(*exact)
    with gemms.tiled("linear", dtype, tile):
        y = cupyops.linear(x, weight, bias)
        grad = torch.randn_like(y)
        ours = [y, *torch.autograd.grad(y, (x, weight, bias), grad)]
    theirs = [truth, *torch.autograd.grad(truth, exact, grad.double())]
    for a, b in zip(ours, theirs):
        assert (a.double() - b).abs().max() <= UNITS[dtype] * torch.finfo(dtype).eps * b.abs().max()


def test_special_values(device):
    x = [[float("nan"), 1.0], [float("inf"), 1.0], [0.0, -0.0], [2.0, 1.0]]
    x = torch.tensor(x, device=device, requires_grad=True)
    weight = torch.tensor([[1.0, 2.0], [0.0, 1.0], [-1.0, float("inf")]], device=device, requires_grad=True)
    bias = torch.tensor([0.5, -float("inf"), 1.0], device=device, requires_grad=True)
    y, expected = cupyops.linear(x, weight, bias), F.linear(x, weight, bias)
    torch.testing.assert_close(y, expected, equal_nan=True)
    ours, theirs = (torch.autograd.grad(out.sum(), (x, weight, bias)) for out in (y, expected))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_bad_input(device):
    x, weight, bias = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device), torch.randn(4, device=device)
    for args, words in [
        ((x, weight.T.contiguous(), None), r"weight has shape \(3, 4\), expected in_features 3"),
        ((x, weight[None], None), "weight is .*1, 4, 3"),
        ((x[0, 0], weight, None), "input is .* at least 1 dimension"),
        ((x, weight, bias[:3]), r"bias has shape \(3,\), expected \(4,\)"),
        ((x, weight[0], bias), "bias is .*expected None"),
        ((x, weight.double(), None), "weight is torch.float64, but input is torch.float32"),
        ((x, weight, bias.half()), "bias is torch.float16"),
        ((x, None, None), "weight is None"),
        ((x, weight, 1.0), "bias is 1.0"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            cupyops.linear(*args)


def test_mixed_dtypes_under_autocast(device):
    x = torch.randn(3, 4, device=device, dtype=torch.bfloat16)
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y, expected = cupyops.linear(x, weight), F.linear(x, weight)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)
    (grad,) = torch.autograd.grad(y.float().sum(), weight)
    assert grad.dtype == torch.float32


def test_both_gradients_by_one_copy(monkeypatch):
    """Of a gradient whose rows begin off whole vectors, as that of the logits of GPT-2, the products are of one copy."""
    monkeypatch.setattr(gemm, "PAD_FROM", 0)
    copied = []
    padded = gemm.padded
    monkeypatch.setattr(gemm, "padded", lambda matrix: copied.append(matrix.shape) or padded(matrix))
    x, weight, grad = (torch.randn(shape).half() for shape in ((130, 136), (131, 136), (130, 131)))
    x.requires_grad_(), weight.requires_grad_()
    with cupyops.simulate():
        y = cupyops.linear(x, weight)
        found = torch.autograd.grad(y, (x, weight), grad)
    assert copied == [(130, 131)]
    expected = grad.double() @ weight.detach().double(), grad.double().T @ x.detach().double()
    for ours, right in zip(found, expected):
        assert (ours.double() - right).abs().max() <= 2e-3 * right.abs().max()
