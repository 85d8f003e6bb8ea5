"""cupyops.optim.SGD against torch.optim.SGD: every option, dtype and layout, and whatever the kernel leaves to PyTorch."""

import copy
import inspect
import itertools
import pickle

import numpy as np
import pytest
import torch
from contract import DTYPES
from torch import nn

import cupyops
from cupyops.compilation import compiler
from cupyops.optim import SGD
from cupyops.optim import sgd as module

SHAPES = [(5,), (3, 7), (1031,), (4100,), (1,), (), (0,), (2, 3, 4, 5)]
OPTIONS = [
    {
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    for momentum, dampening, weight_decay, nesterov, maximize in itertools.product(
        (0, 0.9), (0, 0.3), (0, 0.1), (False, True), (False, True)
    )
    if not nesterov or (momentum and not dampening)
]


def parameters(device, dtype, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [nn.Parameter(value.to(device, dtype)) for value in values]


def twins(make):
    """Parameters for ours, for PyTorch's, and for PyTorch's in float64."""
    exact = [nn.Parameter(p.detach().to(torch.float64)) for p in make()]
    return make(), make(), exact


def optimizers_of(lists, **options):
    """Ours for the first list, PyTorch's for the others."""
    return [cls(params, **options) for cls, params in zip((SGD, torch.optim.SGD, torch.optim.SGD), lists)]


def set_grads(all_params, step, change=lambda grad, index: grad):
    """The same gradients for each list of parameters: those of the first list's dtype."""
    generator = torch.Generator().manual_seed(100 + step)
    first = all_params[0]
    for index, p in enumerate(first):
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device, p.dtype)
        for params in all_params:
            q = params[index]
            q.grad = change(torch.empty_like(q).copy_(grad), index)


def train(all_params, optimizers, steps=4, **kwargs):
    for step in range(steps):
        set_grads(all_params, step, **kwargs)
        for optimizer in optimizers:
            optimizer.step()


def assert_alike(ours, theirs, exact, optimizers, steps=4):
    """As near to float64 as PyTorch is: twice its error, and a unit in the last place for each step's rounding."""
    for index, triple in enumerate(zip(ours, theirs, exact)):
        assert triple[0].stride() == triple[1].stride()
        assert_near(*triple, steps, f"parameter {index}")
        buffers = [opt.state[p].get("momentum_buffer") for opt, p in zip(optimizers, triple)]
        assert (buffers[0] is None) == (buffers[1] is None)
        if buffers[0] is not None:
            assert_near(*buffers, steps, f"momentum buffer {index}")


def assert_near(ours, theirs, exact, steps, what):
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    if ours.numel():
        # what is added up is of order 1, and its roundings do not shrink where a sum happens to cancel
        ulp = torch.finfo(ours.dtype).eps * max(exact.abs().max().item(), 1.0)
        error, reference = ((t.detach().double() - exact.detach()).abs().max().item() for t in (ours, theirs))
        assert error <= 2 * reference + steps * ulp, (
            f"{what}: error {error:.3g}, PyTorch's {reference:.3g}, ulp {ulp:.3g}"
        )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(k for k, v in o.items() if v) or "plain")
def test_options(device, options):
    for dtype in DTYPES:
        lists = twins(lambda dtype=dtype: parameters(device, dtype))
        optimizers = optimizers_of(lists, lr=0.1, **options)
        train(lists, optimizers)
        assert_alike(*lists, optimizers)


def test_signature_is_torch_s():
    ours, theirs = (inspect.signature(cls.__init__) for cls in (SGD, torch.optim.SGD))
    assert ours == theirs


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"nesterov": True}])
def test_bad_options(bad):
    with pytest.raises(ValueError):  # noqa: PT011 - the words are PyTorch's own
        SGD([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **bad})


# --- layouts, sizes, groups ---


def channels_last(p):
    return p.detach().to(memory_format=torch.channels_last)


def misaligned(p):
    return torch.cat([p.detach().flatten()[:1], p.detach().flatten()])[1:].view(p.shape)


