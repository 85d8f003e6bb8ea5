"""Figures kept, compared and drawn."""

import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from figures import results, row

from cupyops.bench import charts, report, table
from cupyops.bench.results import Figure, Row, mean, rounded
from cupyops.errors import InputError


def test_rates_and_speedups():
    one = row(ours=10.0, eager=15.0, compile=12.0, liger=8.0)
    assert one.rate("ours", "forward") == pytest.approx(4000)
    assert row(unit="TFLOP/s", ours=100.0).rate("ours", "forward") == pytest.approx(400)
    assert row(unit="us", ours=10.0).rate("ours", "forward") == 10
    assert one.rate("nobody", "forward") is None
    assert one.speedup("forward") == pytest.approx(1.2)  # the best of eager and compile; Liger is not PyTorch
    assert row(liger=8.0).speedup("forward") is None


def test_wanted_figures():
    assert row(ours=10.0, want=4000).reached("forward")
    assert row(ours=10.0, want=4030).reached("forward")  # to a hundredth
    assert not row(ours=10.0, want=4200).reached("forward")
    assert row(unit="us", ours=10.0, want=10).reached("forward")
    assert not row(unit="us", ours=10.0, want=9).reached("forward")
    assert row().reached("forward") is None


def test_the_mean_and_the_slowest():
    run = results(row("a", ours=10, eager=20), row("b", ours=10, eager=5), row("c"))
    assert mean(speedup for speedup, _ in run.slowest()) == pytest.approx(1)
    assert [(round(s, 3), name[0]) for s, name in run.slowest()] == [(0.5, "b")] * 2 + [(2, "a")] * 2
    assert math.isnan(mean([]))


def test_rows_count_what_one_way_leaves_to_the_other():
    one = row(ours=10, eager=20, compile=10)
    one.figures["eager"]["backward"] = Figure(5, 5, 5, 1)
    assert (one.speedup("forward"), one.speedup("backward")) == (1, 0.5)
    assert results(one, row("matmul", unit="TFLOP/s", eager=5)).slowest_rows(units=("GB/s", "us")) == [(1, one.name)]
    assert one.whole() == 1  # compile's 10 + 10
    del one.figures["compile"]["backward"]
    assert one.whole() == 25 / 20
    assert results(one, row("b")).slowest_rows() == [(1.25, one.name)]


def test_a_round_trip(tmp_path):
    run = results(row(eager=15.0, want=4000), row("step, with a comma"), row("failed"))
    run.rows[0].want["backward"] = 3999.5
    run.rows[1].compared, run.rows[1].lost = False, 'the "host"\nis slow'
    run.rows[0].wrong["liger"] = "ImportError: none"
    run.rows[2] = Row("failed", "2", "float32", "us", {}, {}, memory={"eager": 5}, wrong={"ours": "Failure: off by 3"})
    run.host = {"no gradient": {"ours": 5.0, "torch": 4.0}}
    table.write(run, tmp_path / "deep" / "x.csv")
    assert table.read(tmp_path / "deep" / "x.csv") == run
    assert table.text(table.parse(table.text(run))) == table.text(run)


@pytest.mark.parametrize("text", ["", "op,size\n", f"{table.HEAD}\n", f"{table.HEAD}\nop,size\na,b\n", "{}"])
def test_a_file_of_something_else(text, tmp_path):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(InputError, match="holds no results of operators"):
        table.read(tmp_path / "x.csv")
    with pytest.raises(InputError, match="holds no results of operators"):
        table.read(tmp_path / "absent.csv")


def test_a_figure_that_is_no_number(tmp_path):
    (tmp_path / "x.csv").write_text(table.text(results(row(ours=10))).replace(",10,", ",ten,", 1))
    with pytest.raises(InputError, match="holds no results of operators"):
        table.read(tmp_path / "x.csv")


