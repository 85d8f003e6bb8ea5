"""Writing of instructions that the lanes of a warp, or of a warpgroup, execute together."""

from __future__ import annotations

from collections.abc import Callable

from .. import matrix
from ..errors import UnsupportedInstruction
from .codegen import STORAGE, BlockWriter, elements, emits
from .ptx import Immediate, Instruction, Pair, Register, Sink, Vector


@emits("shfl")
def _shfl(w: BlockWriter, instruction: Instruction) -> None:
    destination, value, lane, clamp, *mask = instruction.operands
    mode = instruction.modifiers[1] if instruction.modifiers[0] == "sync" else instruction.modifiers[0]
    members = w.read(mask[0], "u32") if mask else "u32(0xffffffff)"
    result, inside = w.temporary(), w.temporary()
    arguments = f"{w.read(value, 'u32')}, {w.read(lane, 'u32')}, {w.read(clamp, 'u32')}, {members}, {w.pc}"
    if w.has_undefined:
        undefined = w.temporary()
        of_value = w.undefined([value.name]) if isinstance(value, Register) else ""
        flagged = f"g.spread({of_value or 'False'}, np.bool_), {arguments}"
        w.emit(f"{result}, {inside}, {undefined} = m.warps.shuffle_flags(g, {mode!r}, {flagged})")
        to = destination.first if isinstance(destination, Pair) else destination
        if isinstance(to, Register) and w.may_be_undefined(to.name):
            w.set_undefined(to.name, undefined)
    else:
        w.emit(f"{result}, {inside} = m.warps.shuffle(g, {mode!r}, {arguments})")
    first, second = (destination.first, destination.second) if isinstance(destination, Pair) else (destination, Sink())
    w.write(first, result, "u32")
    w.write(second, inside, "b1")


@emits("vote")
def _vote(w: BlockWriter, instruction: Instruction) -> None:
    destination, predicate, *mask = instruction.operands
    mode = next(m for m in instruction.modifiers if m in ("all", "any", "uni", "ballot"))
    members = w.read(mask[0], "u32") if mask else "u32(0xffffffff)"
    call = f"m.warps.vote(g, {mode!r}, {w.read(predicate, 'b1')}, {members}, {w.pc})"
    w.write(destination, call, "u32" if mode == "ballot" else "b1")


@emits("activemask")
def _activemask(w: BlockWriter, instruction: Instruction) -> None:
    w.write(instruction.operands[0], "m.warps.active(g)", "u32")


@emits("elect")
def _elect(w: BlockWriter, instruction: Instruction) -> None:
    destination, mask = instruction.operands
    lane, chosen = w.temporary(), w.temporary()
    w.emit(f"{lane}, {chosen} = m.warps.elect(g, {w.read(mask, 'u32')}, {w.pc})")
    assert isinstance(destination, Pair)
    w.write(destination.first, lane, "u32")
    w.write(destination.second, chosen, "b1")


@emits("match")
def _match(w: BlockWriter, instruction: Instruction) -> None:
    destination, value, mask = instruction.operands
    mode, kind = instruction.modifiers[0], STORAGE[instruction.modifiers[-1]]
    lanes, agree = w.temporary(), w.temporary()
    w.emit(f"{lanes}, {agree} = m.warps.match(g, {mode!r}, {w.read(value, kind)}, {w.read(mask, 'u32')}, {w.pc})")
    first, second = (destination.first, destination.second) if isinstance(destination, Pair) else (destination, Sink())
    w.write(first, lanes, "u32")
    w.write(second, agree, "b1")


@emits("redux")
def _redux(w: BlockWriter, instruction: Instruction) -> None:
    destination, value, mask = instruction.operands
    type_ = instruction.modifiers[-1]
    kind = type_ if type_[0] == "s" else STORAGE[type_]
    operation = instruction.modifiers[1]
    ignores_nan = "NaN" not in instruction.modifiers
    absolute = "abs" in instruction.modifiers
    arguments = f"{w.read(value, kind)}, {w.read(mask, 'u32')}, {ignores_nan}, {absolute}, {w.pc}"
    w.write(destination, f"m.warps.reduce(g, {operation!r}, {arguments})", kind)


@emits("bar", "barrier")
def _barrier(w: BlockWriter, instruction: Instruction) -> None:
    """bar.warp.sync and the arrivals that do not wait; the others end a block."""
    operands = instruction.operands
    if "warp" in instruction.modifiers:
        w.emit(f"m.warps.sync(g, {w.read(operands[0], 'u32')}, {w.pc})")
    elif "cluster" in instruction.modifiers:
        w.emit(f"m.scheduler.barriers.arrive_cluster(g, {w.pc})")
    else:
        number, count = (w.read(operand, "u32") for operand in operands)
        w.emit(f"m.scheduler.barriers.arrive(g, {number}, {count}, {w.pc})")


@emits("ldmatrix")
def _ldmatrix(w: BlockWriter, instruction: Instruction) -> None:
    count = _matrices(instruction)
    destinations = elements(instruction.operands[0])
    names = [w.temporary() for _ in destinations]
    transposed = "trans" in instruction.modifiers
    w.emit(
        f"{', '.join(names)}, = m.matrices.load(g, {w.address(instruction.operands[1])}, {count}, {transposed}, {w.pc})"
    )
    for destination, name in zip(destinations, names):
        w.write(destination, name, "u32")


