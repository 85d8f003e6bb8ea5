import torch
from contract import Make, OperatorContract, Sample
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupyops

HALF = [torch.float16, torch.bfloat16]


def by_math(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """PyTorch's, by the backend that has every derivative; its fused ones of a CPU make zeros of NaN."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


class TestScaledDotProductAttention(OperatorContract):
    function = staticmethod(cupyops.scaled_dot_product_attention)
    torch_function = staticmethod(by_math)
    kernels = {"attention_bwd_prepare"}
    dtypes = HALF

    def samples(self, make: Make):
        yield Sample(make(2, 3, 20, 16), make(2, 3, 33, 16), make(2, 3, 33, 16))
        yield Sample(make(1, 4, 33, 64), make(1, 2, 33, 64), make(1, 2, 33, 64), is_causal=True, enable_gqa=True)
        yield Sample(make(1, 1, 33, 80), make(1, 1, 70, 80), make(1, 1, 70, 80), is_causal=True, scale=0.3)
        yield Sample(make(3, 5, 8), make(3, 7, 8), make(3, 7, 8))

    def small_samples(self, make: Make):
        yield Sample(make(1, 2, 3, 8), make(1, 2, 5, 8), make(1, 2, 5, 8))
        yield Sample(make(2, 2, 4, 8), make(2, 1, 3, 8), make(2, 1, 3, 8), is_causal=True, enable_gqa=True)
