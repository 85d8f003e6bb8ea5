"""Optimizers and clipping of parameters that are spread over devices by FSDP2: by kernels, on each device its part."""

import pytest
import torch
from processes import together

import cupyops

STEPS = 3


def network():
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 1))  # of the last weight a device has no row


OPTIMIZERS = {
    "AdamW": (lambda p: cupyops.optim.AdamW(p, 0.1), lambda p: torch.optim.AdamW(p, 0.1)),
    "Adam, amsgrad": (
        lambda p: cupyops.optim.Adam(p, 0.1, amsgrad=True),
        lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    ),
    "Adam, capturable": (lambda p: cupyops.optim.Adam(p, 0.1, fused=True), lambda p: torch.optim.Adam(p, 0.1)),
    "SGD": (lambda p: cupyops.optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "SGD, momentum": (lambda p: cupyops.optim.SGD(p, 0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "Lion": (lambda p: cupyops.optim.Lion(p, 0.1), None),
}


def checks(rank, size, store):
    """What every process asserts for itself."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    with cupyops.simulate():
        for name in OPTIMIZERS:
            steps(mesh, name)
        for norm_type in (2.0, float("inf")):
            for max_norm in (0.1, 1e6):
                clips(mesh, norm_type, max_norm)
        clips_what_lies_otherwise(mesh)
        a_device_without_a_part(mesh)
        half_types(mesh)
    dist.destroy_process_group()


def fsdp(mesh):
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def batch(index):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(index))  # the same on all devices


def steps(mesh, name):
    """The parameters after some steps, and the state, which is of DTensors as PyTorch's is; of Lion without FSDP."""
    from torch.distributed.tensor import DTensor

    ours, theirs = OPTIMIZERS[name]
    model, plain = fsdp(mesh), network()
    optimizer, other = ours(model.parameters()), (theirs or ours)(plain.parameters())
    for index in range(STEPS):
        for one, by in ((model, optimizer), (plain, other)):
            by.zero_grad()
            one(batch(index)).square().mean().backward()
            with cupyops.trace() as trace:
                by.step()
            if by is optimizer:
                routes = {record.route for record in trace.records}
                assert routes == {"simulator"}, (name, trace.records)
    for parameter, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach(), msg=lambda text: f"{name}: {text}")
        for key, value in optimizer.state[parameter].items():
            assert isinstance(value, DTensor) or key == "step"
            known = other.state[expected][key]
            torch.testing.assert_close(value.full_tensor() if isinstance(value, DTensor) else value, known)
    again = ours(model.parameters())
    again.load_state_dict(optimizer.state_dict())


def clips(mesh, norm_type, max_norm):
    """The norm of the whole, and gradients scaled by it."""
    from torch.distributed.tensor import DTensor

    model, plain = fsdp(mesh), network()
    for one in (model, plain):
        one(batch(0)).square().mean().backward()
    with cupyops.trace() as trace:
        norm = cupyops.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert {record.route for record in trace.records} == {"simulator"}
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    assert isinstance(norm, DTensor)
    torch.testing.assert_close(norm.full_tensor(), expected)
    for parameter, known in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parameter.grad.full_tensor(), known.grad)


def clips_what_lies_otherwise(mesh):
    """Split and replicated ones together, half types, parts that are no flat arrays, and what is not finite."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    values = [torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(1, 2, 8).view(2, 4).half(), torch.ones(3)]
    lies = [Shard(1), Shard(0), Replicate()]
    spread, plain = [], []
    for value, place in zip(values, lies):
        for many, one in ((spread, distribute_tensor(torch.zeros_like(value), mesh, [place])), (plain, value.clone())):
            many.append(torch.nn.Parameter(one))
        spread[-1].grad, plain[-1].grad = distribute_tensor(value.clone(), mesh, [place]), value.clone()
    norm = cupyops.nn.utils.clip_grad_norm_(spread, 0.5)
    expected = sum(
        value.double().square().sum() for value in values
    ).sqrt()  # PyTorch rounds that of half types to them
    torch.testing.assert_close(norm.full_tensor(), expected.float())
    torch.nn.utils.clip_grad_norm_(plain, 0.5)
    for one, other in zip(spread, plain):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=2e-3, atol=1e-5)
    spread[2].grad.mul_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        cupyops.nn.utils.clip_grad_norm_(spread, 0.5, error_if_nonfinite=True)


def half_types(mesh):
    """bf16 parameters, with masters and by stochastic rounding, beside masters on one device."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    weights = {}
    for name, options in (("one", "master_weights"), ("master", "master_weights"), ("rounded", "stochastic_rounding")):
        model = network().bfloat16()
        if name != "one":
            fully_shard(model, mesh=mesh)
        optimizer = cupyops.optim.AdamW(model.parameters(), 0.01, **{options: True})
        for index in range(STEPS):
            optimizer.zero_grad()
            model(batch(index).bfloat16()).square().mean().backward()
            with cupyops.trace() as trace:
                optimizer.step()
            assert {record.route for record in trace.records} == {"simulator"}, trace.records
        found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        weights[name] = [one.detach().float() for one in found]
        if name == "master":
            state = [optimizer.state[p]["master"] for p in model.parameters()]
            assert all(isinstance(one, DTensor) and one.dtype is torch.float32 for one in state)
    for one, master, rounded in zip(*weights.values()):
        torch.testing.assert_close(master, one, rtol=0.02, atol=2e-3)  # gradients are of bf16
        torch.testing.assert_close(rounded, one, rtol=0.03, atol=6e-3)


def a_device_without_a_part(mesh):
    """One row on two devices."""
    from torch.distributed.fsdp import fully_shard

    ones, losses = torch.ones(2, 5), []
    for split in (True, False):
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 1, bias=False)
        if split:
            fully_shard(model, mesh=mesh)
        optimizer = cupyops.optim.AdamW(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(ones).sum().backward()
            cupyops.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        losses.append(model(ones))
    torch.testing.assert_close(*losses)


def test_fsdp(tmp_path):
    together(checks, [2], tmp_path)
