"""Statistics, and the loop around a clock."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import cupyops
from cupyops.bench import Case, measure, timing
from cupyops.bench.results import Row
from cupyops.bench.timing import Time


class Clock:
    """Every sample takes 1 us more than the one before."""

    def __init__(self):
        self.times = itertools.count(1.0)

    def sample(self, call, before=None):
        call(None if before is None else before())
        return next(self.times)


def test_median_and_quartiles():
    assert Time.of([5, 1, 4, 2, 3]) == Time(3, 2, 4, 5)
    assert Time.of([7]) == Time(7, 7, 7, 1)
    assert Time.of([1, 2, 3, 100]).median == 2.5


def test_rounds_are_interleaved_and_begin_with_each_in_turn():
    order = []

    def one(name):
        def run(clock):
            order.append(name)
            return {"forward": clock.sample(lambda _: None)}

        return run

    found = timing.interleaved({name: one(name) for name in "abc"}, Clock(), seconds=60, most=6)
    assert "".join(order) == "abcbcacababcbcacab"
    assert {name: parts["forward"].samples for name, parts in found.items()} == {"a": 6, "b": 6, "c": 6}


def test_it_stops_after_a_while_but_not_before_nine_rounds(monkeypatch):
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=itertools.count(0, 10).__next__))
    found = timing.interleaved({"a": lambda clock: {"forward": 1.0}}, Clock(), seconds=5)
    assert found["a"]["forward"].samples == 9


def relu(**options):
    make = lambda device, dtype: (torch.randn(8, device=device, dtype=dtype, requires_grad=True),)
    return Case(
        "relu", "8", torch.float32, make, cupyops.relu, torch.relu, forward_bytes=64, backward_bytes=96, **options
    )


def runs(case, call=torch.relu, made=None):
    arguments = case.make("cpu", case.dtype)
    return measure.samples(case, call, arguments, {} if made is None else made)


def test_the_parts_of_a_sample():
    each, whole = runs(relu())
    assert each(Clock()) == {"forward": 1.0, "backward": 2.0}
    assert whole()[0].shape == (8,)
    assert runs(relu(together=True))[0](Clock()) == {"together": 1.0}


def test_backward_is_timed_with_a_graph_of_its_own_each_time():
    """A clock may call it several times."""

    class Twice(Clock):
        def sample(self, call, before=None):
            super().sample(call, before)
            return super().sample(call, before)

    assert runs(relu())[0](Twice()) == {"forward": 2.0, "backward": 4.0}


def test_outputs_alike_are_given_the_same_gradient():
    made, given = {}, []

    def seen(call):
        class Watch(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return call(x)

            @staticmethod
            def backward(ctx, grad_y):
                given.append(grad_y.data_ptr())
                return torch.zeros(8)

        return Watch.apply

    for call in (torch.relu, torch.sigmoid, lambda x: x[::2].clone()):
        runs(relu(), seen(call), made)[0](Clock())
    assert given[0] == given[1] != given[2] and len(made) == 2


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is done with waiting when the host has been busy for 3 million cycles."""
    slept = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def synchronize(self):
            pass

        def query(self):
            return slept[-1] < busy.cycles

        def elapsed_time(self, other):
            return 0.004

    busy = SimpleNamespace(cycles=0, slept=slept)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(1, dtype=dtype))
    return busy


def test_a_sample_waits_for_the_host(gpu):
    gpu.cycles = 3_000_000
    calls = []
    us = timing.GpuClock().sample(calls.append, before=lambda: "given")
    assert us == pytest.approx(4)
    assert gpu.slept == [timing.AHEAD, 2 * timing.AHEAD, 4 * timing.AHEAD, 8 * timing.AHEAD]
    assert calls == ["given"] * 4


def test_a_sample_does_not_wait_for_ever(gpu):
    gpu.cycles = 1e12
    timing.GpuClock().sample(lambda _: None)
    assert gpu.slept[-1] == timing.MOST_AHEAD
    gpu.cycles, gpu.slept[:] = 0, []
    timing.GpuClock().sample(lambda _: None)
    assert gpu.slept == [timing.AHEAD]


