"""Names known in C++ extensions' files: headers that kernels have no use for, and names that are the host's alone."""

from __future__ import annotations

import functools
import re

from ..compile.source import cuda_src, strip_comments

PRELUDE = "extension/prelude.cuh"
THRUST = "extension/thrust.cuh"  # what a thread may call of it
# headers of the C and C++ libraries, for those of others that include them: the prelude is in their place
STANDARD = (
    "algorithm", "array", "cassert", "cfloat", "climits", "cmath", "cstddef", "cstdint", "cstdio", "cstdlib",
    "cstring", "functional", "iterator", "limits", "memory", "new", "numeric", "string", "tuple", "type_traits",
    "utility", "assert.h", "float.h", "limits.h", "math.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h",
)  # fmt: skip

# headers that are PyTorch's, the C and C++ library's, or the CUDA runtime's for host code
_HOST_HEADER = re.compile(
    r"(torch|ATen|c10|caffe2|THC|TH|pybind11|pytorch|thrust|cub/device)/.*|Python\.h|"
    r"[a-z_]+|(assert|complex|ctype|errno|fenv|float|inttypes|limits|math|memory|signal|stdarg|stdbool|stddef|stdint|stdio|"
    r"stdlib|string|time|unistd|omp|dlfcn)\.h|"
    r"(cuda|cuda_runtime|cuda_runtime_api|cuda_device_runtime_api|device_launch_parameters|device_functions|driver_types|"
    r"cuda_profiler_api|cuda_texture_types|vector_types|vector_functions|helper_\w+|math_functions|builtin_types|"
    r"cublas\w*|cusparse\w*|cusolver\w*|cudnn\w*|cufft\w*|curand|nvToolsExt|sm_\w+|common_functions|host_defines|"
    r"cuda_occupancy|texture_\w+)\.(h|hpp)|"
    r"device_atomic_functions\.h|nvtx3/.*"
)
_PYTORCH = frozenset(("at", "torch", "c10", "caffe2", "THC"))
_LIBRARIES = frozenset(("thrust", "pybind11", "py", "cublas", "cudnn"))
_CALLS = re.compile(
    r"(cuda|cublas|cusparse|cusolver|cudnn|cufft|curand)[A-Z]\w*|(TORCH|AT|THC|C10_CUDA)_[A-Z_]+|PYBIND11_\w+"
)
_OF_DEVICE = re.compile(r"cuda(TextureObject|SurfaceObject)_t|C10_(HOST_)?DEVICE|AT_(HOST_)?DEVICE")
# types of the C++ library that allocate, or are the host's: names of them stand alone behind `using namespace std`
HOST_OF_STD = frozenset((
    "vector", "string", "map", "unordered_map", "set", "unordered_set", "list", "deque", "queue", "stack",
    "shared_ptr", "unique_ptr", "function", "stringstream", "ostringstream", "ifstream", "ofstream", "fstream",
    "ostream", "mutex", "thread", "cout", "cerr",
))  # fmt: skip
_TYPES = frozenset(("Tensor", "TensorOptions", "ScalarType", "IntArrayRef", "ostream", "FILE"))


def is_host_header(spelled: str) -> bool:
    """Return True if kernels have no use for the header: what they could need of it is in the prelude."""
    return _HOST_HEADER.fullmatch(spelled) is not None


def is_host(path: list[str]) -> bool:
    """Return True if a name, `["at", "Tensor"]`, is one that no kernel can use."""
    first, last = path[0], path[-1]
    if first in _PYTORCH or first == "std":
        return len(path) > 1 and not set(path[1:]) & declared()
    if first == "thrust" and path[1:] and set(path[1:]) <= declared(THRUST):
        return False
    if first in _LIBRARIES and len(path) > 1:
        return True
    if len(path) == 1 and first in _TYPES:
        return True
    return _CALLS.fullmatch(last) is not None and _OF_DEVICE.fullmatch(last) is None


def is_host_namespace(path: list[str]) -> bool:
    """Return True if a namespace is of the host's libraries and has nothing that is in the prelude."""
    of_pytorch = path[0] in _PYTORCH or path[0] == "std"
    return path[0] in _LIBRARIES - {"thrust"} or (of_pytorch and not set(path[1:]) <= declared())


@functools.cache
def declared(header: str = "") -> frozenset[str]:
    """The words of a header of ours, of all but thrust's by default: among them are the names that it declares."""
    folder = cuda_src() / "extension"
    paths = (
        [cuda_src() / header] if header else [one for one in sorted(folder.glob("*.cuh")) if one.name != "thrust.cuh"]
    )
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    built_in = ("initializer_list", "move", "forward")  # of NVRTC
    return frozenset((*re.findall(r"[A-Za-z_]\w*", strip_comments(text)), *built_in))
