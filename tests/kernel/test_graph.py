"""cupyops.graph: steps of the caller's own first, then the same numbers by replays."""

import copy

import pytest
import torch
from torch import nn

import cupyops
from cupyops._kernel.graph import _explained


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 1)).to(device)


def training(model, optimizer, set_to_none=True):
    def step(x, target, scale=1.0):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = torch.nn.functional.mse_loss(model(x), target) * scale
        loss.backward()
        cupyops.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss}

    return step


def batches(device, sizes):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 5, generator=generator).to(device), torch.randn(n, 1, generator=generator).to(device))
        for n in sizes
    ]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion"])
def test_the_same_losses(device, name, set_to_none):
    """Two signatures in turn, and an argument that is no tensor."""
    options = {"lr": 0.05, **({"momentum": 0.9} if name == "SGD" else {"capturable": device.type == "cuda"})}
    model = network(device)
    models = [model, copy.deepcopy(model)]
    steps = [training(m, getattr(cupyops.optim, name)(m.parameters(), **options), set_to_none) for m in models]
    fast = cupyops.graph(steps[0], warmup=2)
    for x, target in batches(device, [6, 6, 6, 6, 4, 6, 4, 4, 4, 6]):
        loss, expected = fast(x, target, scale=2.0)["loss"], steps[1](x, target, scale=2.0)["loss"]
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(*(list(m.parameters()) for m in models))


def test_on_the_cpu_the_step_runs():
    calls = []

    @cupyops.graph
    def step(x, n):
        """Adds."""
        calls.append(n)
        return x + n, None

    for _ in range(6):
        assert step(torch.ones(2), 3)[0].tolist() == [4.0, 4.0]
    assert calls == [3] * 6
    assert step.__name__ == "step" and step.__doc__ == "Adds."


def test_wrong_arguments():
    with pytest.raises(cupyops.InputError, match=r"step is 3 \(int\), expected a function"):
        cupyops.graph(3)
    with pytest.raises(cupyops.InputError, match="warmup is 0"):
        cupyops.graph(print, warmup=0)
    with pytest.raises(cupyops.InputError, match="no gradient: none flows out of a graph"):
        cupyops.graph(torch.relu)(torch.ones(2, requires_grad=True))


@pytest.mark.gpu
def test_python_runs_no_more():
    calls = []

    def step(x):
        calls.append(1)
        return x * 2

    fast = cupyops.graph(step, warmup=1)
    results = [fast(torch.full((3,), float(i), device="cuda")).clone() for i in range(4)]
    assert len(calls) == 2 and [r[0].item() for r in results] == [0.0, 2.0, 4.0, 6.0]
    fast(torch.ones(4, device="cuda"))
    assert len(calls) == 3


@pytest.mark.gpu
def test_random_numbers_differ():
    fast = cupyops.graph(lambda x: torch.rand_like(x), warmup=1)
    x = torch.ones(100, device="cuda")
    found = [fast(x).clone() for _ in range(4)]
    same = [(j, i) for i, a in enumerate(found) for j, b in enumerate(found[:i]) if torch.equal(a, b)]
    assert not same, f"the same numbers in calls {same}, of {[x[:3].tolist() for x in found]}"


@pytest.mark.gpu
def test_a_tensor_learning_rate_is_followed():
    p = nn.Parameter(torch.zeros(3, device="cuda"))
    rate = torch.tensor(1.0, device="cuda")
    optimizer = cupyops.optim.SGD([p], lr=rate)

    def step():
        p.grad = torch.ones_like(p)
        optimizer.step()

    fast = cupyops.graph(step, warmup=1)
    for _ in range(3):
        fast()
    rate.fill_(0.5)
    fast()
    assert p.tolist() == [-3.5] * 3


@pytest.mark.gpu
def test_what_cannot_be_captured_is_named():
    def step(x):
        return x * x.sum().item()

    fast = cupyops.graph(step, warmup=1)
    x = torch.ones(3, device="cuda")
    fast(x)
    stream = torch.cuda.current_stream()
    with pytest.raises(cupyops.LaunchError, match=r"test_graph.py:\d+: `return x \* x.sum\(\).item\(\)`"):
        fast(x)
    assert torch.rand(3, device="cuda").isfinite().all(), "random numbers outside of a graph go on"
    assert torch.cuda.current_stream() == stream, "and launches where they went before"


def test_a_scaler_that_waits_for_the_gpu_is_named():
    """PyTorch's own asks whether a gradient is infinite, which a capture refuses; the message says what to do instead."""

    class Waits:
        def item(self):
            raise RuntimeError("operation not permitted when stream is capturing")

    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError) as caught:
        scaler._maybe_opt_step(torch.optim.SGD([torch.ones(1)]), {"found_inf_per_device": {"cuda": Waits()}})
    said = str(_explained(caught.value, None))
    assert "GradScaler.step() waits for the GPU" in said and "take one of cupyops.optim, or fused=True" in said


@pytest.mark.gpu
@pytest.mark.parametrize("cls", [cupyops.optim.AdamW, torch.optim.AdamW])
def test_counts_of_the_host_are_refused(cls):
    model = network("cuda")
    fast = cupyops.graph(training(model, cls(model.parameters())), warmup=1)
    ((x, target),) = batches("cuda", [6])
    fast(x, target)
    with pytest.raises(cupyops.LaunchError, match="capturable is False"):
        fast(x, target)


@pytest.mark.gpu
def test_arguments_without_a_hash():
    with pytest.raises(cupyops.InputError, match="something with a hash"):
        cupyops.graph(lambda x, s: x)(torch.ones(2, device="cuda"), {1, 2})


class _Bottleneck(torch.nn.Module):
    """The block of ResNet-50: convolutions of one tap, whose neighbours are asked of a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(8, 8, 1, bias=False), torch.nn.BatchNorm2d(8)
        self.conv2, self.bn2 = torch.nn.Conv2d(8, 8, 1, bias=False), torch.nn.BatchNorm2d(8)
        self.relu = torch.nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


def test_nothing_asks_of_a_capture_while_torch_compile_traces(monkeypatch):
    model = torch.nn.Sequential(_Bottleneck(), _Bottleneck())
    plain = copy.deepcopy(model)
    cupyops.swap(model)
    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # as on a GPU
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, plain(x))
