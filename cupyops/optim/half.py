"""Adam of parameters of half types, by fp32 master weights or stochastic rounding: the kernels, and the same in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dispatch.multi_tensor import DEFINE, why_not
from .._kernel.kernel import HALF, Kernel
from .._operator.derivation import distributed
from .._util import arguments
from .._util.philox import DEFINE as PHILOX
from .._util.philox import of_counter
from .._util.strides import laid_out_alike
from .plan import Group

_DEFINE = {**DEFINE, **PHILOX}
adam_master = Kernel("adam_half.cu", "adam_master<T>", define=_DEFINE, T=HALF)
adam_stochastic = Kernel("adam_half.cu", "adam_stochastic<T>", define=_DEFINE, T=(torch.bfloat16,))

FLOATS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")  # of the state, but for the step

OPTIONS = {"master_weights": False, "stochastic_rounding": False, "seed": 0}  # of a group, beside PyTorch's

Adam = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Sequence[Tensor]], Sequence[Tensor]], None]


def check(group: Group) -> None:
    """The options of a group, and whether its parameters can have them."""
    master, stochastic, seed = (group[name] for name in OPTIONS)
    if master and stochastic:
        arguments.fail("stochastic_rounding", True, "False beside master_weights=True, with which nothing is lost")
    if (master or stochastic) and group["differentiable"]:
        arguments.fail("differentiable", True, "False beside master_weights or stochastic_rounding")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        arguments.fail("seed", seed, "an integer in [0, 2^63)")
    for param in group["params"]:
        if stochastic and param.dtype is torch.float16:
            arguments.fail("a parameter", param, "one of torch.bfloat16 (wider ones are rounded as ever) for "
                           "stochastic_rounding; master_weights=True serves torch.float16")  # fmt: skip


def has_master(group: Group, dtype: torch.dtype) -> bool:
    """Return True if parameters of this dtype have master weights."""
    return bool(group["master_weights"]) and dtype in HALF


def is_stochastic(group: Group, dtype: torch.dtype) -> bool:
    """Return True if parameters of this dtype are rounded stochastically."""
    return bool(group["stochastic_rounding"]) and dtype is torch.bfloat16


def made(param: Tensor, group: Group) -> dict[str, Any]:
    """The state of a parameter with a master before its first step: all of it in fp32."""
    names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
    on_device = group["capturable"] or group["fused"]
    step = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
    zeros = {name: torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format) for name in names}
    return {"step": step, **zeros, "master": widened(param)}


def widened_state(param: Tensor, given: Any) -> dict[str, Any]:
    """The state of a parameter with a master as it was saved, in fp32; by an optimizer without one, it begins as `param`."""
    found = {name: value.to(param.device, torch.float32) for name, value in given.items() if name in FLOATS}
    return {"master": widened(param), **found}


def widened(param: Tensor) -> Tensor:
    """Copy to fp32, with the same layout."""
    return param.detach().to(torch.float32, copy=True, memory_format=torch.preserve_format)


def why_not_master(param: Tensor, grad: Tensor, state: tuple[Any, ...]) -> str | None:
    """Return why the kernel cannot update a parameter with a master, or None."""
    states = [one for one in state if one is not None]
    reason = why_not((param, grad)) or why_not(states)
    if reason is None and (states[0].shape != param.shape or states[0].dtype is not torch.float32):
        return "a state of another shape or dtype"
    if reason is None and states[0].device != param.device:
        return "tensors on different devices"
    alike = all(one.is_contiguous() for one in (param, states[0])) or laid_out_alike((param, states[0]))
    return reason or (None if alike else "tensors that differ in strides, or have gaps")


def key_of(seed: int, group: int) -> int:
    """The seed of a group's random numbers."""
    return (seed + group * 0x9E3779B97F4A7C15) % 2**63


# --- the step in PyTorch ---


@torch.no_grad()
def by_master(adam: Adam, params: Any, grads: Any, states: Any, masters: Any, steps: Any, scaled: bool) -> None:
    """`adam` on the masters, which the parameters then are rounded from."""
    for param, master in zip(params, masters):  # a parameter that somebody has changed is right
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
    wide = [grad.float() for grad in grads]
    adam(masters, wide, states, steps)
    for param, master, grad, unscaled in zip(params, masters, grads, wide):
        param.copy_(master)
        if scaled:
            grad.copy_(unscaled)


@torch.no_grad()
def by_rounding(adam: Adam, params: Any, grads: Any, states: Any, steps: Any, scaled: bool, seed: int) -> None:
    """`adam` in fp32, and what comes of it rounded stochastically."""
    arrays = [params, *states]
    wide = [[widened(one) for one in array] for array in arrays]
    wide_grads = [grad.float() for grad in grads]
    adam(wide[0], wide_grads, wide[1:], steps)
    places: dict[torch.device, int] = {}  # the number of a parameter among those of one launch
    for index, grad in enumerate(grads):
        if scaled:
            grad.copy_(wide_grads[index])
        like = distributed.local(params[index]) if distributed.is_spread(params[index]) else params[index]
        step = steps[index].to(like.device, torch.int64)
        place = places[like.device] = places.get(like.device, -1) + 1
        for array, exact, bits in zip(arrays, wide, random_bits(like, step, seed, place)):
            own, value = array[index].detach(), exact[index]
            if distributed.is_spread(own):
                own, value = distributed.local(own), distributed.local(value)
            own.copy_(rounded(value, bits))


def random_bits(like: Tensor, step: Tensor, seed: int, place: int) -> list[Tensor]:
    """16 random bits for each element of param, exp_avg, exp_avg_sq and the largest, numbered as they lie in memory."""
    own = of_counter(torch.tensor(seed, device=like.device), (step << 32) + place).unbind(-1)
    key, n = (own[1] << 32) + own[0], like.numel()
    words = of_counter(key, torch.arange((n + 1) // 2, device=like.device)).unbind(-1)
    pairs = [torch.stack(two, -1).flatten()[:n] for two in ((words[0], words[2]), (words[1], words[3]))]
    strides = torch.empty_like(like).stride()  # those of `like`, or where that has gaps the same without
    return [(word >> shift & 0xFFFF).as_strided(like.shape, strides) for word in pairs for shift in (0, 16)]


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Round to bf16: away from 0 where the bits cut off plus 16 random bits carry over. Values that are not finite stay."""
    word = (x.view(torch.int32).to(torch.int64) + bits) & 0xFFFF0000
    up = (word - ((word & 0x80000000) << 1)).to(torch.int32).view(torch.float32)
    return torch.where(x.isfinite(), up, x).to(torch.bfloat16)
