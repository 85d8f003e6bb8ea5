"""Modules: torch.nn's, by the operators of cupyops. Each is a subclass of its twin: same constructor, same state_dict."""

from .activation import GEGLU, GELU, LogSoftmax, ReLU, SiLU, Softmax, SwiGLU
from .conv import Conv2d
from .dropout import Dropout
from .linear import Linear
from .loss import CrossEntropyLoss, NLLLoss
from .normalization import LayerNorm
from .pooling import MaxPool2d
from .rope import RoPE
from .scale_shift import ScaleShift

__all__ = [
    "GEGLU",
    "GELU",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "LayerNorm",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "NLLLoss",
    "ReLU",
    "RoPE",
    "ScaleShift",
    "SiLU",
    "Softmax",
    "SwiGLU",
]
