"""tools/soak.py finds what it is there to find: a wrong bit, a call that raises, a thread that hangs, a leak."""

import itertools
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import soak

from cupyops.testing.call import Call


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(soak, "console", Console(width=250))


def soaked(*args, seconds=0.8, backend="reference", status=0):
    options = ["--minutes", str(seconds / 60), "--backend", backend, "--pool", "8", "--seed", "3"]
    done = CliRunner().invoke(soak.app, [*args, *options])
    assert done.exit_code == status, done.output
    return done.output


def an_operator(monkeypatch, function):
    """`function` of a tensor is the only operator there is."""
    one = st.integers(1, 9).map(lambda n: Call(torch.arange(1.0, 1.0 + n).requires_grad_()))
    monkeypatch.setattr(soak, "FUZZED", {"mine": (function, function, one)})


def test_the_operators_hold():
    output = soaked("softmax", "linear", "max_pool2d", "cross_entropy")
    (row,) = [line for line in output.splitlines() if "softmax" in line]
    drawn, *counts, wrong = [int(cell) for cell in row.split("│")[2:-1]]
    assert drawn == 8 and all(counts) and wrong == 0
    assert torch.utils.deterministic.fill_uninitialized_memory  # as it was before
    assert "resident memory" in output and "grows" not in output


@pytest.mark.gpu
def test_every_way_on_a_gpu():
    output = soaked("softmax", "layer_norm", seconds=4, backend="gpu")
    (row,) = [line for line in output.splitlines() if "softmax" in line]
    drawn, *counts, wrong = [int(cell) for cell in row.split("│")[2:-1]]
    assert drawn == 8 and len(counts) == len(soak.WAYS_ON_A_GPU) and all(counts) and wrong == 0


def test_calls_made_larger():
    known = soak.draw("layer_norm", 21, 0, "cpu")
    most = [max(t.numel() for t in one.call.all_tensors()) for one in known]
    assert max(most) > 12_000 and sorted(most)[10] <= 4096
    assert all(one.number == number for number, one in enumerate(known))


def test_pytorch_is_not_asked_for_what_breaks_its_memory():
    """The window that holds nothing has a place outside, where the backward adds to the gradient."""
    pool = soak.FUZZED["max_pool2d"][0]
    x = torch.zeros(1, 1, 1, 1)
    assert int(torch.nn.functional.max_pool2d(x, (2, 1), 1, (1, 0), (2, 1), True, True)[1]) == 1
    assert not soak._harmless(pool, Call(x + torch.inf, (2, 1), 1, (1, 0), (2, 1), True))
    assert soak._harmless(pool, Call(x + torch.inf, (2, 1), 1, (1, 0), (1, 1), True))


@pytest.mark.parametrize("where", ["result", "gradient"])
def test_a_wrong_bit_is_found(monkeypatch, where):
    """Of one call in fifty that the threads make."""
    count, main = itertools.count(), threading.current_thread()

    def faulty(x):
        factor = 1 + 2**-20 * (threading.current_thread() is not main and next(count) % 50 == 49)
        return x * factor if where == "result" else x.detach() + (x - x.detach()) * factor

    an_operator(monkeypatch, faulty)
    output = soaked(status=1)
    assert f"{'output' if where == 'result' else 'gradient 0'}: torch.float" in output
    assert "python tools/soak.py  --backend reference --seed 3 --pool 8" in output


def test_a_call_that_is_not_the_same_twice(monkeypatch):
    count = itertools.count()
    an_operator(monkeypatch, lambda x: x + next(count))
    assert "mine, call 0, not the same twice: output: torch.float32, 1 of 1 elements" in soaked(status=1)


def test_a_call_that_raises(monkeypatch):
    main = threading.current_thread()

    def faulty(x):
        if threading.current_thread() is not main:
            raise ValueError("not in a thread")
        return x * 2

    an_operator(monkeypatch, faulty)
    assert "raised ValueError: not in a thread" in soaked(status=1)


def test_an_operator_that_takes_nothing(monkeypatch):
    def refuses(x):
        raise ValueError

    an_operator(monkeypatch, refuses)
    assert "mine: none of 32 calls drawn is sound" in soaked(status=1)


def test_a_thread_that_hangs(monkeypatch, capfd):
    monkeypatch.setattr(soak, "_PATIENCE", 0.05)
    main = threading.current_thread()
    over = threading.Event()

    def hangs(x):
        if threading.current_thread() is not main:
            over.wait(10)
        return x * 2

    an_operator(monkeypatch, hangs)
    try:
        assert "a thread hangs" in soaked(seconds=0.1, status=1)
    finally:
        over.set()
    assert "in hangs" in capfd.readouterr().err


def test_a_leak_of_open_files(monkeypatch):
    held = []

    def leaks(x):
        held.append(open("/dev/null"))
        time.sleep(0.01)
        return x * 2

    an_operator(monkeypatch, leaks)
    rows = [line for line in soaked(seconds=0.4, status=1).splitlines() if "grows" in line]
    assert any("open files" in row for row in rows)
    for file in held:
        file.close()


@pytest.mark.parametrize("with_plans", [False, True])
def test_a_leak_of_objects(monkeypatch, with_plans):
    """What goes with the plans is none: they are bounded, fill for long, and are forgotten where objects are counted."""
    held = []

    def holds(x):
        held.extend([] for _ in range(1000))
        return x * 2

    an_operator(monkeypatch, holds)
    if with_plans:
        monkeypatch.setattr(soak.plans, "forget_all", held.clear)
    said = soaked(seconds=0.4, status=0 if with_plans else 1)
    assert any("Python" in row and "grows" in row for row in said.splitlines()) != with_plans


@pytest.mark.parametrize(
    ("sizes", "grows"),
    [
        ([0, 90, 100, 100, 100, 100, 100, 100], False),  # at the start alone
        ([100, 140, 100, 140, 100, 140, 100, 140], False),  # up and down
        ([100, 110, 120, 130, 140, 150, 160, 170], True),
        ([100, 90, 120, 110, 140, 130, 160, 150], True),
        ([100], False),
        ([], False),
    ],
)
def test_growth(sizes, grows):
    samples = [{"open files": size} for size in sizes]
    assert soak.leaks(samples) == (["open files"] if grows else [])


def test_what_stays():
    ours = [
        {"filename": "/home/a/mine.py", "line": 3, "name": "f"},
        {"filename": "/home/a/mine.py", "line": 9, "name": "g"},
    ]
    frames = [{"filename": f"{Path(torch.__file__).parent}/nn/modules/module.py", "line": 1, "name": "forward"}, *ours]
    blocks = [
        {"state": "active_allocated", "size": 512, "frames": frames},
        {"state": "active_allocated", "size": 512, "frames": frames},
        {"state": "active_allocated", "size": 4096},  # from before lines were recorded
        {"state": "inactive", "size": 8192, "frames": frames},
    ]
    assert soak.what_stays({"segments": [{"blocks": blocks}]}) == {"mine.py:3 f < mine.py:9 g": 1024}


def test_unknown_names():
    for args in (["softmin"], ["--backend", "tpu"]):
        assert CliRunner().invoke(soak.app, args).exit_code == 2


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA GPU" in soaked("relu", backend="gpu", status=2)
