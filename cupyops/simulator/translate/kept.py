"""Translations as bytes, to be kept: reading a PTX text and writing its kernels takes longer than most launches.

What comes back is all that a launch needs. The bodies of functions and the operands of instructions are left out, for they
are in the generated code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import pickle
import zlib
from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from .function import Compiled
from .ptx import Function, Instruction, Module


@dataclass
class Translation:
    """A PTX text, and those of its kernels that have been translated: by name, and whether for clusters and for worst."""

    module: Module
    kernels: dict[tuple[str, bool, bool], Compiled] = field(default_factory=dict)
    is_whole: bool = True  # whether the functions have their bodies


def dump(ptx: str, translation: Translation, variables: Set[str]) -> bytes:
    """The translation of `ptx`, after a seal over both and over the simulator itself.

    Kernels that name one of the `variables` are left out: their code has addresses of this process.
    """
    module = replace(
        translation.module, functions={name: _outline(one) for name, one in translation.module.functions.items()}
    )
    kernels = {
        key: _without_text(compiled) for key, compiled in translation.kernels.items() if is_movable(compiled, variables)
    }
    content = zlib.compress(pickle.dumps(Translation(module, kernels, is_whole=False), pickle.HIGHEST_PROTOCOL), 1)
    return _seal(ptx, content) + content


def is_movable(compiled: Compiled, variables: Set[str]) -> bool:
    """Return True if another process can run the code: it names none of the module's `variables`."""
    return variables.isdisjoint(compiled.layout.symbols)


def load(ptx: str, kept: bytes) -> Translation | None:
    """Invert `dump`; None where the bytes are damaged, of another text, or written by another version."""
    size = hashlib.sha256().digest_size
    if kept[:size] != _seal(ptx, kept[size:]):
        return None
    translation: Translation = pickle.loads(zlib.decompress(kept[size:]))
    return translation


def _seal(ptx: str, content: bytes) -> bytes:
    return hashlib.sha256(_version() + hashlib.sha256(ptx.encode()).digest() + content).digest()


@functools.cache
def _version() -> bytes:
    """The simulator's own text, how Python stores code, and NumPy, whose numbers the code names."""
    root = Path(__file__).resolve().parents[1]
    texts = [path.read_bytes() for path in sorted(root.rglob("*.py"))]
    return hashlib.sha256(b"".join([importlib.util.MAGIC_NUMBER, np.__version__.encode(), *texts])).digest()


def _without_text(compiled: Compiled) -> Compiled:
    return replace(
        compiled,
        function=_outline(compiled.function),
        blocks=[block.kept() for block in compiled.blocks],
        # what messages and the scheduler ask for
        instructions=[
            Instruction(one.opcode, one.modifiers, (), None, one.line, one.place, one.text)
            for one in compiled.instructions
        ],
    )


def _outline(function: Function) -> Function:
    return replace(function, body=[], registers={})
