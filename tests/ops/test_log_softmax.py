import torch
from softmaxes import KERNELS, SoftmaxContract

import cupyops


class TestLogSoftmax(SoftmaxContract):
    function = staticmethod(cupyops.log_softmax)
    torch_function = staticmethod(torch.nn.functional.log_softmax)
    kernels = KERNELS
