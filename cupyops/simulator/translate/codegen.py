"""A kernel as Python: one generated function for each basic block.

A function takes the machine and a group of threads. Registers are arrays with one element a thread, or scalars where all
threads agree; those that live across blocks are kept in `machine.registers`. What an instruction becomes is written in
`emit_data.py`, `emit_warp.py` and `emit_async.py`; arithmetic is a call of what `arithmetic.resolve` gives.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import arithmetic
from ..arithmetic.operation import DTYPES as NUMPY_DTYPES
from ..errors import InvalidPtx, UnsupportedInstruction
from .calls import flatten
from .flow import Block, Flow, analyse, destination_operands, member_mask, registers, uses_and_definitions
from .function import Compiled, CompiledBlock, Made, Members, Names, Reduction
from .layout import Layout, lay_out
from .products import Products, find
from .ptx import (
    SIZES,
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
    registers_of,
)
from .undefined import find as undefined_registers

STORAGE = {
    "pred": "b1", "b8": "u8", "u8": "u8", "s8": "u8",
    "b16": "u16", "u16": "u16", "s16": "u16", "f16": "u16", "bf16": "u16",
    "b32": "u32", "u32": "u32", "s32": "u32", "f16x2": "u32", "bf16x2": "u32", "f32": "f32",
    "b64": "u64", "u64": "u64", "s64": "u64", "f64": "f64",
}  # fmt: skip
DTYPES: dict[str, Any] = {kind: dtype.type for kind, dtype in NUMPY_DTYPES.items()}  # what the generated text names
# features that are not covered: how the names of their instructions begin, what manuals call them, and what to do instead
_FEATURES = (
    ("tex|tld4|txq|istypep", "textures", "read the tensor through its pointer"),
    ("suld|sust|sured|suq", "surfaces", "read and write the tensor through its pointer"),
    ("cp.*im2col", "TMA tiles by im2col", "bring the rows by tiles, or by cp.async"),
    (r"cp.*\.(cp_mask|tile::)", "copies of chosen bytes or rows", "bring each run of them by a copy of its own"),
    (r"st\.bulk", "bulk stores of zeros", "store them by threads"),
    (r"(ld|st)matrix.*\.b8", "matrices of bytes", "load and store them by threads"),
    (r"mma.*\.kind::", "block-scaled matrix products", "take mma.sync of fp8, and scale its sums"),
    (r"cvt\.rs", "conversions that round at random", "round to the nearest"),
    ("tensormap", "tensor maps that kernels change", "give the kernel one map for each tensor"),
    ("multimem", "multicast objects of several GPUs", "there is one GPU here: load and add by its own address"),
    ("clusterlaunchcontrol", "cluster launch controls", "take the next piece of work by atomicAdd()"),
    ("alloca|stack", "arrays on the stack of variable size", "give the array a size that the compiler knows"),
    ("v(add|sub|absdiff|min|max|shl|shr|mad|set)", "video instructions", "write __vabsdiff4() and its kin by bytes"),
    (r"w?g?mma\.(mma_async\.)?sp", "sparse matrix products", "multiply the dense matrix"),
    ("tcgen05", "tensor cores of the fifth generation", "take the path of an older architecture: wgmma or mma.sync"),
    (r".*\.(e2m1|e2m3|e3m2)", "conversions to fp4 and fp6", "take fp8"),
    (r".*\.b128", "atomics and moves of 128 bits", "take two of 64 bits under a lock"),
)
# words in the names of instructions with a writer of their own, beside types and hints for caches: any other may change what
# they do, and is refused
_WORD_LIST = """
    global local const param param::entry param::func shared shared::cta shared::cluster to unified nc v2 v4 v8 ca cg
    cs lu cv wb wt L1 L2 weak volatile relaxed acquire release acq_rel sc mmio cta cluster gpu sys gl noftz add inc
    dec min max and or xor exch cas popc abs NaN sync aligned warp uni all any ballot up down bfly idx async bulk
    reduce tensor prefetch tile read 1d 2d 3d 4d 5d bulk_group commit_group wait_group wait_all wait arrive red noinc
    mbarrier mbarrier::complete_tx::bytes multicast::cluster init inval arrive_drop expect_tx complete_tx test_wait
    try_wait pending_count noComplete parity proxy alias async::generic tensormap tensormap::generic mbarrier_init
    sync_restrict::shared::cta sync_restrict::shared::cluster launch_dependents m8n8 x1 x2 x4 trans fractional range
    cvt mask
