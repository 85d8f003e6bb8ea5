import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


class TestAdd(OperatorContract):
    function = staticmethod(cupyops.add)
    torch_function = staticmethod(torch.add)
    kernels = {
        *("add_fwd_flat", "add_fwd_params", "add_fwd_strided", "add_number"),
        *("sum_fwd_fold", "sum_fwd_finalize"),
    }

    def samples(self, make: Make):
        for shape in [(2, 3, 4, 5), (5,), (2059,), (), (0, 3)]:
            yield Sample(make(*shape), make(*shape))
        yield Sample(make(3, 7), make(3, 7), alpha=-0.3)
        yield Sample(make(3, 7), make(3, 7), alpha=2)
        yield from self.broadcasts(make)
        for number, alpha in [(2.5, 1), (-3, 0.25), (True, 1), (1, 0)]:
            yield Sample(make(3, 7), number, alpha=alpha)

    def broadcasts(self, make: Make):
        yield Sample(make(3, 7), make(7))
        yield Sample(make(7), make(3, 7), alpha=0.5)
        yield Sample(make(3, 1), make(1, 7))
        yield Sample(make(3, 8), make(), alpha=3)
        yield Sample(make(1), make(4, 16))
        yield Sample(make(9, 16), make(9, 1))
        for shape in [(2, 3, 4, 8), (2, 3, 5, 7)]:  # spans that are whole vectors, and not
            yield Sample(make(*shape), make(3, 1, 1))
            yield Sample(make(3, 1, 1), make(*shape), alpha=0.5)
        yield Sample(make(2, 3, 1, 8), make(1, 5, 1))
        yield Sample(make(2, 0, 3), make(3))
        # six dimensions in turn broadcast: more than a kernel walks, so one is copied first
        yield Sample(make(2, 1, 2, 1, 2, 1, 2), make(1, 2, 1, 2, 1, 2, 1))

    def small_samples(self, make: Make):
        return (sample for sample in self.samples(make) if sample.args[0].numel() < 100)

    def layouts(self, make: Make):
        yield from super().layouts(make)
        last = lambda *shape: make(*shape).detach().to(memory_format=torch.channels_last).requires_grad_()
        yield Sample(last(2, 8, 3, 5), last(2, 8, 3, 5))
        yield Sample(last(2, 8, 3, 5), make(2, 8, 3, 5))
        yield Sample(make(2, 8, 3, 5), last(2, 8, 3, 5), alpha=0.5)
        yield Sample(last(2, 8, 3, 5), make(8, 1, 1))
        yield Sample(make(8, 24), make(24, 8).detach().t().requires_grad_())
        yield Sample(make(8, 24).detach()[:, :16].requires_grad_(), make(16))
        yield Sample(make(1, 24).detach().expand(8, 24).requires_grad_(), make(8, 24))


def test_vectors_and_single_elements_agree(device):
    """The 16-byte path, the misaligned path and the path of odd sizes of a broadcast launch."""
    wide = torch.randn(33, 65, device=device)
    for x in (wide[:, :64], wide[:, 1:], wide):
        row, column = torch.randn(x.shape[1], device=device), torch.randn(33, 1, device=device)
        for other in (row, column, torch.cat([row, row])[1 : 1 + len(row)]):
            torch.testing.assert_close(cupyops.add(x, other, alpha=0.5), torch.add(x, other, alpha=0.5))


@pytest.mark.gpu
def test_more_than_2_to_31_units():
    """Odd rows, so that the scalar path divides indices above 2^31."""
    rows, columns = 2**16 + 1, 2**15 + 1
    x = torch.zeros(rows, columns, dtype=torch.float16, device="cuda")
    other = torch.arange(columns, device="cuda").remainder(997).to(x.dtype)
    y = cupyops.add(x, other)
    assert torch.equal(y[-1], other) and torch.equal(y[0], other) and torch.equal(y[rows // 2], other)


def test_special_values(device):
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42], device=device)
    for other in (odd[:, None], 1.0, -0.0, float("inf"), float("nan"), 1e300):
        y, expected = cupyops.add(odd, other), torch.add(odd, other)
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
        number = ~expected.isnan()
        assert torch.equal(y[number].signbit(), expected[number].signbit())
    half = odd.half()
    torch.testing.assert_close(cupyops.add(half, 1e39), torch.add(half, 1e39), rtol=0, atol=0, equal_nan=True)


