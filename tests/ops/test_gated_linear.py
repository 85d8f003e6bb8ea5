import gemms
import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._dispatch.gemm import epilogues

FUNCTIONS = ["silu", "gelu", "gelu_tanh"]
by_torch = gemms.gated_linear


class TestGatedLinear(OperatorContract):
    function = staticmethod(cupyops.gated_linear)
    torch_function = staticmethod(by_torch)
    kernels = set()  # apart from Hopper, those of linear and of gated activations

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(64, 128), make(10, 128), make(10, 128), "gelu")
        yield Sample(make(300, 5), make(14, 5))
        yield Sample(make(2, 3, 16), make(24, 16), make(24, 16), activation="gelu_tanh")

    def small_samples(self, make: Make):
        yield Sample(make(3, 4), make(5, 4), make(5, 4))
        yield Sample(make(3, 4), make(10, 4), None, "gelu")  # packed
        yield Sample(make(4), make(5, 4), make(5, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_hopper(name, dtype):
    """As tests/simulator has them."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    with cupyops.trace() as trace:
        for call in gemms.gated(epilogues.GATED, name, dtype, "cuda"):
            call()
    assert trace.launches()[0].kernel.partition("<")[0] == "gated_linear_wgmma"


def test_the_products_are_pytorch_s_where_they_may_be():
    """As on a GPU: one product of packed weights, then the kernel of the gate; and a sum of products that cuBLAS adds up."""
    card = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}
    counts = {}
    for packed in (False, True):
        x, weight, up = (
            torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((40, 30), (26, 30), (26, 30))
        )
        inputs = [x, weight] if packed else [x, weight, up]
        with cupyops.simulate("sm_90"), assume_gpu(**card), cupyops.trace() as trace:
            y = cupyops.gated_linear(*inputs)
            found = y, *torch.autograd.grad(y, inputs, torch.ones_like(y))
        expected = by_torch(*inputs)
        torch.testing.assert_close(found, (expected, *torch.autograd.grad(expected, inputs, torch.ones_like(expected))))
        counts[packed] = [record.kernel.partition("<")[0] for record in trace.launches()]
    gate = "gated_fwd_strided_rows", "gated_bwd_strided_rows"
    assert counts[True] == ["torch.mm", *gate, "torch.mm", "torch.mm"]
    assert counts[False] == ["torch.mm", "torch.mm", *gate, "torch.mm", "torch.addmm", "torch.mm", "torch.mm"]


def test_second_derivatives_of_a_frozen_layer():
    """A gradient depends on every tensor that the gate does."""
    x, weight, up = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4, 5)
    found = []
    for function in (cupyops.gated_linear, by_torch):
        leaf = x.clone().requires_grad_()
        with cupyops.simulate():
            (first,) = torch.autograd.grad(function(leaf, weight, up).square().sum(), leaf, create_graph=True)
            found.append((first, *torch.autograd.grad(first.square().sum(), leaf)))
    torch.testing.assert_close(*found)


def test_bad_input(device):
    x, weight = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    for args, words in [
        ((x, weight, weight, "relu"), "activation is 'relu'"),
        ((x, weight[0]), r"weight has shape \(3,\), expected \(features, 3\)"),
        ((x, weight[:, :2]), r"weight has shape \(4, 2\), expected \(features, 3\)"),
        ((x, weight, weight[:3]), r"weight_up is .*\(4, 3\)"),
        ((x, weight[:3]), r"weight has shape \(3, 3\), expected an even number of rows"),
        ((x, weight, weight.double()), "weight_up is torch.float64"),
        ((x, weight, 1.0), "weight_up is 1.0"),
        ((x[0, 0], weight), "input is .* at least 1 dimension"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            cupyops.gated_linear(*args)
