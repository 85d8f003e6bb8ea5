"""The words of C++ that have a meaning in Python: types, dtypes, and the functions and methods of PyTorch."""

from __future__ import annotations

import keyword
import re

from .program import bare


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DTYPES = {
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "int32_t": "int32",
    "int64_t": "int64",
    "long": "int64",
    "long long": "int64",
    "short": "int16",
    "int16_t": "int16",
    "int8_t": "int8",
    "uint8_t": "uint8",
    "unsigned char": "uint8",
    "bool": "bool",
    "at::Half": "float16",
    "c10::Half": "float16",
    "torch::Half": "float16",
    "half": "float16",
    "__half": "float16",
    "at::BFloat16": "bfloat16",
    "c10::BFloat16": "bfloat16",
    "__nv_bfloat16": "bfloat16",
}
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
SIZES = _words("size numel dim stride element_size nbytes itemsize storage_offset")
ATTRIBUTES = {
    "sizes": "shape",
    "scalar_type": "dtype",
    "dtype": "dtype",
    "type": "dtype",
    "device": "device",
    "is_cuda": "is_cuda",
}
METHODS = _words(
    """
    contiguous is_contiguous to view reshape transpose permute sum mean max min fill_ zero_ unsqueeze squeeze expand
    expand_as clone t select narrow index_select gather scatter_ add_ mul_ sub_ div_ add mul sub div exp log sqrt
    abs clamp copy_ flatten repeat strides detach masked_select nonzero sort topk cumsum argsort item cpu cuda
    index_put_ scatter_add_ matmul mm bmm requires_grad any all floor ceil tile chunk split unbind flip size
    """
)
TENSORS = _words("zeros empty ones zeros_like empty_like ones_like full full_like rand randn arange")
FUNCTIONS = _words(
    """
    sort gather cat stack sum max min matmul mm bmm exp log sqrt abs where cumsum index_select unique
    """
)
REAL = _words("ceil floor sqrt pow log log2 exp ceilf floorf sqrtf powf")
CEIL = _words("THCCeilDiv ceil_div ATenCeilDiv")
OF_LAUNCHES = {"CUDA_NUM_THREADS": "1024"}  # of ATen/cuda/detail/KernelUtils.h
# of C++'s library and of CUDA's, where they are not PyTorch's functions of these names
STANDARD = REAL | _words("min max make_tuple get tie abs")


_OF_NAMES = {"Half": "float16", "BFloat16": "bfloat16"}


def dispatched(macro: str, given: str) -> list[str]:
    """The floating-point dtypes that `AT_DISPATCH_FLOATING_TYPES_AND...(given, ...)` takes; none where it is another."""
    match = re.fullmatch(r"(?:AT|TORCH)_DISPATCH_FLOATING_TYPES(_AND_HALF|_AND\d?)?", macro)
    if match is None:
        return []
    named = re.findall(r"\bk?(Half|BFloat16)\b", given.partition('"')[0]) if match[1] != "_AND_HALF" else ["Half"]
    return (
        ["float32", "float64", *(_OF_NAMES[one] for one in dict.fromkeys(named))]
        if match[1]
        else ["float32", "float64"]
    )


def name_of(identifier: str) -> str:
    """A C++ name as Python can have it."""
    return identifier + "_" if keyword.iskeyword(identifier) else identifier


def kind_of_type(ctype: str) -> str:
    """The kind of what a C++ type declares."""
    plain = re.sub(r"\b(const|static|constexpr|volatile|std::)\b|&", " ", ctype).strip()
    if "*" in plain or re.search(r"\bTensor\b", plain):
        return "tensor"
    if re.search(r"\b(float|double)\b", plain):
        return "float"
    if re.search(r"\bdim3\b", plain):
        return "dim3"
    if re.search(r"\b(int|long|short|unsigned|size_t|u?int\d+_t|bool)\b", plain):
        return "int"
    return "options" if "TensorOptions" in plain else ""


def dtype_of_constant(name: str) -> str | None:
    """`torch::kFloat32`, `at::ScalarType::Float` -> float32; None for what is no dtype."""
    last = bare(name)
    if last.startswith("k") and last[1:] in _SCALARS:
        return _SCALARS[last[1:]]
    return _SCALARS.get(last) if "ScalarType" in name else None
