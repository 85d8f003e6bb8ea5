"""What the tests of layer_norm, rms_norm and add_rms_norm share: kernels, gradients, and launches as for other GPUs."""

import torch
from contract import Make, assert_as_good_as_torch

import cupyops
from cupyops.testing import assume_gpu

KERNELS = {
    "norm_fwd_thread_per_row", "norm_fwd_sub_warp", "norm_fwd_block", "norm_fwd_shared_memory", "norm_fwd_two_pass",
    "norm_fwd_shift", "norm_bwd_thread_per_row", "norm_bwd_sub_warp", "norm_bwd_block", "norm_bwd_two_pass",
    "norm_bwd_strided", "norm_bwd_finalize",
}  # fmt: skip


def gradients(function, grad_y, x, *parameters):
    """The result, and the gradients of x and the parameters."""
    x, *parameters = (t.detach().requires_grad_() for t in (x, *parameters))
    y = function(x, x.shape[1:], *parameters)
    return y, *torch.autograd.grad(y, (x, *parameters), grad_y.to(y.dtype))


def compare_several_rows(function, torch_function, size, arch, offset=0, parameters=1):
    """On one multiprocessor blocks take several rows; backward of long ones reads one while it reduces another."""
    make = Make("cpu", torch.bfloat16)
    rows = {40: 450, 69: 19 * 8}.get(size, 19)  # more than the blocks, or clusters, take at a time
    x = make(rows * size + offset).detach()[offset:].view(rows, size)
    args = (make(rows, size).detach(), x, *(make(size).detach() for _ in range(parameters)))
    with assume_gpu(multiprocessors=1, shared=232448), cupyops.simulate(arch):
        ours = gradients(function, *args)
    theirs = gradients(torch_function, *args)
    truth = gradients(torch_function, *(t.double() for t in args))
    for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)


def compare_pipelined(forward, tensors, size):
    """The same bits, whether or not a block reads a row of `tensors` tensors while it reduces the one before."""
    args = [Make("cpu", torch.float32, seed=seed)(37, size).detach() for seed in range(tensors)]
    results = []
    for form in ("norm:block", "norm:pipelined"):
        with cupyops.use_form(form), assume_gpu(max_blocks=5), cupyops.simulate():
            results.append(forward(*args))
    assert all(map(torch.equal, *results))


def batch_norm_act(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5, activation="relu",
    residual=None,
):  # fmt: skip
    """cupyops.batch_norm_act by functions of PyTorch."""
    y = torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    y = y if residual is None else y + residual
    return torch.relu(y) if activation == "relu" else y
