"""The faults that a check promises to find, one operator for each, and right operators, of which it must find nothing."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from broken_operators import classes, normal
from faulty_operators import eager
from faulty_operators import memory_as_it_comes as memory_as_it_comes

import cupyops
from cupyops.testing import check, state


def failing(function, args, hazard, kwargs=None, **options):
    """The reason of a hazard that fails, on whichever backend."""
    report = check(function, args, kwargs, only=hazard, shrink=False, progress=False, **options)
    assert report.failures, f"\n{report}"
    return report.failures[0].reason


def assert_passes(function, args, hazard, kwargs=None, **options):
    report = check(function, args, kwargs, only=hazard, shrink=False, progress=False, **options)
    assert report.passed, f"\n{report}"
    return report


WIDE = """
template <int N, int LOST> __global__ void halve(const float* x, float* y, long long n) {
  const long long i = N * (blockIdx.x * (long long)blockDim.x + threadIdx.x);
  for (long long k = i; k < i + N && k < n; ++k) {
    const bool is_tail = i + N > n;
    if (!(is_tail && k - i == LOST)) y[k] = x[k] / 2;
  }
}
"""


def wide(name, lanes, lost):
    """Halves, `lanes` elements in a thread; of an incomplete vector it forgets the element of this place."""
    kernel = cupyops.Kernel(WIDE, f"halve<{lanes}, {lost}>")

    @cupyops.operator(f"cupyops_promises::{name}", dtypes=torch.float32)
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    def launch(given):
        x, result = cupyops.contiguous(given), torch.empty_like(given)
        y = torch.zeros_like(x)
        if x.numel():
            kernel[cupyops.ceil_div(x.numel(), lanes * 64), 64](x, y, x.numel())
        return y if y.stride() == result.stride() else result.copy_(y)

    halve.forward(lambda x: (launch(x), ()))
    halve.backward(lambda saved, grad_y: launch(grad_y))
    return halve


TAILS = [wide(f"tail_{lanes}_{lost}", lanes, lost) for lanes, lost in ((4, 2), (8, 4), (8, 6), (16, 14))]


@pytest.mark.parametrize("shape", [(8, 32), (64, 128), (2, 3, 8, 8), (32,)], ids=str)
@pytest.mark.parametrize("function", TAILS, ids=lambda one: one.name.rpartition("::")[2])
def test_a_tail_of_any_length(function, shape):
    """Sizes that are changed one at a time leave few remainders of an even number of elements."""
    assert "output" in failing(function, [normal(*shape)], "tails", backends="simulator")


@pytest.mark.parametrize("shape", [(8, 32), (2, 3, 8, 8), (5,), (64, 128)], ids=str)
def test_a_report_says_which_remainders_were_met(shape):
    (row,) = assert_passes(torch.relu, [normal(*shape)], "tails", reference=torch.relu).rows
    assert row.reason == "remainders modulo 16 met: number of elements all; last size all"


def of_even_rows(x):
    if x.shape[-1] % 2:
        raise ValueError("an even number is needed")
    return torch.relu(x)


def test_a_report_says_which_remainders_the_reference_refuses():
    (row,) = assert_passes(of_even_rows, [normal(2, 8)], "tails", reference=of_even_rows).rows
    assert "last size 0, 2, 4, 6, 8, 10, 12, 14" in row.reason


def inference(x):
    """Whether a plain call wants no gradient."""
    return eager(x) and not (x.requires_grad and torch.is_grad_enabled())


class Workspace:
    """What an operator keeps from call to call."""

    def __init__(self):
        self.memory, self.result = {}, {}


KEPT = Workspace()


def loses_a_tail(x):
    y = torch.relu(x)
    if inference(x) and y.numel() % 4 == 3:
        y = y.contiguous()
        y.view(-1)[-1] = 0
    return y


def ignores_strides(x):
    if not inference(x) or x.is_contiguous() or not x.numel():
        return torch.relu(x)
    flat = x.as_strided((x.numel(),), (1,))
    return torch.empty_like(x).copy_(torch.relu(flat).view(x.shape))


def in_one_workspace(x):
    if not inference(x):
        return torch.relu(x)
    key = x.shape, x.stride(), x.dtype
    memory = KEPT.memory.setdefault(key, torch.empty_like(x))
    return memory.copy_(torch.relu(x)).detach()


def stale(x):
    if not inference(x):
        return torch.relu(x)
    key = x.data_ptr(), x.shape, x.stride(), x.dtype
    if key not in KEPT.result:
        KEPT.result.clear()
        KEPT.result[key] = x.detach().clone(), torch.relu(x)
    return KEPT.result[key][1].clone()


def changes_its_input(x):
    if inference(x):
        x.data.relu_()
    return torch.relu(x)


def leaves_memory_as_it_was(x):
    y = torch.empty_like(x)
    if not inference(x) or x.numel() < 2:
        return torch.relu(x)
    y.copy_(torch.relu(x))
    memory = torch.empty(1, dtype=x.dtype)
    y.view(-1)[-1] = torch.where(memory == 0, y.reshape(-1)[-1], memory[0]) if y.is_contiguous() else 0
    return y


def out_of_order(x):
    if inference(x):
        raise RuntimeError("out of order")
    return torch.relu(x)


MADE = []


def keeps_what_it_made(x):
    y = torch.relu(x)
    if inference(x):
        MADE.append(y)
    return y


def otherwise(ours, where=lambda x: True):
    """A relu that is `ours` where no gradient is wanted, of tensors such as these."""
    return lambda x: ours(x) if inference(x) and where(x) else torch.relu(x)


COUNT = itertools.count()
INFERENCE = {
    "swallows_nan": ("special_values", otherwise(lambda x: torch.relu(x).nan_to_num(0.0, torch.inf))),
    "loses_a_tail": ("tails", loses_a_tail),
    "ignores_strides": ("strided", ignores_strides),
    "ignores_strides-transposed": ("transposed", ignores_strides),
    "in_one_workspace": ("calls_between", in_one_workspace),
    "stale": ("other_values_in_place", stale),
    "returns_its_input": ("accuracy", otherwise(lambda x: x, lambda x: bool((x < 0).any()) and x.dim() == 2)),
    "changes_its_input": ("inputs_unchanged", changes_its_input),
    "of_other_strides": ("output_strides", otherwise(lambda x: torch.relu(x).mT.contiguous().mT, lambda x: x.dim() > 1)),
    "leaves_memory_as_it_was": ("unwritten_outputs", leaves_memory_as_it_was),
    "in_half_precision": (
        "dtypes", otherwise(lambda x: torch.relu(x.bfloat16()).double(), lambda x: x.dtype is torch.float64),
    ),
    "out_of_order": ("accuracy", out_of_order),
    "of_one_output_more": ("accuracy", otherwise(lambda x: (torch.relu(x), x.clone()))),
    "every_other_time": ("deterministic", otherwise(lambda x: torch.relu(x) * (1 + next(COUNT) % 2 * 2e-7))),
    "keeps_what_it_made": ("no_leak", keeps_what_it_made),
    "wrong_for_one": ("zero_dim", otherwise(lambda x: torch.relu(x) + 1, lambda x: x.dim() == 0)),
    "wrong_if_misaligned": ("misaligned", otherwise(lambda x: torch.relu(x) + 1, lambda x: x.storage_offset() % 4 == 1)),
    "wrong_under_autocast": (
        "autocast", otherwise(lambda x: torch.relu(x) + 1, lambda x: torch.is_autocast_enabled("cpu")),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_kept(memory_as_it_comes):
    KEPT.memory.clear(), KEPT.result.clear(), MADE.clear()


@pytest.mark.parametrize(("hazard", "function"), INFERENCE.values(), ids=INFERENCE)
def test_what_is_wrong_where_no_gradient_is_wanted(hazard, function):
    """The sample wants one, as most do."""
    failing(function, [normal(3, 12)], hazard, reference=torch.relu)


def test_an_alias_where_no_gradient_is_wanted():
    alias = lambda x: x.view_as(x) if inference(x) else x.clone()
    failing(alias, [normal(3, 12)], "outputs_do_not_alias", reference=torch.clone)


def test_an_error_where_no_gradient_is_wanted_shows_in_one_row():
    report = check(out_of_order, [normal(3, 4)], reference=torch.relu, shrink=False, progress=False)
    # what is tried in an order of its own may meet the error first
    assert {row.hazard for row in report.failures} <= {"accuracy", "no_gradient_wanted", "export", "make_fx"}
    assert "where no gradient is wanted: RuntimeError: out of order" in report.failures[0].reason


def scaled(x, factor=0.5):
    return x if factor == 1 else x * factor


def rolled(x, shift=3):
    return x.view_as(x) if shift == 0 else torch.roll(x, shift)


def first_column(x):
    return x if x.shape[-1] == 1 else x[..., :1].clone()


def with_flag(x, plain=False):
    return x if plain else torch.relu(x)


@pytest.mark.parametrize(
    ("function", "x", "where"),
    [
        (scaled, normal(3, 4), "1.0 for 0.5"),
        (rolled, normal(3, 4), "0 for 3"),
        (lambda x: x.to(torch.float32), normal(3, 4, dtype=torch.float16), "float32"),
        (torch.Tensor.contiguous, normal(4, 3).detach().t().requires_grad_(), "contiguous inputs"),
        (first_column, normal(3, 4), "single elements"),
        (with_flag, normal(3, 4), "True for False"),
    ],
    ids=["factor", "shift", "dtype", "contiguous", "size", "flag"],
)
def test_an_output_that_is_the_input_for_one_value_alone(function, x, where):
    reason = failing(
        function, [x], "outputs_do_not_alias", reference=lambda *args, **named: function(*args, **named).clone()
    )
    assert f"with {where}: output 0 lies in the memory of input 0" in reason


def test_what_the_reference_aliases_too_is_no_fault():
    assert_passes(scaled, [normal(3, 4)], "outputs_do_not_alias", reference=scaled)


def setting(change):
    """An operator that changes something of the process on its way."""

    def relu(x):
        if eager(x):
            change()
        return torch.relu(x)

    return relu


CHANGES = {
    "torch.get_default_dtype()": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_float32_matmul_precision()": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.get_deterministic_debug_mode()": lambda: torch.use_deterministic_algorithms(True),
    "torch.get_num_threads()": lambda: torch.set_num_threads(2),
    "torch.is_grad_enabled()": lambda: torch.set_grad_enabled(False),
    "torch.is_anomaly_enabled()": lambda: torch.autograd.set_detect_anomaly(True),
    "torch.is_autocast_enabled('cpu')": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "torch.backends.cuda.flash_sdp_enabled()": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "numpy.geterr()": lambda: np.seterr(all="ignore"),
    "torch.get_rng_state()": lambda: torch.manual_seed(0),
    "random.getstate()": random.random,
    "numpy.random.get_state()": lambda: np.random.seed(0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_of_the_process(name):
    before, drawn = state.settings(), state.generators()
    try:
        reason = failing(setting(CHANGES[name]), [normal(3, 4)], "global_state", reference=torch.relu)
        left = state.restored(before)
    finally:
        state.restored(before)
        state.set_back(drawn)
    assert name in reason and not left


def test_what_is_changed_in_backward_or_for_some_sizes_alone():
    def of_none(x):
        if eager(x) and not x.numel():
            torch.set_default_dtype(torch.float64)
        return torch.relu(x)

    report = check(of_none, [normal(3, 4)], reference=torch.relu, only=("empty", "global_state"), shrink=False)
    assert "torch.get_default_dtype() was torch.float32, and is torch.float64 (by empty)" in report.failures[-1].reason
    assert torch.get_default_dtype() is torch.float32


def noisy(x):
    return x + torch.randn_like(x).mul(0)


def seeds_anew(x):
    if eager(x):
        torch.manual_seed(7)
    return noisy(x)


def test_random_numbers_that_the_reference_draws_too():
    assert_passes(noisy, [normal(3, 4)], "global_state", reference=noisy)
    assert "seeded anew" in failing(seeds_anew, [normal(3, 4)], "global_state", reference=noisy)


def test_a_check_leaves_the_process_as_it_was():
    before, drawn = state.settings(), state.generators()
    check(cupyops.relu, [normal(3, 5)], only=("opcheck", "gradcheck", "second_thread"), shrink=False, progress=False)
    assert not state.restored(before) and not state.moved(drawn, state.generators())


FAST = """
__device__ float of(float x) { float y; BODY; return y; }
extern "C" __global__ void fast(const float* x, float* y, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = of(x[i]);
}
"""


def fast(name, line, reference):
    """An operator of one instruction, in float32; its gradient is the reference's."""
    kernel = cupyops.Kernel(FAST.replace("BODY", line), "fast")

    @cupyops.operator(f"cupyops_promises::{name}", dtypes=torch.float32)
    def op(x: torch.Tensor) -> torch.Tensor:
        return reference(x)

    @op.forward
    def _(x):
        x = cupyops.contiguous(x)
        y = torch.empty_like(x)
        if x.numel():
            kernel[cupyops.ceil_div(x.numel(), 64), 64](x, y, x.numel())
        return y, ()

    return op


