"""What one test counts: by suite, how many samples passed, failed, differed as is known, or were left out, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .backends import Backend
from .known import Difference


class Score:
    """The counts of one test.

    Attributes:
        counts: plain data, for a table: {"suites": {name: {"passed", "failed", "differs", "left_out"}}, ...}.
    """

    def __init__(self, backend: Backend, row: str) -> None:
        self.counts: dict[str, Any] = {"backend": backend.name, "about": backend.describe(), "row": row}
        self.counts |= {"calls": 0, "launching": 0, "operators": [], "suites": {}}
        self._errors: list[Exception] = []

    def _suite(self, name: str) -> dict[str, Any]:
        return self.counts["suites"].setdefault(name, {"passed": 0, "failed": 0, "differs": {}, "left_out": {}})

    @contextmanager
    def sample(self, suite: str, what: str, difference: Difference | None = None) -> Iterator[None]:
        """Count what becomes of one sample; an error is kept until all are tried."""
        counts = self._suite(suite)
        try:
            yield
        except Exception as error:
            if difference is not None and difference.explains(error):
                self.differs(suite, difference.reason)
                return
            counts["failed"] += 1
            error.add_note(f"{suite}: {what}")
            self._errors.append(error)
        else:
            counts["passed"] += 1

    def differs(self, suite: str, reason: str) -> None:
        """One more sample in which we do not do what PyTorch does."""
        counts = self._suite(suite)["differs"]
        counts[reason] = counts.get(reason, 0) + 1

    def leave_out(self, suite: str, reason: str, count: int) -> None:
        """So many samples are not tried."""
        if count:
            counts = self._suite(suite)["left_out"]
            counts[reason] = counts.get(reason, 0) + count

    def called(self, operators: set[str], launched: bool) -> None:
        """One call of the function went through these operators, and launched kernels or did not."""
        self.counts["calls"] += 1
        self.counts["launching"] += launched
        self.counts["operators"] = sorted({*self.counts["operators"], *operators})

    def raise_if_failed(self) -> None:
        """All errors at once. A test that tried nothing has failed too."""
        if self._errors:
            tried = sum(suite["passed"] + suite["failed"] for suite in self.counts["suites"].values())
            raise ExceptionGroup(f"{len(self._errors)} of {tried}", self._errors)
        assert any(suite["passed"] or suite["differs"] for suite in self.counts["suites"].values()), "nothing was tried"
