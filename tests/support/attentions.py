"""What the tests of attention share: calls that reach every form of each width and bounds, compared with float64."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu, gpu

HOPPER = {"shared": 232448, "shared_total": 233472, "multiprocessors": 2}  # few, so that each block has several tiles
A100 = {**HOPPER, "shared": 166912, "shared_total": 167936}
SMALLER = {**HOPPER, "shared": 101376, "shared_total": 102400}
CARDS = {"sm_80": A100, "sm_90": HOPPER}
WIDTHS = (40, 64, 96, 128)
BOUNDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"window": (30, 20)},
}
FORMS = ("forward:wgmma", "forward:mma", "backward:wgmma", "backward:mma_64", "backward:mma_32", "backward:mma_16")


def sees(queries: int, keys: int, causal: str | None = None, window: tuple[Any, Any] | None = None) -> Tensor:
    """(queries, keys): which key each query sees."""
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (0 if causal == "top_left" else keys - queries)
    left, right = (None, None) if window is None else window
    right = 0 if causal is not None else right
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if left is None else seen & (distance >= -left)
    return seen if right is None else seen & (distance <= right)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    change: Callable[[Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
    drop: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, lse) by PyTorch's products, softmax and logsumexp over the keys that are seen; zeros and -inf where none is.

    Sinks are one more column of scores, whose value is 0. drop: what weights are multiplied by.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(wide) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if change is None else change(scores)
    unseen = ~seen.to(q.device)
    scores = torch.where(unseen, -math.inf, scores)
    some = ~(scores == -math.inf).all(-1)
    scores = torch.where(some[..., None], scores, 0.0)  # what a row that sees none is computed of does not matter
    if sinks is not None:
        column = sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
        lse = torch.where(some, scores.logsumexp(-1), column.squeeze(-1))
    else:
        lse = torch.where(some, scores.logsumexp(-1), -math.inf)
    weights = torch.where(some[..., None], scores.softmax(-1), 0.0)
    return (weights if drop is None else weights * drop).to(v.dtype) @ v, lse


def usual(softcap: float | None, alibi_slopes: Tensor | None, apart: int, scores: Tensor) -> Tensor:
    """Scores, capped and with slopes where there are such; query i is at key i + apart."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        queries, keys = (torch.arange(size, device=scores.device) for size in scores.shape[2:])
        distance = (keys - queries[:, None] - apart).abs()
        scores = scores - alibi_slopes.to(scores.dtype)[..., None, None] * distance
    return scores