def test_a_file_changes_where_figures_moved():
    """By more than 3%; what was not measured again stays."""
    old = results(row("a", ours=100, eager=100), row("b", ours=10), row("c", ours=10))
    new = results(row("d", ours=1), row("a", ours=103, eager=104))
    new.rows[1].memory["ours"] = 1
    old.machine["date"], new.machine["date"] = "2026-01-01", "2026-02-02"
    merged = new.onto(old)
    assert [one.op for one in merged.rows] == ["a", "b", "c", "d"]
    figures = merged.rows[0].figures
    assert figures["ours"]["forward"].us == 100 and figures["eager"]["backward"].us == 104
    assert merged.rows[0].memory["ours"] == 1 and merged.rows[1:3] == old.rows[1:]
    assert merged.machine == old.machine | {"updated": "2 rows of 2026-02-02, 2 older"}
    assert results(row("a", ours=99), row("b", ours=10), row("c", ours=10)).onto(old).machine == results().machine


def test_a_figure_beside_another_moves_alike():
    old, new = results(row(ours=100)), results(row(ours=100))
    old.rows[0].beside, new.rows[0].beside = row(size="r", ours=100), row(size="r", ours=101)
    assert new.onto(old) == old
    new.rows[0].beside = row(size="r", ours=110)
    assert new.onto(old).rows[0].beside.figures["ours"]["forward"].us == 110


def test_four_digits_tell_a_time():
    assert [rounded(x) for x in (0.0, 0.123456, 12.34567, 1234.5678, 123456.7)] == [0, 0.1235, 12.35, 1235, 123457]


