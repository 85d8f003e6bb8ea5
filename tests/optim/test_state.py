"""States that others have saved: PyTorch's, older ones, and those of other packages' optimizers of the same rule."""

import copy

import pytest
import torch
from optim.contract import parameters, set_grads
from torch import nn

import cupyops
from cupyops.optim import SGD, Adam, AdamW, Lion

PAIRS = [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]
STEPS = {
    "a number": lambda step: int(step.item()),
    "a float": lambda step: float(step.item()),
    "no dimension": lambda step: step.clone(),
    "one element": lambda step: step.reshape(1).clone(),
    "one element, int64": lambda step: step.reshape(1).long(),
    "two dimensions": lambda step: step.reshape(1, 1).clone(),
    "float64": lambda step: step.double(),
}
SHAPES = [(5,), (3, 7), (70,)]


def trained(cls, steps=2, **options):
    """(parameters, the state dict of PyTorch's optimizer after some steps)."""
    params = parameters("cpu", torch.float32, SHAPES)
    optimizer = cls(params, lr=0.1, **options)
    for step in range(steps):
        set_grads([params], step)
        optimizer.step()
    return params, optimizer.state_dict()


def go_on(cls, params, state, steps=3, **options):
    """The parameters after some steps more, and the optimizer."""
    mine = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = cls(mine, lr=0.1, **options)
    optimizer.load_state_dict(copy.deepcopy(state))
    for step in range(steps):
        set_grads([mine], 10 + step)
        optimizer.step()
    return mine, optimizer


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_step_of_any_kind(ours, theirs, options, kind, simulated):
    """As of old FSDP checkpoints, whose steps have one element each: step after step, with PyTorch's result."""
    params, state = trained(theirs, amsgrad=options.get("amsgrad", False))
    expected, _ = go_on(theirs, params, state, **options)
    for of in state["state"].values():
        of["step"] = STEPS[kind](of["step"])
    for group in state["param_groups"]:
        group.update(options)
    with cupyops.simulate(check=False) if simulated else cupyops.plans():
        found, optimizer = go_on(ours, params, state, **options)
    torch.testing.assert_close(found, expected)
    steps = [optimizer.state[p]["step"] for p in found]
    assert [one.item() for one in steps] == [5.0] * len(steps) and all(one.dim() == 0 for one in steps)
    again, _ = go_on(theirs, found, optimizer.state_dict())  # which PyTorch goes on with
    assert all(torch.isfinite(p).all() for p in again)


@pytest.mark.parametrize("simulated", [False, True])
def test_a_step_that_is_put_there(simulated):
    """Without load_state_dict; the parameters have steps of several kinds."""
    lists = [parameters("cpu", torch.float32, SHAPES) for _ in range(2)]
    optimizers = [Adam(lists[0], lr=0.1), torch.optim.Adam(lists[1], lr=0.1)]
    for step in range(4):
        set_grads(lists, step)
        with cupyops.simulate(check=False) if simulated else cupyops.plans():
            optimizers[0].step()
        optimizers[1].step()
        if step == 1:
            for (p, q), put in zip(zip(*lists), (torch.tensor([6.0]), 6, torch.tensor(6))):
                optimizers[0].state[p]["step"] = put
                optimizers[1].state[q]["step"] = torch.tensor(6.0)
    torch.testing.assert_close(*lists)
    assert [optimizers[0].state[p]["step"].item() for p in lists[0]] == [8.0] * 3


def test_a_step_that_is_none():
    params, state = trained(torch.optim.Adam)
    for wrong in (torch.ones(2), "2", True):
        state["state"][0]["step"] = wrong
        with pytest.raises(cupyops.InputError, match="step, in the state of a parameter, is .*, expected a number or"):
            go_on(Adam, params, state)


def test_a_step_of_the_group():
    """As Apex's FusedAdam has it."""
    params, state = trained(torch.optim.Adam)
    expected, _ = go_on(torch.optim.Adam, params, state)
    for of in state["state"].values():
        del of["step"]
    state["param_groups"][0]["step"] = 2
    found, _ = go_on(Adam, params, state)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("simulated", [False, True])
def test_a_foreign_lion(simulated):
    """Such as lion-pytorch's or timm's: options of ours are missing, others are there."""
    params, state = trained(Lion, weight_decay=0.1)
    expected, _ = go_on(Lion, params, state)
    foreign = copy.deepcopy(state)
    for group in foreign["param_groups"]:
        for name in ("maximize", "foreach", "capturable", "differentiable", "fused"):
            del group[name]
        group |= {"caution": False, "decoupled_weight_decay": False}
    for of in foreign["state"].values():
        of["step"] = 2
    with cupyops.simulate(check=False) if simulated else cupyops.plans():
        found, optimizer = go_on(Lion, params, foreign)
    torch.testing.assert_close(found, expected)
    assert optimizer.param_groups[0]["fused"] is None and optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_lion_without_momentum():
    params, state = trained(Lion)
    for of in state["state"].values():
        of["state1"] = of.pop("exp_avg")
    with pytest.raises(cupyops.InputError, match="state of a parameter has state1, expected exp_avg"):
        go_on(Lion, params, state)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (SGD, torch.optim.SGD, {"momentum": 0.9}),
        (SGD, torch.optim.SGD, {}),
        (Adam, torch.optim.Adam, {"weight_decay": 0.1}),
        (AdamW, torch.optim.AdamW, {}),
    ],
)
def test_groups_of_an_older_pytorch(ours, theirs, options):
    """They name fewer options."""
    params, state = trained(theirs, **options)
    expected, _ = go_on(theirs, params, state)
    for group in state["param_groups"]:
        for name in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            group.pop(name, None)
    for simulated in (False, True):
        with cupyops.simulate(check=False) if simulated else cupyops.plans():
            found, _ = go_on(ours, params, state)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: cupyops.optim.Lion(p), None),
        (lambda p: cupyops.optim.SGD(p, momentum=0.9), None),
        (lambda p: cupyops.optim.AdamW(p, capturable=True), None),
        (lambda p: cupyops.optim.AdamW(p), "capturable is False"),
        (lambda p: cupyops.optim.Adam(p, fused=True), "capturable is False"),
    ],
    ids=["Lion", "SGD", "AdamW capturable", "AdamW", "Adam fused"],
)
def test_what_a_capture_needs(monkeypatch, make, words):
    """State that is there, and no count on the host."""
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = torch.ones_like(p)
    optimizer = make([p])
    capturing = lambda: monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with cupyops.simulate():
        capturing()
        with pytest.raises(cupyops.LaunchError, match=words or "run a step before the capture"):
            optimizer.step()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        optimizer.step()
        capturing()
        if words is None:
            before = p.detach().clone()
            optimizer.step()
            assert not torch.equal(p, before)
        else:
            with pytest.raises(cupyops.LaunchError, match=words):
                optimizer.step()
