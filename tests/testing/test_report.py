"""A report: as text, as JSON, as JUnit's XML."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from xml.etree import ElementTree

import pytest
import torch

from cupyops.testing import Report, Row, check

PASS = Row("accuracy", "reference", "pass", "", "forward is right", seconds=0.25)
ABSENT = Row("cuda_graph", "reference", "n/a", "concerns gpu\nand no other", "a graph can be replayed", seconds=0.125)
FAIL = Row(
    "misaligned",
    "simulator",
    "fail",
    "output: error 3 where 1e-07 is allowed\n  in kernel <k>, line 3",
    "one element on gives the same",
    "(1, 3):(3, 1)",
    "cupyops.testing.check(m.f, [cupyops.testing.tensor((1, 3), 'float32', 1)], only='misaligned')",
    1.5,
)


def report(*rows, name="f"):
    return Report(name, "(4, 5):(5, 1)", 7, list(rows))


@pytest.mark.parametrize(
    ("rows", "passed"),
    [((), False), ((ABSENT,), False), ((PASS,), True), ((PASS, ABSENT), True), ((PASS, FAIL), False), ((FAIL,), False)],
)
def test_passed(rows, passed):
    """Where nothing failed, and something passed."""
    one = report(*rows)
    assert one.passed is passed
    assert one.failures == [row for row in rows if row is FAIL]
    if passed:
        one.raise_if_failed()
    else:
        with pytest.raises(AssertionError) as caught:
            one.raise_if_failed()
        assert str(caught.value) == str(one)


def test_the_summary():
    assert report(PASS, FAIL, PASS, ABSENT).summary() == "2 passed, 1 failed, 1 not applicable"
    assert report().summary() == "0 passed, 0 failed, 0 not applicable"


def test_the_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert str(report(PASS, ABSENT, FAIL)).splitlines() == [
        "f((4, 5):(5, 1))  seed 7",
        "accuracy    reference  pass",
        "cuda_graph  reference  n/a   concerns gpu",
        "misaligned  simulator  fail  output: error 3 where 1e-07 is allowed",
        "                               in kernel <k>, line 3",
        "                             smallest:  (1, 3):(3, 1)",
        "                             reproduce: " + FAIL.reproduction,
        "1 passed, 1 failed, 1 not applicable",
    ]


def test_what_the_calls_own_error_leaves_untried_is_one_row_of_each_backend():
    reason = "the call itself fails: CompileError: k.cu: kernel f\nat line 3"
    untried = [Row(f"h{n}", where, "n/a", reason, seconds=0.25) for where in ("simulator", "gpu") for n in range(3)]
    one = report(*untried, ABSENT, ABSENT, Row("alone", "simulator", "n/a", reason + "!"))
    shown = [(row.hazard, row.backend, row.seconds) for row in one.folded()]
    assert shown == [
        ("h0 and 2 more", "simulator", 0.75), ("h0 and 2 more", "gpu", 0.75), ("cuda_graph", "reference", 0.125),
        ("cuda_graph", "reference", 0.125), ("alone", "simulator", 0.0),
    ]  # fmt: skip
    assert str(one).count("the call itself fails: CompileError") == 3
    assert one.summary() == "0 passed, 0 failed, 9 not applicable" and len(one.as_json()["rows"]) == 9


def test_the_text_of_nothing():
    assert str(report()) == "f((4, 5):(5, 1))  seed 7\n0 passed, 0 failed, 0 not applicable"


@pytest.mark.parametrize("columns", [60, 80, 120, 160, 400])
def test_the_text_is_folded_at_the_width_of_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    reason = " ".join(f"word-{number}" for number in range(60))
    long = Row("deterministic_algorithms", "simulator", "fail", reason)
    lines = str(report(long)).splitlines()[1:-1]
    assert " ".join(" ".join(lines).split()) == f"deterministic_algorithms simulator fail {reason}"
    width = max(map(len, lines))
    assert width <= min(columns, 160) if columns >= 80 else width <= 67
    assert width > min(columns, 160) - 12
    assert {line[:41] for line in lines[1:]} == {" " * 41}  # under the reason


def test_a_number_is_not_folded_inside(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = str(report(Row("h", "gpu", "fail", "error 1.2345e-05 " * 30))).splitlines()
    assert sum(line.count("1.2345e-05") for line in lines) == 30


def test_the_lines_to_copy_are_not_folded(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert f"reproduce: {FAIL.reproduction}\n" in str(report(FAIL))


def test_a_failure_without_a_smaller_call_or_a_line():
    text = str(report(Row("h", "gpu", "fail", "found")))
    assert "smallest" not in text and "reproduce" not in text


def strictly(text):
    """JSON as other languages read it: without NaN and Infinity."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def test_json_has_everything(tmp_path):
    one = report(PASS, ABSENT, FAIL)
    data = strictly(one.to_json(tmp_path / "r.json"))
    assert data == strictly((tmp_path / "r.json").read_text(encoding="utf-8")) == one.as_json()
    assert {key: data[key] for key in ("name", "call", "seed", "passed")} == {
        "name": "f", "call": "(4, 5):(5, 1)", "seed": 7, "passed": False,
    }  # fmt: skip
    assert [Row(**row) for row in data["rows"]] == one.rows
    assert data["rows"][2] == asdict(FAIL)


