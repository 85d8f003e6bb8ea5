"""Tensor accessors as arguments: the bytes of a tensor, by the full path and by the generated one."""

import ctypes
import struct

import pytest
import torch

import cupyops
from cupyops._kernel.compile.binary import Parameter
from cupyops._kernel.launch import fastpath, signature
from cupyops._kernel.launch.accessor import Accessor
from cupyops._kernel.launch.configuration import Configuration
from cupyops._util import torch_private

NARROW = "at::GenericPackedTensorAccessor<float, 2, at::RestrictPtrTraits, int>"
WIDE = "at::GenericPackedTensorAccessor<const c10::Half, 1, at::DefaultPtrTraits, long long>"


def join():
    declared = [(NARROW, "x"), (WIDE, "y"), ("float", "factor")]
    parameters = [Parameter("b8", 24, 8), Parameter("b8", 24, 8), Parameter("f32", 4, 4)]
    return signature.join("f", declared, parameters, {})


def test_what_a_type_says():
    x, y, factor = join()
    assert x.accessor == Accessor(torch.float32, 2, False, True) and x.is_written and not x.takes_map
    assert y.accessor == Accessor(torch.float16, 1, True, False) and not y.is_written
    assert factor.accessor is None
    for index in ("unsigned long", "unsigned long long", "long"):  # `size_t` and its like
        assert Accessor.read(WIDE.replace("long long", index), 24) == y.accessor
    assert Accessor.read(NARROW.replace("int", "unsigned int"), 24) == x.accessor
    for other in ("Row<float, 2>", NARROW + "*", NARROW.replace("int>", "short>")):
        assert Accessor.read(other, 24) is None
    said = [("const torch::PackedTensorAccessor32<float, 2>", "x")]  # what is const itself is not written either
    (constant,) = signature.join("f", said, [Parameter("b8", 24, 8)], {}, real=[NARROW])
    assert not constant.is_written and constant.accessor.dtype is torch.float32
    assert Accessor.read(NARROW, 128) is None  # of another layout than ours


def test_the_bytes_by_both_paths(monkeypatch):
    """Both packed alike; what does not fit goes the full way."""
    monkeypatch.setattr(torch_private, "current_stream", lambda device: 77)  # which is asked of CUDA
    monkeypatch.setattr(torch_private, "current_device", lambda: -1)
    arguments, launched, full, table = join(), [], [], {}
    letters, _ = signature.layout(arguments)
    slot = (ctypes.create_string_buffer(struct.calcsize(letters)), None, 0)
    configure = fastpath.configure(arguments, (), 0, table, lambda *args: full.append(args))
    table[()] = fastpath.entry(arguments, -1, 7, [], lambda: slot)
    launch = configure(Configuration((1, 1, 1), (32, 1, 1), 0), lambda *args: launched.append(slot[0].raw))
    x, y = torch.zeros(4, 6)[:, ::2], torch.zeros(5, dtype=torch.float16)
    launch(x, y, 2.0)
    expected = struct.pack("<Q4iQ2qf", x.data_ptr(), 4, 3, 6, 2, y.data_ptr(), 5, 1, 2.0)
    assert launched == [expected] and not full
    assert struct.pack(letters, *signature.checked("f", arguments, (x, y, 2.0), -1)) == expected
    assert (x._version, y._version) == (1, 0)
    for count, (one, other) in enumerate([(x[0], y), (x.double(), y), (None, y), (x, y.float()), (x.numpy(), y)], 1):
        launch(one, other, 2.0)
        assert len(launched) == 1 and len(full) == count


@pytest.mark.parametrize("tensor", [torch.empty(0, 3), torch.zeros(1).expand(5, 4)], ids=["empty", "expanded"])
def test_shapes_that_are_allowed(tensor):
    assert join()[0].accessor.unfit(tensor) == ""


def test_views_whose_values_are_elsewhere_are_refused():
    assert "resolve_conj" in join()[0].accessor.unfit(torch._neg_view(torch.zeros(2, 2)))
    assert "storage of its own" in join()[0].accessor.unfit(torch.zeros(2, 2).to_sparse())


INFO = """
#include <ATen/cuda/detail/TensorInfo.cuh>
#include <ATen/cuda/detail/IndexUtils.cuh>
template <typename scalar_t, typename index_t>
__global__ void add_rows(const at::cuda::detail::TensorInfo<scalar_t, index_t> x, scalar_t* y, int n) {
  const int i = threadIdx.x;
  if (i < n) y[i] = x.data[at::cuda::detail::IndexToOffset<scalar_t, index_t, -1>::get(i, x)] + x.dims + x.sizes[0];
}
"""


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2)], ids=str)
def test_an_info_of_a_tensor_of_any_number_of_dimensions(index, shape):
    """It follows the strides of a view, as what PyTorch's headers compute of it does."""
    x = torch.arange(24.0).reshape(*shape, 2)[..., 0]
    y = torch.zeros(12)
    kernel = cupyops.extension(INFO).add_rows
    with cupyops.simulate():
        kernel[1, 32](x, y, 12, scalar_t=torch.float32, index_t=index)
        with pytest.raises(cupyops.LaunchError, match="expected a tensor of torch.float32"):
            kernel[1, 32](x.double(), y, 12, scalar_t=torch.float32, index_t=index)
    torch.testing.assert_close(y, x.flatten() + len(shape) + shape[0])
