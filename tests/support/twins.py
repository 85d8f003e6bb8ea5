"""A small call of every operator that is registered, and the same in PyTorch.

A public operator that keeps no more than PyTorch does needs no line here: its call is the first small one of its contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import samples
import torch
from torch import Tensor

import cupyops
from cupyops.ops._cross_entropy import cross_entropy_fp32
from cupyops.ops._linear_lowered import linear_lowered
from cupyops.ops._packed_attention import packed_attention

F = torch.nn.functional
ROWS, COLS = 24, 16


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Case(NamedTuple):
    """A call of ours and its twin in PyTorch, whose arguments are the tensors that may want a gradient, then the others."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    tensors: Callable[[], list[Tensor]]
    others: Callable[[], list[Tensor]] = list
    more: str = ""  # why ours may keep more than PyTorch, and
    bytes: int = 0  # how much
    kernels: bool = True  # whether there are some for every architecture


image = lambda: values(2, 4, 8, 8)
rows = lambda: values(ROWS, COLS)
vector = lambda: values(COLS)
classes = torch.arange(ROWS) % COLS
places = torch.arange(ROWS)
angles = torch.outer(torch.arange(64.0), torch.arange(8.0))
heads = lambda: [values(1, 2, 16, 8).roll(n, 2).half() for n in range(3)]
running = lambda: [torch.linspace(-1, 1, 4), torch.linspace(1, 2, 4)]
CASES = {
    "add_scalar": Case(lambda x: cupyops.add(x, 2.0), lambda x: x + 2.0, lambda: [rows()]),
    "add_rms_norm": Case(
        lambda x, r, w: cupyops.add_rms_norm(x, r, (COLS,), w)[0],
        lambda x, r, w: F.rms_norm(x + r, (COLS,), w),
        lambda: [rows(), rows(), vector()],
        list,
        "for the gradient of the weight alone PyTorch keeps what the weight was multiplied by, and no weight and no rstd",
        4 * (COLS + ROWS),
    ),
    "amax": Case(lambda x: cupyops.amax(x, 1), lambda x: torch.amax(x, 1), lambda: [rows()], list, "ties", 8 * ROWS),
    "attention": Case(cupyops.attention, F.scaled_dot_product_attention, lambda: heads()),
    "batch_norm": Case(
        lambda x, w, b, mean, var: cupyops.batch_norm(x, mean, var, w, b, True),
        lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b, True),
        lambda: [image(), values(4), values(4)],
        running,
    ),
    "batch_norm_inference": Case(
        lambda x, w, b, mean, var: cupyops.batch_norm(x, mean, var, w, b),
        lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b),
        lambda: [image(), values(4), values(4)],
        running,
    ),
    "batch_norm_act": Case(
        lambda x, w, b, r, mean, var: cupyops.batch_norm_act(x, mean, var, w, b, True, residual=r),
        lambda x, w, b, r, mean, var: F.relu(F.batch_norm(x, mean, var, w, b, True) + r),
        lambda: [image(), values(4), values(4), image()],
        running,
        "a bit for each element, in bytes for a vector, where PyTorch keeps a result that others hold too",
        2 * 4 * 8 * 8 // 4,
    ),
    "batch_norm_act_inference": Case(
        lambda x, w, b, r, mean, var: cupyops.batch_norm_act(x, mean, var, w, b, residual=r),
        lambda x, w, b, r, mean, var: F.relu(F.batch_norm(x, mean, var, w, b) + r),
        lambda: [image(), values(4), values(4), image()],
        running,
        "a bit for each element, in bytes for a vector, where PyTorch keeps a result that others hold too",
        2 * 4 * 8 * 8 // 4,
    ),
    "bias_gelu": Case(
        cupyops.bias_gelu,
        lambda x, b: F.gelu(x + b),
        lambda: [rows(), vector()],
        list,
        "input and bias, in the place of a sum of the size of input, which nothing else would hold",
        4 * COLS,
    ),
    "cross_entropy": Case(
        cupyops.cross_entropy,
        F.cross_entropy,
        lambda: [rows()],
        lambda: [classes],
        "the gradient, which forward has written, beside the logits: as much as PyTorch holds in its backward",
        4 * ROWS * COLS + 8 * ROWS + 4,
    ),
    "cross_entropy_fp32": Case(
        cross_entropy_fp32,
        lambda x, target: F.cross_entropy(x.float(), target),
        lambda: [rows().bfloat16()],
        lambda: [classes],
        "the gradient, which forward has written, beside the logits: as much as PyTorch holds in its backward",
        2 * ROWS * COLS + 8 * ROWS + 8,
    ),
    "cross_entropy_probabilities": Case(
        cupyops.cross_entropy,
        F.cross_entropy,
        lambda: [rows(), rows().softmax(1)],
        list,
        "the targets, which are read for their own gradient too, and the sums of rows",
        4 * ROWS * COLS + 16 * ROWS,
    ),
    "decode_attention": Case(
        lambda q, k, v: cupyops.decode_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(16, 16, dtype=torch.bool).tril()),
        lambda: heads(),
        list,
        "the scores, since PyTorch computes the gradients",
        4 * 2 * 16 * 16 * 8,
    ),
    "dropout": Case(cupyops.dropout, F.dropout, lambda: [rows()]),
    "fused_linear_cross_entropy": Case(
        lambda x, w, b, t: cupyops.fused_linear_cross_entropy(x, w, t, b),
        lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t),
        lambda: [values(ROWS, 8), values(COLS, 8), vector()],
        lambda: [classes],
        "the gradients, which forward has made, in the place of the logits, which grow with rows times classes",
        4 * (ROWS * 8 + COLS * 8 + COLS) + 1,
    ),
    "gated_linear": Case(
        cupyops.gated_linear,
        lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up),
        lambda: [rows(), values(16, COLS), values(16, COLS)],
        list,
        "the weights, on which second derivatives depend in a frozen layer too, and both products",
        4 * (2 * 16 * COLS + ROWS * 16),
    ),
    "grouped_mm": Case(
        lambda x, w, offs: cupyops.grouped_mm(x, w, offs=offs),
        lambda x, w, offs: torch.cat([x[:10] @ w[0], x[10:] @ w[1]]),
        lambda: [rows(), values(2, COLS, 8)],
        lambda: [torch.tensor([10, ROWS], dtype=torch.int32)],
        kernels=False,
    ),
    "group_norm": Case(
        lambda x, w, b: cupyops.group_norm(x, 2, w, b),
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda: [image(), values(4), values(4)],
        list,
        "the mean of a group with what was rounded off of it",
        2 * 2 * 4,
    ),
    "linear_act": Case(
        cupyops.linear_act,
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda: [rows(), values(16, COLS), values(16)],
        list,
        "all of the layer, on which second derivatives depend in a frozen layer too",
        4 * (ROWS * COLS + 16 * COLS + 16),
    ),
    "linear_lowered": Case(
        lambda x, w: linear_lowered(x.bfloat16(), w, None),
        lambda x, w: F.linear(x.bfloat16(), w.bfloat16()),
        lambda: [rows(), values(16, COLS)],
        list,
        "the weight, for second derivatives, and where no gradient of the input is wanted, its copy in a half type",
        (4 + 2) * 16 * COLS,
    ),
    "max_pool2d_with_indices": Case(
        lambda x: cupyops.max_pool2d(x, 2, return_indices=True)[0], lambda x: F.max_pool2d(x, 2), lambda: [image()]
    ),
    "relu_": Case(lambda x: cupyops.relu(x + 1, inplace=True), lambda x: F.relu(x + 1), lambda: [rows()]),
    "packed_attention": Case(
        lambda x: packed_attention(x, [1, 1, 4, 8], [96, 8, 24, 1], [0, 8, 16], True, None),
        lambda x: F.scaled_dot_product_attention(
            *(one.unsqueeze(1) for one in x.bfloat16().chunk(3, -1)), is_causal=True
        ),
        lambda: [values(1, 4, 24).bfloat16()],
    ),
    "rms_norm": Case(
        lambda x, w: cupyops.rms_norm(x, (COLS,), w),
        lambda x, w: F.rms_norm(x, (COLS,), w),
        lambda: [rows(), vector()],
        list,
        "for the gradient of the weight alone PyTorch keeps what the weight was multiplied by, and no weight and no rstd",
        4 * (COLS + ROWS),
    ),
    "quantized_linear": Case(
        lambda x, w, s: cupyops.quantized_linear(x.bfloat16(), w, s),
        lambda x, w, s: F.linear(x.bfloat16(), (w * s[:, None]).bfloat16()),
        lambda: [rows()],
        lambda: [values(16, COLS).mul(50).to(torch.int8), values(16).abs() + 1],
        "the input and the scales, on which second derivatives depend",
        2 * ROWS * COLS + 4 * 16,
    ),
    "rope": Case(
        cupyops.rope,
        lambda x, cos, sin, at: rotated(x, cos[at], sin[at]),
        lambda: [values(2, 3, ROWS, 16)],
        lambda: [angles.cos(), angles.sin(), places],
        "the tables and the positions, in the place of a copy of the rows that they choose",
        2 * 4 * (64 - ROWS) * 8 + 8 * ROWS,
    ),
    "scaled_dot_product_attention": Case(
        cupyops.scaled_dot_product_attention, F.scaled_dot_product_attention, lambda: heads()
    ),
    "var": Case(lambda x: cupyops.var(x, 1), lambda x: torch.var(x, 1), lambda: [rows()], list, "the means", 4 * ROWS),
}


def _of_contract(name: str) -> Case:
    """The call of a public operator's contract; its tensors that want a gradient come before the others."""
    edge = samples.edge(name)
    wanting = [index for index, tensor in enumerate(edge.inputs) if tensor.requires_grad]
    order = [*wanting, *(index for index in range(len(edge.inputs)) if index not in wanting)]

    def reordered(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: function(*(tensors[order.index(index)] for index in range(len(order))))

    given = lambda places: [edge.inputs[index].detach().clone() for index in places]
    return Case(
        reordered(edge.ours), reordered(edge.torch), lambda: given(wanting), lambda: given(order[len(wanting) :])
    )


CASES |= {name: _of_contract(name) for name in samples.DIFFERENTIABLE if name not in CASES}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
