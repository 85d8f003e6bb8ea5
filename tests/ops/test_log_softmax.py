import torch
from softmaxes import SoftmaxContract

import cupyops


class TestLogSoftmax(SoftmaxContract):
    function = staticmethod(cupyops.log_softmax)
    torch_function = staticmethod(torch.nn.functional.log_softmax)
    kernels = {
        "log_softmax_fwd",
        "log_softmax_fwd_small",
        "log_softmax_fwd_held",
        "log_softmax_fwd_wide",
        "log_softmax_fwd_columns",
        "log_softmax_bwd",
        "log_softmax_bwd_small",
        "log_softmax_bwd_held",
        "log_softmax_bwd_wide",
        "log_softmax_bwd_columns",
    }
