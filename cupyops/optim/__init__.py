"""Optimizers: torch.optim's, and Lion, with kernels of their own for the step."""

from .._util.near import refuser as _refuser
from .adam import Adam, AdamW
from .lion import Lion
from .muon import Muon
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon"]

__getattr__ = _refuser(__name__, __all__)
