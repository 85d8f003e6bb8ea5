"""Layouts: the strides of PyTorch's own elementwise operators, and no copy where none is needed."""

import itertools

import pytest
import torch

from cupyops._util.strides import alignment, alike, is_dry, restride

SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 3, 4), (2, 1, 4), (2, 3, 0, 4), (2, 3, 4, 5), (1, 3, 1, 5), (2, 3, 4, 5, 2)]


def significant(x):
    """The strides along which there is a second element."""
    return [(dim, stride) for dim, (size, stride) in enumerate(zip(x.shape, x.stride())) if size > 1 and x.numel()]


def views(shape):
    """Tensors of `shape` laid out in every way that a program makes."""
    numel = 1
    for size in shape:
        numel *= size
    x = torch.arange(float(numel)).view(shape)
    yield x
    for order in itertools.islice(itertools.permutations(range(len(shape))), 24):
        stored = x.permute(order).contiguous()
        inverse = [order.index(i) for i in range(len(order))]
        yield stored.permute(inverse)
    if x.dim() == 4:
        yield x.contiguous(memory_format=torch.channels_last)
    if x.dim() == 5:
        yield x.contiguous(memory_format=torch.channels_last_3d)
    for dim in range(x.dim()):
        yield x.repeat_interleave(2, dim).narrow(dim, 0, 2 * shape[dim])[(slice(None),) * dim + (slice(None, None, 2),)]
        if shape[dim]:
            yield x.narrow(dim, 0, 1).expand(shape)
    if x.dim() >= 2:
        yield x.transpose(0, -1).contiguous().transpose(0, -1).repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_has_the_strides_of_pytorchs_elementwise_operators(shape):
    for x in views(shape):
        output, _ = alike(x)
        expected = torch.neg(x)
        assert output.shape == expected.shape and significant(output) == significant(expected), x.stride()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_come_laid_out_as_the_output(shape):
    for x, y in zip(views(shape), reversed(list(views(shape)))):
        output, first, second = alike(x, y)
        for given, laid in ((x, first), (y, second)):
            assert laid.stride() == output.stride() and torch.equal(laid, given)
        if x.numel():
            flat = torch.empty(output.untyped_storage().nbytes() // 4).set_(
                first.untyped_storage(), first.storage_offset(), (x.numel(),), (1,)
            )
            assert sorted(flat.tolist()) == sorted(x.flatten().tolist()), "every element, once, in one flat run"


def test_dense_tensors_are_not_copied():
    x = torch.randn(2, 3, 4, 5)
    for dense in (x, x.contiguous(memory_format=torch.channels_last), x.permute(3, 1, 0, 2)):
        _, same = alike(dense)
        assert same is dense
        output, same, other = alike(dense, dense.clone(memory_format=torch.preserve_format))
        assert same is dense and other.stride() == dense.stride()
        assert output.data_ptr() not in (dense.data_ptr(), other.data_ptr())


def test_an_output_is_its_own_memory():
    x = torch.ones(3)
    output, same = alike(x)
    output.fill_(7)
    assert same is x and x.tolist() == [1.0] * 3


def test_restride():
    x = torch.arange(6.0).view(2, 3)
    assert restride(x, (3, 1)) is x
    turned = restride(x, (1, 2))
    assert turned.stride() == (1, 2) and torch.equal(turned, x) and turned.dtype == x.dtype
    expanded = restride(torch.tensor(2.0).expand(2, 3), (3, 1))
    assert expanded.stride() == (3, 1) and expanded.tolist() == [[2.0] * 3] * 2


def test_restride_resolves_the_negative_bit():
    """Memory that a kernel reads as it stands."""
    x = torch.randn(3, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    laid = restride(x, (1,))
    assert not laid.is_neg() and torch.equal(laid, x)
    same = restride(x, x.stride())
    assert not same.is_neg() and torch.equal(same, x)


def test_on_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 3, 4).transpose(0, 2)
        output, first, second = alike(x, torch.empty(4, 3, 2))
        assert output.stride() == first.stride() == second.stride() == torch.neg(x).stride()


def test_tensors_of_a_graph_that_is_made_functional_have_no_address():
    """Of them too what a launch depends on may be asked, as where torch.compile sees through a call."""
    seen = []

    def function(x):
        seen.append((is_dry(x), alignment(x, 16)))
        return x * 2

    functional = torch.func.functionalize(function)
    x = torch.ones(5)[1:]
    assert torch.equal(functional(x), 2 * x) and seen == [(True, 16)]
