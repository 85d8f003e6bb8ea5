"""docs/testing.md lists the hazards as they are. That the page runs, tests/docs sees to."""

import re
from pathlib import Path

import pytest

from cupyops.testing import hazards
from cupyops.testing.hazard import EVERYWHERE, FAMILIES, family_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
TABLES = PAGE.read_text(encoding="utf-8").partition("## The hazards\n")[2]


def test_the_tables_have_every_hazard_in_the_order_of_a_report():
    listed = re.findall(r"^\| `(\w+)` \|", TABLES, re.MULTILINE)
    assert listed == list(hazards())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_a_family(family):
    """A section for each: name, what must happen, where."""
    section = TABLES.split("\n### ")[1:][FAMILIES.index(family)]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{name}` | {one.expectation} | {'everywhere' if one.backends == EVERYWHERE else ', '.join(one.backends)} |"
        for name, one in hazards().items()
        if family_of(one) == family
    ]


def test_as_many_sections_as_families():
    assert TABLES.count("\n### ") == len(FAMILIES)