def test_json_of_a_check_with_nan_in_it(tmp_path):
    x = torch.tensor([math.nan, math.inf])
    one = check(lambda x: x.nan_to_num(), [x], reference=torch.relu, only="accuracy", progress=False)
    (row,) = strictly(one.to_json(str(tmp_path / "r.json")))["rows"]
    assert "PyTorch nan" in row["reason"] and "math.nan" in row["reproduction"]


def test_text_beyond_ascii_and_lone_surrogates(tmp_path):
    one = report(Row("h", "gpu", "fail", "é\udc80\x00"))
    assert strictly(one.to_json(tmp_path / "r.json"))["rows"][0]["reason"] == "é\udc80\x00"
    assert strictly((tmp_path / "r.json").read_text(encoding="utf-8"))["rows"][0]["reason"] == "é\udc80\x00"


def test_junit(tmp_path):
    text = report(PASS, ABSENT, FAIL, name="mylib::f").to_junit(tmp_path / "r.xml")
    assert text == (tmp_path / "r.xml").read_text(encoding="utf-8")
    assert text.startswith("<?xml version='1.0' encoding='utf-8'?>\n")
    suite = ElementTree.fromstring(text.encode())
    assert suite.tag == "testsuite"
    assert suite.attrib == {"name": "mylib::f", "tests": "3", "failures": "1", "skipped": "1", "time": "1.875"}
    names = [(case.tag, case.attrib["classname"], case.attrib["name"], case.attrib["time"]) for case in suite]
    assert names == [
        ("testcase", "mylib::f.reference", "accuracy", "0.250"),
        ("testcase", "mylib::f.reference", "cuda_graph", "0.125"),
        ("testcase", "mylib::f.simulator", "misaligned", "1.500"),
    ]
    passed, absent, failed = suite
    assert not list(passed)
    assert [(one.tag, one.attrib) for one in absent] == [("skipped", {"message": ABSENT.reason})]
    (failure,) = failed
    assert (failure.tag, failure.attrib) == ("failure", {"message": "output: error 3 where 1e-07 is allowed"})
    assert failure.text == f"{FAIL.reason}\n{FAIL.smallest}\n{FAIL.reproduction}"


def test_junit_of_nothing():
    suite = ElementTree.fromstring(report().to_junit().encode())
    assert suite.attrib == {"name": "f", "tests": "0", "failures": "0", "skipped": "0", "time": "0.000"}


MARKS = "a < b & \"c\" > 'd' ]]> é 😀 [bold]"


def test_junit_escapes_what_xml_reads():
    row = Row("h", "gpu", "fail", MARKS + "\nnext\tline", smallest=MARKS, reproduction=MARKS)
    suite = ElementTree.fromstring(report(row, name=MARKS).to_junit().encode())
    failure = suite[0][0]
    assert suite.attrib["name"] == failure.attrib["message"] == MARKS
    assert failure.text == f"{MARKS}\nnext\tline\n{MARKS}\n{MARKS}"
    assert suite[0].attrib["classname"] == f"{MARKS}.gpu"


# XML 1.0 has no way to write these, not even escaped
ILLEGAL = [*map(chr, [*range(9), 11, 12, *range(14, 32)]), "\ud800", "\udfff", "\ufffe", "\uffff"]


def test_junit_shows_what_xml_cannot_hold(tmp_path):
    reason = "red \x1b[31m" + "".join(ILLEGAL)
    rows = [Row("h", "gpu", "fail", reason, reason, reason, reason), Row("h", "gpu", "n/a", reason)]
    report(*rows, name=reason).to_junit(tmp_path / "r.xml")
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    shown = "red \\x1b[31m" + "".join(f"\\x{ord(one):02x}" for one in ILLEGAL)
    assert suite.attrib["name"] == suite[0][0].attrib["message"] == suite[1][0].attrib["message"] == shown
    assert suite[0][0].text == f"{shown}\n{shown}\n{shown}"


def test_what_xml_can_hold_stays():
    legal = "\t\n\x20\x7f\x85\xa0\ud7ff\ue000\ufffd\U00010000\U0010ffff"
    suite = ElementTree.fromstring(report(Row("h", "gpu", "fail", "x" + legal)).to_junit().encode())
    assert suite[0][0].text == "x" + legal


def test_a_path_that_cannot_be_written(tmp_path):
    for write in (report(PASS).to_json, report(PASS).to_junit):
        with pytest.raises(FileNotFoundError):
            write(tmp_path / "absent" / "r")
