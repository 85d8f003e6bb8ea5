"""Hints for compile errors that name neither the cause nor the cure: what NVRTC, without a host compiler, does not have."""

from __future__ import annotations

import functools
import re

from ..._util.near import near
from .source import cuda_src, strip_comments

NAMES = "__nv_name_map"  # the file, of NVRTC's making, with the name of the kernel that is asked for

# Constants of C's headers, as they can be written without them.
CONSTANTS = {
    "INFINITY": "__int_as_float(0x7f800000)",
    "HUGE_VALF": "__int_as_float(0x7f800000)",
    "HUGE_VAL": "__longlong_as_double(0x7ff0000000000000LL)",
    "NAN": "__int_as_float(0x7fffffff)",
    "FLT_MAX": "3.402823466e+38f",
    "FLT_MIN": "1.175494351e-38f",
    "FLT_EPSILON": "1.192092896e-07f",
    "DBL_MAX": "1.7976931348623157e+308",
    "DBL_MIN": "2.2250738585072014e-308",
    "DBL_EPSILON": "2.2204460492503131e-16",
    "M_PI": "3.14159265358979323846",
    "M_PI_2": "1.57079632679489661923",
    "M_E": "2.7182818284590452354",
    "M_LN2": "0.69314718055994530942",
    "M_LOG2E": "1.4426950408889634074",
    "M_SQRT2": "1.41421356237309504880",
    "M_SQRT1_2": "0.70710678118654752440",
    "M_2_SQRTPI": "1.12837916709551257390",
    "CHAR_BIT": "8",
    "INT8_MAX": "127",
    "INT8_MIN": "(-128)",
    "UINT8_MAX": "255",
    "INT16_MAX": "32767",
    "INT16_MIN": "(-32768)",
    "UINT16_MAX": "65535",
    **dict.fromkeys(("INT_MAX", "INT32_MAX"), "2147483647"),
    **dict.fromkeys(("INT_MIN", "INT32_MIN"), "(-2147483647 - 1)"),
    **dict.fromkeys(("UINT_MAX", "UINT32_MAX"), "4294967295u"),
    **dict.fromkeys(("LLONG_MAX", "LONG_MAX", "INT64_MAX"), "9223372036854775807LL"),
    **dict.fromkeys(("LLONG_MIN", "LONG_MIN", "INT64_MIN"), "(-9223372036854775807LL - 1)"),
    **dict.fromkeys(("ULLONG_MAX", "ULONG_MAX", "UINT64_MAX", "SIZE_MAX"), "18446744073709551615ull"),
}
TYPES = {
    "int8_t": "signed char", "uint8_t": "unsigned char", "int16_t": "short", "uint16_t": "unsigned short",
    "int32_t": "int", "uint32_t": "unsigned int", "int64_t": "long long", "uint64_t": "unsigned long long",
    "intptr_t": "long long", "uintptr_t": "unsigned long long", "ssize_t": "long long", "uint": "unsigned int",
    "uchar": "unsigned char", "ushort": "unsigned short", "ulong": "unsigned long long",
}  # fmt: skip
HEADERS = {
    **dict.fromkeys(("half", "half2", "__half", "__half2"), "cuda_fp16.h"),
    **dict.fromkeys(("nv_bfloat16", "nv_bfloat162", "__nv_bfloat16", "__nv_bfloat162"), "cuda_bf16.h"),
    **dict.fromkeys(("__nv_fp8_e4m3", "__nv_fp8_e5m2", "__nv_fp8x2_e4m3", "__nv_fp8x4_e4m3"), "cuda_fp8.h"),
}

