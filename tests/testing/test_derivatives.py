"""Each hazard of derivatives is found by the one that looks for it, and sound operators have none."""

from __future__ import annotations

import pytest
import torch
from broken_operators import Broken, normal
from faulty_operators import eager, saving
from torch._C import _functorch
from torch.autograd import forward_ad

import cupyops
from cupyops.testing import check


def transforms(x):
    """What torch.func has made of a tensor, from the outside in: "grad" (jvp, too) and "vmap"."""
    found = []
    if torch.compiler.is_compiling():
        return found
    while _functorch.is_functorch_wrapped_tensor(x):
        found.append("vmap" if _functorch.is_batchedtensor(x) else "grad")
        x = _functorch.get_unwrapped(x)
    return found


def forward_mode():
    return forward_ad._current_level >= 0


def straight_through(x):
    """Its gradient is not its slope, whoever is asked."""
    return x * x + 0.5 * (x - x.detach())


cube = saving(lambda x: x**3, lambda grad_y, x: 3 * grad_y * x.detach() ** 2)


def loses_a_term(x):
    return cube(x) if eager(x) else x**3


def loses_a_term_by_its_kernels(x):
    """Which serve float32; what falls back on PyTorch is right."""
    return cube(x) if eager(x) and x.dtype is torch.float32 else x**3


def loses_tangents(x):
    if forward_mode() and not transforms(x):
        return torch.sin(forward_ad.unpack_dual(x).primal)
    return torch.sin(x)


def loses_tangents_of_transforms(x):
    if forward_mode() and transforms(x):
        return torch.sin(forward_ad.unpack_dual(x).primal)
    return torch.sin(x)


def takes_the_first_example_for_all(x):
    return torch.sin(_functorch.get_unwrapped(x)[0] if transforms(x)[:1] == ["vmap"] else x)


def loses_gradients_of_examples(x):
    return torch.sin(x.detach() if transforms(x) == ["grad", "vmap"] and not forward_mode() else x)


def loses_second_derivatives_of_transforms(x):
    return torch.sin(x.detach() if transforms(x).count("grad") > 1 else x)


BROKEN = {
    "gradcheck": Broken(straight_through, straight_through, lambda: [normal(3, 11)]),
    "double_backward": Broken(loses_a_term, lambda x: x**3, lambda: [normal(3, 11)]),
    "gradient_penalty": Broken(loses_a_term_by_its_kernels, lambda x: x**3, lambda: [normal(3, 11)]),
    "forward_ad_tangents": Broken(loses_tangents, torch.sin, lambda: [normal(3, 11)]),
    "jvp": Broken(loses_tangents_of_transforms, torch.sin, lambda: [normal(3, 11)]),
    "vmap": Broken(takes_the_first_example_for_all, torch.sin, lambda: [normal(3, 11)]),
    "vmap_of_grad": Broken(loses_gradients_of_examples, torch.sin, lambda: [normal(3, 11)]),
    "hessian": Broken(loses_second_derivatives_of_transforms, torch.sin, lambda: [normal(3, 11)]),
}


@pytest.mark.parametrize("hazard", BROKEN)
def test_caught(hazard):
    BROKEN[hazard].assert_caught_by(hazard)


class OnceOnly(torch.autograd.Function):
    """As most operators of others are written."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y):
        (x,) = ctx.saved_tensors
        return grad_y * torch.cos(x)


def test_what_a_plain_function_lacks_is_told_in_its_own_words():
    report = check(OnceOnly.apply, [normal(3, 5)], reference=torch.sin, only=list(BROKEN), shrink=False)
    found = {row.hazard: row for row in report.rows}
    assert {name for name, row in found.items() if row.verdict == "fail"} == {
        "double_backward",
        "forward_ad_tangents",
        "vmap",
    }
    assert "analytical:0.0" in found["double_backward"].reason
    assert "setup_context" in found["vmap"].reason
    assert found["gradient_penalty"].reason == "see double_backward"
    assert found["jvp"].reason == "see forward_ad_tangents"
    assert found["vmap_of_grad"].reason == "see vmap"


def test_a_function_without_float64_has_no_numerical_derivative():
    def float32_only(x):
        if x.dtype is torch.float64:
            raise TypeError("float64 is not served")
        return torch.sin(x)

    report = check(float32_only, [normal(3, 5)], reference=torch.sin, only=["gradcheck", "gradient_penalty"])
    assert [row.verdict for row in report.rows] == ["n/a", "pass"]
    assert "float64 is not served" in report.rows[0].reason


def test_of_what_is_wrong_already_nothing_is_derived():
    report = check(lambda x: torch.sin(x).sum(), [normal(3, 5)], reference=torch.sin, only=list(BROKEN))
    assert {row.verdict for row in report.rows} == {"n/a"}
    assert all("not right already" in row.reason for row in report.rows)


def test_kinks_are_avoided():
    """relu has no slope at 0, max none where two are equal."""
    x = torch.tensor([[0.0, 1.0, 0.0], [2.0, 2.0, -1.0]], requires_grad=True)
    assert check(cupyops.relu, [x], only=["gradcheck", "double_backward"], backends="reference").passed
    largest = lambda x: x.max(-1).values
    assert check(largest, [x], reference=largest, only=["gradcheck", "double_backward"]).passed


def test_where_the_reference_is_wrong_itself():
    """As torch.func.hessian of PyTorch's layer_norm is: an operator that is made of it cannot be better."""
    wrong = loses_second_derivatives_of_transforms
    (row,) = check(wrong, [normal(2, 3)], reference=wrong, only="hessian").rows
    assert row.verdict == "n/a"
    assert row.reason.startswith("PyTorch's own is wrong for the reference too: result: error")


@pytest.mark.parametrize("hazard", BROKEN)
def test_outputs_of_several_kinds(hazard):
    """Integer outputs, a list of tensors, a keyword, None."""

    def top(pair, *, weight, bias=None):
        values, places = (pair[0] * weight).sort(-1)
        return {"values": values, "places": places, "other": torch.tanh(pair[1])}

    args = [[normal(2, 5), normal(2, seed=1)]]
    report = check(top, args, {"weight": normal(5, seed=2), "bias": None}, reference=top, only=hazard)
    assert report.passed, f"\n{report}"


def test_one_lack_is_one_row():
    """What rests on forward mode is not told again."""

    def refuses(x):
        if forward_mode():
            raise NotImplementedError("no forward mode")
        return torch.sin(x)

    names = ["forward_ad_tangents", "jvp", "hessian"]
    rows = check(refuses, [normal(3, 5)], reference=torch.sin, only=names, shrink=False).rows
    assert rows[0].verdict == "fail"
    assert [(row.verdict, row.reason) for row in rows[1:]] == [("n/a", "see forward_ad_tangents")] * 2
