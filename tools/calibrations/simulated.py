"""The simulator's half: compile a section, run its cases, put code and results into the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from cupyops._kernel.compile import backend
from cupyops.simulator import Pointer, Program, TensorMap

from .case import ARCH, Argument, Array, Case, Map, Section
from .store import Writer


def record(section: Section, writer: Writer, advance: Callable[[str], Any]) -> None:
    """Every case of a section into the store: its launch, its inputs, its outputs or the simulator's error."""
    ptx, cubin = compiled(section)
    program = Program(ptx, sources={f"{section.name}.cu": section.text})
    entries = []
    for case in section.cases:
        advance(f"{section.name}: {case.name}")
        entries.append(_recorded(case, program, writer))
    writer.contents["sections"][section.name] = {"cubin": writer.put(cubin), "cases": entries}


def compiled(section: Section) -> tuple[str, bytes]:
    """(PTX, cubin) of the section's text. Raises where NVRTC refuses it."""
    nvrtc = backend.nvrtc()
    program = nvrtc.createProgram(section.text, f"{section.name}.cu", [], [])
    try:
        nvrtc.compileProgram(program, ("-std=c++17", "-lineinfo", f"-arch={ARCH}", f"-I{backend.cuda_include()}"))
        ptx = nvrtc.getPTX(program)
        return (ptx.decode() if isinstance(ptx, bytes) else ptx).rstrip("\0"), nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        raise RuntimeError(f"{section.name} does not compile:\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


def _recorded(case: Case, program: Program, writer: Writer) -> dict[str, Any]:
    held = [argument.data.copy() if isinstance(argument, Array) else None for argument in case.arguments]
    before = [writer.put(data) if data is not None else "" for data in held]
    error = _simulate(case, program, held)
    arguments: list[dict[str, Any]] = []
    for argument, data, key in zip(case.arguments, held, before):
        if isinstance(argument, Array):
            after = writer.put(data) if argument.output and not error and data is not None else None
            arguments.append({"kind": "array", "before": key, "after": after, "format": argument.format})
        elif isinstance(argument, Map):
            arguments.append({"kind": "map", **asdict(argument)})
        else:
            arguments.append({"kind": "int", "value": argument})
    launch = {"kernel": case.kernel, "grid": case.grid, "block": case.block, "shared": case.shared}
    return {"name": case.name, "how": case.how, **launch, "arguments": arguments, "error": error}


def _simulate(case: Case, program: Program, held: list[np.ndarray | None]) -> str:
    """Run it on these arrays; the error's text, or nothing."""
    made = [program.memory.allocate(data, f"argument {i}") if data is not None else None for i, data in enumerate(held)]

    def value(argument: Argument, index: int) -> Any:
        allocation = made[argument.array if isinstance(argument, Map) else index]
        if isinstance(argument, int):
            return argument
        assert allocation is not None
        return _tensor_map(argument, allocation.base).encode() if isinstance(argument, Map) else Pointer(allocation)

    try:
        arguments = [value(argument, index) for index, argument in enumerate(case.arguments)]
        program.launch(case.kernel, (case.grid,), (case.block,), arguments, shared=case.shared, label=case.name)
    except Exception as error:  # a fault of the simulator itself is a finding too
        return f"{type(error).__name__}: {error}"
    finally:
        for allocation in made:
            if allocation is not None:
                program.memory.free(allocation)
    return ""


def _tensor_map(map_: Map, address: int) -> TensorMap:
    shape = map_.sizes, map_.strides, map_.box, map_.element_strides
    return TensorMap(address, map_.element, *shape, map_.swizzle, map_.fill)
