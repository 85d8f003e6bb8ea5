"""cupyops.linear_epilogue: the contract, both routes against PyTorch, captured tensors however they lie, what is refused."""

import copy
import importlib
from contextlib import ExitStack

import gemms
import pytest
import torch
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.core.gpu import Gpu, assume_gpu
from cupyops._dispatch.gemm import epilogues, linear
from cupyops._expression.slopes import slopes
from cupyops._expression.syntax import Body

layers = importlib.import_module("cupyops._expression.linear_epilogue")  # the function has the name too

# By name: the signature after it, the text, the same in PyTorch, and the shapes of what is captured, by rows and columns.
EPILOGUES = {
    "quick_gelu": (
        "(T z, T r) -> T y",
        "y = z * sigmoid(1.702 * z) + r",
        lambda z, r: z * torch.sigmoid(1.702 * z) + r,
        [lambda rows, n: (*rows, n)],
    ),
    "softplus": (
        "(T z, float beta = 2.0) -> T y",
        "float s = beta * z; if (s > 20) y = z; else y = log1p(exp(s)) / beta;",
        lambda z: F.softplus(z, 2.0),
        [],
    ),
    "softcap": ("(T z) -> T y", "y = 3 * tanh(z / 3)", lambda z: 3 * torch.tanh(z / 3), []),
    "scaled": (
        "(T z, T column, T row, T number, T r) -> T y",
        "y = column * z; y += row; y = number * tanh(y) + r;",
        lambda z, column, row, number, r: torch.tanh(z * column + row) * number + r,
        [lambda rows, n: (*rows, 1), lambda rows, n: (n,), lambda rows, n: (), lambda rows, n: (*rows, n)],
    ),
}
OPERATORS = {
    name: cupyops.linear_epilogue(f"{name}{signature}", text) for name, (signature, text, *_) in EPILOGUES.items()
}


def by_torch(name):
    epilogue = EPILOGUES[name][2]
    return lambda x, weight, bias, *captured: epilogue(F.linear(x, weight, bias), *captured)


def made(name, shape, n, dtype, device="cpu"):
    """The arguments for x of that shape, near 1; they require gradients."""
    torch.manual_seed(0)
    *rows, k = shape
    shapes = [shape, (n, k), (n,), *(of(rows, n) for of in EPILOGUES[name][3])]
    found = [torch.randn(one, device=device, dtype=torch.float64) for one in shapes]
    found[1] *= k**-0.5
    return [one.to(dtype).requires_grad_() for one in found]


def compare(op, theirs, inputs):
    """Forward and gradients beside PyTorch's in float64."""
    exact = [one if one is None else one.detach().double().requires_grad_() for one in inputs]
    truth = theirs(*exact)
    grad = torch.randn_like(truth).to(inputs[0].dtype)
    given = [one for one in inputs if one is not None]
    y = op(*inputs)
    with torch.no_grad():
        assert torch.equal(op(*inputs), y)  # with nothing kept for backward
    found = [y, *torch.autograd.grad(y, given, grad)]
    right = [truth, *torch.autograd.grad(truth, [one for one in exact if one is not None], grad.double())]
    for index, (ours, wanted) in enumerate(zip(found, right)):
        worst, unit = (ours.double() - wanted).abs().max(), gemms.UNITS[y.dtype] * torch.finfo(y.dtype).eps
        # of a captured tensor the errors of so many terms near 1 add up as a random walk does
        size = max(wanted.abs().max(), (y.numel() / wanted.numel()) ** 0.5 if index > 3 else 0)
        assert ours.shape == wanted.shape and worst <= unit * size, (index, worst)


@pytest.mark.slow
def test_the_contract():
    op = cupyops.linear_epilogue(f"waves{EPILOGUES['scaled'][0]}", "y = column * z; y += row; y = number * sin(y) + r;")
    report = cupyops.testing.check(
        op,
        made("scaled", (2, 3, 7), 6, torch.float32),
        reference=lambda x, weight, bias, column, row, number, r: (
            torch.sin(F.linear(x, weight, bias) * column + row) * number + r
        ),
        backends=("reference", "simulator"),
        shrink=False,
    )
    report.raise_if_failed()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", EPILOGUES)
