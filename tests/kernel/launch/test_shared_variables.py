"""`__device__` and `__constant__` variables of a text: one for all of its kernels, templates among them."""

import pytest
import torch

import cupyops

CODE = """
__device__ int count = 2;
__device__ int* place;
__constant__ float weight[2] = {1, 2};
namespace inner { __device__ float kept[2]; }
__global__ void grow() { count += 1; place = &count; }
__global__ void through() { *place += 10; }
__global__ void keep(const float* x) { inner::kept[threadIdx.x] = x[threadIdx.x] * weight[threadIdx.x]; }
template <typename T> __global__ void give(T* y) {
  y[threadIdx.x] = inner::kept[threadIdx.x] + count;
  __syncthreads();
  if (threadIdx.x == 0) count += 100;
}
"""


@pytest.mark.parametrize(
    "made", [cupyops.module, cupyops.extension, lambda code: cupyops.load_inline(cuda_sources=code)]
)
def test_kernels_of_one_text_have_them_together(made):
    kernels = made(CODE)
    x, y, z = torch.tensor([5.0, 7.0]), torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    with cupyops.simulate():
        kernels.grow[1, 1]()
        kernels.through[1, 1]()
        kernels.keep.globals()["weight"].set([1, 3])
        kernels.keep[1, 2](x)
        kernels.give[1, 2](y, T=torch.float32)
        kernels.give[1, 2](z, T=torch.float64)
        kernels.grow[1, 1]()
        assert kernels.keep.globals()["count"].get().item() == 13 + 200 + 1
        assert kernels.give.globals(T=torch.float64)["count"].get().item() == 214
    assert y.tolist() == [5 + 13, 21 + 13] and z.tolist() == [5 + 113, 21 + 113]


def test_each_module_has_its_own():
    one, other = cupyops.module(CODE), cupyops.module(CODE)
    with cupyops.simulate():
        one.grow[1, 1]()
        assert other.grow.globals()["count"].get().item() == 2
        assert one.through.globals()["count"].get().item() == 3


@pytest.mark.parametrize("parameters, args", [("", ()), ("int n, float by", (3, 0.5))])
def test_a_kernel_without_anything_to_work_on_is_refused(parameters, args):
    """A variable of the device is enough to work on, for numbers besides, too."""
    code = "__device__ int kept = 1;\n__global__ void idle(%s) {}\n__global__ void grow(%s) { kept += 1; }\n"
    with cupyops.simulate():
        with pytest.raises(cupyops.CompileError, match="has nothing to work on"):
            cupyops.module(f"__global__ void idle({parameters}) {{}}").idle[1, 1](*args)
        kernels = cupyops.module(code % (parameters, parameters))
        kernels.grow[1, 1](*args)
        assert kernels.grow.globals()["kept"].get().item() == 2
