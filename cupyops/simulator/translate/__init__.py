"""PTX text into Python: parsing, control flow, and a generated function for each basic block."""

from . import emit_async, emit_data, emit_undefined, emit_warp  # noqa: F401 - they register what they write
from .codegen import compile_kernel
from .function import Compiled

__all__ = ["Compiled", "compile_kernel"]
