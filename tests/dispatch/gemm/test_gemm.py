"""Which tile of a GEMM is chosen, and which forms of a convolution; the simulator's tests run each of them."""

from pathlib import Path

import pytest
import torch

import cupyops
from cupyops._dispatch.conv import implicit_gemm, small_conv
from cupyops._dispatch.core.forms import Launch, Library
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._dispatch.gemm import gemm, wgmma
from cupyops.bench.case import declared, files
from cupyops.ops import _conv2d, _linear, _matmul

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
H200 = {"capability": 9, "multiprocessors": 132, "shared": 232448}


def product(m, n, k, dtype, **options):
    return gemm.Problem(m, n, k, gemm.Layout(k, 1), gemm.Layout(1, n), gemm.Layout(n, 1), dtype, **options)


def chosen(problem, forms=_matmul.PRODUCT):
    with assume_gpu(**H200):
        return forms.choose(problem, gpu(CPU)).name


def test_which_tile():
    assert chosen(product(4096, 4096, 4096, torch.bfloat16)) == "wgmma_128x256"
    assert chosen(product(64, 4096, 4096, torch.bfloat16)) == "mma_64"  # few rows of much k
    assert chosen(product(48, 40, 64, torch.bfloat16)) == "mma_32"
    with assume_gpu(capability=8):
        assert _matmul.PRODUCT.choose(product(4096, 4096, 4096, torch.bfloat16), gpu(CPU)).name != "wgmma_128x256"
    assert chosen(product(4096, 4095, 4096, torch.bfloat16)) == "mma_128"  # no whole vectors
    assert chosen(product(4096, 4096, 4096, torch.bfloat16, ones=True), _linear.PRODUCT) == "mma_128"
    assert chosen(product(4096, 4096, 4096, torch.float32)) == "fma_128"
    assert chosen(product(64, 128, 3136, torch.float32)) == "fma_32"
    assert chosen(product(4096, 4096, 4096, torch.float64)) == "fma_64"


def test_how_many_kernels_forty_layers_take():
    """As they are called on an H100: few enough to be compiled in seconds. Copied operands have another form."""
    card = {**H200, "shared_total": 233472, "l2": 50 << 20, "library": True}
    instances, by_pytorch = set(), 0
    for case in declared(files(["products"], BENCHMARKS)):
        a, b = case.make("meta", case.dtype)
        with assume_gpu(**card):
            problem = _matmul._problem(a.shape, a.stride(), b.shape, b.stride(), a.dtype)
            launch = _matmul.PRODUCT.plan(problem, gpu(CPU))
            if isinstance(launch, Launch) and (copies := gemm.prepared(problem, launch, a, b)):
                a, b = copies
                problem = _matmul._problem(a.shape, a.stride(), b.shape, b.stride(), a.dtype)
                launch = _matmul.PRODUCT.plan(problem, gpu(CPU))
        if isinstance(launch, Library):
            by_pytorch += 1
        else:
            instances.add(launch.kernel.instance(**launch.template).name)
    assert 0 < by_pytorch < 60
    assert len(instances) <= 14 and all(name.startswith(("gemm_wgmma<", "few_rows_mma<")) for name in instances), (
        instances
    )


def test_the_widest_tile_needs_shared_memory():
    problem = product(4096, 4096, 4096, torch.float16)
    with assume_gpu(**H200), assume_gpu(shared=101376):
        assert _matmul.PRODUCT.choose(problem, gpu(CPU)).name == "mma_128"
        with (
            cupyops.use_form("matmul:mma_256"),
            pytest.raises(cupyops.InputError, match="mma_256 was asked for, but it takes 165888 bytes of shared"),
        ):
            _matmul.PRODUCT.choose(problem, gpu(CPU))


@pytest.mark.parametrize("dtype, engine", [(torch.float16, "fma"), (torch.float32, "mma")])
def test_engines_serve_their_dtypes(dtype, engine):
    message = f"the form {engine}_64 was asked for, but {dtype} is multiplied by "
    with cupyops.use_form(f"matmul:{engine}_64"), pytest.raises(cupyops.InputError, match=message):
        chosen(product(64, 64, 64, dtype))


def test_small_gpus_split_k_less():
    """Shares of k are for multiprocessors that would have no tile."""
    problem, form = product(32, 10, 50176, torch.float32), gemm.DENSE[-1]
    grids = []
    for multiprocessors in (2, 132):
        with assume_gpu(multiprocessors=multiprocessors):
            grids.append(form.launch(problem, gpu(CPU)).grid)
    assert grids[0] < grids[1]


