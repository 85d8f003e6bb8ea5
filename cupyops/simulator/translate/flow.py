"""Control flow: basic blocks, which registers live across them, and which have one value in all threads.

A block ends at a branch, an exit or a barrier. A warp-wide instruction (shfl, vote, mma ...) opens a block of its own, so
that the scheduler can gather the warp before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ..errors import InvalidPtx
from .ptx import (
    Address,
    Function,
    Guard,
    Immediate,
    Instruction,
    Label,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
    registers_of,
)

_WARP_WIDE = frozenset(
    (
        "shfl",
        "vote",
        "match",
        "redux",
        "ldmatrix",
        "stmatrix",
        "mma",
        "wmma",
        "wgmma",
        "elect",
        "activemask",
        "movmatrix",
        "setmaxnreg",
    )
)
_NAMES_MEMBERS = frozenset(["shfl", "vote", "match", "redux", "elect"])
_LEAVES = frozenset(("ret", "exit"))
_WITHOUT_EFFECT = ("prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "griddepcontrol", "pmevent")
_NO_DESTINATION = _LEAVES.union(
    (
        "setmaxnreg",
        "st",
        "red",
        "bra",
        "brx",
        "bar",
        "barrier",
        "trap",
        "brkpt",
        "membar",
        "fence",
        "cp",
        "stmatrix",
        "tensormap",
    ),
    _WITHOUT_EFFECT,
)
# guarded instructions that are branched around; loads, stores and arithmetic are masked instead
_BRANCHED_AROUND = _WARP_WIDE.union(
    ("bar", "barrier", "call", "trap", "brkpt", "mbarrier", "cp", "fence", "membar"), _WITHOUT_EFFECT
)
_UNIFORM_SPECIALS = frozenset(
    [f"%{name}.{axis}" for name in ("ntid", "nctaid", "nclusterid", "cluster_nctaid") for axis in "xyz"]
    + ["WARP_SZ", "%cluster_nctarank", "%nwarpid", "%nsmid", "%gridid", "%dynamic_smem_size", "%total_smem_size"]
    + ["%is_explicit_cluster"]
)


@dataclass(slots=True)
class Block:
    """Instructions that run one after the other, and where control goes then."""

    index: int
    instructions: list[Instruction] = field(default_factory=list)
    ends: str = "jump"  # "jump", "branch", "switch", "barrier" or "exit"
    targets: tuple[int, ...] = ()  # of a branch: (taken, not taken)
    first: int = 0  # number of the first instruction within the kernel

    @property
    def last(self) -> Instruction | None:
        """The instruction that ends the block, if it has one."""
        return self.instructions[-1] if self.instructions else None

    @property
    def gathers(self) -> bool:
        """True if the block begins with an instruction of whole warps."""
        return bool(self.instructions) and is_warp_wide(self.instructions[0])


@dataclass(slots=True)
class Flow:
    """A kernel's blocks and what is known of its registers."""

    blocks: list[Block]  # the last one is empty: it is where threads leave
    live_in: list[set[str]]
    live_out: list[set[str]]
    live_after: Callable[[Block, int], set[str]]
    uniform: set[str]


def is_warp_wide(instruction: Instruction) -> bool:
    """Return True if the lanes of a warp execute an instruction together."""
    if instruction.opcode in ("bar", "barrier"):
        return "warp" in instruction.modifiers
    return instruction.opcode in _WARP_WIDE


def member_mask(instruction: Instruction) -> Operand | None:
    """The operand that names the lanes of a warp-wide instruction, if it has one."""
    if instruction.opcode in ("bar", "barrier"):
        return instruction.operands[0]
    is_named = instruction.opcode in _NAMES_MEMBERS and "sync" in instruction.modifiers
    return instruction.operands[-1] if is_named else None


def is_barrier(instruction: Instruction) -> bool:
    """Return True if threads may have to wait at it for others of the block or cluster."""
    if instruction.opcode not in ("bar", "barrier") or "warp" in instruction.modifiers:
        return False
    return "arrive" not in instruction.modifiers


