import torch
from contract import Make, OperatorContract, Sample

import cupyops


class TestRelu(OperatorContract):
    function = staticmethod(cupyops.relu)
    torch_function = staticmethod(torch.nn.functional.relu)
    kernels = {"relu_fwd", "relu_bwd"}

    def samples(self, make: Make):
        for shape in [(3, 7), (2, 3, 4, 5), (5,), (1031,), (1,), ()]:
            yield Sample(make(*shape))


def test_special_values(device):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42], device=device, requires_grad=True)
    y = cupyops.relu(x)
    torch.testing.assert_close(y, torch.relu(x), rtol=0, atol=0, equal_nan=True)
    (ours,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad(torch.relu(x).sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