@emits("stmatrix")
def _stmatrix(w: BlockWriter, instruction: Instruction) -> None:
    count = _matrices(instruction)
    values = ", ".join(w.read_all(instruction.operands[1], "u32"))
    transposed = "trans" in instruction.modifiers
    w.emit(f"m.matrices.store(g, {w.address(instruction.operands[0])}, ({values},), {count}, {transposed}, {w.pc})")


@emits("movmatrix")
def _movmatrix(w: BlockWriter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    w.write(destination, f"m.matrices.transpose(g, {w.read(source, 'u32')}, {w.pc})", "u32")


def _matrices(instruction: Instruction) -> int:
    """1, 2 or 4 matrices of 8x8 16-bit elements."""
    return int(next(m for m in instruction.modifiers if m in ("x1", "x2", "x4"))[1])


@emits("mma")
def _mma(w: BlockWriter, instruction: Instruction) -> None:
    _multiply(w, instruction, matrix.mma)


def _multiply(w: BlockWriter, instruction: Instruction, unit_of: Callable[[tuple[str, ...]], matrix.Mma]) -> None:
    unit = unit_of(instruction.modifiers)
    destination, *sources = instruction.operands
    kinds = (unit.a_type, unit.b_type, unit.c_type)
    groups = [f"({', '.join(w.read_all(source, kind))},)" for source, kind in zip(sources, kinds)]
    destinations = elements(destination)
    names = [w.temporary() for _ in destinations]
    bound = w.bind(unit_of, instruction.modifiers)
    w.emit(f"{', '.join(names)}, = m.matrices.multiply(g, {bound}, {', '.join(groups)}, {w.pc})")
    for register, name in zip(destinations, names):
        w.write(register, name, unit.d_type)


@emits("wgmma")
def _wgmma(w: BlockWriter, instruction: Instruction) -> None:
    if instruction.modifiers[0] != "mma_async":
        _wgmma_order(w, instruction)
        return
    unit = matrix.wgmma(instruction.modifiers)
    destination, a, b, scale_d, *immediates = instruction.operands
    d = ", ".join(w.read_all(destination, unit.d_type))
    from_registers = isinstance(a, Vector)
    first = f"({', '.join(w.read_all(a, 'u32'))},)" if from_registers else w.read(a, "u64")
    scales = [w.read(operand, "s32") for operand in immediates]
    scale_a, scale_b, *transposes = scales or [w.constant(1, "s32"), w.constant(1, "s32")]
    flags = ["0", *transposes] if from_registers else transposes
    transpose_a, transpose_b = flags if len(flags) == 2 else ("0", flags[0] if flags else "0")
    destinations = elements(destination)
    names = [w.temporary() for _ in destinations]
    operands = f"({d},), {first}, {w.read(b, 'u64')}, {w.read(scale_d, 'b1')}"
    flags_and_place = f"{scale_a}, {scale_b}, {transpose_a}, {transpose_b}, {w.is_unfenced}, {w.pc}"
    bound = w.bind(matrix.wgmma, instruction.modifiers)
    w.emit(f"{', '.join(names)}, = m.matrices.wgmma(g, {bound}, {operands}, {flags_and_place})")
    for register, name in zip(destinations, names):
        w.write(register, name, unit.d_type)


def _wgmma_order(w: BlockWriter, instruction: Instruction) -> None:
    kind = instruction.modifiers[0]
    if kind == "fence":
        w.emit("m.matrices.fence(g)")
    elif kind == "commit_group":
        w.emit("m.matrices.commit(g)")
    elif kind == "wait_group":
        w.emit(f"m.matrices.wait(g, int({w.read(instruction.operands[0], 'u32')}))")
    else:
        raise UnsupportedInstruction(f"the instruction {instruction.name} is not covered")


@emits("setmaxnreg")
def _setmaxnreg(w: BlockWriter, instruction: Instruction) -> None:
    count = instruction.operands[0]
    assert isinstance(count, Immediate)
    w.emit(f"m.register_pool.set(g, {instruction.modifiers[0]!r}, {count.value}, {w.pc})")


@emits("wmma")
def _wmma(w: BlockWriter, instruction: Instruction) -> None:
    kind = instruction.modifiers[0]
    if kind == "mma":
        _multiply(w, instruction, matrix.wmma)
        return
    unit = matrix.wmma_memory(instruction.modifiers)
    space = next((m.split("::")[0] for m in instruction.modifiers if m.split("::")[0] in ("global", "shared")), "")
    bound = w.bind(matrix.wmma_memory, instruction.modifiers)
    first, second, *stride = instruction.operands
    step = w.read(stride[0], "u32") if stride else "None"
    if kind == "load":
        names = [w.temporary() for _ in elements(first)]
        w.emit(
            f"{', '.join(names)}, = m.matrices.wmma_load(g, {bound}, {space!r}, {w.address(second)}, {step}, {w.pc})"
        )
        for register, name in zip(elements(first), names):
            w.write(register, name, unit.register_type)
    else:
        values = ", ".join(w.read_all(second, unit.register_type))
        w.emit(f"m.matrices.wmma_store(g, {bound}, {space!r}, {w.address(first)}, {step}, ({values},), {w.pc})")
