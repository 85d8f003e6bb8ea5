"""Each form of the losses computes what it says that it can, and is chosen where it is meant to be."""

import functools

import pytest
import torch
import torch.nn.functional as F
from contract import DTYPES, Make, Sample
from ops.test_cross_entropy import TestCrossEntropy as Classes
from ops.test_cross_entropy import TestProbabilities as Probabilities
from ops.test_cross_entropy import probabilities, weights
from ops.test_fused_linear_cross_entropy import TestFusedLinearCrossEntropy as Linear
from selection import slow

import cupyops
from cupyops._dispatch.core.gpu import gpu
from cupyops._dispatch.loss.cross_entropy import BACKWARD, FORWARD, Problem
from cupyops._dispatch.loss.losses import SINGLE
from cupyops.testing import assume_gpu

H200 = {"capability": 9, "multiprocessors": 132, "shared": 232448, "shared_total": 233472, "threads": 2048}
LITTLE = {"multiprocessors": 2, "shared": 24000, "shared_total": 25024}
CPU = torch.device("cpu")


def cross_entropies(make):
    """(form, contract, sample): few classes and many, each kind of target and of reduction."""
    for classes in (3, 20, 40, 300, 1031):
        target = make.integers(5, high=classes)
        plain = Sample(make(5, classes), target, weights(make, classes), ignore_index=2)
        none = Sample(make(5, classes), target, reduction="none")
        smoothed = Sample(make(5, classes), target, weights(make, classes), label_smoothing=0.2)
        likely = Sample(make(5, classes), probabilities(make, 5, classes), weights(make, classes), reduction="sum")
        for form in ("strided",) if make.dtype is torch.float64 else ("strided", "two_pass"):
            yield from ((form, Classes, sample) for sample in (plain, none, smoothed))
            yield form, Probabilities, likely
        if make.dtype is not torch.float64:
            yield from ((form, Classes, sample) for form in ("registers", "persistent") for sample in (plain, none))
    yield "strided", Classes, Sample(make(2, 70, 3), make.integers(2, 3, high=70), label_smoothing=0.1)


@pytest.mark.parametrize("dtype", [*slow(torch.float16), *DTYPES[1:]], ids=str)
def test_every_form_of_cross_entropy(dtype):
    for form, contract, sample in cross_entropies(Make(CPU, dtype)):
        asked = cupyops.use_form(f"cross_entropy:{form}")
        with cupyops.simulate("sm_90"), assume_gpu(**LITTLE), asked, cupyops.trace() as trace:
            contract().compare(sample, f"{form}, {sample!r}")
        forward = next(record.kernel for record in trace.launches() if "_fwd_w" not in record.kernel)
        assert forward.startswith(f"cross_entropy_fwd_{form}<"), (form, sample, forward)


@pytest.mark.parametrize(
    ("form", "dtype"), [("persistent", dtype) for dtype in SINGLE] + [("two_pass", dtype) for dtype in DTYPES], ids=str
)
def test_every_form_of_fused_linear_cross_entropy(form, dtype):
    make = Make(CPU, dtype)
    for classes in (7, 300, 1031):
        sample = Sample(make(5, 4), make(classes, 4), make.integers(5, high=classes), make(classes), ignore_index=2)
        asked = cupyops.use_form(f"fused_linear_cross_entropy:{form}")
        with cupyops.simulate("sm_90"), assume_gpu(**LITTLE), asked, cupyops.trace() as trace:
            Linear().compare(sample, f"{form}, {sample!r}")
        assert any(f"linear_cross_entropy_{form}<" in record.kernel for record in trace.launches())


@pytest.mark.parametrize(("classes", "options", "forward", "backward"), [
    (16, {}, "strided", "strided"), (17, {}, "registers", "two_pass"), (8192, {}, "registers", "two_pass"),
    (32000, {}, "persistent", "two_pass"), (32000, {"gradient": False}, "two_pass", "two_pass"),
    (32000, {"soft": True}, "two_pass", "two_pass"), (1 << 20, {}, "two_pass", "two_pass"),
    (100, {"inner": 9}, "strided", "strided"), (100, {"dtype": torch.float64}, "strided", "strided"),
    (100, {"positions": 0}, "two_pass", "two_pass"),
])  # fmt: skip
def test_which_form(classes, options, forward, backward):
    given = {"positions": 4096, "inner": 1, "dtype": torch.bfloat16, "soft": False, "reduction": 1, "gradient": True}
    problem = Problem(classes=classes, **(given | options))
    with assume_gpu(**H200):
        of = gpu(CPU)
    assert (FORWARD.choose(problem, of).name, BACKWARD.choose(problem, of).name) == (forward, backward)


@pytest.mark.parametrize(("classes", "dtype", "threads", "cluster"), [
    (32000, torch.bfloat16, 256, None), (32000, torch.float32, 256, 2), (50257, torch.float16, 512, None),
    (128256, torch.bfloat16, 1024, None), (400000, torch.bfloat16, 1024, 4),
])  # fmt: skip
def test_persistent_rows(classes, dtype, threads, cluster):
    """As many blocks on a multiprocessor as rows of their size allow; then clusters."""
    with assume_gpu(**H200):
        launch = FORWARD.launch(Problem(4096, classes, 1, dtype, False, 1, True), gpu(CPU))
    assert (launch.block, launch.cluster) == (threads, cluster)
    assert launch.grid == 132 * {256: 3, 512: 2, 1024: 1}[threads] and launch.shared <= H200["shared"]


LOSSES = {
    "cross_entropy": (cupyops.cross_entropy, F.cross_entropy, torch.tensor([0, 2, 1])),
    "cross_entropy, probabilities": (cupyops.cross_entropy, F.cross_entropy, torch.full((3, 4), 0.25)),
    "nll_loss": (cupyops.nll_loss, F.nll_loss, torch.tensor([0, 2, 1])),
    "kl_div": (functools.partial(cupyops.kl_div, reduction="sum"), functools.partial(F.kl_div, reduction="sum"), None),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_dtype_of_a_loss_is_pytorch_s(name, dtype, autocast, device):
    """That of the input; float32 under autocast."""
    ours, theirs, target = LOSSES[name]
    x = torch.randn(3, 4).to(device, dtype)
    target = x.detach().softmax(1) if target is None or target.is_floating_point() else target.to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
        expected = theirs(x, target).dtype
        assert ours(x, target).dtype == expected
        if torch.device(device).type == "cpu":
            with cupyops.simulate():
                assert ours(x, target).dtype == expected
    assert expected == (torch.float32 if autocast and dtype.itemsize == 2 else dtype)
