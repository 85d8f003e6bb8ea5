"""Checks of arguments: each names the argument, what it was and what it should be."""

import numpy as np
import pytest
import torch

import cupyops
from cupyops._util import arguments
from cupyops.errors import CupyopsError, InputError


def refused(function, *args, **kwargs):
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, CupyopsError) and isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize("value", [1, None, "x", [1.0], np.ones(2)])
def test_tensor(value):
    arguments.tensor("x", torch.ones(2))
    arguments.tensor("x", torch.nn.Parameter(torch.ones(2)))
    message = refused(arguments.tensor, "weight", value)
    assert message.startswith("weight is ") and type(value).__name__ in message and "expected a tensor" in message


def test_an_array_beside_tensors():
    """Shown without what is in it; and where it comes from, as a rule."""
    message = refused(arguments.tensor, "weight", np.ones((100, 2)))
    assert message == (
        "weight is an array of shape (100, 2), float64 (ndarray), expected a tensor; inside cupyops.vjp arrays are tensors: "
        "pass it to vjp as an argument"
    )
    weight = np.ones((2, 2))
    with pytest.raises(InputError, match="pass it to vjp as an argument"):
        cupyops.vjp(lambda x: cupyops.linear(x, weight), np.ones((2, 2)))
    assert refused(arguments.tensor, "x", np.float64(1.0)).endswith("expected a tensor, or an array that offers DLPack")


def test_optional_tensor():
    arguments.optional_tensor("bias", None)
    arguments.optional_tensor("bias", torch.ones(2))
    assert refused(arguments.optional_tensor, "bias", 3).startswith("bias is 3 (int), expected a tensor")


def test_floating():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        arguments.floating("x", torch.ones(2, dtype=dtype))
    for dtype in (torch.int64, torch.bool, torch.complex64):
        message = refused(arguments.floating, "x", torch.ones(2, 3, dtype=dtype))
        assert message == f"x is a tensor of shape (2, 3), {dtype} on cpu, expected a tensor of a floating-point dtype"
    assert "expected a tensor" in refused(arguments.floating, "x", 1.0)


def test_same_device():
    cpu, meta = torch.ones(2), torch.ones(2, device="meta")
    arguments.same_device(x=cpu, weight=None, bias=cpu)
    assert (
        refused(arguments.same_device, x=cpu, weight=None, bias=meta)
        == "bias is on meta, but x is on cpu; expected one device"
    )
    assert (
        refused(arguments.same_device, x=None, weight=meta, bias=cpu)
        == "bias is on cpu, but weight is on meta; expected one device"
    )


def test_same_dtype():
    a, b = torch.ones(2), torch.ones(2, dtype=torch.float64)
    arguments.same_dtype(x=a, weight=None, bias=a)
    assert (
        refused(arguments.same_dtype, x=a, weight=b)
        == "weight is torch.float64, but x is torch.float32; expected one dtype"
    )


@pytest.mark.parametrize("function", [arguments.same_device, arguments.same_dtype])
def test_same_with_nothing_given(function):
    function(x=None, weight=None)


@pytest.mark.parametrize(
    ("value", "ndim", "expected"), [(0, 3, 0), (2, 3, 2), (-1, 3, 2), (-3, 3, 0), (0, 0, 0), (-1, 0, 0)]
)
def test_dim(value, ndim, expected):
    assert arguments.dim("dim", value, ndim) == expected
    assert torch.ones((1,) * ndim).sum(value).dim() == max(ndim - 1, 0)  # PyTorch takes it too


@pytest.mark.parametrize(("value", "ndim"), [(3, 3), (-4, 3), (1, 0), (-2, 0)])
def test_dim_out_of_range(value, ndim):
    message = refused(arguments.dim, "dim", value, ndim)
    rank = max(ndim, 1)
    assert message == f"dim is {value} (int), expected a dimension in [{-rank}, {rank - 1}]"
    with pytest.raises(IndexError):
        torch.ones((1,) * ndim).sum(value)


@pytest.mark.parametrize("value", [1.0, "1", None, True, (1,), torch.tensor(1)])
def test_dim_of_another_type(value):
    assert "expected an int" in refused(arguments.dim, "dim", value, 3)


def test_choice():
    arguments.choice("reduction", "mean", ("none", "mean"))
    assert (
        refused(arguments.choice, "reduction", "avg", ("none", "mean"))
        == "reduction is 'avg' (str), expected one of 'none', 'mean'"
    )
    for value in (None, 3, torch.ones(2), np.ones(2), [1], {}):
        assert "expected one of 'none', 'mean'" in refused(arguments.choice, "reduction", value, ("none", "mean"))


@pytest.mark.parametrize(("value", "expected"), [
    (3, [3, 3]), ((3,), [3, 3]), ([3], [3, 3]), ((1, 2), [1, 2]), ([1, 2], [1, 2]), (torch.Size([4, 5]), [4, 5]),
    (0, [0, 0]),
])  # fmt: skip
def test_ints(value, expected):
    assert arguments.ints("stride", value, 2, 0) == expected


@pytest.mark.parametrize("value", [1.0, "12", None, True, (1, 2, 3), (), (1, 2.0), (True, 1), torch.tensor([1, 2])])
def test_ints_of_another_type(value):
    assert "expected an int or 2 ints" in refused(arguments.ints, "stride", value, 2, 0)


@pytest.mark.parametrize("value", [0, (1, 0), (-1, 1)])
def test_ints_that_are_too_small(value):
    message = refused(arguments.ints, "stride", value, 2, 1)
    assert message.startswith("stride is ") and message.endswith("expected at least 1")


def test_symbolic_integers_pass():
    """A shape under torch.compile is no Python int."""

    def f(x):
        return x.new_zeros(arguments.ints("size", x.shape[0], 2, 0)), arguments.dim("dim", -1, x.dim())

    torch._dynamo.reset()
    zeros, dim = torch.compile(f, fullgraph=True, dynamic=True, backend="eager")(torch.ones(5))
    assert zeros.shape == (5, 5) and dim == 0


def test_description_is_short():
    assert arguments.describe(3) == "3 (int)"
    assert arguments.describe(torch.ones(2, 3)) == "a tensor of shape (2, 3), torch.float32 on cpu"
    assert len(arguments.describe("x" * 1000)) < 80 and arguments.describe("x" * 1000).endswith("... (str)")


def test_errors_form_one_family():
    for name in ("InputError", "SourceError", "CompileError", "LaunchError", "MissingDependencyError"):
        assert issubclass(getattr(cupyops, name), cupyops.CupyopsError)
    assert issubclass(cupyops.InputError, ValueError) and issubclass(cupyops.LaunchError, RuntimeError)
    assert issubclass(cupyops.MissingDependencyError, ImportError) and issubclass(
        cupyops.SourceError, FileNotFoundError
    )
