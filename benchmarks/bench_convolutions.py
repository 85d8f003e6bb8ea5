"""convolutions: the 53 of ResNet-50, 23 that differ, in channels_last: y, grad_x and grad_weight.

As they are called: where no kernel of ours is measured as fast, PyTorch's own is what runs, and `cupyops.trace()` says so.
A size begins with how many of the 53 it stands for.
"""

import torch
from common import HALF
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case

IMAGES = 64
LAYERS = [  # how many there are, channels, filters, taps, stride, side of the image
    (1, 3, 64, 7, 2, 224),
    (1, 64, 64, 1, 1, 56), (2, 256, 64, 1, 1, 56), (3, 64, 64, 3, 1, 56), (4, 64, 256, 1, 1, 56),
    (1, 256, 128, 1, 1, 56), (1, 128, 128, 3, 2, 56), (3, 512, 128, 1, 1, 28), (3, 128, 128, 3, 1, 28),
    (4, 128, 512, 1, 1, 28), (1, 256, 512, 1, 2, 56),
    (1, 512, 256, 1, 1, 28), (1, 256, 256, 3, 2, 28), (5, 1024, 256, 1, 1, 14), (5, 256, 256, 3, 1, 14),
    (6, 256, 1024, 1, 1, 14), (1, 512, 1024, 1, 2, 28),
    (1, 1024, 512, 1, 1, 14), (1, 512, 512, 3, 2, 14), (2, 2048, 512, 1, 1, 7), (2, 512, 512, 3, 1, 7),
    (3, 512, 2048, 1, 1, 7), (1, 1024, 2048, 1, 2, 14),
]  # fmt: skip


def case(layer, way, images=IMAGES):
    count, channels, filters, taps, stride, side = layer
    options = {"stride": stride, "padding": taps // 2}

    def make(device, dtype):
        x = torch.randn(images, channels, side, side, device=device)
        weight = torch.randn(filters, channels, taps, taps, device=device) * (channels * taps * taps) ** -0.5
        x, weight = (t.to(dtype).contiguous(memory_format=torch.channels_last) for t in (x, weight))
        return x.requires_grad_(way == "grad_x"), weight.requires_grad_(way == "grad_weight")

    flops = 2.0 * images * filters * (-(-side // stride)) ** 2 * channels * taps * taps
    return Case(
        "convolutions", f"{count} of {channels}->{filters} {taps}x{taps} /{stride} {side}x{side} {way}", HALF, make,
        lambda x, weight: cupyops.conv2d(x, weight, **options), lambda x, weight: F.conv2d(x, weight, **options),
        forward_flops=flops, backward_flops=0 if way == "y" else flops, unit="us", compiled=False,
        small=lambda: case((count, min(channels, 8), 5, taps, stride, 7), way, 2),
    )  # fmt: skip


def cases():
    for index, layer in enumerate(LAYERS):
        for way in ("y", "grad_x", "grad_weight"):
            if index or way != "grad_x":  # the first layer's input is an image
                yield case(layer, way)
