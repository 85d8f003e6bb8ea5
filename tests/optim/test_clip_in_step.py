"""`optimizer.clip_grad_norm_`: the step is that after `clip_grad_norm_`, and the gradients are not written."""

import functools
import math

import pytest
import torch
from contract import DTYPES
from optim.contract import kernels, parameters, set_grads
from torch import nn

import cupyops
from cupyops.nn.utils import clip_grad_norm_

OPTIMIZERS = {
    "SGD": functools.partial(cupyops.optim.SGD, lr=0.1, momentum=0.9),
    "SGD without momentum": functools.partial(cupyops.optim.SGD, lr=0.1, weight_decay=0.1),
    "Adam": functools.partial(cupyops.optim.Adam, lr=0.1),
    "AdamW amsgrad": functools.partial(cupyops.optim.AdamW, lr=0.1, amsgrad=True, maximize=True),
    "AdamW capturable": functools.partial(cupyops.optim.AdamW, lr=0.1, capturable=True),
    "Lion": functools.partial(cupyops.optim.Lion, lr=0.1),
}
HALF = {
    "master weights": functools.partial(cupyops.optim.AdamW, lr=0.1, master_weights=True),
    "stochastic rounding": functools.partial(cupyops.optim.AdamW, lr=0.1, stochastic_rounding=True, seed=3),
}
ALL = [(name, dtype) for name in OPTIMIZERS for dtype in DTYPES] + [(name, torch.bfloat16) for name in HALF]
SHAPES = [(5,), (3, 7), (1031,), (), (0,)]


def trained(name, dtype, device, max_norm, in_step, norm_type=2.0):
    """Parameters after three steps, the norms, and whether the last gradients are what they were."""
    params = parameters(device, dtype, SHAPES)
    optimizer = {**OPTIMIZERS, **HALF}[name](params)
    norms = []
    for step in range(3):
        set_grads([params], step)
        before = [p.grad.clone() for p in params]
        if in_step:
            norms.append(optimizer.clip_grad_norm_(max_norm, norm_type))
        else:
            norms.append(clip_grad_norm_(params, max_norm, norm_type))
        optimizer.step()
    return [p.detach() for p in params], norms, [torch.equal(p.grad, b) for p, b in zip(params, before)]


@pytest.mark.parametrize(("name", "dtype"), ALL, ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_the_bits_of_both_steps(name, dtype, max_norm, device):
    with kernels(device):
        ours, norms, same = trained(name, dtype, device, max_norm, in_step=True)
        expected, others, _ = trained(name, dtype, device, max_norm, in_step=False)
    assert all(same), "the gradients are as they were"
    for one, other in zip([*ours, *norms], [*expected, *others], strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_against_pytorch(norm_type, device):
    ours, theirs = (parameters(device, torch.float64, SHAPES[:4]) for _ in range(2))
    optimizers = cupyops.optim.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    with kernels(device):
        for step in range(3):
            set_grads([ours, theirs], step)
            norm = optimizers[0].clip_grad_norm_(0.5, norm_type)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
            for optimizer in optimizers:
                optimizer.step()
            torch.testing.assert_close(ours, theirs)


def test_by_pytorch():
    """On the CPU the gradients are scaled at once, and once."""
    ours, theirs = (parameters(torch.device("cpu"), torch.float32) for _ in range(2))
    optimizers = cupyops.optim.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(2):
        set_grads([ours, theirs], step)
        norm = optimizers[0].clip_grad_norm_(0.5)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5))
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs])


def test_one_step_alone(device):
    """A step takes the factor with it, and so does zero_grad."""
    with kernels(device):
        p = nn.Parameter(torch.zeros(2, device=device))
        optimizer = cupyops.optim.SGD([p], lr=1.0)
        p.grad = torch.tensor([3.0, 4.0], device=device)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        torch.testing.assert_close(p.detach().cpu(), torch.tensor([-0.6, -0.8]))
        optimizer.step()
        torch.testing.assert_close(p.detach().cpu(), torch.tensor([-3.6, -4.8]))
        optimizer.clip_grad_norm_(1.0)
        optimizer.zero_grad()
        p.grad = torch.tensor([3.0, 4.0], device=device)
        optimizer.step()
        torch.testing.assert_close(p.detach().cpu(), torch.tensor([-6.6, -8.8]))


