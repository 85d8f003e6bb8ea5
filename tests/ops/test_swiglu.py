import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


def by_torch(gate, up=None):
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError("halves of an odd dimension")
        gate, up = gate.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class TestSwiglu(OperatorContract):
    function = staticmethod(cupyops.swiglu)
    torch_function = staticmethod(by_torch)
    kernels = {"gated_fwd_shared_memory", "gated_fwd_strided_rows", "gated_bwd_shared_memory", "gated_bwd_strided_rows"}

    def samples(self, make: Make):
        yield Sample(make(3, 7), make(3, 7))
        yield Sample(make(3, 14))  # packed, odd halves
        yield Sample(make(251, 34))  # several blocks
        yield Sample(make(3, 2 * 131))  # rows that are not small
        yield Sample(make(2, 3, 32))  # packed, vectors
        yield Sample(make(2059), make(2059))  # several blocks and a tail
        yield Sample(make(2, 4200))  # packed, several tiles
        yield Sample(make(), make())
        yield Sample(make(0, 4), make(0, 4))
        yield Sample(make(3, 0))

    def small_samples(self, make: Make):
        yield Sample(make(3, 7), make(3, 7))
        yield Sample(make(5, 10))  # packed

    def layouts(self, make: Make):
        yield from super().layouts(make)
        yield Sample(*make(2, 3, 32).chunk(2, -1))
        yield Sample(make(5, 3, 16)[:, 1], make(5, 16))
        yield Sample(make(5, 3, 16)[:, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_special_values(device, dtype):
    """As PyTorch's product, but for the products that a half type cannot hold on the way."""
    odd = torch.tensor([float("nan"), -float("inf"), float("inf"), -0.0, 0.0, -20.0, 20.0], device=device).to(dtype)
    gate, up = (t.flatten().clone().requires_grad_() for t in torch.meshgrid(odd, odd, indexing="ij"))
    y, expected = (f(gate, up) for f in (cupyops.swiglu, by_torch))
    eps = torch.finfo(dtype).eps
    tolerance = {"rtol": 4 * eps, "atol": eps**2, "equal_nan": True}
    torch.testing.assert_close(y, expected, **tolerance)
    ours, theirs = (torch.autograd.grad(value.sum(), (gate, up)) for value in (y, expected))
    torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.gpu
def test_halves_are_read_where_they_are():
    """One launch and no copy, of chunks as of the packed tensor; its gradient is one tensor."""
    x = torch.randn(64, 96, device="cuda", requires_grad=True)
    for arguments in (x.chunk(2, -1), (x,)):
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            y = cupyops.swiglu(*arguments)
        assert torch.cuda.memory_allocated() - before == y.nbytes
        del y
    (grad,) = torch.autograd.grad(cupyops.swiglu(x).sum(), x)
    assert grad.is_contiguous() and grad.shape == x.shape


X = torch.ones(2, 4)
BAD = [
    ((None,), "gate"), ((torch.arange(4),), "gate"), ((torch.ones(2, 3),), "gate .*even last dimension"),
    ((torch.ones(()),), "gate .*even last dimension"), ((X, 2.0), "up"), ((X, torch.ones(4)), "up .*shape of gate"),
    ((X, X.double()), "up is torch.float64"), ((X, X.to("meta")), "up is on meta"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "culprit"), BAD, ids=str)
def test_bad_input(args, culprit):
    with pytest.raises(cupyops.InputError, match=culprit):
        cupyops.swiglu(*args)