LAYOUTS = {
    "channels_last": channels_last,
    "transposed": lambda p: p.detach().transpose(1, 2).contiguous().transpose(1, 2),
    "misaligned": misaligned,
    "every other": lambda p: p.detach().repeat_interleave(2, dim=-1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", ["as the parameter", "contiguous", "misaligned", "every other"])
def test_layouts(device, layout, grad_layout):
    def make():
        return [
            nn.Parameter(LAYOUTS[layout](p)) for p in parameters(device, torch.float32, [(3, 4, 5, 6), (2, 9, 13, 5)])
        ]

    def change(grad, index):
        if grad_layout == "contiguous":
            return grad.contiguous()
        return LAYOUTS.get(grad_layout, lambda g: g)(grad)

    lists = twins(make)
    optimizers = optimizers_of(lists, lr=0.1, momentum=0.9, nesterov=True)
    train(lists, optimizers, change=change)
    assert_alike(*lists, optimizers)


def test_more_tensors_than_a_launch_names(device):
    shapes = [(1 + index % 5,) for index in range(2 * module.TENSORS + 7)]
    lists = twins(lambda: parameters(device, torch.float32, shapes))
    optimizers = optimizers_of(lists, lr=0.1, momentum=0.9)
    train(lists, optimizers, steps=3)
    assert_alike(*lists, optimizers)


def test_gradients_come_and_go(device):
    """None is skipped; a parameter's first gradient, whenever it comes, makes its momentum buffer undamped."""
    lists = twins(lambda: parameters(device, torch.float32))
    optimizers = optimizers_of(lists, lr=0.1, momentum=0.9, dampening=0.5)
    for step, absent in enumerate([{0, 2}, {1}, {2, 3}, set()]):
        set_grads(lists, step, change=lambda grad, index, absent=absent: None if index in absent else grad)
        for optimizer in optimizers:
            optimizer.step()
        assert_alike(*lists, optimizers)


def test_groups_and_dtypes(device):
    def make():
        return [
            *parameters(device, torch.float32),
            *parameters(device, torch.bfloat16),
            *parameters(device, torch.float64),
        ]

    def groups(params):
        return [{"params": params[::2], "lr": 0.3, "momentum": 0.5}, {"params": params[1::2], "weight_decay": 0.2}]

    lists = twins(make)
    optimizers = optimizers_of(map(groups, lists), lr=0.1)
    train(lists, optimizers)
    assert_alike(*lists, optimizers)


# --- the learning rate ---


def test_scheduler(device):
    lists = twins(lambda: parameters(device, torch.float32))
    optimizers = optimizers_of(lists, lr=0.1, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    for step in range(3):
        set_grads(lists, step)
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
    assert_alike(*lists, optimizers)


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_learning_rate(device, where, shape):
    for dtype in (torch.float32, torch.float64):
        lists = twins(lambda dtype=dtype: parameters(device, dtype))
        rate = torch.full(shape, 0.1, device=device if where == "device" else "cpu")  # all three share it
        optimizers = optimizers_of(lists, lr=rate, momentum=0.9)
        for step in range(3):
            set_grads(lists, step)
            for optimizer in optimizers:
                optimizer.step()
            rate.mul_(0.5)
        assert_alike(*lists, optimizers)


# --- what surrounds a step ---


def test_state_dict_goes_both_ways(device):
    lists = twins(lambda: parameters(device, torch.float32))
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}
    optimizers = optimizers_of(lists, **options)
    train(lists, optimizers)
    swapped = [torch.optim.SGD(lists[0], **options), SGD(lists[1], **options), optimizers[2]]
    swapped[0].load_state_dict(optimizers[0].state_dict())
    swapped[1].load_state_dict(optimizers[1].state_dict())
    train(lists, swapped)
    for a, b in zip(lists[0], lists[1]):
        torch.testing.assert_close(a, b)
    assert swapped[0].state_dict()["param_groups"] == swapped[1].state_dict()["param_groups"]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_are_independent(device, duplicate):
    params = parameters(device, torch.float32)
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    train([params], [optimizer])
    other = duplicate(optimizer)
    before = [p.detach().clone() for p in params]
    others = other.param_groups[0]["params"]
    train([others], [other])
    assert all(torch.equal(p, old) for p, old in zip(params, before))
    train([params], [optimizer])
    torch.testing.assert_close(list(params), list(others))


def test_closure_and_hooks(device):
    params = parameters(device, torch.float32)
    optimizer = SGD(params, lr=0.1)
    torch.optim.SGD(params, lr=0.1)  # whose class PyTorch patches too
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        calls.append("closure")
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert calls == ["pre", "closure", "post"] * 2
    assert second < first


def test_autograd_notices_the_change(device):
    p = nn.Parameter(torch.randn(4, device=device))
    optimizer = SGD([p], lr=0.1, momentum=0.9)
    loss = p.square().sum()
    p.grad = torch.ones_like(p)
    before = p._version
    optimizer.step()
    assert p._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_grad_scaler(device):
    """fused=True: the scaler leaves unscaling, and skipping where a gradient is infinite, to the step."""
    make = lambda: parameters(device, torch.float32, [(5,), (4100,)])
    ours, theirs = make(), make()
    optimizers = [SGD(ours, lr=0.1, momentum=0.9, fused=True), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)]
    scalers = [torch.amp.GradScaler(device.type, init_scale=1024.0) for _ in optimizers]
    for step, infinite in enumerate([False, True, False, False]):
        set_grads([ours, theirs], step)
        for params, optimizer, scaler in zip((ours, theirs), optimizers, scalers):
            scaler.scale(torch.ones((), device=device))
            for p in params:
                p.grad.mul_(scaler.get_scale())
            if infinite:
                params[1].grad[77] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs])


