"""Adam and AdamW: torch.optim's own, with one kernel launch for all parameters of a device and dtype."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from .._dispatch.multi_tensor import BLOCK, DEFINE
from .._kernel.kernel import FLOATING, Kernel
from .._util import arguments
from ..errors import LaunchError
from .fused import Entry, Fused, learning_rate, written
from .plan import Batch, Group

adam_step = Kernel("adam.cu", "adam_step<T, AMSGRAD>", define=DEFINE, T=FLOATING, AMSGRAD=(False, True))

_ON_DEVICE = -1.0  # steps that the kernel reads itself


class _Adam(Fused):
    """The step of both."""

    def _entries(self, group: Group) -> list[Entry]:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        first: list[Tensor] = []
        second: list[Tensor] = []
        largest: list[Tensor] = []
        steps: list[Any] = []  # tensors, unless somebody has put something else into a state
        self._init_group(group, params, grads, first, second, largest, steps)  # type: ignore[attr-defined]
        states = zip(first, second, largest) if group["amsgrad"] else zip(first, second)
        entries = []
        for param, grad, of, step in zip(params, grads, states, steps):
            if not isinstance(step, Tensor):
                step = self._states[param]["step"] = step_count(step)
            entries.append(Entry(param, grad, of, step))
        return entries

    def _adopt(self, state: MutableMapping[Tensor, dict[str, Any]], groups: Sequence[Group]) -> None:
        """With steps as PyTorch has them now, of a parameter each: older ones, Apex's too, have one for the group."""
        for group in groups:
            for param in group["params"]:
                if (of := state.get(param)) and ("step" in of or "step" in group):
                    of["step"] = step_count(of.get("step", group.get("step")))

    def _variant(self, group: Group, param: Tensor, state: tuple[Any, ...], step: Tensor) -> float:
        """The steps taken, where the host counts them: all of a launch have the same."""
        on_device = step.is_cuda or group["capturable"] or group["fused"]
        if on_device and step.device != param.device:
            raise LaunchError(
                f"{type(self).__name__}: a parameter is on {param.device}, but its step, which is to be counted there, "
                f"on {step.device}; move it to {param.device}"
            )
        return _ON_DEVICE if on_device else step.item()

    def _by_kernel(self, group: Group, batch: Batch) -> None:
        device, dtype, taken = batch.device, batch.dtype, batch.variant
        grad_scale, found_inf = self._scaler(device)
        states = batch.states[:-1]
        counted = self._count(batch, found_inf)
        written(batch.params, *states, batch.grads if grad_scale is not None else [])
        beta1, beta2 = group["betas"]
        moments = (1 - beta1, _log(beta1), beta2, 1 - beta2, _log(beta2))
        flags = (bool(group["decoupled_weight_decay"]), bool(group["maximize"]))
        amsgrad = bool(group["amsgrad"])
        rate = learning_rate(group["lr"], device, dtype)
        for table, start, count, blocks in batch.launches(*states, counted):
            adam_step[blocks, BLOCK](
                batch.params[start], table, count, taken + 1, *rate, *moments,
                group["eps"], group["weight_decay"], *flags, grad_scale, found_inf, T=dtype, AMSGRAD=amsgrad,
            )  # fmt: skip

    def _options(self, group: Group) -> tuple[Any, ...]:
        return bool(group["amsgrad"]), group["capturable"], group["fused"]

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []), "step")

    def _lasts(self, batch: Batch) -> bool:
        return batch.bank is not None or batch.states[-1][0].dtype is torch.float32

    def _again(self, batch: Batch) -> bool:
        """With the steps that have been taken now, which are to be the same still."""
        if batch.bank is not None:
            steps = batch.bank.tolist()
            batch.variant = steps[0]
            return steps.count(steps[0]) == len(steps)
        return True

    def _count(self, batch: Batch, found_inf: Tensor | None) -> list[Tensor] | None:
        """Count the step; the counts that the kernel is to read, or None where the host has them."""
        if batch.variant != _ON_DEVICE:
            self._count_on_host(batch)
            return None
        steps = batch.states[-1]
        # a step that is skipped is not counted
        torch._foreach_add_(steps, 1 if found_inf is None else 1 - found_inf.view(()))
        return steps if steps[0].dtype is torch.float32 else [step.float() for step in steps]

    def _count_on_host(self, batch: Batch) -> None:
        """One addition for all steps, which become views of one tensor: hundreds would take longer than all else."""
        if batch.bank is None:
            batch.bank = torch.stack([step_count(step) for step in batch.states[-1]])
            for owner, view in zip(batch.owners, batch.bank.unbind()):
                self._states[owner]["step"] = view
        batch.bank.add_(1)

    def _by_torch(self, group: Group, entries: list[Entry]) -> None:
        columns = [[entry.state[index] for entry in entries] for index in range(2 + bool(group["amsgrad"]))]
        names = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "capturable", "differentiable", "fused")
        adam(
            [entry.param for entry in entries],
            [entry.grad for entry in entries],
            columns[0],
            columns[1],
            columns[2] if group["amsgrad"] else [],
            [entry.step for entry in entries],
            has_complex=any(entry.param.is_complex() for entry in entries),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            **self._scaler_for_torch(),
            **{name: group[name] for name in names},
        )


