"""Modules: torch.nn's, by the operators of cupyops. Each is a subclass of its twin: same constructor, same state_dict."""

from .activation import GELU, LogSoftmax, ReLU, SiLU, Softmax
from .conv import Conv2d
from .linear import Linear
from .loss import CrossEntropyLoss, FusedLinearCrossEntropyLoss, KLDivLoss, NLLLoss
from .normalization import LayerNorm
from .pooling import MaxPool2d
from .scale_shift import ScaleShift

__all__ = [
    "GELU",
    "Conv2d",
    "CrossEntropyLoss",
    "FusedLinearCrossEntropyLoss",
    "KLDivLoss",
    "LayerNorm",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "NLLLoss",
    "ReLU",
    "ScaleShift",
    "SiLU",
    "Softmax",
]
