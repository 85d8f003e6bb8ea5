"""Kernel: found, specialised, checked, launched. A stand-in executor sees the launches where there is no GPU."""

import concurrent.futures
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_python
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import Recorder, executor

import cupyops
from cupyops import Kernel, ceil_div
from cupyops._kernel import kernel
from cupyops._kernel.launch.specialised import Specialised
from cupyops._kernel.launch.versions import in_role
from cupyops.errors import CompileError, InputError, LaunchError, SourceError

SCALE = """
template <typename T> __global__ void scale(const T* x, T* y, float factor, int n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = T(float(x[i]) * factor);
}
"""
PLAIN = "__global__ void plain(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 1; }\n"
HALF = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"


@pytest.fixture
def cpu():
    """Launches on CPU tensors are checked and recorded."""
    with executor("cpu", Recorder()) as recorder:
        yield recorder


def x32(n=8, device="cpu"):
    return torch.arange(n, dtype=torch.float32, device=device)


def test_file_beside_the_caller(tmp_path):
    """Whatever the working folder is; the caller is the module that says Kernel(...)."""
    (tmp_path / "beside.cu").write_text(PLAIN)
    module = tmp_path / "module.py"
    module.write_text("from cupyops import Kernel\nplain = Kernel('beside.cu', 'plain')\n")
    namespace = {}
    exec(compile(module.read_text(), str(module), "exec"), namespace)
    assert namespace["plain"].source.path == tmp_path / "beside.cu"


def test_without_a_file_the_working_folder(tmp_path, monkeypatch):
    """As at a prompt or in a notebook."""
    (tmp_path / "here.cu").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(compile("from cupyops import Kernel\nplain = Kernel('here.cu', 'plain')\n", "<stdin>", "exec"), namespace)
    assert namespace["plain"].source.path == tmp_path / "here.cu"


def test_built_in_file():
    assert Kernel("relu.cu", "relu_fwd<T>").source.path.name == "relu.cu"


def test_path_object(tmp_path):
    (tmp_path / "p.cu").write_text(PLAIN)
    assert Kernel(tmp_path / "p.cu", "plain").source.text == PLAIN
    assert Kernel(Path(tmp_path) / "p.cu", "plain").declared == [("float*", "x"), ("int", "n")]


def test_missing_file_is_an_error_that_names_it():
    with pytest.raises(SourceError, match=r"no CUDA source named 'zzzzzz\.cu'\. Looked for:"):
        Kernel("zzzzzz.cu", "f")


def test_creation_compiles_nothing_and_keeps_no_text():
    """A file is looked at for the kernel's name, and read when the kernel is first launched."""
    f = Kernel("relu.cu", "relu_fwd<T>", T=kernel.FLOATING)
    assert "source" not in vars(f) and not f._specialised


def test_our_own_kernels_are_not_looked_for(monkeypatch):
    """Importing costs nothing: no file is read."""
    monkeypatch.setattr(kernel.source, "is_own", lambda folder: True)
    Kernel("not_here_either.cu", "f<T>", T=kernel.FLOATING)


def test_missing_function_names_those_of_the_file(cpu):
    with pytest.raises(InputError, match="has no __global__ function other; it has plain"):
        Kernel(PLAIN, "other")[1, 1](x32(), 1)


def test_kernel_without_a_pointer(cpu):
    with pytest.raises(CompileError, match="without a pointer parameter"):
        Kernel("__global__ void f(int n) {}\n", "f")[1, 1](3)


def test_repr():
    assert repr(Kernel("relu.cu", "relu_fwd<T>")) == "Kernel(relu.cu: relu_fwd<T>)"
    assert repr(Kernel(PLAIN, "plain")) == "Kernel(<text>: plain)"


def test_registry_of_kernels_keeps_none_alive():
    one = Kernel(PLAIN, "plain")
    assert one in kernel.kernels()
    reference = weakref.ref(one)
    del one
    gc.collect()
    assert reference() is None and all(isinstance(k, Kernel) for k in kernel.kernels())


