"""What the tests of matmul, linear and conv2d share: every tile of their kernels at any size."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cupyops._dispatch import gemm


@contextmanager
def forced(tile: int, *plans: Any) -> Iterator[None]:
    """Every problem that can takes this tile, whatever its size, and splits k in three where that is long enough.

    `plans` are the functions that keep launches by geometry; they forget them before and after.
    """

    def choose(m, n, k, batches, dtype, sms, wide=False):
        splits = min(3, max(1, k // 32))
        k_split = -(-max(k, 1) // (32 * splits)) * 32
        return min(tile, gemm.WIDE if wide else 128), max(1, -(-k // k_split)), k_split

    forget(plans)
    try:
        with (
            mock.patch.object(gemm, "choose", choose),
            mock.patch.object(gemm, "_device", return_value=(64, gemm._WIDE_SHARED)),
        ):
            yield
    finally:
        forget(plans)


def forget(plans: Any) -> None:
    """Empty the caches."""
    for plan in plans:
        plan.cache_clear()
