"""Every form of the kernels of conv2d for few channels, for its tests and those of the simulator."""

from collections.abc import Iterator

import form_walk
from contract import Make, OperatorContract, Sample


def samples(make: Make) -> Iterator[Sample]:
    """One, few and many channels and filters, which FMAs and tensor cores deal out differently.

    Of -1, 0 and 1, whose sums are exact: which of several values is the largest is no matter of rounding.
    """

    def whole(*shape: int) -> object:
        return make(*shape).detach().round().clamp(-1, 1).requires_grad_(make.requires_grad)

    for channels, filters, taps in [(1, 3, 3), (3, 1, 3), (17, 35, 3), (1, 3, 5), (3, 1, 5), (9, 6, 5)]:
        yield Sample(whole(2, channels, 4, 5), whole(filters, channels, taps, taps), whole(filters), padding=taps // 2)


def forms() -> list[str]:
    """Names of the forms for few channels."""
    return [name for name in form_walk.names("conv2d") if name.startswith("direct")]


def compare(contract: type[OperatorContract], form: str, sample: Sample) -> bool:
    """Compare with that form, if it can compute the sample."""
    return form_walk.computes("conv2d", form, lambda: contract().compare(sample, f"{form}, {sample!r}"))