def analyse(function: Function, is_pure: Callable[[Instruction], bool], varying: frozenset[str] = frozenset()) -> Flow:
    """Blocks, liveness and uniformity of a function without calls.

    `is_pure`: the result depends on the operands alone. `varying`: variables whose addresses differ between blocks.
    """
    blocks = _blocks(_branch_around(function.body), function)
    uses = [[uses_and_definitions(instruction) for instruction in block.instructions] for block in blocks]
    live_in, live_out = _liveness(blocks, uses)

    def live_after(block: Block, position: int) -> set[str]:
        live = set(live_out[block.index])
        for used, defined in reversed(uses[block.index][position + 1 :]):
            live = (live - set(defined)) | set(used)
        return live

    return Flow(blocks, live_in, live_out, live_after, _uniform(blocks, uses, is_pure, varying))


# --- uses and definitions ------------------------------------------------------------------------------------------


def uses_and_definitions(instruction: Instruction) -> tuple[list[str], list[str]]:
    """The registers that an instruction reads, and those that it writes; a guarded write reads too: it may leave the old."""
    defined, used = registers(instruction)
    if instruction.opcode == "wgmma":
        used = used + defined  # the accumulators
    if instruction.guard is not None:
        used = [*used, instruction.guard.register, *defined]
    return used, defined


def registers(instruction: Instruction) -> tuple[list[str], list[str]]:
    """The registers of the operands written, and of those read. Of an instruction that changes no more: they are kept."""
    if instruction.registers is None:
        written, read = destination_operands(instruction)
        instruction.registers = registers_of(written), registers_of(read)
    return instruction.registers


def destination_operands(instruction: Instruction) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """The operands written, and the operands read."""
    operands = instruction.operands
    if not operands or isinstance(operands[0], Address) or instruction.opcode == "call":
        return (), operands
    if instruction.opcode in ("bar", "barrier"):
        return (operands[:1], operands[1:]) if "red" in instruction.modifiers else ((), operands)
    if instruction.opcode in _NO_DESTINATION or (
        instruction.opcode == "wgmma" and instruction.modifiers[0] != "mma_async"
    ):
        return (), operands
    if instruction.opcode == "wmma" and instruction.modifiers[0] == "store":
        return (), operands
    return operands[:1], operands[1:]


# --- blocks --------------------------------------------------------------------------------------------------------


def _branch_around(body: Iterable[Instruction | Label]) -> list[Instruction | Label]:
    """`@p bar.sync` as `@!p bra next; bar.sync; next:`."""
    result: list[Instruction | Label] = []
    for number, item in enumerate(body):
        if isinstance(item, Instruction) and item.guard is not None and item.opcode in _BRANCHED_AROUND:
            around = f"$L_around{number}"
            inverse = Guard(item.guard.register, not item.guard.negated)
            result.append(replace(item, opcode="bra", modifiers=(), operands=(Symbol(around),), guard=inverse))
            result.append(replace(item, guard=None))
            result.append(Label(around))
        else:
            result.append(item)
    return result


def _blocks(body: list[Instruction | Label], function: Function) -> list[Block]:
    blocks = [Block(0)]
    starts: dict[str, int] = {}
    for item in body:
        current = blocks[-1]
        if isinstance(item, Label):
            if current.instructions:
                current = _next(blocks)
            starts[item.name] = current.index
            continue
        if is_warp_wide(item) and current.instructions and not _same_members(current.instructions[-1], item):
            current = _next(blocks)
        current.instructions.append(item)
        if item.opcode in ("bra", "brx") or item.opcode in _LEAVES or is_barrier(item):
            _next(blocks)
    if blocks[-1].instructions:
        _next(blocks)
    leave = blocks[-1]
    leave.ends = "exit"
    number = 0
    for block in blocks:
        block.first = number
        number += len(block.instructions)
        if block is not leave:
            _connect(block, starts, leave.index, function)
    return blocks


def _same_members(previous: Instruction, instruction: Instruction) -> bool:
    """Return True if lanes that have come together for the one need not wait again for the other."""
    of_warpgroups = [one.opcode in ("wgmma", "setmaxnreg") for one in (previous, instruction)]
    if of_warpgroups[0] != of_warpgroups[1] or not is_warp_wide(previous):
        return False
    mask = member_mask(instruction)
    is_overwritten = isinstance(mask, Register) and mask.name in uses_and_definitions(previous)[1]
    return member_mask(previous) == mask and not is_overwritten