_CCCL = (
    "CUDA's C++ library comes in a wheel of its own, nvidia-cuda-cccl-cu12 (nvidia-cuda-cccl for CUDA 13), whose folder is "
    'found where it is installed; give another\'s to Kernel(..., options=("-I...",))'
)
_THRUST = (
    "thrust has host code, which NVRTC cannot compile, in device functions too; write the loop, or take what the kernel "
    "needs of <cub/block/...>; cupyops.extension has scans, sums, searches and sorts of thrust as a thread calls them"
)
_COOPERATIVE = "__syncthreads, __syncwarp and __shfl_*_sync need no header, cooperative_groups needs CCCL: "
_CURAND = (
    "#include <curand_kernel.h>, with the wheels of cuRAND and of CUDA's C++ library, nvidia-curand-cu12 and "
    "nvidia-cuda-cccl-cu12 (nvidia-curand and nvidia-cuda-cccl for CUDA 13), whose folders are found "
    "where they are installed"
)
_CUB = (
    "<cub/cub.cuh> has host code, which NVRTC cannot compile; include what the kernel needs of <cub/block/...> and "
    "<cub/warp/...>. "
)
_DRIVER = "<cuda.h> is the driver's interface for host code; a kernel needs nothing of it"
_PYTORCH = "PyTorch's C++ types are for host code; a kernel takes T*, as __half* of <cuda_fp16.h> for torch.float16"
_WMMA = (
    "<mma.h> needs headers of nvcc, in the wheel nvidia-cuda-nvcc-cu12 (nvidia-cuda-crt for CUDA 13), whose folder is found "
    "where it is installed; the same instructions are there as inline PTX: mma.sync, ldmatrix"
)
_AMBIGUOUS = (
    "half types have no operators with other types; convert first, as by to_acc(x) of cupyops.cuh. A file for PyTorch's "
    'builds, which define it, takes options=("-D__CUDA_NO_HALF_CONVERSIONS__",)'
)
_INSIDE = "NVRTC has no C and C++ library; leave the line out: printf, assert and the functions of <cmath> are built in"
_WRITTEN_OUT = (
    "NVRTC has no C and C++ library; leave the line out and write limits as numbers, uint32_t as unsigned int"
)
_HOST = "NVRTC compiles device code alone; keep what needs this header in the host program"
_LIBRARY = "NVRTC has no C++ library; <cuda/std/...> has such things for kernels: "

_DTYPES = frozenset(
    f"{kind}{bits}" for kind, all_bits in (("float", (16, 32, 64)), ("int", (8, 16, 32, 64))) for bits in all_bits
) | {"bfloat16", "uint8"}
_NAMED = 'a kernel is asked for by its name as the text has it, with its namespace before it: Kernel(code, "ns::name")'
_LITERAL = "one T cannot be two types: 1.0 is a double and 1 an int; write 1.0f, or T(1) in a template"
_NUMBER = re.compile(r"[(,]\s*-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*[,)]")  # an argument, without a suffix

# of a header that is not found
_MISSING = (
    (r"(c?(math|stdio|assert|stdlib|string)(\.h)?)", _INSIDE),
    (r"(c?(stdint|float|limits|stddef)(\.h)?|inttypes\.h|numeric_limits)", _WRITTEN_OUT),
    (r"(type_traits|utility|tuple|array|complex|functional|initializer_list|bit)", _LIBRARY + _CCCL),
    (r"nv/target", _COOPERATIVE + _CCCL),  # what cooperative_groups.h asks for
    (r"cub/cub\.cuh", _CUB + _CCCL),
    (r"thrust/.*", _THRUST),
    (r"(cub|cuda|nv)/.*", _CCCL),
    (r"cooperative_groups.*", _COOPERATIVE + _CCCL),
    (r"curand.*", _CURAND),
    (r"crt/.*|mma\.h", _WMMA),
    (r"(torch|ATen|c10)/.*", _PYTORCH),
    (r"[\w/]+", _HOST),  # <vector>, <iostream>: the C++ library has no suffixes
)

# what kernels call by its bare name
_BARE = """
max min abs fabs fma fmax fmin fmod remainder sqrt cbrt hypot pow exp exp2 expm1 log log2 log10 log1p erf erfc tgamma lgamma
sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh ceil floor round rint lround llround trunc nearbyint
copysign ldexp isnan isinf isfinite signbit sqrtf expf logf powf fabsf fmaxf fminf fmodf sinf cosf tanhf floorf ceilf roundf
printf malloc free memcpy memset
"""
BUILT_IN = frozenset(_BARE.split())