def layer(images, channels, filters, size, taps=3):
    return small_conv.direct(
        small_conv.Sizes(images, channels, size, size, filters, size, size, 1, 1), taps, torch.float32
    )


@pytest.mark.parametrize(
    "form, weight, problem",
    [
        ("fma_8", "fma_weight_1", layer(64, 1, 32, 28)),
        ("fma_4", "fma_weight_4", layer(64, 32, 64, 14)),
        ("fma_8", "fma_weight_4", layer(1024, 32, 64, 14)),
        ("fma_4", "fma_weight_1", layer(1024, 32, 64, 14, taps=5)),
    ],
)
def test_which_form_of_few_channels(form, weight, problem):
    names = []
    for forms in (_conv2d.FORWARD, _conv2d.BACKWARD_WEIGHT):
        few = [one.form for one in forms.list if isinstance(one, implicit_gemm.Direct)]
        with assume_gpu(**H200):
            fits = [one for one in few if not (one.why_not(problem, gpu(CPU)) or one.why_slower(problem, gpu(CPU)))]
        names.append(fits[0].name)
    assert names == [form, weight]


def test_the_gradient_of_weight_is_the_same_on_every_gpu():
    """Blocks store partial sums: their number decides the order of the sum."""
    problem, form = layer(1024, 32, 64, 14), small_conv.FmaWeight(_conv2d.conv2d_direct_bwd_weight)
    grids = set()
    for multiprocessors in (10, 132):
        with assume_gpu(capability=9, multiprocessors=multiprocessors):
            grids.add(form.launch(problem, gpu(CPU)).grid)
    assert len(grids) == 1


def test_which_form_of_a_convolution():
    launched = []
    x, weight = torch.zeros(1, 3, 6, 6), torch.zeros(4, 3, 3, 3)
    for stride, dtype in ((1, torch.float32), (2, torch.float32), (1, torch.float16)):
        with cupyops.simulate("sm_80"), cupyops.trace() as trace:
            cupyops.conv2d(x.to(dtype), weight.to(dtype), stride=stride)
        launched.append(next(record.kernel for record in trace.launches()))
    assert launched == ["conv2d_direct<float, 3, 4, true>", "conv2d_fwd<float, 32>", "conv2d_fwd<__half, 64>"]
    assert [form.name for form in _conv2d.BACKWARD_WEIGHT.list][:2] == ["direct_weight_4", "direct_weight_1"]


REFUSED = {
    "another GPU": (dict(), dict(capability=10), "compute capability 9.0"),
    "float32": (dict(dtype=torch.float32), {}, "torch.float32 is not multiplied by wgmma"),
    "shared memory": (dict(), dict(shared=101376), "bytes of shared memory"),
    "rows off vectors": (dict(a=gemm.Layout(4095, 1)), {}, "whole vectors"),
    "a column of ones": (dict(ones=True), {}, "no column of ones"),
    "nothing to add": (dict(k=0), {}, "no sizes of 0"),
    "only a with k outside": (dict(a=gemm.Layout(1, 4096)), {}, "no kernel for this layout"),
    "two strides": (dict(batches=6, batch_inner=3, a=gemm.Layout(64, 1, 4096, 8192)), {}, "one stride apart"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_wgmma_cannot_compute(case):
    changed, card, message = REFUSED[case]
    problem = product(4096, 4096, 4096, torch.bfloat16)._replace(b=gemm.Layout(4096, 1))._replace(**changed)
    with (
        assume_gpu(**H200 | card),
        cupyops.use_form("matmul:wgmma_128x256"),
        pytest.raises(cupyops.InputError, match=message),
    ):
        _matmul.PRODUCT.choose(problem, gpu(CPU))


def test_tensor_maps_of_a_batch():
    """A matrix that all share has one; neighbouring batches of one stride are one dimension."""
    a, b = gemm.Layout(64, 1, 4096, 4096 * 3), gemm.Layout(64, 1, 0, 0)
    problem = gemm.Problem(
        64, 64, 64, a, b, gemm.Layout(64, 1, 4096, 4096 * 3), torch.float16, batches=6, batch_inner=3
    )
    with assume_gpu(**H200):
        launch = wgmma.FORMS[-1].launch(problem, gpu(CPU))
    assert launch.extra.a[:2] == ((6, 64, 64), (4096, 64, 1)) and launch.extra.a.moves
    assert launch.extra.b[:2] == ((1, 64, 64), (0, 64, 1)) and not launch.extra.b.moves
    assert launch.extra.y[:2] == ((6, 64, 64), (4096, 64, 1)) and launch.args[3:6] == (6, 1, 0)