def _next(blocks: list[Block]) -> Block:
    blocks.append(Block(len(blocks)))
    return blocks[-1]


def _connect(block: Block, starts: dict[str, int], leave: int, function: Function) -> None:
    """Set the targets of `block` by its last instruction."""
    last, following = block.instructions[-1], block.index + 1
    if last.opcode == "bra":
        target = _target(last.operands[0], starts, last)
        if last.guard is None:
            block.targets = (target,)
        else:
            block.ends, block.targets = "branch", (target, following)
    elif last.opcode == "brx":
        table = last.operands[1]
        if not isinstance(table, Symbol) or table.name not in function.branch_targets:
            raise InvalidPtx(f"PTX line {last.line}: {last.text}: no such table of targets")
        block.ends = "switch"
        names = function.branch_targets[table.name]
        block.targets = tuple(_target(Symbol(name), starts, last) for name in names)
    elif last.opcode in _LEAVES:
        block.ends, block.targets = ("exit", ()) if last.guard is None else ("branch", (leave, following))
    elif is_barrier(last):
        block.ends, block.targets = "barrier", (following,)
    else:
        block.targets = (following,)


def _target(operand: Operand, starts: dict[str, int], instruction: Instruction) -> int:
    if not isinstance(operand, Symbol) or operand.name not in starts:
        raise InvalidPtx(f"PTX line {instruction.line}: {instruction.text}: no such label")
    return starts[operand.name]


# --- liveness and uniformity ---------------------------------------------------------------------------------------


_Uses = list[list[tuple[list[str], list[str]]]]  # for each block and instruction the registers read, and written


def _liveness(blocks: list[Block], uses: _Uses) -> tuple[list[set[str]], list[set[str]]]:
    """The registers whose values are wanted at the start and at the end of each block."""
    wanted: list[set[str]] = []  # read before written, within the block
    written: list[set[str]] = []
    for instructions in uses:
        reads: set[str] = set()
        writes: set[str] = set()
        for used, defined in instructions:
            reads |= set(used) - writes
            writes |= set(defined)
        wanted.append(reads)
        written.append(writes)
    live_in: list[set[str]] = [set(reads) for reads in wanted]
    live_out: list[set[str]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out = set().union(*(live_in[target] for target in block.targets)) if block.targets else set()
            new = wanted[block.index] | (out - written[block.index])
            live_out[block.index] = out
            if len(new) != len(live_in[block.index]):
                live_in[block.index] = new
                changed = True
    return live_in, live_out


def _uniform(
    blocks: list[Block], uses: _Uses, is_pure: Callable[[Instruction], bool], varying: frozenset[str]
) -> set[str]:
    """Registers with one value in all threads of the grid: written once, of operands that are so themselves."""
    writers: dict[str, list[Instruction]] = {}
    for block in blocks:
        for instruction, (_, defined) in zip(block.instructions, uses[block.index]):
            for name in defined:
                writers.setdefault(name, []).append(instruction)
    once = ((name, found[0]) for name, found in writers.items() if len(found) == 1)
    alone = [(name, writer) for name, writer in once if writer.guard is None and is_pure(writer)]
    alone = [(name, writer) for name, writer in alone if not isinstance(writer.operands[0], (Pair, Vector))]
    waiting = [(name, writer.operands[1:]) for name, writer in alone]
    uniform: set[str] = set()
    while True:
        left = []
        for name, operands in waiting:
            if all(_constant(operand, uniform, varying) for operand in operands):
                uniform.add(name)
            else:
                left.append((name, operands))
        if len(left) == len(waiting):
            return uniform
        waiting = left


def _constant(operand: Operand, uniform: set[str], varying: frozenset[str]) -> bool:
    if isinstance(operand, Register):
        return operand.name in uniform
    if isinstance(operand, Special):
        return operand.name in _UNIFORM_SPECIALS
    if isinstance(operand, Address):
        return _constant(operand.base, uniform, varying)
    return isinstance(operand, Immediate) or (isinstance(operand, Symbol) and operand.name not in varying)
