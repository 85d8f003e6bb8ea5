"""cupyops.swap on models of timm, built tiny: the same output and gradients."""

import pytest
import torch

import cupyops

timm = pytest.importorskip(
    "timm", reason="timm, or the torchvision that it needs, is not installed", exc_type=ImportError
)
pytestmark = [pytest.mark.filterwarnings("ignore")]

VIT = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}
SWIN = {"img_size": 32, "window_size": 2, "depths": (1, 1), "num_heads": (2, 2), "embed_dim": 16, "drop_path_rate": 0.0}
MODELS = {
    "vit_base_patch16_224": (VIT, {"layer_norm", "scaled_dot_product_attention", "GELU", "Linear"}),
    "resnet18": ({}, {"BatchNorm2d", "ReLU", "Conv2d", "MaxPool2d"}),
    "convnext_atto": ({"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16)}, {"layer_norm", "gelu", "Conv2d"}),
    "eva02_tiny_patch14_224": ({"img_size": 28, "depth": 2}, {"swiglu", "layer_norm", "scaled_dot_product_attention"}),
    "swin_tiny_patch4_window7_224": (SWIN, {"LayerNorm", "Softmax", "GELU"}),
    "efficientnet_b0": ({}, {"batch_norm", "SiLU", "Conv2d"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    options, expected = MODELS[name]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **options).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # its random numbers are others
    size = options.get("img_size", 64)
    x = torch.randn(2, 3, size, size)

    def run():
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    before = run()
    swap = cupyops.swap(model)
    for found, wanted in zip(run(), before, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()) + 1e-6)
    words = {word for one in swap.replaced for word in one.what.replace("cupyops.nn.", "").replace(",", "").split()}
    assert expected <= words
    swap.undo()
    assert not any("cupyops" in type(module).__module__ for module in model.modules())