"""
_WORDS = frozenset(_WORD_LIST.split()) | SIZES.keys()
_STRICT = frozenset(("mma", "wmma", "wgmma", "call"))  # whose writers take no word that they do not know
_PURE = frozenset(("mov", "cvta", "isspacep"))


def size_of(kind: str) -> int:
    """Bytes of a kind of value: 4 for "u32"."""
    return 1 if kind == "b1" else int(kind[1:]) // 8


def compile_kernel(
    module: Module, kernel: Function, globals_at: dict[str, int], clusters: bool = False, worst: bool = False
) -> Compiled:
    """Translate a kernel, for a launch in `clusters` or without. Raises `UnsupportedInstruction`.

    `worst`: approximate instructions have the error that the PTX manual allows.
    """
    flat = flatten(module, kernel)
    layout = lay_out(module, flat, globals_at)
    flow = analyse(flat, is_pure, layout.shared_symbols if clusters else frozenset())
    early = flow.live_in[0] - flow.uniform
    undefined = undefined_registers(flow.blocks, early, is_computed)
    writer = _KernelWriter(flat, layout, flow, find(flow.blocks), clusters, worst, undefined)
    texts = [writer.block(block) for block in flow.blocks]
    names = Names(writer.names)
    blocks = [
        CompiledBlock(
            block.index,
            texts[block.index],
            names,
            block.ends,
            block.targets,
            block.first,
            len(block.instructions),
            writer.members(block),
            writer.reductions.get(block.index),
        )
        for block in flow.blocks
    ]
    # read before anything is written, on some path; or written from outside the generated functions
    early = (flow.live_in[0] | writer.reduced) & writer.crossing
    registers = [DTYPES[STORAGE[kind]] if name in early else None for name, kind in flat.registers.items()]
    instructions = [instruction for block in flow.blocks for instruction in block.instructions]
    written = layout.written_parameters(instructions)
    beside, reads = any(map(_is_beside, instructions)), any(map(_reads_beside, instructions))
    at_start = {writer.number[name]: name in flow.live_in[0] for name in undefined}
    fences, meets = any(map(_is_fence, instructions)), any(map(_orders_some, instructions))
    return Compiled(flat, layout, blocks, instructions, registers, written, beside, reads, fences, meets, at_start)


def _is_beside(instruction: Instruction) -> bool:
    """Return True if an instruction works beside the threads, or tells them of such work."""
    modifiers = instruction.modifiers
    return (
        instruction.opcode in ("wgmma", "mbarrier")
        or (instruction.opcode == "cp" and ("bulk" in modifiers or "mbarrier" in modifiers))
        or (instruction.opcode in ("st", "red") and "async" in modifiers)
    )


def _reads_beside(instruction: Instruction) -> bool:
    """Return True if an instruction reads shared memory beside the threads."""
    return instruction.opcode == "wgmma" or (
        instruction.opcode == "cp" and "bulk" in instruction.modifiers and "shared::cta" in instruction.modifiers
    )


def _is_fence(instruction: Instruction) -> bool:
    """Return True for a fence between threads."""
    return instruction.opcode in ("membar", "fence") and "proxy" not in instruction.modifiers


def _orders_some(instruction: Instruction) -> bool:
    """Return True if an instruction may order some warps of a block without the others: with a number, or by a fence."""
    is_barrier = instruction.opcode in ("bar", "barrier") and len(instruction.operands) > 1
    released = any(one in ("release", "acq_rel") for one in instruction.modifiers)
    return is_barrier or released or _is_fence(instruction) or instruction.opcode == "mbarrier"


def is_pure(instruction: Instruction) -> bool:
    """Return True if the result depends on the operands alone."""
    if instruction.opcode == "ld":
        return "param" in instruction.modifiers
    if any(m == "cc" for m in instruction.modifiers) or instruction.opcode in ("addc", "subc", "madc"):
        return False
    return instruction.opcode in _PURE or _operation(instruction) is not None


def is_computed(instruction: Instruction) -> bool:
    """Return True if an instruction does nothing but compute its result from its operands."""
    return instruction.opcode in _PURE or _operation(instruction) is not None


def take(registers: list[Any], numbers: tuple[int, ...], index: Any) -> list[Any]:
    """Read registers of some of the batch's threads; None: of all."""
    found = [registers[number] for number in numbers]
    return found if index is None else [register[index] for register in found]


