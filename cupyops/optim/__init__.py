"""Optimizers: torch.optim's, and Lion, with kernels of their own for the step."""

from .._util.near import refuser as _refuser
from .adam import Adam, AdamW
from .lion import Lion
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion"]

__getattr__ = _refuser(__name__, __all__)
