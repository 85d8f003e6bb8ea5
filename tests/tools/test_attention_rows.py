"""The rows of attention that are measured beside PyTorch's: what they compute, and what is said of them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import attention_rows as rows


@pytest.mark.parametrize("kind", rows.KINDS)
@pytest.mark.parametrize("width", [64, 192])
def test_a_row(width, kind, monkeypatch):
    """Ours computes what PyTorch does, where it runs without a GPU; flops are those of the pairs that are seen."""
    monkeypatch.setattr(rows, "WINDOW", 5)
    row = rows.Row.of(width, kind, 12, "cpu", tokens=36, heads=4)
    q, k, v, grad = row.given
    y = row.calls["ours"](q, k, v)
    assert y.shape == grad.shape
    for name in {"apart", "mask"} & row.calls.keys():
        torch.testing.assert_close(row.calls[name](q, k, v), y, rtol=2e-2, atol=2e-2)
    assert set(row.calls) == {"ours"} | (
        {"cuDNN", "flash"} if kind in ("full", "causal", "gqa")
        else {"flash"} if width == 64 else {"apart"} if kind == "packed" else {"mask"}
    )  # fmt: skip
    apart = torch.arange(12)[:, None] - torch.arange(12)
    pairs = {"full": 144, "window": int(((apart >= 0) & (apart <= 5)).sum())}.get(kind, 78)
    if kind != "packed":
        assert row.flops == 2 * 3 * 4 * pairs * (width + rows.WIDTHS[width][0])


def test_all_rows_and_what_is_said_of_them():
    assert len(set(rows.order())) == 100
    row = rows.Row.of(64, "full", 12, "cpu", tokens=12, heads=1)
    slow = rows.line(row, "forward", {"ours": 2.0, "cuDNN": 1.0, "flash": 3.0})
    fast = rows.line(row, "forward", {"ours": 1.0, "cuDNN": 2.0}) | {"rows": 2048, "kind": "causal"}
    alone = rows.line(row, "backward", {"ours": 1.0})
    assert (slow["ratio"], fast["ratio"], alone["ratio"]) == ("0.500", "2.000", "")
    assert rows.mean([slow, fast, alone]) == pytest.approx(1)
    assert rows.mean([slow, fast], kind="causal") == pytest.approx(2)
    assert "forward: 1.000 over 2 rows" in rows.summary([slow, fast, alone])
    assert "under 0.95: none" in rows.summary([slow, fast])  # below 1,024 rows
    assert "64 full 2048 0.500" in rows.summary([slow | {"rows": 2048}])


class OneMicrosecond:
    """A clock that only calls."""

    def sample(self, call, before=None):
        call(None)
        return 1.0


def test_what_is_measured():
    """Backends that there are none of are left out, and the mode of gradients is as it was."""
    row = rows.Row.of(192, "packed", 12, "cpu", tokens=24, heads=2)

    def refuses(q, k, v):
        raise RuntimeError("No available kernel")

    row.calls["flash"] = refuses
    found = row.measured(OneMicrosecond(), 0)
    assert torch.is_grad_enabled()
    assert found == {way: {"ours": 1.0, "apart": 1.0, "kernels": 1.0} for way in rows.WAYS}
    row.calls["ours"] = refuses
    with pytest.raises(RuntimeError, match="No available kernel"):
        row.measured(OneMicrosecond(), 0)
