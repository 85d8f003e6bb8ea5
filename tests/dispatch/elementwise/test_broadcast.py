"""Every form of the elementwise operators that have several, on whatever it can compute, against PyTorch in float64."""

from dataclasses import replace

import pytest
import torch
from form_walk import by_form
from processes import run_python
from torch.nn import functional as F

import cupyops
from cupyops._dispatch import gated
from cupyops._dispatch.core.forms import families, use_form
from cupyops._dispatch.core.gpu import gpu
from cupyops._dispatch.elementwise import broadcast
from cupyops._dispatch.elementwise.broadcast_params import Params

CPU = torch.device("cpu")
FORMS = {(one.family, one.direction): one for one in families()}


def scale_shift(x, weight, bias=None):
    return x * weight if bias is None else x * weight + bias


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def swiglu(gate, up=None):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.silu(gate) * up


# family: ours, PyTorch's, shapes of the arguments
CALLS = {
    "add": (cupyops.add, torch.add, [
        ((3, 40), (3, 40)), ((301, 13), (13,)), ((33, 40), (33, 1)), ((35, 37), (35, 1)), ((6, 5, 4, 19), (5, 1, 1)),
        ((1003,), ()), ((3, 1), (1, 7)), ((3, 4, 5), (3, 1, 5)),
    ]),
    "scale_shift": (cupyops.scale_shift, scale_shift, [
        ((301, 13), (13,), (13,)), ((33, 40), (33, 1), (33, 1)), ((35, 37), (35, 1)), ((6, 5, 4, 19), (5, 1, 1), (5, 1, 1)),
        ((1003,), (), ()), ((300, 24), (24,)), ((3, 4, 5), (3, 1, 5), (4, 5)), ((3001, 8), (8,), (8,)),
    ]),
    "bias_gelu": (cupyops.bias_gelu, bias_gelu, [((301, 13), (13,)), ((3, 5, 24), (24,))]),
    "swiglu": (cupyops.swiglu, swiglu, [((7, 34),), ((251, 34),), ((3, 262),), ((5, 64),), ((3, 520),), ((3, 7), (3, 7))]),
}  # fmt: skip
WALKED = [
    (family, direction, form.name)
    for family in CALLS
    for direction in ("forward", "backward")
    if (family, direction) in FORMS
    for form in FORMS[family, direction].list
]


def results(function, arguments):
    """The result, and the gradients for one that is drawn."""
    leaves = [one.detach().clone().requires_grad_() for one in arguments]
    y = function(*leaves)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
@pytest.mark.parametrize(("family", "direction", "form"), WALKED)
def test_each_form(family, direction, form, dtype):
    ours, theirs, calls = CALLS[family]
    computed = 0
    for shapes in calls:
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        found = by_form(f"{family}.{direction}:{form}", lambda given=given: results(ours, given))
        if found is None:
            continue
        computed += 1
        for mine, exact in zip(found, results(theirs, [one.double() for one in given])):
            size = max(exact.abs().max().item(), 1.0) if exact.numel() else 1.0
            bound = 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-12
            torch.testing.assert_close(mine.double(), exact, rtol=bound, atol=bound * size, msg=f"{shapes}")
    assert computed or dtype is torch.float64  # which has the most general form alone


# (input, parameter): rows of whole vectors and not, channels that vectors straddle, one number
LONG = [
    ((300, 24), (24,)), ((301, 13), (13,)), ((3, 13), (13,)), ((33, 40), (33, 1)), ((35, 37), (35, 1)),
    ((6, 5, 4, 19), (5, 1, 1)), ((1003,), ()),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "part"), LONG, ids=str)
def test_several_vectors_a_thread(dtype, shape, part):
    """As of tensors of 2^31 elements: parameters are kept, or stepped through, from one vector of a thread to the next."""
    x, weight, bias = (torch.randn(size).to(dtype) for size in (shape, part, part))
    little = replace(gpu(CPU), multiprocessors=1, threads=1)
    for family, parameters, numbers in (("add", (bias,), (0.5,)), ("scale_shift", (weight, bias), ())):
        y = torch.empty_like(x)
        strides = tuple(one.expand(shape).stride() for one in (x, *parameters))
        problem = broadcast.Broadcast(tuple(x.shape), y.stride(), strides, x.element_size())
        forms = [type(one)(one.kernel, 11) for one in FORMS[family, "forward"].list if isinstance(one, Params)]
        launch = next(one for one in forms if one.why_not(problem, little) is None).launch(problem, little)
        with cupyops.simulate():
            launch(x, *parameters, y, *numbers, T=dtype)
        exact = x.double() + 0.5 * bias.double() if numbers else scale_shift(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(y, exact.to(dtype))


def test_the_card_is_asked():
    """More vectors than threads run at once: a thread of a small GPU has several."""
    problem = broadcast.Broadcast((1 << 20, 64), (64, 1), ((64, 1), (0, 1)), 2)
    form = next(one for one in FORMS["bias_gelu", "forward"].list if one.name == "per_column")
    grids = [form.launch(problem, replace(gpu(CPU), multiprocessors=count)).grid for count in (1, 1 << 20)]
    assert grids[0] < grids[1]


def test_packed_rows_of_more_columns_than_a_block_has_threads():
    """Not in shared memory, even where it is asked for."""
    with use_form("swiglu.forward:shared_memory"), pytest.raises(cupyops.InputError, match="more than 256 col"):
        FORMS["swiglu", "forward"].choose(gated.Gated(3, 257, 2, 514, 514, True), gpu(CPU))


NO_SYMPY = """
import sys, torch, cupyops
x = torch.randn(4, 6)
with cupyops.simulate():
    assert torch.equal(cupyops.add(x, x[0]), x + x[0])
    assert torch.allclose(cupyops.matmul(x[None], x.T), x[None] @ x.T, atol=1e-5)
    assert torch.allclose(cupyops.matmul(x[None], x.T[None].expand(3, 6, 4)), (x @ x.T).expand(3, 4, 4), atol=1e-5)
print("sympy" in sys.modules)
"""


def test_no_call_imports_sympy():
    """torch.broadcast_shapes does, which takes longer than to load all kernels of a model."""
    done = run_python("-c", NO_SYMPY, bare=True)
    assert done.stdout.split() == ["False"], done.stderr


@pytest.mark.parametrize("shapes", [[()], [(3, 1), (4,)], [(0, 1), (1, 5), (1,)], [(2, 1, 3), (1, 4, 1)]])
def test_shapes_broadcast_as_pytorch_s(shapes):
    assert broadcast.broadcast_shapes(*shapes) == tuple(torch.broadcast_shapes(*shapes))


def test_shapes_that_do_not_broadcast():
    with pytest.raises(ValueError, match="shape"):
        broadcast.broadcast_shapes((2, 3), (4,))
