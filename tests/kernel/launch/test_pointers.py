"""Pointers to several tensors as one argument: by value in a struct, or as a table in memory."""

import numpy as np
import pytest
import torch

import cupyops
from cupyops import InputError, LaunchError, SimulatorError

CODE = """
struct In { const float* at[3]; };
struct Out { float* at[2]; };
struct Node { float* values; int count; };
__global__ void total(In xs, int count, float* y, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  float sum = 0;
  for (int k = 0; k < count; ++k) sum += xs.at[k] ? xs.at[k][i] : 100;
  y[i] = sum;
}
__global__ void total_of_table(const float* const* xs, int count, float* y, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  float sum = 0;
  for (int k = 0; k < count; ++k) sum += xs[k][i];
  y[i] = sum;
}
template <typename T> __global__ void fill(T* const* xs, int count, T value) {
  for (int k = 0; k < count; ++k) xs[k][threadIdx.x] = value;
}
__global__ void fill_struct(Out xs, float value) { for (int k = 0; k < 2; ++k) xs.at[k][threadIdx.x] = value; }
__global__ void double_all(Node node, float* anchor) { for (int i = 0; i < node.count; ++i) node.values[i] *= 2; }
"""


def kernel(name):
    return cupyops.Kernel(CODE, name)


@pytest.fixture
def xs():
    return [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])]


@pytest.fixture(autouse=True)
def simulated():
    with cupyops.simulate():
        yield


@pytest.mark.parametrize("name", ["total", "total_of_table"])
def test_a_kernel_reads_through_the_pointers(xs, name):
    y = torch.empty(3)
    kernel(name)[1, 32](cupyops.pointers(xs), 2, y, 3)
    assert torch.equal(y, xs[0] + xs[1])


def test_none_is_a_null_pointer(xs):
    y = torch.empty(3)
    kernel("total")[1, 32](cupyops.pointers([xs[0], None, xs[1]]), 3, y, 3)
    assert torch.equal(y, xs[0] + xs[1] + 100)
    kernel("total")[1, 32](cupyops.pointers(xs), 3, y, 3)  # the struct has room for three
    assert torch.equal(y, xs[0] + xs[1] + 100)


def test_what_is_written_through_them_counts_as_written(xs):
    kernel("fill<T>")[1, 3](cupyops.pointers(xs), 2, 7.0, T=torch.float32)
    assert [one.tolist() for one in xs] == [[7.0] * 3] * 2 and [one._version for one in xs] == [1, 1]
    kernel("fill_struct")[1, 3](cupyops.pointers(xs, written=True), 8.0)
    assert [one.tolist() for one in xs] == [[8.0] * 3] * 2 and [one._version for one in xs] == [2, 2]
    kernel("total_of_table")[1, 32](cupyops.pointers(xs), 2, torch.empty(3), 3)
    assert [one._version for one in xs] == [2, 2]


@pytest.mark.parametrize("name", ["total", "total_of_table"])
def test_accesses_are_checked_as_those_to_arguments(xs, name):
    """Of a view, only what lies in it; the message names the entry."""
    whole = torch.arange(8.0)
    y = torch.empty(4)
    with pytest.raises(SimulatorError, match=r"outside `xs\[1\]`"):
        kernel(name)[1, 32](cupyops.pointers([whole, whole.clone()[2:4]]), 2, y, 4)
    with pytest.raises(SimulatorError, match="between the elements"):
        kernel(name)[1, 32](cupyops.pointers([whole[::2], whole.clone()]), 2, y, 4)
    blank = torch.empty(4)
    with pytest.raises(SimulatorError, match="where nothing was written"):
        kernel(name)[1, 32](cupyops.pointers([blank, whole]), 2, y, 4)


def test_refusals(xs):
    y = torch.empty(3)
    with pytest.raises(LaunchError, match="which are 3 pointers; for 4 declare"):
        kernel("total")[1, 32](cupyops.pointers([*xs, *xs]), 4, y, 3)
    with pytest.raises(
        LaunchError, match="to a tensor of torch.float64 on cpu, expected pointers to tensors of torch.float32"
    ):
        kernel("total_of_table")[1, 32](cupyops.pointers([xs[0], xs[1].double()]), 2, y, 3)
    with pytest.raises(LaunchError, match="expected pointers to tensors of torch.float64"):
        kernel("fill<T>")[1, 3](cupyops.pointers(xs), 2, 7.0, T=torch.float64)
    with pytest.raises(LaunchError, match="expected a tensor or None; pointers are taken by value in a struct"):
        kernel("total")[1, 32](cupyops.pointers(xs), 2, cupyops.pointers(xs), 3)
    with pytest.raises(InputError, match="no tensor among them"):
        cupyops.pointers([None])
    with pytest.raises(InputError, match=r"tensors\[1\] is \[1\.0\] \(list\), expected a tensor"):
        cupyops.pointers([xs[0], [1.0]])
    with pytest.raises(InputError, match=r"tensors\[1\] is on meta, expected cpu, where tensors\[0\] is"):
        cupyops.pointers([xs[0], torch.empty(3, device="meta")])
    with pytest.raises(InputError, match=r"expected a tensor of torch.float64"):
        cupyops.pointers(xs, dtype=torch.float64)
    with pytest.raises(InputError, match="storage of its own"):
        cupyops.pointers([torch.zeros(3, dtype=torch.complex64).conj()])


def test_a_struct_with_a_pointer_and_a_number(xs):
    node = np.dtype([("values", np.uint64), ("count", np.int32)], align=True)
    kernel("double_all")[1, 1](np.array((cupyops.address(xs[1]), 3), node), xs[0])
    assert xs[1].tolist() == [20.0, 40.0, 60.0]


def test_a_launch_that_a_graph_would_lose_is_refused(xs):
    def function(x):
        y = torch.empty_like(x)
        kernel("total")[1, 32](cupyops.pointers([x]), 1, y, 3)
        return y

    with pytest.raises(LaunchError, match="make it an operator"):
        torch.func.vmap(function)(torch.ones(2, 3))


@pytest.mark.gpu
def test_on_a_gpu():
    """Twice each, so that the fast path is there the second time; a table is refused while a graph is captured."""
    xs = [torch.tensor([1.0, 2.0, 3.0], device="cuda"), torch.tensor([10.0, 20.0, 30.0], device="cuda")]
    for name in ("total", "total_of_table", "total", "total_of_table"):
        y = torch.empty(3, device="cuda")
        kernel(name)[1, 32](cupyops.pointers(xs), 2, y, 3)
        assert torch.equal(y, xs[0] + xs[1])
        y.zero_()
        kernel(name)[1, 32](n=3, y=y, count=2, xs=cupyops.pointers(xs))
        assert torch.equal(y, xs[0] + xs[1])
    table = kernel("fill<T>")[1, 3]
    for value in (7.0, 8.0):
        table(cupyops.pointers(xs), 2, value, T=torch.float32)
        table(value=value, xs=cupyops.pointers(xs), T=torch.float32, count=2)
        assert [one.tolist() for one in xs] == [[value] * 3] * 2
    kernel("fill_struct")[1, 3](cupyops.pointers(xs, written=True), 9.0)
    assert xs[0].tolist() == [9.0] * 3 and xs[0]._version == 5
    with (
        pytest.raises(LaunchError, match="give the kernel the pointers by value"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        table(cupyops.pointers(xs), 2, 1.0, T=torch.float32)