# what CUDA adds to C++, of which a name is often misspelt
_CUDA = """
threadIdx blockIdx blockDim gridDim warpSize __global__ __device__ __host__ __shared__ __constant__ __managed__ __restrict__
__launch_bounds__ __forceinline__ __noinline__ __align__ __grid_constant__ __cluster_dims__
__syncthreads __syncthreads_count __syncthreads_and __syncthreads_or __syncwarp __threadfence __threadfence_block
__threadfence_system __activemask __ballot_sync __all_sync __any_sync __shfl_sync __shfl_up_sync __shfl_down_sync
__shfl_xor_sync __match_any_sync __match_all_sync __reduce_add_sync __reduce_min_sync __reduce_max_sync __reduce_and_sync
__reduce_or_sync __reduce_xor_sync __nanosleep __trap clock clock64
atomicAdd atomicSub atomicExch atomicMin atomicMax atomicInc atomicDec atomicCAS atomicAnd atomicOr atomicXor
atomicAdd_block atomicAdd_system atomicCAS_block atomicCAS_system
__expf __exp10f __logf __log2f __log10f __sinf __cosf __sincosf __tanf __powf __fdividef __saturatef __frcp_rn __fsqrt_rn
__frsqrt_rn __fmaf_rn __fadd_rn __fmul_rn __fdiv_rn rsqrt rsqrtf rcbrtf sincosf sinpif cospif normcdff erfcxf fdividef
__ldg __ldca __ldcg __ldcs __stcg __stcs __popc __popcll __clz __clzll __ffs __ffsll __brev __byte_perm __umulhi __mulhi
__dp4a __float_as_int __int_as_float __float_as_uint __uint_as_float __double_as_longlong __longlong_as_double
__float2int_rn __float2int_rz __int2float_rn __float2half __half2float __float2bfloat16 __bfloat162float
make_float2 make_float3 make_float4 make_int2 make_int3 make_int4 make_uint2 make_uint4 make_double2 make_half2
float2 float3 float4 int2 int3 int4 uint2 uint3 uint4 double2 dim3 __pipeline_memcpy_async __pipeline_commit
__cvta_generic_to_shared __isShared __isGlobal
"""
_WORDS = "float double unsigned signed const static struct template typename volatile inline return while continue"
_KNOWN = (*_CUDA.split(), *_BARE.split(), *_WORDS.split(), *TYPES, *CONSTANTS)
# CUDA's vectors, whose members have one letter each
_MEMBER = re.compile(r'class "(?:u?(?:char|short|int|long|longlong)|float|double|dim)([1-4])" has no member "(\w+)"')

# of a name that is not known, before `::` or by itself
_UNKNOWN = (
    (r"cooperative_groups|cg", "#include <cooperative_groups.h> is missing; " + _COOPERATIVE + _CCCL),
    (r"thrust", _THRUST),
    (r"cub|cuda", _CCCL),
    (r"curand\w*|Philox\w*", _CURAND),
    (r"nvcuda|wmma", "#include <mma.h> is missing; " + _WMMA),
    (r"at|c10|torch|Tensor|Half|BFloat16|bfloat16", _PYTORCH),
    (r"stderr|stdout|fprintf|cout|puts", "only printf prints from a kernel"),
    (r"s?rand", "there is no random number of the host's in a kernel; write the generator into it (Philox is short)"),
    (r"(cuda|cu)[A-Z]\w+", "a function of the CUDA runtime is called by the host, not by a kernel"),
)

# what a line of a header declares: a function, a struct, a type, a constant
_DECLARES = re.compile(
    r"__device__[^(=]*?\b(\w+) ?(?:<[^(]*>)?\(|\bstruct\b.*?\b(\w+) ?(?:<.*?>)? ?[:{;]"
    r"|\busing (\w+) =|\bconstexpr \w+ (\w+) ="
)

# what a text has in the place of something that another program fills in
_PLACEHOLDER = re.compile(r"\$\{ *(\w+) *\}|\{\{ *(\w+) *\}\}|\{% |%\((\w+)\)s|\$(\w+)\b")


def placeholder(line: str) -> str | None:
    """Advise on a line with a placeholder, `${n}` or `{{type}}`; None where it has none."""
    if (match := _PLACEHOLDER.search(line)) is None:
        return None
    name = next((one for one in match.groups() if one), "n")
    return (
        f"{match.group().strip()} is to be filled in by another program; a template does that here: write {name}, make it a "
        f"parameter, `template <typename {name}>` or `template <int {name}>`, and launch with {name}=...; or a constant, "
        f"Kernel(..., define={{{name!r}: ...}})"
    )


_MESSAGES = (
    (
        r"execution space annotations|explicitly marked as a __host__",
        "write __device__ before a function that kernels call, and __global__ before a kernel; leave out host code, "
        "main() and functions with <<<...>>>: `python -m cupyops port FILE.cu` writes it in Python",
    ),
    (r"may not have extern \"C\"|linkage specification is not", 'a template has no C name; leave extern "C" out'),
    (r"non-__global__ function", "a kernel begins with `__global__ void`"),
    (
        r"which instance of function template",
        'the kernel is a template; name its parameters, as in Kernel(code, "name<T>")',
    ),
    (r"which instance of overloaded function", "two kernels have this name; give each its own"),
    (r"must have a void return type", "a kernel returns nothing; it writes through its pointers"),
    (
        r"no operator \"\[\]\" matches",
        "an index is one number; threadIdx, blockIdx and vectors have members: threadIdx.x",
    ),
    (
        r"expression must have a constant value",
        "the size of an array is a number or a template parameter; where the launch decides it, declare "
        "`extern __shared__ float s[]` and launch kernel[grid, block, bytes]",
    ),
    (
        r"expression must be a modifiable lvalue",
        "what is declared const is only read; leave const out of a pointer that the kernel writes through",
    ),
    (
        r"operand of \"\*\" must be a pointer",
        "C has no ** for powers: write x * x, or powf(x, n); a `*` before a single value reads through a pointer",
    ),
    (r"expected a \"}\"", "a } is missing, most likely of the { that the log names"),
    (r"more than one operator|ambiguous \"\?\" operation", _AMBIGUOUS),
    (
        r"uses too much shared data",
        "48 KB at most are static; for more declare `extern __shared__` and launch kernel[grid, block, bytes]",
    ),
)


