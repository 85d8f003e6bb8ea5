"""cupyops.simulate(): CPU tensors as a kernel's memory, and who runs a launch while it is open."""

import gc
import os
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from processes import run_python

import cupyops
from cupyops import _simulate, simulator
from cupyops._kernel import kernel
from cupyops.simulator import OutOfBounds, Race, Uninitialized

COPY = """
template <typename T> __global__ void copy(const T* x, T* y, int shift, int n) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < n) y[i] = x[i + shift];
}
"""
copy = cupyops.Kernel(COPY, "copy<T>", T=(torch.float32, torch.float16))

LAST = """
__global__ void last(int* winner, int* seen) {
  atomicExch(winner, blockIdx.x);
  seen[blockIdx.x] = 1;
}
"""
last = cupyops.Kernel(LAST, "last")

SCALE = """
struct Factors { double a; int count; float b; };
__global__ void scale(const float* x, float* y, Factors f) {
  const int i = threadIdx.x;
  if (i < f.count) y[i] = float(f.a) * x[i] + f.b;
}
"""
scale = cupyops.Kernel(SCALE, "scale")

ADDRESSED = """
struct Table { float* to[2]; int size; };
__global__ void fill(float* anchor, Table table) {
  for (int t = 0; t < 2; t++)
    if (threadIdx.x < table.size) table.to[t][threadIdx.x] = t + 1;
}
"""
fill = cupyops.Kernel(ADDRESSED, "fill")

RACY = """
__global__ void meet(int* y) { y[0] = blockIdx.x; }
"""
meet = cupyops.Kernel(RACY, "meet")


def shifted(x, y, shift=0, n=None, copy=copy):
    copy[1, 256](x, y, shift, y.numel() if n is None else n, T=x.dtype)


def allocations():
    return _simulate._memory().allocations


# --- which memory a tensor is ---


def test_views_of_one_storage_are_one_allocation():
    """What is written through one view is read through another; and the memory is the tensor's own, no copy."""
    whole = torch.arange(20, dtype=torch.float32)
    gc.collect()
    with cupyops.simulate():
        before = len(allocations())
        shifted(whole[:4], whole[10:14])
        shifted(whole[10:14], whole.view(4, 5)[3, :4])
        assert len(allocations()) == before + 1
        first = _simulate._pointer(whole[3:], "x")
        gc.collect()
        second = _simulate._pointer(whole.view(2, 10)[1], "x")
    assert first.allocation is second.allocation and second.address - first.address == 4 * 7
    assert whole[10:14].tolist() == whole[15:19].tolist() == [0, 1, 2, 3]


THROUGH = """
struct Place { float* to; };
__global__ void through(const float* x, Place place, int at) { place.to[at] = x[0]; }
"""
through = cupyops.Kernel(THROUGH, "through")


def test_a_struct_may_point_to_another_view_of_a_storage():
    """As flat parameters and buckets have them: what one view holds is no bound for the other."""
    flat = torch.zeros(8)
    first, second = flat[:4], flat[4:]
    with cupyops.simulate():
        place = np.array([cupyops.address(second)], np.uint64)
        through[1, 1](first + 1, place, 0)
        through[1, 1](first, place, 3)  # whose storage is the one that the struct points into
        with pytest.raises(cupyops.SimulatorError, match="outside `x`"):
            through[1, 1](first, place, 4)
        other = torch.zeros(8)
        with pytest.raises(cupyops.SimulatorError, match="outside"):
            through[1, 1](other[:4], np.array([cupyops.address(other[:4])], np.uint64), 4)
    assert flat.tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


def test_storages_are_apart():
    """A pointer that runs off one tensor never reaches the next."""
    x, y = torch.zeros(4), torch.zeros(4)
    with cupyops.simulate():
        assert abs(_simulate._pointer(x, "x").address - _simulate._pointer(y, "y").address) >= 1 << 40


@pytest.mark.parametrize(("shift", "offset"), [(-1, "before"), (1, "past the end")])
def test_only_the_view_may_be_touched(shift, offset):
    """Its storage goes on to either side; the tensor that was given does not."""
    storage, y = torch.arange(12.0), torch.empty(8)
    with cupyops.simulate(), pytest.raises(OutOfBounds, match=f"read of 4 bytes outside `x`.*(\n.*)*{offset}"):
        shifted(storage[2:10], y, shift)
    with cupyops.simulate():  # and the restriction was for that launch alone
        shifted(storage, y, 1)
    assert y.tolist() == storage[1:9].tolist()


