"""Functions through `torch.compile(backend="cupyops")`: what kernels give in the simulator, beside eager and float64."""

import functools

import torch
from torch._functorch.aot_autograd import aot_function

import cupyops
from cupyops._compile import runner
from cupyops._compile.backend import backend, partition, programs
from cupyops._compile.compiler import Compiler
from cupyops._compile.decompositions import decompositions
from cupyops._compile.options import Options

runner.MOST_KEPT = 1 << 30  # tests take those that were made since they began


def compiled(function, **options):
    """The function, compiled by this backend, with nothing kept from before."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **({"dynamic": False, "fullgraph": True} | options))


def traced(function):
    """The function of tensors, compiled by this backend from AOTAutograd on: Dynamo, which takes most of the time, aside.

    The runners of its graphs are appended to its attribute `runners`.
    """
    runners = []

    def compiler(graph, inputs, kind):
        one = Compiler(Options())
        runners.append(one.runner(graph, kind))
        return one.run(runners[-1])

    fast = aot_function(
        function,
        fw_compiler=functools.partial(compiler, kind="forward"),
        bw_compiler=functools.partial(compiler, kind="backward"),
        inference_compiler=functools.partial(compiler, kind="inference"),
        partition_fn=partition,
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )
    fast.runners = runners
    return fast


def copied(arguments, dtype=None):
    """Tensors of their own, with the strides and the wish for a gradient of those given; floating ones in `dtype`."""

    def copy(one):
        if not isinstance(one, torch.Tensor):
            return one
        to = dtype if dtype is not None and one.is_floating_point() else one.dtype
        return one.detach().to(to, copy=True).requires_grad_(one.requires_grad)

    return [copy(one) for one in arguments]


def listed(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def run(function, arguments, grads):
    """Results, gradients and arguments afterwards."""
    results = listed(function(*arguments))
    wanted = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [g.to(one.dtype) for g, one in zip(grads, wanted)])
    given = [one for one in arguments if isinstance(one, torch.Tensor)]
    named = [(f"result {k}", one) for k, one in enumerate(results)]
    named += [(f"gradient {k}", one.grad) for k, one in enumerate(given) if one.requires_grad]
    named += [(f"argument {k} afterwards", one.detach()) for k, one in enumerate(given)]
    return named


def assert_as_eager(function, arguments, arch="sm_90", factor=4.0, eps=8.0, dynamo=True, bits=False, **options):
    """Results, gradients and changed arguments of the compiled function are as near to float64 as eager's.

    `factor` times eager's own error and `eps` roundings of the dtype are allowed; strides and dtypes are eager's. `bits`:
    each number is eager's, the sign of a zero included. `dynamo`: trace as torch.compile does, else from AOTAutograd on.
    Returns the programs that were made.
    """
    torch.manual_seed(0)
    shapes = [one for one in listed(function(*copied(arguments))) if isinstance(one, torch.Tensor)]
    grads = [torch.randn_like(one) for one in shapes if one.requires_grad]
    eager = run(function, copied(arguments), grads)
    exact = eager if bits else run(function, copied(arguments, torch.float64), grads)
    programs.clear()
    fast = compiled(function, **options) if dynamo else traced(function)
    with cupyops.simulate(arch):
        found = run(fast, copied(arguments), grads)
    for (name, want), (_, got), (_, true) in zip(eager, found, exact, strict=True):
        if not isinstance(want, torch.Tensor):
            assert want == got, name
            continue
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        if name.startswith("result") and want.numel():
            assert got.stride() == want.stride(), f"{name}: strides {got.stride()}, expected {want.stride()}"
        if bits or not want.is_floating_point():
            assert_equal(got, want, name)
        else:
            assert_near(got, want, true, name, factor, eps)
    made = list(programs)
    assert made, "no program was made"
    return made


def assert_equal(got, want, name):
    """Equal numbers: NaN is NaN, and -0 is not 0."""
    if not want.is_floating_point():
        assert torch.equal(got, want), f"{name}: {got}, expected {want}"
        return
    same = (got == want) & (got.signbit() == want.signbit()) | got.isnan() & want.isnan()
    assert same.all(), f"{name}: {got[~same][:8].tolist()}, expected {want[~same][:8].tolist()}"


def assert_near(got, want, true, name, factor, eps):
    """As near to `true` as `want` is."""
    finite = want.isfinite()
    assert torch.equal(got[~finite].nan_to_num(1.5), want[~finite].nan_to_num(1.5)), f"{name}: inf or nan"
    true = true.double()
    scale = true[finite].abs().max().item() if finite.any() else 0.0
    error = (got.double() - true)[finite].abs().max().item() if finite.any() else 0.0
    own = (want.double() - true)[finite].abs().max().item() if finite.any() else 0.0
    allowed = factor * own + eps * torch.finfo(want.dtype).eps * scale
    assert error <= allowed, f"{name}: error {error:.2e}, eager's {own:.2e}, allowed {allowed:.2e}"
