"""Hazards of layouts: each catches an operator that takes one kind of view for another."""

import pytest
import torch
from broken_operators import Broken, normal
from faulty_operators import eager

from cupyops.testing import check
from cupyops.testing.call import Call
from cupyops.testing.families.layouts import _pair


def as_if_contiguous(x, offset=None):
    """What a kernel reads that looks at the address alone."""
    strides = torch.empty(x.shape, device="meta").stride()
    wrong = torch.as_strided(x, x.shape, strides, x.storage_offset() if offset is None else offset)
    return torch.empty_like(x).copy_(wrong)


def relu_where(condition):
    """A relu that reads some matrices as if they were contiguous."""
    return lambda x: torch.relu(as_if_contiguous(x) if x.dim() == 2 and condition(x) else x)


def wide_loads_always(x):
    if eager(x) and x.is_contiguous() and x.storage_offset() % 4:
        return torch.relu(as_if_contiguous(x, x.storage_offset() // 4 * 4))
    return torch.relu(x)


def wide_loads_from_the_storage(x):
    if eager(x) and x.is_contiguous() and x.storage_offset() and x.storage_offset() % 4 == 0:
        return torch.relu(as_if_contiguous(x, 0))
    return torch.relu(x)


def forgets_that_channels_are_last(x):
    wrong = x.dim() == 4 and x.stride(1) == 1 and x.stride(-1) == x.shape[1]
    return torch.relu(as_if_contiguous(x) if wrong else x)


def forgets_the_negative_bit(x):
    return torch.relu(torch._neg_view(x) if eager(x) and x.is_neg() else x)


def forgets_the_conjugate_bit(x):
    return (x.conj() if eager(x) and x.is_conj() else x) * 2


def detaches_what_is_given_twice(x, weight):
    return x * (weight.detach() if weight is x else weight)


def contiguous_always(x):
    return torch.relu(x).contiguous()


def contiguous_where_channels_are_last(x):
    y = torch.relu(x)
    return y.contiguous() if y.dim() == 4 else y


def small_images():
    return [normal(2, 3, 4, 5)]


def matrix():
    return [normal(3, 37)]


BROKEN = {
    "misaligned": Broken(wide_loads_always, torch.relu, matrix),
    "storage_offset": Broken(wide_loads_from_the_storage, torch.relu, matrix),
    "strided": Broken(relu_where(lambda x: x.stride(-1) == 2), torch.relu, matrix),
    "sliced": Broken(relu_where(lambda x: x.stride(-1) == 1 and x.stride(0) > x.shape[-1]), torch.relu, matrix),
    "transposed": Broken(relu_where(lambda x: x.stride(0) == 1 < x.stride(-1)), torch.relu, matrix),
    "channels_last": Broken(forgets_that_channels_are_last, torch.relu, small_images),
    "expanded": Broken(relu_where(lambda x: 0 in x.stride()), torch.relu, matrix),
    "negative_bit": Broken(forgets_the_negative_bit, torch.relu, matrix),
    "conjugate_bit": Broken(
        forgets_the_conjugate_bit,
        lambda x: x * 2,
        lambda: [torch.view_as_complex(normal(3, 5, 2, requires_grad=False))],
    ),
    "same_tensor_twice": Broken(
        detaches_what_is_given_twice, torch.mul, lambda: [normal(3, 37), normal(3, 37, seed=1)]
    ),
    "output_strides": Broken(contiguous_always, torch.relu, matrix),
    "output_strides: channels_last": Broken(contiguous_where_channels_are_last, torch.relu, small_images),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_caught(fault):
    BROKEN[fault].assert_caught_by(fault.partition(":")[0])


def test_views_are_what_they_are_called():
    """Each hazard's view reaches the function: of the right kind, with the values of the sample."""
    seen = {}

    def watched(x):
        seen.setdefault(hazard, []).append(x.detach())
        return torch.relu(x)

    sample = normal(3, 37)
    for hazard in ("misaligned", "storage_offset", "strided", "sliced", "transposed", "negative_bit"):
        assert check(watched, [sample], reference=torch.relu, only=hazard).passed
        assert all(torch.equal(x, sample) for x in seen[hazard])
    kinds = {
        "misaligned": lambda x: x.is_contiguous() and x.data_ptr() % 16,
        "storage_offset": lambda x: x.is_contiguous() and x.storage_offset() and not x.data_ptr() % 16,
        "strided": lambda x: x.stride() == (74, 2),
        "sliced": lambda x: x.stride() == (111, 1) and x.storage_offset() == 37,
        "transposed": lambda x: x.stride() == (1, 3),
        "negative_bit": lambda x: x.is_neg(),
    }
    for hazard, kind in kinds.items():
        assert any(map(kind, seen[hazard])), hazard


def test_integer_tensors_are_views_too():
    def gather(x, index):
        return x.gather(-1, as_if_contiguous(index) if index.stride(-1) == 2 else index)

    index = torch.tensor([[0, 5, 2], [7, 1, 3]])
    report = check(gather, [normal(2, 9), index], reference=lambda x, i: x.gather(-1, i), only="strided", shrink=False)
    assert not report.passed


def test_pair_wants_one_shape_and_dtype():
    assert _pair(Call(normal(3), normal(4), [normal(3)])) == (0, 2)
    assert _pair(Call(normal(3), normal(3, dtype=torch.float64), torch.arange(3))) is None
