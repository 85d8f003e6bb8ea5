"""Operators on DTensors: the value and the gradients of one process, whatever the placement, on one process and on two."""

import itertools
import warnings

import pytest
import torch
import toys
import twins
from processes import run_python, together

import cupyops


def values():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((4, 6), (6,), (4, 6))]


def checks(rank, size, store):
    """What every process asserts for itself."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    from cupyops.errors import InputError

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    op, calls = toys.product()
    placements = [
        (Shard(0), Replicate(), Shard(1)),
        (Replicate(), Shard(0), Shard(0)),
        (Shard(1), Replicate(), Replicate()),
    ]
    plain = [value.requires_grad_() for value in values()]
    expected = plain[0] * plain[1] + 0.5 * plain[2]
    grads = torch.autograd.grad(expected.sin().sum(), plain)
    for executing in (False, True):
        with toys.executor("cpu" if executing else "nowhere"):
            for chosen in placements:
                del calls[:]
                spread = [distribute_tensor(v.detach(), mesh, [p]).requires_grad_() for v, p in zip(plain, chosen)]
                y = op(*spread, 0.5)
                assert isinstance(y, DTensor) and list(y.placements) == [Replicate()]
                torch.testing.assert_close(y.full_tensor(), expected)
                assert calls[0] == ("forward" if executing else "reference")
                y.sin().sum().backward()
                for tensor, grad in zip(spread, grads):
                    assert isinstance(tensor.grad, DTensor)
                    torch.testing.assert_close(tensor.grad.full_tensor(), grad)
                assert calls[-1] == ("backward" if executing else "reference")

    sharded = distribute_tensor(plain[0].detach(), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.full((6,), 1.0 / size, dtype=torch.float64), mesh, [Partial()])
    torch.testing.assert_close(op(sharded, partial).full_tensor(), plain[0].detach())

    several, _ = toys.extremum()
    largest, index, smallest = several(sharded)
    assert torch.equal(index.full_tensor(), plain[0].argmax(-1)) and isinstance(smallest, DTensor)
    torch.testing.assert_close(largest.full_tensor(), plain[0].detach().max(-1).values)

    leaf = distribute_tensor(plain[0].detach(), mesh, [Shard(0)]).requires_grad_()
    exponential, _ = toys.exponential()
    (grad,) = torch.autograd.grad(exponential(leaf).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), leaf)
    torch.testing.assert_close(second.full_tensor(), plain[0].detach().exp())

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    weight = distribute_tensor(plain[1].detach(), mesh, [Replicate()]).requires_grad_()
    y = compiled(sharded, weight)
    torch.testing.assert_close(y.full_tensor(), (plain[0] * plain[1]).detach())
    y.sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), plain[0].detach().sum(0))

    network = lambda x, weight: cupyops.layer_norm(cupyops.linear(x, weight), (4,)).sin()
    matrix = distribute_tensor(torch.arange(24.0, dtype=torch.float64).view(4, 6), mesh, [Replicate()]).requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected")
        split = torch.compile(network, fullgraph=True, backend="aot_eager")(sharded, matrix)
    assert list(split.placements) == [Shard(0)]
    (compiled_grad,) = torch.autograd.grad(split.sum(), matrix)
    (eager_grad,) = torch.autograd.grad(network(sharded, matrix).sum(), matrix)
    torch.testing.assert_close(compiled_grad.full_tensor(), eager_grad.full_tensor())

    with pytest.raises(InputError, match="plain tensors beside DTensors"):
        op(sharded, plain[1])
    in_place(mesh, plain[0].detach())
    for name, case in twins.CASES.items() if size == 2 else ():
        if name == "dropout":
            dropout(mesh, rank)
            continue
        for first in range(3):
            like_its_twin(name, case, mesh, first)
    if size == 2:
        torch.manual_seed(0)  # one for all processes
        parts(mesh)
        heads_of_a_mesh_of_two_dimensions(size)
        tensor_parallel(mesh)
    dist.destroy_process_group()


def like_its_twin(name, case, mesh, first):
    """Each operator of the library, on DTensors of which some are split: values, gradients, and what is changed in place."""
    import torch.distributed.tensor as dt

    plain, others = [exact(t).requires_grad_() for t in case.tensors()], [exact(t) for t in case.others()]
    places = itertools.islice(itertools.cycle([dt.Shard(0), dt.Replicate(), dt.Shard(-1)]), first, None)
    spread, more = (
        [dt.distribute_tensor(t.detach().clone(), mesh, [place]) for t, place in zip(ts, places)]
        for ts in (plain, others)
    )
    for t in spread:
        t.requires_grad_()
    with cupyops.trace() as trace:
        y = case.ours(*spread, *more)
    seen = {record.operator for record in trace.records}
    assert f"cupyops::{name.rstrip('_')}" in seen, seen  # relu writes what relu gives into a DTensor
    expected = case.theirs(*plain, *others)
    assert isinstance(y, dt.DTensor), name
    # in a half type PyTorch's fused function, our reference and each process's part of a sum round once
    rounding = 2 * torch.finfo(expected.dtype).eps if expected.dtype in (torch.float16, torch.bfloat16) else None

    def near(wanted):
        return (
            {} if rounding is None else dict(rtol=rounding, atol=rounding * max(1, float(wanted.detach().abs().max())))
        )

    torch.testing.assert_close(y.full_tensor(), expected, **near(expected))
    weights = expected.detach().cos()
    (y * dt.distribute_tensor(weights, mesh, [dt.Replicate()])).sum().backward()
    for tensor, grad in zip(spread, torch.autograd.grad((expected * weights).sum(), plain)):
        torch.testing.assert_close(tensor.grad.full_tensor(), grad, **near(grad), msg=lambda text: f"{name}: {text}")
    for one, other in zip(more, others):
        torch.testing.assert_close(one.full_tensor(), other)


def exact(tensor):
    """In float64, where parts of a sum are added in another order and it must not show; a half type is meant to be one."""
    return tensor.double() if tensor.dtype is torch.float32 else tensor


def attention_with_sinks(q, k, v, sinks):
    """Each row has one more score, which no value goes with."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    more = sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, more], -1).softmax(-1)[..., :-1] @ v


