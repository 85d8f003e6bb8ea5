"""SGD: torch.optim's own, with one kernel launch for all parameters of a device and dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from .._dispatch.multi_tensor import BLOCK, DEFINE
from .._kernel.kernel import FLOATING, Kernel
from .._operator.derivation import distributed
from .fused import Entry, Fused, learning_rate, written
from .plan import Batch, Group

sgd_step = Kernel("sgd.cu", "sgd_step<T>", define=DEFINE, T=FLOATING)


class SGD(Fused, torch.optim.SGD):
    """Stochastic gradient descent; as `torch.optim.SGD`: same constructor, same update, same state_dict.

    Parameters on a GPU with dense gradients of their own floating dtype (fp16, bf16, fp32, fp64) are updated by one
    kernel per device and dtype, as many as 110 of them in a launch. All else, and all where `foreach` or `fused=False`
    is asked for, is updated by PyTorch. A step may be captured in a CUDA graph, after one that made the momentum buffers.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate. A tensor on the parameters' GPU is read there at each step, from within a CUDA graph too.
        momentum, dampening, weight_decay, nesterov, maximize, foreach, differentiable, fused: as `torch.optim.SGD`.
            `fused=True` lets a `torch.amp.GradScaler` leave unscaling and skipping to the kernel, with no wait.

    Raises:
        ValueError: what `torch.optim.SGD` raises it for: a negative lr, momentum or weight_decay, and nesterov without
            momentum or with dampening.
        LaunchError: from `step()`, where it is captured in a CUDA graph and has no momentum buffers yet.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = cupyops.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
    """

    def _entries(self, group: Group) -> list[Entry]:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        buffers: list[Tensor | None] = []
        self._init_group(group, params, grads, buffers)
        return [Entry(p, g, (b,)) for p, g, b in zip(params, grads, buffers or [None] * len(params))]

    def _variant(self, group: Group, param: Tensor, state: tuple[Any, ...], step: None) -> bool:
        """Return True if this step is to make the momentum buffer."""
        return group["momentum"] != 0 and state[0] is None

    def _options(self, group: Group) -> tuple[Any, ...]:
        return (group["momentum"] != 0,)

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _lasts(self, batch: Batch) -> bool:
        return not batch.variant

    def _keeps_state(self, group: Group) -> bool:
        return bool(group["momentum"])

    def _by_kernel(self, group: Group, batch: Batch) -> None:
        device, dtype, first = batch.device, batch.dtype, batch.variant
        grad_scale, found_inf = self._scaler(device)
        momentum = float(group["momentum"])
        if first:
            if found_inf is not None and found_inf.item():
                return  # a step that is skipped makes no buffer; later ones are skipped by the kernel itself
            batch.states = [list(map(torch.empty_like, batch.grads))]
        buffers = batch.states if momentum else [None]
        written(batch.params, *(batch.states if momentum else []), batch.grads if grad_scale is not None else [])
        numbers = (momentum, 1 - group["dampening"], group["weight_decay"])
        flags = (int(first), int(group["nesterov"]), int(group["maximize"]))
        rate = learning_rate(group["lr"], device, dtype)
        for table, start, count, blocks in batch.launches(*buffers):
            sgd_step[blocks, BLOCK](
                batch.params[start], table, count, *rate, *numbers, *flags,
                grad_scale, found_inf, self._factor, T=dtype,
            )  # fmt: skip
        if first:
            for owner, buffer in zip(batch.owners, batch.states[0]):
                self._states[owner]["momentum_buffer"] = distributed.whole(buffer, owner)

    def _by_torch(self, group: Group, entries: list[Entry]) -> None:
        buffers = [entry.state[0] for entry in entries]
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")
        sgd(
            [entry.param for entry in entries],
            [entry.grad for entry in entries],
            buffers if group["momentum"] != 0 else [],
            has_sparse_grad=any(entry.grad.is_sparse for entry in entries),
            **self._scaler_for_torch(),
            **{name: group[name] for name in names},
        )
        if group["momentum"] != 0:
            for entry, buffer in zip(entries, buffers):
                self._states[entry.param]["momentum_buffer"] = buffer
