"""One step of an optimizer, and the clipping of gradients, beside PyTorch's fused ones and those that go array by array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import beside
from torch import Tensor

import cupyops
from cupyops.bench import Case

# Elements of each tensor, and how many there are. Few and large: the host has done its part before the GPU begins.
LARGE = {"24x2^22": (2**22, 24), "24x4194301": (2**22 - 3, 24), "100x2^20": (2**20, 100), "300x333333": (333_333, 300)}
EVEN = {"24x4194301": 2**22, "300x333333": 333_328}  # as many elements of a rounder number, to be no faster
SMALL = {"200x1000": (1000, 200)}  # where the host's time is the whole
OPTIMIZERS: dict[str, tuple[Any, Any, int, dict[str, Any]]] = {  # ours, PyTorch's, arrays read and written, options
    "adamw": (cupyops.optim.AdamW, torch.optim.AdamW, 7, {}),
    "adamw amsgrad": (cupyops.optim.AdamW, torch.optim.AdamW, 9, {"amsgrad": True}),
    "adam": (cupyops.optim.Adam, torch.optim.Adam, 7, {}),
    "sgd": (cupyops.optim.SGD, torch.optim.SGD, 5, {"momentum": 0.9}),
    "sgd plain": (cupyops.optim.SGD, torch.optim.SGD, 3, {}),
    "lion": (cupyops.optim.Lion, None, 5, {}),
}
HALF: dict[str, tuple[dict[str, Any], int]] = {  # of bf16 parameters: options, bytes for each element
    "adamw master": ({"master_weights": True}, 30),
    "adamw stochastic": ({"stochastic_rounding": True}, 14),
}
DTYPES = (torch.bfloat16, torch.float32)
USUAL = ("adamw", "sgd")


def cases() -> Iterator[Case]:
    """Every optimizer on the first set and on the small one, by the time of host and device together; the usual on all."""
    for dtype in DTYPES:
        for sets, wall in ((LARGE, False), (SMALL, True)):
            for index, (size, (numel, count)) in enumerate(sets.items()):
                ops = USUAL if index else tuple(OPTIMIZERS)
                made = of_size(ops, size, numel, count, dtype, wall)
                if size in EVEN:
                    even = of_size(ops, f"{count}x{EVEN[size]}", EVEN[size], count, dtype, wall)
                    made = map(beside, made, even)
                yield from made
    for op in HALF:
        for size, (numel, count) in (*list(LARGE.items())[:2], *SMALL.items()):
            yield step_of_half(op, size, numel, count, wall=size in SMALL)


def step_of_half(op: str, size: str, numel: int, count: int, wall: bool) -> Case:
    """Beside PyTorch's fused step on bf16, which loses small updates; with masters beside a step on copies in fp32."""
    options, moved = HALF[op]

    def make(device: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        ours = Steps(lambda cls, **how: cls(parameters(numel, count, device, dtype), 1e-3, **how))
        return ours, Masters(lambda: parameters(numel, count, device, dtype))

    return Case(
        op=op, size=size, dtype=torch.bfloat16, make=make, ours=lambda steps, _: steps(cupyops.optim.AdamW, **options),
        eager=(lambda _, masters: masters()) if "master" in op else lambda steps, _: steps(torch.optim.AdamW, fused=True),
        forward_bytes=moved * numel * count, compiled=False, same=False, wall=wall,
    )  # fmt: skip


class Masters:
    """What a training loop does by hand: gradients to fp32, PyTorch's fused step on fp32 copies, and back."""

    def __init__(self, make: Callable[[], list[Tensor]]) -> None:
        self._make, self._halves = make, list[Tensor]()

    def __call__(self) -> None:
        if not self._halves:
            self._halves = self._make()
            self._masters = [torch.nn.Parameter(half.detach().float()) for half in self._halves]
            for master in self._masters:
                master.grad = torch.empty_like(master)
            self._optimizer = torch.optim.AdamW(self._masters, 1e-3, fused=True)
        with torch.no_grad():
            torch._foreach_copy_([master.grad for master in self._masters], [half.grad for half in self._halves])
            self._optimizer.step()
            torch._foreach_copy_(self._halves, self._masters)


def of_size(ops: tuple[str, ...], size: str, numel: int, count: int, dtype: torch.dtype, wall: bool) -> Iterator[Case]:
    """Steps, and clipping."""
    for op in ops:
        yield step_of(op, size, numel, count, dtype, wall)
    yield clipping("clip_grad_norm_", size, numel, count, dtype, wall, max_norm=-1.0)  # at each call anew
    yield clipping("clip_grad_norm_ unclipped", size, numel, count, dtype, wall, max_norm=1e9)


def step_of(op: str, size: str, numel: int, count: int, dtype: torch.dtype, wall: bool) -> Case:
    """Of Lion, which PyTorch has not, the peer is the same in PyTorch."""
    ours, theirs, moved, options = OPTIMIZERS[op]

    def make(device: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        return (Steps(lambda cls, **how: cls(parameters(numel, count, device, dtype), 1e-3, **options, **how)),)

    fused, foreach = {"fused": True}, {"foreach": True}
    return Case(
        op=op, size=size, dtype=dtype, make=make, ours=lambda steps: steps(ours),
        eager=lambda steps: steps(theirs or ours, **(fused if theirs else foreach)),
        others={"foreach": lambda steps: steps(theirs, **foreach)} if theirs else {},
        forward_bytes=moved * numel * count * dtype.itemsize, compiled=False, same=False, wall=wall,
    )  # fmt: skip


class Steps:
    """A step of an optimizer, each made at its first and with parameters of its own."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self._make = make
        self._made: dict[Any, torch.optim.Optimizer] = {}

    def __call__(self, cls: Any, **how: bool) -> None:
        key = (cls, *how)
        if key not in self._made:
            self._made[key] = self._make(cls, **how)
        self._made[key].step()


def clipping(op: str, size: str, numel: int, count: int, dtype: torch.dtype, wall: bool, max_norm: float) -> Case:
    """Where the norm is too large the gradients are read twice and written, else they are read."""

    def make(device: Any, dtype: torch.dtype) -> tuple[list[Tensor]]:
        return (parameters(numel, count, device, dtype),)

    clip = torch.nn.utils.clip_grad_norm_
    return Case(
        op=op, size=size, dtype=dtype, make=make,
        ours=lambda p: cupyops.nn.utils.clip_grad_norm_(p, max_norm),
        eager=lambda p: clip(p, max_norm),
        others={"foreach": lambda p: clip(p, max_norm, foreach=True)},
        forward_bytes=(3 if max_norm < 0 else 1) * numel * count * dtype.itemsize, compiled=False, same=False, wall=wall,
    )  # fmt: skip


def parameters(numel: int, count: int, device: Any, dtype: torch.dtype) -> list[Tensor]:
    """With gradients."""
    made: list[Tensor] = [torch.nn.Parameter(torch.randn(numel, device=device, dtype=dtype)) for _ in range(count)]
    for one in made:
        one.grad = torch.randn_like(one)
    return made
