import contextlib
import functools

import gemms
import loss_parts
import pytest
import torch
from contract import Make, OperatorContract, Sample, assert_as_good_as_torch
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.loss import linear as MODULE
from cupyops.testing import assume_gpu


def both(
    input,
    weight,
    target,
    bias=None,
    class_weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    scratch=None,
):
    """PyTorch's linear, and cross_entropy of float32 as Hugging Face has it."""
    logits = F.linear(input.reshape(-1, input.shape[-1]), weight, bias)
    logits = logits.float() if logits.dtype.itemsize == 2 else logits
    class_weight = None if class_weight is None else class_weight.detach().to(logits.dtype)
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    y = F.cross_entropy(logits, target.reshape(-1), class_weight, **options)
    return y.reshape(target.shape) if reduction == "none" else y


class TestFusedLinearCrossEntropy(OperatorContract):
    function = staticmethod(cupyops.fused_linear_cross_entropy)
    torch_function = staticmethod(both)
    kernels = {
        "linear_cross_entropy_two_pass", "linear_cross_entropy_weights", "linear_cross_entropy_sum",
        "linear_cross_entropy_bias", "linear_cross_entropy_scale",
    }  # fmt: skip

    differs = {
        (hazard, backend): reason
        for backend in ("simulator", "gpu")
        for hazard, reason in {
            "autocast": "in a half type a gradient is rounded before it is multiplied by grad_y, and then once more",
            "inputs_unchanged": "what forward made is scaled in place and returned, once: see test_second_backward",
        }.items()
    }

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(19, 33), make(101, 33), make.integers(19, high=101), make(101), ignore_index=7)
        yield Sample(make(3, 8), make(1031, 8), make.integers(3, high=1031), label_smoothing=0.2, reduction="sum")

    def small_samples(self, make: Make):
        yield Sample(make(4, 5), make(7, 5), make.integers(4, high=7), make(7))
        options = {"class_weight": make(11, low=0.1).detach(), "label_smoothing": 0.3}
        yield Sample(make(6, 3), make(11, 3), make.integers(6, high=11), reduction="none", **options)
        yield Sample(make(2, 3, 9), make(6, 9), make.integers(2, 3, high=6), make(6), **options_of(make, 6))
        yield Sample(make(5), make(3, 5), make.integers(high=3))


def options_of(make, classes):
    return {"class_weight": make(classes, low=0.1).detach(), "reduction": "sum", "ignore_index": 2}


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def make_call(dtype, device="cpu", rows=19, size=7, classes=37):
    torch.manual_seed(0)
    x, w, b = (
        torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((rows, size), (classes, size), classes)
    )
    target = torch.randint(classes, (rows,), device=device)
    target[3] = -100
    return x, w, target, b


def results(function, call, grad=None, **options):
    """Loss and gradients."""
    x, w, target, b = (t.detach().clone().requires_grad_(t.is_floating_point()) for t in call)
    y = function(x, w, target, b, **options)
    leaves = [x, w, b]
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y) if grad is None else grad.to(y.dtype))]


def compare(call, grad=None, **options):
    truth = [t.double() if t.is_floating_point() else t for t in call]
    ours, theirs = (results(f, call, grad, **options) for f in (cupyops.fused_linear_cross_entropy, both))
    for what, *values in zip("yxwb", ours, theirs, results(both, truth, grad, **options)):
        half = what == "y" and call[0].dtype.itemsize == 2
        assert_as_good_as_torch(*values, what, values[-1] + rounding(truth, call[0].dtype, options) if half else None)


def rounding(truth, dtype, options):
    """What a loss may be off since a product in a half type rounds the logits, and each product sums in its own order.

    A row's loss is off by half a last place of its largest logit at most; the mean of rows, by four deviations of theirs.
    """
    x, w, _, b = truth
    most = torch.finfo(dtype).eps / 2 * F.linear(x, w, b).abs().max()
    return most if options.get("reduction") == "none" else 4 * most / (3 * len(x)) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [200, 500, 700, 1200, 4000])
def test_parts(dtype, size):
    """Several chunks of rows and tiles of classes: every gradient as exact as PyTorch's one product."""
    call = make_call(dtype)
    with cupyops.simulate(), assume_gpu(scratch=size):
        compare(call, torch.tensor(0.75))
        compare(call, torch.linspace(-1, 1, 19), reduction="none", label_smoothing=0.1)


