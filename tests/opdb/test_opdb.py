"""The operators against PyTorch's own samples of them (`torch.testing._internal`'s op_db), which no one here wrote.

Every sample: result, strides and every gradient equal to PyTorch's in the same dtype, from contiguous and from
non-contiguous inputs; every input that PyTorch calls an error is refused. On the CPU that is the reference route, on a GPU
the kernels.

Left out, each for its reason:
- samples with `out=`: no function here has that argument (the database has none today, and a new one fails the test);
- past `LIMIT` samples of one operator and dtype, evenly chosen ones stand for all: max_pool2d has 1440, nearly alike;
- what is in `REFUSED`: PyTorch computes something there, and the function here says no.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract import assert_as_good_as_torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten

import cupyops
from cupyops.errors import InputError

LIMIT = 48

FUNCTIONS = {
    "nn.functional.relu": "relu",
    "nn.functional.gelu": "gelu",
    "nn.functional.silu": "silu",
    "add": "add",
    "matmul": "matmul",
    "nn.functional.linear": "linear",
    "nn.functional.conv2d": "conv2d",
    "nn.functional.max_pool2d": "max_pool2d",
    "softmax": "softmax",
    "log_softmax": "log_softmax",
    "nn.functional.nll_loss": "nll_loss",
    "nn.functional.cross_entropy": "cross_entropy",
    "nn.functional.layer_norm": "layer_norm",
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64]

# (operator, dtype) that PyTorch takes and the function here refuses with an InputError
REFUSED = {
    ("softmax.with_dtype", torch.complex64): "softmax(dtype=real) of a complex input drops the imaginary part",
    ("log_softmax.with_dtype", torch.complex64): "log_softmax(dtype=real) of a complex input drops the imaginary part",
}

OPS = [info for info in op_db if info.name in FUNCTIONS]


def named(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return ".".join(filter(None, (FUNCTIONS[value.name], value.variant_test_name)))


every_op = pytest.mark.parametrize("info", OPS, ids=named)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=named)


def test_every_operator_is_in_the_database():
    assert {info.name for info in OPS} == set(FUNCTIONS)


def ours(info: Any, sample: Any) -> Any:
    return getattr(cupyops, FUNCTIONS[info.name])(sample.input, *sample.args, **sample.kwargs)


def theirs(info: Any, sample: Any) -> Any:
    return info.op(sample.input, *sample.args, **sample.kwargs)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a result or a sample."""
    if hasattr(value, "kwargs"):
        value = (value.input, value.args, value.kwargs)
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def spread(samples: list[Any]) -> list[Any]:
    """At most LIMIT of them, evenly chosen, the first and the last among them."""
    if len(samples) <= LIMIT:
        return samples
    return [samples[round(i * (len(samples) - 1) / (LIMIT - 1))] for i in range(LIMIT)]


def samples_of(info: Any, device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """sample_inputs and reference_inputs, each as it is and with every tensor non-contiguous."""
    grad = dtype in info.supported_backward_dtypes(device.type)
    inputs = spread(list(info.sample_inputs(device, dtype, requires_grad=grad)))
    if info.reference_inputs_func is not None:
        inputs += spread(list(info.reference_inputs(device, dtype, requires_grad=grad)))
    for sample in inputs:
        assert "out" not in sample.kwargs, "a sample with out=, which no function here has"
        yield sample
        yield sample.noncontiguous()


def doubled(sample: Any) -> Any:
    """The same sample in double precision, where sums are exact enough to tell who is nearer."""

    wide = sample.transform(lambda value: widened(value.detach()).requires_grad_(value.requires_grad))
    if wide.kwargs.get("dtype") is not None and wide.kwargs["dtype"].is_floating_point:
        wide.kwargs["dtype"] = torch.float64
    return wide


def widened(value: Any) -> Any:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def strides(tensor: Tensor) -> list[tuple[int, int]]:
    """The strides along which there is a second element."""
    return [(dim, tensor.stride(dim)) for dim in range(tensor.dim()) if tensor.shape[dim] > 1 and tensor.numel()]


def assert_same(mine: Tensor, other: Tensor, truth: Any, what: str) -> None:
    """Equal within assert_close's defaults for the dtype; where sums cancel, as near to float64 as PyTorch is."""
    try:
        torch.testing.assert_close(mine, other, equal_nan=True)
    except AssertionError:
        inexact = mine.is_floating_point() or mine.is_complex()
        if not inexact or mine.dtype != other.dtype or mine.shape != other.shape:
            raise
        three = (mine, other, truth())
        if mine.is_complex():
            three = tuple(torch.view_as_real(one.detach().resolve_conj()) for one in three)
        assert_as_good_as_torch(*three, what)


def gradients(result: Any, sample: Any, grads: list[Tensor]) -> list[Tensor | None]:
    wanted = [t for t in tensors(sample) if t.requires_grad]
    outputs = [y for y in tensors(result) if y.requires_grad]
    if not wanted or not outputs:
        return []
    return list(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))


