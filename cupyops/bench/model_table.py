"""Figures of whole models: a CSV file, a table in the terminal, a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError

HEAD = "# cupyops bench --models 1"
COLUMNS = (
    *("model", "about", "variant", "ms", "low", "high", "each", "unit", "peak_gib", "first_step_s", "losses", "note"),
)
SHOWN = {
    "eager": "#e08a1e",
    "compile": "#4ba36b",
    "liger": "#a35bb8",
    "swap": "#2f6fde",
    "graph": "#17408b",
    "lean": "#0f8a8a",
}
"""The colour of each variant, in the order of a picture."""


@dataclass
class Figures:
    """A variant of a model: milliseconds a step, the peak of memory, the losses step by step."""

    model: str
    about: str
    variant: str
    ms: float
    low: float
    high: float
    each: int
    unit: str
    peak_gib: float
    first_step_s: float
    losses: list[float]
    note: str = ""

    @property
    def rate(self) -> float:
        """Tokens, images or clips per second."""
        return 1e3 * self.each / self.ms

    def difference(self, base: Figures) -> float:
        """The largest difference in loss at any step."""
        return max(abs(mine - theirs) for mine, theirs in zip(self.losses, base.losses))


def base_of(figures: Sequence[Figures], model: str) -> Figures | None:
    """The model as it is."""
    return next((one for one in figures if one.model == model and one.variant == "eager"), None)


def write(figures: Sequence[Figures], machine: dict[str, str], path: Path) -> None:
    """Keep figures; the file is whole at any time."""
    out = io.StringIO()
    print(HEAD, *(f"# {name}: {value}" for name, value in machine.items()), sep="\n", file=out)
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    table.writeheader()
    for one in figures:
        numbers = {name: f"{getattr(one, name):.4g}" for name in ("ms", "low", "high", "peak_gib", "first_step_s")}
        table.writerow({**vars(one), **numbers, "losses": " ".join(f"{loss:.5g}" for loss in one.losses)})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(out.getvalue(), encoding="utf-8")
    part.replace(path)


def read(path: Path) -> tuple[list[Figures], dict[str, str]]:
    """Read a file that `write` made. Raises `InputError` where it is another."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or lines[0] != HEAD:
            raise ValueError(f"its first line is not {HEAD!r}")
        about = [line[2:].partition(": ") for line in lines[1:] if line.startswith("# ")]
        rows = csv.DictReader(line for line in lines if not line.startswith("# "))
        return [_figures(row) for row in rows], {name: value for name, _, value in about}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} holds no figures of models: {error}; expected what bench --models --csv writes (results of "
            "operators are read without --models)"
        ) from None


def _figures(row: dict[str, str]) -> Figures:
    numbers: dict[str, Any] = {name: float(row[name]) for name in ("ms", "low", "high", "peak_gib", "first_step_s")}
    texts: dict[str, Any] = {name: row[name] for name in ("model", "about", "variant", "unit", "note")}
    return Figures(**texts, **numbers, each=int(row["each"]), losses=[float(one) for one in row["losses"].split()])


def picture(figures: Sequence[Figures]) -> Any:
    """Draw speed-ups over the unchanged model, a bar for each variant."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(one.model for one in figures if base_of(figures, one.model) is not None))
    variants = [name for name in SHOWN if any(one.variant == name for one in figures)]
    figure = Figure(figsize=(2.5 + 1.4 * len(names), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(variants))
    for place, variant in enumerate(variants):
        found = {one.model: one for one in figures if one.variant == variant}
        at = [index + (place - (len(variants) - 1) / 2) * width for index, name in enumerate(names) if name in found]
        bases = [base_of(figures, name) for name in names if name in found]
        heights = [base.ms / found[base.model].ms for base in bases if base is not None]
        bars = axes.bar(at, heights, width, color=SHOWN[variant], label=variant)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="times as fast as eager PyTorch", title="A training step")
    axes.legend(ncols=len(variants), fontsize=8)
    return figure


def curves(figures: Sequence[Figures]) -> Any:
    """The losses, step by step: the variants of a model lie on one another where they compute the same."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(one.model for one in figures))
    columns = min(3, len(names))
    figure = Figure(figsize=(4 * columns, 3 * -(-len(names) // columns)), layout="constrained")
    for axes, name in zip(figure.subplots(-(-len(names) // columns), columns, squeeze=False).flat, names):
        for one in figures:
            if one.model == name:
                axes.plot(one.losses, color=SHOWN.get(one.variant, "black"), label=one.variant, linewidth=1)
        axes.set(title=name, xlabel="step", ylabel="loss")
        axes.legend(fontsize=7)
    return figure
