"""LinearCrossEntropy and linear_log_prob against PyTorch's functions on all logits, in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import cupyops
from cupyops.nn import LinearCrossEntropy, linear_log_prob, linear_loss

ROWS, WIDTH, CLASSES = (3, 5), 8, 17
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BOUNDS = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 2e-5, torch.float64: 1e-11}


@pytest.fixture(params=["one chunk", "chunks of two rows"], autouse=True)
def chunks(request, monkeypatch):
    if request.param == "chunks of two rows":
        monkeypatch.setattr(linear_loss, "MOST_LOGITS", 2 * CLASSES)


def inputs(device, dtype, bias=True):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
    target = torch.randint(CLASSES, ROWS, generator=generator).to(device)
    target[0, 1], target[2] = -100, -100
    return draw(*ROWS, WIDTH), draw(CLASSES, WIDTH), target, draw(CLASSES) if bias else None


def plain(x, weight, target, bias, softcap=None, temperature=1.0, smoothing=0.0, z_loss=0.0):
    """Of each token (loss, log-probability), and whether the target is the best."""
    logits = F.linear(x, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = (logits / temperature).flatten(0, -2)
    each = F.cross_entropy(logits, target.flatten(), reduction="none", label_smoothing=smoothing)
    log_prob = -F.cross_entropy(logits, target.flatten(), reduction="none")
    counted = target.flatten() != -100
    each = torch.where(counted, each + z_loss * logits.logsumexp(-1).square(), 0.0)
    return each.view_as(target), log_prob.view_as(target), (logits.argmax(-1) == target.flatten()).view_as(target)


def leaves(*tensors, dtype=None):
    return [
        t if t is None or not t.is_floating_point() else t.detach().to(dtype or t.dtype).requires_grad_()
        for t in tensors
    ]


def assert_near(ours, exact, dtype):
    bound = BOUNDS[dtype]
    for a, b in zip(ours, exact, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"temperature": 0.7}, {"softcap": 5.0, "temperature": 2.0}])
def test_log_prob(device, dtype, bias, options):
    given = inputs(device, dtype, bias)
    ours, exact = leaves(*given), leaves(*given, dtype=torch.float64)
    y = linear_log_prob(*ours, **options)
    known = plain(*exact, **options)[1]
    assert y.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert (y[given[2] == -100] == 0).all()
    assert_near([y], [known], dtype)
    pull = torch.linspace(-1, 1, y.numel(), device=device).view_as(y)
    y.backward(pull.to(y.dtype))
    known.backward(pull.double())
    pairs = [(a.grad, b.grad) for a, b in zip(ours, exact) if a is not None and a.requires_grad]
    assert all(a.dtype is dtype for a, _ in pairs)
    assert_near(*zip(*pairs), dtype)


OPTIONS = [
    {},
    {"softcap": 3.0},
    {"z_loss": 0.1},
    {"label_smoothing": 0.2},
    {"softcap": 3.0, "z_loss": 0.01, "label_smoothing": 0.1},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "items"])
@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy(device, dtype, reduction, options):
    """With and without accuracy, which takes another way to the same."""
    x, weight, target, bias = inputs(device, dtype)
    named = {"smoothing": options.get("label_smoothing", 0.0)}
    named |= {name: value for name, value in options.items() if name != "label_smoothing"}
    items = 7 if reduction == "items" else None
    for accuracy in (False, True):
        exact = leaves(x, weight, target, bias, dtype=torch.float64)
        each, _, hits = plain(*exact, **named)
        counted = target != -100
        known = each if reduction == "none" else each.sum() / {"sum": 1, "items": 7, "mean": counted.sum()}[reduction]
        head = LinearCrossEntropy(
            WIDTH, CLASSES, True, device, dtype, reduction="mean" if items else reduction, **options
        )
        head.load_state_dict({"weight": weight, "bias": bias})
        (own,) = leaves(x)
        found = head(own, target, num_items_in_batch=items, accuracy=accuracy)
        loss = found[0] if accuracy else found
        if accuracy:
            assert found[1].item() == pytest.approx(((hits & counted).sum() / counted.sum()).item())
        assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        assert_near([loss], [known], dtype)
        loss.sum().backward()
        known.sum().backward()
        ours = [own.grad, head.weight.grad, head.bias.grad]
        assert_near(ours, [exact[0].grad, exact[1].grad, exact[3].grad], dtype)


def test_logits(device):
    """Without a target; the state is a linear layer's, which may be tied to an embedding."""
    x, weight, _, _ = inputs(device, torch.float64)
    embedding = nn.Embedding(CLASSES, WIDTH, device=device, dtype=torch.float64)
    head = LinearCrossEntropy(WIDTH, CLASSES, device=device, dtype=torch.float64, softcap=2.0)
    head.weight = embedding.weight
    head.load_state_dict(nn.Linear(WIDTH, CLASSES, bias=False).to(device, torch.float64).state_dict())
    with torch.no_grad():
        embedding.weight.copy_(weight)
    torch.testing.assert_close(head(x), 2 * torch.tanh(F.linear(x, weight) / 2))
    head.softcap = None
    torch.testing.assert_close(head(x), F.linear(x, weight))