def test_scratch():
    """What is asked for in the place of what any operator may use: the same parts."""
    call = make_call(torch.bfloat16)
    with cupyops.simulate():
        with assume_gpu(scratch=500):
            expected = results(cupyops.fused_linear_cross_entropy, call)
        found = results(functools.partial(cupyops.fused_linear_cross_entropy, scratch=500), call)
    assert all(map(torch.equal, expected, found))
    for wrong in (0, -1, 2.0, True, "1"):
        with pytest.raises(cupyops.InputError, match="scratch is .* expected an int of at least 1"):
            cupyops.fused_linear_cross_entropy(*call[:3], scratch=wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_on_a_gpu(dtype):
    with assume_gpu(scratch=1 << 20):
        compare(make_call(dtype, "cuda", 700, 264, 5003))


@pytest.mark.parametrize(("size", "rows"), [(200, 19), (300, 24)])
def test_logits_are_the_same_the_second_time(size, rows, monkeypatch):
    """What is computed twice is so by the same product: of the same operands, in places alike."""
    affine, tile, second, calls = MODULE._affine, MODULE.Work.tile, [], {False: [], True: []}

    def of_tile(self, *which):
        second.append(True)
        tile(self, *which)
        second.pop()

    def noted(x, weight, bias, out):
        affine(x, weight, bias, out)
        operands = [
            x.data_ptr(), weight.data_ptr(), out.data_ptr() % 64, *(t.stride() for t in (x, weight, out)), out.shape,
        ]  # fmt: skip
        if out.stride(0) < 40:  # in a tile
            calls[bool(second)].append((operands, out.clone()))

    monkeypatch.setattr(MODULE.Work, "tile", of_tile)
    monkeypatch.setattr(MODULE, "_affine", noted)
    with cupyops.simulate(), assume_gpu(scratch=size):
        results(cupyops.fused_linear_cross_entropy, make_call(torch.bfloat16, rows=rows))
    by_place = [sorted(calls[again], key=lambda call: str(call[0])) for again in (False, True)]
    assert len(by_place[0]) > 2 and [c[0] for c in by_place[0]] == [c[0] for c in by_place[1]]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(*by_place))


@pytest.mark.parametrize(
    ("size", "rows", "features", "classes", "kept", "stored", "again"),
    [
        (1 << 20, 40, 24, 37, 0, 0, 0),
        (400, 50, 24, 37, 24, 0, 6),
        (60000, 97, 16, 1500, 16, 5, 0),
        (60000, 110, 8, 1500, 8, 14, 12),
    ],
)
def test_tiles_use_rows_that_were_kept(monkeypatch, size, rows, features, classes, kept, stored, again):
    """What waits in the memory of the weight's gradient makes tiles as good as those of logits that are computed again."""
    monkeypatch.setattr(MODULE, "TILE", 256)
    monkeypatch.setattr(MODULE, "_division", MODULE._division.__wrapped__)
    call = make_call(torch.bfloat16, "cpu", rows, features, classes)
    division = MODULE._division(rows, features, classes, torch.bfloat16, size)
    assert (division.kept, division.stored, division.tiled - division.kept - division.stored) == (kept, stored, again)
    with cupyops.simulate(), assume_gpu(scratch=size), cupyops.trace() as trace:
        compare(call)
    names = {record.kernel.partition("<")[0] for record in trace.launches()}
    assert ({"linear_cross_entropy_keep", "linear_cross_entropy_tile"} <= names) is (division.kept > 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "scratch"), [(4100, 12 << 20), (3900, 12 << 20), (5000, 6 << 20)])
