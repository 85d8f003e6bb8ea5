"""The entries of optim_db that are of cupyops.optim: an optimizer of ours beside PyTorch's, over several steps."""

from __future__ import annotations

import copy
import warnings
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import cupyops

from .comparison import assert_same, widened
from .known import OPTIMIZERS

INFOS = [info for info in optim_db if info.optim_cls.__name__ in OPTIMIZERS]
STEPS = 4
SHAPES = ((10, 5), (10,), (3, 2, 4), (), (300,))


def ours(info: Any) -> Any:
    """The class here."""
    return getattr(cupyops.optim, info.optim_cls.__name__)


def inputs(info: Any, device: torch.device, dtype: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
    """(what, options) of each sample, by each of PyTorch's implementations that may be asked for."""
    found = []
    for sample in info.optim_inputs_func(device=device):
        if "foreach" in sample.kwargs or "fused" in sample.kwargs or "differentiable" in sample.kwargs:
            continue
        for way in ({}, *({name: True} for name in info.supported_impls)):
            if way and "lr" in sample.kwargs and isinstance(sample.kwargs["lr"], Tensor) and "foreach" in way:
                continue  # which PyTorch refuses without capturable
            if dtype.itemsize < 4 and "differentiable" in way:
                continue
            options = {**sample.kwargs, **way}
            if dtype is torch.float16 and "betas" in signature(info.optim_cls).parameters:
                # the usual one is 0 in float16, in which PyTorch's own step is NaN then
                options.setdefault("eps", 1e-4)
            found.append((f"{sample.desc} {way or ''}".strip(), options))
    return found


class Run:
    """Parameters in two groups, and an optimizer of them."""

    def __init__(self, cls: Any, options: dict[str, Any], device: torch.device, dtype: torch.dtype, wide: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
        values = [widened(value) if wide else value for value in values]
        self.params = [nn.Parameter(value.to(device)) for value in values]
        self.differentiable = bool(options.get("differentiable"))
        options = {name: copy.deepcopy(value) for name, value in options.items()}
        groups: list[dict[str, Any]] = [{"params": self.params[:2]}, {"params": self.params[2:], "lr": 0.05}]
        self.optimizer = cls(groups, **{"lr": 0.01, **options})
        self._dtype, self._steps = dtype, 0

    def step(self, times: int = STEPS) -> None:
        """Some steps, with the gradients that every run has."""
        for _ in range(times):
            generator = torch.Generator().manual_seed(1 + self._steps)
            for param in self.params:
                grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(self._dtype)
                param.grad = grad.to(param.device, param.dtype)
                param.requires_grad_(not self.differentiable)
            self.optimizer.step()
            self._steps += 1

    def values(self) -> list[tuple[str, Tensor]]:
        """The parameters and what the optimizer keeps of each, by name."""
        found = [(f"parameter {index}", param.detach()) for index, param in enumerate(self.params)]
        for index, param in enumerate(self.params):
            state = self.optimizer.state[param]
            kept = [(name, state[name]) for name in sorted(state)]
            found += [(f"{name} of parameter {index}", one) for name, one in kept if isinstance(one, Tensor)]
        return found

    def go_on_from(self, other: Run) -> None:
        """Take another's parameters and state, through a state dict."""
        for param, given in zip(self.params, other.params):
            param.data.copy_(given.detach())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self._steps = other._steps


def runs(info: Any, options: dict[str, Any], device: torch.device, dtype: torch.dtype) -> tuple[Run, Run, Run]:
    """Ours, PyTorch's, and PyTorch's in float64."""
    theirs = info.optim_cls
    return (
        Run(ours(info), options, device, dtype, False),
        Run(theirs, sound(info, options, device, dtype), device, dtype, False),
        Run(theirs, exact(options), device, dtype, True),
    )


def exact(options: dict[str, Any]) -> dict[str, Any]:
    """The options by which PyTorch computes in float64 throughout: what it captures, it computes of steps in float32."""
    return {**options, "capturable": False, "foreach": False} if options.get("capturable") else options


def is_unsound(info: Any, options: dict[str, Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's own kernel is wrong, by as much as the learning rate: see FUSED_SGD."""
    sgd = info.optim_cls is torch.optim.SGD and bool(options.get("momentum"))
    return sgd and bool(options.get("fused")) and device.type == "cpu" and dtype.itemsize == 2


def sound(info: Any, options: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The options by which PyTorch's result is right."""
    return {**options, "fused": None} if is_unsound(info, options, device, dtype) else options


def compare(mine: Run, theirs: Run, truth: Run) -> None:
    """Raise unless parameters and state are PyTorch's."""
    for (name, a), (other, b), (_, exact) in zip(mine.values(), theirs.values(), truth.values(), strict=True):
        assert name == other, f"{name}, PyTorch's {other}"
        assert_same(a, b, lambda exact=exact: exact, name)


def refuses(info: Any, error: Any) -> None:
    """Raise unless both refuse: when made, or at the first step; with PyTorch's kind of error, or its kind of warning."""
    for cls in (info.optim_cls, ours(info)):
        sample = copy.copy(error.optimizer_error_input)
        params = [nn.Parameter(torch.ones(1, 1))] if sample.params is None else sample.params
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer = cls(params, **sample.kwargs)
                if error.error_on is OptimizerErrorEnum.STEP_ERROR:
                    optimizer.step()
        except error.error_type:
            continue
        raise AssertionError(f"{cls}: no error, expected {error.error_type}")
