"""The figures of a run, and how they compare with another run's; `table.py` keeps them as a file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .case import UNITS, Case
from .timing import Time

WAYS = ("forward", "backward", "together")
BASE = ("eager", "compile")  # what PyTorch itself has
BEHIND = 0.95  # the speed-up under which it is none
NEAR = 0.85  # of the rate of a rounder size, under which an odd one is behind
MOVED = 0.03  # by which a figure has to change before another takes its place in a file


@dataclass(frozen=True)
class Figure:
    """Microseconds: median and quartiles."""

    us: float
    low: float
    high: float
    samples: int

    def or_old(self, old: Figure | None) -> Figure:
        """The old one, unless this has moved."""
        return old if old is not None and abs(self.us - old.us) <= MOVED * old.us else self

    @staticmethod
    def of(time: Time) -> Figure:
        """Make a figure of a time."""
        return Figure(rounded(time.median), rounded(time.low), rounded(time.high), time.samples)


def rounded(value: float) -> float:
    """Four significant digits, but no part of an integer less."""
    digits = 3 - math.floor(math.log10(abs(value))) if value else 0
    return round(value, max(0, digits))


@dataclass
class Row:
    """One case: figures[who][way], bytes of memory, who is left out, with the reason; whether results were compared; what is
    said of figures that are wanted and not reached; ours at a rounder size."""

    op: str
    size: str
    dtype: str
    unit: str
    work: dict[str, tuple[float, float]]  # way -> (bytes, flops)
    want: dict[str, float | None]
    figures: dict[str, dict[str, Figure]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    compared: bool = True
    lost: str = ""
    beside: Row | None = None

    @staticmethod
    def of(case: Case) -> Row:
        """A row without figures."""
        return Row(
            case.op, case.size, case.dtype_name, case.unit,
            {way: case.work(way) for way in WAYS}, {way: case.wanted(way) for way in WAYS},
            compared=case.same, lost=case.lost,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Name in tables and for `--compare`."""
        return f"{self.op} {self.size} {self.dtype}"

    def ways(self) -> list[str]:
        """The ways that ours was measured."""
        return [way for way in WAYS if way in self.figures.get("ours", {})]

    def rate(self, who: str, way: str) -> float | None:
        """Rate in the unit of the row; None where there is no figure."""
        figure = self.figures.get(who, {}).get(way)
        if figure is None:
            return None
        moved, flops = self.work[way]
        return figure.us if self.unit == "us" else (moved / 1e3 if self.unit == "GB/s" else flops / 1e6) / figure.us

    def speedup(self, way: str, against: Iterable[str] = BASE) -> float | None:
        """Ours against the fastest of `against`; None where none of them has a figure."""
        others = [f.us for who in against if (f := self.figures.get(who, {}).get(way)) is not None]
        return min(others) / self.figures["ours"][way].us if others else None

    def whole(self, against: Iterable[str] = BASE) -> float | None:
        """Speed-up of all ways in sum: what one way leaves for the other to do counts where it is done."""
        ways = self.ways()
        sums = [
            sum(found[way].us for way in ways)
            for who in against
            if set(ways) <= set(found := self.figures.get(who, {}))
        ]
        return min(sums) / sum(self.figures["ours"][way].us for way in ways) if sums and ways else None

    def to_beside(self, way: str) -> float | None:
        """Our rate against that at the rounder size; None where there is none."""
        if self.beside is None or way not in (there := self.beside.figures.get("ours", {})):
            return None
        kind = 1 if self.unit == "TFLOP/s" else 0  # bytes or flops
        more = self.work[way][kind] / self.beside.work[way][kind]
        return more * there[way].us / self.figures["ours"][way].us

    def onto(self, old: Row | None) -> Row:
        """This row, with the figures of an old one where they are much the same."""
        if old is None:
            return self
        figures = {
            who: {way: figure.or_old(old.figures.get(who, {}).get(way)) for way, figure in ways.items()}
            for who, ways in self.figures.items()
        }
        return replace(self, figures=figures, beside=self.beside and self.beside.onto(old.beside))

    def reached(self, way: str) -> bool | None:
        """Return True if the wanted figure is reached, to a hundredth; None where none is wanted."""
        want, rate = self.want.get(way), self.rate("ours", way)
        if want is None or rate is None:
            return None
        return rate <= 1.01 * want if self.unit == "us" else rate >= 0.99 * want