def tensors(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Iterator[Tensor]:
    """q, k and v for (batch, heads, kv_heads, queries, keys, width): heads of a packed projection, transposed and plain.

    A width of values may follow.
    """
    batch, heads, kv_heads, queries, keys, width, *of_values = shape
    torch.manual_seed(seed)
    yield torch.randn(batch, queries, heads, width).transpose(1, 2).to(device, dtype)
    if of_values:
        both = (width, of_values[0])
        yield from (torch.randn(batch, keys, kv_heads, wide).to(device, dtype).transpose(1, 2) for wide in both)
        return
    yield from (torch.randn(batch, keys, 2, kv_heads, width).to(device, dtype)[:, :, i].transpose(1, 2) for i in (0, 1))


def compare(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    forms: tuple[str, ...] = (),
    scale: float | None = None,
    inputs: tuple[Tensor, ...] | None = None,
    lse_grad: bool = True,
    seen: Tensor | None = None,
    change: Callable[[Tensor], Tensor] | None = None,
    variant: dict[str, Any] | None = None,
    on: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Forward with its log-sum-exp, and every gradient, beside float64; returned as well.

    variant: what else attention is given; `change` of scores and `seen` are what it means. P and dS are rounded to the half
    type, and sums of such products may be as far off as that: by the largest of a tensor. on: the card, on the CPU; by
    default one of the architecture that is simulated.
    """
    given = tuple(tensors(shape, dtype, device)) if inputs is None else inputs
    mine, wide = ([f(x).detach().requires_grad_() for x in given] for f in (Tensor.clone, Tensor.double))
    bounds = sees(given[0].shape[2], given[1].shape[2], **options)
    truth = eager(*wide, bounds if seen is None else bounds & seen, scale, change)
    torch.manual_seed(1)
    grads = [torch.randn_like(x, dtype=dtype) for x in truth]
    grads[1] = grads[1].float() if lse_grad else torch.zeros_like(truth[1], dtype=torch.float32)
    on = (HOPPER if gpu(torch.device("cpu")).capability == 9 else A100) if on is None else on
    card = assume_gpu(**on) if device == "cpu" else contextlib.nullcontext()
    with card, cupyops.use_form(*(f"attention.{form}" for form in forms)):
        results = list(cupyops.attention(*mine, scale=scale, return_lse=True, **options, **(variant or {})))
        results += torch.autograd.grad(results, mine, grads)
    expected = [*truth, *torch.autograd.grad(truth, wide, [g.double() for g in grads])]
    for name, ours, right in zip(("y", "lse", "grad_q", "grad_k", "grad_v"), results, expected):
        bound = 2e-6 if name == "lse" else 4 * torch.finfo(dtype).eps
        assert torch.equal(ours.isfinite(), right.isfinite()), (name, shape, options)
        apart, most = (ours.double() - right).nan_to_num(), right.nan_to_num(neginf=0.0)
        assert not ours.numel() or apart.abs().max() <= bound * max(most.abs().max(), 1e-3), (
            f"{name} of {shape}, {options}, {forms}: {apart.abs().max():.3g} of {most.abs().max():.3g}"
        )
    return tuple(results)


def _by(
    forms: tuple[str, ...],
    width: int,
    bounds: str,
    dtype: torch.dtype,
    device: str,
    on: dict[str, Any] = HOPPER,
    arch: str | None = None,
) -> None:
    """arch: which to simulate, where others have too little shared memory."""
    tile = 192 if width <= 64 else 128
    shape = (1, 2, 1, tile + 70, 200, width) if "forward:wgmma" in forms else (1, 2, 1, 140, 75, width)
    shape = (*shape, 128) if width == 192 else shape
    with contextlib.nullcontext() if arch is None or device != "cpu" else cupyops.simulate(arch):
        compare(shape, dtype, device, forms=forms, on=on, **BOUNDS[bounds])


def calls(*forms: tuple[str, ...]) -> list[Any]:
    """(dtype, device) -> a comparison: of each width that there are kernels for and each kind of bounds."""
    wide = ("forward:mma", "backward:mma_32")
    kinds = itertools.product(forms, (64, 128), ("full", "causal", "window"))
    return [partial(_by, of, width, bounds) for of, width, bounds in kinds if width > 64 or of != wide]


CALLS = {
    "mma": [
        *calls(("forward:mma", "backward:mma_64"), ("forward:mma", "backward:mma_32")),
        *(
            partial(_by, ("forward:mma", "backward:mma_64"), 128, bounds, on=A100)
            for bounds in ("full", "causal", "window")
        ),
        partial(_by, ("forward:mma", "backward:mma_16"), 256, "full"),
        partial(_by, ("forward:mma", "backward:mma_16"), 200, "window", on=SMALLER),
    ],
    "mma_once": [
        partial(_by, ("forward:mma", "backward:mma_once"), width, bounds, on=on, arch="sm_90" if on is HOPPER else None)
        for on, width, bounds in (
            (HOPPER, 64, "causal"),
            (A100, 64, "window"),
            (SMALLER, 64, "full"),
            *((A100, 96, bounds) for bounds in ("full", "causal", "window")),
            (HOPPER, 128, "full"),
            (A100, 128, "window"),
            (HOPPER, 256, "full"),
            (A100, 256, "causal"),
        )
    ],
    "wgmma": [
        *calls(("forward:wgmma", "backward:wgmma")),
        *(
            partial(_by, ("forward:wgmma", "backward:wgmma"), *of)
            for of in ((96, "window"), (256, "full"), (192, "causal"))
        ),
    ],
    "wgmma_once": [
        *calls(("forward:wgmma", "backward:wgmma_once")),
        *(
            partial(_by, ("forward:wgmma", "backward:wgmma_once"), *of)
            for of in ((96, "window"), (256, "full"), (192, "causal"))
        ),
    ],
}
