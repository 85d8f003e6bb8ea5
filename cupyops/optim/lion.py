"""Lion: sign momentum, with one kernel launch for all parameters of a device and dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._dispatch.multi_tensor import BLOCK, DEFINE
from .._kernel.kernel import FLOATING, Kernel
from .._util import arguments
from ..errors import InputError
from .fused import Entry, Fused, learning_rate, written
from .plan import Batch, Group

lion_step = Kernel("lion.cu", "lion_step<T>", define=DEFINE, T=FLOATING)


class Lion(Fused):
    """Lion (arXiv:2302.06675), the optimizer that follows the sign of its momentum. PyTorch has none.

        c = beta1 * exp_avg + (1 - beta1) * grad
        param = param - lr * (sign(c) + weight_decay * param)
        exp_avg = beta2 * exp_avg + (1 - beta2) * grad

    What the kernel serves is as in `cupyops.optim.Adam`, 110 parameters in a launch; all else is updated in PyTorch.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate, three to ten times less than Adam's. A tensor on the parameters' GPU is read there at each step,
            from within a CUDA graph too.
        betas: of the sign, and of the momentum.
        weight_decay: decoupled; three to ten times more than AdamW's.
        maximize: go up instead of down.
        foreach, differentiable: update in PyTorch; `differentiable` lets autograd go through the step.
        capturable: taken as other optimizers take it; Lion counts no steps, and any step after the one that made the state
            may be captured in a CUDA graph.
        fused: True lets a `torch.amp.GradScaler` leave unscaling and skipping to the kernel, with no wait; False updates
            in PyTorch.

    Raises:
        InputError: a number out of its range.
        LaunchError: from `step()`, where it is captured in a CUDA graph and cannot be.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = cupyops.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            arguments.fail("lr", lr, "a number, or a tensor with one element")
        for name, value, fits in [
            ("lr", lr, lr >= 0),
            ("betas[0]", betas[0], 0 <= betas[0] < 1),
            ("betas[1]", betas[1], 0 <= betas[1] < 1),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ]:
            if not fits:
                arguments.fail(name, value, "at least 0, and less than 1" if name[0] == "b" else "at least 0")
        if fused and (foreach or differentiable):
            arguments.fail("fused", fused, "None or False beside foreach or differentiable")
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach,
            "capturable": capturable, "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = bool(fused)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._step_supports_amp_scaling = any(group["fused"] for group in self.param_groups)

    def _entries(self, group: Group) -> list[Entry]:
        params = [p for p in group["params"] if p.grad is not None]
        for param in params:
            if param.grad.is_sparse:
                arguments.fail("a gradient", param.grad, "a dense one; Lion has no sparse step")
            state = self._states[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            elif "exp_avg" not in state:
                found = ", ".join(map(str, state))
                raise InputError(f"Lion: the state of a parameter has {found}, expected exp_avg, which is its momentum")
        return [Entry(param, param.grad, (self._states[param]["exp_avg"],)) for param in params]

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def _by_kernel(self, group: Group, batch: Batch) -> None:
        device, dtype = batch.device, batch.dtype
        grad_scale, found_inf = self._scaler(device)
        written(batch.params, *batch.states, batch.grads if grad_scale is not None else [])
        beta1, beta2 = group["betas"]
        rate = learning_rate(group["lr"], device, dtype)
        for table, start, count, blocks in batch.launches(*batch.states):
            lion_step[blocks, BLOCK](
                batch.params[start], table, count, *rate, beta1, 1 - beta1, beta2,
                1 - beta2, group["weight_decay"], bool(group["maximize"]), grad_scale, found_inf, self._factor, T=dtype,
            )  # fmt: skip

    def _by_torch(self, group: Group, entries: list[Entry]) -> None:
        found_inf, grad_scale = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and found_inf.item():
            return
        for param, grad, (exp_avg,), _ in entries:
            if grad_scale is not None:
                grad.div_(grad_scale.to(grad.device))
            if param.is_complex():
                param, grad, exp_avg = map(torch.view_as_real, (param, grad, exp_avg))
            lion(param, grad, exp_avg, group)


def lion(param: Tensor, grad: Tensor, exp_avg: Tensor, group: Group) -> None:
    """The step in PyTorch."""
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    if isinstance(lr, Tensor):
        lr = lr.to(param.device, torch.promote_types(lr.dtype, param.dtype)).reshape(())
    grad = -grad if group["maximize"] else grad
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        param.mul_(1 - lr * weight_decay)
    param.sub_(exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_().mul_(lr))
    exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