MIXED = [
    (torch.arange(6).view(2, 3), torch.arange(3), 2),
    (torch.arange(3), 1.5, 0.5),
    (torch.arange(3), 2**60, 3),
    (torch.tensor([True, False]), True, True),
    (torch.ones(3), torch.arange(3), 0.5),
    (torch.ones(3), torch.tensor(2.0, dtype=torch.float64), 1),
    (torch.ones(3, dtype=torch.float16), torch.ones(2, 1), 1),
    (torch.ones(3), torch.ones(3, dtype=torch.complex64), 1j),
    (torch.ones(3), 2j, 1),
    (2, torch.ones(3), 0.5),
    (2, 3, 1),
    (torch.ones(3), torch.ones(3), torch.tensor(0.5)),
]


@pytest.mark.parametrize(("x", "other", "alpha"), MIXED, ids=str)
def test_everything_that_torch_adds(device, x, other, alpha):
    x, other = (value.to(device) if isinstance(value, torch.Tensor) else value for value in (x, other))
    y, expected = cupyops.add(x, other, alpha=alpha), torch.add(x, other, alpha=alpha)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected)


def test_gradient_of_mixed_dtypes(device):
    x = torch.randn(2, 3, device=device, dtype=torch.float16, requires_grad=True)
    other = torch.randn(3, device=device, requires_grad=True)
    ours = torch.autograd.grad(cupyops.add(x, other, alpha=2).sum(), (x, other))
    assert [g.dtype for g in ours] == [torch.float16, torch.float32]
    torch.testing.assert_close(ours[1], torch.full((3,), 4.0, device=device))


@pytest.mark.gpu
def test_number_on_the_cpu():
    x, number = torch.ones(3, device="cuda"), torch.tensor(2.0)
    assert torch.equal(cupyops.add(x, number), torch.add(x, number))


def test_nothing_is_kept_for_backward(device):
    """Without the inputs being kept alive, changing them in place is no error, and changes no gradient."""
    leaf, other = (
        torch.randn(3, 7, device=device, requires_grad=True),
        torch.randn(7, device=device, requires_grad=True),
    )
    x = leaf * 1
    y = cupyops.add(x, other, alpha=3)
    x.detach().zero_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cupyops.add(leaf, other, alpha=3)
    assert not kept
    grads = torch.autograd.grad(y.sum(), (leaf, other))
    torch.testing.assert_close(grads, (torch.ones_like(leaf), torch.full_like(other, 9.0)))


BAD = [
    ((torch.ones(2), torch.ones(3)), {}, "input of shape"),
    ((torch.ones(2, dtype=torch.float16), torch.ones(3)), {}, "input of shape"),
    ((None, torch.ones(3)), {}, "input"),
    ((torch.ones(3), None), {}, "other"),
    ((torch.ones(3), "1"), {}, "other"),
    ((torch.ones(3), 2**70), {}, "other"),
    ((torch.ones(3), torch.ones(3)), {"alpha": None}, "alpha"),
    ((torch.ones(3), torch.ones(3)), {"alpha": 1j}, "alpha"),
    ((torch.ones(3), torch.ones(3)), {"alpha": True}, "alpha"),
    ((torch.ones(3), torch.ones(3)), {"alpha": 1e39}, "alpha"),
    ((torch.ones(3), torch.ones(3)), {"alpha": 2**70}, "alpha"),
    ((torch.ones(3), torch.ones(3)), {"alpha": torch.ones(2)}, "alpha"),
    ((torch.arange(3), torch.arange(3)), {"alpha": 0.5}, "alpha"),
    ((torch.ones(3), torch.ones(3, dtype=torch.float8_e4m3fn)), {}, "other"),
    ((torch.ones(3), torch.ones(3, device="meta")), {}, "other is on meta"),
]


@pytest.mark.parametrize(("args", "kwargs", "culprit"), BAD, ids=str)
def test_bad_input(args, kwargs, culprit):
    with pytest.raises(cupyops.InputError, match=culprit):
        cupyops.add(*args, **kwargs)
