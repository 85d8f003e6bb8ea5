"""Each form of group_norm on each kind of problem that it computes, as good as PyTorch; and which one is chosen."""

import pytest
import torch
from contract import assert_as_good_as_torch
from selection import slow

import cupyops
from cupyops._dispatch.core.gpu import gpu
from cupyops._dispatch.group_norm import group_norm
from cupyops._dispatch.group_norm.group_norm import Problem
from cupyops.testing import assume_gpu

F = torch.nn.functional
CPU = torch.device("cpu")
H200 = {"multiprocessors": 132, "shared": 232448, "shared_total": 233472, "threads": 2048, "l2": 50 << 20}

# shape, groups: whole vectors, odd planes of whole groups, small planes, planes of one element, groups that begin and end
# within a vector, several blocks for each, more than a block of rows
PROBLEMS = [
    ((3, 4, 4, 8), 2), ((5, 8, 7, 7), 2), ((3, 3, 5, 5), 1), ((20, 12), 2), ((2, 3, 265), 3), ((1, 8, 1100), 1),
    ((20, 4, 33), 2),
]  # fmt: skip


def everything(function, x, grad_y, groups, weight, bias):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    y = function(leaves[0], groups, *leaves[1:])
    return y, *torch.autograd.grad(y, leaves, grad_y)


def computing(forms, of):
    """The forms that can compute a problem."""
    with cupyops.simulate("sm_90"):
        return [form.name for form in forms.list if form.why_not(of, gpu(CPU)) is None]


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.float32), torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "groups"), PROBLEMS, ids=str)
def test_every_form_that_can_compute_a_problem(shape, groups, dtype):
    x, grad_y = (torch.randn(shape).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[1]).to(dtype) for _ in range(2))
    theirs = everything(F.group_norm, x, grad_y, groups, weight, bias)
    truth = everything(F.group_norm, x.double(), grad_y.double(), groups, weight.double(), bias.double())
    of = group_norm.problem_of(x, groups)
    lists = (group_norm.FORWARD, group_norm.BACKWARD)
    asked = [f"group_norm.{one.direction}:{name}" for one in lists for name in computing(one, of)]
    assert len(asked) >= 2
    for name in asked:
        with cupyops.simulate("sm_90"), cupyops.use_form(name), cupyops.trace() as trace:
            ours = everything(cupyops.group_norm, x, grad_y, groups, weight, bias)
        assert trace.routes() == {"simulator"}, str(trace)
        for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
            assert_as_good_as_torch(a, b, c, f"{what} by {name}")


def test_every_form_is_reached():
    """Each form can compute one of the problems, in fp32."""
    for forms in (group_norm.FORWARD, group_norm.BACKWARD):
        problems = [group_norm.problem_of(torch.empty(shape), groups) for shape, groups in PROBLEMS]
        problems.append(group_norm.problem_of(torch.empty(2, 16, 8, 9), 2, nhwc=True))
        assert {name for of in problems for name in computing(forms, of)} == {form.name for form in forms.list}


@pytest.mark.parametrize(("of", "form"), [
    (Problem(1024, 32, 16, 1024, 2, True), "persistent"), (Problem(2048, 32, 8, 4095, 2, True), "persistent"),
    (Problem(16384, 16, 4, 49, 2, True), "sub_warp"), (Problem(8192, 32, 64, 49, 2, True), "sub_warp"),
    (Problem(8192, 8, 32, 1, 4, True), "shared_memory"), (Problem(128, 2, 16, 50257, 2, True), "two_pass"),
    (Problem(1024, 32, 16, 1024, 2, False), "two_pass"), (Problem(1024, 32, 16, 1024, 8, True), "two_pass"),
])  # fmt: skip
def test_what_an_h200_takes(of, form):
    with cupyops.simulate("sm_90"), assume_gpu(**H200):
        assert group_norm.FORWARD.choose(of, gpu(CPU)).name == form
        assert group_norm.BACKWARD.choose(of, gpu(CPU)).name == form


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("rows", [(1 << 30) - 1, 1 << 30])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_instances_that_there_are(rows, itemsize, clusters):
    """Groups of any length have a form, and its template values are among those of its kernel."""
    dtype = {2: torch.float16, 4: torch.float32}[itemsize]
    with cupyops.simulate("sm_90" if clusters else "sm_80"):
        for pixels in (*range(1, 264), *range(264, 30000, 117)):
            for forms in (group_norm.FORWARD, group_norm.BACKWARD):
                launch = forms.launch(Problem(rows, 1, 1, pixels, itemsize, True), gpu(CPU))
                launch.kernel.instance(T=dtype, **launch.template)
                assert launch.shared <= gpu(CPU).shared


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("beyond", [1, -1])
def test_heads_and_tails_by_few_threads(dtype, beyond):
    """A thread has one element of them at most: there are as many threads as elements, however short the group is."""
    x, grad_y = (torch.randn(5, 2, 3 * 16 // dtype.itemsize + beyond).to(dtype) for _ in range(2))
    x[:, :, :2], x[:, :, -2:] = 30, -20  # what a sum lacks of them shows
    weight, bias = torch.randn(2).to(dtype), torch.randn(2).to(dtype)
    with cupyops.simulate(), cupyops.use_form("group_norm:persistent"):
        ours = everything(cupyops.group_norm, x, grad_y, 2, weight, bias)
    theirs = everything(F.group_norm, x, grad_y, 2, weight, bias)
    truth = everything(F.group_norm, x.double(), grad_y.double(), 2, weight.double(), bias.double())
    for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)
