"""SGD: torch.optim's own, with one kernel launch for all parameters of a device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.optim.sgd import sgd

from ..kernel import FLOATING, Kernel, addressing, ceil_div, executors
from ..tracing import operator as traced

sgd_step = Kernel("sgd.cu", "sgd_step<T, MOMENTUM>", T=FLOATING, MOMENTUM=(False, True))

# As sgd.cu has them: how many tensors a launch names, the threads of a block, and the bytes of a tensor that it owns.
TENSORS = 110
BLOCK = 256
CHUNK_BYTES = BLOCK * 4 * 16

# struct Table of sgd.cu
TABLE = np.dtype(
    [
        ("params", np.uint64, TENSORS),
        ("grads", np.uint64, TENSORS),
        ("buffers", np.uint64, TENSORS),
        ("sizes", np.int64, TENSORS),
        ("chunk_ends", np.int32, TENSORS),
    ]
)

_NAME = "cupyops.optim.SGD"
_PLAIN = (Tensor, torch.nn.Parameter)
_SERVED = frozenset(FLOATING)

Row = tuple[int, int, int, int]  # addresses of parameter, gradient and momentum buffer (or 0); number of elements
Entry = tuple[Tensor, Tensor, "Tensor | None"]  # parameter, gradient, momentum buffer


class SGD(torch.optim.SGD):
    """Stochastic gradient descent; as `torch.optim.SGD`: same constructor, same update, same state_dict.

    Parameters on a GPU with dense gradients of their own floating dtype (fp16, bf16, fp32, fp64) are updated by one
    kernel per device and dtype, as many as 110 of them in a launch. All else, and all where `foreach` or `fused=False`
    is asked for, is updated by PyTorch.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate. A tensor on the parameters' GPU is read there at each step, from within a CUDA graph too.
        momentum, dampening, weight_decay, nesterov, maximize, foreach, differentiable, fused: as `torch.optim.SGD`.
            `fused=True` lets a `torch.amp.GradScaler` leave unscaling and skipping to the kernel, with no wait.

    Raises:
        ValueError: what `torch.optim.SGD` raises it for: a negative lr, momentum or weight_decay, and nesterov without
            momentum or with dampening.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = cupyops.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tables: dict[Any, Any] = {}  # addresses mean nothing in another process or another copy

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
        for index, group in enumerate(self.param_groups):
            params: list[Tensor] = []
            grads: list[Tensor] = []
            buffers: list[Tensor | None] = []
            self._init_group(group, params, grads, buffers)
            served, rest, reason = _sort(group, list(zip(params, grads, buffers or [None] * len(params))))
            for (device, dtype, first), entries in served.items():
                self._step_by_kernel((index, device, dtype, first), group, entries)
            if rest:
                self._step_by_torch(group, rest, reason)
        return loss

    def _step_by_kernel(self, key: Any, group: dict[str, Any], entries: list[Entry]) -> None:
        _, device, dtype, first = key
        found_inf, grad_scale = (_on(device, getattr(self, name, None)) for name in ("found_inf", "grad_scale"))
        momentum = float(group["momentum"])
        if first:
            if found_inf is not None and found_inf.item():
                return  # a step that is skipped makes no buffer; later ones are skipped by the kernel itself
            entries = [(param, grad, torch.empty_like(grad)) for param, grad, _ in entries]
        # before the launch, as for any write that autograd cannot see
        torch.autograd.graph.increment_version([p for p, _, _ in entries] + [b for _, _, b in entries if b is not None])
        if grad_scale is not None:
            torch.autograd.graph.increment_version([grad for _, grad, _ in entries])
        lr, lr_tensor = _learning_rate(group["lr"], device, dtype)
        numbers = (momentum, 1 - group["dampening"], group["weight_decay"])
        flags = (int(first), int(group["nesterov"]), int(group["maximize"]))
        with traced(_NAME, "kernel"):
            for table, start, count, blocks in self._tables_of(key, entries):
                sgd_step[blocks, BLOCK](
                    entries[start][0], table, count, lr, lr_tensor, *numbers, *flags, grad_scale, found_inf,
                    T=dtype, MOMENTUM=momentum != 0,
                )  # fmt: skip
        if first:
            for param, _, buffer in entries:
                self.state[param]["momentum_buffer"] = buffer

    def _tables_of(self, key: Any, entries: list[Entry]) -> list[tuple[np.ndarray, int, int, int]]:
        """The launches for `entries`; those of the last step where every tensor is where it was."""
        address = addressing(entries[0][0].device)
        rows = [
            (address(param), address(grad), 0 if buffer is None else address(buffer), param.numel())
            for param, grad, buffer in entries
        ]
        cache = self.__dict__.setdefault("_tables", {})
        known = cache.get(key)
        if known is None or known[0] != rows:
            known = cache[key] = (rows, list(launches(rows, CHUNK_BYTES // entries[0][0].element_size())))
        return known[1]

    def _step_by_torch(self, group: dict[str, Any], entries: list[Entry], reason: str) -> None:
        params, grads, buffers = map(list, zip(*entries))
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")
        with traced(_NAME, "reference", note=reason):
            sgd(
                params,
                grads,
                buffers if group["momentum"] != 0 else [],
                has_sparse_grad=any(grad.is_sparse for grad in grads),
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                **{name: group[name] for name in names},
            )
        if group["momentum"] != 0:
            for param, buffer in zip(params, buffers):
                self.state[param]["momentum_buffer"] = buffer


def launches(rows: Sequence[Row], chunk: int) -> Iterator[tuple[np.ndarray, int, int, int]]:
    """For each launch that `rows` need: the table, its first row, its number of rows, and the grid.

    `chunk` is the number of elements that one block updates.
    """
    for start in range(0, len(rows), TENSORS):
        part = rows[start : start + TENSORS]
        table = np.zeros(1, TABLE)
        for name, column in zip(("params", "grads", "buffers", "sizes"), zip(*part)):
            table[name][0, : len(part)] = column
        ends = list(accumulate(ceil_div(size, chunk) for *_, size in part))
        table["chunk_ends"][0, : len(part)] = ends
        yield table, start, len(part), ends[-1]


def _sort(group: dict[str, Any], entries: list[Entry]) -> tuple[dict[Any, list[Entry]], list[Entry], str]:
    """What the kernel serves, by device, dtype and whether a buffer is wanted yet; the rest, and why (the first reason)."""
    served: dict[Any, list[Entry]] = {}
    rest: list[Entry] = []
    whole = _why_not_group(group)
    reasons = []
    for entry in entries:
        reason = whole or _why_not(*entry)
        if reason is None:
            param, _, buffer = entry
            first = buffer is None and group["momentum"] != 0
            served.setdefault((param.device, param.dtype, first), []).append(entry)
        else:
            rest.append(entry)
            reasons.append(reason)
    return served, rest, reasons[0] if reasons else ""


def _why_not_group(group: dict[str, Any]) -> str | None:
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
    return None


def _why_not(param: Tensor, grad: Tensor, buffer: Tensor | None) -> str | None:
    """Why the kernel cannot read these tensors as flat arrays of one dtype; None where it can."""
    if type(param) not in _PLAIN or type(grad) is not Tensor:
        return f"a parameter is a {type(param).__name__} with a gradient that is a {type(grad).__name__}"
    if param.device.type not in executors:
        return f"tensors on {param.device.type}"
    if param.layout is not torch.strided or grad.layout is not torch.strided:
        return "not a dense layout"
    dtype, buffer = param.dtype, param if buffer is None else buffer
    if dtype not in _SERVED or grad.dtype is not dtype or buffer.dtype is not dtype:
        return f"a parameter of {dtype}, a gradient of {grad.dtype}"
    if not param.get_device() == grad.get_device() == buffer.get_device():
        return "parameter, gradient and momentum buffer are on different devices"
    if param.is_neg() or grad.is_neg() or buffer.is_neg():
        return "negative bit"
    if param.is_contiguous() and grad.is_contiguous() and buffer.is_contiguous():
        return None
    return (
        None if laid_out_alike((param, grad, buffer)) else "parameter, gradient and momentum buffer differ in strides"
    )


def laid_out_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors, of one shape, are dense and hold their elements in the same order."""
    if all(t.is_contiguous() for t in tensors):
        return True
    strides = tensors[0].stride()
    # a copy keeps the strides of a dense tensor, and of no other
    dense = torch.empty_like(tensors[0], device="meta").stride() == strides
    return dense and all(t.stride() == strides for t in tensors)


def _learning_rate(lr: Any, device: torch.device, dtype: torch.dtype) -> tuple[float, Tensor | None]:
    """As a number, or where it lies on the device as a tensor of the type that `dtype` is computed in: no wait for it."""
    if isinstance(lr, Tensor) and lr.device == device:
        return 0.0, lr.to(torch.float64 if dtype is torch.float64 else torch.float32)
    return float(lr), None


def _on(device: torch.device, scaler: Tensor | None) -> Tensor | None:
    """What a GradScaler gave, as one fp32 number on `device`."""
    return None if scaler is None else scaler.to(device, torch.float32)
