"""tools/distributed.py: a Llama on two processes of the CPU, by each way."""

import csv
import os
from pathlib import Path

import pytest
from processes import torchrun

pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_the_same_losses_and_collectives(tmp_path):
    """As it is and after swap, on one device and on two."""
    table = tmp_path / "rows.csv"
    torchrun(2, ROOT / "tools" / "distributed.py", "--tiny", "--csv", table, env=os.environ)
    lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert [row["way"] for row in rows] == [way for way in ("one device", "FSDP2", "tensor parallel") for _ in range(2)]
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        assert (before["model"], after["model"]) == ("as it is", "swap")
        assert before["collectives"] == after["collectives"] and bool(after["collectives"]) is (
            after["way"] != "one device"
        )
    expected = [float(loss) for loss in rows[0]["losses"].split()]
    for row in rows:
        assert [float(loss) for loss in row["losses"].split()] == pytest.approx(expected, abs=2e-3)