def hint_for(message: str, file: str = "", word: str = "", line: str = "") -> str | None:
    """Advise on NVRTC's `message` in `file`; None where the message is enough.

    Its caret points to `word`, with which the rest of the `line` begins.
    """
    if file.endswith("/cuda.h"):
        return _DRIVER
    if re.search(r"(^|/)cub/", file):  # what <cub/cub.cuh> includes, where its folder is given
        return _CUB.strip()
    if re.search(r"(^|/)thrust/", file):
        return _THRUST
    if file == NAMES and (match := re.search(r'identifier "(\w+)" is undefined', message)) is not None:
        if match[1] in _DTYPES:
            return f"{match[1]} is a dtype, and no type of C: launch with T=torch.{match[1]}, without quotes"
        header = HEADERS.get(match[1])
        return _NAMED if header is None else f"#include <{header}> is missing"
    if (match := re.search(r'(?:cannot|could not) open source file "([^"]+)"', message)) is not None:
        return _first(_MISSING, match[1])
    if (match := re.search(r'identifier "(\w+)" is undefined|^(\w+) is not a template', message)) is not None:
        return _for_name(match[1] or match[2])
    if (match := _MEMBER.search(message)) is not None:
        members = "xyzw"[: int(match[1])]
        meant = f"; did you mean {match[2].lower()}?" if match[2].lower() in members else ""
        return f"its members are {', '.join(members)}{meant}"
    if 'name followed by "::" must be' in message:
        return _first(_UNKNOWN, word)
    if (match := re.search(r'namespace "(\w+)" has no member "(\w+)"', message)) is not None:
        return _for_member(*match.groups())
    if "no instance of function template" in message and _NUMBER.search(line):
        return _LITERAL
    return next((hint for pattern, hint in _MESSAGES if re.search(pattern, message)), None)


def _for_name(name: str) -> str | None:
    if name in CONSTANTS:
        return f"NVRTC does not define {name}; write {CONSTANTS[name]}"
    if name in TYPES:
        return f"NVRTC does not define {name}; write {TYPES[name]}, or `typedef {TYPES[name]} {name};`"
    if name in HEADERS:
        return f"#include <{HEADERS[name]}> is missing"
    if name in _common():
        return f'#include "{_common()[name]}" is missing, which declares it'
    if found := _first(_UNKNOWN, name):
        return found
    if (meant := near(name, _KNOWN)) is not None and len(name) > _SHORT:
        return f"did you mean {meant}?"
    if re.fullmatch(r"(?=.*[A-Z])[A-Z_][A-Z0-9_]*", name):  # a macro, which a setup.py may define, by its form
        given = f"define={{'{name}': ...}} to Kernel or extension (--option=-D{name}=... to simulate)"
        return f"if Python decides this constant, give {given}"
    return None


_SHORT = 3  # letters of a name, of which too many others are alike
_UMBRELLA = "cupyops.cuh"  # includes what kernels outside this library need


@functools.cache
def _common() -> dict[str, str]:
    """Map each name that the headers of `common/` declare to the header to include, the shorter one of two."""
    root = cuda_src()
    within = (root / _UMBRELLA).read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for path in sorted(root.glob("common/**/*.cuh"), key=lambda path: (path.stat().st_size, path.name)):
        header = path.relative_to(root).as_posix()
        for line in strip_comments(path.read_text(encoding="utf-8")).splitlines():
            match = None if line[:1].isspace() else _DECLARES.search(line)  # what is indented belongs to something
            if match is not None:
                found.setdefault(match[match.lastindex or 0], _UMBRELLA if f'"{header}"' in within else header)
    return found


def _for_member(namespace: str, name: str) -> str | None:
    if namespace != "std":
        return _first(_UNKNOWN, namespace)
    if name in BUILT_IN:
        return f"NVRTC has no C++ library; write {name} without `std::`"
    if name == "numeric_limits":
        return f"NVRTC has no <limits>; write the number, as {CONSTANTS['FLT_MAX']}"
    return _first(_UNKNOWN, name) or _LIBRARY + _CCCL


def _first(table: tuple[tuple[str, str], ...], name: str) -> str | None:
    return next((hint for pattern, hint in table if re.fullmatch(pattern, name)), None)
