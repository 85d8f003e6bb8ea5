"""Every form of the normalisations over rows against PyTorch, on rows that it would be chosen for and on others."""

import pytest
import torch
from contract import Make, assert_as_good_as_torch

import cupyops
from cupyops._dispatch.core.gpu import gpu
from cupyops._dispatch.norm import norm
from cupyops._dispatch.norm.backward import BACKWARD
from cupyops._dispatch.norm.forms import Problem
from cupyops._dispatch.norm.forward import FORWARD
from cupyops.testing import assume_gpu

ARCH = "sm_90"
BF16 = torch.bfloat16
# by form: sizes of rows of bfloat16 from a 16-byte boundary, and of rows that begin off it, all of which it computes
FORMS = {
    "norm.forward:thread_per_row": ([5, 8, 40], [5, 8, 40]),
    "norm.forward:sub_warp": ([8, 16, 24, 40, 200, 256], []),
    "norm.forward:pipelined": ([8, 40, 256, 1032], []),
    "norm.forward:block": ([8, 9, 69, 256, 300, 1031, 1032], [8, 69, 1032]),
    "norm.forward:shared_memory": ([8, 9, 300, 4099, 4104], [8, 300, 4104]),
    "norm.forward:two_pass": ([5, 8, 300, 1031, 1032], [8, 300, 1032]),
    "norm.backward:thread_per_row": ([5, 8, 40], [5, 8, 40]),
    "norm.backward:sub_warp": ([8, 16, 24, 40, 200, 256], []),
    "norm.backward:prefetch_late": ([8, 40, 256, 1032], []),
    "norm.backward:block": ([8, 9, 69, 256, 300, 1031, 1032], [8, 69, 1032]),
    "norm.backward:cluster": ([8, 9, 300, 1031, 4104, 20489], [300, 4104]),
    "norm.backward:two_pass": ([5, 8, 300, 1031, 1032], [8, 300, 1032]),
}


def add_rms_norm(x, residual, shape, *rest):
    """Two operators of PyTorch's."""
    summed = x + residual
    return torch.nn.functional.rms_norm(summed, shape, *rest), summed


# by operator: ours, PyTorch's, how many tensors of rows, how many parameters
OPERATORS = {
    "layer_norm": (cupyops.layer_norm, torch.nn.functional.layer_norm, 1, 2),
    "rms_norm": (cupyops.rms_norm, torch.nn.functional.rms_norm, 1, 1),
    "add_rms_norm": (cupyops.add_rms_norm, add_rms_norm, 2, 1),
}


def results(function, rows, parameters, grads):
    """The outputs and all gradients; `parameters` wants none where it is of numbers."""
    rows, parameters = ([t.detach().requires_grad_() for t in group] for group in (rows, parameters))
    y = function(*rows, rows[0].shape[1:], *parameters, 1e-3)
    outputs = y if isinstance(y, tuple) else (y,)
    return [
        *outputs,
        *torch.autograd.grad(outputs, (*rows, *parameters), [g.to(y.dtype) for g, y in zip(grads, outputs)]),
    ]


def compare(operator, dtype, size, offset=0):
    """All results of some rows, of which a block takes several."""
    count = 77 if size <= 100 else 19 if size <= 300 else 11
    ours, theirs, tensors, parameters = OPERATORS[operator]
    make = Make("cpu", dtype, requires_grad=False)
    given = [make(count * size + offset)[offset:].view(count, size) for _ in range(tensors)]
    given = given, [make(size) for _ in range(parameters)]
    grads = [make(count, size) for _ in range(tensors)]
    with assume_gpu(multiprocessors=1, max_blocks=3, shared=232448), cupyops.simulate(ARCH):
        found = results(ours, *given, grads)
    with torch.no_grad():
        wide = [[t.double() for t in group] for group in (*given, grads)]
    if operator == "add_rms_norm":  # rounded before it is normalised
        summed = (given[0][0] + given[0][1]).double()
        wide[0] = [summed, torch.zeros_like(summed)]
    expected, truth = results(theirs, *given, grads), results(theirs, *wide)
    for index, (a, b, c) in enumerate(zip(found, expected, truth, strict=True)):
        assert_as_good_as_torch(a, b, c, f"result {index} of rows of {size}, {offset} elements off")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form(form, operator):
    sizes, unaligned = FORMS[form]
    if form == "norm.forward:pipelined" and operator == "layer_norm":
        with cupyops.use_form(form), pytest.raises(cupyops.InputError, match="but rows are in registers"):
            compare(operator, BF16, 8)
        return
    for offset, size in [(0, size) for size in sizes] + [(1, size) for size in unaligned]:
        with cupyops.use_form(form):
            compare(operator, BF16, size, offset)


def test_each_form_is_tested():
    assert list(FORMS) == [
        f"norm.{forms.direction}:{form.name}" for forms in (FORWARD, BACKWARD) for form in forms.list
    ]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("size", [5, 64, 1031])  # of rows of one or two elements PyTorch in float64 is no truth
def test_fp64_in_two_passes(operator, size):
    compare(operator, torch.float64, size)
    compare(operator, torch.float64, size, offset=1)


@pytest.mark.parametrize("dtype", [BF16, torch.float64], ids=str)
def test_rows_of_one_element(dtype):
    """Such a row is its own mean: y is the bias, and no gradient reaches x."""
    make = Make("cpu", dtype, requires_grad=False)
    x, weight, bias, grad_y = make(50, 1), make(1), make(1), make(50, 1)
    with cupyops.simulate():
        y, grad_x, *_ = results(cupyops.layer_norm, [x], [weight, bias], [grad_y])
    assert torch.equal(y, bias.expand(50, 1)) and not grad_x.any()