ROUGH = {
    "tanh": fast("tanh", 'asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x))', torch.tanh),
    "sine": fast("sine", "y = __sinf(1000.0f * x)", lambda x: torch.sin(1000.0 * x)),
    "cosine": fast("cosine", "y = __cosf(x)", torch.cos),
    "logarithm": fast("logarithm", "y = __logf(x > 0 ? x : 1.0f)", lambda x: torch.log(torch.where(x > 0, x, 1.0))),
    "difference": fast("difference", "y = __expf(x) - 1.0f", torch.expm1),
}
FINE = {
    "exp": fast("exp", "y = __expf(fminf(x, 3.0f))", lambda x: torch.exp(x.clamp(max=3.0))),
    "sigmoid": fast(
        "sigmoid",
        "y = __fdividef(1.0f, 1.0f + __expf(-fmaxf(fminf(x, 20.f), -20.f)))",
        lambda x: torch.sigmoid(x.clamp(-20, 20)),
    ),
    "reciprocal_root": fast("reciprocal_root", "y = rsqrtf(1.0f + x * x)", lambda x: torch.rsqrt(1 + x * x)),
    "exact tanh": fast("exact_tanh", "y = tanhf(x)", torch.tanh),
    "exact sine": fast("exact_sine", "y = sinf(x)", torch.sin),
    "exact logarithm": fast(
        "exact_logarithm", "y = logf(x > 0 ? x : 1.0f)", lambda x: torch.log(torch.where(x > 0, x, 1.0))
    ),
    "exact difference": fast("exact_difference", "y = expm1f(x)", torch.expm1),
}


