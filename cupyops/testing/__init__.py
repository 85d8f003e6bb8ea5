"""The contract that every operator is held to, for anyone's operator: `cupyops.testing.check(op, args)`.

    >>> report = cupyops.testing.check(my_op, [torch.randn(4, 300, requires_grad=True)])
    >>> print(report)
    >>> report.raise_if_failed()

`OperatorTester` is the same in the habits of a framework's test class.
"""

from .._dispatch.core.gpu import assume_gpu
from .._util.near import refuser as _refuser
from .call import Call
from .checker import Interrupted, check
from .hazard import Failure, Hazard, NotApplicable, hazards
from .report import Report, Row
from .reproduce import tensor
from .tester import OperatorTester
from .tolerance import Tolerance

__all__ = [
    "Call",
    "Failure",
    "Hazard",
    "Interrupted",
    "NotApplicable",
    "OperatorTester",
    "Report",
    "Row",
    "Tolerance",
    "assume_gpu",
    "check",
    "hazards",
    "tensor",
]

__getattr__ = _refuser(__name__, __all__)
