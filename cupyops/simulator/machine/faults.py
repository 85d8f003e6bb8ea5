"""Raising what was found: kernel, thread, block, the .cu line with an excerpt, and the PTX line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ..errors import SimulatorError
from ..translate.flow import registers
from ..translate.ptx import Instruction, Place, Vector, registers_of
from .group import Group

Kind = TypeVar("Kind", bound=SimulatorError)


@dataclass(frozen=True)
class Listing:
    """Tables by which a place in a kernel is named."""

    kernel: str
    instructions: list[Instruction]
    files: dict[int, str]
    sources: dict[str, str]  # file name -> text, for excerpts

    def short(self, pc: int) -> str:
        """`layer_norm.cu:42`, the innermost line."""
        place = self.instructions[pc].place
        return self._file_line(place) if place is not None else f"PTX line {self.instructions[pc].line}"

    def describe(self, pc: int) -> list[str]:
        """The .cu line with its text, the calls that were inlined there, and the PTX line."""
        instruction = self.instructions[pc]
        lines = []
        place, prefix = instruction.place, ""
        while place is not None:
            excerpt = self._excerpt(place)
            lines.append(f"  {prefix}{self._file_line(place)}" + (f" |  {excerpt}" if excerpt else ""))
            place, prefix = place.inlined_at, "inlined at "
        return [*lines, f"  PTX line {instruction.line}: {instruction.text}"]

    def copied(self, pc: int) -> list[bool]:
        """Mask of the elements of a vector that a load brings, and that are only stored again; empty for all else."""
        instruction = self.instructions[pc]
        if instruction.opcode != "ld" or not isinstance(instruction.operands[0], Vector):
            return []
        return [self._computed_with.isdisjoint(registers_of([element])) for element in instruction.operands[0].elements]

    @cached_property
    def _computed_with(self) -> set[str]:
        every = (one for one in self.instructions if one.opcode not in ("st", "mov"))
        return {name for one in every for name in registers(one)[1]}

    def file(self, place: Place) -> str:
        """The file's name as the author knows it."""
        path = self.files.get(place.file, "?").removeprefix("./")
        # NVRTC puts the working folder before the names that it was given
        given = [name for name in self.sources if path == name or path.endswith(f"/{name}")]
        return max(given, key=len, default=path)

    def _file_line(self, place: Place) -> str:
        return f"{self.file(place)}:{place.line}"

    def _excerpt(self, place: Place) -> str:
        text = self.sources.get(self.file(place), "").splitlines()
        return text[place.line - 1].strip() if 0 < place.line <= len(text) else ""


def fault(
    kind: type[Kind],
    listing: Listing,
    group: Group,
    mask: Any,
    what: str,
    pc: int,
    *,
    detail: str = "",
    also: int | None = None,
) -> Kind:
    """The error to raise: `mask` says which of the group's threads did it; `also` is a second place, the other party's."""
    guilty = group.spread(mask, np.bool_)
    first = int(group.threads[int(np.argmax(guilty))])
    count = int(np.count_nonzero(guilty))
    more = f", and {count - 1} more threads" if count > 1 else ""
    lines = [f"{listing.kernel}: {what}", f"  {group.batch.thread_name(first)}{more}"]
    if detail:
        lines.append(f"  {detail}")
    lines += listing.describe(pc)
    if also is not None:
        lines += ["the other access:", *listing.describe(also)]
    return kind("\n".join(lines))