def test_grad_scaler_skips_the_first_step(device):
    make = lambda: parameters(device, torch.float32, [(5,), (4100,)])
    ours, theirs = make(), make()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    optimizers = [SGD(ours, fused=True, **options), torch.optim.SGD(theirs, **options)]
    scalers = [torch.amp.GradScaler(device.type, init_scale=1024.0) for _ in optimizers]
    if device.type == "cpu" and "cpu" not in cupyops.kernel.executors:
        pytest.skip("PyTorch's fused step on a CPU keeps an unwritten buffer after a skipped first step")
    for step in range(3):
        set_grads([ours, theirs], step)
        for params, optimizer, scaler in zip((ours, theirs), optimizers, scalers):
            scaler.scale(torch.ones((), device=device))
            for p in params:
                p.grad.mul_(scaler.get_scale())
            if step == 0:
                params[0].grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(ours, theirs)


# --- what PyTorch does itself ---


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}])
def test_what_was_asked_for_is_pytorch_s(device, options):
    lists = twins(lambda: parameters(device, torch.float32))
    optimizers = optimizers_of(lists, lr=0.1, momentum=0.9, **options)
    for step in range(2):
        set_grads(lists, step)
        with torch.no_grad() if options.get("differentiable") else torch.enable_grad():
            for params in lists if options.get("differentiable") else ():
                for p in params:
                    p.requires_grad_(False)
        with cupyops.trace() as trace:
            optimizers[0].step()
        assert trace.routes() == {"reference"}
        for optimizer in optimizers[1:]:
            optimizer.step()
    for a, b in zip(lists[0], lists[1]):
        assert torch.equal(a, b)


