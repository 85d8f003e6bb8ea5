"""Calls of products of few rows, by every instance of their kernels, beside PyTorch in float64."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gemms
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._dispatch.gemm import few_rows, few_rows_layers
from cupyops._kernel.kernel import capability

AMPERE = 166912  # bytes of shared memory of a block


@contextmanager
def asked(device: Any, operator: str = "linear", **card: int) -> Iterator[None]:
    """Calls inside take few rows; on the CPU as on a card like Hopper's, or Ampere's where that is simulated."""
    if torch.device(device).type == "cpu":
        shared = AMPERE if capability(torch.device("cpu")) == 8 else 232448
        card = {"shared": shared, "multiprocessors": 8} | card
    with cupyops.use_form(f"{operator}:few_rows"), assume_gpu(**card):
        yield


def calls(dtype: torch.dtype, device: str) -> Iterator[Callable[[], None]]:
    """Every instance, with columns and k that fill no tile and no step, and each activation."""
    if dtype not in few_rows.DTYPES:
        return
    for tuned in few_rows.BY_MMA if dtype in few_rows.HALF else few_rows.BY_FMA:
        for rows in (tuned.rows, max(1, tuned.rows - 3)):
            yield partial(_activated, rows, "gelu", dtype, device)
        yield partial(_gated, tuned.rows, "silu", dtype, device)
        norm = dtype in few_rows.NORMALISED
        if norm:
            yield partial(_normalised, tuned.rows, dtype, device)
        if device == "cpu" and tuned.shared(norm) > AMPERE:
            yield partial(_on_hopper, tuned.rows, dtype, norm)
    yield partial(_activated, 40, "none", dtype, device)
    for index, activation in enumerate(gemms._FUNCTIONS):
        yield partial(_activated, 1 + 3 * index, activation, dtype, device)
    for index, activation in enumerate(cupyops._dispatch.gemm.epilogues.GATES):
        yield partial(_gated, 2 + 11 * index, activation, dtype, device)


def _on_hopper(rows: int, dtype: torch.dtype, norm: bool) -> None:
    """What takes more shared memory than there is elsewhere, whatever is simulated."""
    with cupyops.simulate("sm_90"):
        _activated(rows, "silu", dtype, "cpu")
        if norm:
            _normalised(rows, dtype, "cpu")


def _activated(rows: int, activation: str, dtype: torch.dtype, device: str) -> None:
    shapes: list[Any] = [((rows, 168), (75, 168), (75,), (rows, 75)), ((rows, 40), (70, 40), None)]
    for one in shapes:
        with asked(device, "linear_act"):
            gemms.compare(cupyops.linear_act, gemms.linear_act, one, activation, dtype, device)


def _gated(rows: int, activation: str, dtype: torch.dtype, device: str) -> None:
    shapes: list[Any] = [((rows, 168), (75, 168), (75, 168)), ((rows, 40), (2 * 67, 40), None)]
    for one in shapes:
        with asked(device, "gated_linear"):
            gemms.compare(cupyops.gated_linear, gemms.gated_linear, one, activation, dtype, device)


def normalised(
    x: Tensor, norm: Tensor, eps: float, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """Linear layers after an RMS norm, by PyTorch."""
    y = F.rms_norm(x, (x.shape[-1],), norm, eps)
    return [F.linear(y, weight, bias) for weight, bias in zip(weights, biases)]


def normalised_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, weight_up: Tensor, activation: str) -> Tensor:
    """A gated layer after an RMS norm, by PyTorch."""
    return gemms.gated_linear(F.rms_norm(x, (x.shape[-1],), norm, eps), weight, weight_up, activation)


def compare(found: Sequence[Tensor], by_torch: Callable[..., Sequence[Tensor]], given: Sequence[Any]) -> None:
    """Results beside PyTorch in float64: off by twice what PyTorch is at most, or by two roundings of a result near 1."""
    exact = by_torch(*tree_map_only(Tensor, Tensor.double, given))
    for ours, theirs, right in zip(found, by_torch(*given), exact, strict=True):
        least = torch.finfo(ours.dtype).eps * right.abs().max().clamp(min=1)
        assert (ours.double() - right).abs().max() <= 2 * max((theirs.double() - right).abs().max(), least)


def _normalised(rows: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    shapes = (rows, 168), (168,), (75, 168), (33, 168), (33,)
    x, norm, first, second, bias = (torch.randn(shape, device=device) for shape in shapes)
    given = x, norm, 1e-5, [first / 13, second / 13], [None, bias]
    given = tree_map_only(Tensor, lambda one: one.to(dtype), given)
    with asked(device):
        compare(few_rows_layers.linears(*given), normalised, given)
    gate = given[3][0]
    given = *given[:3], gate, gate.flip(0), "silu"
    with asked(device, "gated_linear"):
        compare(few_rows_layers.gated_linear(*given), lambda *args: [normalised_gate(*args)], given)
