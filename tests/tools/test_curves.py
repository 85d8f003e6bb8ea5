"""tools/curves.py: what is said and drawn of losses that were kept."""

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def curves():
    spec = importlib.util.spec_from_file_location("curves", ROOT / "tools" / "curves.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kept(tmp_path, curves):
    """A hundred steps: "again" is 0.002 off, "swap" 0.001, and "graph" at one step alone, by 0.5."""
    path, rows = tmp_path / "curves.csv", []
    for at in range(100):
        loss = 2 + 3 * math.exp(-at / 20)
        rows.append(f"{at},{loss:.6f},{loss + 0.002:.6f},{loss - 0.001:.6f},{loss + 0.5 * (at == 7):.6f}")
    path.write_text("\n".join(["# gpu: none", ",".join(["step", *curves.RUNS]), *rows]) + "\n", encoding="utf-8")
    return path


def test_how_far_runs_are_apart(curves, kept):
    of = curves.apart(curves.read(kept))
    assert of["again"] == pytest.approx((0.002, 0.002, 0.002), abs=2e-6)
    assert of["swap"] == pytest.approx((0.001, 0.001, 0.001), abs=2e-6)
    assert of["graph"] == pytest.approx((0.005, 0.5, 0.0), abs=2e-6)


def test_the_section_has_the_figures(curves, kept):
    text = " ".join(curves.section(kept).split())
    assert "In 100 steps its loss goes from 5.00 to" in text
    assert re.search(r"are 0.00200 apart .* is 0.00100 from .* graph 0.00500\.", text)


def test_the_picture_is_small(curves, kept, monkeypatch, tmp_path):
    page, picture = tmp_path / "models.md", tmp_path / "curves.png"
    page.write_text(f"before\n{curves.BEGIN}\nold\n{curves.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(curves, "PAGE", page)
    monkeypatch.setattr(curves, "PICTURE", picture)
    curves.draw(kept)
    assert 2000 < picture.stat().st_size < 60_000
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before") and text.endswith("after\n") and curves.section(kept) in text and "old" not in text


def test_the_page_says_what_was_measured(curves):
    text = curves.PAGE.read_text(encoding="utf-8")
    assert text.index(curves.BEGIN) < text.index(curves.END)
    if curves.RESULTS.exists():
        assert curves.section() in text, "python tools/curves.py draw"


def test_batches_are_the_same_each_time(curves):
    text = torch.arange(1000).remainder(256).to(torch.uint8)
    one, other = (curves.batches_of(text, 3, 2, 16) for _ in range(2))
    assert all(map(torch.equal, one, other)) and one[0].shape == (2, 16) and one[0].dtype is torch.int64
    assert all((batch.diff(dim=1).remainder(256) == 1).all() for batch in one)


@pytest.mark.parametrize("name", ["eager", "again", "swap"])
def test_runs_train(curves, name):
    pytest.importorskip("transformers", reason="transformers is not installed: no model to train")
    text = (ROOT / "LICENSE").read_bytes()
    batches = curves.batches_of(torch.tensor(list(text), dtype=torch.uint8), 3, 2, 32)
    losses = curves.losses_of(name, batches, "cpu", tiny=True)
    expected = curves.losses_of("eager", batches, "cpu", tiny=True)
    assert losses == pytest.approx(expected, abs=2e-3) and 4 < losses[0] < 7
