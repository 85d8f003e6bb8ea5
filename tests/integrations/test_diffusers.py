"""cupyops.swap on the layers that models of diffusers are made of."""

import pytest
import torch

import cupyops

pytest.importorskip("diffusers", reason="diffusers is not installed")
attention = pytest.importorskip("diffusers.models.attention")
activations = pytest.importorskip("diffusers.models.activations")
normalization = pytest.importorskip("diffusers.models.normalization")
processors = pytest.importorskip("diffusers.models.attention_processor")

LAYERS = {
    "RMSNorm": (lambda: normalization.RMSNorm(8, 1e-6), {"rms_norm"}),
    "GEGLU": (lambda: activations.GEGLU(8, 8), {"gelu"}),
    "SwiGLU": (lambda: activations.SwiGLU(8, 8), {"swiglu"}),
    "GELU": (lambda: activations.GELU(8, 8, "tanh"), {"gelu"}),
    "FeedForward": (lambda: attention.FeedForward(8, activation_fn="swiglu"), {"swiglu", "linear"}),
    "Attention": (lambda: processors.Attention(8, heads=2, dim_head=4), {"linear"}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    make, operators = LAYERS[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(2, 5, 8, requires_grad=True)

    def run():
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    before = run()
    with cupyops.swap(module), cupyops.trace() as trace:
        torch.testing.assert_close(run(), before, rtol=1e-5, atol=1e-6)
    assert operators <= {record.operator.removeprefix("cupyops::") for record in trace.records}
    assert all(map(torch.equal, run(), before))