def test_a_norm_that_is_not_finite(device):
    with kernels(device):
        for bad in (math.inf, math.nan):
            p, q = (nn.Parameter(torch.zeros(2, device=device)) for _ in range(2))
            ours, theirs = cupyops.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
            p.grad, q.grad = (torch.tensor([1.0, bad], device=device) for _ in range(2))
            with pytest.raises(RuntimeError, match="non-finite"):
                ours.clip_grad_norm_(1.0, error_if_nonfinite=True)
            ours.clip_grad_norm_(1.0)
            torch.nn.utils.clip_grad_norm_([q], 1.0)
            ours.step()
            theirs.step()
            torch.testing.assert_close(p, q, equal_nan=True)


@pytest.mark.gpu
def test_in_a_graph():
    lists = [parameters("cuda", torch.float32) for _ in range(2)]
    ours = cupyops.optim.AdamW(lists[0], lr=0.1, capturable=True)
    theirs = torch.optim.AdamW(lists[1], lr=0.1)
    set_grads(lists, 0)
    ours.clip_grad_norm_(0.5)
    ours.step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        ours.clip_grad_norm_(0.5)
        ours.step()
    for step in range(3):
        if step:
            graph.replay()
            for p, q in zip(*lists):
                q.grad.copy_(p.grad)  # which the other clips where they lie
        torch.nn.utils.clip_grad_norm_(lists[1], 0.5)
        theirs.step()
        torch.testing.assert_close(lists[0], lists[1])


def clipped_twice(optimizer, params, clip):
    """The second limit is larger: nothing grows."""
    return [clip(0.5), clip(1.0), optimizer.step()][:2]


def clipped_before_a_closure(optimizer, params, clip):
    """That makes new gradients, which nobody clips."""

    def closure():
        for param in params:
            param.grad = torch.full_like(param, 3.0)

    return [clip(0.5), optimizer.step(closure)][:1]


def clipped_before_a_closure_that_adds(optimizer, params, clip):
    def closure():
        for param in params:
            param.grad.add_(1.0)

    return [clip(0.5), optimizer.step(closure)][:1]


def other_gradients_without_zero_grad(optimizer, params, clip):
    """As where the step was left out and the model forgot its gradients, not the optimizer."""
    norm = clip(0.5)
    for param in params:
        param.grad = None
    set_grads([params], 7)
    return [norm, optimizer.step()][:1]


BETWEEN = [
    clipped_twice, clipped_before_a_closure, clipped_before_a_closure_that_adds, other_gradients_without_zero_grad,
]  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", ["SGD", "AdamW amsgrad", "Lion"])
def test_as_if_scaled_at_once(name, between, device):
    outcomes = []
    for in_step in (True, False):
        params = parameters(device, torch.float64, SHAPES)
        optimizer = OPTIMIZERS[name](params)
        clip = optimizer.clip_grad_norm_ if in_step else functools.partial(torch.nn.utils.clip_grad_norm_, params)
        with kernels(device):
            for step in range(3):
                set_grads([params], step)
                norms = between(optimizer, params, clip)
        outcomes.append([*[param.detach() for param in params], *norms])
    torch.testing.assert_close(*outcomes)


def test_gradients_changed_in_place_are_told(device):
    params = parameters(device, torch.float32, SHAPES)
    optimizer = cupyops.optim.SGD(params, lr=0.1)
    with kernels(device):
        set_grads([params], 0)
        optimizer.clip_grad_norm_(0.5)
        params[0].grad.add_(1.0)
        before = [param.detach().clone() for param in params]
        with pytest.raises(RuntimeError, match=r"changed in place since optimizer\.clip_grad_norm_"):
            optimizer.step()
        assert all(torch.equal(param, old) for param, old in zip(params, before))
        optimizer.zero_grad()
        set_grads([params], 1)
        optimizer.step()
