"""cupyops.nn.utils.clip_grad_norm_ against torch.nn.utils' own."""

import inspect
import math
import weakref

import pytest
import torch
from contract import DTYPES
from optim.contract import LAYOUTS, kernels, parameters, set_grads
from torch import nn

import cupyops
from cupyops.nn.utils import clip_grad_norm_
from cupyops.optim import clip

DEFAULT = 2.0
NORMS = [DEFAULT, math.inf]


def compare(make, max_norm, norm_type=DEFAULT, change=lambda grad, index: grad):
    """Norm and gradients, against PyTorch's and PyTorch's in float64 by the bound of twice its error."""
    ours, theirs = make(), make()
    exact = [nn.Parameter(p.detach().double()) for p in make()]
    lists = [ours, theirs, exact]
    set_grads(lists, 0, change)
    before = [p.grad.clone() for p in ours]
    norms = [clip_grad_norm_(ours, max_norm, norm_type)]
    norms += [torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type) for params in lists[1:]]
    near(*norms)
    for triple in zip(*([p.grad for p in params] for params in lists)):
        near(*triple)
    return before, [p.grad for p in ours]


def near(ours, theirs, exact):
    assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    if ours.numel():
        error, reference = ((t.double() - exact.double()).abs().max().item() for t in (ours, theirs))
        assert error <= 2 * reference + 2 * torch.finfo(ours.dtype).eps * exact.abs().max().item()


def clipped(dtype, device):
    """What every kernel and every form of it is needed for."""
    compare(lambda: parameters(device, dtype), 0.5)
    compare(lambda: parameters(device, dtype, [(9,), (4100,), ()]), 0.5, math.inf)
    before, after = compare(lambda: parameters(device, dtype, [(9,), (4100,), (0,)]), 1e4)
    assert all(torch.equal(a, b) for a, b in zip(before, after)), "what is small enough stays as it was"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(device, dtype):
    clipped(dtype, device)


@pytest.mark.parametrize("norm_type", NORMS)
def test_more_chunks_than_blocks(device, norm_type):
    ours, theirs = (parameters(device, torch.float32, [(9,), (9001,), (4099,), (5,)]) for _ in range(2))
    set_grads([ours, theirs], 0)
    grads = [p.grad for p in ours]
    with kernels(device):
        norm = clip._Known(grads, most_blocks=2).clip(grads, 0.5, norm_type, False)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
    torch.testing.assert_close(grads, [p.grad for p in theirs])


def test_signature_is_torch_s():
    ours, theirs = (inspect.signature(f) for f in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_))
    assert [(p.name, p.default) for p in ours.parameters.values()] == [
        (p.name, p.default) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout):
    compare(
        lambda: parameters(device, torch.float32, [(3, 4, 5, 6), (2, 9, 13, 5)]),
        0.5,
        change=lambda grad, index: LAYOUTS[layout](grad),
    )


@pytest.mark.parametrize("norm_type", [*NORMS, 1.0, 3.0])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_several_dtypes(device, dtypes, norm_type):
    compare(lambda: [p for dtype in dtypes for p in parameters(device, dtype, [(7,), (1031,)])], 0.5, norm_type)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite(device, value, norm_type):
    lists = [parameters(device, torch.float32, [(7,), (70,)]) for _ in range(2)]
    set_grads(lists, 0, lambda grad, index: grad.index_fill(0, torch.tensor([3], device=device), value))
    norms = [f(params, 1.0, norm_type) for f, params in zip((clip_grad_norm_, torch.nn.utils.clip_grad_norm_), lists)]
    torch.testing.assert_close(*norms, equal_nan=True)
    torch.testing.assert_close(*([p.grad for p in params] for params in lists), equal_nan=True)
    set_grads(lists, 0, lambda grad, index: torch.full_like(grad, value))
    for f, params in zip((clip_grad_norm_, torch.nn.utils.clip_grad_norm_), lists):
        before = [p.grad.clone() for p in params]
        with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
            f(params, 1.0, norm_type, error_if_nonfinite=True)
        torch.testing.assert_close([p.grad for p in params], before, equal_nan=True)


def test_what_has_no_gradient(device):
    p = nn.Parameter(torch.ones(3, device=device))
    assert clip_grad_norm_([p], 1.0) == 0 and clip_grad_norm_([], 1.0) == 0
    p.grad = torch.full_like(p, 2.0)
    assert clip_grad_norm_(p, 3.0) == torch.tensor(12.0).sqrt()
    assert clip_grad_norm_((q for q in [p, nn.Parameter(torch.ones(2))]), 3.0) <= 3.001
    q = nn.Parameter(torch.ones(0, device=device))
    q.grad = torch.ones_like(q)
    with pytest.raises(RuntimeError, match="infinity norm on an empty tensor"):
        clip_grad_norm_([p, q], 1.0, math.inf)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((q for q in []), 1.0)


