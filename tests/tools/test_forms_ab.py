"""The comparison of forms goes through cases and finds the other forms; on a GPU it times them."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import forms_ab


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_rows(gpu, tmp_path, monkeypatch, capsys):
    path = tmp_path / "forms.csv"
    words = ["layer_norm", "--csv", str(path), "--only", "1000003x17", *([] if gpu else ["--dry-run"])]
    monkeypatch.setattr(sys, "argv", ["forms_ab.py", *words])
    assert forms_ab.main() == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["part"] for row in rows} == {"forward", "backward"} == {row["direction"] for row in rows}
    assert all(row["chosen"] == "thread_per_row" != row["other"] and float(row["chosen_us"]) > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
