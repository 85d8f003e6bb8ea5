"""tools/distributed.py: small models on two processes of the CPU, by each way."""

import csv
import os
from pathlib import Path

import pytest
from processes import torchrun

pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_the_same_losses_and_collectives(tmp_path):
    """Models as they are, swapped and compiled have the losses of one device, also accumulated, saved and resumed."""
    table = tmp_path / "rows.csv"
    torchrun(2, ROOT / "tools" / "distributed.py", "--tiny", "--csv", table, env=os.environ)
    lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    losses = [[float(loss) for loss in row["losses"].split()] for row in rows]
    assert [row["way"] for row in rows[:9]] == [
        way for way in ("one device", "FSDP2", "tensor parallel") for _ in "123"
    ]
    for k in (*range(0, 9, 3), 18):  # each way of the Llama, and data parallel training of the ResNet
        assert [row["model"].partition(",")[0] for row in rows[k : k + 3]] == ["as it is", "swap", "compiled"]
        assert len({row["collectives"] for row in rows[k : k + 3]}) == 1
        assert bool(rows[k]["collectives"]) is (rows[k]["way"] != "one device")
    for found, expected in [*((one, losses[0]) for one in losses[:9]), *((one, losses[18]) for one in losses[18:21])]:
        assert found == pytest.approx(expected, abs=2e-3)
    for k in range(9, 18, 3):
        assert losses[k] == pytest.approx(losses[9], abs=2e-3)  # accumulated
        assert losses[k + 2] == pytest.approx(losses[k + 1], abs=2e-3)  # resumed on one device, and on two
    assert [row["model"] for row in rows[21:]] == ["torch, loss_parallel", "cupyops"] and losses[21] == losses[22]
