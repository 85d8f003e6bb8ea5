"""Built-in instances that wait for a first call: `python -m cupyops compile` leaves them out, and says so."""

from __future__ import annotations

import re

from ..._kernel.compile.source import Source, cuda_src

FP64 = "for float64"
_ATTENTION = "of attention by MMA, which beside WGMMA serves little but expanded tensors"
_PRODUCTS = (
    "of products and convolutions of half types, for which cuBLAS and cuDNN are called unless kernels are asked for"
)

BESIDE_WGMMA = ("attention_fwd_mma", "attention_bwd_mma", "attention_bwd_once_mma")
BEHIND_PYTORCH = ("gemm_fwd", "conv2d_fwd", "conv2d_bwd_weight")  # of half types, in every list of forms


def why(source: Source, name: str, arch: str) -> str | None:
    """Return why few programs launch an instance, such as `"relu_fwd<double>"`, on an architecture; else None."""
    if source.path is None or source.path.parent != cuda_src():
        return None
    if re.search(r"\bdouble\b", name):
        return FP64
    base = name.partition("<")[0]
    if base in BESIDE_WGMMA and arch == "sm_90":
        return _ATTENTION
    return _PRODUCTS if base in BEHIND_PYTORCH and not re.search(r"\bfloat\b", name) else None