@pytest.mark.parametrize(
    ("form", "dtype", "size", "offset", "reason"),
    [
        ("thread_per_row", BF16, 72, 0, "a row has 144 bytes, more than 128"),
        ("sub_warp", BF16, 41, 0, "rows begin off 16-byte boundaries"),
        ("sub_warp", BF16, 40, 1, "rows begin off 16-byte boundaries"),
        ("sub_warp", BF16, 264, 0, "a row has more than 32 vectors"),
        ("pipelined", BF16, 41, 0, "rows begin off 16-byte boundaries"),
        ("block", BF16, 5, 0, "a row is shorter than a vector"),
        ("block", BF16, 40000, 0, "a row needs more than 1024 threads"),
        ("shared_memory", BF16, 60000, 0, "a row does not fit into shared memory"),
        ("block", torch.float64, 8, 0, "fp64 has two_pass alone"),
        ("norm.backward:prefetch_late", BF16, 41, 0, "rows begin off 16-byte boundaries"),
        ("norm.backward:prefetch_late", torch.float32, 6144, 0, "two rows do not fit into shared memory"),
        ("norm.backward:cluster", BF16, 8, 0, "clusters need compute capability 9.0"),
    ],
)
def test_a_form_that_cannot(form, dtype, size, offset, reason):
    name = form if ":" in form else f"norm.forward:{form}"
    x = torch.zeros(size + offset, dtype=dtype)[offset:].view(1, size).requires_grad_()
    with cupyops.use_form(name), cupyops.simulate("sm_80"), pytest.raises(cupyops.InputError, match=reason):
        cupyops.rms_norm(x, (size,)).sum().backward()


def chosen(size, rows=1 << 15, operator=norm.LAYER_NORM, itemsize=2, aligned=None, capability=9):
    """The names of the forms on an H200, forward and backward."""
    properties = dict(capability=capability, multiprocessors=132, shared=232448, shared_total=233472, l2=50 << 20)
    problem = Problem(operator, rows, size, itemsize, size * itemsize % 16 == 0 if aligned is None else aligned, True)
    with assume_gpu(**properties):
        card = gpu(torch.device("cpu"))
    return FORWARD.choose(problem, card).name, BACKWARD.choose(problem, card).name


@pytest.mark.parametrize(
    ("forward", "backward", "size", "options"),
    [
        ("thread_per_row", "thread_per_row", 17, {}),
        ("sub_warp", "sub_warp", 16, {}),
        ("sub_warp", "sub_warp", 256, {}),
        ("block", "block", 16, {"aligned": False}),
        ("block", "block", 1000, {}),
        ("block", "block", 4095, {"operator": norm.RMS_NORM}),
        ("pipelined", "block", 4096, {"operator": norm.RMS_NORM, "itemsize": 4}),
        ("pipelined", "block", 16384, {"operator": norm.ADD_RMS_NORM}),
        ("pipelined", "prefetch_late", 16384, {"operator": norm.RMS_NORM}),
        ("block", "block", 16384, {"operator": norm.ADD_RMS_NORM, "rows": 100}),
        ("shared_memory", "cluster", 50257, {}),
        ("shared_memory", "two_pass", 50257, {"capability": 8}),
        ("two_pass", "two_pass", 1 << 20, {}),
        ("two_pass", "two_pass", 17, {"itemsize": 8}),
    ],
)
def test_the_form_for_a_size(forward, backward, size, options):
    assert chosen(size, **options) == (forward, backward)


def test_small_shared_memory():
    """Where rows of a thread each do not fit, lanes share them; and a wave has no block that is not launched."""
    problem = Problem(norm.ADD_RMS_NORM, 1000, 63, 2, False, True)
    with assume_gpu(shared=65536):
        card = gpu(torch.device("cpu"))
    assert BACKWARD.choose(problem, card).name == "block"
    assert BACKWARD.launch(problem, card).shared <= 65536


@pytest.mark.parametrize("blocks", [3, 5])
def test_clusters_of_any_number_of_blocks(blocks):
    """Of which a card has room for most differs; the gradients do not."""
    rows, size = 19, 20489
    make = Make("cpu", BF16, requires_grad=False)
    grad_y, x, weight = make(rows, size), make(rows, size), make(size)
    cluster = next(form for form in BACKWARD.list if form.name == "cluster")
    problem = Problem(norm.RMS_NORM, rows, size, 2, False, True)
    rstd = torch.rsqrt(x.float().square().mean(1) + 1e-3)
    tensors = norm.Gradients(
        grad_y, x, weight, rstd=rstd, grad_x=torch.empty_like(x), grad_weight=torch.empty_like(weight)
    )
    with assume_gpu(multiprocessors=1, shared=232448), cupyops.simulate(ARCH):
        card = gpu(x.device)
        split = next(split for split in cluster.splits(problem, card) if split[0] == blocks)
        norm._in_one_pass(cluster.among(problem, card, *split), tensors, rows, size)
    _, *expected = results(torch.nn.functional.rms_norm, [x], [weight], [grad_y])
    _, *truth = results(torch.nn.functional.rms_norm, [x.double()], [weight.double()], [grad_y.double()])
    for a, b, c in zip((tensors.grad_x, tensors.grad_weight), expected, truth, strict=True):
        assert_as_good_as_torch(a, b, c, f"{blocks} blocks")
