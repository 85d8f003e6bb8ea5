"""Write the table of forms into cuda_src/README.md from the lists of forms; with `--check` only compare."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cupyops.nn
import cupyops.optim  # noqa: F401 - makes the lists of the optimizers
from cupyops._dispatch.forms import Form, families

README = Path(__file__).resolve().parent.parent / "cuda_src" / "README.md"
BEGIN, END = "<!-- forms: written by tools/forms_table.py -->", "<!-- end of forms -->"


def table() -> str:
    """The rows, family by family, in the order in which forms are tried."""
    lines = ["| family | direction | form | who owns what | kernels | measured |", "|---|---|---|---|---|---|"]
    for forms in sorted(families(), key=lambda one: one.family):
        lines += [_row(forms.family, forms.direction, form) for form in forms.list]
    return "\n".join(lines)


def _row(family: str, direction: str, form: Form) -> str:
    kernels = ", ".join(f"`{kernel.base}`" for kernel in form.kernels() if kernel is not None) or "written for each"
    cells = (family, direction, f"`{form.name}`", form.summary, kernels, form.measured)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def written(text: str) -> str:
    """The page with the table of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{README} has no {BEGIN} before {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is another")
    asked = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = written(old)
    if not asked.check:
        README.write_text(new, encoding="utf-8")
        return 0
    if new != old:
        print("the table of forms in cuda_src/README.md is not that of the code: run python tools/forms_table.py")
    return int(new != old)


if __name__ == "__main__":
    sys.exit(main())