def test_instances_span_the_domain():
    f = Kernel(
        "template <typename T, bool VEC, int N> __global__ void f(T* x) {}",
        "f<T, VEC, N>",
        T=(torch.float16, torch.float64),
        VEC=(True, False),
        N=(1, 4),
    )
    assert f.instances()[:3] == ["f<__half, true, 1>", "f<__half, true, 4>", "f<__half, false, 1>"]
    assert len(f.instances()) == len(set(f.instances())) == 8


def test_some_combinations_do_not_exist(cpu):
    half = lambda T, WIDEN: not WIDEN or T.itemsize == 2
    f = Kernel(
        "template <typename T, bool WIDEN> __global__ void f(T* x) {}",
        "f<T, WIDEN>",
        T=(torch.float16, torch.float32),
        WIDEN=(False, True),
        where=half,
    )
    assert f.instances() == ["f<__half, false>", "f<__half, true>", "f<float, false>"]
    with pytest.raises(LaunchError, match=r"there is no f<float, true>"):
        f[1, 32](torch.ones(3), T=torch.float32, WIDEN=True)
    assert not cpu.launches


def test_instances_need_a_domain():
    with pytest.raises(InputError, match=r"no values declared for N; give N=\(\.\.\.\) to Kernel"):
        Kernel(
            "template <typename T, bool VEC, int N> __global__ void f(T* x) {}", "f<T, N>", T=kernel.FLOATING
        ).instances()
    assert Kernel("template <typename T, bool VEC, int N> __global__ void f(T* x) {}", "f").instances() == ["f"]


def test_domain_of_an_unknown_parameter():
    with pytest.raises(InputError, match="has no template parameter U"):
        Kernel("template <typename T, bool VEC, int N> __global__ void f(T* x) {}", "f<T>", U=(1,))


def test_launch_outside_the_domain(cpu):
    scale = Kernel(SCALE, "scale<T>", T=(torch.float32,))
    with pytest.raises(LaunchError, match=r"T=torch\.float64 is not one of torch\.float32"):
        scale[1, 8](x32(), x32(), 2.0, 8, T=torch.float64)


def test_launch_without_a_template_value(cpu):
    scale = Kernel(SCALE, "scale<T>")
    with pytest.raises(LaunchError, match=r"template parameter T is not given; launch with T=\.\.\."):
        scale[1, 8](x32(), x32(), 2.0, 8)


@pytest.mark.parametrize("warm", [False, True])
def test_launch_with_an_unknown_template_value(cpu, warm):
    scale = Kernel(SCALE, "scale<T>")
    if warm:
        scale[1, 8](x32(), x32(), 2.0, 8, T=torch.float32)
    for extra in ({"N": 3, "T": torch.float32}, {"T": torch.float32, "N": 3}):
        with pytest.raises(LaunchError, match="no template parameter N"):
            scale[1, 8](x32(), x32(), 2.0, 8, **extra)
    with pytest.raises(LaunchError, match="template parameter T is not given"):
        scale[1, 8](x32(), x32(), 2.0, 8, U=torch.float32)


TWO = "template <int A, int B> __global__ void two(float* x) { x[0] = A * 10 + B; }\n"


def test_order_of_template_keywords_does_not_matter(cpu):
    two = Kernel(TWO, "two<A, B>")
    two[1, 1](x32(), A=1, B=2)
    two[1, 1](x32(), B=1, A=2)
    two[1, 1](x32(), B=2, A=1)
    assert [launch[0] for launch in cpu.launches] == ["two<1, 2>", "two<2, 1>", "two<1, 2>"]


def test_each_value_has_its_own_instance(cpu):
    scale = Kernel(HALF + SCALE, "scale<T>", T=kernel.FLOATING)
    for dtype in kernel.FLOATING:
        x = x32().to(dtype)
        scale[1, 8](x, x, 2.0, 8, T=dtype)
    assert [launch[0] for launch in cpu.launches] == scale.instances()


def test_specialisation_is_shared_by_threads(cpu):
    scale, barrier, found = Kernel(SCALE, "scale<T>"), threading.Barrier(8), []

    def work(_):
        barrier.wait()
        found.append(scale.instance(T=torch.float32))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(found) == 8 and all(one is found[0] for one in found)