def test_beside_another_size(tmp_path):
    odd, flops, alone = row("a", ours=10), row("b", unit="TFLOP/s", ours=10), row("c")
    for one, us in ((odd, 8), (flops, 16)):
        one.beside = row(one.op, "rounder", one.unit, ours=us)
        one.beside.work = dict.fromkeys(one.work, (4e7, 8e10))
    run = results(odd, flops, alone)
    assert (odd.to_beside("forward"), flops.to_beside("backward"), alone.to_beside("forward")) == (0.8, 0.8, None)
    assert run.nearness()[0] == (0.8, "a 2^20 bfloat16 backward") and len(run.nearness()) == 4
    table.write(run, tmp_path / "x.csv")
    assert table.read(tmp_path / "x.csv") == run
    assert "Odd sizes beside rounder ones: 4 of 4 reach less than 85% of" in "\n".join(report.summary(run))
    report.page(run, tmp_path / "x.html")
    page = Page()
    page.feed((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert ["a 2^20", "bfloat16", "forward", "rounder", "4,000 GB/s", "5,000 GB/s", "0.80x"] in page.rows


def test_what_got_slower_and_what_vanished():
    old = results(row("a", ours=10), row("b", ours=10), row("c", ours=10))
    new = results(row("a", ours=10.4), row("b", ours=12), row("d", ours=1))
    assert [(name, way, round(ratio, 3)) for name, way, ratio in new.slower_than(old)] == [
        ("b 2^20 bfloat16", "forward", 1.2),
        ("b 2^20 bfloat16", "backward", 1.2),
    ]
    assert new.vanished(old) == [("c 2^20 bfloat16", "forward"), ("c 2^20 bfloat16", "backward")]


def test_the_summary():
    run = results(row(ours=10, eager=20, want=9000), row("step"))
    run.rows[1].compared = False
    text = "\n".join(report.summary(run))
    assert "2.00 times as fast" in text
    assert "0 of 1 targets are reached. A target is" in text
    assert "The results of 1 rows are not compared: those of step." in text


class Page(HTMLParser):
    """Tables, the sources of pictures, and whether every tag is closed."""

    VOID = {"meta", "img"}

    def __init__(self):
        super().__init__()
        self.open, self.rows, self.pictures, self.outside = [], [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.outside += [given[name] for name in ("src", "href") if name in given]
        if tag == "img":
            self.pictures.append(given["alt"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            assert tag in ("html", "p", "li", "dd", "dt")

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def run():
    made = results(
        row("a", ours=10, eager=20, want=3900, compile=30, triton=12),
        row("b<i>", unit="TFLOP/s", ours=100, eager=90, liger=80),
        row("c", unit="us", ours=10),
    )
    made.rows[0].wrong["liger"] = "ImportError: no <liger>"
    made.rows[2].compared = False
    return made


def test_the_page_is_whole_and_needs_nothing_else(run, tmp_path):
    report.page(run, tmp_path / "x" / "y.html")
    text = (tmp_path / "x" / "y.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    head, *rows = page.rows
    assert head[:5] == ["operator", "size", "dtype", "way", "ours"]
    assert {len(one) for one in page.rows} == {len(head)}
    cells = [dict(zip(head, one)) for one in rows]
    assert len(cells) == 6
    assert cells[0]["ours"] == "4,000 GB/s" and cells[0]["speed-up"] == "2.00x" and cells[0]["of the ceiling"] == "95%"
    assert cells[0]["liger"] == "-" and cells[2]["operator"] == "b<i>" and cells[4]["size"] == "2^20 (not compared)"
    assert page.pictures == ["speedups", "bandwidth", "throughput", "sizes", "roofline", "memory"]
    assert all(one.startswith("data:image/png;base64,") for one in page.outside)
    assert "no &lt;liger&gt;" in text and "Made &lt;up&gt;" in text
    assert not re.search(r"https?://", text)


def test_the_page_says_why_a_wanted_figure_is_not_reached(tmp_path):
    missed = results(row("relu", ours=10, want=4200), row("step", ours=10, want=4200), row("gelu", ours=10, want=4000))
    missed.rows[1].lost = "the host <is> slow"
    report.page(missed, tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert [one[0] for one in page.rows[-2:]] == ["relu 2^20 bfloat16", "step 2^20 bfloat16"]
    assert page.rows[-1][1:] == ["forward", "4200 GB/s", "4,000 GB/s", "the host <is> slow"]
    assert "mask" in page.rows[-2][-1]  # of the head of relu.cu


NUMBER = re.compile(r"-|[\d,.]+(?: (?:GB/s|TFLOP/s|us|MB)|x|%)")


def test_the_page_of_the_run_that_is_kept(tmp_path):
    """It opens with the answer, each number has its unit, and it is small enough to be sent by mail."""
    kept = table.read(Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200.csv")
    report.page(kept, tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 500_000
    first = re.search(r"<h1>.*?</h1><p class=answer>(.*?)</p>", text)[1]
    order = [text.index(part) for part in ("<p class=answer>", '<img alt="speedups"', "<ul class=more>", "<dl>")]
    assert order == sorted(order) and "prefers-color-scheme: dark" in text
    whole = [speedup for speedup, _ in kept.slowest_rows()]
    assert first.startswith(f"On NVIDIA H200 cupyops is {mean(whole):.2f} times as fast as the better of PyTorch")
    page = Page()
    page.feed(text)
    lines = [line for line in page.rows if len(line) == len(page.rows[0])][1:]
    assert len(lines) == len(list(kept.measured()))
    assert [cell for line in lines for cell in line[4:] if cell and not NUMBER.fullmatch(cell)] == []


def test_each_wanted_figure_of_the_run_that_is_kept_is_reached_or_has_its_reason():
    kept = table.read(Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200.csv")
    missed = {row.op: report.lost(row) for row, way in kept.measured() if row.reached(way) is False}
    assert [op for op, reason in missed.items() if len(reason) < 20] == []


def test_the_pictures(run, tmp_path):
    paths = charts.write(run, tmp_path / "png")
    assert [path.stem for path in paths] == ["speedups", "bandwidth", "throughput", "sizes", "roofline", "memory"]
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and 5_000 < path.stat().st_size < 300_000
    assert list(charts.charts(results())) == []


def test_all_have_colours_of_their_own(run):
    found = charts.colours(run.rows)
    assert list(found) == ["ours", "eager", "compile", "liger", "triton"]
    assert all(a != b for a, b in pairwise(sorted(found.values())))
