"""Number of blocks of a kernel that fit on one multiprocessor, by CUDA's occupancy calculation."""

from __future__ import annotations

import re
from dataclasses import dataclass

SOURCE = "CUDA Programming Guide, technical specifications per compute capability"
_REGISTERS = 65536  # per multiprocessor, on every architecture below
_PARTITIONS = 4  # of a multiprocessor, each with its quarter of the registers
_REGISTER_UNIT = 256  # in which a warp gets its registers


@dataclass(frozen=True)
class Limits:
    """Capacity of one multiprocessor."""

    warps: int
    blocks: int
    shared: int  # KB


# 7.x gives shared memory in units of 256 bytes; from 8.0 on the unit is 128, and each block costs the driver 1 KB more.
_LIMITS = {
    "75": Limits(32, 16, 64),
    "80": Limits(64, 32, 164),
    "86": Limits(48, 16, 100),
    "87": Limits(48, 16, 164),
    "89": Limits(48, 24, 100),
    "90": Limits(64, 32, 228),
    "100": Limits(64, 32, 228),
    "120": Limits(48, 24, 100),
}


@dataclass(frozen=True)
class Occupancy:
    """Occupancy of a multiprocessor."""

    blocks: int
    warps: int
    most: int  # warps that the multiprocessor could hold
    limited_by: tuple[str, ...]  # what allows no further block

    @property
    def share(self) -> float:
        """Part of the multiprocessor's warps that is in use."""
        return self.warps / self.most


def occupancy(arch: str, threads: int, registers: int, shared: int) -> Occupancy | None:
    """Occupancy by blocks of `threads` threads with `shared` bytes of shared memory; None for an unknown architecture."""
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    limits = _LIMITS.get(match.group(1)) if match is not None else None
    if match is None or limits is None:
        return None
    warps = -(-threads // 32)
    per_warp = _up(max(registers, 1) * 32, _REGISTER_UNIT)
    turing = match.group(1) == "75"
    bytes_ = _up(shared, 256) if turing else _up(shared + 1024, 128)
    allowed = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": _REGISTERS // _PARTITIONS // per_warp * _PARTITIONS // warps,
        "shared memory": limits.shared * 1024 // bytes_ if bytes_ else limits.blocks,
    }
    blocks = min(allowed.values())
    by = tuple(name for name, number in allowed.items() if number == blocks)
    return Occupancy(blocks, blocks * warps, limits.warps, by)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
