"""Each hazard of compilers is found by the one that looks for it, and sound operators have none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from broken_operators import Broken, normal
from faulty_operators import eager
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import cupyops
from cupyops.testing import check


def breaks_the_graph(x):
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()
    return torch.sin(x)


def goes_column_by_column(x):
    if torch.compiler.is_dynamo_compiling():
        return torch.stack([torch.sin(x[..., column]) for column in range(x.shape[-1])], -1)
    return torch.sin(x)


def approximates_in_export(x):
    return x - x**3 / 6 if torch.compiler.is_exporting() else torch.sin(x)


def computes_behind_the_dispatcher_s_back(x):
    if not torch.compiler.is_compiling() and get_proxy_mode() is not None:
        return torch.from_numpy(np.sin(x.detach().numpy()))
    return torch.sin(x)


def has_other_strides_for_fakes(x):
    y = torch.sin(x)
    if isinstance(x, FakeTensor) and not torch.compiler.is_compiling() and x.dim() == 2:
        return y.t().contiguous().t()
    return y


@pytest.fixture(scope="module")
def broken_library():
    """`broken::neg`, which overwrites its argument, and whose schema does not say so."""
    library = torch.library.Library("broken", "FRAGMENT")
    library.define("neg(Tensor x) -> Tensor")

    def neg(x):
        y = -x
        x.zero_()
        return y

    library.impl("neg", neg, "CPU")
    torch.library.register_fake("broken::neg", torch.empty_like, lib=library)
    torch.library.register_autograd("broken::neg", lambda ctx, grad_y: -grad_y, lib=library)
    yield
    library._destroy()


def overwrites_scratch(x):
    traced = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return -x if traced or x.is_meta else torch.ops.broken.neg(torch.clone(x))


BROKEN = {
    "compile_fullgraph": Broken(breaks_the_graph, torch.sin, lambda: [normal(3, 11)]),
    "compile_dynamic": Broken(goes_column_by_column, torch.sin, lambda: [normal(3, 11)]),
    "export": Broken(approximates_in_export, torch.sin, lambda: [normal(3, 11)]),
    "make_fx": Broken(computes_behind_the_dispatcher_s_back, torch.sin, lambda: [normal(3, 11)]),
    "fake_tensors": Broken(has_other_strides_for_fakes, torch.sin, lambda: [normal(3, 11)]),
    "opcheck": Broken(overwrites_scratch, torch.neg, lambda: [normal(3, 11)]),
}


@pytest.mark.parametrize("hazard", BROKEN)
def test_caught(hazard, broken_library):
    BROKEN[hazard].assert_caught_by(hazard)


def test_an_operator_that_is_lost_in_export():
    def by_pytorch_when_exported(x):
        return torch.relu(x) if torch.compiler.is_exporting() else cupyops.relu(x)

    report = check(by_pytorch_when_exported, [normal(3, 5)], reference=torch.relu, only="export")
    assert report.failures[0].reason == "cupyops::relu is not in the exported graph"


def test_compiled_values_strides_and_gradients_are_compared():
    values = lambda x: torch.cos(x) if torch.compiler.is_dynamo_compiling() else torch.sin(x)
    strides = lambda x: torch.sin(x).t().contiguous().t() if torch.compiler.is_dynamo_compiling() else torch.sin(x)
    gradients = lambda x: torch.sin(x.detach()) + x - x if torch.compiler.is_dynamo_compiling() else torch.sin(x)
    for function, words in (
        (values, "output: error"),
        (strides, "output 0: strides"),
        (gradients, "gradient 0: error"),
    ):
        report = check(function, [normal(3, 5)], reference=torch.sin, only="compile_fullgraph", shrink=False)
        assert report.failures[0].reason.startswith(words)


def test_compilations_are_counted():
    broken = BROKEN["compile_dynamic"]
    report = check(broken.function, broken.args(), reference=torch.sin, only="compile_dynamic", shrink=False)
    assert report.failures[0].reason.startswith("2 more compilations for 2 more sizes: (3, 11)")


def test_nothing_compiled_is_left(monkeypatch):
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(None))
    check(torch.sin, [normal(3, 5)], reference=torch.sin, only="compile_fullgraph")
    assert len(resets) == 2


def test_operators_of_torch_library_are_checked_in_any_function(broken_library):
    report = check(overwrites_scratch, [normal(3, 5)], reference=torch.neg, only="opcheck", shrink=False)
    assert report.failures[0].reason.startswith("broken.neg.default, test_schema: ")
    assert check(torch.neg, [normal(3, 5)], reference=torch.neg, only="opcheck").rows[0].verdict == "n/a"


@pytest.mark.parametrize("hazard", BROKEN)
def test_calls_of_several_kinds(hazard):
    """Integer outputs, a list of tensors, a keyword, None; nothing that wants a gradient."""

    def top(pair, *, weight, bias=None):
        values, places = (pair[0] * weight).sort(-1)
        return {"values": values, "places": places, "other": torch.tanh(pair[1])}

    for grad in (True, False):
        args = [[normal(2, 5, requires_grad=grad), normal(2, seed=1, requires_grad=False)]]
        kwargs = {"weight": normal(5, seed=2, requires_grad=grad), "bias": None}
        report = check(top, args, kwargs, reference=top, only=hazard)
        assert not report.failures, f"\n{report}"
        assert report.passed or hazard == "opcheck"


def test_a_plain_call_is_one_that_nothing_watches():
    assert eager(torch.ones(2))
    seen = []
    torch.func.vmap(lambda x: seen.append(eager(x)) or x)(torch.ones(2))
    assert seen == [False]
