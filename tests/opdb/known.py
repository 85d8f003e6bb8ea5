"""What is known of our operators and op_db, said without importing it: names, and what differs."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cupyops
from cupyops._kernel.kernel import FLOATING

PUBLIC = sorted(name for name, value in vars(cupyops.ops).items() if inspect.isfunction(value) and name[0] != "_")
OWN = "PyTorch has no function of this kind"
# functions that PyTorch has in some form, and its database not, or not as ours
UNLIKE = {
    "attention": "PyTorch has scaled_dot_product_attention, without windows and the log-sum-exp",
    "dropout": "PyTorch's draws another mask of the same seed",
    "fused_linear_cross_entropy": "PyTorch has it from 2.12 on, with other arguments",
    "grouped_mm": "PyTorch has torch.nn.functional.grouped_mm, which its database leaves out",
    "scaled_mm": "of torch._scaled_mm its database has samples whose result is of 8 bits, of which few bits are right",
}


def entry(name: str) -> str | None:
    """The name by which PyTorch's database has a function of the library; None where PyTorch has none of that name."""
    functional = hasattr(torch.nn.functional, name) and name not in ("softmax", "log_softmax")
    return f"nn.functional.{name}" if functional else name if hasattr(torch, name) else None


WITHOUT_ENTRY = {name: UNLIKE.get(name, OWN) for name in PUBLIC if name in UNLIKE or entry(name) is None}
FUNCTIONS = {str(entry(name)): name for name in PUBLIC if name not in WITHOUT_ENTRY}
# operators behind others, that no sample of a database comes to
BEHIND_OTHERS = {
    "batch_norm_act_inference", "cross_entropy_fp32", "linear_lowered", "packed_attention",
}  # fmt: skip

# of module_db: the operator that a module calls; of optim_db: the file of its kernel
MODULES = {
    "AvgPool2d": "avg_pool2d", "BatchNorm1d": "batch_norm", "BatchNorm2d": "batch_norm", "BatchNorm3d": "batch_norm",
    "Conv2d": "conv2d", "CrossEntropyLoss": "cross_entropy", "Embedding": "embedding", "GELU": "gelu",
    "GroupNorm": "group_norm", "KLDivLoss": "kl_div", "LayerNorm": "layer_norm", "Linear": "linear",
    "LogSoftmax": "log_softmax", "MaxPool2d": "max_pool2d", "MultiheadAttention": "scaled_dot_product_attention",
    "NLLLoss": "nll_loss", "RMSNorm": "rms_norm", "ReLU": "relu", "SiLU": "silu", "Softmax": "softmax",
}  # fmt: skip
MODULES_WITHOUT_ENTRY = {
    "AddRMSNorm": "PyTorch has no module of this kind",
    "Attention": "PyTorch has no module of this kind",
    "BatchNormAct2d": "PyTorch has no module of this kind",
    "BiasGELU": "PyTorch has no module of this kind",
    "Dropout": "the database has none",
    "FusedLinearCrossEntropyLoss": "the database has none",
    "GEGLU": "PyTorch has no module of this kind",
    "LinearCrossEntropy": "PyTorch has no module of this kind",
    "RoPE": "PyTorch has no module of this kind",
    "ScaleShift": "PyTorch has no module of this kind",
    "SwiGLU": "PyTorch has no module of this kind",
}
OPTIMIZERS = {"Adam": "adam", "AdamW": "adam", "SGD": "sgd"}
OPTIMIZERS_WITHOUT_ENTRY = {"Lion": "PyTorch has no optimizer of this kind"}

FUSED_SGD = "PyTorch's own `SGD(momentum=, fused=True)` on a CPU is wrong in half types, and ours is PyTorch's there"
TRAPS = "an index out of range stops a kernel, and on a GPU the process: see tests/ops/test_out_of_range.py"
NOT_FINITE = "PyTorch's own result is not finite"

WITHOUT_ANY_ENTRY = {  # as the rows of the table are named
    **WITHOUT_ENTRY,
    **{f"nn.{name}": why for name, why in MODULES_WITHOUT_ENTRY.items()},
    **{f"optim.{name}": why for name, why in OPTIMIZERS_WITHOUT_ENTRY.items()},
}

# (operator, dtype) that PyTorch takes and the function here refuses with an InputError
REFUSED = {
    ("rms_norm", torch.complex64): "refused: `rms_norm` of complex numbers, for which it has no kernel",
    (
        "softmax.with_dtype",
        torch.complex64,
    ): "refused: `softmax(dtype=real)` of a complex input drops the imaginary part",
    (
        "log_softmax.with_dtype",
        torch.complex64,
    ): "refused: `log_softmax(dtype=real)` of a complex input, as for `softmax`",
}

# operators with kernels for fewer dtypes than others have
KERNELS_FOR = {"scaled_dot_product_attention": (torch.float16, torch.bfloat16)}


def kernel_dtypes(info: Any) -> tuple[torch.dtype, ...]:
    """The dtypes that the kernels of an entry's operator serve."""
    return KERNELS_FOR.get(FUNCTIONS[info.name], FLOATING)


@dataclass(frozen=True)
class Difference:
    """Errors of ours where PyTorch has none: in which suite, where, how they read, and why."""

    suite: str
    backends: tuple[str, ...]
    error: str
    reason: str

    def explains(self, error: Exception) -> bool:
        """Whether this is the error."""
        return re.search(self.error, str(error)) is not None


DIFFERENCES: tuple[Difference, ...] = ()


def known_difference(suite: str, backend: str) -> Difference | None:
    """What is known to differ, of every operator."""
    return next((d for d in DIFFERENCES if d.suite == suite and backend in d.backends), None)


def named(value: Any) -> str:
    """A dtype or an entry of the database, for tests and tables."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "module_cls"):
        return f"nn.{value.module_cls.__name__}"
    if hasattr(value, "optim_cls"):
        return f"optim.{value.optim_cls.__name__}"
    return ".".join(filter(None, (FUNCTIONS[value.name], value.variant_test_name)))


def operator_of(value: Any) -> str:
    """The operator that an entry of a database is of, or the file of an optimizer's kernel."""
    first, _, rest = named(value).partition(".")
    return {"nn": MODULES, "optim": OPTIMIZERS}[first][rest] if first in ("nn", "optim") else first


OF_OPERATOR = pytest.mark.of_operator(lambda given: operator_of(given["info"]) if "info" in given else "")
