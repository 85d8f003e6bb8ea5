"""Derivatives: numerical differentiation, second derivatives, forward mode and torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..call import Call, Function, differentiable, tensors_of
from ..case import Case, exact
from ..derived import brief, matching, of_its_inputs, same, weighted
from ..hazard import Failure, NotApplicable, hazard, told
from ..recast import FINEST
from ..shrink import reduced

SMALL = 3  # to which sizes are cut where the work grows with a power of them
MOST = 150  # numbers of which a Hessian is made
_NONDETERMINISM = 1e-7  # is left to others, too

Dims = tuple[int | None, ...]


# --- numerical differentiation ---


@hazard("in float64 the gradients are the slopes of the function")
def gradcheck(case: Case) -> None:
    """`torch.autograd.gradcheck`, which asks no reference."""
    function, inputs = _in_double(case)
    _checked(torch.autograd.gradcheck, function, inputs)


@hazard("in float64 the second derivatives are the slopes of the gradients")
def double_backward(case: Case) -> None:
    """`torch.autograd.gradgradcheck`: with respect to the inputs and to the gradient that arrives."""
    function, inputs = _in_double(case)
    case.needs(gradcheck)
    _checked(torch.autograd.gradgradcheck, function, inputs)


@hazard("the gradient of a norm of gradients is right; it is never zero in silence")
def gradient_penalty(case: Case) -> None:
    """Double backward in the dtype of the call, as WGAN-GP has it."""
    case.needs_gradient()
    case.needs(double_backward)

    def penalty(function: Function, call: Call) -> list[Tensor]:
        outputs = differentiable(tensors_of(call.of(function)))
        grads = [grad.to(y.dtype).requires_grad_() for grad, y in zip(case.grads(outputs), outputs)]
        found = torch.autograd.grad(outputs, call.tensors(), grads, create_graph=True, materialize_grads=True)
        sum_of_squares = sum((g.to(torch.promote_types(g.dtype, torch.float32)) ** 2).sum() for g in found)
        if not isinstance(sum_of_squares, Tensor) or not sum_of_squares.requires_grad:
            return [torch.zeros_like(t) for t in (*call.tensors(), *grads)]
        second = torch.autograd.grad(sum_of_squares, [*call.tensors(), *grads], materialize_grads=True)
        return list(second)

    same(case, case.call, penalty)


# --- forward mode ---


@hazard("forward-mode AD gives the right tangents")
def forward_ad_tangents(case: Case) -> None:
    """Compare with dual tensors; a tangent that is lost counts as zero."""
    case.needs_gradient()

    def tangents(function: Function, call: Call) -> list[Tensor]:
        f, inputs = of_its_inputs(case, function, call)
        with forward_ad.dual_level():
            with warnings.catch_warnings():  # the first dual tensor brings PyTorch's own word on what it scripts itself
                warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
                duals = [forward_ad.make_dual(x, v) for x, v in zip(inputs, _tangents(case, inputs))]
            outputs = f(*duals)
            parts = [forward_ad.unpack_dual(y) for y in outputs]
            return [torch.zeros_like(p.primal) if p.tangent is None else p.tangent.clone() for p in parts]

    same(case, case.call, tangents)


@hazard("torch.func.jvp gives the right tangents")
def jvp(case: Case) -> None:
    """Forward mode under a transform of torch.func."""
    case.needs_gradient()
    case.needs(forward_ad_tangents)

    def tangents(function: Function, call: Call) -> list[Tensor]:
        f, inputs = of_its_inputs(case, function, call)
        return list(torch.func.jvp(f, inputs, _tangents(case, inputs))[1])

    same(case, case.call, tangents)


# --- batches and Hessians ---


@hazard("torch.func.vmap gives what a loop gives")
def vmap(case: Case) -> None:
    """Map over a new dimension of every input that wants a gradient (or is floating-point), and of each of them alone."""
    case.needs_known_sizes()
    case.needs_new_outputs()
    old = case.call.tensors() or case.needs_floating()
    for batched in _subsets(len(old)):

        def mapped(function: Function, call: Call, batched: Dims = batched) -> list[Tensor]:
            inputs = matching(call, case.call, old)
            f = lambda *values: tuple(tensors_of(call.with_tensors(inputs, values).of(function)))  # noqa: E731
            return list(torch.func.vmap(f, batched)(*_batches(inputs, batched)))

        def looped(function: Function, call: Call, batched: Dims = batched) -> list[Tensor]:
            inputs = matching(call, case.call, old)
            each = [tensors_of(call.with_tensors(inputs, one).of(function)) for one in _examples(inputs, batched)]
            return [torch.stack(both) for both in zip(*each)]

        with told(f"in_dims {batched}"):
            same(case, case.call, mapped, looped)


@hazard("torch.func.vmap of torch.func.grad gives the gradient for each example")
def vmap_of_grad(case: Case) -> None:
    """Differentiate a weighted sum of the outputs, with weights of a batch shared too."""
    case.needs_gradient()
    case.needs_new_outputs()
    case.needs(vmap)
    for batched in _subsets(len(case.call.tensors())):

        def mapped(function: Function, call: Call, batched: Dims = batched) -> list[Tensor]:
            f, inputs = of_its_inputs(case, function, call)
            every = torch.func.grad(weighted(case, f), tuple(range(len(inputs))))
            return list(torch.func.vmap(every, batched)(*_batches(inputs, batched)))

        def looped(function: Function, call: Call, batched: Dims = batched) -> list[Tensor]:
            f, inputs = of_its_inputs(case, function, call)
            each = []
            for one in _examples(inputs, batched):
                leaves = [value.clone().requires_grad_() for value in one]
                each.append(torch.autograd.grad(weighted(case, f)(*leaves), leaves, materialize_grads=True))
            return [torch.stack(both) for both in zip(*each)]

        with told(f"in_dims {batched}"):
            same(case, case.call, mapped, looped)


@hazard("torch.func.hessian gives the right second derivatives")
def hessian(case: Case) -> None:
    """Forward over reverse, of a weighted sum of the outputs of a call cut small."""
    case.needs_gradient()
    for one in (forward_ad_tangents, jvp, vmap, vmap_of_grad, double_backward, gradient_penalty):
        case.needs(one)
    call = reduced(case, SMALL)
    if (count := sum(tensor.numel() for tensor in call.tensors())) > MOST:
        raise NotApplicable(f"a Hessian of {count} numbers, more than {MOST}")
    small = case.with_call(call)

    def forward_over_reverse(function: Function, call: Call) -> list[Tensor]:
        f, inputs = of_its_inputs(small, function, call)
        return tensors_of(torch.func.hessian(weighted(small, f), tuple(range(len(inputs))))(*inputs))

    def reverse_over_reverse(function: Function, call: Call) -> list[Tensor]:
        f, inputs = of_its_inputs(small, function, call)
        return tensors_of(torch.autograd.functional.hessian(weighted(small, f), inputs))

    same(small, call, forward_over_reverse, reverse_over_reverse)


# --- means ---


def _in_double(case: Case) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """(f, inputs) of the call cut small, in float64. Raises `NotApplicable` where its plain gradients are wrong already."""
    case.needs_gradient()
    source = case.generator(4)

    def off_the_kinks(tensor: Tensor) -> Tensor:  # the derivative at a tie, or of relu at 0, has no slope
        noise = torch.rand(tensor.shape, generator=source, dtype=torch.float64).to(tensor.device)
        moved = tensor.detach() * (1 + 0.01 * noise) + 0.01 * noise * (tensor.detach() == 0)
        return moved.requires_grad_(tensor.requires_grad)

    small = case.with_call(exact(reduced(case, SMALL)).map_values(off_the_kinks))
    try:
        small.compare(small.plain, *small.expected(small.call), lenient=False)
    except Exception as error:  # whatever an operator raises
        raise NotApplicable(f"in float64 the plain gradients are not right already: {brief(error)}") from error
    if any(y.dtype not in FINEST for y in differentiable(small.plain.outputs)):
        raise NotApplicable("an output is rounded to fewer bits than float64 has: it has no slopes")
    f, _ = of_its_inputs(small, case.target.function, small.call)

    def flat(*values: Tensor) -> Tensor:  # in one piece: that an output may have no gradient is for others to try
        return torch.cat([y.reshape(-1) for y in f(*values)])

    return flat, tuple(tensor.detach().requires_grad_() for tensor in small.call.tensors())


def _checked(check: Callable[..., bool], function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    """Run one of PyTorch's checks, by random projections; what other hazards try is left to them."""
    try:
        check(function, inputs, fast_mode=True, check_undefined_grad=False, nondet_tol=_NONDETERMINISM)
    except Exception as error:  # whatever an operator raises
        raise Failure(brief(error)) from error


def _tangents(case: Case, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    source = case.generator(3)
    return tuple(torch.randn(x.shape, generator=source, dtype=torch.float64).to(x) for x in inputs)


def _subsets(count: int) -> list[Dims]:
    """Placements of a dimension of examples: in all inputs, and in each alone."""
    alone = [tuple(0 if i == k else None for i in range(count)) for k in range(count)]
    return [(0,) * count, *(alone if count > 1 else [])]


def _examples(inputs: Sequence[Tensor], batched: Dims) -> list[list[Tensor]]:
    """Two, both within the range of the values given."""
    plain = [x.detach() for x in inputs]
    return [plain, [x if dim is None else 0.75 * x for x, dim in zip(plain, batched)]]


def _batches(inputs: Sequence[Tensor], batched: Dims) -> list[Tensor]:
    pairs = zip(*_examples(inputs, batched))
    return [pair[0] if dim is None else torch.stack(pair) for pair, dim in zip(pairs, batched)]
