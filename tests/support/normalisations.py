"""What the tests of layer_norm, rms_norm and add_rms_norm share: gradients, and launches planned as for other GPUs."""

from contextlib import contextmanager

import pytest
import torch
from contract import Make, assert_as_good_as_torch

import cupyops
from cupyops._dispatch import norms


def gradients(function, grad_y, x, *parameters):
    """The result, and the gradients of x and the parameters."""
    x, *parameters = (t.detach().requires_grad_() for t in (x, *parameters))
    y = function(x, x.shape[1:], *parameters)
    return y, *torch.autograd.grad(y, (x, *parameters), grad_y.to(y.dtype))


@contextmanager
def planned(**settings):
    """Launches are planned anew with these settings of cupyops._dispatch.norms."""
    plans = norms._forward_plan, norms._backward_plan
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(norms, name, value)
        try:
            for plan in plans:
                plan.cache_clear()
            yield
        finally:
            for plan in plans:
                plan.cache_clear()


def compare_several_rows(function, torch_function, size, arch, offset=0, parameters=1):
    """On one multiprocessor blocks take several rows; backward of long ones reads one while it reduces another."""
    make = Make("cpu", torch.bfloat16)
    rows = {40: 450, 69: 19 * 8}.get(size, 19)  # more than the blocks, or clusters, take at a time
    x = make(rows * size + offset).detach()[offset:].view(rows, size)
    args = (make(rows, size).detach(), x, *(make(size).detach() for _ in range(parameters)))
    with planned(card=lambda device: (1, 232448)), cupyops.simulate(arch):
        ours = gradients(function, *args)
    theirs = gradients(torch_function, *args)
    truth = gradients(torch_function, *(t.double() for t in args))
    for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)


def compare_read_ahead(forward, tensors, size):
    """The same bits, whether or not a block reads a row of `tensors` tensors while it reduces the one before; by vectors."""
    args = [Make("cpu", torch.float32, seed=seed)(37, size).detach() for seed in range(tensors)]
    results, stages = [], []
    for ahead in (norms.WIDEST + 1, 0):
        with planned(FORWARD_AHEAD=ahead, _ENOUGH_BLOCKS=0), cupyops.simulate():
            results.append(forward(*args))
            plan = norms._forward_plan(37, size, 4, tensors, True, False, args[0].device)
            stages.append(plan.stages)
    assert stages == [1, 2] and all(map(torch.equal, *results))