def test_rows_that_were_kept_on_a_gpu(rows, scratch):
    """The same bits each time, also in a CUDA graph; as exact as the rule for all results asks.

    Beside eager's one rounding, the weight's gradient has one more for each chunk that is added, ADDED at most.
    """
    features, classes = 1024, 8003
    torch.manual_seed(0)
    x, weight = torch.randn(rows, features, device="cuda"), torch.randn(classes, features, device="cuda") / 32
    x, weight = (t.bfloat16().requires_grad_() for t in (x, weight))
    target = torch.randint(classes, (rows,), device="cuda")
    division = MODULE._division(rows, features, classes, torch.bfloat16, scratch)
    assert division.kept

    def step(function=cupyops.fused_linear_cross_entropy, tensors=(x, weight)):
        y = function(*tensors, target)
        return [y.detach(), *torch.autograd.grad(y, tensors)]

    with assume_gpu(scratch=scratch):
        found = [step() for _ in range(4)]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for one in captured:
            one.fill_(7)
        graph.replay()
        found.append(captured)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    wide = tuple(t.detach().double().requires_grad_() for t in (x, weight))
    moved = rounding((*wide, target, None), torch.bfloat16, {}).detach()
    for what, ours, theirs, truth in zip("yxw", found[0], step(both), step(both, wide)):
        assert_as_good_as_torch(ours, theirs, truth, what, truth + moved if what == "y" else None)


