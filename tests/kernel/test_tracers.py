"""A launch outside an operator, where PyTorch traces or transforms: refused, since its results would be lost in silence."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import cupyops
from cupyops import Kernel, LaunchError
from cupyops._kernel.launch import fastpath, signature
from cupyops._kernel.launch.configuration import Configuration

ADD = (
    "__global__ void add(const float* x, float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x] + 7; }"
)
add = Kernel(ADD, "add")


class Module(torch.nn.Module):
    """y = x + 7, by a bare launch."""

    def forward(self, x):
        y = torch.zeros_like(x)
        add[1, 32](x, y, 8)
        return y


function = Module()


def fake(x):
    with FakeTensorMode() as mode:
        return function(mode.from_tensor(x))


def dual(x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, x))


TRACERS = {
    "export": lambda x: torch.export.export(function, (x,)),
    "make_fx": make_fx(function),
    "make_fx fake": make_fx(function, tracing_mode="fake"),
    "make_fx symbolic": make_fx(function, tracing_mode="symbolic"),
    "make_fx before autograd": make_fx(function, pre_dispatch=True),
    "jit.trace": lambda x: torch.jit.trace(function, (x,), check_trace=False),
    "symbolic_trace": lambda x: torch.fx.symbolic_trace(function),
    "fake": fake,
    "meta": lambda x: function(x.to("meta")),
    "vmap": lambda x: torch.func.vmap(function)(x.expand(3, 8)),
    "grad": lambda x: torch.func.grad(lambda x: function(x).sum())(x),
    "vjp": lambda x: torch.func.vjp(function, x),
    "jvp": lambda x: torch.func.jvp(function, (x,), (x,)),
    "jacrev": lambda x: torch.func.jacrev(function)(x),
    "hessian": lambda x: torch.func.hessian(lambda x: function(x).sum())(x),
    "dual numbers": dual,
    "linearize": lambda x: torch.func.linearize(function, x),
    "functionalize": lambda x: torch.func.functionalize(function)(x),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("warm", [False, True])
def test_refused(tracer, warm, device):
    with cupyops.simulate():
        x = torch.arange(8.0, device=device)
        for _ in range(2 * warm):
            function(x)
        with pytest.raises(LaunchError, match="make it an operator with cupyops.operator"):
            TRACERS[tracer](x)
        assert torch.equal(function(x), x + 7)


def test_beside_dual_numbers(device):
    """While a level of forward-mode AD is open, tensors without a tangent are tensors like others."""
    with cupyops.simulate(), forward_ad.dual_level():
        x = torch.arange(8.0, device=device)
        assert torch.equal(function(x), x + 7)
        assert torch.equal(function(forward_ad.make_dual(x, x).detach()), x + 7)


@pytest.mark.parametrize("place", [0, 1])
def test_beside_real_tensors(place):
    """Which of the tensors it is that stands for another makes no difference."""
    given = [torch.zeros(8), torch.zeros(8)]
    with cupyops.simulate(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given[place] = mode.from_tensor(given[place])
        with pytest.raises(LaunchError, match="make it an operator"):
            add[1, 32](*given, 8)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    """torch.compile leaves it between two graphs."""
    cold = Kernel(ADD, "add")

    def by(kernel, x):
        y = torch.zeros_like(x)
        kernel[1, 32](x * 2, y, 8)
        return y + 1

    with cupyops.simulate():
        x = torch.arange(8.0)
        assert torch.equal(torch.compile(lambda x: by(cold, x), backend=backend)(x), 2 * x + 8)
        with pytest.raises(Exception, match="make it an operator to have it in a graph"):
            torch.compile(lambda x: by(cold, x), backend=backend, fullgraph=True)(x)


def test_a_mode_that_only_looks(device):
    """It loses nothing, and the kernel runs."""

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with cupyops.simulate():
        x = torch.arange(8.0, device=device)
        function(x)
        with Looking():
            y = function(x)
    assert torch.equal(y, x + 7)


def test_inside_an_operator(device):
    """The same launch as a forward goes through all of them."""

    @cupyops.operator("cupyops_tests::add_seven")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + 7

    @op.forward
    def forward(x):
        y = torch.zeros_like(x)
        add[1, 32](x, y, 8)
        return y, ()

    class Traced(torch.nn.Module):
        def forward(self, x):
            return op(x)

    with cupyops.simulate():
        x = torch.arange(8.0, device=device)
        found = [torch.export.export(Traced(), (x,)).module()(x)]
        found += [make_fx(op, tracing_mode=mode)(x)(x) for mode in ("real", "fake", "symbolic")]
        found += [torch.func.vmap(op)(x.expand(2, 8))[1], torch.jit.trace(op, (x,))(x)]
        assert op(x.to("meta")).is_meta
    assert all(torch.equal(one, x + 7) for one in found)


def test_a_launch_in_a_whole_graph_says_what_to_do():
    """Under fullgraph=True, also where the kernel has been launched before; elsewhere the graph is broken there."""
    kernel = cupyops.Kernel("__global__ void twice(float* x) { x[threadIdx.x] *= 2; }", "twice")

    def step(x):
        y = x + 1
        kernel[1, 3](y)
        return y + 1

    x = torch.ones(3)
    with cupyops.simulate():
        for _ in range(2):
            torch._dynamo.reset()
            with pytest.raises(torch._dynamo.exc.Unsupported, match="make it an operator to have it in a graph"):
                torch.compile(step, backend="eager", fullgraph=True)(x)
            assert torch.compile(step, backend="eager")(x).tolist() == [5.0, 5.0, 5.0]
    torch._dynamo.reset()


def test_the_fast_launch_in_a_whole_graph():
    """What is generated for a GPU is not traced either, where it had been up to a function of PyTorch's that cannot be."""
    arguments = [signature.Argument("x", "float*", "pointer", 8, 8, torch.float32)]
    launched = []
    launch = fastpath.configure(arguments, ["T"], 0, {}, lambda *args: launched.append(args))(
        Configuration.of(1, 32), lambda *args: None
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="make it an operator to have it in a graph"):
        torch.compile(lambda x: launch(x, T=torch.float32), backend="eager", fullgraph=True)(torch.ones(3))
    torch.compile(lambda x: launch(x, T=torch.float32), backend="eager")(torch.ones(3))
    assert len(launched) == 1
    torch._dynamo.reset()
