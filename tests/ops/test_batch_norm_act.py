import pytest
import torch
from contract import Make, OperatorContract, Sample, assert_as_good_as_torch
from normalisations import batch_norm_act as by_torch
from selection import slow

import cupyops
from cupyops._dispatch.batch_norm import act as forms
from cupyops._dispatch.batch_norm.problem import HALF_AND_FLOAT, Problem
from cupyops._dispatch.core.gpu import gpu
from cupyops.testing import assume_gpu

NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")
H200 = {"multiprocessors": 132, "shared": 232448, "shared_total": 233472, "threads": 2048, "l2": 50 << 20}


def running(make: Make, channels: int):
    return make(channels).detach(), make(channels, low=0.5, high=2).detach()


class TestBatchNormAct(OperatorContract):
    """In training without running statistics, which a call changes: those are below. All runs are whole vectors."""

    function = staticmethod(cupyops.batch_norm_act)
    torch_function = staticmethod(by_torch)
    kernels = {
        "batch_norm_act_fwd_nchw_cluster", "batch_norm_act_fwd_nchw", "batch_norm_act_bwd_nchw_cluster",
        "batch_norm_act_bwd_nchw_partials", "batch_norm_act_bwd_nchw", "batch_norm_act_fwd_nhwc",
        "batch_norm_act_fwd_nhwc_cluster", "batch_norm_act_bwd_nhwc_partials", "batch_norm_act_bwd_nhwc",
        "batch_norm_act_bwd_nhwc_inline", "batch_norm_act_bwd_nhwc_cluster",
    }  # fmt: skip
    dtypes = [*HALF_AND_FLOAT]
    too_large = "2^31 vectors of a channel"
    differs = {
        (
            "special_values",
            "simulator",
        ): "an infinite weight: PyTorch on a CPU makes NaN, of inf - inf; on a GPU it does not",
        ("output_strides", "gpu"): "of (n, c) transposed the output is contiguous, as PyTorch's on a CPU",
    }

    def samples(self, make: Make):
        width = 16 // make.dtype.itemsize
        yield from self.small_samples(make)
        for residual in (False, True):  # planes in a cluster, small planes by columns, inline, matrices
            for shape in ((5, 2, 90 * width), (17, 8, 3), (16, 8, 33), (90, 8)):
                yield _sample(make, shape, residual)
        yield _sample(make, (3, 1, 2900 * width), True)  # several blocks, in two passes
        yield _sample(make, (1030, 64), True)  # rows beyond a cluster's
        yield _sample(make, (6, 8), True, training=False)
        yield _sample(make, (3, 2, 2, width), False, training=False)

    def small_samples(self, make: Make):
        width = 16 // make.dtype.itemsize
        yield _sample(make, (4, 3, 2, width), True)
        yield _sample(make, (6, width), False)
        yield _sample(make, (3, 2, width), True, training=False)
        yield _sample(make, (5, 2, 2 * width), True, activation=None)

    def layouts(self, make: Make):
        for one in super().layouts(make):
            # of (n, c) transposed PyTorch's output is contiguous on a CPU, as ours always, and not on a GPU
            if make.device.type == "cpu" or one.args[0].dim() > 2 or one.args[0].is_contiguous():
                yield one
        for training in (True, False):
            one = _sample(make, (2, 8, 4, 5), True, training=training)
            yield one.map(lambda t: _channels_last(t) if t.dim() == 4 else t)


def _sample(make, shape, residual, training=True, activation="relu"):
    parameters = (None, None) if training else running(make, shape[1])
    more = {} if activation else {"activation": None}
    if residual:
        more["residual"] = make(*shape)
    return Sample(make(*shape), *parameters, make(shape[1]), make(shape[1]), training, **more)


def _channels_last(tensor):
    return tensor.detach().to(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


SHAPES = [
    ((4, 3, 4, 8), False),
    ((2, 2, 2504), False),
    ((17, 8, 3), False),
    ((18, 8, 33), False),
    ((11, 8), False),
    ((70, 16), False),
    ((3, 8, 5, 7), True),
]  # for the forms of the kernels, all whole vectors


def everything(function, x, grad_y, mean, var, weight, bias, residual, training=True):
    """y, the gradients, and the running statistics afterwards."""
    mean, var = mean.clone(), var.clone()
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, residual) if t is not None]
    y = function(
        leaves[0], mean, var, *leaves[1:3], training, 0.3, residual=leaves[3] if residual is not None else None
    )
    grads = torch.autograd.grad(y, leaves, grad_y.to(y.dtype))
    return {
        "y": y,
        **dict(zip(("grad_x", "grad_weight", "grad_bias", "grad_residual"), grads)),
        "mean": mean,
        "var": var,
    }


