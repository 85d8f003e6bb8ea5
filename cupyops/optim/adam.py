"""Adam and AdamW: torch.optim's own, with one kernel launch for all parameters of a device and dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from .._dispatch.multi_tensor import BLOCK, DEFINE
from .._kernel.kernel import FLOATING, Kernel
from .._util import arguments
from ..errors import LaunchError
from . import half
from .fused import Entry, Fused, learning_rate, written
from .plan import Batch, Group

adam_step = Kernel("adam.cu", "adam_step<T, AMSGRAD>", define=DEFINE, T=FLOATING, AMSGRAD=(False, True))

_ON_DEVICE = -1.0  # steps that the kernel reads itself


class _Adam(Fused):
    """The step of both."""

    _counts = True

    def _set_options(self, **options: Any) -> None:
        """Set the options that PyTorch's optimizers lack, in each group that does not set them itself."""
        self.defaults.update(options)
        for group in self.param_groups:
            for name, value in options.items():
                group.setdefault(name, value)
            half.check(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.defaults = {**half.OPTIONS, **state.get("defaults", self.__dict__.get("defaults", {}))}
        super().__setstate__({**state, "defaults": self.defaults})

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group as PyTorch does, after checking its options of half types."""
        super().add_param_group(param_group)
        if "seed" in self.defaults:
            half.check(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state as PyTorch does, which however casts it all to the parameter's dtype: that of a master stays fp32."""
        self._given = state_dict
        seen = self.register_load_state_dict_pre_hook(lambda _, given: setattr(self, "_given", given))
        try:
            super().load_state_dict(state_dict)
        finally:
            seen.remove()
            del self._given

    def _entries(self, group: Group) -> list[Entry]:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        first: list[Tensor] = []
        second: list[Tensor] = []
        largest: list[Tensor] = []
        steps: list[Any] = []  # tensors, unless somebody has put something else into a state
        for param in group["params"] if group["master_weights"] else ():
            if param.grad is not None and half.has_master(group, param.dtype):
                state = self._states[param]
                if "master" not in state:
                    state.update(half.widened_state(param, state) if state else half.made(param, group))
        self._init_group(group, params, grads, first, second, largest, steps)  # type: ignore[attr-defined]
        states: Any = zip(first, second, largest) if group["amsgrad"] else zip(first, second)
        entries = []
        for param, grad, of, step in zip(params, grads, states, steps):
            if half.has_master(group, param.dtype):
                of = (*of, self._states[param]["master"])
            if not isinstance(step, Tensor):
                step = self._states[param]["step"] = step_count(step)
            entries.append(Entry(param, grad, of, step))
        return entries

    def _adopt(self, state: MutableMapping[Tensor, dict[str, Any]], groups: Sequence[Group]) -> None:
        """Give each parameter a step, as PyTorch has it now, in states with one for the group: older ones and Apex's."""
        for group in groups:
            for param in group["params"]:
                if (of := state.get(param)) and ("step" in of or "step" in group):
                    of["step"] = step_count(of.get("step", group.get("step")))
        given = getattr(self, "_given", None)
        saved = given["param_groups"] if given else groups
        for group, names in zip(groups, saved):
            for param, name in zip(group["params"], names["params"]):
                if half.has_master({**half.OPTIONS, **self.defaults, **group}, param.dtype) and (
                    of := state.get(param)
                ):
                    of.update(half.widened_state(param, given["state"][name] if given else of))

    def _variant(self, group: Group, param: Tensor, state: tuple[Any, ...], step: Tensor) -> float:
        """The steps taken, where the host counts them: all of a launch have the same."""
        on_device = step.is_cuda or group["capturable"] or group["fused"]
        if on_device and step.device != param.device:
            raise LaunchError(
                f"{type(self).__name__}: a parameter is on {param.device}, but its step, which is to be counted there, "
                f"on {step.device}; move it to {param.device}"
            )
        return _ON_DEVICE if on_device else step.item()

    def _why_not(self, group: Group, param: Tensor, grad: Tensor, state: tuple[Any, ...]) -> str | None:
        if half.has_master(group, param.dtype):
            return half.why_not_master(param, grad, state)
        return super()._why_not(group, param, grad, state)

    def _plan(self, index: int, group: Group, served: list[Batch]) -> None:
        masters = {half.has_master(group, batch.dtype) for batch in served}
        if len(masters) <= 1:  # a plan has the same state of all
            super()._plan(index, group, served)

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
        scales = grad_scale, found_inf, self._factor
        numbers = (taken + 1, *rate, *moments, group["eps"], group["weight_decay"], *flags, *scales)
        if group["master_weights"] and half.has_master(group, dtype):
            arrays = (*states[:2], *states[-1:], states[2] if amsgrad and states else None)
            for table, start, count, blocks in batch.launches(*arrays, counted):
                half.adam_master[blocks, BLOCK](batch.params[start], table, count, *numbers, T=dtype)
            return
        if group["stochastic_rounding"] and half.is_stochastic(group, dtype):
            seed, arrays = self._seed(group), (*states[:2], states[2] if amsgrad and states else None)
            for table, start, count, blocks in batch.launches(*arrays, counted):
                half.adam_stochastic[blocks, BLOCK](batch.params[start], table, count, *numbers, seed, start, T=dtype)
            return
        for table, start, count, blocks in batch.launches(*states, counted):
            adam_step[blocks, BLOCK](batch.params[start], table, count, *numbers, T=dtype, AMSGRAD=amsgrad)

    def _seed(self, group: Group) -> int:
        return half.key_of(group["seed"], next(i for i, one in enumerate(self.param_groups) if one is group))

    def _options(self, group: Group) -> tuple[Any, ...]:
        ways = bool(group["master_weights"]), bool(group["stochastic_rounding"])
        return bool(group["amsgrad"]), group["capturable"], group["fused"], *ways

    def _state_names(self, group: Group) -> tuple[str, ...]:
        masters = any(half.has_master(group, param.dtype) for param in group["params"] if param.grad is not None)
        largest, master = ["max_exp_avg_sq"] * bool(group["amsgrad"]), ["master"] * masters
        return ("exp_avg", "exp_avg_sq", *largest, *master, "step")

    def _lasts(self, batch: Batch) -> bool:
        return batch.bank is not None or batch.states[-1][0].dtype is torch.float32

    def _again(self, batch: Batch) -> bool:
        """Update a batch's common step count; return True if all its parameters have the same still."""
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
        # a step that is skipped is not counted; of one tensor PyTorch would read the value, and wait for the GPU
        torch._foreach_add_(steps, 1 if found_inf is None else [1 - found_inf.view(())] * len(steps))
        return steps if steps[0].dtype is torch.float32 else [step.float() for step in steps]

    def _count_on_host(self, batch: Batch) -> None:
        """One addition for all steps, which become views of one tensor: hundreds would take longer than all else."""
        if batch.bank is None:
            batch.bank = torch.stack([step_count(step) for step in batch.states[-1]])
            for owner, view in zip(batch.owners, batch.bank.unbind()):
                self._states[owner]["step"] = view
        batch.bank.add_(1)

    def _by_torch(self, group: Group, entries: list[Entry]) -> None:
        masters, stochastic, plain = [], [], []
        for entry in entries:
            if half.has_master(group, entry.param.dtype):
                masters.append(entry)
            elif half.is_stochastic(group, entry.param.dtype):
                stochastic.append(entry)
            else:
                plain.append(entry)
        step = functools.partial(self._adam, group)
        scaled = getattr(self, "grad_scale", None) is not None
        if plain:
            step(*_columns(plain, 2 + bool(group["amsgrad"])))
        if masters:
            params, grads, (*states, kept), steps = _columns(masters, 3 + bool(group["amsgrad"]))
            half.by_master(step, params, grads, states, kept, steps, scaled)
        if stochastic:
            columns = _columns(stochastic, 2 + bool(group["amsgrad"]))
            half.by_rounding(step, *columns, scaled, self._seed(group))

    def _adam(self, group: Group, params: Any, grads: Any, states: Any, steps: Any) -> None:
        """Update by PyTorch's function."""
        names = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "capturable", "differentiable", "fused")
        adam(
            params,
            grads,
            states[0],
            states[1],
            states[2] if group["amsgrad"] else [],
            steps,
            has_complex=any(param.is_complex() for param in params),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            **self._scaler_for_torch(),
            **{name: group[name] for name in names},
        )


