"""cupyops.optim.Adam and AdamW against torch.optim's."""

import math

import pytest
import torch
from optim.contract import OptimizerContract, parameters, set_grads, train
from torch import nn

import cupyops
from cupyops.optim.adam import Adam, AdamW, adam_step
from cupyops.optim.half import OPTIONS as OPTIONS_OF_HALF

BAD = [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1.0}, {"weight_decay": -1.0}]
EPS = 1e-4  # which float16 has too
OPTIONS = [
    {"eps": EPS},
    {"eps": EPS, "weight_decay": 0.1, "maximize": True},
    {"eps": EPS, "amsgrad": True, "weight_decay": 0.1, "betas": (0.5, 0.9)},
    {"betas": (0.0, 0.0), "eps": 0.1},
    {"eps": EPS, "fused": True, "amsgrad": True},
]


class TestAdam(OptimizerContract):
    more = tuple(OPTIONS_OF_HALF)
    ours, theirs, kernel, arrays = Adam, torch.optim.Adam, adam_step, 5
    usual = {"weight_decay": 0.1, "betas": (0.8, 0.95)}
    options = OPTIONS
    simulated = [{"eps": EPS, "weight_decay": 0.1}, {"eps": EPS, "amsgrad": True, "fused": True}]
    bad = BAD
    capturable = {"capturable": True}


class TestAdamW(OptimizerContract):
    more = tuple(OPTIONS_OF_HALF)
    ours, theirs, kernel, arrays = AdamW, torch.optim.AdamW, adam_step, 5
    usual = {"weight_decay": 0.1, "amsgrad": True}
    options = OPTIONS
    simulated = [{"eps": EPS}, {"eps": EPS, "amsgrad": True}]
    bad = BAD
    capturable = {"capturable": True}
    test_compiled_step = None  # as Adam's


def test_infinite_and_nan(device):
    """As PyTorch's step without foreach has them, but for what overflows in float32 alone."""
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-30, 1e15], device=device)
    lists = [[nn.Parameter(torch.ones(7, device=device)), nn.Parameter(values.clone())] for _ in range(2)]
    options = {"lr": 0.1, "amsgrad": True, "weight_decay": 0.0}
    optimizers = [AdamW(lists[0], **options), torch.optim.AdamW(lists[1], **options)]
    for scale in (1.0, -1.0, 0.0):
        for params, optimizer in zip(lists, optimizers):
            params[0].grad, params[1].grad = values * scale, torch.ones_like(values)
            optimizer.step()
        torch.testing.assert_close(lists[0], lists[1], equal_nan=True)


def test_many_steps_are_unbiased(device):
    """1 - beta^step, early and late."""
    lists = [[nn.Parameter(torch.ones(3, device=device, dtype=torch.float64))] for _ in range(2)]
    optimizers = [Adam(lists[0], fused=True), torch.optim.Adam(lists[1])]
    train(lists, optimizers, steps=2)
    for params, optimizer in zip(lists, optimizers):
        optimizer.state[params[0]]["step"].fill_(99_999)
    train(lists, optimizers, steps=2)
    torch.testing.assert_close(lists[0], lists[1], rtol=1e-12, atol=0)


def test_steps_stay_their_own(device):
    """Whatever they are kept in, each parameter's step is a number that PyTorch may go on with."""
    params = parameters(device, torch.float32)
    optimizer = Adam(params, lr=0.1)
    train([params], [optimizer], steps=2)
    optimizer.state[params[0]]["step"].fill_(7.0)
    train([params], [optimizer], steps=1)
    assert [optimizer.state[p]["step"].item() for p in params] == [8.0] + [3.0] * (len(params) - 1)
    other = torch.optim.Adam(params, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    train([params], [other], steps=1)
    assert [other.state[p]["step"].item() for p in params] == [9.0] + [4.0] * (len(params) - 1)


def test_skipped_steps_are_not_counted(device):
    params = parameters(device, torch.float32, [(5,), (70,)])
    optimizer = AdamW(params, lr=0.1, fused=True)
    for infinite in (0.0, 1.0, 0.0):
        set_grads([params], 0)
        optimizer.grad_scale = torch.full((), 2.0, device=device)
        optimizer.found_inf = torch.full((), infinite, device=device)
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [2.0, 2.0]


def test_state_elsewhere_is_refused(device):
    p = nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones_like(p)
    optimizer = Adam([p], capturable=True)
    optimizer.state[p] = {
        "step": torch.zeros((), device="meta"),
        "exp_avg": torch.zeros_like(p),
        "exp_avg_sq": torch.zeros_like(p),
    }
    with (
        cupyops.simulate(),
        pytest.raises(cupyops.LaunchError, match="its step, which is to be counted there, on meta"),
    ):
        optimizer.step()


def test_sparse_gradient(device):
    table = nn.Embedding(7, 3, sparse=True, device=device)
    table(torch.tensor([1, 5], device=device)).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse"):
        AdamW(table.parameters()).step()
