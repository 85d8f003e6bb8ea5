"""Resources of a compiled kernel, read from its cubin: registers, stack, shared and constant memory.

A cubin is an ELF file. Section names carry the kernel's symbol; `.nv.info` holds attributes as records of a format byte, an
attribute byte and a 16-bit size or value. No GPU and no driver is needed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from ...errors import InputError, MissingDependencyError

_SIZED = 4  # the record format whose 16 bits are the size of what follows; in the others they are the value itself
_FRAME_SIZE = 0x11
_REGISTERS = 0x2F
_RESERVED_SHARED = 1024  # from sm_90 on a kernel's section counts these bytes of the driver's too


@dataclass(frozen=True)
class Resources:
    """Resources that one kernel takes on the GPU."""

    registers: int  # per thread
    stack: int  # bytes of local memory per thread: spilled registers, and arrays that are not held in registers
    shared: int  # bytes of static shared memory per block
    constant: dict[int, int]  # bank -> bytes; bank 0 holds the parameters, bank 3 the file's __constant__ variables


def resources(cubin: bytes, symbol: str) -> Resources:
    """The resources of the kernel that the cubin calls `symbol`.

    Raises:
        InputError: not a cubin, or no such kernel in it.
        MissingDependencyError: pyelftools is not installed.
    """
    sections = _sections(cubin)
    if f".text.{symbol}" not in sections:
        kernels = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
        raise InputError(f"the cubin has no kernel {symbol}; it has {', '.join(kernels) or 'none'}")
    attributes = _attributes(sections, symbol)
    if _REGISTERS not in attributes:
        raise InputError(
            f"the cubin does not say how many registers {symbol} uses; its .nv.info is of another "
            "form; compile it with this NVRTC"
        )
    return Resources(
        registers=attributes[_REGISTERS],
        stack=attributes.get(_FRAME_SIZE, 0),
        shared=_shared(sections, symbol),
        constant=_constant(sections, symbol),
    )


def _sections(cubin: bytes) -> dict[str, Any]:
    """The sections by name."""
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise MissingDependencyError(
            f'reading a cubin needs pyelftools: {error}\n  pip install "cupyops[cli]"'
        ) from error
    try:
        return {section.name: section for section in ELFFile(BytesIO(cubin)).iter_sections()}
    except ELFError as error:
        raise InputError(f"not a cubin: {error}; expected what `python -m cupyops compile` writes") from error


def _attributes(sections: dict[str, Any], symbol: str) -> dict[int, int]:
    """attribute -> value, of those records in `.nv.info` that are about one function: its symbol number and a value."""
    found: dict[int, int] = {}
    if not {".symtab", ".nv.info"} <= set(sections):
        return found
    names = [entry.name for entry in sections[".symtab"].iter_symbols()]
    for attribute, payload in _records(sections[".nv.info"].data()):
        if len(payload) == 8:
            number, value = struct.unpack("<II", payload)
            if number < len(names) and names[number] == symbol:
                found[attribute] = value
    return found


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of each record that has a payload."""
    position = 0
    while position + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if form == _SIZED:
            yield attribute, data[position : position + size]
            position += size


def _shared(sections: dict[str, Any], symbol: str) -> int:
    section = sections.get(f".nv.shared.{symbol}")
    if section is None:
        return 0
    return int(section["sh_size"]) - (_RESERVED_SHARED if ".nv.shared.reserved.0" in sections else 0)


def _constant(sections: dict[str, Any], symbol: str) -> dict[int, int]:
    """The banks of this kernel, and those that all kernels of the file share."""
    banks: dict[int, int] = {}
    for name, section in sections.items():
        match = re.fullmatch(r"\.nv\.constant(\d+)(?:\.(.+))?", name)
        if match is not None and match.group(2) in (None, symbol):
            bank = int(match.group(1))
            banks[bank] = banks.get(bank, 0) + int(section["sh_size"])
    return dict(sorted(banks.items()))
