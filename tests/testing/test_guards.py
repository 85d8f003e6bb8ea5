"""Fences and poison, by themselves."""

from __future__ import annotations

import ctypes

import pytest
import torch
from faulty_operators import saving

from cupyops.testing import Call, Failure
from cupyops.testing.guards import FENCE, HUGE, NAN, ZONE, Guards, Poisoned

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.uint8,
    torch.bool,
]  # fmt: skip


def write(tensor, offset, size=1):
    """Zeros into memory, `offset` bytes from the tensor's first element."""
    ctypes.memset(tensor.data_ptr() + offset, 0, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_write_outside_is_found(dtype):
    end = 21 * dtype.itemsize
    for offset, place in ((end, "behind its end, the nearest 0"), (end + 99, "behind its end, the nearest 99")):
        with Guards() as guards:
            write(torch.empty(3, 7, dtype=dtype), offset)
        with pytest.raises(Failure, match=place):
            guards.check()
    for offset in (-1, -ZONE):
        with Guards() as guards:
            write(torch.empty(3, 7, dtype=dtype), offset)
        with pytest.raises(Failure, match=f"1 bytes before its start, the nearest {-offset} bytes off"):
            guards.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_inside_are_free(dtype):
    with Guards() as guards:
        tensor = torch.empty(3, 7, dtype=dtype)
        write(tensor, 0, 21 * dtype.itemsize)
    guards.check()


def test_between_elements():
    with Guards() as guards:
        tensor = torch.empty_strided((3, 4), (8, 2))
        write(tensor, 8, 4)
        guards.check()
        write(tensor, 12, 4)
    with pytest.raises(Failure, match="written to 4 bytes between its elements"):
        guards.check()


@pytest.mark.parametrize("make", [
    lambda x: torch.empty(3, 7), lambda x: torch.empty_like(x), lambda x: torch.empty_strided((3, 7), (1, 3)),
    lambda x: torch.empty_permuted((3, 7), (1, 0)), lambda x: x.new_empty(3, 7),
    lambda x: x.new_empty_strided((3, 7), (1, 3)), lambda x: torch.zeros(3, 7), lambda x: torch.zeros_like(x),
    lambda x: torch.ones_like(x), lambda x: torch.full((3, 7), 2.5), lambda x: x.new_full((3, 7), 2.5),
    lambda x: torch.full_like(x, 2.5, requires_grad=True),
])  # fmt: skip
def test_what_is_allocated_stays_what_it_was(make):
    x = torch.randn(3, 7)
    plain = make(x)
    with Guards() as guards:
        fenced = make(x)
    assert len(guards.fenced) == 1
    attributes = "shape", "dtype", "device", "requires_grad", "_version", "is_leaf", "_base"
    assert [getattr(fenced, a) for a in attributes] == [getattr(plain, a) for a in attributes]
    assert fenced.stride() == plain.stride() and fenced.data_ptr() % 64 == 0
    if "empty" not in guards.fenced[0].title:
        assert torch.equal(fenced, plain)
    assert (fenced.untyped_storage().nbytes() - plain.untyped_storage().nbytes()) == 2 * ZONE
    write(fenced, -1)
    with pytest.raises(Failure):
        guards.check()


def test_out_and_nothing_are_left_alone():
    target = torch.randn(3)
    with Guards() as guards:
        assert torch.zeros(3, out=target) is target
        assert torch.empty(0, 5).resize_(3).shape == (3,)
        assert torch.empty(3, device="meta").is_meta
    assert not guards.fenced


def test_inputs_keep_values_strides_and_surroundings():
    whole = torch.arange(60.0).view(6, 10)
    given = [
        whole[1:5, 2:8:2], whole.t(), torch.arange(3).expand(2, 3), torch.tensor(2.5), torch.empty(0, 3),
        torch._neg_view(whole[0]), torch.randn(4, requires_grad=True),
    ]  # fmt: skip
    with Guards() as guards:
        call = guards.around(Call(given))
    assert len(guards.fenced) == len(given)
    for fenced, tensor in zip(call.all_tensors(), given, strict=True):
        assert torch.equal(fenced, tensor) and fenced.stride() == tensor.stride()
        assert fenced.requires_grad == tensor.requires_grad and fenced.is_leaf and fenced.is_neg() == tensor.is_neg()
        assert fenced.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    guards.check()


@pytest.mark.parametrize("position", [0, 11, 13, 15, 29, 31, 47, 49, 59])
def test_writes_around_a_strided_input_are_found(position):
    whole = torch.arange(60.0).view(6, 10)
    view = whole[1:5, 2:8:2]
    inside = position in {10 * row + column for row in range(1, 5) for column in (2, 4, 6)}
    assert not inside
    guards = Guards()
    fenced = guards.around(Call(view)).all_tensors()[0]
    write(fenced, 4 * (position - 12), 4)
    if position == 0:
        return guards.check()  # zero was written over zero: there is nothing to see
    with pytest.raises(Failure, match="input 0"):
        guards.check()


def allocates_in_backward(grad_y, x):
    grad_x = torch.empty_like(grad_y)
    write(grad_x, grad_x.numel() * 4 + 8)
    return grad_x


@pytest.mark.parametrize("method", [False, True], ids=["grad", "backward"])
def test_what_backward_allocates_is_seen(method):
    def gradient():
        x = torch.randn(5, requires_grad=True)
        y = saving(torch.clone, allocates_in_backward)(x).sum()
        return torch.autograd.grad(y, x)[0] if not method else (y.backward(), x.grad)[1]

    with Poisoned(NAN) as memory:
        assert gradient().isnan().all()
    assert memory.count == 1
    with Guards() as guards:
        found = gradient()
    with pytest.raises(
        Failure, match="gradient, empty_like.*written to 1 bytes behind its end, the nearest 8 bytes off"
    ):
        guards.check([("gradient", found)])
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward


def test_results_are_named():
    with Guards() as guards:
        y = torch.empty(5)
        write(y, 20)
    with pytest.raises(Failure, match=r"^output, empty\(\) of shape \(5,\): written to 1 bytes behind"):
        guards.check([("output", y), ("gradient 0", None)])


def test_the_fence_is_no_value_that_kernels_write():
    assert FENCE not in (0, 0xFF)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison(dtype):
    found = []
    for poison in (NAN, HUGE):
        with Poisoned(poison) as memory:
            tensor = torch.empty_strided((3, 2), (4, 2), dtype=dtype)
            zeros = torch.zeros(3, dtype=dtype)
        assert memory.count == 1 and tensor._version == 0 and not zeros.any()
        found.append(tensor)
    first, second = found
    assert first.isnan().all() == (dtype.is_floating_point or dtype.is_complex)
    assert not second.isnan().any() and (first != second).all() and (second == second[0, 0]).all()


def test_poison_leaves_the_simulator_its_knowledge():
    """Whatever it is filled with, the simulator knows that no kernel has written there."""
    import cupyops
    from cupyops import _simulate

    with cupyops.simulate(), Poisoned(NAN):
        tensor = torch.empty(3)
    storage = tensor.untyped_storage()
    assert storage in _simulate._blank and _simulate._blank[storage] == tensor._version
