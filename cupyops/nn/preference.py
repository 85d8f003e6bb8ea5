"""Losses of preferences, policies and distillation, of log-probabilities that `cupyops.nn.linear_log_prob` gives.

That has the log-probability of each token and never all the logits, so a loss is a few lines. Targets that are ignored have
log-probability 0, hence a sequence's is the sum over its tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._util import arguments
from .linear_loss import check, chunked, logits_of


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimization (arXiv:2305.18290): -log sigmoid(beta * m), where m is by how much more than the
    reference the policy prefers the chosen answer. `label_smoothing`: how often a preference is the wrong way round.

    Args:
        chosen, rejected: log-probabilities of the policy's tokens, (pairs, tokens) each, 0 where they do not count.
        reference_chosen, reference_rejected: those of the reference, of the same shapes.
        beta: how far the policy is kept from the reference.
        label_smoothing: in [0, 0.5).

    Returns:
        Tensor: the mean over the pairs.

    Raises:
        InputError: shapes do not match, or a number is out of its range.

    Example:
        >>> chosen, rejected = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -4.0]])
        >>> cupyops.nn.preference.dpo(chosen, rejected, rejected, chosen)
        tensor(0.3711)
    """
    _same("chosen", chosen, reference_chosen=reference_chosen)
    _same("rejected", rejected, reference_rejected=reference_rejected)
    _same_count(chosen, rejected)
    if not 0 <= label_smoothing < 0.5:
        arguments.fail("label_smoothing", label_smoothing, "a number in [0, 0.5)")
    margin = beta * ((chosen - reference_chosen).sum(-1) - (rejected - reference_rejected).sum(-1))
    right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
    return -((1 - label_smoothing) * right + label_smoothing * wrong).mean()