def test_two_views_given_allow_what_lies_between():
    """A kernel may reach from one argument's elements to another's where both are views of one storage."""
    storage = torch.arange(12.0)
    with cupyops.simulate():
        shifted(storage[:4], storage[8:], 2)
    assert storage[8:].tolist() == [2, 3, 4, 5]


def test_strides_count():
    """The extent of a view is that of its strides: of a column, down to its last element and no further."""
    table, y = torch.arange(12.0).view(4, 3), torch.empty(10)
    through_gaps = cupyops.Kernel(COPY, "copy<T>", strided=True)
    with cupyops.simulate():
        shifted(table[:, 0], y, copy=through_gaps)
        with pytest.raises(OutOfBounds, match="just past the end"):
            shifted(table[:, 0], y, 1, copy=through_gaps)
    assert y.tolist() == list(range(10))


def test_storages_are_forgotten():
    """Two hundred launches on new tensors leave no allocation behind, and keep no storage alive."""
    x = torch.randn(16)
    with cupyops.simulate():
        cupyops.relu(x)  # the variables of its module stay
    gc.collect()
    before = len(allocations())
    with cupyops.simulate():
        y = torch.empty(16)
        storage = weakref.ref(y.untyped_storage())
        shifted(x, y)
        del y
        gc.collect()
        assert storage() is None
        for _ in range(200):
            cupyops.relu(x)
    gc.collect()
    assert len(allocations()) <= before


def test_a_storage_that_moves():
    """`resize_` may put it elsewhere: kernels follow."""
    x, y = torch.arange(4.0), torch.empty(4)
    with cupyops.simulate():
        shifted(x, y)
        before = y.data_ptr()
        x.resize_(100_000).fill_(3)
        y.resize_(200_000).zero_()
        assert y.data_ptr() != before
        shifted(x[-200:], y[-200:])
    assert torch.equal(y[-200:], torch.full((200,), 3.0)) and not y[:-200].any()


def test_tensors_that_need_no_storage_of_their_own():
    """From NumPy, expanded, in inference mode, as a Parameter."""
    array = np.arange(6, dtype=np.float32)
    with cupyops.simulate(), torch.inference_mode():
        y = torch.empty(6)
        shifted(torch.from_numpy(array), y)
        assert y.tolist() == array.tolist()
        shifted(torch.tensor([5.0]).expand(6), y, 0, 1)
        assert y[0] == 5
        shifted(torch.nn.Parameter(torch.ones(6)), y)
        assert y.tolist() == [1] * 6
        torch.testing.assert_close(cupyops.softmax(y, 0), torch.full((6,), 1 / 6))


# --- memory that holds nothing yet ---

MAKERS = {
    "empty": lambda like: torch.empty(like.shape),
    "empty_like": torch.empty_like,
    "empty_strided": lambda like: torch.empty_strided(like.shape, like.stride()),
    "empty_permuted": lambda like: torch.empty_permuted(like.shape, (0,)),
    "new_empty": lambda like: like.new_empty(like.shape),
    "new_empty_strided": lambda like: like.new_empty_strided(like.shape, like.stride()),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("inference", [False, True])
def test_reading_what_nothing_has_written(maker, inference):
    x = torch.arange(8.0)
    with torch.inference_mode(inference), cupyops.simulate():
        middle, y = MAKERS[maker](x), torch.empty(8)
        shifted(x, middle, n=7)
        shifted(middle, y, n=7)
        with pytest.raises(Uninitialized, match=r"`x`"):
            shifted(middle, y)
    with cupyops.simulate(check=False):
        shifted(middle, y)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.fill_(2),
        lambda t: t[2:].fill_(2),
        lambda t: torch.add(torch.ones(6), 1, out=t[2:]),
        lambda t: t[2:].copy_(torch.full((6,), 2.0)),
        lambda t: t[2:].numpy().fill(2),
    ],
    ids=["fill_", "a view's fill_", "out=", "copy_", "numpy"],
)
def test_what_pytorch_has_written_is_written(write, inference):
    """Before the first launch on it, and after a kernel has written the rest."""
    with torch.inference_mode(inference), cupyops.simulate():
        for by_kernel_first in (False, True):
            middle, y = torch.empty(8), torch.empty(8)
            if by_kernel_first:
                shifted(torch.ones(2), middle, n=2)
            write(middle)
            shifted(middle[2:], y, n=6)
            assert y[:6].tolist() == [2] * 6


