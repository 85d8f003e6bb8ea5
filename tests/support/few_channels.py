"""What the tests of conv2d and conv2d_relu_max_pool2d share: every form of the kernels for few channels."""

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


def forms(operator: str) -> list[str]:
    """The forms for few channels."""
    return [name for name in form_walk.names(operator) if operator != "conv2d" or name.startswith("direct")]


def compare(contract: type[OperatorContract], operator: str, form: str, sample: Sample) -> bool:
    """With that form, if it can compute the sample."""
    return form_walk.computes(operator, form, lambda: contract().compare(sample, f"{form}, {sample!r}"))
