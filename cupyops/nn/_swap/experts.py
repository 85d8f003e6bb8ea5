"""Mixtures of experts in models of transformers: groups of rows, each by its expert's matrices, with no wait for the device.

transformers' own function for groups calls one of PyTorch that autocast leaves in float32, where it waits for the device to
know the groups and makes one product after the other. Here they are products of the half type, as those of all other layers
are under autocast, and a CUDA graph can hold them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..._kernel.kernel import HALF
from ..._util import torch_private
from ..._util.arguments import autocast_dtype
from ...ops._embedding import embedding
from ...ops._grouped_mm import grouped_mm
from ...ops._swiglu import swiglu
from . import activations

EXPERTS = "cupyops"
THEIRS = ("grouped_mm", "eager")  # the same function, by groups and by a loop


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **more: Any) -> Tensor:
    """Compute the experts of a module, weighted and summed for each row; as transformers' "grouped_mm", which runs
    where there is no half type to compute in, and of experts with what is not known here."""
    from transformers.integrations.moe import (  # type: ignore[import-not-found]
        grouped_mm_experts_forward,
    )

    half = autocast_dtype(hidden_states) or hidden_states.dtype
    if more or half not in HALF or not _is_plain(module, hidden_states):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights, **more)  # type: ignore[no-any-return]
    tokens, each = top_k_index.shape
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    after = torch.arange(1, module.num_experts + 1, device=chosen.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, after, out_int32=True)  # of each expert's rows
    rows = embedding(order // each, hidden_states.to(half))
    found = grouped_mm(rows, _matrices(module, module.gate_up_proj, half), offs=ends)
    found = swiglu(*found.chunk(2, dim=-1)) if _is_swiglu(module) else module._apply_gate(found)
    found = grouped_mm(found.to(half), _matrices(module, module.down_proj, half), offs=ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    found = embedding(back, found).view(tokens, each, found.shape[1]) * top_k_weights.unsqueeze(-1)
    return found.sum(1).to(hidden_states.dtype)


def _is_plain(module: Any, x: Tensor) -> bool:
    """Return whether experts are a gate and two products, all of them here, and are called as they are."""
    if not is_dynamo_compiling() and (
        torch_private.functorch_active() or torch_private.forward_mode() or type(x) is not Tensor
    ):
        return False
    others = ("has_bias", "has_post_expert_norm", "_is_expert_parallel")
    if any(getattr(module, name, False) for name in others) or not getattr(module, "has_gate", True):
        return False
    weights = module.gate_up_proj, module.down_proj
    return x.dim() == 2 and all(type(one) is torch.nn.Parameter and one.is_floating_point() for one in weights)


def _matrices(module: Any, weight: Tensor, half: torch.dtype) -> Tensor:
    """Each expert's, (inputs, outputs)."""
    weight = weight.to(half)
    return weight if module.is_transposed else weight.transpose(1, 2)


def _is_swiglu(module: Any) -> bool:
    """Return whether the gate is transformers' own, with silu."""
    gate: Any = type(module)._apply_gate
    if getattr(gate, "__module__", "") != "transformers.integrations.moe" or "_apply_gate" in vars(module):
        return False
    return activations.name_of_activation(module.act_fn) == "silu"
