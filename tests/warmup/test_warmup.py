"""`cupyops.warmup`: which instances it makes ready, where, and that nothing is compiled after it."""

from __future__ import annotations

import weakref

import pytest
import torch
import toys
from torch import Tensor

import cupyops
from cupyops import CompileError, InputError, LaunchError
from cupyops._kernel.compile import compiler
from cupyops._warmup import reachable
from cupyops._warmup.reachable import kernels_of

CODE = """
template <typename T, int N> __global__ void shift(const T* x, T* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + T(N);
}
"""
FLOAT, DOUBLE = torch.float32, torch.float64
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def shift(**domain):
    return cupyops.Kernel(CODE, "shift<T, N>", **domain)


DECLARED = shift(T=(FLOAT, DOUBLE), N=(1, 2))
TABLE = {"shift": (DECLARED,)}


def through_a_table(x):
    return TABLE["shift"][0]


def through_another(x):
    return [through_a_table(each) for each in x]


@pytest.fixture
def compiled(monkeypatch):
    """The names that are compiled or looked for; nothing is."""
    names = []

    def build(source, name, arch, options=()):
        names.append((name, arch))

    monkeypatch.setattr(compiler, "build", build)
    return names


def ready(*what, **options):
    """The names of what would be made ready, in the simulator."""
    with cupyops.simulate("sm_90"):
        return cupyops.warmup(*what, **options).kernels


@pytest.mark.parametrize(
    ("restriction", "expected"),
    [
        ({}, ["float, 1", "float, 2", "double, 1", "double, 2"]),
        ({"T": FLOAT}, ["float, 1", "float, 2"]),
        ({"N": (2,)}, ["float, 2", "double, 2"]),
        ({"T": DOUBLE, "N": 1}, ["double, 1"]),
        ({"dtypes": DOUBLE}, ["double, 1", "double, 2"]),
        ({"dtypes": [torch.float16, FLOAT], "N": 1}, ["float, 1"]),
    ],
)
def test_declared_instances_and_parts_of_them(restriction, expected, compiled):
    assert ready(DECLARED, **restriction) == tuple(f"shift<{each}>" for each in expected)
    assert compiled == [(f"shift<{each}>", "sm_90") for each in expected]


def test_combinations_that_there_are_not_are_left_out(compiled):
    some = shift(T=(FLOAT, DOUBLE), N=(1, 2), where=lambda T, N: (T == FLOAT) == (N == 1))
    assert ready(some) == ("shift<float, 1>", "shift<double, 2>")


def test_values_that_are_not_declared_are_given(compiled):
    assert ready(shift(N=(1, 2)), T=(torch.int32, FLOAT), N=2) == ("shift<int, 2>", "shift<float, 2>")


def test_dtypes_are_of_floating_point_parameters_alone(compiled):
    assert ready(shift(T=(torch.int32, FLOAT, DOUBLE), N=(1,)), dtypes=DOUBLE) == ("shift<int, 1>", "shift<double, 1>")


def test_each_kernel_is_taken_once(compiled):
    assert len(ready(DECLARED, DECLARED, through_a_table)) == 4


def test_every_built_in_operator_leads_to_all_its_kernels():
    """Those that its module makes. It may lead to those of another operator besides, as softmax's does not."""
    modules = {}
    for name, op in cupyops.operators().items():
        if name.startswith("cupyops::"):
            modules.setdefault(op.reference.__globals__["__name__"], []).append(op)
    assert len(modules) > 10
    for module, ops in modules.items():
        made = {id(value): value for value in vars(__import__(module, fromlist=["_"])).values()}
        made = {key: value for key, value in made.items() if isinstance(value, cupyops.Kernel)}
        found = {id(one) for op in ops for one in kernels_of(op.public)}
        assert found and made.keys() <= found, [value for key, value in made.items() if key not in found]


def test_it_leads_to_no_other_operators_kernels():
    assert {one.base for one in kernels_of(cupyops.silu)} == {"silu_fwd", "silu_bwd"}
    assert {one.base for one in kernels_of(cupyops.rope)} == {"rope_even", "rope_rows", "rope_staged", "rope_heads"}
    assert all(one.base.startswith("max_pool2d_") for one in kernels_of(cupyops.max_pool2d))
    for name, count in (("batch_norm", 15), ("group_norm", 17)):  # some of which are attributes of classes of forms
        bases = {one.base for one in kernels_of(getattr(cupyops, name))}
        assert len(bases) == count and all(base.startswith(name) for base in bases)


def test_through_functions_tables_closures_and_methods():
    inside = shift(T=(FLOAT,), N=(1,))

    class Layer:
        def __init__(self):
            self.kernel = inside

        def forward(self, x):
            return self.kernel[1, 32](x)

    class Shared:
        kernel = inside

        def forward(self, x):
            return self.kernel[1, 32](x)

    assert kernels_of(through_another) == [DECLARED]
    assert kernels_of(lambda x: inside[1, 32](x)) == [inside]
    assert kernels_of(Layer().forward) == kernels_of(Shared().forward) == [inside]


def test_what_the_simulator_keeps_is_not_searched(monkeypatch):
    """It has the text of every kernel that it has run, which took seconds to look through, and names none."""
    looked, step = [], reachable._mentioned
    monkeypatch.setattr(reachable, "_mentioned", lambda value: looked.append(type(value)) or step(value))
    with cupyops.simulate():
        for op in (cupyops.relu, cupyops.softmax, cupyops.layer_norm):
            x = torch.randn(3, 5, requires_grad=True)
            (op(x, (5,)) if op is cupyops.layer_norm else op(x, 1) if op is cupyops.softmax else op(x)).sum().backward()
        assert {one.base for one in kernels_of(cupyops.relu)} == {"relu_fwd", "relu_bwd"}
    assert not [kind for kind in looked if kind.__module__.startswith("cupyops.simulator")] and len(looked) < 5_000