@pytest.mark.parametrize(("rows", "features", "classes", "dtype"), [
    (8192, 4096, 128256, torch.bfloat16), (4096, 4096, 32000, torch.bfloat16),
    (16384, 2048, 50257, torch.float16), (4096, 4096, 32000, torch.float32), (1, 8, 3, torch.float64),
    (300, 64, 200_000_000, torch.float32),
])  # fmt: skip
def test_division(rows, features, classes, dtype):
    """Parts cover everything, fit, begin at 16 bytes, and none is a small rest."""
    scratch = 240 << 20
    division = MODULE._division(rows, features, classes, dtype, scratch)
    assert division.stride % (16 // dtype.itemsize) == 0 and 0 <= division.stride - classes < 16
    assert division.rows == 1 or division.rows * division.stride * dtype.itemsize <= scratch
    used = division.tiled * division.classes + division.stored * division.stride
    assert used * dtype.itemsize <= scratch
    assert division.kept <= features and division.kept + division.stored <= division.tiled <= rows
    added = -(-(rows - division.tiled) // division.rows)
    assert dtype not in MODULE.HALF or added <= MODULE.ADDED + (division.tiled == 0)
    parts = list(MODULE._parts(3, rows, division.rows)) or [(3, rows)]
    assert [b for b, _ in parts[1:]] == [e for _, e in parts[:-1]] and (parts[0][0], parts[-1][1]) == (3, rows)
    assert max(end - begin for begin, end in parts) <= max(division.rows, rows - 3 if rows < 4 else 0)
    waiting = list(MODULE._waiting(division)) or [(0, 0)]
    assert [b for b, _ in waiting] == [0, *(e for _, e in waiting[:-1])]
    assert waiting[-1][0] <= division.kept and waiting[-1][1] == division.kept + division.stored
    assert max(end - begin for begin, end in waiting) <= max(division.rows, division.stored)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_second_backward(dtype, device):
    """It returns none of the tensors that the first did, whatever has happened to those since."""
    x, w, target, b = (t.detach().to(device).requires_grad_(t.is_floating_point()) for t in make_call(dtype))
    y = cupyops.fused_linear_cross_entropy(x, w, target, b)
    first = torch.autograd.grad(y, (x, w, b), retain_graph=True)
    kept = [one.clone() for one in first]
    for one in first:
        one.fill_(7.0)
    again = torch.autograd.grad(y, (x, w, b), retain_graph=True)
    third = torch.autograd.grad(y, (w,))
    torch.testing.assert_close(list(again), kept)
    torch.testing.assert_close(third[0], kept[1])
    assert not {t.data_ptr() for t in first} & {t.data_ptr() for t in (*again, *third)}


def test_second_backward_in_the_simulator():
    with cupyops.simulate():
        test_second_backward(torch.float16, "cpu")
        test_second_backward(torch.float32, "cpu")


def test_gradients_are_computed_once():
    """A loss whose gradient is 1 costs no more in backward than to look at it; the weight's gradient is not copied."""
    x, w, target, _ = make_call(torch.float32)
    with cupyops.simulate(), cupyops.trace() as trace:
        cupyops.fused_linear_cross_entropy(x, w, target).backward()
        names = [record.kernel.partition("<")[0] for record in trace.launches()]
    assert names.count("linear_cross_entropy_two_pass") == 1 and "linear_cross_entropy_tile" not in names
    with cupyops.simulate(), cupyops.trace() as trace, torch.no_grad():
        cupyops.fused_linear_cross_entropy(x, w, target)
    assert "linear_cross_entropy_scale" not in str(trace)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values(device, value):
    x, w, target, _ = (t.detach().to(device) for t in make_call(torch.float32))
    x[5, 2] = value
    call = x, w, target, torch.zeros(37, device=device)
    for reduction, grad in (("none", torch.ones(19, device=device)), ("mean", None)):
        ours, theirs = (results(f, call, grad, reduction=reduction) for f in (cupyops.fused_linear_cross_entropy, both))
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_special_class_weights(device, value):
    """Smoothed, every class has a part in every loss."""
    x, w, target, b = (t.detach().to(device) for t in make_call(torch.float32))
    weights = torch.rand(37, device=device)
    weights[11] = value
    options = {"class_weight": weights, "label_smoothing": 0.3, "reduction": "none"}
    found = [f(x, w, target, b, **options) for f in (cupyops.fused_linear_cross_entropy, both)]
    torch.testing.assert_close(*found, equal_nan=True)
    logits = F.linear(x, w, b)
    options["weight"] = options.pop("class_weight")
    found = [f(logits, target, **options) for f in (cupyops.cross_entropy, F.cross_entropy)]
    torch.testing.assert_close(*found, equal_nan=True)


def test_special_values_in_the_simulator():
    with cupyops.simulate():
        test_special_class_weights("cpu", -float("inf"))
        test_special_class_weights("cpu", float("inf"))
        test_special_values("cpu", float("inf"))
        test_special_values("cpu", float("nan"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("through", ["reference", "simulator", "registered"])
def test_a_loss_in_float32(dtype, reduction, through):
    """As Liger's and Hugging Face's: in a half type curves would move in steps of 0.03; float64 stays what it is."""
    x, w, target, b = make_call(dtype)
    x = x.detach().mul(4).requires_grad_()
    function = cupyops.fused_linear_cross_entropy
    function = torch.compile(function, backend="aot_eager") if through == "registered" else function
    with cupyops.simulate() if through == "simulator" else contextlib.nullcontext():
        y = function(x, w, target, b, reduction=reduction)
        grads = torch.autograd.grad(y.sum(), (x, w, b))
    assert y.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert [g.dtype for g in grads] == [dtype] * 3
    truth = both(x.double(), w.double(), target, b.double(), reduction=reduction)
    logits = F.linear(x, w, b)  # which are rounded to the half type
    error = torch.finfo(dtype).eps * logits.abs().max().item()
    torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=error * (19 if reduction == "sum" else 1))
    if dtype is torch.bfloat16 and reduction == "sum":
        assert y != y.bfloat16()


def test_autocast(device):
    """linear in the lower dtype, the loss in fp32, the weights of the classes as they are."""
    x, w, target, b = (t.detach().to(device).requires_grad_(t.is_floating_point()) for t in make_call(torch.float32))
    c = torch.rand(37, device=device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        ours, theirs = (f(x, w, target, b, c) for f in (cupyops.fused_linear_cross_entropy, both))
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    grads = [torch.autograd.grad(y, (x, w, b)) for y in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=0.02, atol=1e-3)


def test_autocast_in_the_simulator():
    with cupyops.simulate():
        test_autocast("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_in_parts_on_hopper(dtype):
    """As tests/simulator has them."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    with cupyops.trace() as trace:
        for call in loss_parts.calls(dtype, "cuda"):
            call()
    assert "linear_cross_entropy_wgmma" in str(trace) and "linear_cross_entropy_two_pass" not in str(trace)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("backend", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_special_values_in_parts(value, smoothing, backend):
    """In a row of x, and in the bias of a class that is a target in one row."""
    if backend == "gpu" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    device = torch.device("cuda" if backend == "gpu" else "cpu")
    x, w = torch.randn(19, 16, device=device).half(), torch.randn(300, 16, device=device).half()
    target, b = torch.arange(19, device=device) * 15, torch.zeros(300, device=device).half()
    by_gpu = backend == "gpu"
    for where in ("x", "b"):
        if where == "x":
            x[5, 2] = value
        else:
            x[5, 2], b[270] = 1.0, value
        simulated = contextlib.nullcontext() if by_gpu else cupyops.simulate("sm_90")
        card = assume_gpu() if by_gpu else assume_gpu(**gemms.HOPPER)
        with simulated, card, cupyops.use_form(loss_parts.NAME):
            y = cupyops.fused_linear_cross_entropy(x, w, target, b, reduction="none", label_smoothing=smoothing)
        expected = both(x.float(), w.float(), target, b.float(), reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-3, atol=2e-2)


def test_who_takes_losses_in_parts():
    """Half types on Hopper, without a gradient, from enough work on; not what the kernel has no case for."""
    x, w, target, b = (t.detach() for t in make_call(torch.bfloat16, rows=250, size=64, classes=500))
    one = {"shared": 232448, "multiprocessors": 2}
    for options, given, card, wanted in [
        ({}, (x, w, target, b), one, True),
        ({"label_smoothing": 0.1}, (x, w, target), one, True),
        ({"label_smoothing": 0.1, "class_weight": b.abs()}, (x, w, target), one, False),
        ({}, (x[:, :63], w[:, :63], target), one, False),  # rows that are no whole vectors
        ({}, (x, w, target), {**one, "multiprocessors": 132}, False),
        ({}, (x.float(), w.float(), target), one, False),
        ({}, (x.clone().requires_grad_(), w, target), one, False),
    ]:
        with cupyops.simulate("sm_90"), assume_gpu(**card), cupyops.trace() as trace:
            cupyops.fused_linear_cross_entropy(*given, **options)
        names = {record.kernel.partition("<")[0] for record in trace.launches()}
        assert ("linear_cross_entropy_wgmma" in names) is wanted, (options, names)
    x, w = (torch.randn(n * 64 + 1).bfloat16()[1:].view(n, 64) for n in (250, 500))  # off a boundary: copied
    with torch.no_grad(), cupyops.simulate("sm_90"), assume_gpu(**one), cupyops.trace() as trace:
        y = cupyops.fused_linear_cross_entropy(x, w, target)
    assert "linear_cross_entropy_wgmma" in str(trace)
    torch.testing.assert_close(y, both(x.float(), w.float(), target), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory(dtype):
    """Beside inputs and gradients less than 256 MB, and that of the loss alone no more."""
    rows, size, classes = 8192, 4096, 128256
    x = torch.randn(rows, size, device="cuda", dtype=dtype, requires_grad=True)
    w = (torch.randn(classes, size, device="cuda", dtype=dtype) / 64).requires_grad_()
    target = torch.randint(classes, (rows,), device="cuda")
    cupyops.fused_linear_cross_entropy(x[:8], w[:64], target[:8] % 64).backward()  # cuBLAS has its workspace
    x.grad = w.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cupyops.fused_linear_cross_entropy(x, w, target).backward()
    gradients = (x.numel() + w.numel()) * dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before - gradients < 256e6
    assert torch.cuda.memory_allocated() - before - gradients < 1e6


def test_bad_input():
    x, w, target = torch.ones(4, 3), torch.ones(5, 3), torch.zeros(4, dtype=torch.long)
    call = cupyops.fused_linear_cross_entropy
    wrong = {
        "input": [(torch.ones(4, 3, dtype=torch.long), w, target), (torch.ones(()), w, target[0])],
        "weight": [(x, torch.ones(5, 4), target), (x, w.double(), target), (x, None, target), (x, w[0], target)],
        "target": [(x, w, target.float()), (x, w, target[:3]), (x, w, None), (x, w, target + 9)],
        "bias": [(x, w, target, torch.ones(4)), (x, w, target, 1.0), (x, w, target, torch.ones(5).half())],
        "class_weight": [(x, w, target, None, torch.ones(4)), (x, w, target, None, torch.ones(5, requires_grad=True))],
    }
    for name, calls in wrong.items():
        for args in calls:
            with pytest.raises(cupyops.InputError, match=name):
                call(*args)
    for options in ({"reduction": "max"}, {"label_smoothing": 2}, {"ignore_index": 1.5}):
        with pytest.raises(cupyops.InputError, match=next(iter(options))):
            call(x, w, target, **options)
