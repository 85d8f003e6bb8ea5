"""Registers of asynchronous products of matrices (wgmma), and reads of them that may come too early.

A product adds to registers until its warpgroup has waited for the group that it was committed to. NVRTC copies such
registers from one name to another meanwhile, which costs the assembler nothing and is no access; anything else is. This is
found out for all paths through a kernel; a kernel in which some read may come early is then watched while it runs, since a
path need not be one that is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .flow import Block, uses_and_definitions
from .ptx import Immediate, Instruction, Register, Vector, registers_of

_MOST = 9  # groups that are told apart


@dataclass(frozen=True)
class Step:
    """Effect of an instruction on such registers."""

    kind: str  # "copy", "use", "product", or one of the instructions without registers: "fence", "commit", "wait"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    allowed: int = 0  # groups that a wait leaves under way


@dataclass(frozen=True)
class Products:
    """Analysis of a kernel's products. Instructions are given by their numbers in the kernel."""

    steps: dict[int, Step] = field(default_factory=dict)
    early: frozenset[int] = frozenset()  # reads of what may not be there yet
    unfenced: frozenset[int] = frozenset()  # products whose registers may have been touched since the last wgmma.fence


@dataclass
class _State:
    """State at one place of the kernel, over all paths that lead there."""

    under_way: dict[str, int]  # register -> groups committed since its product, the fewest
    touched: set[str]  # since the last fence
    unfenced: bool  # there may have been none

    def copy(self) -> _State:
        return _State(dict(self.under_way), set(self.touched), self.unfenced)

    def join(self, other: _State) -> bool:
        """Merge another state into this one; return True if that has changed anything."""
        changed = (other.unfenced and not self.unfenced) or not other.touched <= self.touched
        self.unfenced |= other.unfenced
        self.touched |= other.touched
        for name, groups in other.under_way.items():
            if groups < self.under_way.get(name, _MOST + 1):
                self.under_way[name] = groups
                changed = True
        return changed


def find(blocks: list[Block]) -> Products:
    """Analyse the products of a kernel's blocks."""
    if not any(i.opcode == "wgmma" and i.modifiers[0] == "mma_async" for block in blocks for i in block.instructions):
        return Products()
    steps = _steps(blocks)
    of_block = [
        [(pc, steps[pc]) for pc in range(block.first, block.first + len(block.instructions)) if pc in steps]
        for block in blocks
    ]
    entry: list[_State | None] = [None] * len(blocks)
    entry[0] = _State({}, set(), True)
    early: set[int] = set()
    unfenced: set[int] = set()
    waiting = [0]
    while waiting:
        number = waiting.pop()
        state = entry[number]
        assert state is not None
        state = state.copy()
        for pc, step in of_block[number]:
            _apply(state, pc, step, early, unfenced)
        for target in blocks[number].targets:
            known = entry[target]
            if known is None:
                entry[target] = state.copy()
            elif not known.join(state):
                continue
            if target not in waiting:
                waiting.append(target)
    return Products(steps, frozenset(early), frozenset(unfenced))


def _apply(state: _State, pc: int, step: Step, early: set[int], unfenced: set[int]) -> None:
    under_way, touched = state.under_way, state.touched
    if step.kind == "fence":
        touched.clear()
        state.unfenced = False
    elif step.kind == "commit":
        for name, groups in under_way.items():
            under_way[name] = min(groups + 1, _MOST)
    elif step.kind == "wait":
        for name in [name for name, groups in under_way.items() if groups and groups > step.allowed]:
            del under_way[name]
    elif step.kind == "copy":
        (to,) = step.writes
        under_way.pop(to, None)
        touched.discard(to)
        for source in step.reads:  # none where it is a constant
            if source in under_way:
                under_way[to] = under_way[source]
            if source in touched:
                touched.add(to)
    elif step.kind == "product":
        if state.unfenced or not touched.isdisjoint((*step.reads, *step.writes)):
            unfenced.add(pc)
        if any(name in under_way for name in step.reads):
            early.add(pc)
        under_way.update(dict.fromkeys(step.writes, 0))
    else:
        if any(name in under_way for name in step.reads):
            early.add(pc)
        touched.update(step.reads, step.writes)
        for name in step.writes:
            under_way.pop(name, None)


def _steps(blocks: list[Block]) -> dict[int, Step]:
    """The instructions that matter: those of products, and those that touch their registers or copies of them."""
    numbered = [(block.first + k, i) for block in blocks for k, i in enumerate(block.instructions)]
    linked: dict[str, list[str]] = {}
    found: list[str] = []
    for _, instruction in numbered:
        if _is_copy(instruction):
            to, source = instruction.operands
            if isinstance(source, Register) and isinstance(to, Register):
                linked.setdefault(to.name, []).append(source.name)
                linked.setdefault(source.name, []).append(to.name)
        elif instruction.opcode == "wgmma" and instruction.modifiers[0] == "mma_async":
            found += registers_of(operand for operand in instruction.operands if isinstance(operand, Vector))
    relevant: set[str] = set()
    while found:
        name = found.pop()
        if name not in relevant:
            relevant.add(name)
            found += linked.get(name, ())
    steps = {pc: _step(instruction, relevant) for pc, instruction in numbered}
    return {pc: step for pc, step in steps.items() if step is not None}


def _step(instruction: Instruction, relevant: set[str]) -> Step | None:
    if instruction.opcode == "wgmma":
        kind = instruction.modifiers[0]
        if kind != "mma_async":
            count = instruction.operands[0] if instruction.operands else None
            allowed = count.value if isinstance(count, Immediate) else 0
            return Step({"fence": "fence", "commit_group": "commit"}.get(kind, "wait"), allowed=allowed)
        sums, a = instruction.operands[:2]
        return Step("product", tuple(registers_of([a])) if isinstance(a, Vector) else (), tuple(registers_of([sums])))
    used, defined = uses_and_definitions(instruction)
    reads = tuple(name for name in used if name in relevant)
    writes = tuple(name for name in defined if name in relevant)
    if not reads and not writes:
        return None
    return Step("copy" if _is_copy(instruction) else "use", reads, writes)


def _is_copy(instruction: Instruction) -> bool:
    """Return True if an instruction gives a register the value of another, or a constant, as it is."""
    if instruction.opcode != "mov" or instruction.guard is not None:
        return False
    to, source = instruction.operands
    return isinstance(to, Register) and isinstance(source, (Register, Immediate))
