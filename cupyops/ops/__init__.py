"""The operators: one file tells one operator's whole story. One line here exports it."""

from .add import add as add
from .add_rms_norm import add_rms_norm as add_rms_norm
from .batch_norm import batch_norm as batch_norm
from .bias_gelu import bias_gelu as bias_gelu
from .conv2d import conv2d as conv2d
from .conv2d_relu_max_pool2d import conv2d_relu_max_pool2d as conv2d_relu_max_pool2d
from .cross_entropy import cross_entropy as cross_entropy
from .dropout import dropout as dropout
from .fused_linear_cross_entropy import fused_linear_cross_entropy as fused_linear_cross_entropy
from .geglu import geglu as geglu
from .gelu import gelu as gelu
from .group_norm import group_norm as group_norm
from .kl_div import kl_div as kl_div
from .layer_norm import layer_norm as layer_norm
from .linear import linear as linear
from .log_softmax import log_softmax as log_softmax
from .matmul import matmul as matmul
from .max_pool2d import max_pool2d as max_pool2d
from .nll_loss import nll_loss as nll_loss
from .relu import relu as relu
from .rms_norm import rms_norm as rms_norm
from .rope import rope as rope
from .scale_shift import scale_shift as scale_shift
from .silu import silu as silu
from .softmax import softmax as softmax
from .swiglu import swiglu as swiglu