def test_of_a_model_and_its_optimizer():
    model = torch.nn.Sequential(torch.nn.Sequential(cupyops.nn.Linear(3, 4), cupyops.nn.ReLU()), torch.nn.Linear(4, 2))
    bases = {one.base for one in kernels_of(model)}
    assert bases == {one.base for op in (cupyops.linear, cupyops.relu) for one in kernels_of(op)}
    step = cupyops.optim.SGD(model.parameters(), lr=0.1)
    found = {one.base for one in kernels_of(step)}
    clipping = {"grad_norm_partials", "grad_norm_finalize", "grad_norm_clip"}  # if something has been clipped before
    assert {"sgd_step"} <= found <= {"sgd_step"} | clipping and found == {one.base for one in kernels_of(step.step)}
    with pytest.raises(InputError, match="mentions no kernel"):
        kernels_of(torch.nn.Linear(3, 4))


def test_nothing_is_compiled_after_it(monkeypatch):
    with cupyops.simulate():
        assert set(cupyops.warmup(cupyops.relu, dtypes=FLOAT).kernels) == {"relu_fwd<float>", "relu_bwd<float>"}
        monkeypatch.setattr(compiler, "compile", None)
        monkeypatch.setattr(compiler, "_find", None)
        x = torch.randn(5, requires_grad=True)
        cupyops.relu(x).sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_calls_are_made_when_all_is_ready(compiled):
    seen = []
    with cupyops.simulate():
        cupyops.warmup(DECLARED, calls=[lambda: seen.append(len(compiled)), lambda: seen.append("second")])
    assert seen == [4, "second"]


@NO_GPU
def test_without_a_gpu_nothing_is_done(compiled):
    done = cupyops.warmup(DECLARED, cupyops.relu, calls=[lambda: compiled.append("called")])
    assert (done.device, done.kernels, compiled) == (torch.device("cpu"), (), [])
    assert str(done) == "nothing to load: there is no CUDA GPU, and the references need no kernel"


def test_it_says_what_it_did(compiled):
    with cupyops.simulate():
        assert str(cupyops.warmup(DECLARED)).startswith("4 kernels are ready on cpu, after 0.")


def unaware(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: cupyops.warmup(), "was given nothing"),
        (lambda: cupyops.warmup(DECLARED, calls=print), "expected a list of functions"),
        (lambda: cupyops.warmup(DECLARED, calls=[3]), "calls is [3], expected a list of functions"),
        (lambda: cupyops.warmup(unaware), "unaware mentions no kernel"),
        (lambda: cupyops.warmup(torch.relu), "relu mentions no kernel"),
        (lambda: cupyops.warmup(3), "3 mentions no kernel"),
        (lambda: cupyops.warmup(DECLARED, K=3), "no kernel has a template parameter K; there is N, T"),
        (lambda: cupyops.warmup(DECLARED, N=7), "no instance is left"),
        (lambda: cupyops.warmup(DECLARED, dtypes=torch.float16), "no instance is left"),
        (lambda: cupyops.warmup(DECLARED, T="a b"), "T is 'a b'"),
        (lambda: cupyops.warmup(DECLARED, dtypes="float32"), "dtypes has 'f'"),
        (
            lambda: cupyops.warmup(DECLARED, dtypes=torch.int32),
            "dtypes has torch.int32, expected one of torch.float16",
        ),
        (lambda: cupyops.warmup(shift(N=(1,))), "no values declared for T; give T=... to warmup()"),
        (lambda: cupyops.warmup(DECLARED, device="cuda:99"), "device is 'cuda:99', expected the CPU or one of"),
        (lambda: cupyops.warmup(DECLARED, device="meta"), "device is 'meta'"),
        (lambda: cupyops.warmup(DECLARED, device="nowhere"), "device is 'nowhere'"),
    ],
)
def test_what_it_refuses(call, said):
    with pytest.raises(InputError) as error:
        call()
    assert said in str(error.value)


def test_a_kernel_that_does_not_compile(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path))
    broken = cupyops.Kernel("__global__ void broken(float* x) { x[0] = nothing; }", "broken")
    with pytest.raises(CompileError, match="nothing"):
        ready(broken)


def test_an_operator_without_kernels():
    op, _ = toys.product()
    with pytest.raises(InputError, match="mentions no kernel"):
        kernels_of(op)
    toys.forget(op)


def test_kernels_are_not_kept_alive():
    made = shift(T=(FLOAT,), N=(1,))
    seen = weakref.ref(made)
    assert len(kernels_of(made)) == 1
    del made
    assert seen() is None


@pytest.mark.gpu
def test_a_graph_captures_what_was_never_launched():
    fresh = shift(T=(FLOAT,), N=(21,))
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    done = cupyops.warmup(fresh, calls=[lambda: y.add_(x)])
    assert done.kernels == ("shift<float, 21>",) and done.device.type == "cuda"
    (instance,) = fresh._specialised.values()
    assert list(instance.loaded) == [done.device.index]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh[1, 32](x, y, 3, T=FLOAT, N=21)
    graph.replay()
    assert y.tolist() == [22.0] * 3


@pytest.mark.gpu
def test_during_a_capture_it_refuses():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            with pytest.raises(LaunchError, match="before the capture"):
                cupyops.warmup(DECLARED)
        finally:
            graph.capture_end()
