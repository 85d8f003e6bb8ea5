"""Names in signatures and expressions: each is refused, or means what the user has it mean."""

import re
from contextlib import ExitStack

import gemms
import pytest
import torch
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._expression import kernels
from cupyops._expression.declaration import parse
from cupyops.errors import InputError

# What one may well call a matrix, a mask or a size, and what kernels once had names for.
USUAL = [*"WKMNVUEBDHSXYQPICkmxwij", "FLAT", "STAGES", "SLOTS", "CLUSTER", "PINGPONG", "LATE"]
USUAL += ["Value", "State", "vectors_fit", "map", "sum", "rows"]


def names_in(text):
    """The names that occur in a kernel's text, and are no parameter's there, as the user may write them."""
    for name in sorted({*re.findall(r"[A-Za-z_]\w*", re.sub(r"//.*|#.*", "", text))}):
        try:
            parse(f"f(T first, T {name}) -> T result")
        except InputError:
            continue
        yield name


def elementwise(names, kind):
    return cupyops.elementwise(signature(names, kind), f"result = first * first{squares(names)}")


def reduction(names, kind):
    backward = "grad_first = 2 * first * grad_result;" + "".join(
        f" grad_{name} = 2 * {name} * grad_result;" for name in names if kind == "T"
    )
    text = f"first * first{squares(names)}"
    return cupyops.reduction(signature(names, kind), map=text, reduce="a + b", identity="0", backward=backward)


def linear_epilogue(names, kind):
    return cupyops.linear_epilogue(signature(names, kind), f"result = first * first{squares(names)}")


def signature(names, kind):
    return f"named(T first{''.join(f', {kind} {name}' for name in names)}) -> T result"


def squares(names):
    return "".join(f" + {name} * {name}" for name in names)


def call(make, names, kind):
    """The operator and its gradients beside PyTorch, by kernels."""
    torch.manual_seed(0)
    fused = make is linear_epilogue
    dtype = torch.float16 if fused else torch.float32
    x, weight = torch.randn(8, 16), torch.randn(16, 16) / 4
    given = [torch.randn(8, 16, dtype=dtype).requires_grad_() if kind == "T" else 1.5 for _ in names]
    layer = [x.to(dtype).requires_grad_(), *([weight.to(dtype).requires_grad_()] if fused else [])]
    with ExitStack() as stack:
        stack.enter_context(cupyops.simulate("sm_90"))
        if fused:
            stack.enter_context(cupyops.use_form("linear_epilogue:wgmma_128x256"))
            stack.enter_context(assume_gpu(**gemms.HOPPER))
        y = make(names, kind)(*layer, *([None] if fused else []), *given)
        wanted = layer + [one for one in given if kind == "T"]
        found = [y, *torch.autograd.grad(y.sum(), wanted)]
    exact = [one.detach().double().requires_grad_() for one in wanted]
    first = F.linear(*exact[:2]) if fused else exact[0]
    others = exact[len(layer) :] if kind == "T" else given
    truth = first * first + sum(one * one for one in others)
    truth = truth.sum() if make is reduction else truth
    for one, right in zip(found, [truth, *torch.autograd.grad(truth.sum(), exact)]):
        bound = 4 * torch.finfo(dtype).eps * right.abs().max() * (8 if make is reduction else 1)
        assert one.shape == right.shape and (one.double() - right).abs().max() <= bound


@pytest.mark.parametrize(
    "make, kind",
    [(elementwise, "T"), (elementwise, "float"), (reduction, "T"), (reduction, "float"), (linear_epilogue, "float")],
)
def test_names_that_the_kernels_have_for_something_else(make, kind, monkeypatch):
    texts, plain = [], kernels.Generated.__init__
    monkeypatch.setattr(
        kernels.Generated,
        "__init__",
        lambda self, text, *args, **options: texts.append(text) or plain(self, text, *args, **options),
    )
    call(make, ["other"], kind)
    found = {name for text in texts for name in names_in(text)} - {"first", "other", "result"}
    assert {"Vec", "acc_t", "T", "K"} - found == {"T"}  # which is refused
    names = sorted(found.union(USUAL) - ({"a", "b"} if make is reduction else set()))
    for at in range(0, len(names), 24):
        call(make, names[at : at + 24], kind)


def test_names_of_tensors_that_a_product_captures():
    """Fewer: NVRTC takes long for each."""
    call(linear_epilogue, ["Dual", "N", "Captured", "prefetch", "named_slopes", "named_epilogue"], "T")


@pytest.mark.parametrize("name", ["constexpr", "nullptr", "static_cast", "CUPYOPS_FOLD", "FORM", "thread_local", "and"])
def test_names_that_cpp_has_for_something_else(name):
    with pytest.raises(InputError, match=f"'{name}' .*choose another|{name}.*Python's own"):
        parse(f"f(T x, T {name}) -> T y")


@pytest.mark.parametrize("name", ["c0", "given", "map", "dropout", "seen", "sequence", "kScores", "Given", "Variant"])
def test_names_that_attention_captures(name):
    torch.manual_seed(0)
    q = torch.randn(1, 1, 16, 16, dtype=torch.float16)
    with cupyops.simulate("sm_80"):
        y = cupyops.attention(q, q, q, score=f"s * {name}", **{name: 2.0})
    exact = q.double()
    right = torch.softmax(exact @ exact.mT / 4 * 2, -1) @ exact
    assert (y.double() - right).abs().max() <= 2e-3 * right.abs().max()