def test_accumulated_gradients(device):
    """Of two parts of a batch, each divided by the items of all: those of the batch."""
    x, weight, target, _ = inputs(device, torch.float64)
    for options in ({}, {"softcap": 3.0}):
        head = LinearCrossEntropy(WIDTH, CLASSES, device=device, dtype=torch.float64, **options)
        head(x, target).backward()
        whole, head.weight.grad = head.weight.grad, None
        items = (target != -100).sum()
        for part in (slice(0, 1), slice(1, 3)):
            head(x[part], target[part], num_items_in_batch=items).backward()
        torch.testing.assert_close(head.weight.grad, whole)


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that an op makes."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor):
                self.found = max(self.found, one.numel())
        return result


def test_memory_never_holds_all_the_logits(device, monkeypatch):
    monkeypatch.setattr(linear_loss, "MOST_LOGITS", 4 * CLASSES)
    x = torch.randn(400, 2, device=device, dtype=torch.float64, requires_grad=True)
    head = LinearCrossEntropy(2, CLASSES, device=device, dtype=torch.float64, softcap=3.0, z_loss=0.1)
    target = torch.randint(CLASSES, (400,), device=device)
    with Largest() as largest:
        loss, _ = head(x, target, accuracy=True)
        loss.backward()
    assert largest.found <= max(x.numel(), 4 * CLASSES) < 400 * CLASSES / 8


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "z_loss": 0.1}])
def test_autocast(device, options):
    """Parameters in fp32, products in the half type, the loss in fp32: as where all is in that type."""
    x, weight, target, _ = inputs(device, torch.float32)
    half = LinearCrossEntropy(WIDTH, CLASSES, device=device, dtype=torch.bfloat16, **options)
    wide = LinearCrossEntropy(WIDTH, CLASSES, device=device, **options)
    for head in (half, wide):
        head.load_state_dict({"weight": weight})
    with torch.autocast(device.type, torch.bfloat16):
        loss = wide(x, target)
    known = half(x.bfloat16(), target)
    loss.backward()
    known.backward()
    assert loss.dtype is torch.float32 and wide.weight.grad.dtype is torch.float32
    torch.testing.assert_close(loss, known)
    torch.testing.assert_close(wide.weight.grad, half.weight.grad.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}])
def test_nothing_to_count(device, options):
    """No rows, and rows that are all ignored."""
    head = LinearCrossEntropy(WIDTH, CLASSES, device=device, reduction="sum", **options)
    for x, target in (
        (torch.ones(0, WIDTH, device=device), torch.ones(0, dtype=torch.long, device=device)),
        (torch.ones(4, WIDTH, device=device), torch.full((4,), -100, device=device)),
    ):
        head.weight.grad = None
        x.requires_grad_()
        loss = head(x, target)
        loss.backward()
        assert loss == 0 and not x.grad.any() and not head.weight.grad.any()
        mean = LinearCrossEntropy(WIDTH, CLASSES, device=device, **options)(x, target)
        assert mean.isnan()


def test_only_what_is_wanted(device):
    """A frozen head gets no gradient, frozen inputs none either."""
    x, weight, target, bias = inputs(device, torch.float64)
    for index in range(3):
        own = [one.detach().requires_grad_(place == index) for place, one in enumerate((x, weight, bias))]
        linear_log_prob(own[0], own[1], target, own[2], softcap=2.0).sum().backward()
        assert [one.grad is not None for one in own] == [place == index for place in range(3)]


def test_gradcheck():
    x, weight, target, bias = leaves(*inputs(torch.device("cpu"), torch.float64))
    call = lambda *given: linear_loss.tokens(given[0], given[1], target, given[2], -100, 3.0, 0.8)[:3]
    assert torch.autograd.gradcheck(call, (x, weight, bias), fast_mode=True)


