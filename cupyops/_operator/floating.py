"""`operator` for the library's own, whose kernels serve the four floating-point dtypes: others take the reference."""

from __future__ import annotations

import functools

from .._kernel.kernel import FLOATING
from .define import operator as of_any_dtype

operator = functools.partial(of_any_dtype, dtypes=FLOATING)
