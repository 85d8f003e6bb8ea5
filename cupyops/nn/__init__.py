"""Modules: torch.nn's, by the operators of cupyops. Each is a subclass of its twin: same constructor, same state_dict."""

from .._util.near import refuser as _refuser
from . import preference as preference
from . import utils as utils
from .activation import GEGLU, GELU, BiasGELU, LogSoftmax, ReLU, SiLU, Softmax, SwiGLU
from .attention import Attention
from .attention import KVCache as KVCache
from .conv import Conv2d
from .dropout import Dropout
from .embedding import Embedding
from .linear import Linear
from .linear_loss import LinearCrossEntropy
from .linear_loss import linear_log_prob as linear_log_prob
from .loss import CrossEntropyLoss, FusedLinearCrossEntropyLoss, KLDivLoss, NLLLoss
from .multihead_attention import MultiheadAttention
from .normalization import (
    AddRMSNorm,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    BatchNormAct2d,
    GroupNorm,
    LayerNorm,
    RMSNorm,
)
from .pooling import AvgPool2d, MaxPool2d
from .rope import RoPE
from .scale_shift import ScaleShift

__all__ = [
    "GEGLU",
    "GELU",
    "AddRMSNorm",
    "Attention",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormAct2d",
    "BiasGELU",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "FusedLinearCrossEntropyLoss",
    "GroupNorm",
    "KLDivLoss",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "LogSoftmax",
    "MaxPool2d",
    "MultiheadAttention",
    "NLLLoss",
    "RMSNorm",
    "ReLU",
    "RoPE",
    "ScaleShift",
    "SiLU",
    "Softmax",
    "SwiGLU",
]

__getattr__ = _refuser(__name__, __all__)