def orpo(chosen: Tensor, rejected: Tensor, chosen_mask: Tensor, rejected_mask: Tensor, beta: float = 0.1) -> Tensor:
    """Odds ratio preference optimization (arXiv:2403.07691), which has no reference: the negative log-likelihood of the
    chosen answers, and -beta * log sigmoid of the log of the ratio of odds; odds of the mean over an answer's tokens.

    Args:
        chosen, rejected: log-probabilities, (pairs, tokens) each.
        chosen_mask, rejected_mask: which tokens count, bools of the same shapes, or integers, of which 0 does not. A pair
            with an answer of none has no second part.
        beta: the weight of the second part.

    Returns:
        Tensor: the mean likelihood over all tokens that count, and the mean of the second part over the pairs that have one.

    Raises:
        InputError: shapes do not match, or a mask is of another dtype.

    Example:
        >>> chosen, rejected, mask = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[True]])
        >>> cupyops.nn.preference.orpo(chosen, rejected, mask, mask)
        tensor(1.0238)
    """
    _same("chosen", chosen, chosen_mask=chosen_mask)
    _same("rejected", rejected, rejected_mask=rejected_mask)
    _same_count(chosen, rejected)
    chosen_mask, rejected_mask = _bools("chosen_mask", chosen_mask), _bools("rejected_mask", rejected_mask)
    pairs = chosen_mask.any(-1) & rejected_mask.any(-1)
    mean, other = (torch.where(pairs, _mean(*one), -1.0) for one in ((chosen, chosen_mask), (rejected, rejected_mask)))
    likelihood = _mean(chosen.flatten(), chosen_mask.flatten())
    return -likelihood + beta * _mean(_log_1_plus_odds(mean, other), pairs)


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimization (arXiv:2402.01306): answers that are each good or bad, not in pairs. The reward is beta
    times the log of the ratio to the reference; the loss weight * (1 - sigmoid(reward - z)) of a good answer, and of a bad
    one weight * (1 - sigmoid(z - reward)), where z is beta * max(kl, 0).

    Args:
        policy, reference: log-probabilities, (answers, tokens) each, 0 where they do not count.
        desirable: which answers are good, bools or integers (answers).
        kl: how far the policy is from the reference on answers of other questions; no gradient goes through it.
        beta: how far the policy is kept from the reference.
        desirable_weight, undesirable_weight: of the good and of the bad.

    Returns:
        Tensor: the mean over the answers.

    Raises:
        InputError: shapes do not match.

    Example:
        >>> policy, reference = torch.tensor([[-1.0], [-1.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> cupyops.nn.preference.kto(policy, reference, torch.tensor([True, False]))
        tensor(0.5000)
    """
    _same("policy", policy, reference=reference)
    if desirable.shape != policy.shape[:1]:
        arguments.fail("desirable", desirable, f"bools of shape {tuple(policy.shape[:1])}, one for each answer")
    desirable = _bools("desirable", desirable)
    kl = torch.as_tensor(kl, dtype=policy.dtype, device=policy.device).detach().clamp(min=0)
    better = beta * ((policy - reference).sum(-1) - kl)
    good, bad = 1 - torch.sigmoid(better), 1 - torch.sigmoid(-better)
    return torch.where(desirable, desirable_weight * good, undesirable_weight * bad).mean()


def grpo(
    policy: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    reference: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    per: str = "sequence",
) -> Tensor:
    """Group relative policy optimization (arXiv:2402.03300): of each token -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A),
    where r is the ratio of its probability to that when the answer was drawn, and A the answer's advantage in its group;
    with `reference`, beta * (exp(d) - d - 1) is added, where d = reference - policy.

    Args:
        policy: log-probabilities, (answers, tokens).
        old: those when the answers were drawn, of the same shape; `policy.detach()` where there was no step since.
        advantage: of each answer, (answers), or of each token.
        mask: which tokens count, bools of the shape of `policy`, or integers, of which 0 does not. An answer of none adds 0.
        reference: log-probabilities of the reference.
        epsilon, epsilon_high: how far the ratio may go down, and up; both the same unless said otherwise.
        beta: the weight of the distance from the reference.
        per: "sequence", the mean over an answer's tokens and then over the answers; or "token", over all tokens, as in
            arXiv:2503.14476.

    Returns:
        Tensor: that mean.

    Raises:
        InputError: shapes do not match, or `per` is neither.

    Example:
        >>> policy, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]])
        >>> cupyops.nn.preference.grpo(policy, policy, torch.tensor([0.5]), mask)
        tensor(-0.5000)
    """
    _same("policy", policy, old=old, mask=mask, **({} if reference is None else {"reference": reference}))
    arguments.choice("per", per, ("sequence", "token"))
    if advantage.shape not in (policy.shape, policy.shape[:1]):
        arguments.fail("advantage", advantage, f"shape {tuple(policy.shape[:1])} or {tuple(policy.shape)}")
    advantage = advantage.unsqueeze(-1) if advantage.dim() < policy.dim() else advantage
    mask = _bools("mask", mask)
    log_ratio = torch.where(mask, policy - old, 0.0)  # what does not count may be anything
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    ratio = log_ratio.detach().exp()
    clipped = torch.where(advantage < 0, ratio < low, ratio > high)  # its ratio may be infinite, and has no gradient
    ratio = torch.where(clipped, ratio.clamp(low, high), torch.where(clipped, 0.0, log_ratio).exp())
    each = -ratio * advantage
    if reference is not None:
        distance = torch.where(mask, reference - policy, 0.0)
        each = each + beta * (distance.exp() - distance - 1)
    if per == "token":
        return _mean(each.flatten(), mask.flatten())
    return _mean(each, mask).mean()


def jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
) -> Tensor:
    """Distillation by the generalized Jensen-Shannon divergence (arXiv:2306.13649) of two heads, without all the logits of
    either in memory: beta KL(P | M) + (1 - beta) KL(Q | M) with M = beta P + (1 - beta) Q, P the teacher's probabilities and
    Q the student's. beta = 0 is KL(P | Q), and beta = 1 is KL(Q | P).

    A chunk of rows is computed at a time, by PyTorch's functions, and again in backward; one that is itself to be
    differentiated has all the logits in memory.

    Args:
        student_input, teacher_input: (..., K) each, whose K may differ.
        student_weight, teacher_weight: (C, K) each, of one C; the teacher gets no gradient.
        mask: which rows count, bools of the shape of the inputs without K, or integers, of which 0 does not; all if None.
        beta: in [0, 1].
        temperature: by which both heads' logits are divided.
        student_bias, teacher_bias: (C) each.

    Returns:
        Tensor: the mean over the rows that count, 0 where none does, in float32 (float64 of that).

    Raises:
        InputError: shapes, dtypes or devices do not match, or a number is out of its range.

    Example:
        >>> x, weight = torch.eye(2), torch.eye(2)
        >>> cupyops.nn.preference.jsd(x, weight, x, 2 * weight, beta=0.0)
        tensor(0.0671)
    """
    check(student_input, student_weight, student_bias, "student_")
    check(teacher_input, teacher_weight, teacher_bias, "teacher_")
    rows, classes = student_input.shape[:-1], student_weight.shape[0]
    if teacher_weight.shape[0] != classes:
        arguments.fail("teacher_weight", teacher_weight, f"as many classes as student_weight has, {classes}")
    if teacher_input.shape[:-1] != rows:
        arguments.fail("teacher_input", teacher_input, f"shape (..., K) with ... of student_input, {tuple(rows)}")
    if mask is not None and mask.shape != rows:
        arguments.fail("mask", mask, f"bools of shape {tuple(rows)}")
    if not 0 <= beta <= 1:
        arguments.fail("beta", beta, "a number in [0, 1]")
    if not temperature > 0:
        arguments.fail("temperature", temperature, "a number above 0")
    flat = (
        student_input.reshape(-1, student_input.shape[-1]),
        teacher_input.detach().reshape(-1, teacher_input.shape[-1]),
    )
    heads = (
        student_weight,
        student_bias,
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
    )
    (each,) = chunked(functools.partial(_jsd, beta, temperature), flat, heads, 2 * classes)
    return each.mean() if mask is None else _mean(each, _bools("mask", mask).reshape(-1))


def _jsd(beta: float, temperature: float, x: Any, z: Any, weight: Any, bias: Any, other: Any, other_bias: Any) -> Any:
    q = logits_of(x, weight, bias, temperature).log_softmax(-1)
    p = logits_of(z, other, other_bias, temperature).log_softmax(-1)
    if beta in (0, 1):
        one, two = (p, q) if beta == 0 else (q, p)
        return ((one.exp() * (one - two)).sum(-1),)
    beta_ = torch.tensor(beta, dtype=p.dtype, device=p.device)
    mixed = torch.logaddexp(p + beta_.log(), q + torch.log1p(-beta_))
    return (beta * (p.exp() * (p - mixed)).sum(-1) + (1 - beta) * (q.exp() * (q - mixed)).sum(-1),)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the masked-in elements of the last dimension; 0 where there are none."""
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def _bools(name: str, mask: Tensor) -> Tensor:
    """A mask of bools, or of integers, of which 0 is False."""
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        arguments.fail(name, mask, "bools, or integers of which 0 does not count: give it as `mask != 0`")
    return mask if mask.dtype is torch.bool else mask != 0


