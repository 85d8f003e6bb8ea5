"""What `port` writes, run in the simulator: statements that mean in C++ what another text would mean in Python."""

import pytest
import torch

import cupyops
from cupyops._port.port import port

HEAD = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
__global__ void add(float* x, float by, int n) {
  const int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] += by;
}
__device__ float table[2];
__global__ void shift(float by) { table[0] = table[1]; table[1] += by; }
template <typename scalar_t, typename acc_t, typename index_t>
__global__ void sum(const scalar_t* x, const index_t* at, acc_t* y, int n) {
  extern __shared__ unsigned char room[];
  acc_t* part = reinterpret_cast<acc_t*>(room);
  part[threadIdx.x] = threadIdx.x < n ? static_cast<acc_t>(x[at[threadIdx.x]]) : acc_t(0);
  __syncthreads();
  if (threadIdx.x == 0) for (int i = 0; i < n; ++i) y[0] += part[i];
}
"""
STRUCTS = """
constexpr int MOST = 2;
namespace mine { struct Params { float* x; bool many; double by; char low; unsigned wide; int sizes[MOST]; }; }
using namespace mine;
__global__ void use(const Params p) {
  p.x[threadIdx.x] += p.many * 1000 + p.by + p.low * 10 + (p.wide == 4294967295u) * 100 + p.sizes[1];
}
void fill(Params& p, at::Tensor x, int n) { p.x = x.data_ptr<float>(); p.by = n * 0.5; p.sizes[1] += 2; }
Params made(at::Tensor x) { Params p = {.x = x.data_ptr<float>(), .sizes = {7, 3}}; return p; }
void less(Params p) { p.by -= 0.5; p.sizes[0] = 9; use<<<1, 4>>>(p); }
void other(Params& p) { Params q = p; q.low = 1; p = q; q.low = 5; }
struct Shape { int rows, columns; __host__ __device__ int numel() const { return rows * columns; } };
struct View {
  float* data;
  Shape shape;
  int by[2];
  View(at::Tensor x, int n) : data(x.data_ptr<float>()), by{n, 2 * n} { shape.rows = 2; shape.columns = x.numel() / 2; }
  __host__ __device__ int last() const { return by[1]; }
};
__global__ void view(const View v) {
  if (threadIdx.x < v.shape.numel()) v.data[threadIdx.x] += v.by[0] * 10 + v.last() * 100;
}
"""
LAUNCH = "add<<<1, 32>>>(x.data_ptr<float>(), %s, x.numel());"


def made(tmp_path, code, name="run", options=()):
    path = tmp_path / "x.cu"
    path.write_text(HEAD + code)
    found = port([path], str(path), options)
    assert not [one for one in found.problems if "not translated" in one], found.problems
    scope = {"__name__": "x"}
    exec(compile(found.files["x.py"], "x.py", "exec"), scope)
    return scope[name]


# the body of `run(at::Tensor x, int n, float s, bool fast)`, and what it leaves of zeros(4) for n = 3, s = 0.1, fast = True
BODIES = {
    "a refusal off the GPU": ("if (!x.is_cuda()) return; " + LAUNCH % 1, [1] * 4),
    "both of two conditions": (f"if (!fast && x.is_cuda()) {{ {LAUNCH % 1} }} else {{ {LAUNCH % 2} }}", [2] * 4),
    "a pointer that moves": ("auto p = x.data_ptr<float>(); p += 1; add<<<1, 32>>>(p, 1, 2);", [0, 1, 1, 0]),
    "the address of an element": ("auto p = x.data_ptr<float>(); add<<<1, 32>>>(&p[n - 1], 1, 1);", [0, 0, 1, 0]),
    "a member of a grid": ("dim3 grid(1), block(2); grid.y = 2; add<<<grid, block>>>(x.data_ptr<float>(), 1, 4);", [1] * 4),
    "a float of a double": ("double d = s; " + LAUNCH % "s * 3 == 0.3f && d != 0.1 ? 1 : 2", [1] * 4),
    "the size of a type": ("int bytes = sizeof(float) * 2 - sizeof(int64_t); " + LAUNCH % "bytes + 1", [1] * 4),
    "an error of CUDA's": (
        LAUNCH % 1 + " cudaError_t err = cudaGetLastError();"
        " if (err != cudaSuccess) throw std::runtime_error(cudaGetErrorString(err));", [1] * 4),
    "a number called err": (f"float err = s; if (err > 0.05f) {{ {LAUNCH % 5} }}", [5] * 4),
    "a count outside of its loop": ("int i; for (i = 0; i < n; ++i) {} " + LAUNCH % "i", [3] * 4),
    "memory of CUDA's own": (
        "float* room; cudaMalloc(&room, 4 * sizeof(float)); cudaMemset(room, 0, 16);"
        " add<<<1, 32>>>(room, 7, n);\n#define CHECK(call) { cudaError_t e = call; if (e != cudaSuccess) exit(1); }\n"
        "CHECK(cudaMemcpyAsync(x.data_ptr<float>(), room, 16, cudaMemcpyDeviceToDevice, 0)); cudaFree(room);", [7, 7, 7, 0]),
    "variables of the device": (
        "float all[2] = {2, 3}; cudaMemcpyToSymbol(table, all, 8); shift<<<1, 1>>>(1);"
        " float part; cudaMemcpyFromSymbol(&part, table, 4); cudaMemcpyFromSymbol(all, table, 8, 0, cudaMemcpyDeviceToHost);"
        + LAUNCH % "part * 100 + all[0] * 10 + all[1]", [300 + 30 + 4] * 4),
    "grids of ATen's loops": (
        "dim3 grid; const int block = at::cuda::getApplyBlockSize();"
        ' TORCH_CHECK(at::cuda::getApplyGrid(x.numel() + 512, grid, x.get_device(), block), "none");'
        " add<<<grid, block>>>(x.data_ptr<float>(), grid.x * 1000 + block, 4);", [2512] * 4),
    "names that the Python has a use for itself": (
        "int chosen = 5, memory = 6, inner = 7; switch (n + 1) { case 4: n = 1; break; default: n = 2; }"
        " int* p = new int[2]; p[1] = chosen; auto go = [&](int k) { return k + inner; }; "
        + LAUNCH % "p[1] * 1000 + memory * 100 + go(0) * 10 + n", [5671] * 4),
    "memory of the host's": (
        "auto two = torch::full({3}, 2.0f, x.options()); int64_t* count = (int64_t*)malloc(sizeof(int64_t)); int whole;"
        " auto many = torch::full({2}, 9, x.options().dtype(torch::kLong)); std::vector<float> list(3); float part[2];"
        " cudaMemcpy(count, many[1].data_ptr<int64_t>(), sizeof(int64_t), cudaMemcpyDeviceToHost);"
        " cudaMemcpy(&whole, many.data_ptr<int64_t>(), sizeof(int), cudaMemcpyDeviceToHost);"
        " cudaMemcpy(&list[0], two.data_ptr<float>(), 8, cudaMemcpyDeviceToHost);"
        " cudaMemcpy(part, two.data_ptr<float>(), 8, cudaMemcpyDeviceToHost); int next = 0; list[next++] = part[1] + 3;"
        " count[0] += 1;  *count *= 2; "
        + LAUNCH % "count[0] + whole * 100 + list[0] * 1000 + list[1] * 10000 + list[2] + next * 100000",
        [20 + 900 + 5000 + 20000 + 100000] * 4),
    "strides and bytes": (LAUNCH % "x.strides()[0] + x.nbytes() / 16", [2] * 4),
    "memory of the host's for the device": (
        "float* room; cudaMalloc(&room, 16); float start = 1.5f; std::vector<float> all = {2, 3, 4};"
        " cudaMemcpy(room, &start, 4, cudaMemcpyHostToDevice);"
        " cudaMemcpyAsync(room + 1, all.data(), 8, cudaMemcpyHostToDevice, 0);"
        " cudaMemcpy(room + 3, &all[2], 4, cudaMemcpyHostToDevice);"
        " float* made = new float[4];"
        " cudaMemcpy(made, room, 16, cudaMemcpyDeviceToHost); made[0] += 1; memset(&all[0], 0, 4);"
        " cudaMemcpy(x.data_ptr<float>(), made, 16, cudaMemcpyHostToDevice); delete[] made; " + LAUNCH % "all[0] + all[1]",
        [5.5, 5, 6, 7]),
    "memory of the old kind": (
        "THCState* state = at::globalContext().lazyInitCUDA(); float* room = (float*)THCudaMalloc(state, 16);"
        " cudaMemset(room, 0, 16); add<<<1, 32>>>(room, 7, n);"
        " cudaMemcpy(x.data_ptr<float>(), room, 16, cudaMemcpyDeviceToDevice); THCudaFree(state, room);", [7, 7, 7, 0]),
    "a property of the device": (
        "int many = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;"
        " cudaDeviceProp p; cudaGetDeviceProperties(&p, 0); auto q = at::cuda::getDeviceProperties(x.get_device()); "
        + LAUNCH % "(many > 0) + p.maxThreadsPerBlock + q->warpSize + q->maxGridSize[1]", [1 + 1024 + 32 + 65535] * 4),
    "sizes from one on": (
        "auto all = torch::zeros({2, 3, 4, 5}, x.options());"
        " auto y = torch::ones(all.sizes().slice(1, all.dim() - 2), x.options()); "
        + LAUNCH % "y.size(0) * 10 + y.size(1) + y.dim() * 100", [234] * 4),
    "the least of a type": (
        'auto y = torch::empty({4}, x.options()); AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "y", [&] {'
        " y.fill_(-std::numeric_limits<scalar_t>::infinity()); }); x.copy_(y.exp()); "
        + LAUNCH % "std::getenv(\"N_O_N_E\") == nullptr", [1] * 4),
    "a dispatch as a value": (
        'auto y = AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "y", [&] { return x + (int)sizeof(scalar_t); }); x.copy_(y);'
        + LAUNCH % 1, [5] * 4),
    "a list that grows": (
        "std::vector<int> all = {1}; for (size_t i = 0; i < all.size(); ++i) if (all.size() < 4) all.push_back(i); "
        + LAUNCH % "all.size() * 10 + all[3]", [42] * 4),
    "steps": ("for (int i = 8; i > n; i /= 2) " + LAUNCH % "i", [12] * 4),
    "a branch that nothing asks for": ("#ifdef NEVER\n" + LAUNCH % 9 + "\n#else\n" + LAUNCH % 1 + "\n#endif\n", [1] * 4),
    "a chain": ("int a, b; a = b = n; " + LAUNCH % "a * 10 + b", [33] * 4),
    "tensors resized": (
        "auto y = torch::empty({0}, x.options()); y.resize_({2, 2}).fill_(n); x.copy_(y.view(-1));" + LAUNCH % 1, [4] * 4),
    "a count inside of a condition": ("int k = n, t = 0; while (k-- > 0) t += 2; " + LAUNCH % "t * 10 + k", [59] * 4),
    "an assignment inside of a condition": (
        "int k = n, t = 0; if (n > 5 && t++) {} while ((k -= 1) > 0) t += k; " + LAUNCH % "t", [3] * 4),
    "bytes that wrap as they count": (
        "uint8_t u = 255; unsigned v = 0; int k = u++ + (v-- == 0); " + LAUNCH % "k + u", [256] * 4),
    "an index that counts": (
        "std::vector<int> v = {1, 2, 3}; int i = 0; int a = v[i++]; a = a * 10 + v[i++]; " + LAUNCH % "a * 10 + i",
        [122] * 4),
    "a lambda": (
        "int most = 5, t = 0; auto go = [&](int by) { most -= by; t += 10; }; for (int i = 0; i < most; ++i) go(1); "
        + LAUNCH % "t", [30] * 4),
    "lambdas that are called at once": (
        "int k = [&] { if (n > 2) return 7; return 8; }(); [&] { [&] { k += 2; }(); k *= 3; }(); " + LAUNCH % "k", [27] * 4),
    "a lambda of a tensor": ("auto y = [=]() -> at::Tensor { return x + 3; }(); x.copy_(y); " + LAUNCH % 1, [4] * 4),
    "slices": (
        "x.slice(0, 1, 3).add_(2); x.view({2, 2}).slice(1, 1).add_(10);"
        ' x.view({2, 2}).index({torch::indexing::Slice(), 0}).add_(100);'
        ' x.index({"...", torch::indexing::Slice(3, torch::indexing::None)}).mul_(2); ' + LAUNCH % 0
        + " x.index_put_({x == 12}, 7); x.index_put_({torch::indexing::Slice(2, 3)}, torch::ones({1}, x.options()));",
        [100, 7, 1, 20]),
    "vectors that are copied": (
        "std::vector<int> a = {1, 2}; auto b = a; b[0] = 9; std::vector<int> c; c = a; c[1] = 7;"
        " auto& d = a; d.push_back(5); auto sizes = x.sizes().vec(); sizes[0] = 6; "
        + LAUNCH % "a[0] * 10 + a[1] + a.size() * 100 + sizes[0] * 1000", [6312] * 4),
    "elements of a tensor of the host": (
        "auto y = torch::full({2, 2}, 3.5f, x.options()); auto a = y.accessor<float, 2>(); a[1][0] = 2; a[0][1] += 1;"
        + LAUNCH % "a[1][0] * 10 + a[0][1] + y.sum().item<float>()", [24.5 + 13.5] * 4),
    "allocations like another": ("x.copy_(x.new_zeros({4}) + x.new_full({4}, 2.0, x.options())); " + LAUNCH % 1, [3] * 4),
    "results that are handed in": ("at::sum_out(x, torch::ones({4, 3}, x.options()), 1); " + LAUNCH % 1, [4] * 4),
    "limits of types": (
        LAUNCH % "std::numeric_limits<float>::max() > 3e38f && std::numeric_limits<int>::lowest() == -2147483647 - 1",
        [1] * 4),
    "an exchange": (
        "int a = 1, b = 2; std::swap(a, b); auto y = x + 1, z = x + 2; std::swap(y, z); "
        + LAUNCH % "a * 10 + b + y[0].item<float>()", [23] * 4),
    "a pointer or none": ("float* p = fast ? x.data_ptr<float>() : 0; if (p) add<<<1, 32>>>(p, 1, 4);", [1] * 4),
    "what tensors on a GPU are not": (
        "if (x.is_cpu() || x.device().is_cpu() || x.device().type() == at::kCPU) return; " + LAUNCH % 1, [1] * 4),
    "a return of a dispatch alone": (
        'int t = 1; AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "run", [&] { if (n == 3) return; t = 2; }); ' + LAUNCH % "t",
        [1] * 4),
    "arguments that Python has by name": (
        "auto y = torch::linspace(1, 4, 4, x.options().dtype(at::kDouble)).clone(at::MemoryFormat::Contiguous);"
        " x.copy_(torch::add(y, y, 2).sub_(y, -1)); x.add_(at::addmm(x.view({2, 2}), y.view({2, 2}).to(x), x.view({2, 2}),"
        " 0, 2).sum(at::kFloat)); " + LAUNCH % "y.scalar_type() == at::kDouble", [4 + 432 + 1, 8 + 433, 12 + 433, 16 + 433]),
    "an item of another type": (
        "int k = (x + 2.75f)[0].item<int>(); bool b = (x + 3)[1].item<bool>(); " + LAUNCH % "k + b", [3] * 4),
    "an optional and none": (
        "c10::optional<int64_t> k; auto y = fast ? at::Tensor() : x; " + LAUNCH % "k.value_or(5) + (y.defined() ? 1 : 2)",
        [7] * 4),
    "the current device, and checks of two numbers": (
        "int device = -1; cudaGetDevice(&device); cudaStream_t s = at::cuda::getCurrentCUDAStream(device); CHECK_EQ(n, 3);"
        " add<<<1, 32, 0, s>>>(x.data_ptr<float>(), 1, 4);", [1] * 4),
    "a stream of text": (
        'std::stringstream ss; ss << "n is " << n; if (ss.str() != "n is 3") AT_ERROR(ss.str()); ' + LAUNCH % 1, [1] * 4),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_body_does_what_it_does_in_cpp(tmp_path, name):
    body, expected = BODIES[name]
    run, x = made(tmp_path, f"void run(at::Tensor x, int n, float s, bool fast) {{\n{body}\n}}\n"), torch.zeros(4)
    with cupyops.simulate():
        run(x, 3, 0.1, True)
    assert x.tolist() == expected


# the body of `run(at::Tensor x, int n)`, and what it leaves of zeros(4) for n = 3
FILLED = {
    "by its members": ("Params p; p.x = x.data_ptr<float>(); p.by = n; p.wide = -1; p.low = 258; use<<<1, 4>>>(p);", 123),
    "in order": ("Params p = {x.data_ptr<float>(), n > 2, 0.5, 'a' - 96, 0, {4, n}}; use<<<1, 4>>>(p);", 1013.5),
    "by a function": ("Params p{}; fill(p, x, n); for (int i = 0; i < 2; ++i) p.sizes[i]++; use<<<1, 4>>>(p);", 4.5),
    "handed on by value": ("Params p; fill(p, x, n); less(p); less(p); use<<<1, 4>>>(p);", 3 + 3 + 3.5),
    "copied": ("auto p = made(x); auto q = p; q.low = n; other(p); Params r; r = p; p.by = 40; use<<<1, 4>>>(r);", 13),
    "by a constructor": ("View v(x, n); v.by[0] += 1; view<<<1, v.shape.numel()>>>(v);", 640),
    "with a struct inside": (
        "View v{x, n}; Shape s = v.shape; s.rows = 9; v.shape = s; v.shape.rows /= 4; view<<<1, v.shape.numel()>>>(v);", 630,
    ),
    "by a reference": ("Params p = made(x); Params& q = p; q.low = n; p.by = q.low; use<<<1, 4>>>(p);", 36),
}  # fmt: skip


@pytest.mark.parametrize("name", FILLED)
def test_structs_that_host_code_fills(tmp_path, name):
    body, expected = FILLED[name]
    run, x = made(tmp_path, f"{STRUCTS}void run(at::Tensor x, int n) {{ {body} }}\n"), torch.zeros(4)
    with cupyops.simulate():
        run(x, 3)
        assert x.tolist() == [expected] * 4
        with pytest.raises(TypeError, match="a tensor of torch.float32, found one of torch.float64"):
            run(x.double(), 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_types_that_hang_on_a_dispatch(tmp_path, dtype):
    """`acc_type`, the size of a type in a launch, and two dispatches, one of indices."""
    run = made(
        tmp_path,
        """
        at::Tensor run(at::Tensor x, at::Tensor at) {
          at::Tensor y;
          AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "sum", ([&] {
            using acc_t = at::acc_type<scalar_t, true>;
            y = torch::zeros({1}, x.options().dtype(x.scalar_type() == torch::kHalf ? torch::kFloat : x.scalar_type()));
            AT_DISPATCH_INDEX_TYPES(at.scalar_type(), "sum of indices", ([&] {
              sum<scalar_t, acc_t, index_t><<<1, 8, 8 * sizeof(acc_t), at::cuda::getCurrentCUDAStream()>>>(
                  x.data_ptr<scalar_t>(), at.data_ptr<index_t>(), y.data_ptr<acc_t>(), at.numel());
            }));
          }));
          return y;
        }
        """,
    )
    x, at = torch.arange(8).to(dtype), torch.tensor([1, 7, 7])
    with cupyops.simulate():
        for index in (torch.int32, torch.int64):
            found = run(x, at.to(index))
            assert found.item() == 15 and found.dtype == (torch.float32 if dtype == torch.float16 else dtype)
        with pytest.raises(NotImplementedError, match='"sum" not implemented for torch.bfloat16'):
            run(x.to(torch.bfloat16), at)
        with pytest.raises(NotImplementedError, match='"sum of indices" not implemented for torch.int16'):
            run(x, at.short())


OF_FILES = {
    "a map of names": (
        'enum Red { A, B = 4 };\nconst std::map<std::string, Red> table = {{"a", A}, {"b", B}};\n',
        'table.at(fast ? "b" : "a")', 4),
    "enumerations with a scope": (
        "enum class Kind { Z, A };\nenum class Other { Z, Y, A };\n", "(int)Kind::A * 10 + static_cast<int>(Other::A)", 12),
    "a type of an enumeration": ("typedef enum { SUM, MEAN = 3, MOST } way_t;\n", "way_t(n) == way_t::MEAN ? MOST : SUM", 4),
    "a function of a struct": (
        "template <typename T, int R> struct Init {\n  static inline __host__ __device__ T init() {\n"
        "    if (R == 3) return (T)7;\n    else return std::numeric_limits<T>::max();\n  }\n"
        "  __device__ static void up(T* x) { *x = 1; }\n};\n",
        "x.fill_(Init<float, 1>::init()).gt(3e38f).sum().item<float>()"
        " + x.fill_(Init<float, 3>::init()).sum().item<float>()", 4 + 28 + 7),
    "a function that takes a lambda": (
        "template <typename F> int twice(F f, int n) { return f(n) + f(n + 1); }\n",
        "twice([&](int i) { return i * n; }, 2)", 15),
    "a vector that a function has of its own": (
        "int last(std::vector<int> v) { v[1] = 9; v.push_back(4); return v[1]; }\n"
        "int all(int n) { std::vector<int> a = {1, n}; return last(a) * 100 + a[1] * 10 + a.size(); }\n",
        "all(n)", 932),
    "kernels of one name": (
        "".join(
            f"namespace {one} {{ __global__ void to(float* x) {{ x[{at}] = 5; }}\n"
            f"int go(at::Tensor x) {{ {before}to<<<1, 1>>>(x.data_ptr<float>()); return {at}; }} }}\n"
            for one, at, before in (("a", 1, ""), ("b", 2, "b::"))
        ),
        "a::go(x) + b::go(x) + x[1].item<float>() * 10 + x[2].item<float>() * 100", 553),
    "memory that a function fills": (
        "void cudaFillLauncher(at::Tensor x, float by) { add<<<1, 32>>>(x.data_ptr<float>(), by, x.numel()); }\n"
        "at::Tensor make_cuda_copy(at::Tensor x) { auto y = x.clone(); cudaFillLauncher(y, 5); return y; }\n",
        "make_cuda_copy(x)[1].item<float>()", 5),
    "vector types": (
        "__global__ void wide(float* x, const long4 s, uchar2 t) { x[1] = s.x + 10 * s.w + 100 * t.y; }\n"
        "int go(at::Tensor x, int n) {\n  const long4 s = make_long4(x.size(0), 2, 3, n);\n  uchar2 t; t.y = 258;\n"
        "  auto u = t; u.y += 1;\n  wide<<<1, 1>>>(x.data_ptr<float>(), s, u);\n  return sizeof(long4) + s.y + t.y;\n}\n",
        "go(x, n) * 1000 + x[1].item<float>()", 36_000 + 4 + 30 + 300),
    "a condition that writes": (
        "bool more(int& n) { n += 2; return n > 4; }\n"
        "int go(int n) { if (more(n)) n *= 10; TORCH_CHECK(more(n), n); return n; }\n", "go(n)", 52),
    "a struct of a function that launches": (
        "struct Pair { int a; int b; };\n"
        "Pair once(at::Tensor x) { add<<<1, 32>>>(x.data_ptr<float>(), 1, 4); return {1, 2}; }\n"
        "int go(at::Tensor x) { Pair p = once(x); return p.b; }\n", "go(x)", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FILES)
def test_what_the_file_defines(tmp_path, name):
    code, value, expected = OF_FILES[name]
    run, x = made(tmp_path, f"{code}void run(at::Tensor x, int n, bool fast) {{ {LAUNCH % value} }}\n"), torch.zeros(4)
    with cupyops.simulate():
        run(x, 3, True)
    assert x[0].item() == expected


RECURSIVE = """
template <template <typename, int> class F, typename T, int low, int high, int at, typename... Rest> struct Next {
  static void go(int n, Rest... rest) {
    if (n == at) F<T, at>::go(rest...);
    else if (at < n) Next<F, T, low, high, at + 1, Rest...>::go(n, rest...);
  }
};
template <template <typename, int> class F, typename T, int low, int high, typename... Rest>
struct Next<F, T, low, high, high, Rest...> {
  static void go(int n, Rest... rest) { if (n == high) { F<T, high>::go(rest...); } }
};
template <template <typename, int> class F, typename T, int low, int high, typename... Rest>
void dispatch(int n, Rest... rest) {
  if (low <= n && n <= high) Next<F, T, low, high, low, Rest...>::go(n, rest...); else { throw std::runtime_error("none"); }
}
template <typename T, int N> __global__ void plus(T* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += N; }
template <typename T, int N> struct Plus { static void go(T* x, int n) { plus<T, N><<<1, 4>>>(x, n); } };
constexpr int LOW = 2;
void run(at::Tensor x, int n) { dispatch<Plus, float, LOW, 5>(n, x.data_ptr<float>(), 2.9); }
"""


def test_a_dispatch_by_recursive_templates(tmp_path):
    """Each number reaches its instance; templates that reach others are listed."""
    run = made(tmp_path, RECURSIVE)
    with cupyops.simulate():
        for n in range(2, 6):
            run(x := torch.zeros(4), n)
            assert x.tolist() == [n, n, 0, 0]
        for n in (1, 6):
            with pytest.raises(RuntimeError, match="none"):
                run(x, n)
    for old, new in (
        ("F<T, at>", "F<T, at + 1>"),
        ("at < n", "at + 1 < n"),
        ("n == high", "n > high"),
        ("low <= n", "n == 4"),
    ):
        (tmp_path / "x.cu").write_text(HEAD + RECURSIVE.replace(old, new))
        problems = port([tmp_path / "x.cu"], "x.cu").problems
        assert (old == "low <= n") != any("a dispatch to other instances" in one for one in problems), problems


DISPATCH = """
enum Way { SUM, MOST };
const std::map<std::string, Way> ways = {{"sum", SUM}, {"most", MOST}};
#define DISPATCH_WAYS(way, ...)                     \\
  [&] {                                             \\
    switch (ways.at(way)) {                         \\
      case SUM: {                                   \\
        static constexpr Way WAY = SUM;             \\
        return __VA_ARGS__();                       \\
      }                                             \\
      case MOST: {                                  \\
        static constexpr Way WAY = MOST;            \\
        return __VA_ARGS__();                       \\
      }                                             \\
    }                                               \\
  }()
