"""linears: linear layers of one input, as the queries, keys and values of attention are; of few rows in one launch."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from .._dispatch.linear import check, gradients, multiply_several, rows_of, too_large
from .._operator.floating import operator
from ..errors import InputError


@operator("cupyops::linears", autocast="lower")
def _linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [torch.nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases)]


@_linears.forward
def forward(x, weights, biases):
    results = [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]
    biases = [bias if bias is None else bias.contiguous() for bias in biases]
    multiply_several(rows_of(x), weights, biases, results)
    return results, ()


@_linears.backward(apart=True)
def backward(saved, grad_results, x, weights, biases, needs_grad):
    grad_x, grad_weights, grad_biases = None, [None] * len(weights), [None] * len(weights)
    for i, (grad, weight, bias) in enumerate(zip(grad_results, weights, biases)):
        if grad is None:
            continue
        needs = SimpleNamespace(x=needs_grad.x, weight=needs_grad.weights[i], bias=needs_grad.biases[i])
        part, grad_weights[i], grad_biases[i] = gradients(grad, x, weight, bias, needs)
        if part is not None:
            grad_x = part if grad_x is None else grad_x.add_(part)
    return grad_x, grad_weights, grad_biases


@_linears.unsupported
def unsupported(x, weights, biases):
    m = rows_of(x).shape[0]
    return next((reason for weight in weights if (reason := too_large(m, *weight.shape))), None)


@_linears.interface
def linears(input: Tensor, weights: list[Tensor], biases: list[Tensor | None] | None = None) -> list[Tensor]:
    """Linear layers of one input: input @ weight.T + bias for each weight and its bias.

    Of at most 64 rows up to four layers are one launch, which reads all weights once.

    Args:
        input: (..., in_features); fp16, bf16, fp32 and fp64 by kernels (summed in fp32, fp64 in fp64).
        weights: at least one, each (out_features, in_features), of the dtype of `input`.
        biases: as many, each (out_features,), of the dtype of `input`, or None; None for none.

    Returns:
        list[Tensor]: for each weight (..., out_features), contiguous.

    Raises:
        InputError: there is no weight, or another number of biases; an argument is no tensor; shapes do not fit; dtypes or
            devices differ.

    Example:
        >>> from cupyops.ops._linears import linears
        >>> linears(torch.tensor([[1.0, 2.0]]), [torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 6.0], [0.0, 1.0]])])
        [tensor([[11.]]), tensor([[17.,  2.]])]
    """
    biases = [None] * len(weights) if biases is None else biases
    if not weights or len(biases) != len(weights):
        raise InputError(
            f"weights has {len(weights)} and biases {len(biases)} tensors, expected at least one and as many"
        )
    for weight, bias in zip(weights, biases):
        check(input, weight, bias)
        if weight.dim() != 2:
            raise InputError(f"weights has one of shape {tuple(weight.shape)}, expected (out_features, in_features)")
    return _linears(input, list(weights), list(biases))
