"""docs/conformance.md is what the committed figures say; they are of every operator and suite, and of a run that passed."""

from types import SimpleNamespace

import pytest
import torch
from opdb.backends import Backend, drawn
from opdb.known import BEHIND_OTHERS, FUNCTIONS, MODULES, OPTIMIZERS, WITHOUT_ANY_ENTRY, WITHOUT_ENTRY, Difference
from opdb.recording import PROPERTY, Recorder
from opdb.recording import tool as load
from opdb.score import Score

import cupyops

tool = load("conformance")
FIGURES, GPU_FIGURES = tool.read(tool.FIGURES), tool.read(tool.GPU_FIGURES)
RUNS = [run for run in (FIGURES, GPU_FIGURES) if run is not None]
CASE = Backend("simulator", torch.device("cpu"))
KNOWN = Difference("vmap", ("simulator",), "no storage", "a reason")


def test_the_page_is_made_of_the_figures():
    made = tool.page(FIGURES, GPU_FIGURES)
    assert tool.PAGE.read_text(encoding="utf-8") == made, "run `python tools/conformance.py`"


def test_the_runs_passed():
    for run in RUNS:
        suites = [s for of in run["backends"].values() for row in of["rows"].values() for s in row["suites"].values()]
        assert suites and not run["failures"] and not any(suite["failed"] for suite in suites)


def test_every_operator_is_in_the_figures():
    """Each function in a row of its own or known to have no entry, each registered operator called by some sample."""
    public = {name for name, f in vars(cupyops.ops).items() if not name.startswith("_") and callable(f)}
    assert {*FUNCTIONS.values(), *WITHOUT_ENTRY} == public and FIGURES["without_entry"] == WITHOUT_ANY_ENTRY
    ours = [op for name, op in cupyops.operators().items() if name.startswith("cupyops::")]
    registered = {op.name for op in ours if not op.definition.mutated}  # those in place: tests/ops/test_in_place.py
    for name in ("reference", "simulator"):
        rows = tool.rows_of(FIGURES["backends"][name]["rows"], "op_db")
        called = {operator for row in rows.values() for operator in row["operators"]}
        assert called | {f"cupyops::{name}" for name in {*WITHOUT_ENTRY, *BEHIND_OTHERS}} == registered, (
            "run `make conformance`"
        )
        assert {row.partition(".")[0] for row in rows} == set(FUNCTIONS.values()), "run `make conformance`"
        for database, known in (("module_db", MODULES), ("optim_db", OPTIMIZERS)):
            rows = tool.rows_of(FIGURES["backends"][name]["rows"], database)
            assert {row.partition(".")[2] for row in rows} == set(known), "run `make conformance`"


def test_every_suite_is_in_the_figures():
    for run in RUNS:
        for of in run["backends"].values():
            for database, (*_, known) in tool.DATABASES.items():
                rows = tool.rows_of(of["rows"], database)
                suites = {suite for row in rows.values() for suite in row["suites"]}
                # a GPU's figures may be of before the database was tried, and PyTorch has few errors for it
                may_lack = {"other dtypes", "optimizer errors"} if rows or run is FIGURES else set(known)
                assert suites <= set(known) and set(known) - suites <= may_lack


def test_the_kernels_took_part():
    for run in RUNS:
        for name, of in run["backends"].items():
            launching = [row["launching"] > 0 for row in of["rows"].values() if row["calls"] and row["operators"]]
            assert launching and (not any(launching) if name == "reference" else launching.count(False) <= 1)


def test_a_score_counts_and_keeps_the_errors():
    score = Score(CASE, "relu")
    with score.sample("vmap", "a"):
        pass
    with score.sample("vmap", "b"):
        raise ValueError("wrong")
    with score.sample("vmap", "c", KNOWN):
        raise RuntimeError("there is no storage")
    with score.sample("vmap", "d", KNOWN):
        raise RuntimeError("another error")
    score.leave_out("vmap", "no time", 3)
    score.leave_out("gradcheck", "no time", 0)
    counted = {"passed": 1, "failed": 2, "differs": {"a reason": 1}, "left_out": {"no time": 3}}
    assert score.counts["suites"] == {"vmap": counted}
    with pytest.raises(ExceptionGroup, match="2 of 3") as caught:
        score.raise_if_failed()
    assert [str(error) for error in caught.value.exceptions] == ["wrong", "another error"]
    assert caught.value.exceptions[0].__notes__ == ["vmap: b"]


