"""Built-in instances that wait for a first call: `python -m cupyops compile` leaves them out, and says so."""

from __future__ import annotations

import re

from .._kernel.compile.source import Source, cuda_src
from .attention import attention_bwd_mma, attention_fwd_mma
from .gemm import gemm_fwd

FP64 = "for float64"
_ATTENTION = "of attention by MMA, which beside WGMMA serves little but expanded tensors"
_PRODUCTS = "of products of half types by MMA, for which cuBLAS is called unless kernels alone are asked for"


def why(source: Source, name: str, arch: str) -> str | None:
    """Why few programs launch an instance, such as `"relu_fwd<double>"` of that source, on an architecture; else None."""
    if source.path is None or source.path.parent != cuda_src():
        return None
    if re.search(r"\bdouble\b", name):
        return FP64
    kernel = source.name, name.partition("<")[0]
    if arch == "sm_90" and kernel in [(one.source.name, one.base) for one in (attention_fwd_mma, attention_bwd_mma)]:
        return _ATTENTION
    if kernel == (gemm_fwd.source.name, gemm_fwd.base) and not re.search(r"\bfloat\b", name):
        return _PRODUCTS
    return None
