"""gelu of a layer's results, under autocast in a CUDA graph: it adds the bias, and one pass of backward has both gradients.

By itself a bias is added in the product for nothing; its gradient is a pass over what gelu's backward has just written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from ... import nn
from ...ops._bias_gelu import bias_gelu
from .. import halves
from .activations import is_listened_to, name_of_activation

_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def activated(act: Any, layer: Any, x: Any) -> Any:
    """act(layer(x)), of a layer whose bias is added by gelu where nobody can tell."""
    if (
        is_dynamo_compiling()
        or not halves.captured()
        or type(x) is not Tensor
        or type(layer) is not nn.Linear
        or is_listened_to(layer)
    ):
        return act(layer(x))
    approximate = _APPROXIMATE.get(name_of_activation(act) or "")
    if approximate is None or (found := layer.without_bias(x)) is None:
        return act(layer(x))
    return bias_gelu(*found, approximate)


def names(module: Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of activations inside that are gelu, if not PyTorch's that were to stay, and of layers with a bias."""
    inside = sorted(module._modules.items())
    ours = ((name, one) for name, one in inside if type(one) is not torch.nn.GELU)
    acts = tuple(name for name, one in ours if name_of_activation(one) in _APPROXIMATE)
    return acts, tuple(name for name, one in inside if type(one) is nn.Linear and one.bias is not None)
