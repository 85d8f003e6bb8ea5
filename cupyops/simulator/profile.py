"""Counting, by instruction: how often it ran, the sectors and banks its memory accesses touched, and divergence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .machine.faults import Listing
from .machine.group import Group
from .translate.function import CompiledBlock
from .translate.ptx import Place

_SECTOR = 32  # bytes
_BANKS = 32  # of 4 bytes


@dataclass
class Counts:
    """Counts of one instruction, or one line, in the whole launch."""

    warps: int = 0  # times that a warp ran it
    threads: int = 0
    requests: int = 0  # global: times that a warp accessed memory
    sectors: int = 0  # 32-byte sectors that those requests touched
    least_sectors: int = 0  # had the bytes that a request asks for lain side by side
    shared_requests: int = 0
    wavefronts: int = 0  # passes over the banks
    least_wavefronts: int = 0  # had no two words of a pass been in one bank

    def add(self, other: Counts) -> None:
        """Add another's counts to these."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Line:
    """Counts of one line of the .cu file."""

    own: Counts = field(default_factory=Counts)
    total: int = 0  # warp instructions, with those of the functions that were called, and inlined, on this line
    instructions: list[int] = field(default_factory=list)  # the numbers of its own


@dataclass(frozen=True)
class _Piece:
    """Accesses of one width, each by a thread of a warp."""

    warp: np.ndarray
    address: np.ndarray
    width: int

    def sectors(self) -> np.ndarray:
        """Warp and sector as one number. An access is aligned, and no wider than a sector: it lies in one."""
        sector = (self.address >> np.uint64(5)).astype(np.int64)
        return self.warp << 46 | (sector & ((1 << 46) - 1))


def _bytes_asked(pieces: list[_Piece]) -> tuple[np.ndarray, np.ndarray]:
    """(warps, the bytes that each asks for). Lanes at one address ask for it once."""
    total: defaultdict[int, int] = defaultdict(int)
    for width in {piece.width for piece in pieces}:
        same = [piece for piece in pieces if piece.width == width]
        warp = np.concatenate([piece.warp for piece in same])
        different, which = np.unique(np.concatenate([piece.address for piece in same]), return_inverse=True)
        warps, elements = np.unique(np.unique(warp * len(different) + which) // len(different), return_counts=True)
        for one, number in zip(warps.tolist(), elements.tolist()):
            total[one] += number * width
    return np.array(list(total), np.int64), np.array(list(total.values()), np.int64)


def _ratio(count: int, least: int, requests: int) -> str:
    return f"{count / requests:.3g} ({least / requests:.3g})" if requests else ""


@dataclass
class Profile:
    """The counts of one launch."""

    listing: Listing
    _counts: defaultdict[int, Counts] = field(default_factory=lambda: defaultdict(Counts))
    _pieces: defaultdict[int, list[_Piece]] = field(default_factory=lambda: defaultdict(list))

    @property
    def instructions(self) -> defaultdict[int, Counts]:
        """Number of the instruction -> its counts."""
        self._settle()
        return self._counts

    def block(self, block: CompiledBlock, group: Group) -> None:
        """A group runs a basic block."""
        self._settle()
        warps = group.batch.warps if group.index is None else len(np.unique(group.get("warp")))
        for pc in range(block.first, block.first + block.size):
            counts = self._counts[pc]
            counts.warps += warps
            counts.threads += group.size

    def global_access(self, group: Group, address: np.ndarray, width: int, pc: int) -> None:
        """An access to global memory, or a piece of one: the simulator may make several of what is one for the GPU."""
        self._pieces[pc].append(_Piece(group.get("warp").astype(np.int64), address, width))

    def _settle(self) -> None:
        """Count the accesses of the block that ran last, in which each instruction ran once."""
        for pc, pieces in self._pieces.items():
            counts = self._counts[pc]
            touched = np.unique(np.concatenate([piece.sectors() for piece in pieces]))
            counts.sectors += len(touched)
            warps, bytes_ = _bytes_asked(pieces)
            counts.requests += len(warps)
            counts.least_sectors += int((-(-bytes_ // _SECTOR)).sum())
        self._pieces.clear()

    def shared_access(self, group: Group, offset: np.ndarray, width: int, pc: int) -> None:
        """Bank conflicts: words in one bank that a pass of 128 bytes asks for."""
        words = max(1, width // 4)
        lanes_per_pass = _BANKS // words
        word = ((offset >> 2)[:, None] + np.arange(words)).reshape(-1)
        passes = np.repeat(group.get("warp") * 8 + group.get("laneid").astype(np.int64) // lanes_per_pass, words)
        distinct = np.unique(passes << 32 | word)  # lanes that want the same word get it together
        bank = (distinct >> 32) * _BANKS + (distinct & (_BANKS - 1))
        banks, load = np.unique(bank, return_counts=True)
        first = np.flatnonzero(np.diff(banks // _BANKS, prepend=-1))  # of each pass
        counts = self._counts[pc]
        counts.shared_requests += len(np.unique(group.get("warp")))
        counts.wavefronts += int(np.maximum.reduceat(load, first).sum())
        counts.least_wavefronts += len(first)

    @property
    def total(self) -> Counts:
        """The counts of all instructions together."""
        total = Counts()
        for counts in self.instructions.values():
            total.add(counts)
        return total

    def __str__(self) -> str:
        """The lines that ran, with their counts for each request of a warp; in brackets how few would do."""
        rows = [("line", "warp instructions", "active threads", "sectors", "wavefronts", "")]
        for (file, number), line in sorted(self.by_line().items()):
            if (own := line.own).warps:
                text = "".join(self.listing.sources.get(file, "").splitlines()[number - 1 : number]).strip()
                traffic = _ratio(own.sectors, own.least_sectors, own.requests)
                passes = _ratio(own.wavefronts, own.least_wavefronts, own.shared_requests)
                active = f"{own.threads / own.warps:.3g}"
                rows.append((str(number), f"{own.warps:,}", active, traffic, passes, text))
        widths = [max(map(len, column)) for column in zip(*rows)][:-1]
        return "\n".join("  ".join([*map(str.rjust, row, widths), row[-1]]).rstrip() for row in rows)

    @property
    def issued(self) -> int:
        """Warp instructions of the whole launch."""
        return sum(counts.warps for counts in self.instructions.values())

    def by_line(self) -> dict[tuple[str, int], Line]:
        """(file, line) -> what it did.

        An instruction is counted where it was written: on the innermost line whose text is known, so that what the CUDA
        headers inline is found on the line that called it.
        """
        lines: defaultdict[tuple[str, int], Line] = defaultdict(Line)
        for pc, counts in sorted(self.instructions.items()):
            places = list(self._places(self.listing.instructions[pc].place))
            if not places:
                continue
            known = [place for place in places if place[0] in self.listing.sources]
            line = lines[(known or places)[0]]
            line.own.add(counts)
            line.instructions.append(pc)
            for place in set(known or places):
                lines[place].total += counts.warps
        return dict(lines)

    def _places(self, place: Place | None) -> Iterator[tuple[str, int]]:
        """The line, then those it was inlined at, outwards. Line 0 is the compiler's way to name none."""
        while place is not None:
            if place.line:
                yield self.listing.file(place), place.line
            place = place.inlined_at