def mean(speedups: Iterable[float]) -> float:
    """The geometric mean; NaN of none."""
    logs = [math.log(one) for one in speedups]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


@dataclass
class Results:
    """A run on one machine."""

    machine: dict[str, str]
    ceilings: dict[str, float]
    rows: list[Row]
    host: dict[str, dict[str, float]] = field(default_factory=dict)
    interrupted: bool = False  # there would have been more rows

    def measured(self) -> Iterator[tuple[Row, str]]:
        """(row, way) of every figure of ours."""
        return ((row, way) for row in self.rows for way in row.ways())

    def left_out(self) -> Iterator[tuple[str, str, str]]:
        """Yield (name, who, reason) for each missing figure."""
        for row in self.rows:
            for one in (row, row.beside):
                yield from () if one is None else ((one.name, who, reason) for who, reason in one.wrong.items())

    def slowest(self, against: Iterable[str] = BASE) -> list[tuple[float, str]]:
        """(speed-up, name and way) of every figure that has a peer, the least first."""
        found = ((row.speedup(way, against), f"{row.name} {way}") for row, way in self.measured())
        return sorted((speedup, name) for speedup, name in found if speedup is not None)

    def slowest_rows(self, against: Iterable[str] = BASE, units: Sequence[str] = UNITS) -> list[tuple[float, str]]:
        """(speed-up, name) of every row that has a peer, forward and backward in sum, the least first."""
        found = ((row.whole(against), row.name) for row in self.rows if row.unit in units)
        return sorted((speedup, name) for speedup, name in found if speedup is not None)

    def nearness(self) -> list[tuple[float, str]]:
        """(ratio, name and way) of every figure beside a rounder size's, the least first."""
        found = ((row.to_beside(way), f"{row.name} {way}") for row, way in self.measured())
        return sorted((ratio, name) for ratio, name in found if ratio is not None)

    def onto(self, old: Results) -> Results:
        """An old run with what this one has found: the old figures stay where none has moved by more than `MOVED`.

        So a file of figures changes only where the figures did. The rows that this run has not measured stay as they
        are; the machine then keeps the date of the run that measured all, and says what is newer.
        """
        before = {row.name: row for row in old.rows}
        now = {row.name: row.onto(before.get(row.name)) for row in self.rows}
        rows = [now.pop(row.name, row) for row in old.rows] + list(now.values())
        machine = self.machine
        if untouched := before.keys() - {row.name for row in self.rows}:
            newer = f"{len(self.rows)} rows of {self.machine.get('date', 'a later run')}, {len(untouched)} older"
            machine = old.machine | {"updated": newer}
        return Results(machine, self.ceilings, rows, self.host or old.host, self.interrupted)

    def slower_than(self, old: Results, factor: float = 1.05) -> list[tuple[str, str, float]]:
        """(row, way, how many times as long) of what takes longer than in an old run."""
        before = {(row.name, way): row.figures["ours"][way].us for row, way in old.measured()}
        found = []
        for row, way in self.measured():
            then = before.get((row.name, way))
            if then is not None and (ratio := row.figures["ours"][way].us / then) > factor:
                found.append((row.name, way, ratio))
        return found

    def vanished(self, old: Results) -> list[tuple[str, str]]:
        """(row, way) of what an old run has a figure of and this one has none."""
        now = {(row.name, way) for row, way in self.measured()}
        return [(row.name, way) for row, way in old.measured() if (row.name, way) not in now]
