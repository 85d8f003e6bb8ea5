"""cupyops.optim.Muon against torch.optim.Muon, and its iteration against the polynomial in float64."""

import copy
import inspect
import pickle

import pytest
import torch
from optim.contract import LAYOUTS, parameters, set_grads
from torch import nn

import cupyops
from cupyops.optim import Muon, muon

SHAPES = [(8, 12), (12, 8), (8, 12), (5, 5), (8, 12), (1, 7), (12, 8), (33, 20)]
OPTIONS = [
    {},
    {"weight_decay": 0.3, "momentum": 0.8, "nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    {"ns_coefficients": (3.4, -4.7, 2.0), "eps": 1e-5, "lr": torch.tensor(0.05)},
]


def trained(params, optimizer, steps):
    for step in steps:
        set_grads([params], step)
        optimizer.step()


def near(ours, theirs, steps, lr=0.1):
    """An update is of size lr, and of bfloat16: what products in another order make of it."""
    for p, q in zip(ours, theirs):
        assert (p.shape, p.dtype, p.stride()) == (q.shape, q.dtype, q.stride())
        assert (p.double() - q.double()).abs().max() <= steps * lr * 2**-4 + 4 * torch.finfo(p.dtype).eps


def test_signature_is_torch_s():
    ours, theirs = (inspect.signature(cls.__init__).parameters.values() for cls in (Muon, torch.optim.Muon))
    assert [(one.name, one.default) for one in ours] == [(one.name, one.default) for one in theirs]


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "momentum", "rms", "coefficients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_is_pytorch_s(device, options, dtype):
    """Alone to the bit, together within the rounding of bfloat16; the momentum to the bit either way."""
    steps, options = 4, {"lr": 0.1, **options}
    for shapes in ([(8, 12), (12, 8), (5, 5), (33, 20)], SHAPES):
        ours, theirs = (parameters(device, dtype, shapes) for _ in range(2))
        optimizers = Muon(ours, **options), torch.optim.Muon(theirs, **options)
        trained(ours, optimizers[0], range(steps))
        trained(theirs, optimizers[1], range(steps))
        if shapes is SHAPES:
            near(ours, theirs, steps)
        elif device.type == "cpu" and isinstance(options["lr"], float):  # of a tensor PyTorch's is in fp32
            assert all(map(torch.equal, ours, theirs))
        for p, q in zip(ours, theirs):
            assert optimizers[0].state[p].keys() == optimizers[1].state[q].keys()
            torch.testing.assert_close(optimizers[0].state[p], optimizers[1].state[q])


def test_the_iteration_is_the_polynomial(device):
    """Of each matrix by itself, tall or wide: on singular values, in float64."""
    a, b, c = coefficients = (3.4445, -4.7750, 2.0315)
    for shape in ((3, 20, 33), (4, 33, 20), (1, 16, 16)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
        exact = x.double() / torch.linalg.vector_norm(x.double(), dim=(1, 2), keepdim=True)
        u, s, v = torch.linalg.svd(exact, full_matrices=False)
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        found = muon.newton_schulz(x.clone(), coefficients, 5, 1e-7)
        assert found.shape == x.shape and found.dtype is torch.bfloat16
        error = torch.linalg.vector_norm(found.double() - u @ s.diag_embed() @ v, dim=(1, 2))
        assert (error / torch.linalg.vector_norm(s, dim=1)).max() < 0.03


def test_an_update_is_nearly_orthogonal(device):
    p = nn.Parameter(torch.zeros(24, 40, device=device))
    set_grads([[p]], 0)
    Muon([p], lr=1.0, weight_decay=0.0).step()
    singular = torch.linalg.svdvals(p.detach().float())
    assert singular.min() > 0.4 and singular.max() < 1.4


def test_the_shapes_that_share_a_product(monkeypatch):
    """As many as fit, and no more."""
    counts, iterate = [], muon.newton_schulz
    monkeypatch.setattr(muon, "newton_schulz", lambda x, *args: counts.append(len(x)) or iterate(x, *args))
    monkeypatch.setattr(muon, "MOST_ELEMENTS", 2 * 8 * 12)
    params, twins = (parameters("cpu", torch.float32, SHAPES) for _ in range(2))
    trained(params, Muon(params, lr=0.1), range(2))
    assert sorted(counts) == sorted(2 * [2, 1, 2, 1, 1, 1])
    trained(twins, torch.optim.Muon(twins, lr=0.1), range(2))
    near(params, twins, 2)


@pytest.mark.parametrize("layout", ["transposed", "misaligned", "every other"])
def test_layouts(device, layout):
    change = {**LAYOUTS, "transposed": lambda p: p.detach().t().contiguous().t()}[layout]
    make = lambda: [nn.Parameter(change(p)) for p in parameters(device, torch.float32, SHAPES)]
    ours, theirs = make(), make()
    trained(ours, Muon(ours, lr=0.1), range(3))
    trained(theirs, torch.optim.Muon(theirs, lr=0.1), range(3))
    near(ours, theirs, 3)


def test_bfloat16_without_nesterov_keeps_its_momentum(device):
    """Which PyTorch's normalises in place."""
    (p,), (q,) = (parameters(device, dtype, [(6, 9)]) for dtype in (torch.bfloat16, torch.float64))
    optimizer, momentum = Muon([p], lr=0.1, nesterov=False), torch.zeros_like(q)
    for step in range(3):
        set_grads([[p], [q]], step)
        optimizer.step()
        q.grad = p.grad.double()
        momentum = momentum * 0.95 + q.grad * 0.05
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"].double(), momentum, rtol=0.02, atol=2e-3)


def test_gradients_come_and_go(device):
    ours, theirs = (parameters(device, torch.float32, SHAPES) for _ in range(2))
    optimizers = Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    for step, absent in enumerate([{0, 3}, {1, 2, 4}, set(), set(range(len(SHAPES)))]):
        set_grads([ours, theirs], step, change=lambda grad, index, absent=absent: None if index in absent else grad)
        for optimizer in optimizers:
            optimizer.step()
    near(ours, theirs, 4)


def test_groups_schedulers_and_closures(device):
    ours, theirs = (parameters(device, torch.float32, SHAPES) for _ in range(2))
    for params, cls in ((ours, Muon), (theirs, torch.optim.Muon)):
        optimizer = cls([{"params": params[::2], "lr": 0.2}, {"params": params[1::2]}], lr=0.1, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            set_grads([params], step)
            assert optimizer.step(lambda: "the loss") == "the loss"
            schedule.step()
    near(ours, theirs, 3, lr=0.2)


@pytest.mark.parametrize("duplicate", ["state_dict", "deepcopy", "pickle"])
def test_goes_on_bit_by_bit(device, duplicate):
    params = parameters(device, torch.float32, SHAPES)
    optimizer = Muon(params, lr=0.1)
    trained(params, optimizer, range(2))
    if duplicate == "state_dict":
        others = [nn.Parameter(p.detach().clone()) for p in params]
        other = Muon(others, lr=1.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        make = copy.deepcopy if duplicate == "deepcopy" else lambda one: pickle.loads(pickle.dumps(one))
        other = make(optimizer)
        others = other.param_groups[0]["params"]
    trained(params, optimizer, range(2, 4))
    trained(others, other, range(2, 4))
    assert all(map(torch.equal, params, others))


def test_state_goes_to_pytorch_and_back(device):
    ours, theirs = (parameters(device, torch.float32, [(8, 12), (5, 5)]) for _ in range(2))
    first, second = Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    trained(ours, first, range(2))
    trained(theirs, second, range(2))
    swapped = torch.optim.Muon(ours, lr=0.1), Muon(theirs, lr=0.1)
    swapped[0].load_state_dict(first.state_dict())
    swapped[1].load_state_dict(second.state_dict())
    trained(ours, swapped[0], range(2, 4))
    trained(theirs, swapped[1], range(2, 4))
    near(ours, theirs, 4)


def test_grad_scaler(device):
    """Unscaled before the step, which is skipped where a gradient is infinite."""
    ours, theirs = (parameters(device, torch.float32, SHAPES) for _ in range(2))
    optimizers = Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    scalers = [torch.amp.GradScaler(device.type, init_scale=1024.0) for _ in optimizers]
    for step, infinite in enumerate([False, True, False]):
        set_grads([ours, theirs], step)
        for params, optimizer, scaler in zip((ours, theirs), optimizers, scalers):
            scaler.scale(torch.ones((), device=device))
            for p in params:
                p.grad.mul_(scaler.get_scale())
            if infinite:
                params[1].grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    near(ours, theirs, 3)


def test_empty_matrices(device):
    p, q = (nn.Parameter(torch.zeros(0, 3, device=device)) for _ in range(2))
    p.grad, q.grad = torch.zeros_like(p), torch.zeros_like(q)
    Muon([p, q]).step()


def test_what_pytorch_refuses():
    with pytest.raises(ValueError, match="2D"):
        Muon([nn.Parameter(torch.ones(3))])
    p = nn.Parameter(torch.ones(2, 2))
    for options in ({"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"adjust_lr_fn": "other"}):
        with pytest.raises(ValueError):  # noqa: PT011 - the words are PyTorch's own
            Muon([p], **options)
    p.grad = torch.ones_like(p)
    for options in ({"ns_steps": 100}, {"ns_coefficients": (1.0, 2.0)}):
        with pytest.raises(ValueError, match="expected"):
            Muon([p], **options).step()
    p.grad = torch.eye(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        Muon([p]).step()


@pytest.mark.gpu
def test_cuda_graph_follows_the_learning_rate():
    ours, theirs = (parameters("cuda", torch.float32, SHAPES) for _ in range(2))
    rate = torch.tensor(0.1, device="cuda")
    optimizer, other = Muon(ours, lr=rate), torch.optim.Muon(theirs, lr=0.1)
    set_grads([ours, theirs], 0)
    optimizer.step()
    other.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for value in (0.1, 0.05, 0.2):
        rate.fill_(value)
        other.param_groups[0]["lr"] = value
        graph.replay()
        other.step()
    near(ours, theirs, 4, lr=0.2)


@pytest.mark.gpu
def test_the_first_step_is_not_captured():
    params = parameters("cuda", torch.float32, SHAPES)
    set_grads([params], 0)
    torch.cuda.synchronize()
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(cupyops.LaunchError, match="run a step before the capture"), graph:
        Muon(params).step()


@pytest.mark.gpu
def test_large():
    ours, theirs = (parameters("cuda", torch.float32, [(512, 2048)] * 3 + [(2048, 512)]) for _ in range(2))
    trained(ours, Muon(ours, lr=0.1), range(2))
    trained(theirs, torch.optim.Muon(theirs, lr=0.1), range(2))
    near(ours, theirs, 2)
