"""A kernel as one flat function: calls are replaced by the bodies they call.

Arguments and results of a call travel through `.param` variables; here they become local memory of the thread, so that
structures passed by value, and addresses taken of them, need no rules of their own.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import UnsupportedInstruction
from .layout import in_source
from .ptx import (
    Address,
    Function,
    Guard,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)

_MAX_DEPTH = 50
_MAX_CALLS = 2000


def flatten(module: Module, kernel: Function) -> Function:
    """A copy of `kernel` without calls, but for those of functions that the PTX declares and does not define.

    A call through a pointer becomes a choice among the functions that it may lead to.
    """
    flat = replace(kernel, registers={}, variables={}, body=[], branch_targets={})
    _Inliner(module, flat).append(kernel, {}, "", None, 0)
    return flat


class _Inliner:
    def __init__(self, module: Module, flat: Function) -> None:
        self._module = module
        self._flat = flat
        self._calls = 0
        self._stack: list[str] = []  # functions that are being inlined

    def append(self, function: Function, names: dict[str, str], suffix: str, end: str | None, depth: int) -> None:
        """The body of `function`, its names made unique by `suffix`; `ret` goes to the label `end`."""
        if suffix:
            names = {name: name + suffix for name in _own_names(function)} | names
        self._declare(function, names)
        for item in function.body:
            if isinstance(item, Label):
                self._flat.body.append(Label(names.get(item.name, item.name)))
            elif item.opcode == "call":
                self._call(_renamed(item, names), depth)
            elif item.opcode == "ret" and end is not None:
                self._flat.body.append(
                    replace(_renamed(item, names), opcode="bra", modifiers=(), operands=(Symbol(end),))
                )
            else:
                self._flat.body.append(self._parameters_in_memory(_renamed(item, names)))

    def _declare(self, function: Function, names: dict[str, str]) -> None:
        for name, kind in function.registers.items():
            self._flat.registers[names.get(name, name)] = kind
        for name, variable in function.variables.items():
            space = "local" if variable.space == "param" else variable.space
            unique = names.get(name, name)
            self._flat.variables[unique] = replace(variable, name=unique, space=space)
        for table, targets in function.branch_targets.items():
            own = tuple(names.get(target, target) for target in targets)
            self._flat.branch_targets[names.get(table, table)] = own

    def _call(self, call: Instruction, depth: int) -> None:
        results, callee, arguments = _call_parts(call)
        self._calls += 1
        skip = self._skip_unless(call)
        if isinstance(callee, Register):
            self._call_by_pointer(call, results, callee, arguments, depth)
        elif callee.name not in self._module.functions:
            raise UnsupportedInstruction("no such function", call)
        elif not self._module.functions[callee.name].defined:
            self._flat.body.append(replace(call, modifiers=(callee.name,), operands=(*results, *arguments), guard=None))
        else:
            self._inline(call, self._module.functions[callee.name], (*arguments, *results), depth)
        if skip:
            self._flat.body.append(Label(skip))

    def _inline(self, call: Instruction, called: Function, given: tuple[Symbol, ...], depth: int) -> None:
        if depth == _MAX_DEPTH:
            what = f"recursive calls ({in_source(called.name)}) are not covered: write a loop, with a stack in an array"
            raise UnsupportedInstruction(what, call)
        self._calls += 1
        end = f"$L_return{self._calls}"
        names = {variable.name: symbol.name for variable, symbol in zip((*called.parameters, *called.results), given)}
        self._stack.append(called.name)
        self.append(called, names, f"$call{self._calls}", end, depth + 1)
        self._stack.pop()
        self._flat.body.append(Label(end))

    def _call_by_pointer(
        self,
        call: Instruction,
        results: tuple[Symbol, ...],
        pointer: Register,
        arguments: tuple[Symbol, ...],
        depth: int,
    ) -> None:
        """A comparison and a branch for each function that takes such arguments."""
        sizes = [[self._flat.variables[one.name].size for one in part] for part in (arguments, results)]
        number = self._calls
        for called in self._module.functions.values():
            own = [[one.size for one in part] for part in (called.parameters, called.results)]
            if called.entry or not called.defined or own != sizes or called.name in self._stack:
                continue
            self._calls += 1
            if self._calls > _MAX_CALLS:
                what = f"more than {_MAX_CALLS} calls, through pointers, are not covered: choose by a switch"
                raise UnsupportedInstruction(what, call)
            chosen, other = f"$p_call{self._calls}", f"$L_other{self._calls}"
            self._flat.registers[chosen] = "pred"
            compare = (Register(chosen), pointer, Symbol(called.name))
            self._flat.body += [
                replace(call, opcode="setp", modifiers=("eq", "u64"), operands=compare, guard=None),
                replace(call, opcode="bra", modifiers=(), operands=(Symbol(other),), guard=Guard(chosen, True)),
            ]
            self._inline(call, called, (*arguments, *results), depth)
            self._flat.body.append(
                replace(call, opcode="bra", modifiers=(), operands=(Symbol(f"$L_called{number}"),), guard=None)
            )
            self._flat.body.append(Label(other))
        self._flat.body.append(replace(call, modifiers=("$no_function",), operands=(), guard=None))
        self._flat.body.append(Label(f"$L_called{number}"))

    def _skip_unless(self, call: Instruction) -> str:
        """Branch around a guarded call."""
        if call.guard is None:
            return ""
        skip = f"$L_skip{self._calls}"
        guard = Guard(call.guard.register, not call.guard.negated)
        self._flat.body.append(replace(call, opcode="bra", modifiers=(), operands=(Symbol(skip),), guard=guard))
        return skip

    def _parameters_in_memory(self, instruction: Instruction) -> Instruction:
        """ld.param and st.param of a call's variables as ld.local and st.local."""
        for operand in instruction.operands:
            base = operand.base if isinstance(operand, Address) else operand
            if isinstance(base, Symbol) and base.name in self._flat.variables:
                variable: Variable = self._flat.variables[base.name]
                if variable.space == "local":
                    swapped = tuple("local" if m.split("::")[0] == "param" else m for m in instruction.modifiers)
                    return replace(instruction, modifiers=swapped)
        return instruction


