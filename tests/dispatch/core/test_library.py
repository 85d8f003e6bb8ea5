"""PyTorch's own function is taken where no kernel is measured as fast, and not where kernels alone are asked for."""

import pytest
import torch
import torch.nn.functional as F

import cupyops
from cupyops._dispatch.core import library
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._util import observed
from cupyops.ops import _linear

HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}


def leaves(*shapes, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def both_ways(function, inputs):
    y = function(*inputs)
    return y, *torch.autograd.grad(y, inputs, torch.ones_like(y))


@pytest.mark.parametrize(
    "ours, theirs, shapes",
    [
        (cupyops.linear, F.linear, [(5, 7, 300), (260, 300), (260,)]),
        (cupyops.linear, F.linear, [(35, 300), (260, 300)]),
        (cupyops.matmul, torch.matmul, [(3, 40, 300), (3, 300, 260)]),
        (cupyops.matmul, torch.matmul, [(40, 300), (300,)]),
    ],
)
def test_forward_and_backward_by_pytorch_inside_an_operator(ours, theirs, shapes):
    """In the place of the products that it would launch, each for itself."""
    inputs = leaves(*shapes, dtype=torch.float64)
    with cupyops.simulate("sm_90"), assume_gpu(**HOPPER), cupyops.trace() as trace:
        found = both_ways(ours, inputs)
    torch.testing.assert_close(found, both_ways(theirs, inputs))
    ran = {record.kernel.partition("<")[0]: record.route for record in trace.launches()}
    sums = ran.pop("sum_fwd_fold", None)  # of the bias's gradient, which our kernel adds faster
    assert (sums is not None) is (len(shapes) == 3 and ours is cupyops.linear)
    assert ran.keys() <= {"torch.mm", "torch.addmm", "torch.matmul"} and set(ran.values()) == {"kernel"}


def test_kernels_alone_are_simulated():
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        cupyops.linear(*leaves((5, 7), (6, 7)))
    assert {record.kernel.partition("<")[0] for record in trace.launches()} == {"gemm_fwd"}


def test_the_choice_is_of_the_process_and_ends(monkeypatch):
    """The tests run with it off; a card of its own would have it on."""
    from cupyops._dispatch.core import gpu as module

    card = gpu(torch.device("cpu")).__class__(9, 132, 232448, 233472, 2048, 50 << 20, library=True)
    monkeypatch.setattr(module, "_card", lambda device: card)
    device = torch.device("cuda", 0)
    assert not gpu(device).library
    with cupyops.never_slower():
        assert gpu(device).library
        with cupyops.never_slower(False):
            assert not gpu(device).library
        assert gpu(device).library
    assert not gpu(device).library


def test_plans_do_not_outlive_the_choice():
    x = torch.randn(4, 64)
    with cupyops.simulate():
        for _ in range(6):
            cupyops.softmax(x, -1)
        from cupyops._operator.derivation.public import plans_of

        assert plans_of(cupyops.softmax).plans
        with cupyops.never_slower(False):
            assert not plans_of(cupyops.softmax).plans


@pytest.mark.gpu
def test_on_a_gpu():
    """The operator's own function where its forward is PyTorch's, a product of its backward otherwise."""
    x, weight, bias = leaves((64, 512), (256, 512), (256,), dtype=torch.float64, device="cuda")
    with cupyops.never_slower(), cupyops.trace() as trace:
        found = both_ways(cupyops.linear, [x, weight, bias])
    torch.testing.assert_close(found, both_ways(F.linear, [x, weight, bias]))
    assert trace.routes() == {"reference"} and "PyTorch's own function is faster" in trace.records[0].note
    small = leaves((64, 3136), (128, 3136), device="cuda")
    with cupyops.never_slower(), cupyops.trace() as trace:
        cupyops.linear(*small)
    assert trace.launches()[0].kernel.startswith("gemm_fwd<")
    if torch.cuda.get_device_capability()[0] == 9:
        large = leaves((16384, 768), (2304, 768), dtype=torch.bfloat16, device="cuda")
        with cupyops.never_slower(), cupyops.trace() as trace:
            found = both_ways(cupyops.linear, large)
        kernels = [record.kernel.partition("<")[0] for record in trace.launches()]
        assert kernels == ["gemm_wgmma", "torch.mm", "torch.mm"]  # three waves of tiles; few tiles and much k
        for a, b in zip(found, both_ways(F.linear, large)):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@pytest.mark.gpu
def test_of_the_host_too():
    """What is changed in place with a gradient, and convolutions of half types, are PyTorch's without a detour."""
    x = torch.randn(8, device="cuda", requires_grad=True)
    with cupyops.never_slower(), cupyops.trace() as trace:
        y = cupyops.relu(x * 1, inplace=True)
    assert [record.kernel for record in trace.launches()] == ["torch.relu_"] and "Relu" in y.grad_fn.name()
    layer, images = cupyops.nn.Conv2d(3, 4, 3).cuda().half(), torch.randn(1, 3, 5, 5, device="cuda").half()
    with cupyops.never_slower():
        assert "Conv" in layer(images).grad_fn.name()
        with cupyops.trace() as trace:
            layer(images)
    assert trace.routes() == {"reference"}


@pytest.mark.gpu
def test_transposed_rows_take_no_detour(monkeypatch):
    """Rows that `linear` would copy, as of an image's pixels: after a few calls nothing but PyTorch's function runs."""
    x = torch.randn(4, 64, 32, device="cuda").transpose(1, 2)
    weight, bias = leaves((64, 64), (64,), device="cuda")
    routes, route = [], _linear._linear._route
    monkeypatch.setattr(_linear._linear, "_route", lambda args: (routes.append(args), route(args))[1])
    with cupyops.never_slower(), torch.autocast("cuda", torch.bfloat16):
        for _ in range(6):
            routes.clear()
            y = cupyops.linear(x.bfloat16(), weight, bias)
        assert torch.equal(y, F.linear(x.bfloat16(), weight, bias)) and not routes


def test_what_was_measured():
    problem = _linear.problem((4096, 4096), (4096, 1), False, (4096, 4096), (4096, 1), True, False, torch.float32)
    with assume_gpu(**HOPPER):
        form = _linear.PRODUCT.choose(problem, gpu(torch.device("cpu")))
        assert isinstance(form, library.ByPyTorch) and form.name == "pytorch"
        for dtype, name in ((torch.bfloat16, "wgmma_128x256"), (torch.float64, "pytorch")):
            assert _linear.PRODUCT.choose(problem._replace(dtype=dtype), gpu(torch.device("cpu"))).name == name
        assert _linear.PRODUCT.choose(problem._replace(m=8, n=8), gpu(torch.device("cpu"))).name.startswith("fma")
        with assume_gpu(capability=8):
            assert (
                _linear.PRODUCT.choose(problem._replace(dtype=torch.float16), gpu(torch.device("cpu"))).name
                == "pytorch"
            )


def test_no_detour_where_pytorch_is_faster():
    """After a few calls alike PyTorch's function is all that runs: casts of autocast, modes and hooks are its own matter."""

    def unsupported(x):
        return observed.Faster("PyTorch's own function is faster here") if x.shape[0] > 4 else "another reason"

    calls = []

    def twin(input):
        calls.append(input)
        return torch.tanh(input)

    @cupyops.operator("cupyops_tests::faster_elsewhere")
    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    reference.forward(lambda x: (_ for _ in ()).throw(AssertionError("a kernel of ours is launched")))
    reference.unsupported(unsupported)

    @reference.interface(twin=twin)
    def public(input: torch.Tensor) -> torch.Tensor:
        return reference(input)

    with cupyops.simulate():
        for rows, direct in ((5, True), (3, False)):
            calls.clear()
            x = torch.randn(rows, requires_grad=True)
            for _ in range(6):
                (grad,) = torch.autograd.grad(public(x).sum(), x)
                torch.testing.assert_close(grad, 1 - torch.tanh(x).detach() ** 2)
            assert bool(calls) is direct
            with cupyops.trace() as trace:
                public(x)
            assert trace.routes() == {"reference"}
        other = torch.randn(5, dtype=torch.float64, requires_grad=True)  # another signature has its own decision
        calls.clear()
        public(other)
        assert not calls


NEAR = {"rtol": 2e-2, "atol": 5e-2}  # farther off is another function, or another argument


@pytest.mark.gpu
@pytest.mark.parametrize(
    "ours, theirs, shapes",
    [
        (lambda x: cupyops.gelu(x), F.gelu, [(64, 300)]),
        (lambda x: cupyops.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), [(64, 300)]),
        (lambda x: cupyops.silu(x), F.silu, [(64, 300)]),
        (lambda x, w, b: cupyops.linear(x, w, b), F.linear, [(64, 300), (40, 300), (40,)]),
        (lambda a, b: cupyops.matmul(a, b), torch.matmul, [(64, 300), (300, 40)]),
        (
            lambda x, w: cupyops.conv2d(x, w, None, 2),
            lambda x, w: F.conv2d(x, w, None, 2),
            [(2, 8, 16, 16), (8, 8, 3, 3)],
        ),
        (
            lambda q, k, v: cupyops.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.2),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.2),
            [(2, 3, 64, 32)] * 3,
        ),
        (lambda x: cupyops.softmax(x, -1), lambda x: F.softmax(x, -1), [(64, 300)]),
        (lambda x: cupyops.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2), [(2, 8, 16, 16)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_call_settles_on_is_the_same_function(ours, theirs, shapes, dtype):
    """Calls after the first ones may go to PyTorch's function itself, with the arguments as they were given."""
    with cupyops.never_slower():
        for grad in (False, True):
            inputs = [one.detach().requires_grad_(grad) for one in leaves(*shapes, dtype=dtype, device="cuda")]
            for _ in range(5):
                torch.testing.assert_close(ours(*inputs), theirs(*inputs), **NEAR)
