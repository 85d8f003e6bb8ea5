import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


def by_torch(gate, up=None, approximate="none"):
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError("halves of an odd dimension")
        gate, up = gate.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


class TestGeglu(OperatorContract):
    function = staticmethod(cupyops.geglu)
    torch_function = staticmethod(by_torch)
    kernels = {"gated_fwd_shared_memory", "gated_fwd_strided_rows", "gated_bwd_shared_memory", "gated_bwd_strided_rows"}

    def samples(self, make: Make):
        for approximate in ("none", "tanh"):
            yield Sample(make(3, 7), make(3, 7), approximate)
            yield Sample(make(251, 34), approximate=approximate)  # packed, small rows
            yield Sample(make(3, 2 * 131), approximate=approximate)  # rows that are not
        yield Sample(make(2, 3, 32))
        yield Sample(make(2059), make(2059))
        yield Sample(make(0, 4), make(0, 4))

    def small_samples(self, make: Make):
        yield Sample(make(2, 3), make(2, 3))
        yield Sample(make(2, 8), approximate="tanh")  # packed

    def layouts(self, make: Make):
        yield from super().layouts(make)
        yield Sample(*make(2, 3, 32).chunk(2, -1))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_special_values(device, dtype, approximate):
    odd = torch.tensor([float("nan"), -float("inf"), -0.0, 0.0, -20.0, 20.0], device=device).to(dtype)
    gate, up = (t.flatten().clone().requires_grad_() for t in torch.meshgrid(odd, odd, indexing="ij"))
    y, expected = (f(gate, up, approximate) for f in (cupyops.geglu, by_torch))
    eps = torch.finfo(dtype).eps
    tolerance = {"rtol": 4 * eps, "atol": eps**2, "equal_nan": True}
    torch.testing.assert_close(y, expected, **tolerance)
    ours, theirs = (torch.autograd.grad(value.sum(), (gate, up)) for value in (y, expected))
    torch.testing.assert_close(ours, theirs, **tolerance)


def test_bad_input():
    x = torch.ones(2, 4)
    for arguments, culprit in [
        ((torch.arange(4),), "gate"),
        ((torch.ones(2, 3),), "gate .*even last dimension"),
        ((x, torch.ones(4)), "up .*shape of gate"),
        ((x, x, "erf"), "approximate"),
    ]:
        with pytest.raises(cupyops.InputError, match=culprit):
            cupyops.geglu(*arguments)
