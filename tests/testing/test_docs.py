"""docs/testing.md says what is so: its Python runs, its output is the real one, its tables are the registry's."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cupyops.cli.app import app
from cupyops.testing import hazards
from cupyops.testing.hazard import EVERYWHERE, FAMILIES, family_of

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TABLES = TEXT.partition("## The hazards\n")[2]

# what hangs on the compiler's version and on where memory lies
CHANGING = [(re.compile(r"0x[0-9a-f]+"), "0x..."), (re.compile(r"PTX line .*"), "PTX line ...")]


@pytest.fixture
def mylib(monkeypatch, tmp_path):
    """The module that the page writes, where Python finds it; no GPU, a terminal of 100 columns."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("mylib")
    for name in ("mylib", "mylib.ops"):
        monkeypatch.setitem(sys.modules, name, module)
    return module


def steady(text):
    for pattern, instead in CHANGING:
        text = pattern.sub(instead, text)
    return text


def run_the_page(module):
    """All Python as one program, from top to bottom; a text block right after one is what it prints."""
    printed, compared = None, 0
    for match in BLOCK.finditer(TEXT):
        language, body = match.groups()
        if language == "text":
            assert steady(printed) == steady(body)
            compared += 1
        elif language == "python":
            output = io.StringIO()
            line = TEXT.count("\n", 0, match.start()) + 1
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * line + body, "docs/testing.md", "exec"), module.__dict__)
            printed = output.getvalue()
    assert compared == 3


def test_the_page_runs_and_so_do_its_commands(mylib):
    run_the_page(mylib)
    scripts = "\n".join(body for language, body in BLOCK.findall(TEXT) if language == "sh")
    commands = [shlex.split(line) for line in scripts.splitlines() if line]
    checks = [words[3:] for words in commands if words[:3] == ["python", "-m", "cupyops"]]
    assert len(checks) == 5
    for words in checks:
        quick = [] if "--only" in words else ["--only", "accuracy"]
        result = CliRunner().invoke(app, [*words, *quick])
        assert result.exit_code == 0, f"{words}\n{result.output}"
    assert all((ROOT / words[1]).exists() for words in commands if words[1] != "-m")


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


def test_what_the_page_links_to_is_there():
    links = re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", TEXT))
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", TEXT, re.M)
    }
    assert links
    for link in links:
        if link.startswith("#"):
            assert link[1:] in headings, link
        elif not link.startswith("https://"):
            assert (ROOT / "docs" / link).is_file(), link
