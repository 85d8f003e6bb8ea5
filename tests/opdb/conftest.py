"""PyTorch's own database of operator samples, in a process of its own: `python -m pytest tests/opdb`.

Importing it (and `torch.testing._internal` beneath it) freezes PyTorch's backend flags for the whole process, so these tests
run beside no others. `--conformance=PATH` keeps what they count, for tools/conformance.py.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

torch.backends.cudnn.allow_tf32 = False  # before the flags are frozen: fp32 is compared with fp32
torch.backends.cuda.matmul.allow_tf32 = False
torch.set_num_threads(1)

import kept  # noqa: E402
from opdb.backends import BACKENDS, DTYPES  # noqa: E402
from opdb.known import named  # noqa: E402
from opdb.recording import PROPERTY, Recorder  # noqa: E402
from opdb.score import Score  # noqa: E402

HERE = Path(__file__).parent
_compiled: Counter[str] = Counter()  # what became of the samples that torch.compile had


def pytest_addoption(parser):
    parser.addoption("--conformance", type=Path, metavar="PATH", help="write what was counted into PATH (CSV)")
    parser.addoption("--every-sample", action="store_true", help="compile all of op_db in the simulator, not a part")


def pytest_configure(config):
    options = config.option
    if options.conformance is None or hasattr(config, "workerinput"):  # under xdist the workers have nothing to write
        return
    left_out = options.deselect or options.quick or getattr(options, "stale", False)
    if left_out or options.keyword or options.markexpr not in ("", "gpu"):
        raise pytest.UsageError("--conformance is of a whole run: no -k, no --deselect, no --quick, no --stale")
    config.pluginmanager.register(Recorder(options.conformance), "conformance-recorder")


def pytest_collection_modifyitems(items):
    if any(HERE not in item.path.parents for item in items):
        raise pytest.UsageError("tests/opdb needs a process of its own: python -m pytest tests/opdb")


def pytest_runtest_logreport(report):
    if report.when == "call":
        for name, outcomes in report.user_properties:
            if name == "compiled samples":
                _compiled.update(outcomes)


def pytest_terminal_summary(terminalreporter):
    if _compiled:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in _compiled.most_common())
        terminalreporter.write_line(f"samples through torch.compile: {counts}")


OF_REFERENCES = 60  # samples of a kind and dtype, with --quick: of max_pool2d alone there are thousands
MARKS = {"gpu": [pytest.mark.gpu], "simulator": [pytest.mark.slow]}


@pytest.fixture(params=[pytest.param(b, id=b.name, marks=MARKS.get(b.name, [])) for b in BACKENDS])
def backend(request, monkeypatch):
    """Where the operators run; the simulator's kernels are compiled once for all tests."""
    if request.param.name == "simulator":
        kept.texts_alone(monkeypatch)
    if request.param.name == "reference" and request.config.option.quick:
        return replace(request.param, most=dict.fromkeys(DTYPES, OF_REFERENCES))
    return request.param


@pytest.fixture
def score(request, info, backend):
    """What the test counts; it ends with `score.raise_if_failed()`."""
    counted = Score(backend, named(info))
    request.node.user_properties.append((PROPERTY, counted.counts))
    return counted
