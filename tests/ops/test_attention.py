import math

import pytest
import torch
from attentions import sees
from contract import Make, OperatorContract, Sample

from torch.nn.attention import SDPBackend, sdpa_kernel

import cupyops


def by_torch(query, key, value, *, causal=None, window=None, scale=None, return_lse=False):
    """PyTorch's with a mask of what each query sees, and its logsumexp over the scores."""
    if query.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), sdpa_kernel(SDPBackend.MATH):
        if query.shape[1] and not key.shape[1]:
            raise ValueError("no heads of keys")  # of which PyTorch makes zeros
        group = query.shape[1] // max(key.shape[1], 1)
        k, v = (x.repeat_interleave(group, 1) for x in (key, value))
        seen = sees(query.shape[2], key.shape[2], causal, window).to(query.device)
        y = torch.nn.functional.scaled_dot_product_attention(query, k, v, seen, scale=scale)
        y = y.contiguous()
        if not return_lse:
            return y
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query.to(wide) @ k.to(wide).mT) * (query.shape[3] ** -0.5 if scale is None else scale)
        some = seen.any(-1)
        lse = scores.masked_fill(~seen & some[:, None], -math.inf).logsumexp(-1)
        return y, torch.where(some | lse.isnan(), lse, -math.inf)


class TestAttention(OperatorContract):
    function = staticmethod(cupyops.attention)
    torch_function = staticmethod(by_torch)
    kernels = {"attention_fwd_mma", "attention_bwd_mma", "attention_bwd_prepare"}
    dtypes = [torch.float16, torch.bfloat16]

    def samples(self, make: Make):
        for d in (16, 128):
            yield Sample(make(1, 2, 33, d), make(1, 1, 70, d), make(1, 1, 70, d), return_lse=True)
            yield Sample(make(1, 1, 70, d), make(1, 1, 33, d), make(1, 1, 33, d), causal="bottom_right", return_lse=True)
            yield Sample(make(2, 1, 35, d), make(2, 1, 40, d), make(2, 1, 40, d), causal="top_left", window=(5, 0))
        yield Sample(make(1, 2, 20, 8), make(1, 2, 18, 8), make(1, 2, 18, 8), window=(3, 4), scale=0.5, return_lse=True)

    def small_samples(self, make: Make):
        yield Sample(make(1, 2, 3, 8), make(1, 1, 5, 8), make(1, 1, 5, 8), causal="bottom_right")
        yield Sample(make(2, 2, 4, 8), make(2, 2, 3, 8), make(2, 2, 3, 8), window=(1, 0), return_lse=True)
