"""Our own operators, forward and backward: the same inputs in the simulator and on CUDA tensors, by the same machine code.

The cubins that NVRTC made of the PTX that the simulator ran travel along, so that no other compiler takes part.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from operator_samples import Make, run, samples
from torch import Tensor

import cupyops
from cupyops._kernel import kernel
from cupyops._kernel.compile import cache, compiler
from cupyops.errors import SimulatorError

from .compared import compare, new_row
from .store import Reader, Writer

ARCH = "sm_90"
NAME = "operator"
_FORMATS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def record(writer: Writer, advance: Callable[[str], Any]) -> None:
    """Every sample in every dtype into the store: inputs, results, and the cubins that make them."""
    entries = []
    for name, dtype, call in _cases():
        advance(f"{NAME}: {name}")
        entries.append({"name": name} | _recorded(writer, dtype, call))
    writer.contents["sections"][NAME] = {"cases": entries, "cubins": _cubins(writer)}


def _recorded(writer: Writer, dtype: torch.dtype, call: Any) -> dict[str, Any]:
    """Inputs, results and launches of a sample in the simulator, or the error."""
    make = Make(dtype)
    try:
        with cupyops.simulate(ARCH), cupyops.trace() as trace:
            results = run(call, make)
    except SimulatorError as error:
        return {"error": f"{type(error).__name__}: {error}", "given": "", "found": [], "kernels": []}
    if "reference" in trace.routes():
        raise RuntimeError("a sample took the reference")
    found = [writer.put(_bits(result)) for result in results]
    launches = [record.kernel for record in trace.launches()]
    return {"error": "", "given": _digest(make.made), "found": found, "kernels": launches}


def _cases() -> Iterator[tuple[str, torch.dtype, Any]]:
    for dtype in _FORMATS:
        numbers: dict[str, int] = {}
        for operator, call in samples():
            numbers[operator] = numbers.get(operator, 0) + 1
            yield f"{operator} {numbers[operator]} {str(dtype).removeprefix('torch.')}", dtype, call


def _compiled_here() -> list[str]:
    """Kernels that were not found among those of the file."""
    loaded = [one for made in kernel.kernels() for one in made._specialised.values() if one.loaded]
    return [one.name for one in loaded if one.binary(ARCH).origin != "precompiled"]


def _bits(tensor: Tensor) -> np.ndarray:
    """A tensor as the unsigned integers that hold it."""
    dense = tensor.detach().cpu().contiguous()
    data = (dense.view(_BITS[dense.dtype]) if dense.dtype in _BITS else dense).numpy()
    return data.reshape(-1).view(f"u{data.dtype.itemsize}")


def _digest(tensors: list[Tensor]) -> str:
    """Inputs are made again on the other machine; this tells whether they came out alike."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(_bits(tensor).tobytes())
    return sha.hexdigest()


def _cubins(writer: Writer) -> str:
    """Each kernel that was launched: the two files of its cache entry. Packed together, since they are much alike."""
    with tempfile.TemporaryDirectory() as folder:
        for one in kernel.kernels():
            for specialised in one._specialised.values():
                binary = specialised.binary(ARCH)
                stem = compiler.entry_name(one.source, specialised.name, ARCH, one.options)
                assert binary.path is not None
                cache.write_entry(Path(folder), stem, replace(binary, ptx=""), binary.path.read_bytes())
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:xz") as archive:
            archive.add(folder, arcname="")
    return writer.put(packed.getvalue())


def rows(reader: Reader, device: str, skip: set[str]) -> Iterator[dict[str, Any]]:
    """The lines of the report, one for each sample that is not to be skipped; before each, its name."""
    section = reader.contents["sections"][NAME]
    stored = {entry["name"]: entry for entry in section["cases"]}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(reader.get(section["cubins"]).tobytes())) as archive:
            archive.extractall(folder, filter="data")
        if device == "cpu":
            cupyops.simulate(ARCH).__enter__()  # only to try this tool out
        else:
            os.environ["CUPYOPS_CUBIN_PATH"] = folder
        for name, dtype, call in _cases():
            if name not in skip:
                yield {"begins": name}
                if error := stored[name]["error"]:
                    yield new_row(name, "bits") | {"error": f"simulator: {error}"}
                else:
                    yield _row(stored[name], dtype, call, reader, device)


def _row(entry: dict[str, Any], dtype: torch.dtype, call: Any, reader: Reader, device: str) -> dict[str, Any]:
    line = new_row(entry["name"], "bits")
    make = Make(dtype, device)
    with cupyops.trace() as trace:
        results = run(call, make)
    launches = [record.kernel for record in trace.launches()]
    if launches != entry["kernels"]:
        line["error"] = f"launches {launches}, in the simulator {entry['kernels']}"
    if device != "cpu" and (others := _compiled_here()):
        line["error"] = f"not the machine code that travelled: {others}"
    if _digest(make.made) != entry["given"]:
        line["error"] = "the inputs are not those of the simulator"
    for key, result in zip(entry["found"], results, strict=True):
        compare(line, reader.get(key), _bits(result), _FORMATS.get(result.dtype, ""))
    return line
