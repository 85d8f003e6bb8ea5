"""Views: the simulator knows what lies between their elements, which no kernel sees that is given an address alone."""

import numpy as np
import pytest
import torch

import cupyops
from cupyops import Kernel
from cupyops._kernel.launch import faults
from cupyops.errors import SimulatorError
from cupyops.simulator.errors import OutOfBounds

COPY = "__global__ void copy(const float* x, float* y, int n) { int i = threadIdx.x; if (i < n) y[i] = x[i]; }\n"
STRIDED = COPY.replace("int n", "int n, int step").replace("x[i]", "x[i * step]")
VECTORS = "__global__ void copy(const float4* x, float4* y, int n) { int i = threadIdx.x; if (i < n) y[i] = x[i]; }\n"


def matrix():
    return torch.arange(16.0).reshape(8, 2)


def test_a_column_read_as_if_it_were_contiguous():
    v, y = matrix()[:, 0], torch.zeros(8)
    with cupyops.simulate(), pytest.raises(OutOfBounds) as caught:
        Kernel(COPY, "copy")[1, 32](v, y, 8)
    message = str(caught.value)
    assert "copy: read of 4 bytes between the elements of `x`" in message and "thread (1,0,0)" in message
    assert "offset 4: it is a view of shape (8,) and strides (2,)" in message
    assert "give its .contiguous(), for an output a contiguous tensor, or pass the strides; Kernel(..., " in message


def test_a_column_written_as_if_it_were_contiguous():
    x = matrix()
    with cupyops.simulate(), pytest.raises(OutOfBounds, match="write of 4 bytes between the elements of `y`"):
        Kernel(COPY, "copy")[1, 32](torch.ones(8), x[:, 1], 8)
    assert x[1:, 1].tolist() == [3, 5, 7, 9, 11, 13, 15]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2].flatten()[::2],
        lambda x: x.view(2, 4, 2)[:, :2].flatten(1)[:, ::3],
        lambda x: x.flip(0)[:, 1],
        lambda x: torch.as_strided(x, (3, 2), (5, 2)),
        lambda x: torch.as_strided(x, (2, 2), (1, 9)),
        lambda x: x[1:, 1].expand(2, 7),
    ],
)
def test_other_views(view):
    """What lies between their elements is touched by one thread at least, where as many bytes are read as the view spans."""
    v = view(matrix())
    last = sum((size - 1) * stride for size, stride in zip(v.shape, v.stride()))
    if last + 1 == v.unique().numel():
        pytest.skip("this one has no gaps")  # flip copies
    with cupyops.simulate(), pytest.raises(OutOfBounds, match="between the elements of `x`"):
        Kernel(COPY, "copy")[1, 32](v, torch.zeros(16), last + 1)


def test_a_kernel_that_goes_by_the_strides_touches_nothing_else():
    v, y = matrix()[:, 1], torch.zeros(8)
    with cupyops.simulate():
        Kernel(STRIDED, "copy")[1, 32](v, y, 8, v.stride(0))
    assert torch.equal(y, v)


def test_a_kernel_that_says_so_may():
    v, y = matrix()[:, 0], torch.zeros(8)
    with cupyops.simulate():
        Kernel(COPY, "copy", strided=True)[1, 32](v, y, 8)
    assert y.tolist() == list(range(8))


def test_what_another_argument_holds_is_no_gap():
    x = matrix()
    with cupyops.simulate():
        Kernel("__global__ void f(const float* x, const float* y, float* z) { z[0] = x[1] + x[2]; }\n", "f")[1, 1](
            x[:, 0], x[:, 1], z := torch.zeros(1)
        )
    assert z.item() == 3


def test_an_address_in_a_struct_is_no_gap():
    x, z = matrix(), torch.zeros(1)
    code = "struct P { const float* p; }; __global__ void f(const float* x, P p, float* z) { z[0] = p.p[1] + x[2]; }\n"
    with cupyops.simulate():
        at = np.array([cupyops.address(x)], np.uint64)
        Kernel(code, "f")[1, 1](x[:, 0], at, z)
    assert z.item() == 3


def test_wide_accesses_and_the_launches_that_follow():
    x = torch.arange(24.0).reshape(2, 12)
    y = torch.zeros(2, 12)
    with cupyops.simulate():
        vectors = Kernel(VECTORS, "copy")
        vectors[1, 32](x[:, :8], y, 2)  # the first row alone
        with pytest.raises(OutOfBounds, match="read of 16 bytes between the elements"):
            vectors[1, 32](x[:, :10], y, 3)
        vectors[1, 32](x, y, 6)  # what the fault left out is there again
    assert torch.equal(x, y)


def test_dense_views_have_none():
    x, y = matrix(), torch.zeros(16)
    for view in (x.t(), x.view(2, 4, 2).permute(2, 0, 1), x[:, :1].expand(8, 2)[:0], x[3:]):
        with cupyops.simulate():
            Kernel(COPY, "copy")[1, 32](view, y, view.numel())


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"strided": True}, False)])
def test_a_launch_with_a_view_warns_where_that_is_asked_for(monkeypatch, recwarn, options, warned):
    monkeypatch.setattr(faults, "debug", True)
    copy, x, y = Kernel(COPY, "copy", **options), matrix(), torch.zeros(16)
    with cupyops.simulate():
        copy[1, 32](x, y, 16)
        assert not recwarn
        for _ in range(2):
            copy[1, 32](x.t(), y, 16)
    assert [str(one.message) for one in recwarn] == (
        [
            "copy: argument 1 of 3 is a view of shape (2, 8) and strides (1, 2), of which a kernel gets the address alone: "
            "give its .contiguous(), for an output a contiguous tensor, or say Kernel(..., strided=True) where the kernel "
            "is told the strides"
        ]
        if warned
        else []
    )
    assert not warned or recwarn[0].filename == __file__


def test_the_kernels_of_the_library_are_told_strides(monkeypatch, recwarn):
    monkeypatch.setattr(faults, "debug", True)
    with cupyops.simulate():
        cupyops.layer_norm(torch.randn(4, 8, 2)[..., 0].t(), (4,))
        cupyops.elementwise("views_of_twice(T x) -> T y", "y = 2 * x")(torch.randn(4, 8).t())
    assert not recwarn and issubclass(OutOfBounds, SimulatorError)
