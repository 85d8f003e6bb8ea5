"""trace(): records, routes, the table, nesting, threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import toys
from toys import clean_registry as clean_registry

import cupyops
from cupyops import Kernel
from cupyops._util import tracing
from cupyops._util.tracing import Record, Trace

KERNEL = "template <typename T> __global__ void touch(T* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += T(1); }\n"
touch = Kernel(KERNEL, "touch<T>")


@pytest.fixture
def launching():
    """An operator that launches one kernel forward and two backward, on CPU tensors as far as a trace can tell."""

    @cupyops.operator(toys.fresh("launching"))
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @op.forward
    def _(x):
        y = x.detach() + 1
        touch[(2, 3), 32](y, y.numel(), T=y.dtype)
        return y, ()

    @op.backward
    def _(saved, grad_y):
        for grid in (4, (1, 1, 5)):
            touch[grid, (8, 4)](grad_y, 1, T=grad_y.dtype)
        return grad_y.clone()

    with toys.executor():
        yield op


def test_nothing_is_recorded_outside(launching):
    with cupyops.trace() as trace:
        pass
    launching(torch.ones(2))
    assert trace.records == [] and tracing.active is None


def test_records_of_launches(launching):
    x = torch.ones(2, requires_grad=True)
    with cupyops.trace() as trace:
        launching(x).sum().backward()
    first, second, third = trace.records
    assert first == Record(launching.name, "kernel", "touch<float>", (2, 3, 1), (32, 1, 1), "float32", "")
    assert second == Record(
        f"{launching.name} (backward)", "kernel", "touch<float>", (4, 1, 1), (8, 4, 1), "float32", ""
    )
    assert third.grid == (1, 1, 5) and trace.launches() == trace.records and trace.routes() == {"kernel"}


def test_records_of_calls_without_a_launch():
    op, _ = toys.product()
    with cupyops.trace() as trace:
        op(torch.ones(2), torch.ones(2))
    assert trace.records == [Record(op.name, "reference", dtype="float32", note="tensors on cpu")]
    assert trace.launches() == []


def test_a_launch_outside_any_operator():
    x = torch.ones(2, dtype=torch.float64)
    with toys.executor(), cupyops.trace() as trace:
        touch[1, 2](x, 2, T=x.dtype)
    assert trace.records == [Record("", "kernel", "touch<double>", (1, 1, 1), (2, 1, 1), "float64")]


def test_operators_inside_operators(launching):
    """A reference that calls another operator: the outer record first, each launch under the innermost name."""

    @cupyops.operator(toys.fresh("outer"))
    def outer(x: torch.Tensor) -> torch.Tensor:
        return launching(x) * 2

    with cupyops.trace() as trace:
        outer(torch.ones(2))
    assert [(r.operator, r.route, r.kernel) for r in trace.records] == [
        (outer.name, "reference", ""),
        (launching.name, "kernel", "touch<float>"),
    ]
    with cupyops.trace() as trace:
        launching(torch.ones(2))
    assert trace.records[0].operator == launching.name


def test_the_innermost_trace_records(launching):
    with cupyops.trace() as outer:
        launching(torch.ones(2))
        with cupyops.trace() as inner:
            launching(torch.ones(2))
            launching(torch.ones(2))
        launching(torch.ones(2))
    assert (len(outer.records), len(inner.records)) == (2, 2) and tracing.active is None


def test_an_error_closes_the_trace():
    with pytest.raises(ZeroDivisionError), cupyops.trace():
        1 / 0  # noqa: B018
    assert tracing.active is None


def test_an_error_inside_an_operator_leaves_no_name_behind(launching):
    @cupyops.operator(toys.fresh("failing"))
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with toys.executor(), cupyops.trace() as trace:
        with pytest.raises(ZeroDivisionError):
            failing(torch.ones(2))
        x = torch.ones(2)
        touch[1, 2](x, 2, T=x.dtype)
    assert trace.launches()[0].operator == ""


def test_a_refused_launch_is_not_recorded(launching):
    with cupyops.trace() as trace, pytest.raises(cupyops.LaunchError):
        touch[1, 2](torch.ones(2), 0.5, T=torch.float32)
    assert trace.launches() == []


def test_zero_grids_and_dry_runs_are_not_launches(launching):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with cupyops.trace() as trace:
        touch[0, 2](torch.ones(2), 0, T=torch.float32)
        with FakeTensorMode():
            launching(torch.ones(2))
    assert trace.launches() == [] and [r.route for r in trace.records] == ["torch.library"]


def test_threads_keep_their_names_apart():
    """Launches of two threads, interleaved by force, each under its own operator."""
    barrier = threading.Barrier(2)

    def define(stem):
        @cupyops.operator(toys.fresh(stem))
        def op(x: torch.Tensor) -> torch.Tensor:
            return x

        @op.forward
        def _(x):
            y = x.clone()
            for _ in range(5):
                barrier.wait()
                touch[1, 2](y, 2, T=y.dtype)
            return y, ()

        return op

    ops = [define("one"), define("two")]
    with toys.executor(), cupyops.trace() as trace, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda op: op(torch.ones(2)), ops))
    for op in ops:
        assert [r.operator for r in trace.records].count(op.name) == 5
    assert len(trace.records) == 10


def test_a_call_without_a_launch_is_recorded_beside_launches_of_another_thread():
    """What another thread launches meanwhile is not taken for this call's own."""
    started, done = threading.Event(), threading.Event()

    @cupyops.operator(toys.fresh("silent"))
    def silent(x: torch.Tensor) -> torch.Tensor:
        return x

    @silent.forward
    def _(x):
        started.set()
        assert done.wait(10)
        return x.clone(), ()

    def other():
        started.wait(10)
        x = torch.ones(2)
        touch[1, 2](x, 2, T=x.dtype)
        done.set()

    with toys.executor(), cupyops.trace() as trace:
        thread = threading.Thread(target=other)
        thread.start()
        silent(torch.ones(2))
        thread.join()
    assert sorted((r.operator, r.kernel) for r in trace.records) == [("", "touch<float>"), (silent.name, "")]


