"""Muon: torch.optim's own, with the matrices of one shape orthogonalised together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._kernel.graph import capturing
from .._operator.derivation import distributed
from ..errors import LaunchError
from .fused import Entry, local_part
from .plan import Group

# Limit for the matrices of one product, which has three such buffers. Large ones fill a GPU alone.
MOST_ELEMENTS = 2**26


class Muon(torch.optim.Muon):
    """Muon (https://kellerjordan.github.io/posts/muon): momentum whose singular values are all brought near 1; as
    `torch.optim.Muon`: same constructor, same update within the rounding of bfloat16, same state_dict.

    The Newton-Schulz iteration is products of small matrices, one after another, of which one alone seldom fills a GPU.
    PyTorch's goes parameter by parameter; here those of one shape, or of its transpose, are one batched product, and what is
    done element by element is one call for all. Products are PyTorch's.

    A step may be captured in a CUDA graph, after one that made the momentum buffers. Parameters that are DTensors, as FSDP2
    has them, have their momentum gathered, since a part of a matrix has other singular values, and each device keeps its
    part of the update. Where PyTorch's Muon normalises the momentum buffer itself (in bfloat16, without `nesterov`), this
    one leaves it as it is.

    Args:
        params: parameters of two dimensions, or dicts of parameter groups. Embeddings, heads, biases and norms belong to
            another optimizer, as `cupyops.optim.AdamW`.
        lr: learning rate. A tensor on the parameters' GPU is read there at each step, from within a CUDA graph too.
        weight_decay: decoupled.
        momentum, nesterov: of the gradients' average.
        ns_coefficients, eps, ns_steps: of the iteration X = a X + (b X X^T + c (X X^T)^2) X.
        adjust_lr_fn: "original", the rate times sqrt(max(1, rows / columns)), which None is too, or "match_rms_adamw", times
            0.2 sqrt(max(rows, columns)), for learning rates of AdamW.

    Raises:
        ValueError: what `torch.optim.Muon` raises it for: a number out of its range, a parameter that is no matrix.
        LaunchError: from `step()`, where it is captured in a CUDA graph and has no momentum buffers yet.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = cupyops.optim.Muon([model.weight], lr=0.02)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        numbers = (weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
        super().__init__(params, lr, *numbers)  # type: ignore[arg-type]  # a tensor is documented

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The loss that `closure` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        captured = capturing()
        for group in self.param_groups:
            if captured and any(p.grad is not None and not self.state.get(p) for p in group["params"]):
                raise LaunchError(
                    "Muon: the first step makes the optimizer's state, which a CUDA graph would make anew at each replay; "
                    "run a step before the capture"
                )
            self._step(group)
        return loss

    def _step(self, group: Group) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        buffers: list[Tensor] = []
        self._init_group(group, params, grads, buffers)
        kinds: dict[Any, list[tuple[Tensor, Entry]]] = {}
        for param, grad, buffer in zip(params, grads, buffers):
            own = local_part(Entry(param, grad, (buffer,)))
            kinds.setdefault((own.param.device, own.param.dtype, own.grad.dtype), []).append((param, own))
        for (device, *_), entries in kinds.items():
            self._update(group, device, entries)

    def _update(self, group: Group, device: torch.device, entries: list[tuple[Tensor, Entry]]) -> None:
        """Parameters of one device and dtype, each with this device's part of it, its gradient and its momentum."""
        owners, params = [owner for owner, _ in entries], [own.param for _, own in entries]
        grads, buffers = [own.grad for _, own in entries], [own.state[0] for _, own in entries]
        momentum = group["momentum"]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        lr = group["lr"]
        rate = lr.reshape(()) if isinstance(lr, Tensor) and lr.device == device and lr.is_cuda else float(lr)
        _scale(params, 1 - rate * group["weight_decay"])
        whole = [_gathered(update, owner) for update, owner in zip(updates, owners)]
        for places, matrices in self._orthogonal(group, whole):
            ratio = adjusted(group["adjust_lr_fn"], owners[places[0]].shape)
            own = [_part(matrix, owners[place]) for place, matrix in zip(places, matrices.unbind())]
            if isinstance(rate, Tensor):
                torch._foreach_add_([params[place] for place in places], torch._foreach_mul(own, -rate * ratio))
            else:
                torch._foreach_add_([params[place] for place in places], own, alpha=-rate * ratio)

    def _orthogonal(self, group: Group, updates: list[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
        """Orthogonalise updates of one shape together; yield their places and results."""
        shapes: dict[Any, list[int]] = {}
        for place, update in enumerate(updates):
            shapes.setdefault(tuple(update.shape), []).append(place)
        for shape, places in shapes.items():
            most = max(1, MOST_ELEMENTS // max(1, math.prod(shape)))
            for start in range(0, len(places), most):
                chosen = places[start : start + most]
                matrices = torch.stack([updates[place].to(torch.bfloat16) for place in chosen])
                yield chosen, newton_schulz(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])


def newton_schulz(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Matrices (count, rows, columns) in bfloat16 with their singular values near 1; `x` is overwritten."""
    if not 0 <= steps < 100:
        raise ValueError(f"ns_steps is {steps}, expected less than 100 for computational efficiency")
    if len(coefficients) != 3:
        raise ValueError(f"ns_coefficients are {coefficients}, expected three")
    a, b, c = coefficients
    tall, single = x.shape[1] > x.shape[2], len(x) == 1  # a single one as PyTorch has it, to the bit
    norm = x[0].norm() if single else torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x.div_(norm.clamp_(min=eps))
    x = x.mT if tall else x
    for _ in range(steps):
        if single:
            matrix = x[0]
            gram = matrix @ matrix.T
            x = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a).unsqueeze(0)
        else:
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def adjusted(how: str | None, shape: torch.Size) -> float:
    """Factor of the learning rate."""
    rows, columns = shape
    if how == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if columns else 1.0


def _scale(params: list[Tensor], factor: float | Tensor) -> None:
    """Multiply parameters by a factor; on a CPU one by one, as all at once would round the factor to a half type."""
    if params[0].is_cuda:
        torch._foreach_mul_(params, factor)
    else:
        for param in params:
            param.mul_(factor)


def _gathered(part: Tensor, owner: Tensor) -> Tensor:
    """All of an update of which this device has a part."""
    found: Any = distributed.whole(part, owner)
    return found.full_tensor() if distributed.is_spread(found) else found


def _part(matrix: Tensor, owner: Any) -> Tensor:
    """Return this device's part of a matrix that all devices have."""
    if not distributed.is_spread(owner):
        return matrix
    mesh, lies = distributed.placements(owner)
    return distributed.local(distributed.replicated(matrix, mesh).redistribute(mesh, lies))  # type: ignore[attr-defined]