def test_launches_by_threads(cpu):
    scale, barrier = Kernel(SCALE, "scale<T>"), threading.Barrier(8)

    def work(n):
        barrier.wait()
        scale[n, 32](x32(), x32(), float(n), n, T=torch.float32)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 9)))
    assert sorted((grid[0], values[2], values[3]) for _, grid, _, _, values in cpu.launches) == [
        (n, float(n), n) for n in range(1, 9)
    ]


def test_a_launch_as_the_executor_sees_it(cpu):
    x, y = x32(), torch.empty(8)
    Kernel(SCALE, "scale<T>")[(2, 3), (4, 5, 6), 128](x, y, 0.5, 8, T=torch.float32)
    assert cpu.last == ("scale<float>", (2, 3, 1), (4, 5, 6), 128, [x.data_ptr(), y.data_ptr(), 0.5, 8])


@pytest.mark.parametrize(("grid", "block"), [(2, 32), ((2,), (32,)), ((2, 1), (32, 1)), (np.int64(2), np.int32(32))])
def test_spellings_of_grid_and_block(cpu, grid, block):
    Kernel(PLAIN, "plain")[grid, block](x32(), 8)
    assert cpu.last[1:4] == ((2, 1, 1), (32, 1, 1), 0)


@pytest.mark.parametrize("grid", [0, (0,), (3, 0), (1, 1, 0)])
def test_zero_in_the_grid_launches_nothing(cpu, grid):
    Kernel(PLAIN, "plain")[grid, 32](x32(), 8)
    assert not cpu.launches


@pytest.mark.parametrize("grid", [-1, 2**31, (1, 65536), (1, 1, 65536), (1, -1), (2**31 - 1, 65536)])
def test_grid_limits(cpu, grid):
    with pytest.raises(LaunchError, match="is outside CUDA's limits"):
        Kernel(PLAIN, "plain")[grid, 32](x32(), 8)


@pytest.mark.parametrize("grid", [2**31 - 1, (1, 65535), (1, 1, 65535)])
def test_largest_grids(cpu, grid):
    Kernel(PLAIN, "plain")[grid, 32](x32(), 8)
    assert len(cpu.launches) == 1


@pytest.mark.parametrize("block", [0, -1, 1025, (32, 33), (1, 1, 65), (1024, 2), (1, 0)])
def test_block_limits(cpu, block):
    with pytest.raises(LaunchError, match=r"block .* has -?\d+ threads; CUDA allows 1 to 1024, at most 64 in z"):
        Kernel(PLAIN, "plain")[1, block](x32(), 8)


@pytest.mark.parametrize("block", [1, 1024, (32, 32), (1, 16, 64)])
def test_largest_blocks(cpu, block):
    Kernel(PLAIN, "plain")[1, block](x32(), 8)
    assert len(cpu.launches) == 1


@pytest.mark.parametrize("dims", [2.5, (1, 2.5), "2", None, (1, 1, 1, 1), (), [1, 1]])
@pytest.mark.parametrize("place", ["grid", "block"])
def test_dimensions_that_are_none(cpu, dims, place):
    """`n / 256` for `ceil_div(n, 256)` would leave a tail undone in silence."""
    launch = (dims, 32) if place == "grid" else (1, dims)
    with pytest.raises(LaunchError, match=f"{place} is .*expected an int or a tuple of 1 to 3 ints"):
        Kernel(PLAIN, "plain")[launch](x32(), 8)
    assert not cpu.launches


@pytest.mark.parametrize("launch", [4, (4,), (1, 2, 3, 4)])
def test_launch_without_a_block(cpu, launch):
    with pytest.raises(LaunchError, match=r"kernel\[grid, block\]"):
        Kernel(PLAIN, "plain")[launch](x32(), 8)


@pytest.mark.parametrize("shared", [-1, 1.5, "x"])
def test_shared_memory_that_is_none(cpu, shared):
    with pytest.raises(LaunchError, match="shared"):
        Kernel(PLAIN, "plain")[1, 32, shared](x32(), 8)


