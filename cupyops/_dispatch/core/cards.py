"""GPUs by name, to plan launches for without having one. The figures are of NVIDIA's data sheets and programming guide."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InputError
from .gpu import Gpu

_KB, _MB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Card:
    """A GPU, its architecture, and the bandwidth of its memory in GB/s as its data sheet has it."""

    name: str
    arch: str
    gpu: Gpu
    bandwidth: int


def _card(name: str, arch: str, multiprocessors: int, shared: int, total: int, threads: int, l2: int, gbs: int) -> Card:
    """`shared` and `total` are KB of shared memory of a block and of a multiprocessor, `l2` is MB."""
    sizes = multiprocessors, shared * _KB, total * _KB, threads, l2 * _MB
    capability = int(arch[3:]) // 10
    return Card(name, arch, Gpu(capability, *sizes, library=True), gbs)


# The first card of each architecture stands for it.
CARDS = (
    _card("T4", "sm_75", 40, 64, 64, 1024, 4, 320),
    _card("A100", "sm_80", 108, 163, 164, 2048, 40, 2039),
    _card("RTX 3090", "sm_86", 82, 99, 100, 1536, 6, 936),
    _card("RTX 4090", "sm_89", 128, 99, 100, 1536, 72, 1008),
    _card("H100", "sm_90", 132, 227, 228, 2048, 50, 3352),
    _card("H200", "sm_90", 132, 227, 228, 2048, 50, 4800),
    _card("B200", "sm_100", 148, 227, 228, 2048, 126, 8000),
    _card("RTX 5090", "sm_120", 170, 99, 100, 1536, 96, 1792),
)


def card(name: str) -> Card:
    """The card of that name, or the one that stands for that architecture ("sm_90", "sm_90a")."""
    wanted = name.lower().replace(" ", "").replace("-", "").replace("nvidia", "")
    for one in CARDS:
        if wanted in (one.name.lower().replace(" ", ""), one.arch, one.arch + "a", one.arch + "f"):
            return one
    known = ", ".join(f"{one.name} ({one.arch})" for one in CARDS)
    raise InputError(f"there is no card {name!r}; there are {known}")