def parts(mesh):
    """Calls whose tensors lie as they should be: each device does its part, and nothing is sent."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    F, rows, everywhere, part = torch.nn.functional, Shard(0), Replicate(), Partial()
    x, weight, bias, scale = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 4), (8, 4), (8,), (4,)))
    heads = [torch.randn(1, count, 5, 8, dtype=torch.float64) for count in (4, 2, 2)]
    classes, picture = torch.arange(6) % 4, torch.randn(2, 4, 6, 6, dtype=torch.float64)
    kernels = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    norm, gqa = lambda f: lambda x, w: f(x, (4,), w), dict(enable_gqa=True)
    scaled = cupyops.linear_epilogue("spread(T z, T r, T s, T c) -> T y", "y = tanh(z) * s + r * c")
    scaled_by_torch = lambda x, w, b, r, s, c: torch.tanh(F.linear(x, w, b)) * s + r * c
    more = [(torch.randn(shape, dtype=torch.float64), place) for shape, place in (((6, 8), rows), ((8,), everywhere))]
    column, turned = torch.randn(6, 1, dtype=torch.float64), [(more[0][0], Shard(1)), (more[1][0], rows)]
    layer = [(x, rows), (weight, everywhere), (bias, everywhere)]
    cases = [
        (scaled, scaled_by_torch, [*layer, *more, (column, rows)], rows),
        (
            scaled,
            scaled_by_torch,
            [(x, everywhere), (weight, rows), (bias, rows), *turned, (column, everywhere)],
            Shard(1),
        ),
        (scaled, scaled_by_torch, [*layer, *more, (column[0, 0], everywhere)], rows),
        (cupyops.relu, F.relu, [(x, rows)], rows),
        (cupyops.relu, F.relu, [(x[:5], rows)], rows),  # three rows and two
        (cupyops.add, torch.add, [(x, Shard(1)), (scale, rows)], Shard(1)),
        (cupyops.softmax, F.softmax, [(x, rows), -1], rows),
        (norm(cupyops.rms_norm), norm(F.rms_norm), [(x, rows), (scale, everywhere)], rows),
        (norm(cupyops.layer_norm), norm(F.layer_norm), [(x, rows), (scale, everywhere)], rows),
        (cupyops.linear, F.linear, [(x, everywhere), (weight, rows), (bias, rows)], Shard(1)),
        (cupyops.linear, F.linear, [(x, Shard(1)), (weight, Shard(1)), (bias, everywhere)], part),
        (cupyops.linear, F.linear, [(x, rows), (weight, everywhere), (bias, everywhere)], rows),
        (cupyops.matmul, torch.matmul, [(x, Shard(1)), (weight.T.contiguous(), rows)], part),
        (cupyops.sum, torch.sum, [(x, rows), 0], part),
        (cupyops.sum, torch.sum, [(x, rows), 1], rows),
        (cupyops.mean, torch.mean, [(x, rows), 1], rows),
        (cupyops.conv2d, F.conv2d, [(picture, everywhere), (kernels, rows), (bias[:6], rows)], Shard(1)),
        (cupyops.conv2d, F.conv2d, [(picture, Shard(1)), (kernels, Shard(1)), (bias[:6], everywhere)], part),
        (
            lambda *a: cupyops.cross_entropy(*a, reduction="sum"),
            lambda *a: F.cross_entropy(*a, reduction="sum"),
            [(x, rows), (classes, rows)],
            part,
        ),
        (
            lambda *a: cupyops.scaled_dot_product_attention(*a, **gqa),
            lambda *a: F.scaled_dot_product_attention(*a, **gqa),
            [(one, Shard(1)) for one in heads],
            Shard(1),
        ),
        (
            lambda *a: cupyops.attention(*a[:3], sinks=a[3]),
            attention_with_sinks,
            [*((one, Shard(1)) for one in heads), (column[:4, 0], rows)],
            Shard(1),
        ),
        (
            lambda *a: cupyops.attention(*a[:3], sinks=a[3]),
            attention_with_sinks,
            [*((torch.cat([one, one + 1]), rows) for one in heads), (column[:4, 0], everywhere)],
            rows,
        ),
    ]
    for reduction in ("mean", "sum", "none"):
        for weighed in (False, True):
            losses(mesh, x, weight, classes, reduction, weighed)
    for ours, theirs, given, expected in cases:
        compare(mesh, ours, theirs, given, [expected])


def losses(mesh, x, weight, classes, reduction, weighed):
    """Rows over the devices, some of which are ignored: not as many on each."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    F, target = torch.nn.functional, classes.masked_fill(classes == 1, -100)
    of_classes = torch.linspace(1, 2, 8, dtype=torch.float64) if weighed else None
    spread = [distribute_tensor(one, mesh, [Shard(0)]) for one in (x, target)]
    w, everywhere = (distribute_tensor(one, mesh, [Replicate()]) for one in (weight, torch.linspace(1, 2, 8).double()))
    many = everywhere if weighed else None
    few, of_few = (
        (None, None) if many is None else (distribute_tensor(of_classes[:4], mesh, [Replicate()]), of_classes[:4])
    )
    calls = [
        (
            lambda a, *_: cupyops.cross_entropy(a, spread[1], few, reduction=reduction, label_smoothing=0.1),
            lambda a, *_: F.cross_entropy(a, target, of_few, reduction=reduction, label_smoothing=0.1),
        ),
        (
            lambda a, *_: cupyops.nll_loss(a, spread[1], few, reduction=reduction),
            lambda a, *_: F.nll_loss(a, target, of_few, reduction=reduction),
        ),
        (
            lambda a, b: cupyops.fused_linear_cross_entropy(a, b, spread[1], None, many, reduction=reduction),
            lambda a, b: F.cross_entropy(F.linear(a, b), target, of_classes, reduction=reduction),
        ),
    ]
    for ours, theirs in calls:
        plain, parts = [t.detach().clone().requires_grad_() for t in (x, weight)], [spread[0].detach(), w.detach()]
        for one in parts:
            one.requires_grad_()
        with CommDebugMode() as counts:
            y = ours(*parts)
        small = 2 * (reduction == "mean")  # two numbers are added up
        assert counts.get_total_counts() <= small, counts.get_comm_counts()
        known = theirs(*plain)
        torch.testing.assert_close(y.full_tensor(), known, rtol=1e-6, atol=1e-6)
        y.sum().backward()
        known.sum().backward()
        for one, tensor in zip(parts, plain):
            if tensor.grad is not None:
                torch.testing.assert_close(one.grad.full_tensor(), tensor.grad)


