import torch
from softmaxes import KERNELS, SoftmaxContract

import cupyops


class TestSoftmax(SoftmaxContract):
    function = staticmethod(cupyops.softmax)
    torch_function = staticmethod(torch.nn.functional.softmax)
    kernels = KERNELS
