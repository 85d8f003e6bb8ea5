"""The checks in the habits of a framework's test class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._kernel.kernel import FLOATING
from ..errors import InputError
from .call import Call, Function
from .checker import check
from .report import Report
from .reproduce import tensor
from .target import target
from .tolerance import Tolerance, name

Shape = tuple[int, ...]
Shapes = Shape | Sequence[Shape]  # of one tensor, or of each tensor of a call

# A vector, rows with a tail, several dimensions, a single element, no element, no dimension.
SHAPES: tuple[Shape, ...] = ((7,), (3, 33), (2, 3, 4), (1, 1), (0, 3), ())


class OperatorTester:
    """Holds one operator to its reference, over shapes and dtypes.

    Args:
        op: as `check` takes it.
        reference: the same function in plain PyTorch; not needed for a cupyops operator.
        arguments: makes the arguments of a call of its tensors: `lambda x: (x, 1)` for a softmax over dimension 1. By
            default the tensors are the arguments.
        kwargs: keyword arguments of every call.
        tolerance, backends, seed: as for `check`.

    Each method returns its reports and raises `AssertionError` with all that failed.

    Example:
        >>> tester = cupyops.testing.OperatorTester(cupyops.relu, torch.relu)
        >>> reports = tester.test_forward([(3, 5), (0, 3)], torch.float32)
        >>> reports = tester.test_backward([(3, 5)])
    """

    __test__ = False  # pytest: a class to use, not one to collect

    def __init__(
        self,
        op: Function,
        reference: Function | None = None,
        *,
        arguments: Callable[..., Sequence[Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        tolerance: Tolerance | None = None,
        backends: str | Iterable[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.target = target(op, reference)
        self.op, self.reference = op, reference
        self.arguments = arguments or (lambda *tensors: tensors)
        self.kwargs = kwargs or {}
        self.options: dict[str, Any] = {"tolerance": tolerance, "backends": backends, "seed": seed}

    def test_forward(self, shapes: Iterable[Shapes], dtype: torch.dtype = torch.float32) -> list[Report]:
        """The results alone, for tensors of each of these shapes."""
        return self._test(shapes, [dtype], requires_grad=False, only="accuracy")

    def test_backward(self, shapes: Iterable[Shapes], dtype: torch.dtype = torch.float32) -> list[Report]:
        """Results and gradients."""
        return self._test(shapes, [dtype], requires_grad=True, only="accuracy")

    def test_all(
        self, shapes: Iterable[Shapes] | None = None, dtypes: Iterable[torch.dtype] = FLOATING, **options: Any
    ) -> list[Report]:
        """Results and gradients in every dtype, and every hazard in the first.

        Args:
            shapes: by default `SHAPES`, the same for all tensors, where the reference takes them.
            dtypes: all floating-point ones by default.
            options: further ones of `check`, such as `skip`.
        """
        dtypes = list(dtypes)
        chosen = self._usual_shapes() if shapes is None else list(shapes)
        reports = self._reports(chosen, dtypes, requires_grad=True, only="accuracy")
        return _all_passed(reports + self._reports(chosen, dtypes[:1], requires_grad=True, **options))

    # --- how ---

    def _test(self, shapes: Iterable[Shapes], dtypes: Iterable[torch.dtype], **options: Any) -> list[Report]:
        return _all_passed(self._reports(shapes, dtypes, **options))

    def _reports(
        self, shapes: Iterable[Shapes], dtypes: Iterable[torch.dtype], requires_grad: bool, **options: Any
    ) -> list[Report]:
        calls = [self._call(one, dtype, requires_grad) for one in shapes for dtype in dtypes]
        if not calls:
            raise InputError("shapes and dtypes are empty, expected some")
        together = {"reference": self.reference, **self.options, **options}
        return [check(self.op, call.args, call.kwargs, **together) for call in calls]

    def _call(self, shapes: Shapes, dtype: torch.dtype, requires_grad: bool) -> Call:
        each: Any = [shapes] if all(isinstance(one, int) for one in shapes) else shapes
        made: list[Tensor] = [
            tensor(tuple(shape), name(dtype), number, requires_grad=requires_grad) for number, shape in enumerate(each)
        ]
        return Call(*self.arguments(*made), **self.kwargs)

    def _usual_shapes(self) -> list[Shapes]:
        operator = self.target.operator
        count = 1 if operator is None else max(1, len(operator.definition.required))
        found: list[Shapes] = []
        for shape in SHAPES:
            try:
                self._call([shape] * count, torch.float32, False).of(self.target.reference)
            except (RuntimeError, ValueError, TypeError, IndexError):
                continue
            found.append([shape] * count)
        if not found:
            raise InputError(
                f"{self.target.name} takes none of {', '.join(map(str, SHAPES))}; give test_all the shapes"
            )
        return found


def _all_passed(reports: list[Report]) -> list[Report]:
    failed = [report for report in reports if not report.passed]
    if failed:
        raise AssertionError("\n\n".join(map(str, failed)))
    return reports
