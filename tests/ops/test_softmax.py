import torch
from softmaxes import SoftmaxContract

import cupyops


class TestSoftmax(SoftmaxContract):
    function = staticmethod(cupyops.softmax)
    torch_function = staticmethod(torch.nn.functional.softmax)
    kernels = {
        "softmax_fwd",
        "softmax_fwd_small",
        "softmax_fwd_held",
        "softmax_fwd_wide",
        "softmax_fwd_columns",
        "softmax_bwd",
        "softmax_bwd_small",
        "softmax_bwd_held",
        "softmax_bwd_wide",
        "softmax_bwd_columns",
    }
