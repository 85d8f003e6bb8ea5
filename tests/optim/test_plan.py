"""A step goes by what the last one found out, and notices whatever has changed since; against PyTorch's optimizers."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from optim.contract import kernels, parameters, set_grads
from optim.test_lion import Paper
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import cupyops
from cupyops._dispatch import multi_tensor
from cupyops._util import torch_private
from cupyops.optim.fused import Fused
from cupyops.optim.plan import StepPlan

SHAPES = [(3, 3), (7,), (2, 5)]


class Counted:
    """Counts its steps on the device: fused on a CPU, capturable on a GPU, where what is fused has to be laid out alike."""

    def __init__(self, params, **options):
        params = list(params)
        on_gpu = any(isinstance(p, torch.Tensor) and p.is_cuda for p in params)
        super().__init__(params, **{"capturable" if on_gpu else "fused": True}, **options)


class Adam(Counted, torch.optim.Adam):
    """PyTorch's."""


class OurAdam(Counted, cupyops.optim.Adam):
    """Ours."""


PAIRS = {
    "adamw": (cupyops.optim.AdamW, torch.optim.AdamW, {"amsgrad": True}),
    "adam, counted on the device": (OurAdam, Adam, {"weight_decay": 0.1}),
    "sgd": (cupyops.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "sgd, plain": (cupyops.optim.SGD, torch.optim.SGD, {}),
    "lion": (cupyops.optim.Lion, Paper, {"weight_decay": 0.1}),
}


@pytest.fixture(params=[name for name in PAIRS if name != "sgd, plain"])
def pair(request):
    return PAIRS[request.param]


@pytest.fixture
def sorts(monkeypatch):
    """How often all parameters of a group have been looked at."""
    found, sort = [], Fused._sort
    monkeypatch.setattr(Fused, "_sort", lambda self, *args: found.append(1) or sort(self, *args))
    return found


def make(pair, device):
    """Parameters and optimizer, of ours and of PyTorch's."""
    lists = [parameters(device, torch.float32, SHAPES) for _ in range(2)]
    return lists, [cls(params, lr=0.1, **pair[2]) for cls, params in zip(pair, lists)]


def steps(lists, optimizers, first, count, change=lambda grad, index: grad):
    """New gradients at new places each time."""
    for step in range(first, first + count):
        set_grads(lists, step, change)
        for optimizer in optimizers:
            optimizer.step()


def replace_data(optimizer, params):
    params[1].data = params[1].data.clone()


def transpose_data(optimizer, params):
    params[0].data = params[0].data.t()  # where it was


def another_dtype(optimizer, params):
    params[1].grad = None
    params[1].data = params[1].data.double()
    optimizer.state[params[1]].clear()


def load(optimizer, params):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replace_state(optimizer, params):
    state = optimizer.state[params[2]]
    for name, one in state.items():
        if one is not None:
            state[name] = one + 1


def move_state(optimizer, params):
    for one in optimizer.state[params[2]].values():
        if one is not None:
            one.data = one.data * 2


def take_up_again(optimizer, params):
    optimizer.state[params[1]].clear()


def add_group(optimizer, params):
    params.append(nn.Parameter(torch.ones(4, device=params[0].device)))
    optimizer.add_param_group({"params": [params[-1]], "lr": 0.3})


def another_group(optimizer, params):
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop(1)], "lr": 0.3})


def another_order(optimizer, params):
    optimizer.param_groups[0]["params"].reverse()


def a_parameter_less(optimizer, params):
    del optimizer.param_groups[0]["params"][1]


def by_pytorch(optimizer, params):
    optimizer.param_groups[0].update(foreach=False, fused=None)


