"""What the tests of layer_norm, rms_norm and add_rms_norm share: kernels, gradients, and launches as for other GPUs."""

import torch
from contract import Make, assert_as_good_as_torch

import cupyops
from cupyops.ops._add_norm_lowered import add_norm_lowered
from cupyops.ops._layer_norm import layer_norm_lowered
from cupyops.ops._rms_norm import rms_norm_lowered
from cupyops.testing import assume_gpu

KERNELS = {
    "norm_fwd_thread_per_row",
    "norm_fwd_sub_warp",
    "norm_fwd_block",
    "norm_fwd_shared_memory",
    "norm_fwd_two_pass",
    "norm_fwd_shift",
    "norm_bwd_thread_per_row",
    "norm_bwd_sub_warp",
    "norm_bwd_block",
    "norm_bwd_two_pass",
    "norm_bwd_strided",
    "norm_bwd_finalize",
}


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


def lowered(function, dtype):
    """layer_norm or rms_norm with a result of a half type, and PyTorch's, as functions of tensors."""
    if function is cupyops.layer_norm:
        torch_function = torch.nn.functional.layer_norm
        return (
            lambda x, weight, bias: layer_norm_lowered(x, x.shape[1:], weight, bias, 1e-5, dtype),
            lambda x, weight, bias: torch_function(x, x.shape[1:], weight, bias, 1e-5),
        )
    torch_function = torch.nn.functional.rms_norm
    return (
        lambda x, weight: rms_norm_lowered(x, x.shape[1:], weight, 1e-5, dtype),
        lambda x, weight: torch_function(x, x.shape[1:], weight, 1e-5),
    )


def compare_lowered(function, rows, size, dtype, device="cpu", offset=0, expanded=False):
    """Values and gradients of float32 rows with a half result: as good as PyTorch's in float32, rounded where it is."""
    make, arity = Make(device, torch.float32), 2 if function is cupyops.layer_norm else 1
    x = (make(rows * size + offset).detach()[offset:].view(rows, size) + 3).requires_grad_()
    leaves = [x, *(make(size) for _ in range(arity))]
    grad_y = make(*(1, size) if expanded else (rows, size)).detach().to(dtype).expand(rows, size)
    ours, theirs = lowered(function, dtype)
    y = ours(*leaves)
    found = y.detach(), *torch.autograd.grad(y, leaves, grad_y)
    same = [leaf.detach().requires_grad_() for leaf in leaves]
    z = theirs(*same)
    expected = z.detach().to(dtype), *torch.autograd.grad(z, same, grad_y.float())
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    t = theirs(*exact)
    truth = t.detach(), *torch.autograd.grad(t, exact, grad_y.double())
    assert [one.dtype for one in found] == [dtype, *[torch.float32] * (1 + arity)]
    for a, b, c, what in zip(found, expected, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)
    return found


def leaves_to_add(rows, size, dtype, device, centred, seed=0):
    """residual, x, weight, and bias where there is one; gradients of both results."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(shape, generator=generator).to(device)

    leaves = [make(rows, size) + 1, make(rows, size).to(dtype), make(size), *([make(size)] if centred else [])]
    return [one.requires_grad_() for one in leaves], [make(rows, size).to(dtype), make(rows, size)]


def added(residual, x, weight=None, bias=None, centred=True):
    return add_norm_lowered(residual, x, [*x.shape[1:]], weight, bias, 1e-5, centred)


def added_by_torch(residual, x, weight=None, bias=None, centred=True):
    """By PyTorch, in the dtype of `residual`."""
    summed = residual + x
    if centred:
        return torch.nn.functional.layer_norm(summed, x.shape[1:], weight, bias, 1e-5), summed
    return torch.nn.functional.rms_norm(summed, x.shape[1:], weight, 1e-5), summed


def compare_added(rows, size, dtype, device="cpu", centred=True):
    """Values and gradients of a residual sum and its norm: as good as PyTorch's in float32, rounded where the result is."""
    leaves, grads = leaves_to_add(rows, size, dtype, device, centred)
    results = added(*leaves, centred=centred)
    found = *results, *torch.autograd.grad(results, leaves, grads)
    assert [one.dtype for one in found] == [dtype, torch.float32, *[one.dtype for one in leaves]]
    y, summed = added_by_torch(*leaves, centred=centred)
    expected = y.to(dtype), summed, *torch.autograd.grad((y.to(dtype), summed), leaves, grads)
    exact = [one.detach().double().requires_grad_() for one in leaves]
    t = added_by_torch(*exact, centred=centred)
    truth = *t, *torch.autograd.grad(t, exact, [one.double() for one in grads])
    names = ("y", "summed", "grad_residual", "grad_x", "grad_weight", "grad_bias")
    for a, b, c, what in zip(found, expected, truth, names):
        assert_as_good_as_torch(a.detach(), b.detach(), c.detach(), what)


def batch_norm_act(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5, activation="relu",
    residual=None,
):  # fmt: skip
    """cupyops.batch_norm_act by functions of PyTorch."""
    y = torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    y = y if residual is None else y + residual
    return torch.relu(y) if activation == "relu" else y