def judged(case, **calls):
    arguments = case.make("cpu", case.dtype)
    row = Row.of(case)
    names = measure._right(case, arguments, {"ours": case.ours, **calls}, row)
    return names, row


def test_a_right_result_is_timed():
    names, row = judged(relu(), eager=torch.relu)
    assert names == [] and row.compared and not row.wrong


@pytest.mark.parametrize("who", ["ours", "liger"])
def test_a_wrong_result_is_not(who):
    names, row = judged(relu(), **{who: lambda x: torch.relu(x) * 1.1})
    assert names == [who] and "Failure" in row.wrong[who]


def test_a_wrong_gradient_is_not():
    names, _ = judged(relu(), ours=lambda x: torch.relu(x.detach()) + (x - x.detach()))
    assert names == ["ours"]


def test_a_peer_that_raises_is_left_out():
    names, row = judged(relu(), liger=lambda x: 1 / 0)
    assert names == ["liger"] and row.wrong["liger"] == "ZeroDivisionError: division by zero"


def test_a_peer_that_writes_over_its_arguments_spoils_no_other():
    def liger(x):
        y = torch.relu(x)
        x.data.fill_(7)
        return y

    names, _ = judged(relu(), liger=liger, compile=torch.relu)
    assert names == []


def test_a_layout_in_which_pytorch_is_wrong():
    """PyTorch has no figure there, and what is right has one."""

    def eager(x):
        return x.exp() if x.is_contiguous() else x.exp() + 1

    def make(device, dtype):
        return (torch.randn(4, 6, device=device, dtype=dtype).t().requires_grad_(),)

    case = Case("exp", "4x6", torch.float32, make, torch.exp, eager, forward_bytes=8)
    names, row = judged(case, eager=eager)
    assert names == ["eager"] and "off by 1" in row.wrong["eager"]


def test_what_is_not_the_same_is_not_compared():
    _, row = judged(relu(same=False), ours=lambda x: x)
    assert not row.compared and not row.wrong
    assert not measure.compare(relu(same=False), "cpu")
    nothing = Case("step", "1", torch.float32, lambda device, dtype: (), lambda: None, lambda: None)
    assert not measure.compare(nothing, "cpu")


def on_the_cpu(size, **options):
    make = lambda device, dtype: (torch.randn(size, dtype=dtype, requires_grad=True),)
    return Case(
        "relu",
        str(size),
        torch.float32,
        make,
        cupyops.relu,
        torch.relu,
        forward_bytes=size,
        backward_bytes=size,
        **options,
    )


def test_a_case_beside_another_is_measured_in_turn_with_it(monkeypatch):
    monkeypatch.setattr(measure, "peak_memory", lambda call: 7)
    row = measure.measure(on_the_cpu(9, beside=on_the_cpu(18)), (), Clock())
    assert list(row.figures) == ["ours"] and list(row.memory) == ["ours"]
    assert (row.beside.size, list(row.beside.figures), row.beside.memory) == ("18", ["ours"], {"ours": 7})
    assert {figure.samples for one in (row, row.beside) for figure in one.figures["ours"].values()} == {40}
    forward, there = (one.figures["ours"]["forward"].us for one in (row, row.beside))
    assert row.to_beside("forward") == pytest.approx(there / forward / 2)


def test_where_all_are_wrong_nothing_is_timed(monkeypatch):
    wrong = on_the_cpu(9)
    object.__setattr__(wrong, "ours", lambda x: cupyops.relu(x) + 1)
    row = measure.measure(wrong, (), Clock())
    assert row.ways() == [] and "Failure" in row.wrong["ours"]


def test_a_wrong_result_beside_has_no_figure(monkeypatch):
    monkeypatch.setattr(measure, "peak_memory", lambda call: 7)
    wrong = on_the_cpu(18)
    object.__setattr__(wrong, "ours", lambda x: cupyops.relu(x) + 1)
    row = measure.measure(on_the_cpu(9, beside=wrong), (), Clock())
    assert row.ways() == ["forward", "backward"] and row.to_beside("forward") is None
    assert "Failure" in row.beside.wrong["ours"] and not row.wrong