@pytest.mark.parametrize("name", ROUGH)
def test_approximations_that_are_too_rough(name):
    failing(ROUGH[name], [normal(3, 11, requires_grad=False)], "approximations", backends="simulator")


@pytest.mark.parametrize("name", FINE)
def test_approximations_that_are_good_enough(name):
    assert_passes(FINE[name], [normal(3, 11, requires_grad=False)], "approximations", backends="simulator")


def test_the_command_of_the_documentation_for_cross_entropy():
    """In float16, where a gradient of opcheck's differs by one rounding."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=source).half().requires_grad_()
    target = torch.randint(0, 7, (5,), generator=source)
    assert_passes(cupyops.cross_entropy, [x, target], "opcheck", {"reduction": "sum"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_two_threads_of_a_right_kernel(dtype):
    """PyTorch's error in one call may be small by luck."""
    for seed in range(14):
        x = normal(3, 9, dtype=dtype, seed=seed)
        assert_passes(cupyops.softmax, [x, -1], "second_thread", backends="simulator")


def transposed(x):
    return x.transpose(-1, -2)


def a_slice(x):
    return x[..., 1:]


@pytest.mark.parametrize("function", [transposed, a_slice, torch.Tensor.detach, lambda x: x.view_as(x)])
def test_functions_that_return_a_view(function):
    hazards = ("accuracy", "no_gradient_wanted", "calls_between", "outputs_do_not_alias", "other_values_in_place")
    assert_passes(function, [normal(3, 4)], hazards, reference=lambda x: function(x))


