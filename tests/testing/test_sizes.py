"""Hazards of sizes: each catches an operator that is wrong at one kind of size alone."""

import pytest
import torch
from broken_operators import SOUND_CALLS, Broken, assert_sound, classes, normal
from faulty_operators import eager

import cupyops
from cupyops.testing import Failure, NotApplicable, Tolerance, check
from cupyops.testing.call import Call
from cupyops.testing.case import Case
from cupyops.testing.large_sizes import large_sizes
from cupyops.testing.target import target


def refuses_nothing_to_do(x):
    if 0 in x.shape:
        raise RuntimeError("invalid configuration argument")
    return torch.relu(x)


def squeezes(x):
    return torch.relu(x.squeeze() if x.dim() == 2 and x.shape[0] == 1 else x)


def adds_a_dimension(x):
    return torch.atleast_1d(torch.relu(x))


def forgets_the_tail(x):
    if not eager(x) or x.dim() != 2 or x.shape[1] < 30:
        return torch.relu(x)
    whole = x.shape[1] // 4 * 4
    return torch.relu(x) * (torch.arange(x.shape[1]) < whole)


def counts_rows_in_16_bits(x):
    if x.dim() != 2 or x.shape[0] < 65_536:
        return torch.relu(x)
    return torch.cat([torch.relu(x[:65_535]), x[65_535:] * 0])


def matrix():
    return [normal(4, 32)]


BROKEN = {
    "empty": Broken(refuses_nothing_to_do, torch.relu, matrix),
    "size_one": Broken(squeezes, torch.relu, matrix),
    "zero_dim": Broken(adds_a_dimension, torch.relu, matrix),
    "tails": Broken(forgets_the_tail, torch.relu, matrix),
    "many_rows": Broken(counts_rows_in_16_bits, torch.relu, matrix),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_caught(fault):
    BROKEN[fault].assert_caught_by(fault)


@pytest.mark.parametrize("name, backend", SOUND_CALLS)
def test_sound(name, backend):
    assert_sound(name, backend, "sizes")


# --- kernels ----------------------------------------------------------------------------------------------------------

SOURCE = """
extern "C" __global__ void halve(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 0.5f * x[i];
}
"""


def halving(name, blocks):
    """An operator with `blocks(n)` blocks for n elements, an int."""
    kernel = cupyops.Kernel(SOURCE, "halve")

    @cupyops.operator(f"test_sizes::{name}")
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5

    @halve.unsupported
    def _(x):
        return None if x.dtype == torch.float32 else "float32 alone"

    @halve.forward
    def _(x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        kernel[blocks(x.numel()), 128](x.contiguous(), y, x.numel())
        return y, ()

    return halve


def test_a_launch_for_nothing_is_found():
    sample = [normal(4, 32, requires_grad=False)]
    options = dict(backends="simulator", shrink=False)
    report = check(halving("always", lambda n: n // 128 + 1), sample, only="empty", **options)
    assert "is launched on (1, 1, 1) for no elements" in report.failures[0].reason
    assert check(halving("enough", lambda n: -(-n // 128)), sample, only=["empty", "tails"], **options).passed


def test_a_tail_that_is_not_reached_is_found_in_a_kernel():
    sample = [normal(4, 32, requires_grad=False)]
    report = check(halving("cut", lambda n: n // 128), sample, only="tails", backends="simulator", shrink=False)
    assert "output" in report.failures[0].reason


# --- more than 2^31 ---------------------------------------------------------------------------------------------------


def case_of(function, reference, *args):
    return Case(target(function, reference), Call(*args), "reference", Tolerance())


def wraps_at(elements):
    """A relu that begins anew after so many elements."""

    def wraps(x):
        y = torch.relu(x)
        if x.numel() <= elements:
            return y
        return torch.cat([y.flatten()[:elements], y.flatten()[: x.numel() - elements]]).view(x.shape)

    return wraps


def test_large_sizes_finds_what_begins_anew():
    with pytest.raises(Failure, match=r"repetition \d+ of"):
        large_sizes(case_of(wraps_at(1000), torch.relu, normal(4, 32)), 1000)
    large_sizes(case_of(wraps_at(10_000), torch.relu, normal(4, 32)), 1000)


def test_large_sizes_finds_a_wrong_gradient():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.large = x.numel() > 1000
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * (3 if ctx.large else 2)

    with pytest.raises(Failure, match="gradient 0"):
        large_sizes(case_of(Doubled.apply, lambda x: x * 2, normal(4, 32)), 1000)


def test_large_sizes_repeats_rows_and_leaves_parameters():
    for args in (
        [cupyops.softmax, normal(3, 37), -1],
        [cupyops.layer_norm, normal(3, 37), (37,), normal(37, seed=1), normal(37, seed=2)],
        [lambda x, y: torch.nn.functional.cross_entropy(x, y, reduction="none"), normal(5, 7), classes(5, high=7)],
    ):
        function, *rest = args
        large_sizes(case_of(function, function, *rest), 2000)


def test_large_sizes_needs_a_result_that_repeats():
    mean = lambda x: x.mean()
    with pytest.raises(NotApplicable, match="repeats along no dimension"):
        large_sizes(case_of(mean, mean, normal(4, 32)), 1000)


@pytest.mark.gpu
def test_more_than_2_31_is_tried():
    """A sound function passes with so many elements, one that counts in an int does not."""
    sample = [normal(4, 4093).detach().cuda()]  # 2^31 is no multiple of it: what begins anew is something else
    for function, verdict in ((torch.relu, "pass"), (wraps_at(2**31), "fail")):
        report = check(function, sample, reference=torch.relu, only="more_than_2_31", shrink=False)
        assert report.rows[0].verdict == verdict, f"\n{report}"
