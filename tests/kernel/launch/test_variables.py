"""`kernel.globals()`: the variables of a .cu file found, read and set; here in the simulator, and on a GPU."""

import numpy as np
import pytest
import torch

import cupyops
from cupyops import Kernel
from cupyops.errors import InputError, LaunchError

CODE = """
#define SIZE 2
struct Pair { int a; double b; };
__constant__ float weight[SIZE] = {1, 2};  // __constant__ float not_this[3];
__device__ __align__(16) unsigned long long count;
static __device__ short hidden = 3;
__device__ int many[4], one = 1, later[2];
__device__ const int fixed = 5;
__device__ Pair pair;
__device__ bool flag;
namespace ns { namespace { __device__ double grid[2][3]; } }
template <typename T> __constant__ T scale[2];

template <typename T> __global__ void f(T* x, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  atomicAdd(&count, 1ull);
  x[i] = x[i] * weight[i % SIZE] + later[0] + hidden + one + many[3] + pair.b + ns::grid[1][2] + scale<T>[1];
  if (i == 0) { ns::grid[0][0] = fixed; flag = true; pair.a += 1; }
}
"""
PAIR = [("a", np.int32), ("b", np.float64)]
SHAPES = {
    "weight": (torch.float32, (2,)),
    "count": (torch.uint64, ()),
    "hidden": (torch.int16, ()),
    "one": (torch.int32, ()),
    "many": (torch.int32, (4,)),
    "later": (torch.uint8, (8,)),  # declared after a value: only its size is known
    "fixed": (torch.int32, ()),
    "pair": (torch.uint8, (16,)),
    "flag": (torch.bool, ()),
    "ns::grid": (torch.float64, (2, 3)),
    "scale": (torch.uint8, (8,)),  # the text does not tell what its T is
}


@pytest.fixture(scope="module")
def kernel():
    return Kernel(CODE, "f<T>", T=(torch.float32, torch.float64))


def launched(kernel, device):
    """Every kind of variable set, seen by a launch, and read again."""
    found = kernel.globals(T=torch.float32)
    assert found.device.type == device
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == SHAPES
    assert found["weight"].get().tolist() == [1, 2] and found["hidden"].get().item() == 3
    found["weight"].set(np.array([3.0, 4.0]))
    found["hidden"].set(torch.tensor(10, device=device, dtype=torch.int16))
    found["many"].set([0, 0, 0, 100])
    found["ns::grid"].set(1000.0)
    found["pair"].set(np.array((7, 0.5), np.dtype(PAIR, align=True))[()])
    found["scale"].set(torch.tensor([0.0, 0.25], device=device).view(torch.uint8))
    x = torch.ones(2, device=device)
    kernel[1, 32](x, 2, T=torch.float32)
    assert x.tolist() == [3 + 1111.75, 4 + 1111.75]
    assert found["count"].get().item() == 2 and found["flag"].get().item() is True
    grid = found["ns::grid"].get()
    assert grid.device.type == device and grid.tolist() == [[5, 1000, 1000], [1000] * 3]
    assert np.frombuffer(found["pair"].get().cpu().numpy().tobytes(), np.dtype(PAIR, align=True))[0].tolist() == (
        8,
        0.5,
    )
    assert kernel.globals(T=torch.float64)["weight"].get().tolist() == [1, 2]  # another instance has its own
    assert Kernel(CODE, "f<T>").globals(T=torch.float32)["weight"].get().tolist() == [1, 2]  # and so has another Kernel


def test_in_the_simulator(kernel):
    with cupyops.simulate():
        launched(kernel, "cpu")