def test_cpu_tensors_have_nowhere_to_run():
    with pytest.raises(LaunchError, match=r"plain: no way to run a kernel on cpu; the tensors must be on a CUDA GPU"):
        Kernel(PLAIN, "plain")[1, 32](x32(), 8)


class TestMismatches:
    """What is refused before the launch, and how it is told."""

    scale = Kernel(SCALE, "scale<T>")

    def refused(self, cpu, *args):
        with pytest.raises(LaunchError) as caught:
            self.scale[1, 8](*args, T=torch.float32)
        assert not cpu.launches
        return str(caught.value)

    def test_count(self, cpu):
        for args in [(x32(),), (x32(), x32(), 1.0), (x32(), x32(), 1.0, 8, 9)]:
            message = self.refused(cpu, *args)
            assert f"scale<float>: {len(args)} argument{'s' * (len(args) > 1)} given, 4 declared" in message
            assert "const T* x, T* y, float factor, int n" in message

    def test_a_launch_without_a_grid(self, cpu):
        with pytest.raises(LaunchError, match=r"scale<T>.*: launch with kernel\[grid, block\]\(\.\.\.\)"):
            self.scale(x32(), x32(), 1.0, 8, T=torch.float32)

    def test_dtype(self, cpu):
        message = self.refused(cpu, x32(), x32().double(), 1.0, 8)
        assert "argument 2 of 4, parameter `T* y` got a tensor of torch.float64 on cpu, expected a tensor of" in message
        assert "launch with T=torch.float64 for this tensor, or allocate it as torch.float32" in message

    def test_not_a_tensor(self, cpu):
        message = self.refused(cpu, x32(), np.zeros(8, np.float32), 1.0, 8)
        assert "`T* y` got an array of shape (8,), float32 (ndarray), expected a tensor or None: torch." in message

    def test_first_pointer(self, cpu):
        for value in (np.zeros(8, np.float32), 17):
            message = self.refused(cpu, value, x32(), 1.0, 8)
            assert "scale<float>: x is " in message and "first pointer of a kernel must be a tensor" in message
            assert ("give x itself, not x.data_ptr()" in message) == isinstance(value, int)
            assert (
                message.endswith(": torch.from_numpy(x) is one") == isinstance(value, np.ndarray) and "[" not in message
            )


def test_struct_by_value(cpu):
    f = Kernel("struct Pair { int a; double b; };\n__global__ void f(float* x, Pair p) { x[0] = p.a + p.b; }\n", "f")
    pair = np.zeros((), np.dtype([("a", np.int32), ("b", np.float64)], align=True))
    pair["a"], pair["b"] = 3, 0.5
    f[1, 1](x32(), pair)
    assert cpu.last[4][1] == pair.tobytes()
    with pytest.raises(LaunchError, match="`Pair p` got .*expected a NumPy array of 16 bytes"):
        f[1, 1](x32(), np.zeros(12, np.uint8))
    f[1, 1](x32(), pair[()])  # a structured scalar
    assert cpu.last[4][1] == pair.tobytes()


def test_struct_with_the_fields_of_another_layout(cpu):
    """NumPy puts fields one after the other unless told to align them; the sizes of both are told."""
    f = Kernel("struct Pair { int a; double b[2]; };\n__global__ void f(float* x, Pair p) { x[0] = p.b[0]; }\n", "f")
    fields = [("a", np.int32), ("b", np.float64, (2,))]
    for packed in (np.zeros((), fields), np.zeros(1, fields), np.zeros((), fields)[()]):
        message = r"`Pair p` got .*24 bytes, which is what `Pair` takes in C; the dtype of this one has 20.*align=True"
        with pytest.raises(LaunchError, match=message):
            f[1, 1](x32(), packed)
    with pytest.raises(LaunchError, match=r"has 4 \(4 with align=True\): its fields are not those of the struct"):
        f[1, 1](x32(), np.zeros((), fields[:1]))
    assert not cpu.launches
    with cupyops.simulate():
        x = x32()
        f[1, 1](x, np.array((1, (2.5, 0)), np.dtype(fields, align=True))[()])
        assert x[0] == 2.5