def put(registers: list[Any], numbers: tuple[int, ...], index: Any, values: tuple[Any, ...], group: Any) -> None:
    """Write registers of some of the batch's threads; None: of all."""
    for number, value in zip(numbers, values):
        if index is None:
            registers[number] = value
            continue
        if registers[number] is None:
            registers[number] = np.zeros(group.batch.threads, value.dtype)
        registers[number][index] = value


_resolve = functools.cache(arithmetic.resolve)


def _operation(instruction: Instruction, worst: bool = False) -> arithmetic.Operation | None:
    try:
        return _resolve(instruction.opcode, instruction.modifiers, len(instruction.operands), worst)
    except UnsupportedInstruction as error:
        raise _refused(error, instruction) from None


@functools.cache
def _check_words(opcode: str, words: tuple[str, ...]) -> None:
    """Raise `UnsupportedInstruction` for a word that no writer heeds."""
    for word in () if opcode in _STRICT else words:
        if word not in _WORDS and not word.startswith(("L1::", "L2::")):
            raise UnsupportedInstruction(f"`.{word}` of {opcode} is not covered")


def _refused(error: UnsupportedInstruction, instruction: Instruction) -> UnsupportedInstruction:
    """The error of an instruction that is not covered, by the feature that it belongs to."""
    if error.at is not None:
        return error
    for start, feature, instead in _FEATURES:
        if re.match(start, instruction.name):
            error = UnsupportedInstruction(f"{feature} ({instruction.name}) are not covered: {instead}")
            break
    return UnsupportedInstruction(str(error), instruction)


def _computes(opcode: str, modifiers: tuple[str, ...], operands: int, worst: bool, first: bool) -> Callable[..., Any]:
    """The function of an instruction that has one, or what gives the `first` of its values alone."""
    operation = _resolve(opcode, modifiers, operands, worst)
    assert operation is not None
    function = operation.first if first else operation.function
    assert function is not None
    return function


class _KernelWriter:
    """State that the blocks of one kernel share while they are written."""

    def __init__(
        self,
        function: Function,
        layout: Layout,
        flow: Flow,
        products: Products,
        clusters: bool,
        worst: bool,
        undefined: frozenset[str],
    ) -> None:
        self.products = products
        self.undefined = undefined  # registers whose value nothing may have written
        every = [one for block in flow.blocks for one in block.instructions]
        # addresses that atom.cas compares: what a loop of it reads first may be old, for the comparison finds that out
        self.compared = {str(one.operands[1]) for one in every if one.opcode == "atom" and "cas" in one.modifiers}
        self.written = {name for one in every for name in registers_of(destination_operands(one)[0])}
        # registers that are more than stored: of what is loaded to be copied, the pads of a struct may be undefined
        self.computed_with = {name for one in every if one.opcode not in ("st", "mov") for name in registers(one)[1]}
        self.worst = worst  # approximations have the error that they may have
        self.clusters = clusters  # addresses of shared memory bear the rank of the block
        self.function = function
        self.layout = layout
        self.flow = flow
        self.number = {name: number for number, name in enumerate(function.registers)}
        self.crossing: set[str] = set()  # registers that live across blocks and differ between threads
        self.reductions: dict[int, Reduction] = {}
        self.reduced: set[str] = set()  # the registers that they go to
        self.names: dict[str, Any] = {"take": take, "put": put, **DTYPES}  # what the text names
        self._bound: dict[Any, str] = {}

    def bind(self, thing: Any, prefix: str, key: Any) -> str:
        """A name for `thing` in the generated text; things with one `key` are one."""
        name = self._bound.get(key)
        if name is None:
            name = self._bound[key] = f"{prefix}{len(self._bound)}"
            self.names[name] = thing
        return name

    def members(self, block: Block) -> Members | None:
        """The lanes that must be together before the block runs."""
        if not block.gathers:
            return None
        first = block.instructions[0]
        mask = member_mask(first)
        if isinstance(mask, Immediate):
            return Members(mask=mask.value & 0xFFFFFFFF)
        if isinstance(mask, Register):
            return Members(register=self.number[mask.name])
        return Members(128 if first.opcode in ("wgmma", "setmaxnreg") else 32)

    def block(self, block: Block) -> str:
        """The text of one block's function."""
        return BlockWriter(self, block).text()


