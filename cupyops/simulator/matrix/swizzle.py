"""The swizzles of shared memory that tensor copies write and `wgmma` reads.

Within each line of 128 bytes, chunks of 16 bytes are exchanged: the number of the chunk is xor-ed with the number of the
line, as far as the span (32, 64 or 128 bytes) reaches. The pattern follows the address in shared memory, so that it
repeats after 256, 512 or 1024 bytes.
"""

from typing import Any

import numpy as np

SPANS = (0, 32, 64, 128)  # bytes; 0 is no swizzle


def swizzled(address: np.ndarray, span: int, first_line: Any = 0) -> np.ndarray:
    """Map a byte's address (int64) to its swizzled one. `first_line`: the line (modulo 8) where the pattern starts."""
    if span == 0:
        return address
    line = (address >> 7) - first_line
    return address ^ ((line & (span // 16 - 1)) << 4)
