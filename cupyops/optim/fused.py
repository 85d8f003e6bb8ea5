"""Common part of the optimizers: a step by kernels where they serve, by PyTorch where they do not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from .._dispatch.multi_tensor import why_not
from .._kernel.graph import capturing
from .._operator.derivation import distributed
from .._util import torch_private, tracing
from ..errors import LaunchError
from . import clip
from .plan import Batch, Group, StepPlan, can_last


class Entry(NamedTuple):
    """A parameter of a step. Of `state` what the kernel has no need of yet may be None; `step` is Adam's count."""

    param: Tensor
    grad: Tensor
    state: tuple[Any, ...]  # of tensors or None
    step: Any = None


class Fused(torch.optim.Optimizer):
    """An optimizer of which a subclass says what its kernel and PyTorch's function do; comes before PyTorch's class."""

    _counts = False  # whether the rule depends on how many steps there were
    _shown = True  # whether anybody may have a part of the state
    _factor: Tensor | None = None  # what the next step multiplies gradients by, where the kernels do
    _clipped: clip.Clipped | None = None  # those gradients

    @property
    def state(self) -> Any:
        """State as PyTorch has it. A caller may change or keep a part of it, so each later step checks all of it."""
        self._shown = self._shown or bool(self._states)
        return self._states

    @state.setter
    def state(self, state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        self._states, self._shown = state, bool(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state)
        if "state" in given:
            self._adopt(given["state"], given.get("param_groups", ()))
            self.state = given.pop("state")  # PyTorch would put it where the property does not look
        super().__setstate__(given)
        for group in self.param_groups:  # another's may lack some of our options
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._shown = True

    def _adopt(self, state: MutableMapping[Tensor, dict[str, Any]], groups: Sequence[Group]) -> None:
        """Convert a state that is being loaded, perhaps another optimizer's of the same rule, to this optimizer's form."""

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """PyTorch's wrapper of a class's `step`; past it where there is no hook to call and no profiler to tell."""
        wrapped = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: Fused, *args: Any, **kwargs: Any) -> Any:
            if (
                profiler._is_profiler_enabled
                or self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or torch_private.pre_step_hooks()
                or torch_private.post_step_hooks()
            ):
                return wrapped(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as PyTorch does; with no profiler to tell, without its record, which takes most of the time.

        Args:
            set_to_none: let go of them; otherwise fill them with zeros.
        """
        self._factor = None
        if not set_to_none or profiler._is_profiler_enabled or torch.compiler.is_compiling():
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Have the next step take gradients whose norm, as of one vector, is at most `max_norm`.

        The step is the same as after `cupyops.nn.utils.clip_grad_norm_` of all parameters, to the bit, but the gradients are
        not written: the step multiplies what it reads. Until the next step or `zero_grad`, their memory holds them as they
        were; where the kernels do not serve all of them, and for DTensors, they are scaled at once instead. So they are by
        a step with a closure, which may look at them, and when they are clipped once more.

        Args:
            max_norm: the largest norm allowed.
            norm_type: 2, or `inf` for the largest magnitude; of other norms the gradients are scaled at once.
            error_if_nonfinite: raise where the norm is NaN or infinite, for which this waits.

        Returns:
            Tensor: the norm as it was, of the gradients' dtype.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite`; and in the step, if the gradients have been
                changed in place since.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = cupyops.optim.SGD([weight], lr=1.0)
            >>> weight.grad = torch.tensor([3.0, 4.0])
            >>> optimizer.clip_grad_norm_(1.0)
            tensor(5.)
            >>> optimizer.step()
            >>> weight
            Parameter containing:
            tensor([0.4000, 0.2000], requires_grad=True)
        """
        params = self._params()
        if self._factor is not None and self._clipped is not None and self._clipped.changed(params) is False:
            self._scale()
        self._factor = None
        scales = any(why_not_group(group) for group in self.param_groups)
        found = None if scales else clip.norm_and_factor(params, float(max_norm), float(norm_type), error_if_nonfinite)
        if found is None:
            return clip.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        norm, self._factor = found
        self._clipped = clip.Clipped(params)
        return norm

    def _check_clipped(self, closure: Callable[[], Any] | None) -> None:
        """Check, in the step after `clip_grad_norm_`, that the gradients are those that were clipped."""
        changed = self._clipped is None or self._clipped.changed(self._params())
        if changed is None:
            self._factor = None  # of others, which are gone
        elif changed:
            raise RuntimeError(
                "the gradients have been changed in place since optimizer.clip_grad_norm_, which leaves it to this step to "
                "scale them; clip them when they are final, or use cupyops.nn.utils.clip_grad_norm_, which scales at once"
            )
        elif closure is not None:
            self._scale()

    @torch.no_grad()
    def _scale(self) -> None:
        """Multiply the gradients now by what the next step would."""
        assert self._factor is not None
        torch._foreach_mul_([param.grad for param in self._params() if param.grad is not None], self._factor)
        self._factor = None

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The loss that `closure` returned, or None.
        """
        loss = None
        if self._factor is not None:
            self._check_clipped(closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        captured = capturing()
        for index, group in enumerate(self.param_groups):
            if captured:
                self._check_capture(group)
            whole = why_not_group(group)
            planned = None if whole else self._planned(index, group)
            if planned is None:
                self._anew(index, group, whole)
            else:
                self._serve(group, planned)
                for batch in planned:
                    batch.let_go()
        self._factor = None
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if a GradScaler leaves infinite gradients to the step: where that was asked for, and in a CUDA graph, whose
        capture does not let it look.
        """
        return self.__dict__.get("_heeds_scaler", False) or capturing()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_heeds_scaler"] = value

    # --- what a subclass has ---

    def _entries(self, group: Group) -> list[Entry]:
        """The parameters with a gradient; makes their state where there is none yet."""
        raise NotImplementedError

    def _variant(self, group: Group, param: Tensor, state: tuple[Any, ...], step: Any) -> Hashable:
        """Key that entries of one launch must share, besides device and dtype."""

    def _why_not(self, group: Group, param: Tensor, grad: Tensor, state: tuple[Any, ...]) -> str | None:
        """Return why the kernel cannot update this parameter, or None."""
        return why_not((param, grad, *(one for one in state if one is not None)))

    def _options(self, group: Group) -> tuple[Any, ...]:
        """Options of the group that decide the contents of a batch."""
        return ()

    def _state_names(self, group: Group) -> tuple[str, ...]:
        """The state of a parameter, in the order of an entry's, the step last."""
        raise NotImplementedError

    def _lasts(self, batch: Batch) -> bool:
        """Return True if the next step may have the same batch."""
        return True

    def _again(self, batch: Batch) -> bool:
        """Reuse a batch of the last step, with its state as it is now; return False where that is not possible."""
        return True

    def _by_kernel(self, group: Group, batch: Batch) -> None:
        """Update `batch` by the kernel."""
        raise NotImplementedError

    def _by_torch(self, group: Group, entries: list[Entry]) -> None:
        """Update `entries` by PyTorch."""
        raise NotImplementedError

    def _keeps_state(self, group: Group) -> bool:
        """Return True if the first step makes state."""
        return True

    # --- what all share ---

    @torch_private.use_grad_for_differentiable
    def _anew(self, index: int, group: Group, whole: str | None) -> None:
        """The step of a group that no plan tells of."""
        shown = self._shown
        served, rest, reason = self._sort(group, whole)
        self._serve(group, served)
        if rest:
            if self._factor is not None:  # as when it was asked for they were other gradients
                torch._foreach_mul_([entry.grad for entry in rest], self._factor)
            with tracing.operator(self._traced_name, "reference", note=reason):
                self._by_torch(group, rest)
        elif not whole:
            self._plan(index, group, served)
            self._shown = shown  # to ourselves alone
        for batch in served:
            batch.let_go()

    def _serve(self, group: Group, batches: list[Batch]) -> None:
        for batch in batches:
            if tracing.active is None:
                self._by_kernel(group, batch)
            else:
                with tracing.operator(self._traced_name, "kernel"):
                    self._by_kernel(group, batch)

    def _check_capture(self, group: Group) -> None:
        name = type(self).__name__
        if self._counts and not group["capturable"]:
            raise LaunchError(
                f"{name}: step() is being captured in a CUDA graph, but capturable is False: what is counted on the host "
                "stands still in a replay; make the optimizer with capturable=True"
            )
        states = (self._states.get(p, {}).values() for p in group["params"] if p.grad is not None)
        if self._keeps_state(group) and not all(any(one is not None for one in state) for state in states):
            raise LaunchError(
                f"{name}: the first step makes the optimizer's state, which a CUDA graph would make anew at each replay; "
                "run a step before the capture"
            )

    @property
    def _traced_name(self) -> str:
        return f"cupyops.optim.{type(self).__name__}"

    def _planned(self, index: int, group: Group) -> list[Batch] | None:
        """Return the batches of the last step if this one is like it, else None."""
        plans: dict[int, StepPlan] = self.__dict__.setdefault("_plans", {})
        plan = plans.pop(index, None)
        if plan is None:
            return None
        shown = self._shown or _references(self.__dict__) > _UNSHARED
        batches = plan.renewed(group, self._states, self._options(group), shown)
        if batches is None or not all(map(self._again, batches)):
            return None
        plans[index] = plan
        return batches

    def _plan(self, index: int, group: Group, served: list[Batch]) -> None:
        """Keep this step's batches, if the next step can be like it."""
        if can_last(served) and all(map(self._lasts, served)):
            plan = StepPlan(group, served, self._states, self._state_names(group), self._options(group))
            self.__dict__["_plans"][index] = plan

    def _sort(self, group: Group, whole: str | None) -> tuple[list[Batch], list[Entry], str]:
        """Sort entries into batches for the kernel and the rest, with the first reason for the rest (`whole`: for all)."""
        batches: dict[Any, Batch] = {}
        rest: list[Entry] = []
        reasons = []
        for place, entry in enumerate(self._entries(group)):
            owner = entry.param
            param, grad, state, step = local_part(entry) if not whole and distributed.is_spread(owner) else entry
            reason = whole or self._why_not(group, param, grad, state)
            if reason is None:
                key = (param.device, param.dtype, self._variant(group, param, state, step))
                if key not in batches:
                    batches[key] = Batch(*key)
                batches[key].append(place, owner, param, grad, state if step is None else (*state, step))
            else:
                rest.append(entry)
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


def local_part(entry: Entry) -> Entry:
    """A device's part of a parameter that is spread over several, where all there is lies as it does: DTensors of FSDP2."""
    param, grad, state, step = entry
    if not all(one is None or distributed.is_spread(one) for one in (grad, *state)):
        return entry
    lies = distributed.placements(param)
    if any(one is not None and distributed.placements(one) != lies for one in state):
        return entry
    if distributed.placements(grad) != lies:
        grad = grad.redistribute(*lies)  # type: ignore[attr-defined]
    torch.autograd.graph.increment_version(param)  # of the whole, beside the part's
    parts = [None if one is None else distributed.local(one) for one in (param, grad, *state)]
    return Entry(parts[0], parts[1], tuple(parts[2:]), step)  # type: ignore[arg-type]


def _references(attributes: dict[str, Any]) -> int:
    return sys.getrefcount(attributes["_states"])


_UNSHARED = _references({"_states": {}})  # as many as where nobody else has it


def why_not_group(group: Group) -> str | None:
    """Return why PyTorch must update every parameter of `group`, or None."""
    if torch.compiler.is_compiling() or torch_private.dispatch_modes() or torch_private.functorch_active():
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
    for tensors in arrays:
        torch.autograd.graph.increment_version(tensors)


def learning_rate(lr: Any, device: torch.device, dtype: torch.dtype) -> tuple[float, Tensor | None]:
    """Return the rate as a number; or 0 and the tensor on the device, in the dtype of the computation, without a wait."""
    if isinstance(lr, Tensor) and lr.device == device:
        return 0.0, lr.to(torch.float64 if dtype is torch.float64 else torch.float32)
    return float(lr), None