def test_address_of_a_vector_type(cpu):
    """A kernel that reads a float4 at once cannot read it from anywhere."""
    f = Kernel("__global__ void f(const float4* x, float3* y) { y[0].x = x[0].w; }\n", "f")
    base = torch.zeros(16)
    start = -base.data_ptr() // 4 % 4  # where a multiple of 16 is
    f[1, 1](base[start:], base[start + 1 :])
    with pytest.raises(
        LaunchError,
        match="`const float4\\* x` got a tensor of torch.float32 on cpu, expected one whose address is "
        f"a multiple of 16; this one begins at element {start + 1} of its storage",
    ):
        f[1, 1](base[start + 1 :], base)
    assert len(cpu.launches) == 1


FUNCTORS = """
struct Add { static __device__ float of(float a, float b) { return a + b; } };
namespace ns {
struct Mul { static __device__ float of(float a, float b) { return a * b; } };
}
template <typename Op, int N> __global__ void f(float* x) { x[threadIdx.x] = Op::of(x[threadIdx.x], N); }
"""


def test_types_of_the_source_as_template_values():
    f, x = Kernel(FUNCTORS, "f<Op, N>", Op=("Add", "ns::Mul"), N=(3,)), torch.tensor([1.0, 2.0])
    assert f.instances() == ["f<Add, 3>", "f<ns::Mul, 3>"]
    with cupyops.simulate():
        f[1, 2](x, Op="Add", N=3)
        f[1, 2](x, Op="ns::Mul", N=np.int64(3))
        assert x.tolist() == [12, 15]
        with pytest.raises(LaunchError, match="Op=Sub is not one of Add, ns::Mul"):
            f[1, 2](x, Op="Sub", N=3)
        with pytest.raises(CompileError, match='identifier "Sub" is undefined'):
            Kernel(FUNCTORS, "f<Op, N>")[1, 2](x, Op="Sub", N=3)


@pytest.mark.parametrize(
    "value", ["", "Add>", "Add, 3", "ns::", "::", "a b", "Add\n", "1", "Ádd", "Add<int>", "double", "x;y"]
)
def test_only_plain_names_reach_the_compiler(cpu, value):
    with pytest.raises(LaunchError, match=r"Kernel\(<text>: f<Op, N>\): Op: a template value is a dtype"):
        Kernel(FUNCTORS, "f<Op, N>")[1, 2](x32(), Op=value, N=3)


def test_dtypes_of_numpy_as_template_values(cpu):
    scale = Kernel(SCALE, "scale<T>", T=(np.dtype("float32"), torch.float64))
    assert scale.domain == {"T": (torch.float32, torch.float64)}
    scale[1, 8](x32(), x32(), 2.0, 8, T=np.dtype("float32"))
    assert cpu.last[0] == "scale<float>"


def test_null_pointer(cpu):
    f = Kernel("__global__ void f(float* x, const float* bias) { if (bias) x[0] += bias[0]; }\n", "f")
    f[1, 1](x32(), None)
    assert cpu.last[4][1] == 0


def test_first_pointer_need_not_be_the_first_parameter(cpu):
    f = Kernel("__global__ void f(int n, float* x) { x[n] = 1; }\n", "f")
    f[1, 1](3, x32())
    assert cpu.last[4][0] == 3


