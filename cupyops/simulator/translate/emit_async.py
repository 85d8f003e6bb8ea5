"""Writing of asynchronous copies and of the mbarriers that they report to."""

from __future__ import annotations

from .codegen import BlockWriter, elements, emits
from .ptx import Address, Instruction, Sink


@emits("cp")
def _cp(w: BlockWriter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    operands = instruction.operands
    if "bulk" in modifiers:
        _bulk(w, instruction)
    elif modifiers[1] == "commit_group":
        w.emit("m.copies.commit(g)")
    elif modifiers[1] == "wait_group":
        w.emit(f"m.copies.wait(g, int({w.read(operands[0], 'u32')}), {w.pc})")
    elif modifiers[1] == "wait_all":
        w.emit(f"m.copies.wait(g, None, {w.pc})")
    elif modifiers[1] == "mbarrier":
        w.emit(f"m.copies.arrive_when_done(g, {w.address(operands[0])}, {'noinc' in modifiers}, {w.pc})")
    else:
        _cp_async(w, instruction)


def _cp_async(w: BlockWriter, instruction: Instruction) -> None:
    """cp.async.ca.shared.global [dst], [src], size {, source size}."""
    # a cache policy may follow; it changes no result
    destination, source, size, *more = instruction.operands
    source_size = w.read(more[0], "u32") if more and "cache_hint" not in "".join(instruction.modifiers) else "None"
    arguments = f"{w.address(destination)}, {w.address(source)}, int({w.read(size, 'u32')}), {source_size}, {w.pc}"
    w.emit(f"m.copies.start(g, {arguments})")


def _bulk(w: BlockWriter, instruction: Instruction) -> None:
    modifiers, operands = instruction.modifiers, instruction.operands
    spaces = [m for m in modifiers if m.split("::")[0] in ("shared", "global")]
    if "commit_group" in modifiers:
        w.emit("m.bulk.commit(g)")
    elif "wait_group" in modifiers:
        w.emit(f"m.bulk.wait(g, int({w.read(operands[0], 'u32')}), {'read' in modifiers})")
    elif "prefetch" in modifiers:
        return
    # a cache policy may follow; it changes no result
    elif "tensor" in modifiers:
        _tensor(w, instruction, spaces)
    elif spaces[0].startswith("shared"):
        destination, source, size, barrier = operands[:4]
        arguments = f"{w.address(destination)}, {w.address(source)}, {w.read(size, 'u32')}, {w.address(barrier)}"
        if spaces[1].startswith("shared"):
            w.emit(f"m.bulk.from_shared(g, {arguments}, {_reduction(instruction)}, {w.pc})")
        else:
            w.emit(f"m.bulk.load(g, {arguments}, {_blocks(w, instruction, 4)}, {w.pc})")
    else:
        destination, source, size = operands[:3]
        arguments = f"{w.address(destination)}, {w.address(source)}, {w.read(size, 'u32')}, {_reduction(instruction)}"
        w.emit(f"m.bulk.store(g, {arguments}, {w.pc})")


_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def _operation(instruction: Instruction) -> str | None:
    """Name of the reduction that a copy makes with what is there; None where it takes its place."""
    if instruction.modifiers[0] != "reduce":
        return None
    return next(m for m in instruction.modifiers if m in _OPERATIONS)


def _reduction(instruction: Instruction) -> tuple[str, str] | None:
    """(operation, type)."""
    operation = _operation(instruction)
    return None if operation is None else (operation, instruction.modifiers[-1])


def _blocks(w: BlockWriter, instruction: Instruction, place: int) -> str:
    """The mask of the blocks of the cluster that a copy goes to, the operand at `place`; None where it goes to one."""
    return w.read(instruction.operands[place], "u16") if "multicast::cluster" in instruction.modifiers else "None"


def _tensor(w: BlockWriter, instruction: Instruction, spaces: list[str]) -> None:
    """cp.async.bulk.tensor: [map, {coordinates}] and a tile in shared memory, either way."""
    operands = instruction.operands
    loads = spaces[0].startswith("shared")
    tensor = operands[1] if loads else operands[0]
    assert isinstance(tensor, Address)
    coordinates = "".join(f"{w.read(element, 's32')}, " for element in elements(tensor.more[0]))
    map_address = w.address(Address(tensor.base, tensor.offset))
    if loads:
        arguments = f"{w.address(operands[0])}, {map_address}, ({coordinates}), {w.address(operands[2])}"
        w.emit(f"m.bulk.tile_load(g, {arguments}, {_blocks(w, instruction, 3)}, {w.pc})")
    else:
        arguments = f"{map_address}, ({coordinates}), {w.address(operands[1])}, {_operation(instruction)!r}"
        w.emit(f"m.bulk.tile_store(g, {arguments}, {w.pc})")


@emits("mbarrier")
def _mbarrier(w: BlockWriter, instruction: Instruction) -> None:
    kind, operands = instruction.modifiers[0], instruction.operands
    if kind == "init":
        w.emit(f"m.mbarriers.init(g, {w.address(operands[0])}, {w.read(operands[1], 'u32')}, {w.pc})")
    elif kind == "inval":
        w.emit(f"m.mbarriers.invalidate(g, {w.address(operands[0])}, {w.pc})")
    elif kind in ("arrive", "arrive_drop", "expect_tx", "complete_tx"):
        _mbarrier_arrive(w, instruction)
    elif kind in ("test_wait", "try_wait"):
        parity = "parity" in instruction.modifiers
        phase = w.read(operands[2], "u32" if parity else "u64")
        call = f"m.mbarriers.test(g, {w.address(operands[1])}, {phase}, {parity}, {w.pc})"
        w.write(operands[0], call, "b1")
    else:  # pending_count
        w.write(operands[0], f"({w.read(operands[1], 'u64')} >> {w.constant(40, 'u64')}).astype(u32)", "u32")


def _mbarrier_arrive(w: BlockWriter, instruction: Instruction) -> None:
    kind, operands = instruction.modifiers[0], list(instruction.operands)
    destination = operands.pop(0) if not isinstance(operands[0], Address) else Sink()
    barrier, *value = operands
    given = w.read(value[0], "u32") if value else w.constant(1, "u32")
    anywhere = "shared::cluster" in instruction.modifiers or not any("shared" in m for m in instruction.modifiers)
    one, none = w.constant(1, "u32"), w.constant(0, "u32")
    expects = "expect_tx" in instruction.modifiers
    if kind == "expect_tx":
        arrivals, bytes_ = none, given
    elif kind == "complete_tx":
        arrivals, bytes_ = none, f"-{given}.astype(s64)"
    elif expects:
        arrivals, bytes_ = one, given
    else:
        arrivals, bytes_ = given, none
    call = f"m.mbarriers.arrive(g, {w.address(barrier)}, {arrivals}, {bytes_}, {kind == 'arrive_drop'}, {w.pc}, {anywhere})"
    name = w.temporary()
    w.emit(f"{name} = {call}")
    w.write(destination, name, "u64")
