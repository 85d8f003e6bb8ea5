"""cupyops.swap on models of timm, torchvision and diffusers, built small: what is found; in either mode all is as it was."""

import importlib.util

import pytest
import walk
import zoo

import cupyops

pytestmark = [pytest.mark.filterwarnings("ignore")]  # of those libraries

MODELS = {
    "timm:test_vit": {"layer_norm", "scaled_dot_product_attention", "GELU", "Linear"},
    "timm:test_resnet": {"BatchNorm2d", "ReLU", "Conv2d", "MaxPool2d", "batch_norm_act"},
    "timm:test_convnext": {"layer_norm", "gelu_tanh", "Conv2d"},
    "timm:eva02_tiny_patch14_224": {"swiglu", "layer_norm", "scaled_dot_product_attention"},
    "timm:swin_tiny_patch4_window7_224": {"LayerNorm", "Softmax", "GELU"},
    "timm:tinynet_e": {"batch_norm", "SiLU", "Conv2d", "dropout"},
    "torchvision:resnet18": {"BatchNorm2d", "batch_norm_act"},
    "torchvision:swin_t": {"LayerNorm", "softmax", "GELU"},
    "diffusers:StableAudioDiTModel": {"swiglu", "LayerNorm"},
    "diffusers:WanTransformer3DModel": {"RMSNorm", "gelu", "layer_norm"},
    "diffusers:UNet2DConditionModel": {"GroupNorm", "gelu", "silu", "Conv2d"},
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    if importlib.util.find_spec(library := name.partition(":")[0]) is None:
        pytest.skip(f"{library} is not installed")
    make, batch = zoo.built(name)
    swap = cupyops.swap(make())
    assert MODELS[name] <= {
        word for one in swap.replaced for word in one.what.replace("cupyops.nn.", "").replace(",", "").split()
    }
    assert walk.walk(make, batch) == {}
