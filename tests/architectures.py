"""For which architectures the kernels have code of their own."""

import re

from cupyops.compilation.source import Source

_ASKED = re.compile(r"__CUDA_ARCH__( >= (\d+))?")


def own_code(source: Source, low: int, high: int) -> bool:
    """Whether the preprocessor may find another text for sm_`high` than for sm_`low` in `source` and what it includes."""
    asked = [number for text in (source.text, *source.includes.values()) for _, number in _ASKED.findall(text)]
    return any(not number or low < int(number) // 10 <= high for number in asked)
