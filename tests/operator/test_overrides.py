"""Tensors that see functions of PyTorch, and calls of ours with what may be left out: PyTorch's function has it by name."""

import pytest
import torch
from torch.nn import functional as F

import cupyops


class Seeing(torch.Tensor):
    """A tensor whose class has a `__torch_function__` of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


IMAGES = 2, 4, 6, 6
CALLS = {
    "gelu": ((3,), {"approximate": "tanh"}, F.gelu),
    "softmax": ((3, 4), {"dim": 0, "dtype": torch.float64}, F.softmax),
    "log_softmax": ((3, 4), {"dim": 1, "dtype": torch.float64}, F.log_softmax),
    "silu": ((3,), {"inplace": False}, F.silu),
    "layer_norm": ((3, 4), {"normalized_shape": (4,), "eps": 0.5}, F.layer_norm),
    "rms_norm": ((3, 4), {"normalized_shape": (4,), "eps": 0.5}, F.rms_norm),
    "group_norm": (IMAGES, {"num_groups": 2, "eps": 0.5}, F.group_norm),
    "max_pool2d": (IMAGES, {"kernel_size": 2, "stride": 1, "padding": 1, "ceil_mode": True}, F.max_pool2d),
    "avg_pool2d": (IMAGES, {"kernel_size": 2, "padding": 1, "count_include_pad": False}, F.avg_pool2d),
    "sum": ((3, 4), {"dim": 1, "keepdim": True, "dtype": torch.float64}, torch.sum),
    "mean": ((3, 4), {"dim": 1, "keepdim": True, "dtype": torch.float64}, torch.mean),
    "amax": ((3, 4), {"dim": 1, "keepdim": True}, torch.amax),
}


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_what_may_be_left_out(name, by_name):
    shape, options, theirs = CALLS[name]
    x, ours = torch.randn(shape), getattr(cupyops, name)
    expected = theirs(x, **options)
    in_order = (
        not by_name
        and list(options) == list(ours.__annotations__)[1 : 1 + len(options)]
        and name not in ("sum", "mean")
    )
    found = ours(x.as_subclass(Seeing), *options.values()) if in_order else ours(x.as_subclass(Seeing), **options)
    assert type(found) is Seeing and found.dtype is expected.dtype
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=0)