def test_a_product_and_a_kernel_after_it(name, dtype, device):
    with cupyops.simulate() if device.type == "cpu" else cupyops.never_slower(False), cupyops.trace() as trace:
        for shape, n in (((5, 33), 7), ((2, 3, 16), 24), ((40,), 6)):
            compare(OPERATORS[name], by_torch(name), made(name, shape, n, dtype, device))
    wide = dtype == torch.float64  # whose derivative kernels do not derive
    kernels = {launch.kernel.partition("<")[0] for launch in trace.launches()}
    assert wide or {f"{name}_fwd", f"{name}_bwd"} <= kernels, kernels
    assert ("reference" in trace.routes()) == wide


def on_hopper(stack, device):
    """The fused kernel, whatever the size."""
    stack.enter_context(cupyops.use_form(f"linear_epilogue:{epilogues.COMPUTED.name}"))
    if device == "cpu":
        stack.enter_context(cupyops.simulate("sm_90"))
    stack.enter_context(assume_gpu(**gemms.HOPPER) if device == "cpu" else assume_gpu())
    return stack.enter_context(cupyops.trace())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("backend", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_fused_on_hopper(name, dtype, backend):
    """A tile with tails, few rows of a batch, odd columns, which TMA does not store; of some several tiles each way."""
    device = "cuda" if backend == "gpu" else "cpu"
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    with ExitStack() as stack:
        trace = on_hopper(stack, device)
        large = (name, dtype) in (("quick_gelu", torch.float16), ("scaled", torch.bfloat16))
        for shape, n in (((280, 136), 296) if large else ((40, 72), 264), ((2, 3, 64), 45), ((1, 64), 2)):
            compare(OPERATORS[name], by_torch(name), made(name, shape, n, dtype, device))
    first = [launch.kernel.partition("<")[0] for launch in trace.launches()]
    assert first.count(f"{name}_wgmma") == 6 and f"{name}_fwd" not in first


def lying(m, n):
    """(tensor, how the kernel takes it: None for one that it does not)."""
    yield "contiguous", torch.randn(m, n), (True, "Pairs")
    yield "transposed", torch.randn(n, m).T, (True, "Anyhow")
    yield "sliced", torch.randn(m, n + 2)[:, :n], (True, "Pairs")
    yield "odd rows", torch.randn(m, n + 1)[:, :n], (True, "Anyhow")
    yield "off a pair", torch.randn(m * n + 1)[1:].view(m, n), (True, "Anyhow")
    yield "row", torch.randn(n), (False, "Pairs")
    yield "every second", torch.randn(2 * n)[::2], (False, "Anyhow")
    yield "column", torch.randn(m, 1), (True, "Same")
    yield "number", torch.randn(1, 1), (False, "Same")
    yield "of a batch", torch.randn(2, m // 2, n)[:1].clone(), None


@pytest.mark.parametrize("which", [name for name, *_ in lying(2, 2)])
def test_however_a_captured_tensor_lies(which, monkeypatch):
    m, n = 44, 258
    r, lies = next((one, lies) for name, one, lies in lying(m, n) if name == which)
    x, weight, bias, _ = (t.detach() for t in made("quick_gelu", (2, m // 2, 64), n, torch.float16))
    made_for = []
    plain = cupyops._expression.linear_text.fused
    monkeypatch.setattr(
        "cupyops._expression.linear_text.fused", lambda *args: made_for.append(args[-1]) or plain(*args)
    )
    op = cupyops.linear_epilogue("quick_gelu_of(T z, T r) -> T y", EPILOGUES["quick_gelu"][1])
    lead = () if r.dim() < 2 or which == "of a batch" else (2, -1) if r.shape[0] == m else (1,)
    r = r if not lead else r.unflatten(0, lead) if lead[0] == 2 else r.unsqueeze(0)
    with ExitStack() as stack:
        on_hopper(stack, "cpu")
        half = torch.empty_strided(r.shape, r.stride(), dtype=torch.float16) if which != "off a pair" else None
        r = (
            torch.empty(r.numel() + 1, dtype=torch.float16)[1:].view(r.shape).copy_(r)
            if half is None
            else half.copy_(r)
        )
        y = op(x, weight, bias, r)
    wanted = by_torch("quick_gelu")(*(t.double() for t in (x, weight, bias, r)))
    assert (y.double() - wanted).abs().max() <= 2 * torch.finfo(y.dtype).eps * wanted.abs().max()
    assert made_for == ([[lies]] if lies else [])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_captured_integers(dtype):
    op = cupyops.linear_epilogue(
        f"masked(T z, {str(dtype)[6:]}[] kept, float scale = 2.0, bool on = true) -> T y",
        "y = on && kept != 0 ? z * scale : 0",
    )
    x, weight, bias = (t.detach().requires_grad_() for t in made("softcap", (44, 64), 258, torch.bfloat16))
    kept = torch.randint(0, 2, (44, 258)).to(dtype)
    with ExitStack() as stack:
        on_hopper(stack, "cpu")
        compare(
            lambda x, w, b: op(x, w, b, kept), lambda x, w, b: torch.where(kept != 0, F.linear(x, w, b) * 2, 0.0),
            [x, weight, bias],
        )  # fmt: skip


def test_what_is_kept_for_backward():
    """What the product gave, where a gradient is wanted that reads it."""
    given = cupyops.linear_epilogue("with_r(T z, T r) -> T y", "y = 2 * z + r", "grad_z = 2 * grad_y; grad_r = grad_y")
    derived = cupyops.linear_epilogue("sum_with_r(T z, T r) -> T y", "y = 2 * z + r")
    x, weight, r = torch.randn(3, 5), torch.randn(4, 5), torch.randn(3, 4)
    quick_gelu = OPERATORS["quick_gelu"]
    for op, wanted, size in [(given, x, 0), (derived, x, 0), (quick_gelu, x, 12), (quick_gelu, None, 0)]:
        x.requires_grad_(wanted is not None)
        kept = []
        with (
            cupyops.simulate(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        ):
            y = op(x, weight, None, r)
            found = [] if wanted is None else torch.autograd.grad(y.sum(), x)
        if wanted is not None:
            exact = 2 * F.linear(x, weight) + r if op is not quick_gelu else by_torch("quick_gelu")(x, weight, None, r)
            torch.testing.assert_close(found, torch.autograd.grad(exact.sum(), x))
        known = {t.data_ptr() for t in (x, weight, r, y)}
        assert sum(t.numel() for t in kept if t.data_ptr() not in known) == size


@pytest.mark.parametrize(
    "text, options",
    [
        ("int whole = (int)z; y = z * whole", {}),
        ("double wide = z; y = wide * wide", {}),
        (
            "y = twice(z)",
            {"preamble": "__device__ float twice(float x) { return 2 * x; }", "reference": lambda z: 2 * z},
        ),
    ],
)
def test_what_kernels_do_not_derive_the_reference_does(text, options):
    op = cupyops.linear_epilogue("underived(T z) -> T y", text, dtypes=torch.float32, **options)
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5)
    z = F.linear(x, weight)
    wanted = 2 * z if options else z * z.detach().trunc() if "int" in text else z * z
    with cupyops.simulate(), cupyops.trace() as trace:
        y = op(x, weight)
        (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.sum(), x)[0])
    assert "underived_fwd" in {launch.kernel.partition("<")[0] for launch in trace.launches()}


def test_the_product_is_pytorch_s_where_it_may_be():
    card = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}
    inputs = made("scaled", (40, 136), 24, torch.bfloat16)
    with cupyops.simulate("sm_90"), assume_gpu(**card), cupyops.trace() as trace:
        compare(OPERATORS["scaled"], by_torch("scaled"), inputs)
    assert [launch.kernel.partition("<")[0] for launch in trace.launches()][:2] == ["torch.addmm", "scaled_fwd"]


@pytest.mark.parametrize(
    ("sizes", "fused"),
    [
        ((4096, 4096, 4096), True),
        ((16384, 768, 3072), True),
        ((25216, 3072, 768), True),
        ((8192, 8192, 2048), True),
        ((16384, 768, 768), False),  # little work
        ((2048, 11008, 4096), False),  # a part of the last wave
        ((8191, 4095, 4088), False),  # rows that TMA does not store
    ],
)
def test_the_sizes_that_were_measured(sizes, fused):
    m, n, k = sizes
    card = Gpu(9, 132, 232448, 233472, 2048, 50 << 20, library=True)
    problem = linear.problem((m, k), (k, 1), False, (n, k), (k, 1), True, False, torch.bfloat16)
    assert (epilogues.LINEAR_EPILOGUE.choose(problem, card) is epilogues.COMPUTED) == fused


def test_fused_where_it_was_measured(monkeypatch):
    """Epilogues of few instructions, with one matrix beside the product, or with several and much of k."""
    monkeypatch.setattr(epilogues.COMPUTED, "why_slower", lambda problem, gpu: None)
    monkeypatch.setattr(epilogues.library, "is_wanted", lambda tensor: True)  # as of tensors on a GPU
    card = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}
    two = cupyops.linear_epilogue("two(T z, T r, T s) -> T y", "y = z * r + s")
    x, weight, bias, r = (one.detach() for one in made("quick_gelu", (2, 72), 72, torch.float16))
    cases = [
        (OPERATORS["quick_gelu"], (r,), 80, "quick_gelu_wgmma"),
        (OPERATORS["softcap"], (), 80, "softcap_wgmma"),
        (OPERATORS["softplus"], (), 72, "softplus_fwd"),
        (two, (r, r), 80, "two_fwd"),
        (two, (r, r), 72, "two_wgmma"),
        (two, (r, r[0]), 80, "two_fwd"),  # more registers than one matrix takes
        (two, (r[0], r[0]), 80, "two_wgmma"),  # no matrix
    ]
    epilogues.LINEAR_EPILOGUE._chosen.cache_clear(), epilogues.LINEAR_EPILOGUE._launches.cache_clear()
    for op, captured, much, kernel in cases:
        monkeypatch.setattr(layers, "MUCH", much)
        with cupyops.simulate("sm_90"), assume_gpu(**card), cupyops.trace() as trace:
            op(x, weight, bias, *captured)
        assert trace.launches()[-1].kernel.partition("<")[0] == kernel
    epilogues.LINEAR_EPILOGUE._chosen.cache_clear(), epilogues.LINEAR_EPILOGUE._launches.cache_clear()


def test_autocast_casts_what_is_multiplied():
    """A captured tensor that is wider keeps its dtype, and the result has it: as PyTorch's."""
    x, weight, bias, r = made("quick_gelu", (3, 8), 4, torch.float32)
    op, theirs = OPERATORS["quick_gelu"], by_torch("quick_gelu")
    with cupyops.simulate(), torch.autocast("cpu", torch.bfloat16):
        for residual in (r, r.bfloat16()):
            ours, wanted = op(x, weight, bias, residual), theirs(x, weight, bias, residual)
            assert ours.dtype == wanted.dtype
            torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=2e-2)
        (grad,) = torch.autograd.grad(op(x, weight, bias, r.bfloat16()).sum(), weight)
        assert grad.dtype == torch.float32


@pytest.mark.parametrize("shapes", [((2, 0), (4, 0)), ((0, 5), (4, 5)), ((2, 5), (0, 5))])
def test_empty(shapes):
    x, weight = (torch.randn(shape, requires_grad=True) for shape in shapes)
    bias, r = torch.randn(weight.shape[0]), torch.randn(x.shape[0], weight.shape[0])
    with cupyops.simulate():
        found = [OPERATORS["quick_gelu"](x, weight, bias, r)]
        found += torch.autograd.grad(found[0].sum(), (x, weight))
    wanted = [by_torch("quick_gelu")(x, weight, bias, r)]
    wanted += torch.autograd.grad(wanted[0].sum(), (x, weight))
    torch.testing.assert_close(found, wanted)


def test_in_a_module():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.epilogue = torch.nn.Linear(5, 4), OPERATORS["softcap"]

        def forward(self, x):
            return self.epilogue(x, self.linear.weight, self.linear.bias)

    layer, x = Layer(), torch.randn(3, 5)
    y = layer(x)
    torch.testing.assert_close(copy.deepcopy(layer)(x), y)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)


