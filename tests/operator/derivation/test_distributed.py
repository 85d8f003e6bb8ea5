"""Operators on DTensors: the value and the gradients of one process, whatever the placement, on one process and on two."""

import itertools
import multiprocessing

import pytest
import torch
import toys
import twins

import cupyops


def values():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((4, 6), (6,), (4, 6))]


def work(rank, size, store, results):
    try:
        checks(rank, size, store)
        results.put((rank, ""))
    except BaseException as error:
        import traceback

        results.put((rank, "".join(traceback.format_exception(error))))


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

    with pytest.raises(InputError, match="plain tensors beside DTensors"):
        op(sharded, plain[1])
    in_place(mesh, plain[0].detach())
    for name, case in twins.CASES.items() if size == 2 else ():
        if name == "dropout":
            dropout(mesh, rank)
        else:
            like_its_twin(name, case, mesh)
    dist.destroy_process_group()


def like_its_twin(name, case, mesh):
    """Each operator of the library, on DTensors of which some are split: values, gradients, and what is changed in place."""
    import torch.distributed.tensor as dt

    plain, others = [t.requires_grad_() for t in case.tensors()], case.others()
    places = itertools.cycle([dt.Shard(0), dt.Replicate(), dt.Shard(-1)])
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
    half = expected.dtype is torch.float16  # in which PyTorch's fused function and our reference each round once
    near = dict(rtol=2e-3, atol=2e-3) if half else {}
    torch.testing.assert_close(y.full_tensor(), expected, **near)
    y.sin().sum().backward()
    for tensor, grad in zip(spread, torch.autograd.grad(expected.sin().sum(), plain)):
        torch.testing.assert_close(tensor.grad.full_tensor(), grad, **near, msg=lambda text: f"{name}: {text}")
    for one, other in zip(more, others):
        torch.testing.assert_close(one.full_tensor(), other)


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


@pytest.mark.parametrize("size", [1, 2])
def test_processes(tmp_path, size):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cupyops._kernel.compile.compiler", "torch.distributed.tensor", "twins"])
    results = context.Queue()
    workers = [context.Process(target=work, args=(rank, size, tmp_path / "store", results)) for rank in range(size)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=240) for _ in workers)
    for worker in workers:
        worker.join()
    assert all(not error for error in found.values()), "\n".join(found.values())


def test_importing_brings_no_torch_distributed_tensor():
    import subprocess
    import sys

    code = "import sys, cupyops, torch; cupyops.relu(torch.ones(2)); print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
