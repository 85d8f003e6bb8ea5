"""Launches that repeat an earlier one of a check: simulated once, with the same results; never where one could differ."""

import pytest
import torch

from cupyops import Kernel
from cupyops.simulator import OutOfBounds, Program, Uninitialized
from cupyops.testing.repeats import remembered, simulation

SCALE = Kernel(
    "__global__ void scale(const float* x, float* y, int k) { y[threadIdx.x] = k * x[threadIdx.x]; }", "scale"
)
BITS = "y[threadIdx.x] = __int_as_float(0xCBCBCBCB);"  # those that unwritten memory holds
SOME = Kernel(f"__global__ void some(float* y) {{ if (threadIdx.x < 2) {BITS} }}", "some")
COUNT = Kernel("__device__ int calls; __global__ void count(long long* at, int* y) { *y = ++calls; }", "count")
MADE = "if (!*at) *at = (long long)malloc(4), *(int*)*at = 0; *y = ++*(int*)*at;"
HEAP = Kernel(f"__global__ void heap(long long* at, int* y) {{ {MADE} }}", "heap")
KEEP = Kernel("__global__ void keep(float* x, long long* y) { *y = (long long)x; }", "keep")
MAKE = Kernel("__global__ void make(float* x, long long* y) { *y = (long long)malloc(4); }", "make")

TELL = Kernel("__device__ int calls; __global__ void tell(long long* at) { *at = (long long)&calls; }", "tell")
THERE = Kernel("__global__ void there(const long long* at, int* y) { *y = ++*(int*)*at; }", "there")
GIVEN = Kernel("__global__ void given(long long at, int* y) { *y = ++*(int*)at; }", "given")


@pytest.fixture
def simulated(monkeypatch):
    """The names of the kernels that were simulated, not written again."""
    names, launch = [], Program.launch

    def noted(self, name, *others, **options):
        names.append(options["label"])
        return launch(self, name, *others, **options)

    monkeypatch.setattr(Program, "launch", noted)
    return names


def test_what_is_alike_is_simulated_once_and_written_each_time(simulated):
    x = torch.randn(4)
    with remembered(), simulation():
        for given in (x, x.clone(), x * 1):
            y = torch.empty_like(given)
            SCALE[1, 4](given, y, 3)
            assert torch.equal(y, 3 * x)
            assert y._version == 1  # as after a launch
    with simulation():  # outside of a check
        SCALE[1, 4](x, y, 3)
        SCALE[1, 4](x, y, 3)
    assert simulated == ["scale"] * 3


def test_other_values_numbers_and_layouts_are_others(simulated):
    x = torch.randn(9)
    with remembered(), simulation():
        for given, k in ((x[:4], 3), (x[4:8], 3), (x[4:8], 2), (x[4:8].clone(), 2), (-x[:4], 3)):
            y = torch.empty(4)
            SCALE[1, 4](given, y, k)
            assert torch.equal(y, k * given)
    assert len(simulated) == 5


@pytest.mark.parametrize("kernel", [COUNT, HEAP], ids=["a variable", "what malloc gave"])
def test_memory_besides_the_arguments_counts(kernel):
    at, found = torch.zeros(1, dtype=torch.int64), []
    with remembered(), simulation():
        for _ in range(3):
            y = torch.zeros(1, dtype=torch.int32)
            kernel[1, 1](at, y)
            found.append(int(y))
    assert found == [1, 2, 3]


@pytest.mark.parametrize(
    ("kernel", "argument"), [(THERE, torch.Tensor.clone), (GIVEN, int)], ids=["memory", "an argument"]
)
def test_a_variable_of_another_program_counts_where_its_address_is_known(kernel, argument):
    at, found = torch.zeros(1, dtype=torch.int64), []
    with remembered(), simulation():
        TELL[1, 1](at)
        for _ in range(3):
            y = torch.zeros(1, dtype=torch.int32)
            kernel[1, 1](argument(at), y)
            found.append(int(y))
    assert found == [found[0], found[0] + 1, found[0] + 2]


def test_variables_of_other_programs_do_not_count_otherwise(simulated):
    x, at = torch.randn(4), torch.zeros(1, dtype=torch.int64)
    other = Kernel("__device__ int more; __global__ void other(long long* at) { *at = more; }", "other")
    with remembered(), simulation():
        for _ in range(2):
            SCALE[1, 4](x, torch.empty_like(x), 3)
            other[1, 1](at)  # the first time a program that is new, and its variable
    assert simulated == ["scale", "other"]


@pytest.mark.parametrize("kernel", [KEEP, MAKE], ids=["of an argument", "from malloc"])
def test_an_address_that_a_kernel_stores_is_one_of_its_own(kernel):
    with remembered(), simulation():
        tensors, places = zip(*((torch.ones(4), torch.zeros(1, dtype=torch.int64)) for _ in range(3)))
        for x, y in zip(tensors, places):
            kernel[1, 1](x, y)
    assert len({int(y) for y in places}) == 3


def test_the_same_bytes_may_be_values_or_nothing_and_inside_of_a_tensor_or_outside():
    with remembered(), simulation():
        blank, y = torch.empty(8), torch.zeros(8)
        x = torch.frombuffer(bytearray(b"\xcb" * 32), dtype=torch.float32)
        SCALE[1, 8](x, y.clone(), 1)
        SCALE[1, 4](x[:7], y.clone(), 1)
        for error, given, threads in ((Uninitialized, blank, 8), (OutOfBounds, x[:4], 8), (OutOfBounds, x[::2], 4)):
            for _ in range(2):  # what fails, fails again
                with pytest.raises(error):
                    SCALE[1, threads](given, y.clone(), 1)


def test_what_a_kernel_leaves_unwritten_stays_so_when_it_is_written_again():
    with remembered(), simulation():
        for _ in range(2):
            y = torch.empty(4)
            SOME[1, 4](y)
            with pytest.raises(Uninitialized):
                SCALE[1, 4](y, torch.empty(4), 1)
            SCALE[1, 2](y, torch.empty(2), 1)