class Adam(_Adam, torch.optim.Adam):
    """Adam (arXiv:1412.6980); as `torch.optim.Adam`: same constructor, same update, same state_dict.

    Parameters on a GPU with dense gradients and state of their own floating dtype (fp16, bf16, fp32, fp64) are updated
    by one kernel per device, dtype and count of steps, as many as 76 of them in a launch. All else, and all where
    `foreach` or `fused=False` is asked for, is updated by PyTorch.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate. A tensor on the parameters' GPU is read there at each step, from within a CUDA graph too.
        betas, eps, weight_decay, amsgrad, maximize, foreach, differentiable, decoupled_weight_decay: as
            `torch.optim.Adam`.
        capturable: count the steps on the GPU, so that a step may be captured in a CUDA graph, after one that made the
            state.
        fused: True counts the steps on the GPU too, and lets a `torch.amp.GradScaler` leave unscaling and skipping to
            the kernel, with no wait.

    Raises:
        ValueError: what `torch.optim.Adam` raises it for: a number out of its range.
        LaunchError: from `step()`, where it is captured in a CUDA graph and cannot be.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = cupyops.optim.Adam(model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
    """


class AdamW(_Adam, torch.optim.AdamW):
    """AdamW (arXiv:1711.05101); as `torch.optim.AdamW`: same constructor, same update, same state_dict.

    What the kernel serves, and what is left to PyTorch, is as in `cupyops.optim.Adam`.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate. A tensor on the parameters' GPU is read there at each step, from within a CUDA graph too.
        betas, eps, weight_decay, amsgrad, maximize, foreach, differentiable: as `torch.optim.AdamW`.
        capturable, fused: as `cupyops.optim.Adam`.

    Raises:
        ValueError: what `torch.optim.AdamW` raises it for: a number out of its range.
        LaunchError: from `step()`, where it is captured in a CUDA graph and cannot be.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = cupyops.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
    """


def step_count(step: Any) -> Tensor:
    """A count of steps as a tensor of no dimension: of a number, or of a tensor with one element."""
    if not isinstance(step, Tensor):
        if isinstance(step, bool) or not isinstance(step, (int, float)):
            arguments.fail("step, in the state of a parameter,", step, "a number or a tensor of one element")
        return torch.tensor(float(step), dtype=torch.float32)
    if step.numel() != 1:
        arguments.fail("step, in the state of a parameter,", step, "a number or a tensor of one element")
    step = step if step.dim() == 0 else step.reshape(())
    return step if step.dtype.is_floating_point else step.float()


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
