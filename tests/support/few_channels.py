"""What the tests of conv2d and conv2d_relu_max_pool2d share: the launches of many images, by few."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from contract import Make, OperatorContract, Sample

from cupyops._dispatch import small_conv

PLANS = (
    small_conv.forward,
    small_conv.backward,
    small_conv.direct,
    small_conv.backward_weight,
    small_conv.direct_weight,
)


@contextmanager
def much(**more: int) -> Iterator[None]:
    """Small tensors as if there were much of them: a block for several tiles, threads with many filters."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ({"FEW": 1, "MANY": 1, "BLOCKS": 2, "MMA_BLOCKS": 2} | more).items():
            patch.setattr(small_conv, name, value)
        for plan in PLANS:
            plan.cache_clear()
        try:
            yield
        finally:
            for plan in PLANS:
                plan.cache_clear()


def samples(make: Make) -> Iterator[Sample]:
    """For `much`: one, few and many channels and filters, which FMAs and tensor cores deal out differently.

    Of -1, 0 and 1, whose sums are exact: which of several values is the largest is no matter of rounding.
    """

    def whole(*shape: int) -> object:
        return make(*shape).detach().round().clamp(-1, 1).requires_grad_(make.requires_grad)

    for (channels, filters), taps in itertools.product([(1, 1), (3, 3), (3, 17), (17, 3), (17, 17)], (3, 5)):
        yield Sample(whole(3, channels, 4, 5), whole(filters, channels, taps, taps), whole(filters), padding=taps // 2)


def compare(contract: type[OperatorContract], sample: Sample) -> None:
    with much():
        contract().compare(sample, f"many, {sample!r}")
