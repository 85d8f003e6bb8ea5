"""Optimizers: torch.optim's, and Lion, with kernels of their own for the step."""

from .adam import Adam, AdamW
from .lion import Lion
from .muon import Muon
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon"]