def _columns(entries: list[Entry], states: int) -> tuple[list[Tensor], list[Tensor], list[list[Any]], list[Any]]:
    """Parameters, gradients, as many arrays of state, and steps."""
    of = [[entry.state[index] for entry in entries] for index in range(states)]
    return [e.param for e in entries], [e.grad for e in entries], of, [e.step for e in entries]


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
        master_weights: of parameters of half types keep fp32 copies, by which the steps go, as state "master", and the
            moments in fp32 too: 16 bytes of state each, and no update is lost. A parameter that is changed from without
            (a checkpoint, say) is noticed, and its master follows.
        stochastic_rounding: round bf16 parameters and their state up or down with the probability that keeps the mean,
            where rounding to the nearest loses updates below half a unit: no more memory than before.
        seed: of that rounding. The same seed, steps and gradients give the same bits, also after a `load_state_dict`.

    Raises:
        InputError: `master_weights` and `stochastic_rounding` together or beside `differentiable`, or an fp16 parameter
            for stochastic rounding.
        ValueError: what `torch.optim.Adam` raises it for: a number out of its range.
        LaunchError: from `step()`, where it is captured in a CUDA graph and cannot be.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = cupyops.optim.Adam(model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize, capturable=capturable,
            differentiable=differentiable, fused=fused, decoupled_weight_decay=decoupled_weight_decay,
        )  # fmt: skip
        self._set_options(master_weights=master_weights, stochastic_rounding=stochastic_rounding, seed=seed)


class AdamW(_Adam, torch.optim.AdamW):
    """AdamW (arXiv:1711.05101); as `torch.optim.AdamW`: same constructor, same update, same state_dict.

    What the kernel serves, and what is left to PyTorch, is as in `cupyops.optim.Adam`.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate. A tensor on the parameters' GPU is read there at each step, from within a CUDA graph too.
        betas, eps, weight_decay, amsgrad, maximize, foreach, differentiable: as `torch.optim.AdamW`.
        capturable, fused, master_weights, stochastic_rounding, seed: as `cupyops.optim.Adam`.

    Raises:
        InputError: `master_weights` and `stochastic_rounding` together or beside `differentiable`, or an fp16 parameter
            for stochastic rounding.
        ValueError: what `torch.optim.AdamW` raises it for: a number out of its range.
        LaunchError: from `step()`, where it is captured in a CUDA graph and cannot be.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = cupyops.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize, capturable=capturable,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self._set_options(master_weights=master_weights, stochastic_rounding=stochastic_rounding, seed=seed)


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