def tensors(shape, last, dtype, parameters=None, device="cpu", residual=True):
    made = [torch.randn(shape).to(device, dtype) for _ in range(3)]
    x, grad_y, added = (t.to(memory_format=torch.channels_last) if last else t for t in made)
    weight, bias, mean = (torch.randn(shape[1]).to(device, parameters or dtype) for _ in range(3))
    return x, grad_y, mean, torch.rand(shape[1]).to(mean) + 0.5, weight, bias, added if residual else None


def compare(args, training, what=""):
    """y beside PyTorch's; gradients beside those of the elements that are above 0 in ours.

    Which elements these are is a matter of the last bit of some: a gradient is there or not, and says nothing of rounding.
    """
    ours = everything(cupyops.batch_norm_act, *args, training=training)

    def where_positive(*args, residual, **options):
        return torch.where(ours["y"] > 0, by_torch(*args, residual=residual, activation=None, **options), 0)

    wide = [None if t is None else t.double() for t in args]
    for function, names in ((by_torch, ("y", "mean", "var")), (where_positive, [n for n in ours if "grad" in n])):
        theirs, truth = (everything(function, *given, training=training) for given in (args, wide))
        for name in names:
            assert ours[name].dtype == theirs[name].dtype, name
            # on a GPU PyTorch's gradient of inference is contiguous whatever x is
            assert ours[name].stride() == theirs[name].stride() or ours[name].is_cuda, name
            assert_as_good_as_torch(ours[name], theirs[name], truth[name], f"{name} {what}")


def computing(of, one):
    """The forms of a list that compute a problem with kernels of their own."""
    with cupyops.simulate("sm_90"):
        fit = [form for form in one.list if form.why_not(of, gpu(CPU)) is None and not isinstance(form, forms.Apart)]
    return [form.name for form in fit]


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize(("shape", "last"), SHAPES, ids=str)
def test_every_form(shape, last, dtype, training, residual):
    args = tensors(shape, last, dtype, residual=residual)
    lists = (forms.FORWARD, forms.BACKWARD) if training else (forms.INFERENCE,)
    of = forms.problem_of(args[0])
    asked = [f"batch_norm_act.{one.direction}:{name}" for one in lists for name in computing(of, one)]
    assert len(asked) >= len(lists)
    for name in asked:
        with cupyops.simulate("sm_90"), cupyops.use_form(name), cupyops.trace() as trace:
            compare(args, training, f"by {name}")
        assert trace.routes() == {"simulator"} and "batch_norm_act" in str(trace.launches()), str(trace)


def test_every_form_is_reached():
    lists = (forms.FORWARD, forms.BACKWARD, forms.INFERENCE)
    made = [forms.problem_of(tensors(shape, last, torch.float32)[0]) for shape, last in SHAPES]
    found = {(one.direction, name) for one in lists for of in made for name in computing(of, one)}
    kernels = {(one.direction, form.name) for one in lists for form in one.list if not isinstance(form, forms.Apart)}
    assert found == kernels


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16)], ids=str)
def test_float_parameters_beside_a_half_type(dtype, training):
    """As under autocast."""
    for shape, last in SHAPES[::3]:
        with cupyops.simulate():
            compare(tensors(shape, last, dtype, torch.float32), training)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(
    ("shape", "last", "dtype"),
    [((4, 3, 5, 7), False, torch.float32), ((3, 5, 2, 3), True, torch.float16), ((3, 4, 4, 8), False, torch.float64)],
)
def test_what_is_not_whole_vectors(shape, last, dtype, training):
    """PyTorch's functions."""
    with cupyops.simulate(), cupyops.trace() as trace:
        compare(tensors(shape, last, dtype), training)
    assert trace.routes() == {"reference"}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_off_16_bytes(training):
    """A tensor that begins elsewhere is copied; the others, and the gradients, are as ever."""
    for place in (0, 1, 6):
        args = list(tensors((4, 3, 4, 8), False, torch.float16))
        base = torch.empty(args[place].numel() + 1, dtype=torch.float16)
        args[place] = base[1:].view(4, 3, 4, 8).copy_(args[place])
        with cupyops.simulate():
            compare(args, training)