def test_empty_before_is_not_watched():
    """A tensor that was made outside is PyTorch's business."""
    x, y = torch.empty(8), torch.empty(8)
    with cupyops.simulate():
        shifted(x, y)


# --- arguments ---


def test_struct_by_value():
    factors = np.zeros((), np.dtype([("a", "f8"), ("count", "i4"), ("b", "f4")]))
    factors["a"], factors["count"], factors["b"] = 3, 5, 0.5
    x, y = torch.arange(8.0), torch.zeros(8)
    with cupyops.simulate():
        scale[1, 32](x, y, factors)
        with pytest.raises(cupyops.LaunchError, match="Factors f"):
            scale[1, 32](x, y, np.zeros(3, np.float64))
    assert y.tolist() == [0.5, 3.5, 6.5, 9.5, 12.5, 0, 0, 0]


def test_addresses_inside_a_struct():
    """`addressing` gives what the struct is to hold."""
    tensors = [torch.zeros(4), torch.zeros(9)[5:]]
    with cupyops.simulate():
        address = kernel.addressing(torch.device("cpu"))
        table = np.zeros((), np.dtype([("to", "u8", 2), ("size", "i4"), ("pad", "i4")]))
        table["to"], table["size"] = [address(t) for t in tensors], 4
        fill[1, 32](tensors[0], table)
    assert [t.tolist() for t in tensors] == [[1] * 4, [2] * 4]
    assert kernel.addressing(torch.device("cpu"))(tensors[1]) == tensors[1].data_ptr()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.ones(4), torch.ones(4).double(), 0, 4), "`T[*] y` got a tensor of torch.float64"),
        ((torch.ones(4), torch.ones(4, device="meta"), 0, 4), "a tensor without memory, of torch.export"),
        ((torch.ones(4), torch.ones(4), 0.5, 4), "an integer"),
        ((torch.ones(4), torch.ones(4), 2**31, 4), "an integer that fits int"),
        ((torch.ones(4), torch.ones(4), 0), "3 arguments given, 4 declared"),
    ],
)
def test_arguments_are_checked_as_on_a_gpu(args, words):
    with cupyops.simulate(), pytest.raises(cupyops.LaunchError, match=words):
        copy[1, 32](*args, T=torch.float32)


def test_null_pointer():
    with cupyops.simulate(), pytest.raises(OutOfBounds, match="null"):
        copy[1, 32](torch.ones(4), None, 0, 4, T=torch.float32)


def test_a_grid_of_nothing():
    with cupyops.simulate(), cupyops.trace() as trace:
        copy[0, 32](torch.ones(4), torch.ones(4), 0, 4, T=torch.float32)
    assert not trace.records


# --- who runs a launch ---


def test_outside_there_is_no_way_to_run():
    x, y = torch.ones(4), torch.zeros(4)
    for _ in range(2):
        with pytest.raises(cupyops.LaunchError, match=r"or on the CPU inside cupyops.simulate\(\)"):
            shifted(x, y)
        with cupyops.trace() as trace:
            cupyops.relu(x)
        assert trace.routes() == {"reference"} and not cupyops.simulating()
        with cupyops.simulate():
            assert cupyops.simulating()
            shifted(x, y)


def test_nested():
    """The inner one's options hold inside it, the outer one's again after it; one object can be entered twice."""
    racy = torch.zeros(1, dtype=torch.int32)
    outer = cupyops.simulate("sm_80")
    with outer:
        with cupyops.simulate("sm_90", check=False) as inner:
            assert kernel.executors["cpu"] is inner
            meet[2, 1](racy)
            with outer, pytest.raises(Race):
                meet[2, 1](racy)
            assert kernel.executors["cpu"] is inner
        assert kernel.executors["cpu"] is outer
        with pytest.raises(Race):
            meet[2, 1](racy)
    assert "cpu" not in kernel.executors


def test_threads_that_leave_in_another_order_than_they_entered():
    """The CPU is given back when the last has left, whoever that is."""
    entered, left = threading.Event(), threading.Event()
    shared, seen = cupyops.simulate(), []

    def other():
        with shared:
            entered.set()
            assert left.wait(60)
            x, y = torch.ones(8), torch.empty(8)
            shifted(x, y)  # the first one has left, and kernels still run here
            seen.append(y.tolist())

    thread = threading.Thread(target=other)
    with shared:
        thread.start()
        assert entered.wait(60)
    assert kernel.executors["cpu"] is shared
    left.set()
    thread.join()
    assert len(seen) == 1 and "cpu" not in kernel.executors
    assert not torch.overrides._get_current_function_mode_stack()


