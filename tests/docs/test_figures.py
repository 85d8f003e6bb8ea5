"""The figures in the README and in the text of pages are those measured, and one command writes new ones into them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import claims
from claims import ROOT


def names(claim):
    return f"{claim.page}-{claim.found.__name__}"


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=names)
def test_a_page_says_what_was_measured(claim):
    text = (ROOT / claim.page).read_text(encoding="utf-8")
    assert claims.said(claim, text) == claim.found(), "run `python tools/claims.py`"


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=names)
def test_other_figures_are_written_into_the_sentence_alone(claim):
    """Each figure of the sentence in its place, as long as a sentence is still found; all else stays."""
    text = (ROOT / claim.page).read_text(encoding="utf-8")
    other = [str(k + 2) for k in range(len(claim.found()))]
    changed = claims.corrected(claim._replace(found=lambda: other), text)
    assert claims.said(claim, changed) == other
    assert claims.corrected(claim, changed).split() == text.split() != changed.split()


def test_a_sentence_that_is_gone_is_an_error():
    with pytest.raises(ValueError, match=r"README.md has no sentence such as: .*takes the host"):
        claims.said(next(one for one in claims.CLAIMS if one.found is claims.host), "nothing of the kind")


def test_a_sentence_may_break_anywhere():
    claim = claims.Claim("x.md", rf"runs {claims.N} times as fast, in {claims.N} ms\.", lambda: ["2", "3.5"])
    assert claims.corrected(claim, "a\nIt runs 1.25\ntimes as fast,\nin 44 ms. 1.25") == (
        "a\nIt runs 2\ntimes as fast,\nin 3.5 ms. 1.25"
    )