def compare(mesh, ours, theirs, given, expected):
    """Value, gradients and placement of a call, in which nothing is sent."""
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    plain, spread = [], []
    for one in given:
        if isinstance(one, tuple):
            tensor, places = one[0].detach().clone(), one[1] if isinstance(one[1], list) else [one[1]]
            plain.append(tensor.requires_grad_(tensor.is_floating_point()))
            spread.append(distribute_tensor(tensor.detach(), mesh, places).requires_grad_(tensor.is_floating_point()))
        else:
            plain.append(one)
            spread.append(one)
    with CommDebugMode() as counts:
        y = ours(*spread)
        assert list(y.placements) == expected, (y.placements, expected)
        y.sum().backward()
    assert counts.get_total_counts() == 0, counts.get_comm_counts()
    known = theirs(*plain)
    torch.testing.assert_close(y.full_tensor(), known)
    known.sum().backward()
    for one, tensor in zip(spread, plain):
        if getattr(tensor, "requires_grad", False):
            torch.testing.assert_close(one.grad.full_tensor(), tensor.grad)


def heads_of_a_mesh_of_two_dimensions(size):
    """Batches over one dimension of a mesh, heads over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    heads = [torch.randn(2, count, 5, 8, dtype=torch.float64) for count in (4, 2, 2)]
    x, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    for shape in ((1, size), (size, 1)):
        mesh = init_device_mesh("cpu", shape)
        places = [Shard(0), Shard(1)]
        call = lambda function: lambda *a: function(*a, enable_gqa=True)
        ours, theirs = (
            call(cupyops.scaled_dot_product_attention),
            call(torch.nn.functional.scaled_dot_product_attention),
        )
        compare(mesh, ours, theirs, [(one, places) for one in heads], places)
        given = [(x, [Shard(0), Replicate()]), (weight, [Replicate(), Shard(0)])]
        compare(mesh, cupyops.linear, torch.nn.functional.linear, given, places)


def tensor_parallel(mesh):
    """A block under ColwiseParallel, RowwiseParallel and SequenceParallel, swapped: PyTorch's collectives, and no more."""
    import copy

    from torch import nn
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    block = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    plain = block(x)
    plain.sin().sum().backward()
    plans = {
        "tensors": {"1": ColwiseParallel(), "3": RowwiseParallel()},
        "sequences": {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        },
    }
    for name, plan in plans.items():
        found = []
        for swapped in (False, True):
            model = copy.deepcopy(block)
            model.zero_grad()
            if swapped:
                cupyops.swap(model)
            parallelize_module(model, mesh, dict(plan))
            with CommDebugMode() as counts, cupyops.trace() as trace:
                y = model(x if name == "tensors" else x.chunk(mesh.size(), 1)[mesh.get_local_rank()])
                y.sin().sum().backward()
            assert not swapped or {record.operator for record in trace.records} >= {"cupyops::linear", "cupyops::gelu"}
            whole = y.full_tensor() if hasattr(y, "full_tensor") else y
            torch.testing.assert_close(whole, plain)
            for parameter, expected in zip(model.parameters(), block.parameters()):
                grad = parameter.grad
                torch.testing.assert_close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, expected.grad)
            found.append(dict(counts.get_comm_counts()))
        assert found[0] == found[1], (name, found)


