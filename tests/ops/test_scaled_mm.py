import torch
from byte_products import PAIRS
from contract import Make, OperatorContract, Sample

RESULTS = [torch.bfloat16, torch.float16, torch.float32]


class TestScaledMm(OperatorContract):
    function = staticmethod(of_numbers)
    torch_function = staticmethod(of_numbers_by_torch)
    kernels = set()  # apart from Hopper none
    has_backward = False
    differs = {
        (name, backend): reason
        for backend in ("reference", "simulator", "gpu")
        for name, reason in (
            ("opcheck", "PyTorch's own check multiplies tensors of 8-bit numbers, which PyTorch cannot"),
            ("autocast", "scales of half types are an error, as in PyTorch"),
        )
    }

    def samples(self, make: Make):
        """Of results in the dtype of `make`; nothing takes a gradient."""
        of = Make(make.device, torch.float32, requires_grad=False)
        out = make.dtype if make.dtype in RESULTS else torch.float32
        for m, k, n, (a, b) in ((5, 16, 7, PAIRS[0]), (40, 24, 33, PAIRS[1]), (1, 8, 16, PAIRS[2])):
            both, types = (of(m, k), of(n, k)), types_of(a, b, out)
            yield Sample(*both, of(low=0.5), of(low=0.5), of(n), types=types)
            yield Sample(*both, of(m, 1, low=0.5), of(1, n, low=0.5), types=types, use_fast_accum=True)
