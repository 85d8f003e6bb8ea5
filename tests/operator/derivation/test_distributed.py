"""Operators on DTensors: the value and the gradients of one process, whatever the placement, on one process and on two."""

import multiprocessing

import pytest
import torch
import toys


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
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_processes(tmp_path, size):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cupyops._kernel.compile.compiler", "torch.distributed.tensor"])
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