#define DISPATCH_FLOATING(TYPE, NAME, ...)                              \\
  [&] {                                                                 \\
    const auto& the_type = TYPE;                                        \\
    switch (the_type) {                                                 \\
      case at::ScalarType::Float: {                                     \\
        using scalar_t = float;                                         \\
        return __VA_ARGS__();                                           \\
      }                                                                 \\
      case at::ScalarType::Double: {                                    \\
        using scalar_t = double;                                        \\
        return __VA_ARGS__();                                           \\
      }                                                                 \\
      default:                                                          \\
        AT_ERROR(NAME, " not implemented for '", toString(TYPE), "'");  \\
    }                                                                   \\
  }()
template <typename scalar_t, Way WAY> __global__ void joined(const scalar_t* x, scalar_t* y, int n) {
  scalar_t found = x[0];
  for (int i = 1; i < n; ++i) found = WAY == SUM ? found + x[i] : max(found, x[i]);
  y[0] = found;
}
at::Tensor run(at::Tensor x, std::string way) {
  auto y = torch::empty({1}, x.options());
  DISPATCH_FLOATING(x.scalar_type(), "joined", ([&] {
    DISPATCH_WAYS(way, [&] {
      joined<scalar_t, WAY><<<1, 1>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
    });
  }));
  return y;
}
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dispatches_of_the_file_s_own(tmp_path, dtype):
    """Over dtypes by a switch, over an enumeration, which is a template parameter of the kernel."""
    run, x = made(tmp_path, DISPATCH.replace("\\\n", "\\\n")), torch.tensor([1, 5, 3], dtype=dtype)
    with cupyops.simulate():
        assert run(x, "sum").item() == 9 and run(x, "most").item() == 5
        assert run(x, "sum").dtype == dtype
        with pytest.raises(ValueError, match="joined not implemented for 'torch.float16'"):
            run(x.half(), "sum")
    with pytest.raises(NotImplementedError, match="write the reference of run_op"):
        run.__globals__["run_op"](x, "sum")  # whose schema has a string