def test_many_threads_that_enter_and_leave_at_once():
    def one(_):
        for _ in range(50):
            with cupyops.simulate():
                assert cupyops.simulating()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    assert "cpu" not in kernel.executors


def test_an_error_closes_it():
    with pytest.raises(Race), cupyops.simulate():
        meet[2, 1](torch.zeros(1, dtype=torch.int32))
    assert "cpu" not in kernel.executors
    assert not torch.overrides._get_current_function_mode_stack()


def test_the_order_is_drawn():
    """Blocks run in another order with another seed, and in the same with the same."""

    def order(seed):
        winner, seen = torch.zeros(1, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        with cupyops.simulate(seed=seed):
            last[64, 1](winner, seen)
        assert seen.sum() == 64
        return winner.item()

    assert order(None) == order(None) and [order(s) for s in range(6)] == [order(s) for s in range(6)]
    assert len({order(s) for s in range(6)}) > 1


def test_steps_run_out():
    code = "__global__ void forever(volatile int* x) { while (x[0] == 0) {} }"
    forever = cupyops.Kernel(code, "forever")
    with cupyops.simulate(max_steps=1000), pytest.raises(simulator.StepLimit):
        forever[1, 1](torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("name", ["use", "store"])
def test_a_kept_pointer_to_a_tensor_that_is_no_argument(name):
    """The tensor lives, but nobody says so to the launch: on a GPU its memory may be another's by then."""
    code = """
        __global__ void through(float** table, float* y, int mode) {
            if (mode == 0) table[0] = y;
            if (mode == 1) y[threadIdx.x] = table[0][threadIdx.x];
            if (mode == 2) table[0][threadIdx.x] = y[threadIdx.x];
        }
    """
    through, table = cupyops.Kernel(code, "through"), torch.zeros(1, dtype=torch.int64)
    x, y = torch.arange(4.0), torch.zeros(4)
    mode = {"use": 1, "store": 2}[name]
    with cupyops.simulate():
        through[1, 1](table, x, 0)
        with pytest.raises(simulator.OutOfBounds, match="a tensor that this launch was not given") as caught:
            through[1, 4](table, y, mode)
        assert "what an earlier launch called `y`" in str(caught.value) and "cupyops.address" in str(caught.value)
        through[1, 1](table, y, 0)
        through[1, 4](table, y, mode)  # of an argument it is no matter how the kernel has come by its address
        table[0] = cupyops.address(x)  # and what was asked for is meant to be kept
        through[1, 4](table, y, mode)


@pytest.mark.parametrize("static, dynamic, right", [(40, 0, True), (40, 123, True), (40, 124, False), (48, 116, False)])
def test_static_and_dynamic_shared_memory_have_one_limit(static, dynamic, right):
    """163 KB in all on sm_80."""
    code = f"""
        extern __shared__ int more[];
        __global__ void both(int* y, int n) {{
            __shared__ int own[{static} * 256];
            for (int i = 0; i < n; i++) own[i] = more[i] = i;
            for (int i = 0; i < n; i++) y[i] = own[n - 1 - i] + more[i];
        }}
    """
    both, y = cupyops.Kernel(code, "both"), torch.zeros(1, dtype=torch.int32)
    with cupyops.simulate("sm_80"):
        if right:
            both[1, 1, max(4, dynamic * 1024)](y, 1)
            return
        with pytest.raises(cupyops.LaunchError, match=f"take {static * 1024} of them"):
            both[1, 1, dynamic * 1024](y, 1)


def test_approximations_as_bad_as_they_may_be():
    kernel = cupyops.Kernel("__global__ void f(float* x) { x[threadIdx.x] = __expf(x[threadIdx.x]); }", "f")
    x = torch.linspace(-4, 4, 64)
    results = []
    for options in ({}, {"approximate": "worst"}, {"approximate": "worst"}, {"approximate": "worst", "seed": 1}):
        results.append(x.clone())
        with cupyops.simulate(**options):
            kernel[1, 64](results[-1])
    nearest, worst, again, drawn = results
    # 2 ulp of the power, and those that the product with log2(e) has lost before
    torch.testing.assert_close(worst, x.exp(), rtol=1e-6, atol=0)
    assert worst.equal(again) and not worst.equal(drawn) and not worst.equal(nearest)


def test_approximations_are_one_or_the_other():
    with pytest.raises(cupyops.InputError, match='approximate is \'good\', expected "nearest" or "worst"'):
        cupyops.simulate(approximate="good")


@pytest.mark.parametrize("arch", ["", "80", 80, None, "sm80", "sm_", "sm_x", "compute_80", "sm_10", "sm_30"])
def test_bad_arch(arch):
    with pytest.raises(cupyops.InputError, match='expected one such as "sm_80"'):
        cupyops.simulate(arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_arch_is_what_the_kernel_sees(arch):
    code = "__global__ void which(int* y) { y[0] = __CUDA_ARCH__; }"
    which, y = cupyops.Kernel(code, "which"), torch.zeros(1, dtype=torch.int32)
    with cupyops.simulate(arch):
        which[1, 1](y)
    assert y.item() == 10 * int(arch.removeprefix("sm_"))


# --- what is told ---


def test_trace():
    x = torch.randn(1000, requires_grad=True)
    with cupyops.simulate(), cupyops.trace() as trace:
        cupyops.relu(x).sum().backward()
    assert trace.routes() == {"simulator"}
    forward, backward = trace.launches()
    assert (forward.operator, backward.operator) == ("cupyops::relu", "cupyops::relu (backward)")
    assert (forward.kernel, forward.grid, forward.block) == ("relu_fwd<float>", (2, 1, 1), (128, 1, 1))
    for record in (forward, backward):
        assert record.instructions > 1000 and 0 < record.microseconds < 60e6
    assert f"{forward.instructions:,}" in str(trace) and "instructions" in str(trace)


def test_an_error_says_which_operator():
    """The simulator's message names kernel, thread and line; the note the operator."""
    broken = cupyops.Kernel(COPY, "copy<T>", T=(torch.float32,))

    @cupyops.operator("cupyops_tests::off_by_one")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @op.forward
    def _(x):
        y = torch.empty_like(x)
        broken[1, 32](x, y, 1, x.numel(), T=x.dtype)
        return y, ()

    try:
        with cupyops.simulate(), pytest.raises(OutOfBounds) as caught:
            op(torch.ones(2, 3))
    finally:
        sys.modules["cupyops._operator.operator"]._registry.pop(op.name)
    message = str(caught.value)
    assert message.startswith("copy<float>: read of 4 bytes outside `x`")
    assert "thread (5,0,0)" in message and "y[i] = x[i + shift];" in message
    assert caught.value.__notes__ == ["in the forward of operator cupyops_tests::off_by_one"]


ENVIRONMENT = """
import torch, cupyops
with cupyops.trace() as trace:
    y = cupyops.relu(torch.tensor([-1.0, 2.0]))
print(*sorted(trace.routes()), *y.tolist(), getattr(cupyops._kernel.kernel.executors.get("cpu"), "arch", None))
"""


@pytest.mark.parametrize(("value", "printed"), [("sm_90", "simulator 0.0 2.0 sm_90"), ("0", "reference 0.0 2.0 None")])
def test_environment(value, printed):
    done = run_python("-c", ENVIRONMENT, env=os.environ | {"CUPYOPS_SIMULATE": value}, bare=True)
    assert done.stdout.strip() == printed, done.stderr


@pytest.mark.parametrize(("value", "arch"), [("1", "sm_80"), ("sm_100", "sm_100"), ("", None)])
def test_what_the_environment_asks_for(monkeypatch, value, arch):
    """As above, without a process of its own: that package is asked again."""
    entered = []
    monkeypatch.setattr(_simulate, "simulate", lambda arch: nullcontext(entered.append(arch)))
    monkeypatch.setenv("CUPYOPS_SIMULATE", value)
    cupyops.simulate_if_asked()
    assert entered == ([arch] if arch else [])


@pytest.mark.parametrize("value", ["maybe", "80", "sm_"])
def test_environment_that_is_wrong(monkeypatch, value):
    monkeypatch.setenv("CUPYOPS_SIMULATE", value)
    expected = (
        f"CUPYOPS_SIMULATE is {value!r}, expected 1, on, true, yes, or 0, off, false, no, or an architecture such as"
    )
    with pytest.raises(cupyops.InputError, match=re.escape(expected)):
        cupyops.simulate_if_asked()
