"""Functions of the device runtime: printf, assert, malloc, trap."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DeviceAssert, OutOfBounds, Trap
from ..translate.function import Load
from .faults import fault
from .group import Group
from .spaces import Spaces
from .state import State

_HEAP = "malloc"  # the name of what it gives
_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t)?([%a-zA-Z])")


class Runtime:
    """Functions that the PTX calls and does not define. Their arguments lie in the threads' local memory."""

    def __init__(self, state: State, spaces: Spaces, output: Callable[[str], Any]) -> None:
        self._state = state
        self._spaces = spaces
        self._output = output

    def vprintf(self, group: Group, result: int, format_: int, arguments: int, pc: int) -> None:
        """printf: each thread's line, in the order of threads."""
        texts = self._argument(group, format_, np.uint64, pc)
        buffers = self._argument(group, arguments, np.uint64, pc)
        taken = np.empty(group.size, np.uint32)
        for number, one in enumerate(group.one_by_one()):
            text = self._string(one, int(texts[number]), pc)
            line, taken[number] = self._formatted(one, text, int(buffers[number]), pc)
            self._output(line)
        self._spaces.local.store(group, np.uint64(result), (taken,), np.uint32, 4, pc)

    def assertfail(self, group: Group, message: int, file: int, line: int, function: int, size: int, pc: int) -> None:
        """Raise the error of a failed assert."""
        one = group.one_by_one()[0]
        texts = [
            self._string(one, int(self._argument(group, place, np.uint64, pc)[0]), pc)
            for place in (message, file, function)
        ]
        number = int(self._argument(group, line, np.uint32, pc)[0])
        what = f"assertion `{texts[0]}` failed"
        detail = f"{texts[1]}:{number}, {texts[2]}"
        raise fault(DeviceAssert, self._state.listing, group, np.True_, what, pc, detail=detail)

    def trap(self, group: Group, pc: int) -> None:
        """Raise the error of a `trap`."""
        what = "the kernel executed trap: __trap(), or what the compiler made of undefined behaviour, such as a null pointer"
        if not self._state.cooperative and any("%envreg" in one.text for one in self._state.code.instructions):
            what = (
                "the kernel waits for the whole grid in a launch that is not cooperative: configure(cooperative=True)"
            )
        raise fault(Trap, self._state.listing, group, np.True_, what, pc)

    def no_function(self, group: Group, pc: int) -> None:
        """A call through a pointer that leads to none of the functions that take such arguments."""
        what = "a call through a pointer to no function that takes these arguments, or of a function by itself: not covered"
        raise fault(OutOfBounds, self._state.listing, group, np.True_, what, pc)

    def malloc(self, group: Group, result: int, size: int, pc: int) -> None:
        """Memory from the device's heap."""
        sizes = self._argument(group, size, np.uint64, pc)
        memory = self._state.memory
        made = [memory.allocate(np.zeros(int(one), np.uint8), _HEAP, initialized=False) for one in sizes]
        addresses = np.array([allocation.base for allocation in made], np.uint64)
        self._spaces.local.store(group, np.uint64(result), (addresses,), np.uint64, 8, pc)

    def free(self, group: Group, pointer: int, pc: int) -> None:
        """Give it back."""
        addresses = self._argument(group, pointer, np.uint64, pc)
        for number, address in enumerate(addresses.tolist()):
            allocation = self._state.memory.at(address)
            if address and (allocation is None or allocation.name != _HEAP or allocation.base != address):
                what = "free of a pointer that malloc did not give, or that was freed before"
                bad = np.arange(group.size) == number
                raise fault(OutOfBounds, self._state.listing, group, bad, what, pc, detail=f"address {address:#x}")
            if allocation is not None:
                self._state.memory.free(allocation)

    # --- reading what the thread means ---

    def _argument(self, group: Group, place: int, dtype: Any, pc: int) -> np.ndarray:
        return self._spaces.local.load(group, np.uint64(place), Load(dtype, np.dtype(dtype).itemsize, 1, pc))

    def _value(self, one: Group, address: int, dtype: Any, pc: int) -> Any:
        where = np.array([address], np.uint64)
        return self._spaces.generic.load(one, where, Load(dtype, np.dtype(dtype).itemsize, 1, pc))[0]

    def _string(self, one: Group, address: int, pc: int) -> str:
        allocation = self._state.memory.at(address)
        if allocation is not None:
            content = allocation.buffer[address - allocation.base :].tobytes().split(b"\0", 1)[0]
        else:  # in another space, or nowhere
            content = b""
            while byte := int(self._value(one, address + len(content), np.uint8, pc)):
                content += bytes([byte])
        return content.decode("utf-8", "replace")

    def _formatted(self, one: Group, text: str, buffer: int, pc: int) -> tuple[str, int]:
        """The format's conversions, each with the next of the arguments, which lie at their natural alignment; and how
        many arguments there were."""
        offset = count = 0

        def take(dtype: Any) -> Any:
            nonlocal offset, count
            count += 1
            size = np.dtype(dtype).itemsize
            offset = -(-offset // size) * size + size
            return self._value(one, buffer + offset - size, dtype, pc)

        def convert(match: re.Match[str]) -> str:
            flags, width, precision, length, kind = match.groups()
            if kind == "%":
                return "%"
            width = str(int(take(np.int32))) if width == "*" else width or ""
            if precision == "*":
                given = int(take(np.int32))
                precision = str(given) if given >= 0 else None
            spec = f"%{flags}{width}" + (f".{precision}" if precision is not None else "")
            return _converted(
                spec, kind, length in ("l", "ll", "z", "j", "t"), take, lambda at: self._string(one, at, pc)
            )

        line = _CONVERSION.sub(convert, text)
        return line, count


def _converted(spec: str, kind: str, wide: bool, take: Callable[[Any], Any], string: Callable[[int], str]) -> str:
    if kind in "feEgGaAF":
        value = float(take(np.float64))
        return _hexadecimal(value, kind) if kind in "aA" else (spec + kind) % value
    if kind == "s":
        return (spec + "s") % string(int(take(np.uint64)))
    if kind == "p":
        return hex(int(take(np.uint64)))
    if kind == "c":
        return (spec + "c") % chr(int(take(np.int32)) & 0xFF)
    signed = kind in "di"
    dtype = (np.int64 if signed else np.uint64) if wide else (np.int32 if signed else np.uint32)
    return (spec + ("d" if kind == "u" else kind)) % int(take(dtype))


def _hexadecimal(value: float, kind: str) -> str:
    """`%a`: as Python writes it, without the zeros at the end."""
    text = re.sub(r"\.?0*p", "p", value.hex())
    return text.upper() if kind == "A" else text
