"""Every form of the reductions, forward and backward, on whatever it can compute, against PyTorch in float64."""

import pytest
import torch
from form_walk import by_form

import cupyops
from cupyops._dispatch.core.forms import families, use_form
from cupyops._dispatch.elementwise.elementwise import why_not_size
from cupyops._dispatch.reduce.reduction import Fold

FORMS = {(one.family, one.direction): one for one in families()}
ALL = [
    (family, direction, form.name)
    for family, direction in (("sum", "forward"), ("amax", "forward"), ("amax", "backward"), ("var", "forward"),
                              ("var", "backward"))
    for form in FORMS[family, direction].list
]  # fmt: skip

PROBLEMS = [  # shape, what is reduced: rows and columns of whole vectors and not, several dimensions, slabs
    ((7, 130), (0, 1)),
    ((5, 133), (1,)),
    ((259, 17), (1,)),
    ((9, 40), (1,)),
    ((5, 272), (1,)),
    ((2, 1088), (1,)),
    ((40, 24), (0,)),
    ((19, 33), (0,)),
    ((3, 5, 16), (0, 2)),
    ((3, 5, 7), (0, 2)),
    ((3, 7, 5), (1,)),
    ((4100, 2), (0,)),
]


def made(shape, dtype):
    """Numbers of which some are equal: ties for amax."""
    drawn = torch.randint(-40, 40, shape, generator=torch.Generator().manual_seed(0))
    return (drawn.double() / 16).to(dtype).requires_grad_()


def results(function, x, dims):
    y = function(x, dims)
    grad_y = torch.arange(1, y.numel() + 1, dtype=torch.float64).remainder(7).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, x, grad_y)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=["float16", "float32", "float64"])
@pytest.mark.parametrize(("family", "direction", "form"), ALL)
def test_each_form(family, direction, form, dtype):
    computed = 0
    for shape, dims in PROBLEMS:
        x = made(shape, dtype)
        function = getattr(cupyops, family)
        found = by_form(f"{family}.{direction}:{form}", lambda x=x, dims=dims: results(function, x, dims))
        if found is None:
            continue
        computed += 1
        exact = results(getattr(torch, family), x.detach().double().requires_grad_(), dims)
        for mine, theirs in zip(found, exact):
            rtol = 2 * torch.finfo(dtype).eps if dtype is torch.float16 else 1e-5 if dtype is torch.float32 else 1e-13
            torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=rtol, msg=lambda text: f"{shape}: {text}")
    # double precision has the most general form alone, and halves no variance in registers
    assert computed or dtype is torch.float64 or (family, form, dtype) == ("var", "registers", torch.float16)


def test_double_precision_has_one_form():
    for family, direction in {(family, direction) for family, direction, _ in ALL}:
        forms = FORMS[family, direction].list
        chosen = [{"FORM": one.form} if isinstance(one, Fold) else {} for one in forms]
        served = [one.name for one, of in zip(forms, chosen) if why_not_size(one.kernel, 8, **of) is None]
        assert served == ["strided"], (family, direction)


def test_a_backward_form_serves_whatever_forward_form_there_was():
    """What forward saves of amax is counted alike in all of them, but for the masks of rows that a thread owns."""
    x = made((6, 64), torch.float16)
    exact = results(torch.amax, x.detach().double().requires_grad_(), (1,))
    for forward in ("contiguous", "rows", "strided"):
        for backward in ("rows", "strided"):
            with cupyops.simulate(), use_form(f"amax.forward:{forward}", f"amax.backward:{backward}"):
                found = results(cupyops.amax, x, (1,))
            for mine, theirs in zip(found, exact):
                torch.testing.assert_close(mine.double(), theirs, rtol=2e-3, atol=0)