def test_a_test_that_tried_nothing_has_failed():
    score = Score(CASE, "relu")
    score.leave_out("vmap", "no time", 3)
    with pytest.raises(AssertionError, match="nothing was tried"):
        score.raise_if_failed()


def test_what_is_drawn():
    samples = list(range(100))
    chosen, left = drawn(samples, 7)
    assert len(chosen) == 7 and sorted(chosen + left) == samples and chosen == sorted(chosen)
    assert (chosen, left) == drawn(samples, 7)
    assert drawn(samples, None) == drawn(samples, 100) == (samples, [])


def written(tmp_path, *scores, failed=False):
    """The file of a run that had these scores."""
    recorder = Recorder(tmp_path / "figures.csv")
    for score in scores:
        properties = [(PROPERTY, score.counts), ("another", 1)]
        for when in ("setup", "call", "teardown"):
            recorder.pytest_runtest_logreport(
                SimpleNamespace(when=when, failed=failed, nodeid="a test", user_properties=properties)
            )
    recorder.pytest_sessionfinish()
    return tool.read(recorder.path)


def scored(row, launched):
    score = Score(CASE, row)
    with score.sample("vmap", ""):
        score.called({f"cupyops::{row}"}, launched)
    score.leave_out("vmap", "no time", 2)
    return score


def test_a_run_is_the_sum_of_its_tests(tmp_path):
    run = written(tmp_path, scored("relu", True), scored("add", False), scored("relu", False))
    assert list(run["backends"]) == ["simulator"] and run["failures"] == []
    rows = run["backends"]["simulator"]["rows"]
    assert list(rows) == ["add", "relu"]
    vmap = {"passed": 2, "failed": 0, "differs": {}, "left_out": {"no time": 4}}
    assert rows["relu"] == {"calls": 2, "launching": 1, "operators": ["cupyops::relu"], "suites": {"vmap": vmap}}
    assert {"sha256", "date", "torch", "gpu"} <= set(run) and run["gpu"] is None
    tool.keep(tmp_path / "again.csv", run)
    assert tool.read(tmp_path / "again.csv") == run
    assert written(tmp_path, scored("relu", True), failed=True)["failures"] == ["a test"]


def test_a_page_tells_what_failed_and_what_did_not_count(tmp_path):
    score = scored("relu", True)
    with score.sample("gradcheck", ""):
        raise ValueError("wrong")
    with score.sample("vmap", "", KNOWN):
        raise ValueError("no storage")
    run = written(tmp_path, score, failed=True)
    tool.keep(tmp_path / "again.csv", run)
    assert tool.read(tmp_path / "again.csv") == run
    page = tool.page(run, None)
    assert "| operator | gradcheck | vmap | by kernels |" in page
    assert "| `relu` | 0 / 1 **1 failed** | 1 / 4 (1 a, 2 b) | 1 / 1 |" in page
    assert "- a: a reason\n- b: no time\n" in page and "**Failed tests: 1.**" in page
    assert "- a reason: `relu` (simulator)." in page
    assert page.count("No figures yet") == 2


def test_a_page_says_when_the_gpu_ran_other_code(tmp_path):
    figures = written(tmp_path, scored("relu", True))
    of_gpu = {"about": "", "rows": figures["backends"]["simulator"]["rows"]}
    gpu = {**figures, "gpu": "a GPU", "backends": {"gpu": of_gpu}}
    assert ", a GPU." in tool.page(figures, gpu) and "code was another" not in tool.page(figures, gpu)
    assert "code was another" in tool.page(figures, {**gpu, "sha256": "0"})
