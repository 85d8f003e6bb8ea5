"""Result of `check`: a row for each hazard on each backend."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "n/a"
# how a reason begins for which nothing else can be tried, and one for which nothing that is tried says anything of kernels
CALL_FAILS, NO_KERNEL = "the call itself fails", "no kernel ran:"

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LEAST = 24  # columns that a reason gets, however narrow the terminal


@dataclass(frozen=True)
class Row:
    """One hazard on one backend.

    Attributes:
        hazard, backend: which, and where.
        verdict: "pass", "fail" or "n/a".
        reason: what was found, or why the hazard cannot be tried.
        expectation: what must happen.
        smallest: the smallest call that was found to fail.
        reproduction: one line of Python that fails the same way.
        seconds: that it took, without the search for the smallest.
    """

    hazard: str
    backend: str
    verdict: str
    reason: str = ""
    expectation: str = ""
    smallest: str = ""
    reproduction: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """The rows of one `check`; `print` it for a table.

    Attributes:
        name, call, seed: what was checked.
        rows: one for each hazard on each backend.
        unseen: why no kernel was seen at work; "" where one was, or where `backends` asked for the reference alone.
        interrupted: whether it was stopped before its last row.
    """

    name: str
    call: str
    seed: int
    rows: list[Row] = field(default_factory=list)
    unseen: str = ""
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        """True if no row failed, some passed, a kernel was seen at work, and all was tried."""
        tried = not self.failures and any(row.verdict == PASS for row in self.rows)
        return tried and not self.unseen and not self.interrupted

    @property
    def failures(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if row.verdict == FAIL]

    def folded(self) -> list[Row]:
        """The rows; of those of a backend whose call itself fails or launches no kernel, one for all."""
        together: dict[object, list[Row]] = {}
        for number, row in enumerate(self.rows):
            is_one_of_many = row.verdict == NOT_APPLICABLE and row.reason.startswith((CALL_FAILS, NO_KERNEL))
            together.setdefault((row.backend, row.reason) if is_one_of_many else number, []).append(row)
        return [_one_for_all(rows) for rows in together.values()]

    def raise_if_failed(self) -> None:
        """Raise an `AssertionError` with the report, unless it has `passed`."""
        if not self.passed:
            raise AssertionError(str(self))

    def summary(self) -> str:
        """`18 passed, 1 failed, 4 not applicable`, and what else keeps the report from passing."""
        counts = Counter(row.verdict for row in self.rows)
        text = f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[NOT_APPLICABLE]} not applicable"
        text += f"; not passed: no kernel was seen at work: {self.unseen}" if self.unseen else ""
        return text + ("; not passed: interrupted" if self.interrupted else "")

    def __str__(self) -> str:
        width = max(60, min(shutil.get_terminal_size((120, 40)).columns, 160))
        rows = self.folded()
        cells = [(row.hazard, row.backend, row.verdict) for row in rows]
        sizes = [max(map(len, column)) for column in zip(*cells)] or [0]
        left = sum(sizes) + 6
        lines = [f"{self.name}({self.call})  seed {self.seed}"]
        for row, texts in zip(rows, cells):
            start = "  ".join(text.ljust(size) for text, size in zip(texts, sizes))
            reason = row.reason.partition("\n")[0] if row.verdict != FAIL else row.reason
            lines += _hanging(start, reason, left, width)
            if row.verdict == FAIL:
                lines += [" " * left + "smallest:  " + row.smallest] if row.smallest else []
                lines += [" " * left + "reproduce: " + row.reproduction] if row.reproduction else []
        return "\n".join([*lines, self.summary()])

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        rows = [asdict(row) for row in self.rows]
        return {"name": self.name, "call": self.call, "seed": self.seed, "passed": self.passed} | {
            "unseen": self.unseen,
            "interrupted": self.interrupted,
            "rows": rows,
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON text, written to `path` if one is given."""
        return _written(json.dumps(self.as_json(), indent=1) + "\n", path)

    def to_junit(self, path: str | Path | None = None) -> str:
        """The report as JUnit's XML, which CI systems read: a test case for each row; written to `path` if one is given."""
        suite = ElementTree.Element(
            "testsuite",
            name=_legal(self.name),
            tests=str(len(self.rows)),
            failures=str(len(self.failures)),
            skipped=str(sum(row.verdict == NOT_APPLICABLE for row in self.rows)),
            time=f"{sum(row.seconds for row in self.rows):.3f}",
        )
        for row in self.rows:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=_legal(f"{self.name}.{row.backend}"),
                name=row.hazard,
                time=f"{row.seconds:.3f}",
            )
            if row.verdict == FAIL:
                failure = ElementTree.SubElement(case, "failure", message=_legal(row.reason.partition("\n")[0]))
                failure.text = _legal("\n".join(filter(None, (row.reason, row.smallest, row.reproduction))))
            elif row.verdict == NOT_APPLICABLE:
                ElementTree.SubElement(case, "skipped", message=_legal(row.reason))
        ElementTree.indent(suite)
        return _written(ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n", path)


def _one_for_all(rows: list[Row]) -> Row:
    first, *others = rows
    if not others:
        return first
    return replace(first, hazard=f"{first.hazard} and {len(others)} more", seconds=sum(row.seconds for row in rows))


def _hanging(start: str, text: str, left: int, width: int) -> list[str]:
    """`start`, and `text` beside it, folded under itself."""
    folder = textwrap.TextWrapper(max(_LEAST, width - left), break_on_hyphens=False)
    folded = []
    for line in text.splitlines():
        folder.subsequent_indent = line[: len(line) - len(line.lstrip())]
        folded += folder.wrap(line) or [""]
    first, *rest = folded or [""]
    return [f"{start}  {first}".rstrip(), *(" " * left + line for line in rest)]


def _legal(text: str) -> str:
    """The text with what XML cannot hold, such as the escape character of a coloured message, shown by its number."""
    return _NO_XML.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