@pytest.mark.parametrize(
    "signature, text, words",
    [
        ("f(T z, T r) -> T y", "y = z + q", "'q' is neither a parameter nor declared"),
        ("f(T z) -> T y", "y = z **", "f.epilogue"),
        ("f(T z) -> T y", "x = z", "f.epilogue"),
        ("f(T z) -> T y, T w", "y = z; w = z", "one output of type T"),
        ("f(T z) -> bool y", "y = z > 0", "one output of type T"),
        ("f(bool[] m, T z) -> T y", "y = z", "the product first"),
        ("f(T z, T bias) -> T y", "y = z", "'bias' is what the layer takes"),
    ],
)
def test_bad_definitions(signature, text, words):
    with pytest.raises(cupyops.InputError, match=words):
        cupyops.linear_epilogue(signature, text)


def test_bad_input(device):
    op = OPERATORS["quick_gelu"]
    x, weight, bias, r = (t.detach() for t in made("quick_gelu", (2, 3), 4, torch.float32, device))
    for args, words in [
        ((x, weight[0], None, r), "weight is .*out_features, in_features"),
        ((x, weight.T.contiguous(), bias, r), r"weight has shape \(3, 4\), expected in_features 3"),
        ((x, weight, bias, x), r"r is .*broadcasts to \(2, 4\), that of the result"),
        ((x, weight, bias, r.expand(1, 2, 4)), r"r is .*broadcasts to \(2, 4\)"),
        ((x, weight, bias, r.double()), "r is torch.float64"),
        ((x, weight, bias, 1.0), "r is 1.0"),
        ((x, weight, bias.half(), r), "bias is torch.float16"),
        ((x.long(), weight.long(), None, r), "input is .*torch.int64"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            op(*args)
    with pytest.raises(cupyops.InputError, match="beta is 'two'"):
        OPERATORS["softplus"](x, weight, bias, beta="two")


@pytest.mark.parametrize(
    "text, reads, ones",
    [
        ("y = z + r", {"z": "", "r": ""}, "zr"),
        ("y = z * s + r", {"z": "s", "s": "z", "r": ""}, "r"),
        ("y = -z - (r - s) / 3", {"z": "", "r": "", "s": ""}, ""),
        ("y = z + z * s", {"z": "s", "s": "z"}, ""),
        ("y = z + tanh(r) + s", {"z": "", "r": "r", "s": ""}, "zs"),
        ("y = (z - s) / r", {"z": "zsr", "s": "zsr", "r": "zsr"}, ""),
        ("y = z > 0 ? z : r", {"z": "zr", "r": "zr"}, ""),
        ("y = z; y += r", {"z": "zr", "r": "zr"}, ""),
    ],
)
def test_what_a_derivative_reads(text, reads, ones):
    found = slopes(Body("f.epilogue", text), "y", ["z", "r", "s"])
    assert found.reads == {name: frozenset(names) for name, names in reads.items()} and found.ones == frozenset(ones)


@pytest.mark.parametrize("text", ["y = z + r", "y = z * s + r", "y = r - z * s", "y = z + s"])
def test_gradients_of_sums_and_products(text):
    """What is 1 is not computed, and a captured tensor that was broadcast has the sum."""
    op = cupyops.linear_epilogue("summed(T z, T r, T s) -> T y", text)
    shapes = {"x": (2, 3, 5), "w": (4, 5), "r": (3, 4), "s": (2, 1, 1)}
    inputs = [torch.randn(shape, requires_grad=name in "xw" + text) for name, shape in shapes.items()]
    wanted = [one for one in inputs if one.requires_grad]
    with cupyops.simulate(), cupyops.trace() as trace:
        y = op(inputs[0], inputs[1], None, *inputs[2:])
        found = torch.autograd.grad(y.square().sum(), wanted)
    z, _, r, s = F.linear(*inputs[:2]), None, *inputs[2:]
    exact = {"y = z + r": z + r, "y = z * s + r": z * s + r, "y = r - z * s": r - z * s, "y = z + s": z + s}[text]
    torch.testing.assert_close(y, exact)
    right = torch.autograd.grad(exact.square().sum(), wanted)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    kernels = {launch.kernel.partition("<")[0] for launch in trace.launches()}
    assert ("summed_bwd" in kernels) == ("*" in text)