CHANGES = [
    replace_data, transpose_data, another_dtype, load, replace_state, move_state, take_up_again, add_group, another_group,
    another_order, a_parameter_less, by_pytorch,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_noticed(device, pair, sorts, change):
    lists, optimizers = make(pair, device)
    with kernels(device):
        steps(lists, optimizers, 0, 3)
        del sorts[:]
        steps(lists, optimizers, 3, 1)
        assert not sorts, "a step like the last looks at nothing twice"
        for optimizer, params in zip(optimizers, lists):
            change(optimizer, params)
        steps(lists, optimizers, 4, 2)
    assert sorts
    # float64 too: PyTorch's step that is counted on the device corrects its moments in float32
    torch.testing.assert_close(*([p.float() for p in params] for params in lists))


GRADIENTS = {
    "none": lambda grad: None,
    "transposed": lambda grad: grad.t().contiguous().t(),
    "every other": lambda grad: grad.repeat_interleave(2, dim=-1)[..., ::2],
    "negative": lambda grad: torch.complex(grad, -grad).conj().imag,
    "subclass": lambda grad: nn.Parameter(grad, requires_grad=False),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_that_are_noticed(device, pair, sorts, kind):
    lists, optimizers = make(pair, device)
    with kernels(device):
        steps(lists, optimizers, 0, 3)
        del sorts[:]
        # to PyTorch's fused step it is left then, which refuses it
        if kind == "negative" and pair[1] is Adam and device.type == "cpu":
            with pytest.raises(RuntimeError, match="negation"):
                steps(lists, optimizers, 3, 1, change=lambda grad, index: GRADIENTS[kind](grad) if index == 0 else grad)
            return
        steps(lists, optimizers, 3, 1, change=lambda grad, index: GRADIENTS[kind](grad) if index == 0 else grad)
        assert sorts
        steps(lists, optimizers, 4, 2)
    torch.testing.assert_close(*lists)


def test_a_parameter_that_had_none(device, pair, sorts):
    """One that is frozen, until it is not."""
    lists, optimizers = make(pair, device)
    with kernels(device):
        for params in lists:
            params[1].requires_grad_(False)
        steps(lists, optimizers, 0, 3, change=lambda grad, index: None if index == 1 else grad)
        del sorts[:]
        steps(lists, optimizers, 3, 1, change=lambda grad, index: None if index == 1 else grad)
        assert not sorts
        for params in lists:
            params[1].requires_grad_(True)
        steps(lists, optimizers, 4, 2)
        assert sorts
    torch.testing.assert_close(*lists)


def test_sparse_gradients_in_turn(device, sorts):
    lists, optimizers = make(PAIRS["sgd, plain"], device)
    with kernels(device):
        for step in range(6):
            sparse = step % 3 == 2
            steps(lists, optimizers, step, 1, change=lambda g, i, sparse=sparse: g.to_sparse() if sparse else g)
    assert len(sorts) == 4, "the first, those with sparse gradients, and what comes after one"
    torch.testing.assert_close(*lists)


def test_numbers_are_read_each_step(device, pair, sorts):
    lists, optimizers = make(pair, device)
    with kernels(device):
        steps(lists, optimizers, 0, 3)
        del sorts[:]
        for optimizer in optimizers:
            optimizer.param_groups[0].update(lr=0.03, weight_decay=0.3, maximize=True)
        steps(lists, optimizers, 3, 2)
    assert not sorts
    torch.testing.assert_close(*lists)


def test_momentum_that_comes_and_goes(device):
    lists, optimizers = make(PAIRS["sgd, plain"], device)
    with kernels(device):
        for step, momentum in enumerate([0, 0, 0.9, 0.9, 0.9, 0, 0, 0.5, 0.5]):
            for optimizer in optimizers:
                optimizer.param_groups[0]["momentum"] = momentum
            steps(lists, optimizers, step, 1)
    torch.testing.assert_close(*lists)


def test_steps_that_part(device, sorts):
    """Where the host counts them, a launch has one count."""
    lists, optimizers = make(PAIRS["adamw"], device)
    with kernels(device):
        steps(lists, optimizers, 0, 3)
        for optimizer, params in zip(optimizers, lists):
            optimizer.state[params[1]]["step"].fill_(9.0)
        del sorts[:]
        steps(lists, optimizers, 3, 3)
    assert len(sorts) == 1, "from then on there are two batches"
    assert [optimizers[0].state[p]["step"].item() for p in lists[0]] == [6.0, 12.0, 6.0]
    torch.testing.assert_close(*lists)


def test_several_dtypes_and_groups(device, sorts):
    def grouped(cls):
        dtypes = (torch.float32, torch.float64)
        params = [p for dtype in dtypes for p in parameters(device, dtype, SHAPES)]
        return params, cls([{"params": params[::2]}, {"params": params[1::2], "lr": 0.3}], lr=0.1)

    (ours, optimizer), (theirs, other) = grouped(cupyops.optim.AdamW), grouped(torch.optim.AdamW)
    with kernels(device):
        steps([ours, theirs], [optimizer, other], 0, 4)
    assert len(sorts) == 2, "one for each group"
    torch.testing.assert_close(ours, theirs)


def test_from_the_simulator_and_back():
    """What runs the launches on a type of device is part of a plan."""
    lists, optimizers = make(PAIRS["adamw"], torch.device("cpu"))
    for step in range(6):
        with cupyops.trace() as trace, cupyops.simulate() if step % 3 else contextlib.nullcontext():
            steps(lists[:1], optimizers[:1], step, 1)
        assert trace.routes() == {"simulator" if step % 3 else "reference"}
        steps(lists[1:], optimizers[1:], step, 1)
    torch.testing.assert_close(*lists)


def double(states):
    for state in states:
        for one in state.values():
            if one is not None:
                one.data = one.data * 2


def test_state_is_looked_at_once_it_is_shown(device, pair, monkeypatch):
    """Before that nobody can have changed it."""
    looked, states = [], StepPlan._states
    monkeypatch.setattr(StepPlan, "_states", lambda self, *args: looked.append(1) or states(self, *args))
    lists, optimizers = make(pair, device)
    with kernels(device):
        steps(lists, optimizers, 0, 2)
        del looked[:]
        steps(lists, optimizers, 2, 2)
        assert len(looked) == (2 if pair[0] is OurAdam else 0), "what is counted on the device is needed itself"
        kept = [list(optimizer.state.values()) for optimizer in optimizers]
        del looked[:]
        steps(lists, optimizers, 4, 2)
        assert len(looked) == 2
        for one in kept:
            double(one)
        steps(lists, optimizers, 6, 2)
    torch.testing.assert_close(*lists)


def test_state_that_was_had_before_there_was_any(device, pair):
    lists, optimizers = make(pair, device)
    kept = [optimizer.state for optimizer in optimizers]
    with kernels(device):
        steps(lists, optimizers, 0, 3)
        for one in kept:
            double(one.values())
        steps(lists, optimizers, 3, 2)
    torch.testing.assert_close(*lists)


def test_state_that_was_loaded_is_somebody_s(device, pair):
    lists, optimizers = make(pair, device)
    with kernels(device):
        steps(lists, optimizers, 0, 3)
        loaded = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        optimizers = [cls(params, lr=0.1, **pair[2]) for cls, params in zip(pair, lists)]
        for optimizer, one in zip(optimizers, loaded):
            optimizer.load_state_dict(one)
        steps(lists, optimizers, 3, 3)
        for one in loaded:  # but for the steps, of which ours makes its own
            double({name: t for name, t in state.items() if name != "step"} for state in one["state"].values())
        steps(lists, optimizers, 6, 2)
    torch.testing.assert_close(*lists)


def test_state_is_given_as_pytorch_gives_it(device, pair):
    """As it is after the step, whenever it is asked for."""
    lists, optimizers = make(pair, device)
    with kernels(device):
        steps(lists, optimizers, 0, 4)
    for ours, theirs in zip(*([optimizer.state[p] for p in params] for optimizer, params in zip(optimizers, lists))):
        torch.testing.assert_close(ours, theirs)


def test_hooks_of_all_optimizers_and_the_profiler(device):
    (params, _), (optimizer, _) = make(PAIRS["adamw"], device)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
    ]
    with kernels(device):
        steps([params], [optimizer], 0, 2)
        for handle in handles:
            handle.remove()
        steps([params], [optimizer], 2, 1)
        assert calls == ["pre", "post"] * 2
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            steps([params], [optimizer], 3, 1)
    assert "Optimizer.step#AdamW.step" in {event.name for event in profile.events()}


def test_nothing_is_kept_alive(device, pair):
    (params, _), (optimizer, _) = make(pair, device)
    with kernels(device):
        steps([params], [optimizer], 0, 4)
        kept = [weakref.ref(p.grad) for p in params]
        kept += [weakref.ref(one) for p in params for one in optimizer.state[p].values() if one is not None]
        optimizer.zero_grad()
        optimizer.state.clear()
        gc.collect()
        assert not any(one() is not None for one in kept)


def test_a_copy_has_none(device):
    (params, _), (optimizer, _) = make(PAIRS["adamw"], device)
    with kernels(device):
        steps([params], [optimizer], 0, 3)
    assert optimizer.__dict__["_plans"] and "_plans" not in copy.deepcopy(optimizer).__dict__


def test_without_pytorch_s_guards(device, monkeypatch, sorts):
    """Which are not part of its interface."""
    monkeypatch.setattr(torch_private, "available", False)
    lists, optimizers = make(PAIRS["adamw"], device)
    with kernels(device):
        steps(lists, optimizers, 0, 3)
    assert len(sorts) == 3
    torch.testing.assert_close(*lists)


def test_more_launches_than_one(device, sorts):
    """Each with its part of the gradients."""
    shapes = [(1 + index % 3,) for index in range(multi_tensor.capacity(3) + 5)]
    lists = [parameters(device, torch.float32, shapes) for _ in range(2)]
    optimizers = [cls(params, lr=0.1) for cls, params in zip(PAIRS["sgd"], lists)]
    with kernels(device):
        steps(lists, optimizers, 0, 3)
    assert len(sorts) == 1
    torch.testing.assert_close(*lists)
