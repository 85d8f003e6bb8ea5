"""float16 and bfloat16 arithmetic on their bits, one number in 16 or two in 32.

Sums and products are computed in float32, which has more than twice their precision and two bits: rounding there and
then once more is rounding once. (Where a product of bfloat16 numbers is too small for float32 it is too small by far
for bfloat16.) The fused multiply-add needs float64, and rounds to odd where the sum may be taken for a tie.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .exact import odd_sum
from .finish import chain, relu32, saturate
from .formats import BF16, F16, Format, encode, narrow_bf16, narrow_f16, widen_bf16, widen_f16
from .lanes import choose, packed, repair
from .operation import Function

_U16 = np.uint16
_SIGN = _U16(0x8000)


@dataclass(frozen=True)
class Half:
    """One of the two formats: how it is made float32 and back."""

    form: Format
    widen: Callable[[Any], Any]
    narrow: Callable[[Any], Any]
    infinity: np.uint16
    doubt: np.uint32  # a float32 half way between two numbers of the format is zero in these bits

    def flush(self, code: Any) -> Any:
        """Subnormal numbers become zeros of their sign."""
        normal = (code & self.infinity) != 0
        return code & choose(normal, _U16(0xFFFF), _SIGN)

    def lift(self, function: Function) -> Function:
        """A float32 function as one of codes."""
        return lambda *codes: self.narrow(function(*map(self.widen, codes)))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        product = np.multiply(self.widen(a), self.widen(b), dtype=np.float64)
        addend = self.widen(c)
        total = np.add(product, addend, dtype=np.float64).astype(np.float32)
        # Rounding three times goes wrong only by way of a tie, which has few bits.
        doubtful = ((total.view(np.uint32) & self.doubt) == 0) & (total != 0)
        return repair(self.narrow(total), doubtful, self._exact_sum, product, addend)

    def _exact_sum(self, product: Any, addend: Any) -> Any:
        return encode(odd_sum(product, addend), self.form).astype(_U16)


HALVES = {
    "f16": Half(F16, widen_f16, narrow_f16, _U16(0x7C00), np.uint32((1 << 12) - 1)),
    "bf16": Half(BF16, widen_bf16, narrow_bf16, _U16(0x7F80), np.uint32((1 << 15) - 1)),
}


def half_of(name: str) -> Half:
    """The format of "f16", "f16x2", "bf16" or "bf16x2"."""
    return HALVES[name.removesuffix("x2")]


def for_type(name: str, function: Function) -> Function:
    """A function of 16-bit codes as one of what the type holds: the code, or two of them in a word."""
    return packed(function, np.uint16, np.uint32) if name.endswith("x2") else function


def finish(name: str, *, ftz: bool = False, sat: bool = False, relu: bool = False) -> Function | None:
    """Return the function that applies modifiers to a result in codes."""
    half = half_of(name)
    return chain(half.flush if ftz else None, half.lift(saturate) if sat else None, half.lift(relu32) if relu else None)