def _log_1_plus_odds(mean: Tensor, other: Tensor) -> Tensor:
    """The log of 1 + the odds of `other` over those of `mean`, log-probabilities.

    Near a probability of 1 it is computed from that of the contrary, whose log is infinite where its gradient is not.
    """
    ratio = (mean - other - _log_1_minus_exp(mean) + _log_1_minus_exp(other)).detach()
    near = (mean > -0.1) & (ratio > 0)
    x, z = torch.where(near, mean, -1.0), torch.where(near, other, -1.0)
    by_contrary = torch.log1p((z - x).exp() * torch.expm1(x) / torch.expm1(z))
    x, z = torch.where(near, -1.0, mean), torch.where(near, -1.0, other)
    by_ratio = -F.logsigmoid((x - z) - (_log_1_minus_exp(x) - _log_1_minus_exp(z)))
    return torch.where(near, by_contrary, by_ratio)


def _log_1_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for numbers below 0, exact near 0 and far from it."""
    near = x > -0.6931
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -0.5))), torch.log1p(-torch.where(near, -1.0, x).exp())
    )


def _same(name: str, first: Any, **others: Any) -> None:
    arguments.floating(name, first)
    if first.dim() != 2:
        arguments.fail(name, first, "a tensor of two dimensions, sequences and tokens")
    for what, one in others.items():
        arguments.tensor(what, one)
        if one.shape != first.shape:
            arguments.fail(what, one, f"shape {tuple(first.shape)}, that of {name}")


def _same_count(chosen: Tensor, rejected: Tensor) -> None:
    if len(chosen) != len(rejected):
        arguments.fail("rejected", rejected, f"{len(chosen)} sequences, as many as chosen has")