def test_autograd_notices_the_change(device):
    p = nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones_like(p)
    before = p.grad._version
    clip_grad_norm_(p, 0.1)
    assert p.grad._version > before


def test_foreach_is_pytorch_s(device):
    p = nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones_like(p)
    with cupyops.trace() as trace:
        clip_grad_norm_(p, 0.1, foreach=False)
    assert trace.routes() == {"reference"}


LATER = {
    "elsewhere": (False, lambda grad, index: grad.clone()),
    "fewer": (True, lambda grad, index: grad if index else None),
    "transposed": (True, lambda grad, index: grad.t().contiguous().t() if grad.dim() == 2 else grad),
    "another dtype": (True, lambda grad, index: grad.bfloat16()),
    "every other": (True, lambda grad, index: grad.repeat_interleave(2, dim=-1)[..., ::2]),
}


@pytest.mark.parametrize("kind", LATER)
def test_later_gradients(device, kind):
    """Those that are like the last ones are not looked at one by one; what differs is noticed."""
    anew, change = LATER[kind]
    lists = [parameters(device, torch.float32, [(3, 5), (7,), (1031,)]) for _ in range(2)]
    clip._known.clear()
    with kernels(device):
        for step in range(4):
            if kind == "another dtype" and step == 2:
                lists = [[nn.Parameter(p.detach().bfloat16()) for p in params] for params in lists]
            set_grads(lists, step, change if step > 1 else lambda grad, index: grad)
            norms = [f(p, 0.5) for f, p in zip((clip_grad_norm_, torch.nn.utils.clip_grad_norm_), lists)]
            torch.testing.assert_close(*norms)
            torch.testing.assert_close(*([p.grad for p in params] for params in lists))
            if step == 0:
                known = list(clip._known.values())
            if step < 2 or not anew:
                assert list(clip._known.values()) == known  # the very objects
    assert (list(clip._known.values()) != known) == (anew and kind != "every other")  # which PyTorch has to serve


def test_a_later_gradient_with_a_negative_bit(device):
    """It is left to PyTorch, which refuses it."""
    params = parameters(device, torch.float32, [(3, 5), (7,)])
    with kernels(device):
        for step in range(2):
            set_grads([params], step)
            clip_grad_norm_(params, 0.5)
        params[0].grad = torch.complex(params[0].grad, -params[0].grad).conj().imag
        with pytest.raises(RuntimeError, match="negation"):
            clip_grad_norm_(params, 0.5)


def test_no_gradient_is_kept_alive(device):
    params = parameters(device, torch.float32, [(3, 5), (7,)])
    set_grads([params], 0)
    with kernels(device):
        clip_grad_norm_(params, 0.5)
    grads = [weakref.ref(p.grad) for p in params]
    for p in params:
        p.grad = None
    assert not any(grad() is not None for grad in grads)


def test_what_is_known_is_bounded(device):
    clip._known.clear()
    with kernels(device):
        lists = [parameters(device, torch.float32, [(3,)]) for _ in range(clip._MOST_KNOWN + 1)]
        set_grads(lists, 0)
        for params in lists:
            clip_grad_norm_(params, 0.5)
    assert len(clip._known) == 1


@pytest.mark.gpu
def test_launches():
    lists = parameters("cuda", torch.float32, [(3, 5)] * 100)
    set_grads([lists], 0)
    with cupyops.trace() as trace:
        clip_grad_norm_(lists, 0.1)
    names = [record.kernel.partition("<")[0] for record in trace.launches()]
    assert names == [clip.grad_norm_partials.base, clip.grad_norm_finalize.base, clip.grad_norm_clip.base]


@pytest.mark.gpu
def test_in_a_graph():
    lists = [parameters("cuda", torch.float32) for _ in range(2)]
    set_grads(lists, 0)
    clip_grad_norm_(lists[0], 0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = clip_grad_norm_(lists[0], 0.5)
    for step in range(2):
        for p, q in zip(*lists):
            p.grad.copy_(q.grad.mul_(step + 1))
        graph.replay()
        torch.testing.assert_close(total, torch.nn.utils.clip_grad_norm_(lists[1], 0.5))
        torch.testing.assert_close(*([p.grad for p in params] for params in lists))


def test_in_a_whole_graph():
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]

    def step(x):
        for weight in weights:
            weight.grad = weight.detach() * x
        return cupyops.nn.utils.clip_grad_norm_(weights, 1.0)

    try:
        norm = torch.compile(step, backend="aot_eager", fullgraph=True)(torch.tensor(3.0))
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(norm, torch.tensor(45.0).sqrt())
    torch.testing.assert_close(weights[1].grad, torch.full((2,), 3 / 45.0**0.5))
