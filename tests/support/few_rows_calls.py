"""Calls of products of few rows, by every instance of their kernels, beside PyTorch in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gemms
import torch

import cupyops
from cupyops._dispatch import few_rows
from cupyops._dispatch.gpu import assume_gpu


@contextmanager
def asked(device: Any, operator: str = "linear", **card: int) -> Iterator[None]:
    """Calls inside take few rows; on the CPU as on a card with so few multiprocessors that k is shared where it may be."""
    card = {"shared": 232448, "multiprocessors": 8} | card if torch.device(device).type == "cpu" else card
    with cupyops.use_form(f"{operator}:few_rows"), assume_gpu(**card):
        yield


def calls(dtype: torch.dtype, device: str) -> Iterator[Callable[[], None]]:
    """Every instance, with columns and k that fill no tile and no step, and each activation."""
    if dtype not in few_rows.DTYPES:
        return
    for tuned in few_rows.BY_MMA if dtype in few_rows.HALF else few_rows.BY_FMA:
        for rows in (tuned.rows, max(1, tuned.rows - 3)):
            yield partial(_activated, rows, "gelu", dtype, device)
    yield partial(_activated, 40, "none", dtype, device)
    for index, activation in enumerate(gemms._FUNCTIONS):
        yield partial(_activated, 1 + 3 * index, activation, dtype, device)
    for index, activation in enumerate(cupyops._dispatch.epilogues.GATES):
        yield partial(_gated, 2 + 11 * index, activation, dtype, device)


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
