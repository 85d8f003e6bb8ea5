"""What the optimizers share: a step by kernels where they serve, by PyTorch where they do not."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _use_grad_for_differentiable

from ..common.multi_tensor import why_not
from ..errors import LaunchError
from ..tracing import operator as traced
from .plan import Batch, Group, Plan, can_last


class Entry(NamedTuple):
    """A parameter of a step. Of `state` what the kernel has no need of yet may be None; `step` is Adam's count."""

    param: Tensor
    grad: Tensor
    state: tuple[Any, ...]  # of tensors or None
    step: Any = None


class Fused(torch.optim.Optimizer):
    """An optimizer of which a subclass says what its kernel and PyTorch's function do; comes before PyTorch's class."""

    @_use_grad_for_differentiable
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
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        for index, group in enumerate(self.param_groups):
            if capturing:
                self._check_capture(group)
            whole = why_not_group(group)
            planned = None if whole else self._planned(index, group)
            served, rest, reason = (planned, [], "") if planned is not None else self._sort(group, whole)
            for batch in served:
                with traced(self._traced_name, "kernel"):
                    self._by_kernel(group, batch)
            if rest:
                with traced(self._traced_name, "reference", note=reason):
                    self._by_torch(group, rest)
            elif planned is None and not whole:
                self._plan(index, group, served)
            for batch in served:
                batch.let_go()
        return loss

    # --- what a subclass has ---

    def _entries(self, group: Group) -> list[Entry]:
        """The parameters with a gradient; makes their state where there is none yet."""
        raise NotImplementedError

    def _variant(self, group: Group, param: Tensor, state: tuple[Any, ...], step: Any) -> Hashable:
        """What entries of one launch must share, besides device and dtype."""

    def _options(self, group: Group) -> tuple[Any, ...]:
        """Of the group's options those that decide what is in a batch."""
        return ()

    def _state_names(self, group: Group) -> tuple[str, ...]:
        """The state of a parameter, in the order of an entry's, the step last."""
        raise NotImplementedError

    def _lasts(self, batch: Batch) -> bool:
        """Whether the next step may have the same batch."""
        return True

    def _again(self, batch: Batch) -> bool:
        """Make a batch of the last step, with its state as it is now, this step's; False where it cannot be."""
        return True

    def _by_kernel(self, group: Group, batch: Batch) -> None:
        """Update `batch` by the kernel."""
        raise NotImplementedError

    def _by_torch(self, group: Group, entries: list[Entry]) -> None:
        """Update `entries` by PyTorch."""
        raise NotImplementedError

    def _keeps_state(self, group: Group) -> bool:
        """Whether a step makes state, the first time."""
        return True

    # --- what all share ---

    def _check_capture(self, group: Group) -> None:
        name = type(self).__name__
        if not group.get("capturable", True):
            raise LaunchError(
                f"{name}: step() is being captured in a CUDA graph, but capturable is False: what is counted on the host "
                "stands still in a replay; make the optimizer with capturable=True"
            )
        states = (self.state.get(p, {}).values() for p in group["params"] if p.grad is not None)
        if self._keeps_state(group) and not all(any(one is not None for one in state) for state in states):
            raise LaunchError(
                f"{name}: the first step makes the optimizer's state, which a CUDA graph would make anew at each replay; "
                "run a step before the capture"
            )

    @property
    def _traced_name(self) -> str:
        return f"cupyops.optim.{type(self).__name__}"

    def _planned(self, index: int, group: Group) -> list[Batch] | None:
        """What the last step had, where this one is like it."""
        plans: dict[int, Plan] = self.__dict__.setdefault("_plans", {})
        plan = plans.pop(index, None)
        batches = plan.renewed(group, self.state, self._options(group)) if plan is not None else None
        if plan is None or batches is None or not all(map(self._again, batches)):
            return None
        plans[index] = plan
        return batches

    def _plan(self, index: int, group: Group, served: list[Batch]) -> None:
        """Keep what this step had, where the next can be like it."""
        if can_last(served) and all(map(self._lasts, served)):
            plan = Plan(group, served, self.state, self._state_names(group), self._options(group))
            self.__dict__["_plans"][index] = plan

    def _sort(self, group: Group, whole: str | None) -> tuple[list[Batch], list[Entry], str]:
        """What the kernel serves, by device, dtype and variant; the rest, and why: `whole` for all, or the first reason."""
        batches: dict[Any, Batch] = {}
        rest: list[Entry] = []
        reasons = []
        for place, (param, grad, state, step) in enumerate(self._entries(group)):
            reason = whole or why_not((param, grad, *(one for one in state if one is not None)))
            if reason is None:
                key = (param.device, param.dtype, self._variant(group, param, state, step))
                if key not in batches:
                    batches[key] = Batch(*key)
                batches[key].append(place, param, grad, state if step is None else (*state, step))
            else:
                rest.append(Entry(param, grad, state, step))
                reasons.append(reason)
        return list(batches.values()), rest, reasons[0] if reasons else ""

    def _scaler(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """grad_scale and found_inf, as a GradScaler gave them, each one fp32 number on `device`."""
        scale, inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        return (
            None if scale is None else scale.to(device, torch.float32),
            None if inf is None else inf.to(device, torch.float32),
        )

    def _scaler_for_torch(self) -> dict[str, Any]:
        return {"grad_scale": getattr(self, "grad_scale", None), "found_inf": getattr(self, "found_inf", None)}


def why_not_group(group: Group) -> str | None:
    """Why PyTorch must update every parameter of `group`; None where it need not."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return "traced or transformed"
    if group["foreach"] is not None or group["fused"] is False:
        return "foreach or fused=False was asked for"
    if (
        group["differentiable"]
        or isinstance(group["weight_decay"], Tensor)
        or getattr(group["lr"], "requires_grad", False)
    ):
        return "differentiable"
    if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
        return "betas are tensors"
    return None


def written(*arrays: list[Tensor]) -> None:
    """Tell autograd what the kernel is about to write, which it cannot see."""
    torch.autograd.graph.increment_version(list(chain.from_iterable(arrays)))


def learning_rate(lr: Any, device: torch.device, dtype: torch.dtype) -> tuple[float, Tensor | None]:
    """As a number, or where it lies on the device as a tensor of the type that `dtype` is computed in: no wait for it."""
    if isinstance(lr, Tensor) and lr.device == device:
        return 0.0, lr.to(torch.float64 if dtype is torch.float64 else torch.float32)
    return float(lr), None