def compare(info: Any, sample: Any) -> None:
    what = f"{named(info)}({sample.summary()})"
    before = [t.detach().clone() for t in tensors(sample)]
    mine, other = ours(info, sample), theirs(info, sample)
    results = list(zip(tensors(mine), tensors(other), strict=True))
    for index, (a, b) in enumerate(results):
        assert a.requires_grad == b.requires_grad, f"{what}: output {index} wants a gradient: {a.requires_grad}"
        assert strides(a) == strides(b), f"{what}: output {index} has strides {a.stride()}, PyTorch's {b.stride()}"
        assert_same(a, b, lambda i=index: tensors(theirs(info, doubled(sample)))[i], f"{what}: output {index}")
    grads = [torch.randn_like(y) for y in tensors(other) if y.requires_grad]

    def truth(index: int) -> Any:
        wide = doubled(sample)
        return gradients(theirs(info, wide), wide, [widened(grad) for grad in grads])[index]

    pairs = zip(gradients(mine, sample, grads), gradients(other, sample, grads), strict=True)
    for index, (a, b) in enumerate(pairs):
        assert (a is None) == (b is None), f"{what}: gradient {index} is {a}, PyTorch's {b}"
        if a is not None:
            assert_same(a, b, lambda i=index: truth(i), f"{what}: gradient {index}")
    for now, then in zip(tensors(sample), before, strict=True):
        assert torch.equal(now.detach().nan_to_num(), then.nan_to_num()), f"{what}: an input was changed"


@every_dtype
@every_op
def test_samples(info, dtype, device):
    """Where PyTorch supports the dtype: every sample. Where it does not: a refusal, and never a number of our own."""
    supported = dtype in info.supported_dtypes(device.type)
    samples = list(samples_of(info, device, dtype))
    assert samples, "the database has no sample for this dtype"
    for sample in samples:
        if (named(info), dtype) in REFUSED:
            with pytest.raises(InputError):
                ours(info, sample)
        elif supported or (raises(theirs, info, sample) is None and raises(ours, info, sample) is None):
            try:
                compare(info, sample)
            except Exception as error:
                error.add_note(f"{named(info)}({sample.summary()})")
                raise
        else:
            assert raises(ours, info, sample) is not None, f"{named(info)}({sample.summary()}) is no error"


def raises(function: Any, info: Any, sample: Any) -> Exception | None:
    """The error that a call ends in."""
    try:
        function(info, sample)
    except (RuntimeError, TypeError, ValueError) as error:
        return error
    return None


@pytest.mark.parametrize("info", [info for info in OPS if info.error_inputs_func is not None], ids=named)
def test_error_inputs(info, device):
    """What PyTorch refuses is refused, with an InputError; a TypeError may stay one."""
    for error in info.error_inputs(device):
        sample = error.sample_input
        with pytest.raises(error.error_type):
            theirs(info, sample)
        allowed = (InputError, TypeError) if issubclass(TypeError, error.error_type) else InputError
        with pytest.raises(allowed):
            ours(info, sample)
