"""Optimizers: torch.optim's, with kernels of their own for the step."""

from .sgd import SGD

__all__ = ["SGD"]