def test_sparse_gradient(device):
    tables = [nn.Embedding(7, 3, sparse=True, device=device) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [cls(table.parameters(), lr=0.1, momentum=0.5) for cls, table in zip((SGD, torch.optim.SGD), tables)]
    for _ in range(3):
        for table, optimizer in zip(tables, optimizers):
            optimizer.zero_grad()
            table(torch.tensor([1, 1, 5], device=device)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight)


def test_complex_beside_real(device):
    lists = [[*parameters(device, torch.float32), *parameters(device, torch.complex64, [(3, 2)])] for _ in range(2)]
    optimizers = optimizers_of(lists, lr=0.1, momentum=0.9)
    train(lists, optimizers)
    torch.testing.assert_close(lists[0], lists[1])


def test_negative_bit(device):
    p, q = (nn.Parameter(torch.ones(5, device=device)) for _ in range(2))
    z = torch.randn(5, dtype=torch.complex64, device=device)
    for param, cls in ((p, SGD), (q, torch.optim.SGD)):
        param.grad = z.conj().imag
        assert param.grad.is_neg()
        cls([param], lr=0.1).step()
    assert torch.equal(p, q)


def test_compiled_step(device):
    lists = [parameters(device, torch.float32) for _ in range(2)]
    optimizers = optimizers_of(lists, lr=0.1, momentum=0.9)
    compiled = torch.compile(optimizers[0].step, backend="aot_eager")
    for step in range(2):
        set_grads(lists, step)
        compiled()
        optimizers[1].step()
    torch.testing.assert_close(lists[0], lists[1])


# --- the table of a launch ---


def test_table_is_the_struct_of_the_kernel():
    for name in module.sgd_step.instances():
        binary, _ = compiler.compile(module.sgd_step.source, name, "sm_80")
        assert module.TABLE.itemsize in [parameter.size for parameter in binary.parameters], name
        end = 0
        for parameter in binary.parameters:
            end = -(-end // parameter.align) * parameter.align + parameter.size
        assert end <= 4096, f"{name}: {end} bytes of kernel parameters"


def test_launches():
    sizes = [0, 1, 10, 11, 25] * 30
    rows = [(1000 + index, 2000 + index, 3000 + index, size) for index, size in enumerate(sizes)]
    found = list(module.launches(rows, 10))
    assert [(start, count) for _, start, count, _ in found] == [(0, 110), (110, 40)]
    for table, start, count, blocks in found:
        part = rows[start : start + count]
        for column, name in enumerate(("params", "grads", "buffers", "sizes")):
            assert table[name][0, :count].tolist() == [row[column] for row in part]
        ends = table["chunk_ends"][0, :count]
        chunks = [-(-row[3] // 10) for row in part]
        assert np.diff(ends, prepend=0).tolist() == chunks and blocks == sum(chunks)
        owners = np.searchsorted(ends, np.arange(blocks), side="right")
        assert np.bincount(owners, minlength=count).tolist() == chunks


def test_laid_out_alike():
    x = torch.randn(2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    assert module.laid_out_alike((x, x)) and module.laid_out_alike((last, last))
    assert not module.laid_out_alike((x, last))
    assert not module.laid_out_alike((x[..., ::2], x[..., ::2])), "gaps between the elements"
    one = torch.ones(1, device="cpu").expand(2, 3)
    assert not module.laid_out_alike((one, one)), "elements that overlap"
    single = torch.ones(4, 1, 3, 3)
    assert module.laid_out_alike((single, single.to(memory_format=torch.channels_last)))


# --- the kernel ---


@pytest.mark.gpu
def test_one_launch_for_all():
    params = parameters("cuda", torch.float32, [(3, 5)] * 100)
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    for step in range(2):
        set_grads([params], step)
        with cupyops.trace() as trace:
            optimizer.step()
        assert [record.kernel for record in trace.records] == ["sgd_step<float, true>"], str(trace)


@pytest.mark.gpu
def test_every_instance_runs():
    seen = set()
    for dtype, momentum in itertools.product(DTYPES, (0, 0.9)):
        params = parameters("cuda", dtype)
        set_grads([params], 0)
        with cupyops.trace() as trace:
            SGD(params, lr=0.1, momentum=momentum).step()
        assert trace.routes() == {"kernel"}, str(trace)
        seen |= {record.kernel for record in trace.launches()}
    assert seen == set(module.sgd_step.instances())


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "misaligned"])
def test_dense_layouts_are_served(layout):
    params = [nn.Parameter(LAYOUTS[layout](p)) for p in parameters("cuda", torch.float32, [(3, 4, 5, 6)])]
    set_grads([params], 0)
    with cupyops.trace() as trace:
        SGD(params, lr=0.1).step()
    assert trace.routes() == {"kernel"}, str(trace)


@pytest.mark.gpu
def test_a_new_rate_rebuilds_no_table(monkeypatch):
    params = parameters("cuda", torch.float32)
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    set_grads([params], 0)
    optimizer.step()
    optimizer.step()
    monkeypatch.setattr(module, "launches", lambda *_: pytest.fail("the table was built anew"))
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [2**20 + 3, 2**24])
def test_large(numel):
    lists = [parameters("cuda", torch.float32, [(numel,), (7,)]) for _ in range(2)]
    optimizers = optimizers_of(lists, lr=0.1, momentum=0.9, weight_decay=0.01)
    train(lists, optimizers, steps=3)
    torch.testing.assert_close(lists[0], lists[1])


@pytest.mark.gpu
def test_more_than_2_31_elements():
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of free GPU memory")
    p = nn.Parameter(torch.zeros(2**31 + 4099, dtype=torch.float16, device="cuda"))
    p.grad = torch.ones_like(p)
    SGD([p], lr=0.5).step()
    assert torch.all(p == -0.5)


@pytest.mark.gpu
def test_cuda_graph_follows_the_learning_rate():
    lists = [parameters("cuda", torch.float32) for _ in range(2)]
    rate = torch.tensor(0.1, device="cuda")
    ours = SGD(lists[0], lr=rate, momentum=0.9)
    theirs = torch.optim.SGD(lists[1], lr=0.1, momentum=0.9)
    set_grads(lists, 0)
    ours.step()
    theirs.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for value in (0.1, 0.05, 0.2):
        rate.fill_(value)
        theirs.param_groups[0]["lr"] = value
        graph.replay()
        theirs.step()
        torch.testing.assert_close(lists[0], lists[1])


@pytest.mark.gpu
def test_side_stream():
    lists = [parameters("cuda", torch.float32) for _ in range(2)]
    set_grads(lists, 0)
    torch.optim.SGD(lists[1], lr=0.1).step()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        for p in lists[0]:
            p.grad.mul_(3)
        optimizer = SGD(lists[0], lr=0.1 / 3)
        optimizer.step()
    stream.synchronize()
    torch.testing.assert_close(lists[0], lists[1])


@pytest.mark.gpu
def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    lists = [[*parameters("cuda:0", torch.float32), *parameters("cuda:1", torch.float32)] for _ in range(2)]
    optimizers = optimizers_of(lists, lr=0.1, momentum=0.9)
    train(lists, optimizers)
    torch.testing.assert_close(lists[0], lists[1])