def dropout(mesh, rank):
    """One mask on all processes, though the generator of each is another; and it is the gradient's."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(rank)
    for inplace in (False, True):
        x = distribute_tensor(torch.ones(40, 5), mesh, [Shard(0)]).requires_grad_()
        y = cupyops.dropout(x * 1, 0.5, inplace=inplace)
        y.sum().backward()
        whole = y.full_tensor().detach()
        assert set(whole.unique().tolist()) == {0.0, 2.0}
        assert torch.equal(x.grad.full_tensor(), whole)
        of_all = [torch.empty_like(whole) for _ in range(mesh.size())]
        dist.all_gather(of_all, whole)
        assert all(torch.equal(one, whole) for one in of_all)
        assert not torch.equal(whole[:20], whole[20:])  # each device has a mask of its own


def in_place(mesh, value):
    """What an operator changes is changed where it lies, on each process its part."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    @cupyops.operator(toys.fresh(), mutates=("x",))
    def doubled_(x: torch.Tensor, by: float) -> torch.Tensor:
        return x.mul_(by)

    @cupyops.operator(toys.fresh(), updates=("mean",))
    def centred(x: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
        if mean is not None:
            mean.lerp_(x.mean(0), 0.5)
        return x - x.mean(0)

    @cupyops.operator(toys.fresh(), updates=("mean",), sharding="nc, c -> nc")
    def counted(x: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
        if mean is not None:
            mean.add_(x.sum(0))
        return 2 * x

    for place, of_sums in ((Shard(0), Replicate()), (Shard(1), Shard(0))):
        sums = distribute_tensor(torch.zeros_like(value[0]), mesh, [of_sums])
        y = counted(distribute_tensor(value.clone(), mesh, [place]), sums)
        torch.testing.assert_close(y.full_tensor(), 2 * value)
        torch.testing.assert_close(
            sums.to_local().sum() if of_sums == Replicate() else sums.full_tensor().sum(), value.sum()
        )
    for place in (Shard(0), Replicate()):
        x = distribute_tensor(value.clone(), mesh, [place])
        y = doubled_(x, 3.0)
        assert y is x and list(x.placements) == [place]
        torch.testing.assert_close(x.full_tensor(), 3 * value)
        leaf = distribute_tensor(value.clone(), mesh, [place]).requires_grad_()
        doubled_(leaf * 1, 3.0).sum().backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), torch.full_like(value, 3.0))
        mean = distribute_tensor(torch.zeros_like(value[0]), mesh, [place])
        y = centred(distribute_tensor(value.clone(), mesh, [Shard(1)]), mean)
        assert isinstance(y, DTensor)
        torch.testing.assert_close(y.full_tensor(), value - value.mean(0))
        torch.testing.assert_close(mean.full_tensor(), value.mean(0) / 2)
    table = distribute_tensor(9 * torch.ones_like(value), mesh, [Shard(1)])
    rows = distribute_tensor(torch.tensor([0, 2]), mesh, [Replicate()])
    cupyops.embedding(rows, table, max_norm=1.0)
    norms = torch.where(torch.tensor([True, False, True, False]), 1.0, 9 * 6**0.5).double()
    torch.testing.assert_close(table.full_tensor().norm(dim=1), norms, atol=1e-5, rtol=1e-5)
    silent = distribute_tensor(value.clone(), mesh, [Shard(0)])
    cupyops.silu(silent, inplace=True)
    torch.testing.assert_close(silent.full_tensor(), torch.nn.functional.silu(value))


def test_processes(tmp_path):
    compiling = [
        f"torch.{name}" for name in ("_dynamo.backends.common", "_inductor.pattern_matcher", "_dynamo.polyfills")
    ]
    together(checks, [1, 2], tmp_path, ["twins", *compiling])


def test_importing_brings_no_torch_distributed_tensor():
    code = "import sys, cupyops, torch; cupyops.relu(torch.ones(2)); print('torch.distributed.tensor' in sys.modules)"
    done = run_python("-c", code, bare=True)
    assert done.stdout.strip() == "False", done.stderr
