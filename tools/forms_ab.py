"""Compare each form that benchmarks choose with the others that could compute the same.

`python tools/forms_ab.py layer_norm softmax`, on a GPU. --dry-run goes through the small cases of the cases in the
simulator, and times nothing. The CSV has a line for each case, direction and other form: microseconds with the form that is
chosen, with the other, and their ratio, which is over 1 where the choice is right.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import cupyops
from cupyops._dispatch.core import forms
from cupyops.bench.case import Case, declared, files
from cupyops.bench.measure import samples
from cupyops.bench.timing import Clock, GpuClock, interleaved

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
COLUMNS = ("op", "size", "dtype", "part", "family", "direction", "chosen", "other", "chosen_us", "other_us", "ratio")
Runs = dict[str, Callable[[Clock], dict[str, float]]]


class Once:
    """A clock that only calls."""

    def sample(self, call: Callable[[Any], Any], before: Callable[[], Any] | None = None) -> float:
        """1."""
        call(None if before is None else before())
        return 1.0


class Listener:
    """A clock that hears which forms each part chooses."""

    def __init__(self) -> None:
        self.choices: list[forms.Choice[Any]] = []

    def sample(self, call: Callable[[Any], Any], before: Callable[[], Any] | None = None) -> float:
        """Which choice is the first of this part."""
        given = None if before is None else before()
        start = len(self.choices)
        call(given)
        return float(start)


def chosen(each: Callable[[Clock], dict[str, float]]) -> Iterator[tuple[str, forms.Choice[Any]]]:
    """(part, choice) for each list of forms that a case asks."""
    listener = Listener()
    forms.listeners.append(listener.choices.append)
    try:
        with cupyops.plans(enabled=False):
            starts = each(listener)
    finally:
        forms.listeners.remove(listener.choices.append)
    ends = [*(int(start) for start in starts.values()), len(listener.choices)][1:]
    seen = set()
    for (part, start), end in zip(starts.items(), ends):
        for choice in listener.choices[int(start) : end]:
            key = part, choice.forms.family, choice.forms.direction
            if key not in seen:
                seen.add(key)
                yield part, choice


def others(choice: forms.Choice[Any]) -> list[str]:
    """The forms that could compute the same."""
    return [
        form.name
        for form in choice.forms.list
        if form is not choice.chosen and form.why_not(choice.problem, choice.gpu) is None
    ]


def compared(case: Case, device: str, clock: Clock) -> Iterator[dict[str, Any]]:
    """The rows of a case."""
    torch.manual_seed(0)
    each, _ = samples(case, case.ours, case.make(torch.device(device), case.dtype), {})

    def asking(name: str) -> Callable[[Clock], dict[str, float]]:
        def run(clock: Clock) -> dict[str, float]:
            with cupyops.use_form(name):
                return each(clock)

        return run

    choices = list(chosen(each))
    runs: Runs = {"": each}
    for _, choice in choices:
        place = f"{choice.forms.family}.{choice.forms.direction}"
        runs |= {f"{place}:{name}": asking(f"{place}:{name}") for name in others(choice)}
    if len(runs) == 1:
        return
    each(clock)  # compiled, and what it raises is told before anything is timed
    for key in [*runs][1:]:
        try:
            runs[key](clock)
        except (
            cupyops.InputError
        ) as error:  # another product of the same case asks the same list, and is not for this form
            print(f"{case} {key}: {error}", file=sys.stderr, flush=True)
            del runs[key]
    times = interleaved(runs, clock, most=40 if isinstance(clock, GpuClock) else 1)
    for part, choice in choices:
        place = f"{choice.forms.family}.{choice.forms.direction}"
        for name in others(choice):
            if f"{place}:{name}" not in runs:
                continue
            ours, other = (times[key][part].median for key in ("", f"{place}:{name}"))
            known = (case.op, case.size, case.dtype_name, part, choice.forms.family, choice.forms.direction)
            figures = (f"{ours:.1f}", f"{other:.1f}", f"{other / ours:.3f}")
            yield dict(zip(COLUMNS, (*known, choice.chosen.name, name, *figures)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="operators of benchmarks/; all by default")
    parser.add_argument("--only", default="", help="a regular expression found in a case's name and size")
    parser.add_argument("--csv", type=Path, help="write the rows there too")
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    every = [case for case in declared(files(asked.ops, FOLDER), asked.only) if not (case.wall or case.together)]
    cases = [twin for case in every if (twin := case.twin())] if asked.dry_run else every
    device, clock = ("cpu", Once()) if asked.dry_run else ("cuda", GpuClock())
    rows: list[dict[str, Any]] = []
    failed = 0
    with cupyops.simulate("sm_90") if asked.dry_run else nullcontext():
        for case in cases:
            try:
                for row in compared(case, device, clock):
                    print(*row.values(), sep="  ", flush=True)
                    rows.append(row)
            except cupyops.CupyopsError as error:
                failed += 1
                print(f"{case}: {error}", file=sys.stderr, flush=True)
    if asked.csv:
        with asked.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
