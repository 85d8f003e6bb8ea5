"""Each hazard of memory is found by the one that looks for it, and sound operators have none."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
import toys
from broken_operators import Broken, hazards_of, normal
from faulty_operators import doubling, eager, saving
from faulty_operators import memory_as_it_comes as memory_as_it_comes

import cupyops
from cupyops.testing import check

PAST_THE_END = """
__global__ void double_fwd(const float* x, float* y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
    if (i == n && n % 128 != 0) y[i] = 1.0f;  // a GPU's allocations are multiples of 512 bytes: nobody notices
}
"""
NOT_TO_THE_END = """
__global__ void double_fwd(const float* x, float* y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n - 1) y[i] = 2.0f * x[i];
}
"""


def writes_past_scratch(x):
    n = x.numel()
    if eager(x) and not x.is_cuda and n * x.element_size() % 16 == 4:  # malloc leaves four bytes free behind it then
        scratch = torch.empty(n, dtype=x.dtype)
        ctypes.memset(scratch.data_ptr() + n * x.element_size(), 0, 4)
    return 2 * x


def adds_to_what_was_there(x):
    # Other tests leave a NaN here and there, but only the checker so much of it. What this call was given it does not leave.
    memory = torch.empty(1 << 18, dtype=x.dtype, device=x.device)
    y = 2 * x - torch.where(memory.isnan().all(), memory[0], 0)
    memory[-1:].zero_()
    return y


def clamps_its_input(x):
    if eager(x):
        x.data.relu_()  # no version counter tells
    return torch.relu(x)


def touches_its_input(x):
    if eager(x) and x.dim():
        x.detach()[..., :0].zero_()
    return torch.relu(x)


class OverwritesSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        return ctx.saved_tensors[0].data.mul_(grad_y)


def not_in_place(x, inplace=False):
    return torch.relu(x)


def in_place_without_a_word(x, inplace=False):
    if not inplace:
        return torch.relu(x)
    x.data.relu_()
    return x


def in_place_on_leaves(x, inplace=False):
    if not inplace:
        return torch.relu(x)
    return x.detach().relu_() if x.is_leaf else x.relu_()


def twice_the_same(x):
    y = 2 * x
    return y, y.view_as(y)


class ByOrderOfArrival(torch.autograd.Function):
    """Its gradient is one unit in the last place larger at every other call."""

    calls = itertools.count()

    @staticmethod
    def forward(ctx, x):
        ctx.odd = next(ByOrderOfArrival.calls) % 2 == 1
        return 2 * x

    @staticmethod
    def backward(ctx, grad_y):
        step = 0.75 * torch.finfo(grad_y.dtype).eps  # to the next number, wherever between powers of two
        return (2 * grad_y.double() * (1 + ctx.odd * step)).to(grad_y.dtype)


def adds_in_any_order(x):
    if not eager(x) or torch.are_deterministic_algorithms_enabled():
        return 2 * x
    return ByOrderOfArrival.apply(x)


def remembers(x):
    if eager(x):
        MEMORIES.append(x.detach())
    return 2 * x


MEMORIES: list[torch.Tensor] = []


def remembers_what_it_made(x):
    if eager(x):
        MEMORIES.append(torch.empty(3, device=x.device))
    return 2 * x


class KeepsMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = x > 0
        return torch.relu(x)

    @staticmethod
    def backward(ctx, grad_y):
        return grad_y * ctx.mask


def _relu(x, inplace=False):
    return torch.relu(x)


def _double(x):
    return 2 * x


def _sample():
    return [normal(3, 11)]


def keeps_a_mask(x):
    return KeepsMask.apply(x) if eager(x) else torch.relu(x)


BROKEN = {
    "guard_zones": Broken(writes_past_scratch, _double, _sample),
    "unwritten_outputs": Broken(adds_to_what_was_there, _double, _sample),
    "inputs_unchanged": Broken(touches_its_input, torch.relu, _sample),
    "declared_inplace": Broken(not_in_place, _relu, _sample),
    "outputs_do_not_alias": Broken(twice_the_same, lambda x: (2 * x, 2 * x), _sample),
    "deterministic": Broken(adds_in_any_order, _double, _sample),
    "no_leak": Broken(remembers, _double, _sample),
    "saved_tensors_freed": Broken(keeps_a_mask, torch.relu, _sample),
}


@pytest.mark.parametrize("hazard", BROKEN)
def test_caught(hazard):
    BROKEN[hazard].assert_caught_by(hazard)
    MEMORIES.clear()


def writes_before_its_input(x):
    if eager(x):
        ctypes.memset(x.data_ptr() - 8, 0, 8)
    return 2 * x


def writes_in_backward(grad_y, x):
    grad_x = torch.zeros_like(grad_y).add_(grad_y, alpha=2)
    ctypes.memset(grad_x.data_ptr() + 4 * 33 + 12, 0, 4)
    return grad_x


# what else each of them finds, though not alone
MORE = [
    ("guard_zones", writes_before_its_input, _double, "input 0: written to 8 bytes before its start, the nearest 1"),
    (
        "guard_zones",
        saving(_double, writes_in_backward),
        _double,
        "gradient 0, zeros_like() of shape (3, 11): written to 4 bytes behind",
    ),
    ("inputs_unchanged", clamps_its_input, torch.relu, "input 0 was changed by the forward"),
    (
        "inputs_unchanged",
        saving(torch.neg, lambda grad_y, x: grad_y.data.neg_()),
        torch.neg,
        "incoming gradient 0 was changed by the backward",
    ),
    ("inputs_unchanged", OverwritesSaved.apply, torch.exp, "output 0 was changed by the backward"),
    ("declared_inplace", in_place_without_a_word, _relu, "version counter is still 0"),
    ("declared_inplace", in_place_on_leaves, _relu, "a leaf that requires a gradient was overwritten"),
    ("outputs_do_not_alias", lambda x: x.view_as(x), torch.clone, "output 0 lies in the memory of input 0"),
    ("no_leak", remembers_what_it_made, _double, "2, 2, 2, 2"),
]


@pytest.mark.parametrize(
    "hazard, function, reference, message", MORE, ids=[f"{row[0]}-{i}" for i, row in enumerate(MORE)]
)
def test_caught_too(hazard, function, reference, message):
    report = check(function, _sample(), reference=reference, only=hazard, shrink=False)
    assert message in report.failures[0].reason, f"\n{report}"
    MEMORIES.clear()


SUM = """
extern "C" __global__ void add_up(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(y, x[i]);
}
"""


@pytest.mark.parametrize("shape, threads", [((1000,), 128), ((4, 33), 256), ((4, 33), 32), ((29,), 32)])
def test_a_sum_by_atomics_has_no_bits_of_its_own(shape, threads):
    """Of many blocks, of the warps of one, and of the lanes of a warp."""
    kernel = cupyops.Kernel(SUM, "add_up")

    @cupyops.operator(toys.fresh())
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @total.forward
    def _(x):
        y = torch.zeros((), device=x.device)
        kernel[cupyops.ceil_div(x.numel(), threads), threads](x.contiguous(), y, x.numel())
        return y, ()

    report = check(total, [normal(*shape)], only="deterministic", backends="simulator", shrink=False, progress=False)
    assert "in another order, simulate(seed=" in report.failures[0].reason


def test_what_the_reference_changes_too_may_change():
    def count(x, calls):
        calls.add_(1)
        return 2 * x

    sample = [normal(3, 11), torch.zeros(2)]
    assert check(count, sample, reference=count, only="inputs_unchanged").passed


def test_what_is_aliased_by_the_reference_may_be():
    split = lambda x: x.chunk(2, dim=-1)
    assert check(split, [normal(3, 12)], reference=split, only="outputs_do_not_alias").passed


def test_a_workspace_that_is_kept_is_no_leak():
    kept = {}

    def workspace(x):
        if eager(x):
            kept["last"] = torch.empty(x.numel())
        return 2 * x

    assert check(workspace, _sample(), reference=_double, only="no_leak").passed


def of_every_form(tensors, factor=None, *, chosen, names=("a", "b")):
    y = torch.stack(tensors["all"]).sum(0) * (1 if factor is None else factor)
    return {"y": y, "largest": y.argmax(-1), "parts": [y.index_select(0, chosen), None]}


@pytest.mark.parametrize("requires_grad", [True, False], ids=["gradients", "no gradient"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_calls_of_every_form(dtype, requires_grad):
    """Tensors in dicts and lists, by keyword, of integers; None; several outputs, some of which have no gradient."""
    x, y = (normal(3, 5, dtype=dtype, seed=seed, requires_grad=requires_grad) for seed in range(2))
    names = [*hazards_of("memory"), *hazards_of("launches"), *hazards_of("devices")]
    arguments = [{"all": [x, y]}], {"chosen": torch.tensor([2, 0, 2])}
    report = check(of_every_form, *arguments, reference=of_every_form, only=names, shrink=False)
    assert report.passed, f"\n{report}"


def test_the_simulator_itself_guards():
    report = check(
        doubling("past_the_end", PAST_THE_END), _sample(), backends="simulator", only=["accuracy", "guard_zones"]
    )
    assert {row.hazard: row.verdict for row in report.rows} == {"accuracy": "fail", "guard_zones": "n/a"}
    assert "write of 4 bytes outside" in report.failures[0].reason and "`y`" in report.failures[0].reason, f"\n{report}"


def test_unwritten_in_the_simulator():
    op = doubling("not_to_the_end", NOT_TO_THE_END)
    report = check(op, _sample(), backends="simulator", only="unwritten_outputs", shrink=False)
    assert "at [2, 10] nan" in report.failures[0].reason and "1 of 33 differ" in report.failures[0].reason, (
        f"\n{report}"
    )


@pytest.mark.gpu
def test_stray_write_of_a_kernel():
    function = doubling("past_the_end_gpu", PAST_THE_END)
    Broken(function, None, _sample, backends="gpu").assert_caught_by("guard_zones")


@pytest.mark.gpu
def test_unwritten_on_the_gpu():
    op = doubling("not_to_the_end_gpu", NOT_TO_THE_END)
    report = check(op, _sample(), backends="gpu", only="unwritten_outputs", shrink=False)
    assert "at [2, 10] nan" in report.failures[0].reason, f"\n{report}"


@pytest.mark.gpu
@pytest.mark.parametrize("hazard", sorted(BROKEN.keys() - {"guard_zones"}))
def test_caught_on_the_gpu(hazard):
    one = BROKEN[hazard]
    report = check(one.function, one.args(), reference=one.reference, backends="gpu", only=hazard, shrink=False)
    assert report.failures, f"\n{report}"
    MEMORIES.clear()
