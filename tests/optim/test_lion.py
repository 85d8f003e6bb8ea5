"""cupyops.optim.Lion against the paper's rule, written in PyTorch by itself."""

import pytest
import torch
from optim.contract import OptimizerContract, parameters, train
from torch import nn

import cupyops
from cupyops.optim.lion import Lion, lion_step


class Paper(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:2302.06675."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, *, maximize=False, foreach=None,
                 capturable=False, differentiable=False, fused=None):  # fmt: skip
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize, foreach=foreach,
                                      capturable=capturable, differentiable=differentiable, fused=fused))  # fmt: skip

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                real = torch.view_as_real if p.is_complex() else lambda t: t
                g, weight, momentum = (real(t) for t in (-p.grad if group["maximize"] else p.grad, p.data, m))
                update = torch.sign(beta1 * momentum + (1 - beta1) * g)
                weight.copy_(weight - lr * (update + group["weight_decay"] * weight))
                momentum.copy_(beta2 * momentum + (1 - beta2) * g)


class TestLion(OptimizerContract):
    ours, theirs, kernel, arrays = Lion, Paper, lion_step, 3
    flips = 1e-6  # the sign of what rounds to either side of 0
    usual = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    options = [{}, {"weight_decay": 0.1, "maximize": True}, {"betas": (0.0, 0.5)}]
    simulated = [{"weight_decay": 0.1}]
    bad = [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -1.0}]
    test_signature_is_torch_s = None  # which has none

    def test_what_was_asked_for_is_pytorch_s(self, device):
        for options in ({"foreach": True}, {"fused": False}, {"differentiable": True}):
            params = parameters(device, torch.float32)
            optimizer = Lion(params, **options)
            for p in params:
                p.requires_grad_(not options.get("differentiable"))
            with cupyops.trace() as trace:
                train([params], [optimizer], steps=1)
            assert trace.routes() == {"reference"}


def test_errors_name_the_culprit():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(cupyops.InputError, match=r"betas\[1\] is 1.5 \(float\), expected at least 0, and less than 1"):
        Lion([p], betas=(0.9, 1.5))
    with pytest.raises(cupyops.InputError, match="lr is a tensor of shape"):
        Lion([p], lr=torch.ones(2))
    p.grad = torch.eye(2)[0].to_sparse()
    with pytest.raises(cupyops.InputError, match="Lion has no sparse step"):
        Lion([p]).step()


def test_zero_and_nan_do_not_move(device):
    p = nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.tensor([0.0, torch.nan, 2.0], device=device)
    Lion([p], lr=0.5).step()
    assert p.tolist() == [1.0, 1.0, 0.5]