def test_table(launching):
    x = torch.ones(2, requires_grad=True)
    plain, _ = toys.product(dtypes=torch.float32)
    with cupyops.trace() as trace:
        launching(x).sum().backward()
        plain(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    text = str(trace)
    head, rule, *rows = text.splitlines()
    assert head.split() == ["operator", "route", "kernel", "grid", "block", "dtype", "note"]
    assert set(rule) == {"-"} and len(rows) == 4
    assert rows[0].split() == [launching.name, "kernel", "touch<float>", "2x3", "32", "float32"]
    assert "1x1x5" in rows[2] and "8x4" in rows[1] and rows[3].endswith("no kernel for torch.int64")
    assert all(line == line.rstrip() for line in rows)
    column = head.index("dtype")
    assert all(row[column:].startswith(("float32", "int64")) for row in rows)


def test_empty_table():
    assert str(Trace()).split() == ["operator", "route", "---------------"]


def test_time_column_only_where_there_are_times():
    trace = Trace()
    trace.records.append(Record("a::b", "kernel", "k", (1,), (1,)))
    assert "time (us)" not in str(trace)

    class Event:
        def synchronize(self): ...

        def elapsed_time(self, end):
            return 0.0125

    trace.records.append(Record("a::b", "kernel", "k", (1,), (1,), _events=(Event(), Event())))
    assert "time (us)" in str(trace) and "12.5" in str(trace) and trace.records[1].microseconds == 12.5


def test_untraced_calls_pay_for_nothing(launching, monkeypatch):
    def boom(*args, **kwargs):
        raise AssertionError("an untraced call entered the tracing code")

    monkeypatch.setattr(tracing, "operator", boom)
    monkeypatch.setattr(tracing, "launch", boom)
    launching(torch.ones(2, requires_grad=True)).sum().backward()


@pytest.mark.gpu
def test_on_a_gpu():
    x = torch.randn(1000, device="cuda", requires_grad=True)
    cupyops.relu(x).sum().backward()
    with cupyops.trace() as trace:
        cupyops.relu(x).sum().backward()
    assert [r.kernel for r in trace.records] == ["relu_fwd<float>", "relu_bwd<float>"]
    assert all(0 < r.microseconds < 1e6 for r in trace.records) and "time (us)" in str(trace)


@pytest.mark.gpu
def test_inside_a_graph_capture():
    x = torch.randn(1000, device="cuda")
    cupyops.relu(x)
    graph = torch.cuda.CUDAGraph()
    with cupyops.trace() as trace, torch.cuda.graph(graph):
        cupyops.relu(x)
    assert [r.microseconds for r in trace.records] == [None] and "relu_fwd" in str(trace)