def test_residual_of_another_layout():
    args = list(tensors((3, 8, 4, 5), True, torch.float32))
    args[6] = args[6].contiguous()
    with cupyops.simulate():
        ours, theirs = (everything(f, *args) for f in (cupyops.batch_norm_act, by_torch))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("wanted", range(4), ids=["x", "weight", "bias", "residual"])
def test_one_gradient_alone(wanted, training):
    """And of what else is kept for it: a bit for each element."""
    x, grad_y, mean, var, *more = tensors((4, 8, 4, 8), False, torch.float16, torch.float32)
    found, kept = [], []
    for function in (cupyops.batch_norm_act, by_torch):
        leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((x, *more))]
        with cupyops.simulate(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = function(leaves[0], mean.clone(), var.clone(), *leaves[1:3], training, residual=leaves[3])
            found.append(torch.autograd.grad(y, leaves[wanted], torch.where(y > 0.01, grad_y, 0))[0].float())
        if function is cupyops.batch_norm_act:
            bits = [t for t in kept if t.dtype is torch.uint8]
            rest = {t.data_ptr() for t in kept if t.numel() == x.numel()} - {leaves[0].data_ptr()}
            assert [t.numel() for t in bits] == [x.numel() // 8] and not rest
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_nothing_is_kept_without_a_gradient():
    x, _, mean, var, weight, bias, residual = tensors((4, 8, 4, 8), False, torch.float32)
    launched = []
    with cupyops.simulate(), cupyops.trace() as trace, torch.no_grad():
        cupyops.batch_norm_act(x.requires_grad_(), mean, var, weight, bias, True, residual=residual)
        launched = trace.launches()
    assert len(launched) == 1


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_second_derivatives(training, last):
    """Through relu's slope, which the mask knows."""
    args = tensors((4, 8, 3, 4), last, torch.float32)
    results = []
    for function in (cupyops.batch_norm_act, by_torch):
        leaves = [t.clone().requires_grad_() for t in (args[0], *args[4:])]
        with cupyops.simulate():
            y = function(leaves[0], args[2].clone(), args[3].clone(), *leaves[1:3], training, residual=leaves[3])
            first = torch.autograd.grad((y * args[1]).square().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        results.append((*first, *second))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_second_derivative_of_the_residual_alone(training):
    """Of which x, and how it lies, are not kept."""
    x, grad_y, mean, var, weight, bias, residual = tensors((3, 8, 3, 5), True, torch.float32)
    results = []
    for function in (cupyops.batch_norm_act, by_torch):
        leaf = residual.clone().requires_grad_()
        with cupyops.simulate():
            y = function(x, mean.clone(), var.clone(), weight, bias, training, residual=leaf)
            (first,) = torch.autograd.grad((y * grad_y).square().sum(), leaf, create_graph=True)
            results.append((first, *torch.autograd.grad(first.square().sum(), leaf)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_special_values(training):
    """NaN stays NaN in y, and passes the gradient; -0, what rounds to 0 and infinities are as PyTorch's relu has them."""
    x, grad_y, mean, var, weight, bias, _ = tensors((4, 3, 4, 8), False, torch.float16)
    residual = torch.randn(4, 3, 4, 8).half()
    residual.view(-1)[:6] = torch.tensor([NAN, INF, -INF, 1e-7, -65504, 65504])
    if not training:
        x.view(-1)[9:11] = torch.tensor([NAN, -INF])
    with cupyops.simulate():
        ours = everything(cupyops.batch_norm_act, x, grad_y, mean, var, weight, bias, residual, training=training)
    theirs = everything(by_torch, x, grad_y, mean, var, weight, bias, residual, training=training)
    for name in ("y", "grad_residual"):
        assert torch.equal(ours[name].isnan(), theirs[name].isnan()), name
        assert torch.equal(ours[name].isinf(), theirs[name].isinf()), name
    passes = ours["grad_residual"] != 0
    assert torch.equal(passes, ~(ours["y"] <= 0) & (grad_y != 0))


@pytest.mark.parametrize("simulated", [False, True])
def test_compiled(simulated):
    """With a gradient; the statistics are updated once, in whole vectors and in others."""
    for shape in ((4, 8, 3, 4), (4, 3, 3, 5)):
        x, _, mean, var, weight, bias, residual = tensors(shape, False, torch.float32)

        def run(function):
            leaves = [t.clone().requires_grad_() for t in (x, weight, bias, residual)]
            moved = mean.clone(), var.clone()
            y = function(leaves[0], *moved, *leaves[1:3], True, residual=leaves[3])
            return (y, *torch.autograd.grad(y.square().sum(), leaves), *moved)

        with cupyops.simulate() if simulated else torch.enable_grad():
            compiled = torch.compile(cupyops.batch_norm_act, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(run(compiled), run(by_torch))


def test_transforms_of_functions():
    x, _, mean, var, weight, bias, residual = tensors((3, 4, 2, 4), False, torch.float32)
    for training in (True, False):
        call = lambda f, x, r, training=training: f(
            x, *(None, None) if training else (mean, var), weight, bias, training, residual=r
        )
        batch = torch.stack([x, x + 1]), torch.stack([residual, -residual])
        for transform in (torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(lambda *a: f(*a).square().sum()))):
            ours, theirs = (
                transform(lambda x, r, f=f: call(f, x, r))(*batch) for f in (cupyops.batch_norm_act, by_torch)
            )
            torch.testing.assert_close(ours, theirs)


def test_a_gpu_takes_what_is_measured():
    """Of half types, from the smallest size of ResNet-50 on, in training; elsewhere PyTorch's functions."""
    of = Problem(128, 256, 56 * 56, 2, True, True)
    with cupyops.simulate("sm_90"), assume_gpu(**H200, library=True):
        assert forms.FORWARD.choose(of, gpu(CPU)).name == "nhwc_two_pass"
        assert forms.FORWARD.choose(of._replace(nhwc=False), gpu(CPU)).name == "nchw_cluster"
        for other in (of._replace(itemsize=4), of._replace(images=3), of._replace(channels=255, nhwc=False, pixels=49)):
            assert isinstance(forms.FORWARD.choose(other, gpu(CPU)), forms.Apart)
        assert forms.INFERENCE.choose(of, gpu(CPU)).name == "pytorch"
    with cupyops.simulate("sm_80"), assume_gpu(library=True):
        assert forms.FORWARD.choose(of, gpu(CPU)).name == "pytorch"
    with cupyops.simulate("sm_90"), assume_gpu(**H200):
        chosen = [one.choose(of, gpu(CPU)).name for one in (forms.FORWARD, forms.BACKWARD, forms.INFERENCE)]
        assert chosen == ["nhwc_two_pass", "nhwc_two_pass", "nhwc"]
        of = Problem(128, 2048, 49, 2, True, True)
        assert [one.choose(of, gpu(CPU)).name for one in (forms.FORWARD, forms.BACKWARD)] == ["nhwc_cluster"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", [(64, 32, 28, 28), (16, 512, 7, 7), (8, 64, 112, 112)], ids=str)
@pytest.mark.parametrize("dtype", HALF_AND_FLOAT, ids=str)
def test_large(dtype, shape, training, last):
    for residual in (True, False):
        args = tensors(shape, last, dtype, torch.float32, "cuda", residual=residual)
        compare(args, training)


X, ONES = torch.ones(2, 3, 4), torch.ones(3)


@pytest.mark.parametrize(
    ("args", "kwargs", "culprit"),
    [
        (([[1.0, 2.0]], None, None), {"training": True}, "input"),
        ((X, None, ONES), {}, "running_mean"),
        ((X, ONES, ONES.clone().requires_grad_()), {}, "running_var"),
        ((X, ONES, ONES, torch.ones(4)), {}, "weight"),
        ((X, None, None), {"training": True, "eps": 0.0}, "eps"),
        ((X, ONES, ONES), {"activation": "gelu"}, "activation"),
        ((X, ONES, ONES), {"residual": torch.ones(2, 3, 1)}, "residual"),
        ((X, ONES, ONES), {"residual": X.double()}, "residual"),
        ((X, ONES, ONES), {"residual": torch.ones(2, 3, 4, device="meta")}, "residual"),
        ((X, ONES, ONES), {"residual": 1.0}, "residual"),
    ],
)
def test_bad_input(args, kwargs, culprit):
    with pytest.raises(cupyops.InputError, match=f"^({culprit} is |input is on .*{culprit})"):
        cupyops.batch_norm_act(*args, **kwargs)
