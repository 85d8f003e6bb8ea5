"""Functions of torch.nn.utils, by kernels."""

from ..optim.clip import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
