"""The words of C++ that have a meaning in Python: types, dtypes, and the functions and methods of PyTorch."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping

from .values import DEVICE, DIM3, DTYPE, LONG, NUMBERS, OPTIONS, SCALAR, STATUS, STRING, TENSOR, VOID, Type


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DTYPES = {
    "float": "float32", "double": "float64", "int": "int32", "int32_t": "int32", "int64_t": "int64", "long": "int64",
    "long long": "int64", "short": "int16", "int16_t": "int16", "int8_t": "int8", "uint8_t": "uint8", "bool": "bool",
    "unsigned char": "uint8", "at::Half": "float16", "c10::Half": "float16", "torch::Half": "float16", "half": "float16",
    "__half": "float16", "at::BFloat16": "bfloat16", "c10::BFloat16": "bfloat16", "__nv_bfloat16": "bfloat16",
}  # fmt: skip
_SCALARS = {
    "Float": "float32", "Double": "float64", "Int": "int32", "Long": "int64", "Half": "float16", "BFloat16": "bfloat16",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "Float32": "float32", "Float64": "float64", "Int32": "int32", "Int64": "int64", "Float16": "float16", "UInt8": "uint8",
    "Int16": "int16", "Int8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64", "F32": "float32", "F64": "float64",
}  # fmt: skip
POINTERS = _words(
    """
    data data_ptr const_data_ptr mutable_data_ptr packed_accessor packed_accessor32 packed_accessor64
    generic_packed_accessor
    """
)
SIZES = _words("size stride")  # of one dimension
PROPERTIES = {  # methods without arguments that are attributes, or methods of no arguments, in Python, and what they give
    "numel": ("numel()", "size"), "dim": ("dim()", "size"), "ndimension": ("dim()", "size"), "nbytes": ("nbytes", "size"),
    "element_size": ("element_size()", "size"), "itemsize": ("itemsize", "size"),
    "storage_offset": ("storage_offset()", "size"), "get_device": ("get_device()", "int"),
    "sizes": ("shape", "sizes"), "strides": ("stride()", "sizes"), "scalar_type": ("dtype", "dtype"),
    "dtype": ("dtype", "dtype"), "device": ("device", "device"), "is_contiguous": ("is_contiguous()", "bool"),
    "requires_grad": ("requires_grad", "bool"), "is_floating_point": ("is_floating_point()", "bool"),
    "is_complex": ("is_complex()", "bool"), "is_sparse": ("is_sparse", "bool"), "grad": ("grad", "tensor"),
}  # fmt: skip
METHODS = _words(  # whose Python has the same name and arguments, and that give a tensor
    """
    contiguous to view reshape transpose permute sum mean fill_ zero_ unsqueeze squeeze expand view_as
    expand_as clone t select narrow index_select gather scatter_ add_ mul_ sub_ div_ add mul sub div exp log sqrt
    abs clamp copy_ flatten repeat detach masked_select nonzero cumsum argsort cpu cuda type_as masked_fill_ masked_fill
    index_put_ scatter_add_ matmul mm bmm any all floor ceil tile flip resize_ resize_as_ requires_grad_ set_
    sigmoid tanh neg pow square
    bernoulli bernoulli_ unfold baddbmm_ addmm_ addmv_ max min argmax argmin index_add_ bitwise_not logical_not
    true_divide_ true_divide div_ cumprod prod amax amin sign sign_ flatten squeeze_ unsqueeze_ new_tensor rsub
    uniform_ normal_ half float double int long bool eq ne gt ge lt le round clamp_min clamp_max clamp_ exp_ sqrt_
    """
)
LISTS = _words("unbind split chunk")  # that give several tensors
PAIRS = _words("sort topk max min")  # that give values and indices, where a dimension is given
TENSORS = _words("zeros empty ones zeros_like empty_like ones_like full full_like rand randn arange")
FUNCTIONS = _words(
    """
    sort gather cat stack sum max min matmul mm bmm exp log sqrt abs where cumsum index_select argsort nonzero
    sigmoid tanh softmax log_softmax linspace clamp flip topk addmm relu bitwise_not any all
    prod cumprod mean amax amin floor ceil round
    add sub mul div addmv outer
    """
)
KEYWORDS: Mapping[str, tuple[int, tuple[str, ...]]] = {  # the first argument that Python has by its name, and names
    "add": (1, ("alpha",)), "sub": (1, ("alpha",)), "rsub": (1, ("alpha",)), "index_add": (3, ("alpha",)),
    "addmm": (2, ("beta", "alpha")), "addmv": (2, ("beta", "alpha")), "baddbmm": (2, ("beta", "alpha")),
    "div": (1, ("rounding_mode",)),
}  # fmt: skip
SEVERAL = {"unique_dim": 3, "_unique": 2, "_unique2": 3}  # of ATen alone, and how many tensors they give
ASKED = _words("isnan isinf isfinite")
EXACT = _words("ceil floor round trunc rint fabs fmax fmin fmod copysign")  # of floats they are floats
OF_TWO = _words("pow atan2 fmax fmin fmod copysign hypot")
REAL = (
    ASKED
    | EXACT
    | OF_TWO
    | _words(
        """
    sqrt cbrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc lgamma
    """
    )
)
CEIL = _words("THCCeilDiv ceil_div ATenCeilDiv")
OF_GPUS: Mapping[str, int | tuple[int, ...]] = {  # what all have in common
    "warpSize": 32, "maxThreadsPerBlock": 1024, "sharedMemPerBlock": 49152,
    "maxGridSize": (2**31 - 1, 65535, 65535), "maxThreadsDim": (1024, 1024, 64),
}  # fmt: skip
OF_LAUNCHES = {"CUDA_NUM_THREADS": 1024, "C10_WARP_SIZE": 32, "warpSize": 32}
LIMITS = {
    "INT_MAX": (2**31 - 1, "int"), "INT_MIN": (-(2**31), "int"), "UINT_MAX": (2**32 - 1, "unsigned"),
    "INT64_MAX": (2**63 - 1, "int64_t"), "LONG_MAX": (2**63 - 1, "long"), "FLT_MAX": (3.4028234663852886e38, "float"),
    "FLT_MIN": (1.1754943508222875e-38, "float"), "FLT_EPSILON": (1.1920928955078125e-07, "float"),
    "DBL_MAX": (1.7976931348623157e308, "double"), "M_PI": (3.141592653589793, "double"),
    "INFINITY": (math.inf, "float"), "NAN": (math.nan, "float"), "HUGE_VAL": (math.inf, "double"),
}  # fmt: skip

# Known to be nothing, form by form: a launch finds the device and the stream itself, checks that tensors are on a GPU, and
# raises what CUDA reports.
QUERIES = _words(  # functions that only report an error of CUDA's, or wait: all launches go to one stream, in order
    """
    cudaGetLastError cudaPeekAtLastError cudaDeviceSynchronize cudaStreamSynchronize cudaThreadSynchronize
    at::cuda::stream_synchronize c10::cuda::stream_synchronize cudaStreamWaitEvent cudaStreamCreate cudaStreamCreateWithFlags
    cudaStreamDestroy cudaEventCreate cudaEventCreateWithFlags cudaEventDestroy cudaEventRecord cudaEventSynchronize
    """
)
REPORTS = _words(  # macros that raise what such a function reports
    """
    C10_CUDA_CHECK AT_CUDA_CHECK THCudaCheck C10_CUDA_KERNEL_LAUNCH_CHECK TORCH_CUDA_CHECK C10_CUDA_CHECK_WARN
    C10_CUDA_IGNORE_ERROR C10_CUDA_CLEAR_ERROR CubDebugExit
    """
)
GUARDS = _words(
    """
    CUDAGuard OptionalCUDAGuard DeviceGuard OptionalDeviceGuard CUDAStreamGuard MaybeSetDevice CUDAStream cudaStream_t
    cudaEvent_t THCState
    """
)
STREAMS = _words(
    "getCurrentCUDAStream getDefaultCUDAStream getStreamFromPool cuda_stream device_of THCState_getCurrentStream"
)
ATTRIBUTES_OF_KERNELS = _words(  # hints, and room for shared memory, for which a launch asks itself
    """
    cudaFuncAttributeMaxDynamicSharedMemorySize cudaFuncAttributePreferredSharedMemoryCarveout cudaFuncCachePreferL1
    cudaFuncCachePreferShared cudaFuncCachePreferEqual cudaFuncCachePreferNone
    """
)
SAME_DEVICE = _words("checkAllSameGPU checkSameGPU checkAllSameDevice checkAllDefined checkDefined checkBackend")


MEMORY = _words(
    "cudaMalloc cudaFree cudaMemset cudaMemsetAsync cudaMemcpy cudaMemcpyAsync malloc free memset THCudaMalloc THCudaFree"
    " cudaMemcpyToSymbol cudaMemcpyFromSymbol"
)
EXCEPTIONS = {  # as pybind11 has them in Python
    "std::runtime_error": "RuntimeError", "std::invalid_argument": "ValueError", "std::logic_error": "RuntimeError",
    "std::out_of_range": "IndexError", "std::domain_error": "ValueError", "std::length_error": "ValueError",
    "std::range_error": "ValueError", "std::overflow_error": "OverflowError", "c10::Error": "RuntimeError",
}  # fmt: skip
ALIKE = _words("checkAllSameType checkSameType")

_FLOATING, _INTEGRAL = ["float32", "float64"], ["uint8", "int8", "int16", "int32", "int64"]
_DISPATCHES = {
    "FLOATING_TYPES": _FLOATING,
    "ALL_TYPES": _INTEGRAL + _FLOATING,
    "INTEGRAL_TYPES": _INTEGRAL,
    "INDEX_TYPES": ["int32", "int64"],
    "COMPLEX_TYPES": ["complex64", "complex128"],
    "FLOATING_AND_COMPLEX_TYPES": [*_FLOATING, "complex64", "complex128"],
    "ALL_TYPES_AND_COMPLEX": [*_INTEGRAL, *_FLOATING, "complex64", "complex128"],
}


def dispatched(macro: str, given: str) -> list[str] | None:
    """The dtypes that `AT_DISPATCH_FLOATING_TYPES_AND...(given, x.scalar_type(), ...)` takes; None where it is another."""
    match = re.fullmatch(r"(?:AT|TORCH)_DISPATCH_(.+?)(_AND_HALF|_AND\d?)?", macro)
    if match is None or match[1] not in _DISPATCHES:
        return None
    count = 0 if match[2] in (None, "_AND_HALF") else int(match[2][4:] or 1)  # of dtypes that are named
    named = [dtype_of_constant(one) for one in re.sub(r"\s", "", given).split(",") if one] if count else []
    extra = ["float16"] if match[2] == "_AND_HALF" else [one for one in named if one is not None]
    if len(named) != count or None in named:
        return None
    return list(dict.fromkeys([*_DISPATCHES[match[1]], *extra]))


# names that the Python of a port has a use for
_TAKEN = _words(
    """
    torch cupyops cpp ext math ctypes int float bool range max min abs print len dict list tuple repr str sys pow round sum
    """
)


def name_of(identifier: str) -> str:
    """A C++ name as Python can have it."""
    identifier = identifier.replace("::", "_")  # of an `enum class`
    return identifier + "_" if keyword.iskeyword(identifier) or identifier in _TAKEN else identifier


def kind_of_type(ctype: str) -> str:
    """The kind of what a C++ type declares, as the operator that is made of a function has it."""
    found = type_of(ctype)
    kind = "" if found is None else found.kind
    kind = found.of[0].kind if found is not None and kind == "optional" else kind
    return {"bool": "int", "pointer": "tensor"}.get(kind, kind)


_QUALIFIERS = re.compile(
    r"\b(const|static|constexpr|volatile|inline|typename|struct|__restrict__|__restrict|extern|__host__|__forceinline__)\b"
)
_KINDS = {
    "Tensor": TENSOR, "dim3": DIM3, "ScalarType": DTYPE, "Dtype": DTYPE, "TensorOptions": OPTIONS, "string": STRING,
    "cudaError_t": STATUS, "cudaError": STATUS, "void": VOID, "Device": DEVICE, "IntArrayRef": Type("list", of=(LONG,)),
    "IntList": Type("list", of=(LONG,)), "TensorList": Type("list", of=(TENSOR,)), "Scalar": SCALAR,
    "TensorArg": Type("argument"), "CheckedFrom": STRING, "TypeMeta": DTYPE, "TensorRef": TENSOR,
    "cudaDeviceProp": Type("properties"), "stringstream": Type("stream"), "ostringstream": Type("stream"),
}  # fmt: skip


def type_of(ctype: str, types: Mapping[str, Type] | None = None) -> Type | None:
    """The type that C++ spells so; None for one that is not known. `types` are aliases and template parameters."""
    stars = ctype.count("*") + ctype.count("[")
    plain = " ".join(_QUALIFIERS.sub(" ", re.sub(r"\[[^\]]*\]|[*&]", " ", ctype)).split())
    plain = re.sub(r"\s*([<>,]|::)\s*", r"\1", plain)
    if plain in ("char", "signed char") and stars == 1:
        return STRING
    if plain in ("void",) and stars:
        return Type("pointer", of=(VOID,))
    found = (types or {}).get(plain) or _plain_type(plain, types or {})
    if stars and found is not None and found.kind in ("guard", "properties"):
        return found
    if stars and found is not None:
        return Type("pointer", of=(found,)) if stars == 1 else None
    if stars == 1:
        return Type("pointer", of=(Type("struct", name=plain),))
    return found


def _plain_type(plain: str, types: Mapping[str, Type]) -> Type | None:
    name = re.sub(r"^(::)?((std|at|torch|c10|cuda|detail|nn)::)+", "", plain)
    words = [one for one in name.split() if one != "int" or name.strip() == "int"]
    spelled = " ".join(words)
    if {"unsigned", "signed"} & set(words):
        rest = [one for one in words if one not in ("unsigned", "signed")]
        spelled = " ".join(["unsigned", *rest] if "unsigned" in words else rest) or "int"
    if spelled in NUMBERS:
        return NUMBERS[spelled]
    if spelled in _KINDS:
        return _KINDS[spelled]
    if name in GUARDS:
        return Type("guard")
    if match := re.fullmatch(r"(\w+)<(.*)>", name, re.DOTALL):
        inner = [type_of(one, types) for one in split(match[2])]
        if match[1] in ("vector", "ArrayRef", "List", "initializer_list", "array") and inner[0] is not None:
            return Type("list", of=(inner[0],))
        if match[1] in ("tuple", "pair") and None not in inner:
            return Type("tuple", of=tuple(one for one in inner if one is not None))
        if match[1] in ("optional", "OptionalRef") and inner[0] is not None:
            return Type("optional", of=(inner[0],))
        if "Accessor" in match[1]:
            return Type("pointer", of=(inner[0] or SCALAR,))
    if "Half" in name or "BFloat16" in name or name in ("half", "__half", "__nv_bfloat16", "nv_bfloat16"):
        return SCALAR if name in DTYPES or f"at::{name}" in DTYPES else None
    return None


def split(arguments: str) -> list[str]:
    """The arguments of a template, at its commas."""
    found, depth = [""], 0
    for one in arguments:
        depth += (one in "<([") - (one in ">)]")
        if one == "," and depth == 0:
            found.append("")
        else:
            found[-1] += one
    return [one.strip() for one in found]


def dtype_of_constant(name: str) -> str | None:
    """`torch::kFloat32`, `at::ScalarType::Float` -> float32; None for what is no dtype."""
    match = re.fullmatch(r"(?:::)?(?:(?:at|torch|c10)::)?(?:(ScalarType::)(\w+)|k(\w+))", name)
    return _SCALARS.get(match[2] or match[3]) if match is not None else None
