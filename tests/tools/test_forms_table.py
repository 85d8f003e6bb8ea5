"""The table of forms in cuda_src/README.md is that of the code."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import forms_table  # noqa: E402

from cupyops._dispatch.forms import families  # noqa: E402


def test_the_table_is_current():
    text = forms_table.README.read_text(encoding="utf-8")
    assert forms_table.written(text) == text, "run python tools/forms_table.py"


def test_every_form_says_what_it_is():
    for forms in families():
        for form in forms.list:
            assert form.summary, f"{forms.family}, {forms.direction}: {form.name}"


def test_a_page_without_the_marks():
    with pytest.raises(SystemExit, match="has no <!-- forms"):
        forms_table.written("# A page\n")
