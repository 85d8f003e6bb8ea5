"""Where kernels are kept that tests have compiled: as long as their text is the same, the next test and run have them."""

from pathlib import Path

_BUILD = Path(__file__).resolve().parent.parent / "build"
CUBINS = _BUILD / "cubins"  # `make demo` uses it too
TEXTS = _BUILD / "ptx"  # PTX without machine code, as entries of the same names
