"""mean: the contract. What it shares with sum is in test_sum.py."""

import torch
from contract import Make, OperatorContract, Sample

import cupyops


class TestMean(OperatorContract):
    function = staticmethod(cupyops.mean)
    torch_function = staticmethod(torch.mean)
    kernels = {"sum_fwd_thread_per_row", "sum_fwd_registers", "sum_fwd_fold"}

    def samples(self, make: Make):
        yield Sample(make(3, 5), 1)
        yield Sample(make(4, 3, 2), (0, 2), keepdim=True)
        yield Sample(make(9))
        yield Sample(make(2, 304), 1)  # rows in registers