def test_second_derivatives():
    """A gradient penalty beside the loss loses no term."""
    given = inputs(torch.device("cpu"), torch.float64)
    call = lambda *one: linear_loss.tokens(one[0], one[1], given[2], one[2], -100, 3.0, 0.8)[:3]
    x, weight, _, bias = leaves(*given)
    assert torch.autograd.gradgradcheck(call, (x, weight, bias), fast_mode=True)
    found = []
    for loss in (
        lambda x, weight, bias: -linear_log_prob(x, weight, given[2], bias, softcap=2.0).sum(),
        lambda x, weight, bias: plain(x, weight, given[2], bias, softcap=2.0)[0].sum(),
    ):
        own = [one.detach().requires_grad_() for one in (x, weight, bias)]
        y = loss(*own)
        (grad,) = torch.autograd.grad(y, own[0], create_graph=True)
        (y + grad.square().sum()).backward()
        found.append([one.grad for one in own])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": lambda t: t.float()}, "target is a tensor .* expected a tensor of integers"),
        ({"target": lambda t: t[0]}, r"target is a tensor .* expected classes of shape \(3, 5\)"),
        ({"target": lambda t: t + CLASSES}, r"target \d+ is \d+, expected a class in \[0, 17\)"),
        ({"weight": lambda w: w[:, 1:]}, r"weight is a tensor .* expected shape \(C, K\)"),
        ({"weight": lambda w: w.float()}, "weight is torch.float32"),
        ({"weight": lambda w: w[:0]}, "a class or more"),
        ({"bias": lambda b: b[1:]}, r"bias is a tensor .* expected shape \(17,\)"),
        ({"softcap": lambda _: 0.0}, "softcap is 0.0 .* expected a number above 0"),
        ({"temperature": lambda _: -1.0}, "temperature is -1.0"),
    ],
)
def test_errors(change, words):
    names = ("input", "weight", "target", "bias")
    given = dict(zip(names, inputs(torch.device("cpu"), torch.float64))) | {"softcap": 2.0, "temperature": 1.0}
    for name, how in change.items():
        given[name] = how(given[name])
    with pytest.raises(cupyops.InputError, match=words):
        linear_log_prob(**given)


def test_errors_of_the_module():
    for options, words in (
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"z_loss": -0.1}, "z_loss is -0.1"),
    ):
        with pytest.raises(cupyops.InputError, match=words):
            LinearCrossEntropy(2, 3, **options)
    head = LinearCrossEntropy(2, 3, reduction="none")
    with pytest.raises(cupyops.InputError, match='None beside reduction="none"'):
        head(torch.ones(1, 2), torch.zeros(1, dtype=torch.long), num_items_in_batch=3)
    assert "softcap=None" in repr(head)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "z_loss": 0.1}])
def test_compiled_without_a_break(options):
    x, weight, target, _ = inputs(torch.device("cpu"), torch.float64)
    head = LinearCrossEntropy(WIDTH, CLASSES, dtype=torch.float64, **options)
    head.load_state_dict({"weight": weight})
    found = []
    for call in (head, torch.compile(head, backend="aot_eager", fullgraph=True)):
        (own,) = leaves(x)
        head.weight.grad = None
        loss = call(own, target)
        loss.backward()
        found.append([loss.detach(), own.grad, head.weight.grad])
    torch.testing.assert_close(*found)


def _of_func():
    torch.manual_seed(0)
    weight, target = torch.randn(9, 6, dtype=torch.float64), torch.tensor([0, 3, -100, 8])
    teacher, head = torch.ones(4, 6).double(), cupyops.nn.LinearCrossEntropy(6, 9, z_loss=0.1, dtype=torch.float64)
    return {
        "linear_log_prob": lambda x: cupyops.nn.linear_log_prob(x, weight, target, softcap=2.0).sum(),
        "LinearCrossEntropy": lambda x: head(x, target),
        "accuracy": lambda x: head(x, target, accuracy=True)[0],
        "jsd": lambda x: cupyops.nn.preference.jsd(x, weight, teacher, weight + 1),
    }


@pytest.mark.parametrize("name", _of_func())
def test_transforms_of_torch_func(name):
    function = _of_func()[name]
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(function, x)
    second = torch.autograd.functional.hessian(function, x)
    for found in (torch.func.grad(function)(x), torch.func.jacrev(function)(x), torch.func.jacfwd(function)(x)):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(function))(x.expand(2, 4, 6))[1], expected)
    torch.testing.assert_close(torch.func.hessian(function)(x), second)