def test_a_function_without_a_schema_is_no_operator(tmp_path):
    path = tmp_path / "x.cu"
    path.write_text(
        HEAD + STRUCTS + "void run(at::Tensor x, Params p) { p.x = x.data_ptr<float>(); use<<<1, 4>>>(p); }\n"
    )
    found = port([path], str(path))
    assert (
        found.operators == []
        and "x.cu:40: check: run is a function, and no operator: PyTorch has no schema for Params" in (found.problems)
    )
    exec(compile(found.files["x.py"], "x.py", "exec"), {"__name__": "x"})


def test_headers_of_constants_and_options(tmp_path):
    """Those of a folder that an option names; `-D` defines."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "sizes.hpp").write_text(
        "#pragma once\n#define WIDTH (N_OF * 2)\n#ifndef N_OF\n#define N_OF 1\n#endif\n"
    )
    code = '#include "sizes.hpp"\nvoid run(at::Tensor x) { ' + LAUNCH % "WIDTH" + " }\n"
    x = torch.zeros(2)
    with cupyops.simulate():
        made(tmp_path, code, options=(f"-I{tmp_path / 'parts'}",))(x)
        made(tmp_path, code, options=(f"-I{tmp_path / 'parts'}", "-DN_OF=4"))(x)
    assert x.tolist() == [10, 10]


def test_names_with_humps_are_paired(tmp_path):
    code = """
    void RoiForwardCUDAKernelLauncher(at::Tensor x, at::Tensor y) { %s }
    void RoiBackwardCUDAKernelLauncher(at::Tensor grad_y, at::Tensor grad_x) { %s }
    """
    launches = [LAUNCH.replace("x.", f"{one}.") % 1 for one in ("y", "grad_x")]
    path = tmp_path / "x.cu"
    path.write_text(HEAD + code % tuple(launches))
    found = port([path], "x.cu")
    assert found.operators == [("roi_op", "RoiForwardCUDAKernelLauncher", "RoiBackwardCUDAKernelLauncher")]


def test_what_a_handle_is_set_to_is_the_caller_s_too(tmp_path):
    """A function of the file that assigns to a reference to a tensor, or to a number."""
    run = made(
        tmp_path,
        """
        void prepare(at::Tensor& x, int& n) {
          x = x.contiguous();
          n += 2;
        }
        at::Tensor run(at::Tensor x, int n) {
          prepare(x, n);
          add<<<1, 32>>>(x.data_ptr<float>(), n, x.numel());
          return x;
        }
        """,
    )
    x = torch.zeros(4)[::2]
    with cupyops.simulate():
        assert run(x, 3).tolist() == [5, 5] and x.tolist() == [0, 0]


def test_names_that_python_has_a_use_for(tmp_path):
    launch = LAUNCH % "std::max(range, 2) + lambda"
    run = made(tmp_path, f"void run(at::Tensor max, int range, float lambda) {{ {launch.replace('x.', 'max.')} }}")
    x = torch.zeros(2)
    with cupyops.simulate():
        run(x, 3, 0.5)
    assert x.tolist() == [3.5, 3.5]