def test_values_that_do_not_fit(kernel):
    with cupyops.simulate():
        found = kernel.globals(T=torch.float32)
        for name, value, message in [
            ("one", 2**31, "takes torch.int32 of shape .*out of range|takes torch.int32 of shape .*overflow"),
            ("one", 1.5, "got 1.5, which does not fit"),
            ("one", np.int64(2**40), "does not fit"),
            ("flag", 2, "does not fit"),
            ("count", -1, "takes torch.uint64"),
            ("weight", [1, 2, 3], r"takes torch.float32 of shape \(2,\), 8 bytes in all; got shape \(3,\)"),
            ("weight", "text", "got 'text'"),
            ("weight", torch.zeros(2, device="meta", dtype=torch.int32), "got a tensor of torch.int32"),
            ("pair", np.zeros((), PAIR), "16 bytes in all; got 12 bytes .*align=True"),
            ("pair", b"x", "got 1 bytes"),
            ("fixed", 6, "fixed is const: its value is part of the code"),
        ]:
            before = found[name].get()
            with pytest.raises(InputError, match=message):
                found[name].set(value)
            assert torch.equal(found[name].get(), before)
        found["count"].set(2**64 - 1)
        assert found["count"].get().item() == 2**64 - 1


def test_names(kernel):
    with cupyops.simulate():
        found = kernel.globals(T=torch.float32)
        assert "weight" in found and "not_this" not in found and len(found) == len(SHAPES)
        assert repr(found).startswith("Globals(f<float> on cpu: weight, count")
        assert repr(found["weight"]) == "Variable(weight: torch.float32, shape (2,))"
        with pytest.raises(InputError, match="has no __device__ or __constant__ variable 'wait'; it has weight, count"):
            found["wait"]
        with pytest.raises(LaunchError, match="template parameter T is not given"):
            kernel.globals()
    with pytest.raises(LaunchError, match="no way to run a kernel on cpu"):
        kernel.globals("cpu", T=torch.float32)


def test_where_declarations_begin():
    """After a default of a template's parameter, after a body, beside a name that is part of others."""
    code = """
struct Sizes { static constexpr int kept = 3, wide = 5; };
template <typename T, int N = 2> __device__ T kept_in[N];
__device__ int get(int kept) { return kept; } __device__ float kept = 1, rekept;
template <int N = (1 < 2)> __constant__ short behind = 7;
__global__ void f(float* x) {
  const int* sizes[] = {&Sizes::kept, &Sizes::wide};
  x[0] = kept_in<double, 4>[threadIdx.x] + kept + rekept + behind<1> + *sizes[threadIdx.x % 2] + get(1);
}
"""
    with cupyops.simulate():
        found = Kernel(code, "f").globals()
    told = {name: (one.dtype, tuple(one.shape)) for name, one in found.items()}
    assert told["kept"] == (torch.float32, ()) and told["behind"] == (torch.int16, ())
    assert told["rekept"] == (torch.uint8, (4,))  # after a value: only its size is known
    assert told["kept_in"] == (torch.uint8, (32,))
    assert set(told) - {"kept", "behind", "rekept", "kept_in"} <= {"Sizes::kept", "Sizes::wide"}


def test_a_kernel_without_variables():
    """Strings that the kernel prints, and tables of the compiler's, are none."""
    text = '__global__ void f(double* x) { printf("%f", x[0]); x[0] = sin(x[0]); }\n'
    with cupyops.simulate():
        assert dict(Kernel(text, "f").globals()) == {}


@pytest.mark.gpu
class TestGPU:
    def test_on_a_gpu(self, kernel):
        launched(kernel, "cuda")

    def test_in_the_order_of_the_stream(self):
        """Neither setting nor reading waits for the host, or overtakes a launch."""
        f = Kernel("__device__ int v;\n__global__ void f(int* x) { x[0] += v; v = 7; }\n", "f")
        x, values = (
            torch.zeros(1, dtype=torch.int32, device="cuda"),
            torch.tensor([1, 20], dtype=torch.int32, device="cuda"),
        )
        v = f.globals("cuda:0")["v"]
        f[1, 1](x)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            v.set(values[0])
            f[1, 1](x)
            after = v.get()
            v.set(values[1])
            f[1, 1](x)
        stream.synchronize()
        assert x.item() == 21 and after.item() == 7

    def test_each_device_has_its_own(self):
        if torch.cuda.device_count() < 2:
            pytest.skip("one CUDA device only")
        f = Kernel("__device__ int v = 3;\n__global__ void f(int* x) { x[0] = v; }\n", "f")
        f.globals("cuda:1")["v"].set(9)
        assert [f.globals(f"cuda:{n}")["v"].get().item() for n in range(2)] == [3, 9]
