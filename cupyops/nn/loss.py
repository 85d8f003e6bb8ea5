"""Losses."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._cross_entropy import cross_entropy
from ..ops._fused_linear_cross_entropy import fused_linear_cross_entropy
from ..ops._kl_div import kl_div
from ..ops._nll_loss import nll_loss
from .twin import Twin


class NLLLoss(Twin, torch.nn.NLLLoss):
    """Negative log-likelihood of class targets; as `torch.nn.NLLLoss`, by `cupyops.nll_loss`.

    Example:
        >>> cupyops.nn.NLLLoss()(torch.tensor([[-1.0, -2.0]]), torch.tensor([1]))
        tensor(2.)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input, target)) is not None:
            return node  # type: ignore[no-any-return]
        return nll_loss(input, target, weight=self.weight, ignore_index=self.ignore_index, reduction=self.reduction)


class KLDivLoss(Twin, torch.nn.KLDivLoss):
    """Kullback-Leibler divergence; as `torch.nn.KLDivLoss`, by `cupyops.kl_div`.

    Example:
        >>> cupyops.nn.KLDivLoss(reduction="sum")(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor(0.)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input, target)) is not None:
            return node  # type: ignore[no-any-return]
        return kl_div(input, target, reduction=self.reduction, log_target=self.log_target)


class CrossEntropyLoss(Twin, torch.nn.CrossEntropyLoss):
    """Cross-entropy of logits and targets (classes or probabilities); as `torch.nn.CrossEntropyLoss`, by
    `cupyops.cross_entropy`.

    Example:
        >>> cupyops.nn.CrossEntropyLoss()(torch.zeros(1, 2), torch.tensor([1]))
        tensor(0.6931)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input, target)) is not None:
            return node  # type: ignore[no-any-return]
        return cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class FusedLinearCrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """Cross-entropy of a linear layer's outputs, without the layer's outputs in memory, by
    `cupyops.fused_linear_cross_entropy`. The constructor is that of `torch.nn.CrossEntropyLoss`, whose `weight` is that of
    the classes; the layer's weight and bias are given with each call, since they belong to the model.

    Example:
        >>> head = torch.nn.Linear(3, 4, bias=False).requires_grad_(False)
        >>> loss = cupyops.nn.FusedLinearCrossEntropyLoss(reduction="sum")
        >>> loss(torch.zeros(2, 3), head.weight, torch.tensor([0, 3]))
        tensor(2.7726)
    """

    def forward(self, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return fused_linear_cross_entropy(
            input,
            weight,
            target,
            bias,
            class_weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