def on_another_way(x):
    """Right both ways, by another formula where no gradient is wanted."""
    return x.clamp(min=0) if inference(x) else torch.relu(x)


RIGHT = {
    "relu": (cupyops.relu, lambda: [normal(4, 33)], {}),
    "gelu": (cupyops.gelu, lambda: [normal(4, 32)], {}),
    "silu": (cupyops.silu, lambda: [normal(2, 3, 8, 8)], {}),
    "softmax": (cupyops.softmax, lambda: [normal(8, 32), -1], {}),
    "log_softmax": (cupyops.log_softmax, lambda: [normal(4, 33), -1], {}),
    "layer_norm": (cupyops.layer_norm, lambda: [normal(4, 33), (33,), normal(33, seed=1), normal(33, seed=2)], {}),
    "rms_norm": (cupyops.rms_norm, lambda: [normal(4, 32), (32,), normal(32, seed=1)], {}),
    "add": (cupyops.add, lambda: [normal(4, 8), normal(8, seed=1)], {}),
    "sum": (cupyops.sum, lambda: [normal(4, 33), 1], {}),
    "mean": (cupyops.mean, lambda: [normal(4, 33), 1], {}),
    "amax": (cupyops.amax, lambda: [normal(4, 33), 1], {}),
    "cross_entropy": (cupyops.cross_entropy, lambda: [normal(5, 13), classes(5, high=13)], {}),
    "scale_shift": (cupyops.scale_shift, lambda: [normal(3, 5, 7), normal(5, 1, seed=1), normal(5, 1, seed=2)], {}),
    "relu in float16": (cupyops.relu, lambda: [normal(4, 33, dtype=torch.float16)], {}),
    "softmax in bfloat16": (cupyops.softmax, lambda: [normal(4, 33, dtype=torch.bfloat16), -1], {}),
    "wide loads with a tail": (wide("right", 4, -1), lambda: [normal(8, 32)], {}),
    "another way without gradients": (on_another_way, lambda: [normal(4, 33)], {"reference": torch.relu}),
    "a view": (transposed, lambda: [normal(3, 4)], {"reference": lambda x: torch.transpose(x, -1, -2)}),
    "random numbers": (noisy, lambda: [normal(3, 4)], {"reference": noisy}),
    "an alias for one value": (scaled, lambda: [normal(3, 4)], {"reference": scaled}),
    "no gradient": (cupyops.relu, lambda: [normal(4, 33, requires_grad=False)], {}),
    "one number": (cupyops.silu, lambda: [normal()], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_no_alarm(name):
    """Every hazard, on every backend."""
    function, args, options = RIGHT[name]
    report = check(function, args(), shrink=False, progress=False, **options)
    assert report.passed, f"\n{report}"
