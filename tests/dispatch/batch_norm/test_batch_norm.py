"""Each form of batch_norm on each kind of problem that it computes, as good as PyTorch; and which one is chosen."""

import pytest
import torch
from contract import assert_as_good_as_torch
from selection import slow

import cupyops
from cupyops._dispatch.batch_norm import batch_norm
from cupyops._dispatch.batch_norm.batch_norm import Problem
from cupyops._dispatch.core.gpu import gpu
from cupyops.testing import assume_gpu

F = torch.nn.functional
CPU = torch.device("cpu")
H200 = {"multiprocessors": 132, "shared": 232448, "shared_total": 233472, "threads": 2048, "l2": 50 << 20}
NAMES = ("y", "grad_x", "grad_weight", "grad_bias", "running_mean", "running_var")

# shape, channels_last: whole vectors, odd planes, small planes of many images, few columns, matrices, images of pixels
PROBLEMS = [
    ((3, 4, 16, 8), False), ((3, 4, 5, 7), False), ((18, 8, 5, 7), False), ((17, 8, 3), False), ((40, 16), False),
    ((9, 5), False), ((3, 8, 4, 5), True),
]  # fmt: skip


def everything(function, x, grad_y, mean, var, weight, bias, training):
    """y, the gradients, and the running statistics afterwards."""
    mean, var = mean.clone(), var.clone()
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    y = function(leaves[0], mean, var, *leaves[1:], training)
    return y, *torch.autograd.grad(y, leaves, grad_y), mean, var


def tensors(shape, last, dtype):
    x, grad_y = (torch.randn(shape).to(dtype) for _ in range(2))
    if last:
        x, grad_y = (tensor.to(memory_format=torch.channels_last) for tensor in (x, grad_y))
    weight, bias, mean = (torch.randn(shape[1]).to(dtype) for _ in range(3))
    return x, grad_y, mean, torch.rand(shape[1]).to(dtype) + 0.5, weight, bias


def problem(shape, last, dtype):
    x = tensors(shape, last, dtype)[0]
    return batch_norm.problem_of(x)


def computing(forms, of):
    """The forms that can compute a problem."""
    with cupyops.simulate("sm_90"):
        return [form.name for form in forms.list if form.why_not(of, gpu(CPU)) is None]


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.float32), torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "last"), PROBLEMS, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_every_form_that_can_compute_a_problem(training, shape, last, dtype):
    forward, backward = (
        (batch_norm.FORWARD, batch_norm.BACKWARD) if training else (batch_norm.INFERENCE, batch_norm.INFERENCE_BACKWARD)
    )
    args = tensors(shape, last, dtype)
    theirs = everything(F.batch_norm, *args, training)
    truth = everything(F.batch_norm, *[tensor.double() for tensor in args], training)
    of = problem(shape, last, dtype)
    asked = [f"batch_norm.{one.direction}:{name}" for one in (forward, backward) for name in computing(one, of)]
    assert len(asked) >= 2
    for name in asked:
        with cupyops.simulate("sm_90"), cupyops.use_form(name), cupyops.trace() as trace:
            ours = everything(cupyops.batch_norm, *args, training)
        assert trace.routes() == {"simulator"}, str(trace)
        for a, b, c, what in zip(ours, theirs, truth, NAMES):
            assert_as_good_as_torch(a, b, c, f"{what} by {name}")


def test_every_form_is_reached():
    """Each form can compute one of the problems, in fp32."""
    found = {
        (one.direction, name)
        for one in (batch_norm.FORWARD, batch_norm.BACKWARD, batch_norm.INFERENCE, batch_norm.INFERENCE_BACKWARD)
        for shape, last in PROBLEMS
        for name in computing(one, problem(shape, last, torch.float32))
    }
    lists = (batch_norm.FORWARD, batch_norm.BACKWARD, batch_norm.INFERENCE, batch_norm.INFERENCE_BACKWARD)
    assert found == {(one.direction, form.name) for one in lists for form in one.list}


@pytest.mark.parametrize(
    ("of", "forward", "backward"),
    [
        (Problem(64, 256, 56 * 56, 2, False, True), "nchw_cluster", "nchw_cluster"),
        (Problem(256, 64, 112 * 112, 4, False, True), "nchw_two_pass", "nchw_two_pass"),
        (Problem(64, 256, 56 * 56, 2, True, True), "nhwc_two_pass", "nhwc_two_pass"),
        (Problem(4096, 1000, 1, 4, True, True), "nhwc_cluster", "nhwc_cluster"),
        (Problem(4096, 1001, 1, 4, True, True), "nhwc_two_pass", "nhwc_two_pass"),
        (Problem(256, 2048, 49, 2, False, True), "nhwc_two_pass", "nhwc_inline"),
        (Problem(256, 2048, 49, 2, False, False), "nhwc_two_pass", "nhwc_two_pass"),
        (Problem(4096, 1000, 1, 8, True, True), "nchw_two_pass", "nchw_two_pass"),
    ],
)
def test_what_an_h200_takes(of, forward, backward):
    with cupyops.simulate("sm_90"), assume_gpu(**H200):
        assert batch_norm.FORWARD.choose(of, gpu(CPU)).name == forward
        assert batch_norm.BACKWARD.choose(of, gpu(CPU)).name == backward


@pytest.mark.parametrize("shared", [232448, 101376])
def test_a_cluster_takes_no_more_shared_memory_than_there_is(shared):
    """Some GPUs with clusters have half as much."""
    with cupyops.simulate("sm_90"), assume_gpu(shared=shared, shared_total=shared + 1024):
        for pixels in (1 << k for k in range(4, 16)):
            of = Problem(64, 256, pixels, 4, False, True)
            for forms in (batch_norm.FORWARD, batch_norm.BACKWARD):
                form = next(form for form in forms.list if form.name == "nchw_cluster")
                assert form.launch(of, gpu(CPU)).shared <= shared - 1024


def test_results_do_not_depend_on_the_multiprocessors():
    """How many blocks share a sum decides its last bits."""
    for shape in ((2, 3, 9000), (700, 8)):
        args = tensors(shape, False, torch.float32)
        with cupyops.simulate():
            first = everything(cupyops.batch_norm, *args, True)
            with assume_gpu(multiprocessors=16):
                second = everything(cupyops.batch_norm, *args, True)
        assert all(map(torch.equal, first, second))