def test_fake_tensors_with_symbolic_grid(cpu):
    """A grid from a SymInt is not even looked at."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    scale = Kernel(SCALE, "scale<T>")
    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    x = mode.from_tensor(x32(77), symbolic_context=symbolic)
    with mode, in_role():
        assert isinstance(x.shape[0], torch.SymInt)
        scale[ceil_div(x.numel(), 32), 32](x, torch.empty_like(x), 2.0, x.numel(), T=torch.float32)
    assert not cpu.launches


def test_meta_tensors_launch_nothing(cpu):
    x = torch.empty(8, device="meta")
    with in_role():
        Kernel(SCALE, "scale<T>")[1, 8](x, x, 2.0, 8, T=torch.float32)
    assert not cpu.launches


def test_dry_runs_need_no_gpu_and_no_compiler():
    """A kernel that does not even compile runs dry: shapes are known before NVRTC is asked."""
    with in_role():
        Kernel("__global__ void f(float* x) { nonsense }\n", "f")[1, 1](torch.empty(3, device="meta"))


def test_ceil_div():
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert ceil_div(2**40 + 1, 2**20) == 2**20 + 1


def test_subclass_of_tensor_that_is_no_fake(cpu):
    class Mine(torch.Tensor):
        pass

    x = x32().as_subclass(Mine)
    Kernel(PLAIN, "plain")[1, 8](x, 8)
    assert len(cpu.launches) == 1
    Kernel(PLAIN, "plain")[1, 8](torch.nn.Parameter(x32()), 8)
    assert len(cpu.launches) == 2


def test_import_brings_no_cupy():
    """CuPy, NVRTC and CUDA are touched at the first launch, not at the import; and it leaves Python as it was."""
    code = (
        "import gc, sys, torch, cupyops\n"
        "print(torch.cuda.is_initialized(), gc.isenabled())\n"
        "print(*{'cupy', 'cupyops.testing', 'cupyops.simulator', 'cupyops.bench', 'cupyops.cli'} & sys.modules.keys())"
    )
    done = run_python("-c", code, bare=True)
    assert done.stdout.split() == ["False", "True"]


def test_broken_cupy_is_told():
    """Without CuPy the first launch says what to install; the import and the CPU go on as before."""
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import cupyops, torch\n"
        "print(cupyops.relu(torch.tensor([-1.0, 2.0])).tolist())\n"
        "from cupyops._kernel.compile import compiler, source\n"
        "try: compiler.compile(source.load('relu.cu'), 'relu_fwd<float>', 'sm_80')\n"
        "except cupyops.MissingDependencyError as error: print(error)\n"
    )
    done = run_python("-c", code, bare=True)
    assert "[0.0, 2.0]" in done.stdout and "CUDA kernels need CuPy" in done.stdout and "pip install" in done.stdout


@pytest.mark.gpu
class TestGPU:
    def test_result(self):
        x = x32(1000, "cuda")
        y = torch.full_like(x, float("nan"))
        Kernel(SCALE, "scale<T>")[4, 256](x, y, 0.5, 1000, T=torch.float32)
        assert torch.equal(y, x * 0.5)

    def test_every_kind_of_parameter_arrives(self):
        """Each is written to the output by the kernel itself."""
        text = """
        struct Pair { int a; double b; };
        struct Three { char v[3]; };
        __global__ void f(double* y, bool flag, signed char c, unsigned char uc, short s, unsigned short us, int i,
                          unsigned u, long long l, unsigned long long ul, float f32, Three three, double f64, Pair pair,
                          float* null) {
          double all[] = {(double)flag, (double)c, (double)uc, (double)s, (double)us, (double)i, (double)u, (double)l,
                          (double)ul, f32, (double)three.v[2], f64, (double)pair.a, pair.b, null == nullptr ? 1.0 : 0.0};
          for (int k = 0; k < 15; ++k) y[k] = all[k];
        }
        """
        pair = np.zeros((), np.dtype([("a", np.int32), ("b", np.float64)], align=True))
        pair["a"], pair["b"] = -7, 0.25
        three = np.array([1, 2, 3], np.int8)
        numbers = [True, -5, 250, -30000, 65000, -(2**31), 2**32 - 1, -(2**62), 2**63, 0.1]
        y = torch.zeros(15, dtype=torch.float64, device="cuda")
        Kernel(text, "f")[1, 1](y, *numbers, three, 0.1, pair, None)
        expected = [1.0, *map(float, numbers[1:9]), float(np.float32(0.1)), 3.0, 0.1, -7.0, 0.25, 1.0]
        assert y.tolist() == expected

    def test_functors_structured_scalars_and_vectors(self):
        """The same launch twice, in full and by the fast path."""
        text = f"""
        struct Pair {{ int a; double b; }};
        {FUNCTORS}
        template <typename Op> __global__ void g(float4* x, Pair p) {{ x[0].w = Op::of(p.a, p.b); }}
        """
        g, x = Kernel(text, "g<Op>"), torch.zeros(8, device="cuda")
        pair = np.array((3, 0.5), np.dtype([("a", np.int32), ("b", np.float64)], align=True))[()]
        for op, expected in [("Add", 3.5), ("Add", 3.5), ("ns::Mul", 1.5)]:
            g[1, 1](x.zero_(), pair, Op=op)
            assert x[3].item() == expected
        with pytest.raises(LaunchError, match="a multiple of 16"):
            g[1, 1](x[1:], pair, Op="Add")

    @pytest.mark.parametrize(
        ("position", "value", "message"),
        [
            (0, "other dtype", "`const T\\* x` got a tensor of torch.float64"),
            (1, "cpu", "expected a tensor on the device of the first"),
            (1, "numpy", "expected a tensor or None"),
            (2, "text", "`float factor` got 'text'"),
            (3, 1.5, "`int n` got 1.5"),
            (3, 2**31, "fits int"),
            (3, "tensor", "`int n` got a tensor"),
        ],
    )
    def test_mismatches(self, position, value, message):
        """The packed launch refuses what the checks of the stand-in refuse, in the same words."""
        scale = Kernel(SCALE, "scale<T>")
        args = [x32(8, "cuda"), x32(8, "cuda"), 1.0, 8]
        scale[1, 8](*args, T=torch.float32)
        made = {
            "other dtype": x32(8, "cuda").double(),
            "cpu": x32(),
            "numpy": np.zeros(8, np.float32),
            "tensor": torch.tensor(8, device="cuda"),
        }
        args[position] = made.get(value, value) if isinstance(value, str) else value
        with pytest.raises(LaunchError, match=message):
            scale[1, 8](*args, T=torch.float32)

    def test_runs_on_the_current_stream(self):
        """The launch waits for the work before it on that stream, and on no other."""
        plain, x = Kernel(PLAIN, "plain"), torch.zeros(8, device="cuda")
        plain[1, 8](x, 8)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.fill_(10)
            plain[1, 8](x, 8)
        stream.synchronize()
        assert x.tolist() == [11.0] * 8

    def test_second_device(self):
        if torch.cuda.device_count() < 2:
            pytest.skip("one CUDA device only")
        plain, x = Kernel(PLAIN, "plain"), torch.zeros(8, device="cuda:1")
        with torch.cuda.device(0):
            plain[1, 8](x, 8)
            assert torch.cuda.current_device() == 0
        torch.cuda.synchronize("cuda:1")
        assert x.tolist() == [1.0] * 8
        with pytest.raises(LaunchError, match="device of the first"):
            Kernel(SCALE, "scale<T>")[1, 8](x, torch.zeros(8, device="cuda:0"), 1.0, 8, T=torch.float32)

    def test_second_device_first(self):
        """A kernel loaded on the second device is loaded again on the first."""
        if torch.cuda.device_count() < 2:
            pytest.skip("one CUDA device only")
        plain = Kernel(PLAIN, "plain")
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            x = torch.zeros(8, device=device)
            plain[1, 8](x, 8)
            assert x.tolist() == [1.0] * 8

    def test_more_than_48_kb_of_shared_memory(self):
        text = """
        extern __shared__ float s[];
        __global__ void f(float* y, int n) {
          for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = i;
          __syncthreads();
          if (threadIdx.x == 0) y[0] = s[n - 1];
        }
        """
        f, y = Kernel(text, "f"), torch.zeros(1, device="cuda")
        limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        for size in (1024, 60 * 1024, limit, 1024):
            f[1, 256, size](y, size // 4)
            assert y.item() == size // 4 - 1
        with pytest.raises(LaunchError, match=rf"f with grid \(1, 1, 1\), block \(256, 1, 1\), {limit + 4} bytes"):
            f[1, 256, limit + 4](y, 1)
        f[1, 256, 1024](y, 256)
        assert y.item() == 255

    def test_refused_launch(self):
        """More registers than a block of 1024 threads can have: CUDA refuses, and the error says of what."""
        text = "__global__ void __launch_bounds__(64) f(float* x) { x[threadIdx.x] = 1; }\n"
        x = torch.zeros(1024, device="cuda")
        with pytest.raises(LaunchError, match=r"f with grid \(1, 1, 1\), block \(1024, 1, 1\), 0 bytes .* on cuda:0: "):
            Kernel(text, "f")[1, 1024](x)
        torch.cuda.synchronize()

    def test_first_call_inside_a_capture(self):
        plain, x = Kernel(PLAIN, "plain"), torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plain[1, 8](x, 8)
        graph.replay()
        graph.replay()
        assert x.tolist() == [2.0] * 8

    def test_threads_that_make_the_first_call_at_once(self):
        plain, barrier = Kernel(PLAIN, "plain"), threading.Barrier(4)
        tensors = [torch.zeros(8, device="cuda") for _ in range(4)]

        def work(x):
            barrier.wait()
            for _ in range(50):
                plain[1, 8](x, 8)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, tensors))
        torch.cuda.synchronize()
        assert all(x.tolist() == [50.0] * 8 for x in tensors)

    def test_thread_without_a_cuda_context(self):
        """The first CUDA call of a thread may be a launch."""
        plain, x = Kernel(PLAIN, "plain"), torch.zeros(8, device="cuda")
        plain[1, 8](x, 8)
        torch.cuda.synchronize()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(plain[1, 8], x, 8).result()
        assert x.tolist() == [2.0] * 8

    def test_tensor_that_cuda_has_not_seen_yet_in_a_fresh_process(self):
        """A process whose only CUDA work is one of our launches."""
        code = (
            "import torch, cupyops\n"
            f"plain = cupyops.Kernel({PLAIN!r}, 'plain')\n"
            "x = torch.zeros(8, device='cuda')\n"
            "plain[1, 8](x, 8)\n"
            "print(x.sum().item())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "8.0"

    def test_memory_only_cubin_loads(self, monkeypatch, tmp_path):
        """With no cache folder to be had the kernel still loads and runs."""
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "file"))
        text = PLAIN + "// a text of its own, so that no other test has built it\n"
        x = torch.zeros(8, device="cuda")
        with pytest.warns(UserWarning, match="is not used, and each process compiles for itself"):
            Kernel(text, "plain")[1, 8](x, 8)
        assert x.tolist() == [1.0] * 8

    def test_a_launch_function_kept_from_before_the_first_launch(self, monkeypatch):
        kernel = Kernel("__global__ void twice(float* x) { x[threadIdx.x] *= 2; }", "twice")
        launch, x = kernel[1, 32], torch.ones(32, device="cuda")
        launch(x)
        monkeypatch.setattr(Specialised, "launch", None)  # of the full path
        launch(x)
        launch(x)
        assert x.tolist() == [8.0] * 32

    def test_trace_has_times(self):
        plain, x = Kernel(PLAIN, "plain"), torch.zeros(8, device="cuda")
        plain[1, 8](x, 8)
        with cupyops.trace() as trace:
            plain[1, 8](x, 8)
        (record,) = trace.records
        assert record.kernel == "plain" and 0 < record.microseconds < 1e6

    def test_large_grid(self):
        """More blocks in x than fit 16 bits."""
        text = "__global__ void f(unsigned long long* n) { if (threadIdx.x == 0) atomicAdd(n, 1ull); }\n"
        n = torch.zeros(1, dtype=torch.int64, device="cuda")
        Kernel(text, "f")[100_000, 32](n)
        assert n.item() == 100_000


def test_a_tensor_that_requires_a_gradient_is_told_once():
    code = "__global__ void once_more(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }"
    kernel, x, y = cupyops.Kernel(code, "once_more"), torch.ones(2, requires_grad=True), torch.zeros(2)
    with cupyops.simulate(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            kernel[1, 2](x, y)
        kernel[1, 2](x.detach(), y)
        with pytest.warns(UserWarning, match=r"once_more.* none flows back .* cupyops.operator") as told:
            kernel[1, 2](x, y)
        assert told[0].filename == __file__
        kernel[1, 2](x, y)  # and not again
