"""What a cubin says of its kernels, for kernels whose use is known, in each of the formats that NVRTC writes."""

import functools
import sys

import pytest

from cupyops import InputError, MissingDependencyError
from cupyops._kernel.compile import compiler, cubin, source

ARCHS = ["sm_75", "sm_80", "sm_90", "sm_120"]

TEXT = """
__constant__ float table[10];

extern "C" __global__ void plain(float* x, float a) { x[threadIdx.x] = a; }

extern "C" __global__ void shared(float* x, int n) {
  __shared__ float s[100];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[99 - threadIdx.x] * table[n];
}

extern "C" __global__ void dynamic(float* x) {
  extern __shared__ float s[];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[99 - threadIdx.x];
}

__device__ void mix(float* x, int n) {
  float a[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * n + threadIdx.x];
  for (int j = 0; j < n; ++j) {
    #pragma unroll
    for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i + 7) % 64] + 0.5f;
  }
  #pragma unroll
  for (int i = 0; i < 64; ++i) x[i * n + threadIdx.x] = a[i];
}
extern "C" __global__ void free_(float* x, int n) { mix(x, n); }
extern "C" __global__ void __launch_bounds__(1024, 2) bounded(float* x, int n) { mix(x, n); }

extern "C" __global__ void indexed(float* x, const int* at) {
  float a[32];
  for (int i = 0; i < 32; ++i) a[at[i]] = x[i];
  for (int i = 0; i < 32; ++i) x[i] = a[at[i + 32]];
}
"""


@functools.cache
def made(arch, options=()):
    """The cubin of all kernels."""
    return compiler.compile(source.load(TEXT), "plain", arch, options)[1]


def resources(name, arch, options=()):
    return cubin.resources(made(arch, options), name)


@pytest.fixture(params=ARCHS)
def arch(request):
    return request.param


def test_static_shared_memory_is_what_is_declared(arch):
    assert resources("shared", arch).shared == 400
    assert resources("dynamic", arch).shared == 0
    assert resources("plain", arch).shared == 0


def test_constant_memory_has_the_file_s_variables_and_the_parameters(arch):
    banks = resources("shared", arch).constant
    assert banks[3] == 40
    # the parameters end bank 0: a pointer and an int are 4 bytes more than a pointer
    assert banks[0] == resources("dynamic", arch).constant[0] + 4


def test_a_kernel_that_has_its_registers_spills_nothing(arch):
    used = resources("free_", arch)
    assert 64 <= used.registers <= 255
    assert used.stack == 0


def test_launch_bounds_limit_registers(arch):
    most = 65536 // 2048 if arch in ("sm_80", "sm_90") else 65536 // 1024  # where only 1,024 or 1,536 threads fit
    used = resources("bounded", arch)
    assert used.registers <= most
    assert used.stack > 0 or most > 32
    if most == 32:
        assert used.registers == 32


def test_so_does_an_option(arch):
    used = resources("free_", arch, ("--maxrregcount=16",))
    assert used.registers <= 24  # NVRTC gives no kernel less
    assert used.stack >= 4 * (64 - used.registers)  # 64 values live, and no registers for most of them


def test_an_indexed_array_lies_on_the_stack(arch):
    assert resources("indexed", arch).stack == 32 * 4


def test_a_template_is_found_by_its_mangled_name():
    text = source.load("template <typename T> __global__ void f(T* x) { __shared__ T s[8]; s[threadIdx.x] = x[0];\n"
                       "__syncthreads(); x[threadIdx.x] = s[7 - threadIdx.x]; }")  # fmt: skip
    for name, size in (("f<float>", 32), ("f<double>", 64)):
        binary, content = compiler.compile(text, name, "sm_80")
        assert cubin.resources(content, binary.symbol).shared == size


def test_an_unknown_kernel_is_named_and_so_are_those_there():
    with pytest.raises(InputError, match=r"no kernel nothing; it has .*plain"):
        cubin.resources(made("sm_80"), "nothing")


@pytest.mark.parametrize("content", [b"", b"not an ELF file at all", b"\x7fELF"])
def test_what_is_no_cubin_is_refused(content):
    with pytest.raises(InputError, match="not a cubin"):
        cubin.resources(content, "plain")


def test_a_cubin_cut_short_is_refused():
    content = made("sm_80")
    for length in (100, len(content) // 2):
        with pytest.raises(InputError, match="not a cubin"):
            cubin.resources(content[:length], "plain")


def test_without_pyelftools_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "cupyops\[cli\]"'):
        cubin.resources(b"", "plain")
