"""Hazards of sizes: each catches an operator that is wrong at one kind of size alone."""

import pytest
import torch
from broken_operators import Broken, classes, normal
from faulty_operators import eager, saving
from groups import by_torch

import cupyops
from cupyops.testing import Failure, NotApplicable, Tolerance, check
from cupyops.testing.call import Call
from cupyops.testing.case import Case
from cupyops.testing.foretold import needs_memory, smaller_sizes
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
    reason = report.failures[0].reason
    assert reason.startswith("size 0 in place of ") and "is launched on (1, 1, 1) for no elements; return" in reason
    assert check(halving("enough", lambda n: -(-n // 128)), sample, only=["empty", "tails"], **options).passed


def test_a_tail_that_is_not_reached_is_found_in_a_kernel():
    sample = [normal(4, 32, requires_grad=False)]
    report = check(halving("cut", lambda n: n // 128), sample, only="tails", backends="simulator", shrink=False)
    assert "output" in report.failures[0].reason


def many_rows_of(function, *args, **options):
    report = check(function, args, reference=function, only="many_rows", progress=False, **options)
    return report.rows[0].verdict, report.rows[0].reason


def test_numbers_that_equal_the_leading_size_stay():
    seen = set()

    def scaled(x, times):
        seen.add(times)
        return x * times

    assert many_rows_of(scaled, normal(4, 8), 4) == ("pass", "")
    assert many_rows_of(torch.layer_norm, normal(4, 33), (33,)) == ("pass", "")  # the other size with its number
    assert seen == {4}
    assert many_rows_of(lambda x, rows: x.view(rows, -1), normal(4, 8), 4)[0] == "n/a"


SQUARES = {
    "an outer product": lambda x: torch.outer(x, x).sum(0),
    "distances": lambda x: (x[:, None] - x).abs().sum(1),
    "beside something large": lambda x: (x[:, None] * x).sum(0) + torch.ones(300_000).sum(),
    "cubes": lambda x: (x[:, None, None] * x[:, None] * x).sum((0, 1)),
}


@pytest.mark.parametrize("name", SQUARES)
def test_a_call_that_would_not_fit_is_not_made(name):
    largest = 0

    def watched(x):
        nonlocal largest
        largest = max(largest, x.numel())
        return SQUARES[name](x)

    verdict, reason = many_rows_of(watched, normal(8))
    assert verdict == "n/a" and "more than the 2.0 GiB of check(memory=)" in reason
    assert largest < 65_539


def test_what_fits_is_made_and_less_may_be_asked_for():
    assert many_rows_of(torch.sin, normal(8)) == ("pass", "")
    verdict, reason = many_rows_of(torch.sin, normal(8), memory=1_000_000)
    assert verdict == "n/a" and "more than the 0.0 GiB" in reason


def test_what_a_forward_allocates_counts():
    def hoards(x):
        torch.empty(x.numel(), x.numel())
        return torch.sin(x)

    report = check(hoards, [normal(8)], reference=torch.sin, only="many_rows", progress=False)
    assert "more than the 2.0 GiB" in report.rows[0].reason


def test_where_no_kernel_runs_few_rows_say_so():
    """The reference multiplies one group after the other, which took a third of a minute for 65,539 of them."""
    groups = 0

    def one_by_one(x, weight, offs):
        nonlocal groups
        groups = max(groups, len(weight))
        return by_torch(x, weight, offs=offs)

    sample = [normal(6, 8).half(), normal(3, 8, 16).half()], {"offs": torch.tensor([2, 2, 6], dtype=torch.int32)}
    options = dict(reference=one_by_one, only="many_rows", backends="simulator", progress=False)
    (row,) = check(cupyops.grouped_mm, *sample, **options).rows
    assert (row.verdict, row.reason) == ("n/a", "no kernel ran: wgmma is of compute capability 9.0")
    assert 3 < groups < 1000


@pytest.mark.parametrize(
    "power, beside, taken",
    [(1, 0, 65_536), (1, 10**9, 10**9 + 65_536), (2, 0, 65_536**2), (2, 10**6, 10**6 + 65_536**2), (3, 0, 65_536**3)],
)
def test_memory_is_foretold(power, beside, taken):
    measure = lambda n: beside + n**power
    small = lambda n: smaller_sizes(n, n // 64)
    needs_memory(65_536, small(65_536), measure, 2 * taken)
    with pytest.raises(NotApplicable):
        needs_memory(65_536, small(65_536), measure, taken // 2)


def ignores_bias_of_one(x, bias):
    return x * 2 if bias.numel() == 1 else x * 2 + bias


def adds_nothing_of_bias_of_one(x, bias):
    return x * 2 + bias * 0 if bias.numel() == 1 else x * 2 + bias


@pytest.mark.parametrize(
    "ours, theirs", [(ignores_bias_of_one, adds_nothing_of_bias_of_one)] * 2, ids=["None", "zeros"]
)
def test_no_gradient_is_one_of_zeros(ours, theirs, request):
    ours, theirs = (theirs, ours) if "zeros" in request.node.name else (ours, theirs)
    args = [normal(3, 4), normal(4, seed=1)]
    assert check(ours, args, reference=theirs, only="size_one", progress=False).passed
    wrong = check(
        lambda x, bias: x * 2 + bias * 1, args, reference=ignores_bias_of_one, only="size_one", progress=False
    )
    assert wrong.failures


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
    wrong = saving(lambda x: x * 2, lambda grad, x: grad * (3 if x.numel() > 1000 else 2))
    with pytest.raises(Failure, match="gradient 0"):
        large_sizes(case_of(wrong, lambda x: x * 2, normal(4, 32)), 1000)


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