def _call_parts(call: Instruction) -> tuple[tuple[Symbol, ...], Symbol | Register, tuple[Symbol, ...]]:
    """(results, the function or a pointer to one, arguments) of `call (r), f, (a, b)`."""
    operands = list(call.operands)
    results = _symbols(operands.pop(0)) if isinstance(operands[0], Vector) else []
    callee = operands.pop(0)
    arguments = _symbols(operands.pop(0)) if operands and isinstance(operands[0], Vector) else []
    if not isinstance(callee, (Symbol, Register)) or results is None or arguments is None:
        raise UnsupportedInstruction("a call of this form is not covered", call)
    return tuple(results), callee, tuple(arguments)


def _symbols(operand: Operand) -> list[Symbol] | None:
    """The elements of a vector; None if one is no symbol."""
    found = operand.elements if isinstance(operand, Vector) else ()
    symbols = [element for element in found if isinstance(element, Symbol)]
    return symbols if len(symbols) == len(found) else None


def _own_names(function: Function) -> list[str]:
    labels = [item.name for item in function.body if isinstance(item, Label)]
    return [*function.registers, *function.variables, *labels, *function.branch_targets]


def _renamed(instruction: Instruction, names: dict[str, str]) -> Instruction:
    if not names:
        return instruction
    guard = instruction.guard
    return replace(
        instruction,
        operands=tuple(_rename(operand, names) for operand in instruction.operands),
        guard=guard and Guard(names.get(guard.register, guard.register), guard.negated),
    )


def _rename(operand: Operand, names: dict[str, str]) -> Operand:
    if isinstance(operand, Register):
        return Register(names.get(operand.name, operand.name))
    if isinstance(operand, Symbol):
        return Symbol(names.get(operand.name, operand.name))
    if isinstance(operand, Address):
        more = tuple(_rename(inner, names) for inner in operand.more)
        return Address(_rename(operand.base, names), operand.offset, more)
    if isinstance(operand, Vector):
        return Vector(tuple(_rename(inner, names) for inner in operand.elements))
    if isinstance(operand, Pair):
        return Pair(_rename(operand.first, names), _rename(operand.second, names))
    if isinstance(operand, Negated):
        return Negated(_rename(operand.operand, names))
    return operand
