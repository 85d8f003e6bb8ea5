import gemms
import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._dispatch.gemm import epilogues, gemm

FUNCTIONS = ["none", "relu", "gelu", "gelu_tanh", "silu"]
by_torch = gemms.linear_act


class TestLinearAct(OperatorContract):
    function = staticmethod(cupyops.linear_act)
    torch_function = staticmethod(by_torch)
    kernels = {"gemm_fwd", "gemm_sum"}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(64, 128), make(10, 128), make(10), "silu")
        yield Sample(make(5, 300), make(3, 300), make(3), "gelu", make(5, 3))  # k split, forward
        yield Sample(make(300, 5), make(7, 5), make(7), "relu", make(300, 7))  # k split, grad_weight and grad_bias
        yield Sample(make(2, 3, 16), make(24, 16), activation="gelu_tanh", residual=make(2, 3, 24))

    def small_samples(self, make: Make):
        yield Sample(make(3, 4), make(5, 4), make(5), "gelu", make(3, 5))
        yield Sample(make(3, 4), make(5, 4))
        yield Sample(make(4), make(5, 4), make(5), "relu")
        yield Sample(make(2, 3, 2), make(7, 2), None, "none", make(2, 3, 7))


@pytest.mark.parametrize("tile", gemm.TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_tile(device, dtype, tile):
    """130 rows and columns: four tiles of 128, with tails."""
    with gemms.tiled("linear_act", dtype, tile):
        for activation in FUNCTIONS:
            gemms.compare(
                cupyops.linear_act, by_torch, ((130, 136), (130, 136), (130,), (130, 130)), activation, dtype, device
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_hopper(name, dtype):
    """As tests/simulator has them."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    with cupyops.trace() as trace:
        for call in gemms.activated(epilogues.ACTIVATED, name, dtype, "cuda"):
            call()
    assert trace.launches()[0].kernel.partition("<")[0] == "linear_act_wgmma"


def test_what_is_kept_for_backward(device):
    """Of relu alone the result, of "none" nothing, else what the activation was given: one tensor of that size."""
    for name, residual, size in [
        ("relu", None, 0),
        ("none", None, 0),
        ("gelu", None, 12),
        ("relu", torch.ones(3, 4), 12),
    ]:
        x, weight = torch.randn(3, 5, device=device, requires_grad=True), torch.randn(4, 5, device=device)
        residual = None if residual is None else residual.to(device)
        kept = []
        with (
            cupyops.simulate() if device.type == "cpu" else cupyops.never_slower(False),
            torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        ):
            y = cupyops.linear_act(x, weight, None, name, residual)
        others = [t for t in kept if t.data_ptr() not in (x.data_ptr(), weight.data_ptr(), y.data_ptr())]
        assert sum(t.numel() for t in others) == size, name


@pytest.mark.parametrize("wanted", ["x", "bias"])
def test_second_derivatives_of_frozen_layers(wanted):
    """A gradient depends on every tensor that the activation's argument does."""
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    found = []
    for function in (cupyops.linear_act, by_torch):
        leaf = (x if wanted == "x" else bias).clone().requires_grad_()
        with cupyops.simulate():
            y = function(*((leaf, weight, bias) if wanted == "x" else (x, weight, leaf)), "silu")
            (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
            found.append((first, *torch.autograd.grad(first.square().sum(), leaf)))
    torch.testing.assert_close(*found)


def test_a_result_of_relu_that_was_changed_is_noticed(device):
    x, weight = torch.randn(3, 5, device=device, requires_grad=True), torch.randn(4, 5, device=device)
    with cupyops.simulate() if device.type == "cpu" else cupyops.never_slower(False):
        y = cupyops.linear_act(x, weight, None, "relu")
        y += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_the_product_is_pytorch_s_where_it_may_be():
    """As on a GPU: then the kernel of the activation, in one node of autograd."""
    card = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}
    inputs = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((40, 300), (260, 300), (260,), (40, 260))
    ]
    with cupyops.simulate("sm_90"), assume_gpu(**card), cupyops.trace() as trace:
        y = cupyops.linear_act(*inputs[:3], "gelu", inputs[3])
        found = y, *torch.autograd.grad(y, inputs, torch.ones_like(y))
    expected = by_torch(*inputs[:3], "gelu", inputs[3])
    torch.testing.assert_close(found, (expected, *torch.autograd.grad(expected, inputs, torch.ones_like(expected))))
    kernels = [record.kernel.partition("<")[0] for record in trace.launches()]
    assert kernels == ["torch.addmm", "gelu_fwd", "torch.add", "gelu_bwd", "torch.mm", "torch.mm", "sum_fwd_fold"]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backend", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_special_values(name, backend):
    odd = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -100.0, 100.0]
    device = "cuda" if backend == "gpu" else "cpu"
    x = torch.tensor([odd], device=device).T.contiguous().requires_grad_()
    weight, residual = torch.ones(1, 1, device=device), torch.tensor([[1.0]], device=device).expand(7, 1)
    with cupyops.simulate() if backend == "simulator" else cupyops.never_slower(False):
        y = cupyops.linear_act(x, weight, None, name, residual)
        (ours,) = torch.autograd.grad(y.sum(), x)
    expected = by_torch(x, weight, None, name, residual)
    torch.testing.assert_close(y, expected, equal_nan=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), x)[0], equal_nan=True)


def test_bad_input(device):
    x, weight, bias = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device), torch.randn(4, device=device)
    for args, words in [
        ((x, weight, bias, "tanh"), "activation is 'tanh'"),
        ((x, weight[0]), "weight is .*out_features, in_features"),
        ((x, weight.T.contiguous()), r"weight has shape \(3, 4\), expected in_features 3"),
        ((x, weight, bias, "gelu", x), r"residual is .*\(2, 4\), that of the result"),
        ((x, weight, bias, "gelu", torch.ones(2, 4, device=device).double()), "residual is torch.float64"),
        ((x, weight, bias, "gelu", 1.0), "residual is 1.0"),
        ((x, weight, bias.half()), "bias is torch.float16"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            cupyops.linear_act(*args)
