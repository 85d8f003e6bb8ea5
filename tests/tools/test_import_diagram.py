"""The diagram of imports in docs/design.md is that of the code, and has no circle."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import imports  # noqa: E402


def test_the_diagram_is_current():
    text = imports.PAGE.read_text(encoding="utf-8")
    assert imports.written(text) == text, "run python tools/imports.py --write"


def test_folders_import_one_way():
    assert not imports.circles(imports.graph(ROOT / "cupyops"))


def test_what_is_read_of_a_package(tmp_path):
    package = tmp_path / "toy"
    (package / "low").mkdir(parents=True)
    (package / "__init__.py").write_text("from .high import f\n")
    (package / "low" / "part.py").write_text("from ..base import x\nimport numpy\n")
    (package / "base.py").write_text("x = 1\n")
    (package / "high.py").write_text("import toy.low\ndef f():\n    from . import base\n")
    (package / "aside.py").write_text("")
    of = imports.graph(package)
    assert of == {"aside": set(), "base": set(), "high": {"low", "base"}, "low": {"base"}}
    assert imports.direct(of)["high"] == {"low"} and not imports.circles(of)
    drawn = imports.diagram(imports.direct(of)).splitlines()
    assert drawn == ["```mermaid", "flowchart TD", "  high --> low", "  low --> base", "  aside", "```"]
    (package / "base.py").write_text("from . import high\n")
    assert imports.circles(imports.graph(package)) == {"base", "high", "low"}