class BlockWriter:
    """Writes the function of one block."""

    def __init__(self, kernel: _KernelWriter, block: Block) -> None:
        self._kernel = kernel
        self.block = block
        self.layout = kernel.layout
        self._lines: list[str] = []
        self._hoisted: dict[str, str] = {}  # special registers, fetched once
        self._read: set[str] = set()  # registers whose value at the start is used
        self._written: dict[str, None] = {}
        self._flags_read: set[str] = set()  # registers of which it is asked whether their value at the start is defined
        self._flags_written: dict[str, None] = {}
        self._scalar: dict[str, bool] = {}
        self._alias: set[str] = set()  # registers whose array may be another's too
        self._temporaries = 0
        self._indent = ""
        self._result = ""
        self.instruction: Instruction = Instruction("", (), ())
        self.pc = block.first
        self.has_carry = False

    # --- the function as a whole ---

    def text(self) -> str:
        for position, instruction in enumerate(self.block.instructions):
            self.instruction, self.pc = instruction, self.block.first + position
            if instruction is self.block.last and self._ends(instruction):
                if self._kernel.undefined:
                    TRACKERS["branch"](self, instruction)
                continue
            self._write_instruction(instruction)
        epilogue = self._epilogue()
        lines = [*self._prologue(), *self._lines, *epilogue]
        if self._result:
            lines.append(f"return {self._result}")
        return "\n".join([f"def block_{self.block.index}(m, g):", *(f" {line}" for line in lines or ["pass"])])

    def _ends(self, instruction: Instruction) -> bool:
        """Return True if the instruction is the block's way out; then also note what the function returns."""
        for name in uses_and_definitions(instruction)[0]:
            if name in self._alias and not self._scalar[name]:
                # it may be a view of another register, which the epilogue writes before this one is returned
                self.emit(f"{self._local(name)} = {self._local(name)}.copy()")
                self._alias.discard(name)
        if instruction.opcode in ("bra", "ret", "exit"):
            if self.block.ends == "branch":
                self._result = self.guard()
            return True
        if self.block.ends == "switch":
            self._result = self.read(instruction.operands[0], "u32")
            return True
        if self.block.ends == "barrier":
            self._barrier(instruction)
            return True
        return False

    def _barrier(self, instruction: Instruction) -> None:
        operands = list(instruction.operands)
        if "cluster" in instruction.modifiers:
            self._result = "-1, None, None"
            return
        predicate = "None"
        if "red" in instruction.modifiers:
            destination, predicate = operands.pop(0), self.read(operands.pop(), "b1")
            assert isinstance(destination, Register)
            operation = next(m for m in instruction.modifiers if m in ("popc", "and", "or"))
            self._kernel.reductions[self.block.index] = Reduction(operation, self._kernel.number[destination.name])
            self._kernel.crossing.add(destination.name)
            self._kernel.reduced.add(destination.name)
        number = self.read(operands[0], "u32") if operands else "0"
        count = self.read(operands[1], "u32") if len(operands) > 1 else "None"
        self._result = f"{number}, {count}, {predicate}"

    def _write_instruction(self, instruction: Instruction) -> None:
        if self._kernel.products.early:
            self._watch()
        if self._kernel.undefined:
            TRACKERS["before"](self, instruction)
        handler = HANDLERS.get(instruction.opcode)
        try:
            if handler is not None:
                _check_words(instruction.opcode, instruction.modifiers)
                handler(self, instruction)
            else:
                self._arithmetic(instruction)
            if self._kernel.undefined:
                TRACKERS["after"](self, instruction)
        except UnsupportedInstruction as error:
            raise _refused(error, instruction) from None
        except (AssertionError, AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
            raise InvalidPtx(f"PTX line {instruction.line}: cannot read {instruction.text!r} ({error!r})") from error

    def _prologue(self) -> list[str]:
        lines = ["R = m.registers; n = g.size; i = g.index"] if self._read or self._written or self._flags_read else []
        if flags := sorted(self._flags_read):
            names = ", ".join(map(self._flag, flags))
            lines.append(f"{names}, = m.flags({self._numbers(flags)}, i)")
        live = [name for name in self._read if name in self._kernel.flow.live_in[self.block.index]]
        own = sorted(name for name in live if name not in self._kernel.flow.uniform)
        self._kernel.crossing.update(own)
        lines += [f"{self._local(name)} = R[{self._kernel.number[name]}]" for name in sorted(set(live) - set(own))]
        if own:
            lines.append(f"{self._locals(own)} = take(R, {self._numbers(own)}, i)")
        return [*lines, *(f"{local} = {value}" for value, local in self._hoisted.items())]

    def _epilogue(self) -> list[str]:
        """Write registers that live on back; arrays that two registers would share are copied first."""
        lines, own = [], []
        for name in self._written:
            if name not in self._kernel.flow.live_out[self.block.index]:
                continue
            local, number = self._local(name), self._kernel.number[name]
            if name in self._kernel.flow.uniform:
                lines.append(f"R[{number}] = {local}")
                continue
            self._kernel.crossing.add(name)
            if self._scalar[name]:
                lines.append(f"{local} = np.full(n, {local})")
            elif name in self._alias:
                lines.append(f"{local} = {local}.copy()")
            own.append(name)
        flags = [name for name in self._flags_written if name in self._kernel.flow.live_out[self.block.index]]
        lines += [f"m.set_flags({self._kernel.number[name]}, i, {self._flag(name)})" for name in flags]
        if own:
            lines.append(f"put(R, {self._numbers(own)}, i, ({self._locals(own)}), g)")
        return lines

    def _locals(self, names: list[str]) -> str:
        """Variables of these registers, as a tuple without brackets."""
        return "".join(f"{self._local(name)}, " for name in names)

    def _numbers(self, names: list[str]) -> tuple[int, ...]:
        return tuple(self._kernel.number[name] for name in names)

    def _watch(self) -> None:
        """Write the tracking of products' sums in registers, in a kernel that may read them too early."""
        step = self._kernel.products.steps.get(self.pc)
        if step is None:
            return
        reads, writes = ([self._kernel.number[name] for name in names] for names in (step.reads, step.writes))
        if self.pc in self._kernel.products.early:
            self.emit(f"m.matrices.read_sums(g, {reads}, {self.pc})")
        if step.kind == "product":
            self.emit(f"m.matrices.begin_sums(g, {writes}, {self.pc})")
        elif writes:
            self.emit(f"m.matrices.copy_sums(g, {writes}, {reads if step.kind == 'copy' else []})")

    # --- for the emitters ---

    @property
    def is_unfenced(self) -> bool:
        """True if the registers of this product may have been touched since the last wgmma.fence."""
        return self.pc in self._kernel.products.unfenced

    def emit(self, line: str) -> None:
        """Add a line."""
        self._lines.append(self._indent + line)

    def temporary(self) -> str:
        """A fresh name."""
        self._temporaries += 1
        return f"t{self._temporaries}"

    def bind(self, function: Callable[..., Any], *arguments: Any) -> str:
        """A name in the generated text for what a function gives."""
        made = Made(function, arguments)
        return self._kernel.bind(made, "fn_", made)

    def guard(self) -> str:
        """The guard of the current instruction as an expression, or ""."""
        guard = self.instruction.guard
        if guard is None:
            return ""
        return f"~{self._register(guard.register)}" if guard.negated else self._register(guard.register)

    def is_computed(self, instruction: Instruction) -> bool:
        """Return True if the instruction does nothing but compute its result."""
        return is_computed(instruction)

    def bytes_of(self, instruction: Instruction) -> int:
        """Bytes of an element of a load or store."""
        return size_of(STORAGE[instruction.modifiers[-1]])

    @property
    def has_undefined(self) -> bool:
        """True if any register of the kernel may be undefined."""
        return bool(self._kernel.undefined)

    def touches_undefined(self, instruction: Instruction, written: list[str], read: list[str]) -> bool:
        """Return True if the instruction has to do with registers that may be undefined."""
        undefined = self._kernel.undefined
        if not undefined.isdisjoint(written) or not undefined.isdisjoint(read):
            return True
        return instruction.guard is not None and instruction.guard.register in undefined

    def may_be_undefined(self, name: str) -> bool:
        """Return True if the value of a register may be one that nothing has written."""
        return name in self._kernel.undefined

    def is_compared(self, address: Operand) -> bool:
        """Return True if an atom.cas of the kernel compares what lies at an address."""
        return str(address) in self._kernel.compared

    def is_written(self, name: str) -> bool:
        """Return True if any instruction of the kernel writes a register."""
        return name in self._kernel.written

    def is_computed_with(self, name: str) -> bool:
        """Return True if any instruction of the kernel does more with a register than store it."""
        return name in self._kernel.computed_with

    def undefined(self, names: list[str]) -> str:
        """Return an expression that tells if any of these registers is undefined; "" where none can be."""
        flags = []
        for name in dict.fromkeys(names):
            if name in self._kernel.undefined:
                if name not in self._flags_written:
                    self._flags_read.add(name)
                flags.append(self._flag(name))
        return " | ".join(flags)

    def set_undefined(self, name: str, expression: str) -> None:
        """Note whether a register is undefined from here on."""
        self.emit(f"{self._flag(name)} = {expression}")
        self._flags_written[name] = None

    def _flag(self, name: str) -> str:
        return f"no{self._kernel.number[name]}"

    def wanted(self, operand: Operand) -> bool:
        """Return True if anything reads this destination later."""
        if not isinstance(operand, Register):
            return False
        return operand.name in self._kernel.flow.live_after(self.block, self.pc - self.block.first)

    def read(self, operand: Operand, kind: str) -> str:
        """An expression for a source operand, viewed as `kind`."""
        return self.read_scalar(operand, kind)[0]

    def read_scalar(self, operand: Operand, kind: str) -> tuple[str, bool]:
        """(expression, whether it is a scalar)."""
        if isinstance(operand, Negated):
            expression, scalar = self.read_scalar(operand.operand, kind)
            return f"~{expression}", scalar
        if isinstance(operand, Register):
            return self._read_register(operand.name, kind)
        if isinstance(operand, Immediate):
            return self.constant(_immediate(operand, kind), kind), True
        if isinstance(operand, Special):
            return self._special(operand.name, kind)
        if isinstance(operand, Symbol):
            return self._variable(operand.name, 0, kind)
        if isinstance(operand, Sink):
            return "None", True
        raise UnsupportedInstruction(f"operand {operand}")

    def read_all(self, operand: Operand, kind: str) -> list[str]:
        """The elements of a vector operand, or the one operand."""
        return [self.read(element, kind) for element in elements(operand)]

    def address(self, operand: Operand) -> str:
        """The address of a memory operand: 64 bits, or 32 where its register has so many."""
        return self.address_scalar(operand)[0]

    def address_scalar(self, operand: Operand) -> tuple[str, bool]:
        """(the address, whether it is a scalar)."""
        assert isinstance(operand, Address)
        base = operand.base
        if isinstance(base, Register):
            kind = "u32" if size_of(self._storage(base.name)) == 4 else "u64"
            expression, scalar = self.read_scalar(base, kind)
            return f"({expression} + {self.constant(operand.offset, kind)})" if operand.offset else expression, scalar
        if isinstance(base, Immediate):
            return self.constant(base.value + operand.offset, "u64"), True
        return self._variable(base.name, operand.offset, "u64")  # type: ignore[union-attr]

    def _variable(self, name: str, offset: int, kind: str) -> tuple[str, bool]:
        """The address of a variable, which in a cluster bears the rank of the block."""
        address = self.constant(self.layout.address(name) + offset, kind)
        if self._kernel.clusters and name in self.layout.shared_symbols:
            return f"m.own_address(g, {address}, {kind})", False
        return address, True

    def write(self, operand: Operand, expression: str, kind: str, *, scalar: bool = False, alias: bool = False) -> None:
        """Give a destination its value; under a guard only the threads for which it holds."""
        if isinstance(operand, Sink):
            return
        assert isinstance(operand, Register), operand
        name, local = operand.name, self._local(operand.name)
        expression = _convert(expression, kind, self._storage(name))
        guard = self.instruction.guard
        if guard is not None:
            old = self._register(name)
            order = (old, expression) if guard.negated else (expression, old)
            expression = f"np.where({self._register(guard.register)}, {order[0]}, {order[1]})"
            scalar = alias = False
        self.emit(f"{local} = {expression}")
        self._set(name, scalar, alias)

    def masked(self, destinations: list[Operand], kind: str, call: Callable[[str, Callable[[str], str]], str]) -> None:
        """A memory instruction, for the threads for which the guard holds.

        `call(group, pick)` writes it, with `pick` around each per-thread operand. Its value goes to the destinations.
        """
        guard = self.guard()
        if not guard:
            value = call("g", lambda expression: expression)
            self._assign(destinations, kind, value, None)
            return
        chosen = self.temporary()
        for operand in destinations:
            if isinstance(operand, Register):  # what the other threads keep
                name, old = operand.name, self._register(operand.name)
                if self._scalar.get(name, name in self._kernel.flow.uniform):
                    self.emit(f"{self._local(name)} = g.spread({old})")
                self._set(name, False, True)
        self.emit(f"{chosen} = g.where({guard})")
        self.emit(f"if {chosen} is not None:")
        self._indent += "    "
        self._assign(destinations, kind, call(f"{chosen}.group", lambda e: f"{chosen}.pick({e})"), chosen)
        self._indent = self._indent[:-4]

    def _assign(self, destinations: list[Operand], kind: str, value: str, chosen: str | None) -> None:
        if not destinations:
            self.emit(value)
            return
        names = [self.temporary() for _ in destinations]
        self.emit(f"{', '.join(names)} = {value}")
        for operand, name in zip(destinations, names):
            if not isinstance(operand, Register):
                continue
            expression = _convert(name, kind, self._storage(operand.name))
            if chosen is not None:
                expression = f"{chosen}.merge({self._local(operand.name)}, {expression})"
            self.emit(f"{self._local(operand.name)} = {expression}")
            if chosen is None:
                self._set(operand.name, False, False)

    def constant(self, value: Any, kind: str) -> str:
        """A name for a constant, as a NumPy scalar."""
        dtype = DTYPES[kind]
        if kind[0] in "us":
            bits = 8 * size_of(kind)
            value = np.array([int(value) & ((1 << bits) - 1)], f"u{bits // 8}").view(dtype)[0]
        else:
            value = dtype(value)
        key = ("constant", kind, value.tobytes())
        return self._kernel.bind(value, "K", key)

    # --- registers ---

    def _local(self, name: str) -> str:
        return f"r{self._kernel.number[name]}"

    def _storage(self, name: str) -> str:
        kind = self._kernel.function.registers[name]
        if kind not in STORAGE:
            raise UnsupportedInstruction(f"registers of type .{kind}")
        return STORAGE[kind]

    def _register(self, name: str) -> str:
        if name not in self._written:
            self._read.add(name)
        return self._local(name)

    def _read_register(self, name: str, kind: str) -> tuple[str, bool]:
        scalar = self._scalar.get(name, name in self._kernel.flow.uniform)
        return _convert(self._register(name), self._storage(name), kind), scalar

    def _set(self, name: str, scalar: bool, alias: bool) -> None:
        self._written[name] = None
        self._scalar[name] = scalar
        (self._alias.add if alias else self._alias.discard)(name)

    def _special(self, name: str, kind: str) -> tuple[str, bool]:
        plain = name.lstrip("%").replace(".", "_")
        if plain.startswith("lanemask_"):
            return _convert(f"m.lane_mask({plain[9:]!r}, {self._hoist('laneid')})", "u32", kind), False
        if plain in PER_THREAD:
            return _convert(self._hoist(plain), "u32", kind), False
        if plain.startswith(("clock", "globaltimer")):
            return f"{kind}(m.clock)", True
        return f"{kind}(m.special[{plain!r}])", True

    def _hoist(self, name: str) -> str:
        return self._hoisted.setdefault(f"g.get({name!r})", f"sp_{name}")

    # --- arithmetic ---

    def _arithmetic(self, instruction: Instruction) -> None:
        operation = _operation(instruction, self._kernel.worst)
        if operation is None:
            raise UnsupportedInstruction(f"the instruction {instruction.name} is not covered")
        given = instruction.operands[0]
        destinations = (given.first, given.second) if isinstance(given, Pair) else (given,)
        sources = instruction.operands[1:]
        taken = [self.read_scalar(operand, kind) for operand, kind in zip(sources, operation.takes)]
        scalar = all(is_scalar for _, is_scalar in taken) and not operation.carry_in
        arguments = [expression for expression, _ in taken]
        if operation.carry_in:
            if not self.has_carry:
                raise UnsupportedInstruction("a carry that an earlier block has left")
            arguments.append("carry")
        if operation.seeded:
            arguments.insert(0, "m.seed")
        asked = instruction.opcode, instruction.modifiers, len(instruction.operands), self._kernel.worst
        first = operation.first if len(destinations) == 1 else None
        call = f"{self.bind(_computes, *asked, first is not None)}({', '.join(arguments)})"
        # a ufunc makes a new array; other functions may give back what they were given
        alias = not isinstance(first or operation.function, np.ufunc)
        if (first is not None or len(operation.gives) == 1) and not operation.carry_out:
            self.write(destinations[0], call, operation.gives[0], scalar=scalar, alias=alias)
            return
        names = [self.temporary() for _ in operation.gives]
        carry = self._new_carry() if operation.carry_out else []
        self.emit(f"{', '.join([*names, *carry])} = {call}")
        if carry and carry != ["carry"]:
            self.emit(f"carry = np.where({self.guard()}, {carry[0]}, carry)")
        for destination, name, kind in zip(destinations, names, operation.gives):
            self.write(destination, name, kind, scalar=scalar, alias=True)

    def _new_carry(self) -> list[str]:
        """The name of the carry that goes out; under a guard one of its own, for other threads keep the carry they have."""
        merges = self.instruction.guard is not None and self.has_carry
        self.has_carry = True
        return [self.temporary() if merges else "carry"]


PER_THREAD = frozenset(
    [f"{name}_{axis}" for name in ("tid", "ctaid", "clusterid", "cluster_ctaid") for axis in "xyz"]
    + ["laneid", "warpid", "cluster_ctarank"]
)

# opcode -> what writes it; filled by the emit_*.py modules
HANDLERS: dict[str, Callable[[BlockWriter, Instruction], None]] = {}
# "before" and "after" an instruction, and at a "branch": what follows undefined values; filled by emit_undefined.py
TRACKERS: dict[str, Callable[[BlockWriter, Instruction], None]] = {}


def emits(
    *opcodes: str,
) -> Callable[[Callable[[BlockWriter, Instruction], None]], Callable[[BlockWriter, Instruction], None]]:
    """Register the writer of these opcodes."""

    def register(function: Callable[[BlockWriter, Instruction], None]) -> Callable[[BlockWriter, Instruction], None]:
        HANDLERS.update(dict.fromkeys(opcodes, function))
        return function

    return register


def elements(operand: Operand) -> tuple[Operand, ...]:
    """The elements of {a, b}, or the operand alone."""
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _convert(expression: str, source: str, target: str) -> str:
    """View or cut or extend a value of kind `source` as `target`."""
    if source == target:
        return expression
    if "b1" in (source, target):
        raise UnsupportedInstruction("a predicate used as a number, or a number as a predicate")
    have, want = size_of(source), size_of(target)
    if have == want:
        return f"{expression}.view({target})"
    bits = f"u{8 * have}"
    if have < want and source[0] == "s":
        extended = f"{expression}.astype(s{8 * want})"
        return extended if target[0] == "s" else f"{extended}.view({target})"
    whole = expression if source == bits else f"{expression}.view({bits})"
    cut = f"{whole}.astype(u{8 * want})"
    return cut if target == f"u{8 * want}" else f"{cut}.view({target})"


def _immediate(operand: Immediate, kind: str) -> Any:
    """The value of an immediate where `kind` is taken."""
    if kind == "b1":
        return bool(operand.value)
    if operand.kind == "int":
        if kind == "f16":
            return np.array([operand.value & 0xFFFF], np.uint16).view(np.float16)[0]
        if kind[0] == "f":
            raise InvalidPtx(f"the integer {operand.value} where a float is taken")
        return operand.value
    if kind[0] in "us":
        return operand.value  # its bits
    if operand.kind == "f32":
        return struct.unpack(">f", operand.value.to_bytes(4, "big"))[0]
    return struct.unpack(">d", operand.value.to_bytes(8, "big"))[0]
