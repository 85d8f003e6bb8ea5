"""Rules of lowering, by overload: what a call of ATen means in lazy values.

A rule is a function of the `Builder`, the `Result` (or list of them) that it is to give, and the arguments by their names in
the schema (`self` is called `x`). An argument that it does not name has its default, else the call stays PyTorch's;
one with `**operands` takes all.
"""

from ..builder import RULES as RULES
from . import indexing, pointwise, reductions, views  # noqa: F401
