"""Computation of one kernel: values as instructions, by stage and by loop level.

A kernel runs over rows and columns; a thread has several neighbouring columns at a time. Level 0 and 1 instructions do not
depend on the column, 2 on the column alone, 3 on row and column. Stage s can use the row reductions of the stages before.
Tracing is also the test of a fusion: stores that cannot share a kernel raise `Reject`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from .index import Affine, Reject, Split, Variable, flatten, never, unflatten
from .rules.numbers import literal
from .size import Number, about, at_most, divides
from .space import Space
from .values import (
    COMPUTED,
    HALVES,
    STORED,
    Buffer,
    Concatenation,
    Constant,
    Gather,
    Index,
    OneHot,
    Placed,
    Pointwise,
    Range,
    Reduction,
    Scattered,
    Store,
    Value,
    View,
    is_column,
    is_read,
    layout,
    memory_order,
    walked,
)

MOST_SPLITS = 24  # of loop variables in one kernel
SUMMED_COLUMNS = 32 * 1024  # of a row whose columns are summed up too: a thread has 32 at most
IN_REGISTERS = 8192  # columns of a row that a block keeps; longer rows are read again in each stage

# functions that have a version as exact as a half needs
FAST = re.compile(r"\b(exp|div|sigmoid|silu|silu_gradient|tanh|gelu|gelu_gradient|gelu_tanh|gelu_tanh_gradient)\(")

Mask = tuple[tuple[Affine, Number, Number], ...]  # (expression, low, high): low <= expression < high
Place = Literal["row", "full", "after"]  # one element for each row, for each element, after all rows
Stage = int | Literal["after"]
LEVEL = {"b": 0, "p": 0, "r": 1, "c": 2}


class Instruction(NamedTuple):
    """One step of a thread. `what` says which of the methods of `Rendered` writes it; `data` is its own."""

    what: str
    level: int
    data: tuple[Any, ...]


def joined(a: int, b: int) -> int:
    """Level of an instruction that depends on two others: on row and column if one depends on each."""
    return 3 if {a, b} == {1, 2} else max(a, b)


class Trace:
    """The instructions of a kernel for some stores.

    Attributes:
        code: (stage, "row" | "inner" | "after") -> instructions.
        order: loop variables by kind, outermost first.
        reductions: reduction -> its name in C.
        online: sum of exponentials -> maximum, where both are found in one pass over a row too long for registers.
        divisions: number of divisions that the inner loop computes.
    """

    def __init__(
        self, stores: Sequence[Store], digits: dict[int, list[Variable]] | None = None, *, exact: bool = False
    ) -> None:
        self.stores, self.exact = list(stores), exact
        self.precise = set() if exact else self._precise()
        self.inside = {s.value: s for s in stores if s.target is None}
        self.space = Space.of(self.stores)
        self.digits = digits if digits is not None else {}
        self._run()

    def _precise(self) -> set[Value]:
        """Values of more precision than a half that a store of such precision is computed from."""
        stored = [s.value for s in self.stores if s.needed and s.buffer.dtype not in HALVES]
        stored += [s.value for s in self.stores if isinstance(s.value, Reduction) and s.value.parts is not None]
        return {value for value in walked(stored, _is_precise) if _is_precise(value)}

    def _run(self) -> None:
        for _ in range(MOST_SPLITS):
            try:
                self._collect()
                return
            except Split as split:
                self._divide(split)
        raise Reject("too many loops")

    def reorder(self) -> None:
        """Let a pointwise kernel go as its results lie in memory, and by rows where it reads parameters of these."""
        for better in (self._as_written, self._rows_of_parameters):
            if (space := better()) is None:
                continue
            before, self.space, self.digits = (self.space, self.digits), space, {}
            try:
                self._run()
            except Reject:
                self.space, self.digits = before
                self._run()

    def _as_written(self) -> Space | None:
        """Loops of the largest result that is written; the first value that is computed may lie in another order."""
        written = [s for s in self.stores if s.needed]
        if self.space.kind != "flat" or not written:
            return None
        space = Space.of(written)
        return space if space != self.space else None

    def _rows_of_parameters(self) -> Space | None:
        if self.space.kind != "flat":
            return None
        order = self.space.columns
        place = {v: order.index(d) for d, digits in self.digits.items() for v in digits}
        loads = [one.data for code in self.code.values() for one in code if one.what == "load"]
        found = [
            offset.terms
            for _, _, offset, mask in loads
            if not mask and offset.terms and offset.terms.keys() <= place.keys()
        ]
        starts = [(min(place[v] for v in terms), len(terms)) for terms in found]
        first = min((at for at, count in starts if at > 0 and count <= len(order) - at), default=None)
        if first is None:
            return None
        space = Space("row", self.space.shape, [], order[:first], order[first:])
        columns = space.size(space.columns)
        fits = about(space.size(space.rows)) >= 256 and isinstance(columns, int) and 16 <= columns <= 4096
        return space if fits else None

    # -- loop variables ------------------------------------------------------------------------------------------------

    def _divide(self, split: Split) -> None:
        for digits in self.digits.values():
            if split.variable in digits:
                v, at = split.variable, digits.index(split.variable)
                outer = Variable(f"{v.name}h", v.size // split.inner, v.kind)
                digits[at : at + 1] = [outer, Variable(f"{v.name}l", split.inner, v.kind)]
                return
        raise Reject("no loop to split")

    def _coordinate(self, kind: Any, dim: int) -> Affine:
        size = self.space.shape[dim]
        if size == 1:
            return Affine()
        total, step = Affine(), 1
        for v in reversed(self.digits.setdefault(dim, [Variable(f"{kind}{dim}", size, kind)])):
            total = total + Affine({v: step})
            step *= v.size
        return total

    # -- the order of stores -------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        space = self.space
        self.memo: dict[Any, Any] = {}
        self.stage: Stage = 0
        self.divisions = 0
        self.code: dict[tuple[Stage, str], list[Instruction]] = {}
        self.expressions: list[Affine] = []
        self.names = 0
        self.buffers: dict[str, Buffer] = {}
        self.level_of: dict[Variable, int] = {}
        self.read_at: dict[str, list[tuple[Affine, Mask, Stage]]] = {}
        self.written_at: dict[str, tuple[Affine, Stage, str]] = {}
        self.bf16: set[str] = {"0.e+00f"}  # names of values that are a bf16 as they stand: stored without rounding
        self.rows, self.columns, self.batch = (space.size(d) for d in (space.rows, space.columns, space.batch))
        self.coordinates = [Affine()] * len(space.shape)
        groups = (("b", space.batch), ("r", space.rows), ("c", space.columns))
        for kind, group in groups:
            for d in group:
                self.coordinates[d] = self._coordinate(kind, d)
        self.order = {kind: [v for d in group for v in self.digits.get(d, ())] for kind, group in groups}
        self.home: dict[Value, Index] = {}
        self.reductions: dict[Reduction, str] = {}
        self.part = Variable("part", 1 << 20, "p")
        plan = self._plan()
        stage = self._stages(plan)
        self._emit_stages(plan, stage)
        self._emit_after(plan)
        self._check_writes()

    def _at(self, value: Value, dims: Sequence[int]) -> Index:
        """The element of a tensor of another shape at the same place in memory."""
        sizes = [self.space.shape[d] for d in dims]
        position = flatten([self.coordinates[d] for d in dims], sizes)
        order = [d for d in memory_order(value) if value.shape[d] > 1]
        found = dict(zip(order, unflatten(position, [value.shape[d] for d in order], self.compute)))
        return tuple(found.get(d, Affine()) for d in range(len(value.shape)))

    def _plan(self) -> list[tuple[Store, str, Any]]:
        """(store, "reduction" | Place, index or function that gives it) of each store, in order."""
        space = self.space
        total = math.prod(space.shape)
        kept_dims = space.rows if space.kind == "row" else [*space.batch, *space.columns]
        kept_shape = tuple(space.shape[d] for d in sorted(kept_dims))
        plan: list[tuple[Store, str, Any]] = []
        parted = any(isinstance(s.value, Reduction) and s.value.parts is not None for s in self.stores)
        if parted and space.kind == "row" and not at_most(self.columns, SUMMED_COLUMNS):
            raise Reject("rows too long to keep column sums")
        for store in self.stores:
            value = store.value
            if isinstance(value, Reduction):
                plan.append((store, "reduction", self._home_of(value, total)))
            elif value.numel == total and not (space.kind == "column" and self._reductions_of(value)):
                every = [*space.batch, *space.rows, *space.columns]
                plan.append((store, "full", self._once_for_each(store, every, space.shape)))
            elif value.numel == math.prod(kept_shape) and space.kind != "flat":
                if space.kind == "row" and not any(isinstance(s.value, Reduction) for s in self.stores):
                    raise Reject("no rows")
                place = "row" if space.kind == "row" else "after"
                plan.append((store, place, self._once_for_each(store, kept_dims, kept_shape)))
            else:
                raise Reject("another size")
        if parted and any(place == "after" for _, place, _ in plan):
            raise Reject("sums in parts have no result yet")
        return plan

    def _once_for_each(self, store: Store, dims: Sequence[int], shape: tuple[int, ...]) -> Callable[[], Index]:
        if store.value.shape == shape:
            return lambda: tuple(self.coordinates[d] for d in sorted(dims))
        return lambda: self._at(store.layout, dims)

    def _home_of(self, value: Reduction, total: int) -> Index:
        """Index of the operand of a reduction; its index without the reduced dimensions is where the result belongs."""
        space, source = self.space, value.source
        if source.numel != total:
            raise Reject("another size")
        column = is_column(value)
        if space.kind == "flat" or (space.kind == "column" and not column):
            raise Reject("reductions in another direction")
        if space.kind == "row" and column and value.parts is None:
            raise Reject("column sums that are not in parts, in a kernel of rows")
        dims = [*space.batch, *space.rows, *space.columns]
        index = tuple(self.coordinates) if source.shape == space.shape else self._at(layout(source), dims)
        reduced, kept = ("r", "bc") if column else ("c", "br")
        for d, coordinate in enumerate(index):
            if any(v.kind not in (reduced if d in value.dims else kept) for v in coordinate.terms):
                raise Reject("a reduction that crosses rows")
        self.home[value] = tuple(i for d, i in enumerate(index) if d not in value.dims)
        return index

    def _stages(self, plan: list[tuple[Store, str, Any]]) -> dict[Value, int]:
        self.online: dict[Reduction, Reduction] = {}
        if self.space.kind == "row" and about(self.columns) > IN_REGISTERS:
            sums = [s.value for s in self.stores if isinstance(s.value, Reduction)]
            for one in sums:
                top = one.largest
                others = [r for r in sums if r is not one]
                if top is not None and top in self.inside and not any(top in self._reductions_of(r) for r in others):
                    self.online[one] = top
        stage: dict[Value, int] = {}
        for store, place, _ in plan:
            value = store.value
            if value in self.online:
                stage[value] = stage[self.online[value]]  # type: ignore[index]
                continue
            read = self._reductions_of(value)
            stage[value] = max((stage[r] + 1 for r in read if not is_column(r)), default=0)
            if place != "after" and any(is_column(r) for r in read):
                raise Reject("sums of columns are not there yet")
        self.stages = max(stage.values(), default=-1) + 1 or 1
        return stage

    def _emit_stages(self, plan: list[tuple[Store, str, Any]], stage: dict[Value, int]) -> None:
        for s in range(self.stages):
            self.stage = s
            for store, place, index in plan:
                value = store.value
                if stage[value] != s or place == "after":
                    continue
                if isinstance(value, Reduction):
                    if value not in self.online:
                        name, level = self.element(value.source, index, ())
                        self._emit("accumulate", max(level, 2), (value, name))
                    self.reductions[value] = f"s{len(self.reductions)}"
                else:
                    where = index()
                    name, _ = self.element(value, where, ())
                    self._store(store, where, name, place)

    def _emit_after(self, plan: list[tuple[Store, str, Any]]) -> None:
        self.stage, self.memo = "after", {}
        for store, place, index in plan:
            value = store.value
            if isinstance(value, Reduction):
                if is_column(value):
                    home = self.home[value]
                    where = home if value.parts is None else (Affine({self.part: 1}), *home)
                    self._store(store, where, self.reductions[value], "after")
                elif store.needed:
                    self.stage = self.stages
                    self._store(store, self.home[value], self.reductions[value], "row")
                    self.stage = "after"
            elif place == "after":
                where = index()
                name, _ = self.element(value, where, ())
                self._store(store, where, name, "after")

    def _check_writes(self) -> None:
        """A kernel that overwrites what it reads reads each element in the thread that writes it, and not afterwards."""
        for name, (offset, stage, place) in self.written_at.items():
            for read, mask, when in self.read_at.get(name, ()):
                late = stage != "after" and (when == "after" or int(when) > int(stage))
                if read != offset or mask or late or place in ("row", "scattered"):  # a row is read by all its threads
                    raise Reject("it overwrites what other threads read")

    def _reductions_of(self, value: Value) -> set[Reduction]:
        """The reductions of this kernel that a value needs, not counting those that these need."""

        def is_own(one: Value) -> bool:
            return isinstance(one, Reduction) and one in self.inside

        reached = walked(value.inputs, lambda one: not is_own(one) and (one in self.inside or not is_read(one)))
        return {one for one in reached if isinstance(one, Reduction) and one in self.inside}

    # -- elements ------------------------------------------------------------------------------------------------------

    def _new(self, hint: str) -> str:
        self.names += 1
        return f"{hint}{self.names}"

    def _emit(self, what: str, level: int, data: tuple[Any, ...]) -> None:
        part = "after" if self.stage == "after" else "row" if level <= 1 else "inner"
        self.code.setdefault((self.stage, part), []).append(Instruction(what, level, data))

    def _level(self, *expressions: Affine) -> int:
        level, kinds = 0, set()
        for one in expressions:
            self.expressions.append(one)
            for v in one.terms:
                kinds.add(v.kind)
                level = max(level, self.level_of[v] if v.kind == "o" else LEVEL[v.kind])
        return 3 if level >= 2 and kinds & {"r", "o"} else level

    def compute(self, expression: Affine, operator: str, divisor: Number, bound: Number) -> Variable:
        """A quotient or remainder that the kernel computes."""
        key = ("integer", expression, operator, divisor)
        found = self._known(key)
        if found is None:
            v = Variable(self._new("o"), bound, "o")
            self.level_of[v] = self._level(expression)
            self.divisions += self.level_of[v] >= 2
            self._emit("integer", self.level_of[v], (v, expression, operator, divisor))
            found = self._keep(key, (v, self.level_of[v]))
        variable: Variable = found[0]
        return variable

    def _known(self, key: Any) -> Any:
        return self.memo.get(("row", key)) or self.memo.get((self.stage, key))

    def _keep(self, key: Any, found: tuple[Any, int]) -> tuple[Any, int]:
        self.memo["row" if found[1] <= 1 and self.stage != "after" else self.stage, key] = found
        return found

    def element(self, value: Value, index: Index, mask: Mask) -> tuple[str, int]:
        """(name in C, level) of an element, computed once in each stage."""
        if isinstance(value, Constant):
            return literal(value.number, value.dtype), 0
        if isinstance(value, View) and (value.store is None or value in self.inside):
            return self.element(value.base, value.map(tuple(index), self.compute), mask)
        key = (id(value), index, mask)
        found = self._known(key)
        if found is None:
            found = self._keep(key, self._element(value, index, mask))
        return found  # type: ignore[no-any-return]

    def _element(self, value: Value, index: Index, mask: Mask) -> tuple[str, int]:
        if isinstance(value, Buffer):
            return self._load(value, index, mask)
        if value.store is not None and value not in self.inside:
            return self._load(value.store.buffer, index, mask)
        found: tuple[str, int] = getattr(self, f"_{type(value).__name__.lower()}")(value, index, mask)
        return found

    def _scattered(self, value: Scattered, index: Index, mask: Mask) -> tuple[str, int]:
        return self.element(value.inputs[0], index, mask)

    def _reduction(self, value: Reduction, index: Index, mask: Mask) -> tuple[str, int]:
        if value not in self.home or value not in self.reductions:
            raise Reject("a reduction that is not there yet")
        if index != self.home[value]:
            raise Reject("the reduction of another row")
        if is_column(value) and (self.stage != "after" or value.parts is not None):
            raise Reject("a sum over all rows")
        return self.reductions[value], 2 if self.stage == "after" else 1

    def _range(self, value: Range, index: Index, mask: Mask) -> tuple[str, int]:
        level, name = self._level(index[0]), self._new("v")
        self._emit("range", level, (name, value, index[0]))
        return name, level

    def _operand(self, one: Any, dtype: torch.dtype, index: Index, mask: Mask) -> tuple[str, int]:
        """An operand converted to the dtype that its operator computes in."""
        if not isinstance(one, Value):
            return literal(one, dtype), 0
        name, level = self.element(one, index, mask)
        if one.dtype != dtype:
            if dtype in HALVES:
                name = f"rounded<{STORED[dtype]}>({name})"
            elif one.computed != COMPUTED[dtype]:
                name = f"convert<{COMPUTED[dtype]}>({name})"
        return name, level

    def _pointwise(self, value: Pointwise, index: Index, mask: Mask) -> tuple[str, int]:
        names, level = [], 0
        for one, dtype in zip(value.operands, value.compute):
            name, at = self._operand(one, dtype, index, mask)
            names.append(name)
            level = joined(level, at)
        text = value.text.format(*names)
        if not self.exact and value not in self.precise and value.computed == "float":
            text = FAST.sub(r"fast_\1(", text)
        computed = value.compute[0] if value.compute else value.dtype
        if value.dtype in HALVES:
            if value.rounds or self.exact:
                text = f"rounded<{STORED[value.dtype]}>({text})"
            elif computed not in (*HALVES, torch.float32):
                text = f"convert<float>({text})"
        elif value.text == "{0}" and COMPUTED[computed] != value.computed:
            text = f"convert<{value.computed}>({text})"
        name, level = self._expression(value.computed, text, level)
        if (value.text == "{0}" and names[0] in self.bf16) or (value.rounds and value.dtype is torch.bfloat16):
            self.bf16.add(name)
        return name, level

    def _concatenation(self, value: Concatenation, index: Index, mask: Mask) -> tuple[str, int]:
        first, out, dim = 0, None, value.dim
        for part in value.inputs:
            size = part.shape[dim]
            here = (*index[:dim], self._within(index[dim], first, size), *index[dim + 1 :])
            name, level = self.element(part, here, (*mask, (index[dim], first, first + size)))
            level = joined(level, self._level(index[dim]))
            if out is None:
                out = name, level
            else:
                choice = ("within", index[dim], first, first + size, name, out[0])
                out = self._expression(value.computed, choice, joined(level, out[1]))
            first += size
        assert out is not None
        return out

    def _placed(self, value: Placed, index: Index, mask: Mask) -> tuple[str, int]:
        (source, elsewhere), dim = value.inputs, value.dim
        at, size = index[dim], source.shape[dim]
        here: Mask = ((at, value.low, value.low + (size - 1) * value.step + 1),)
        coordinate = self._within(at, value.low, size)
        if value.step != 1:
            coordinate, rest = (at + -value.low).divmod(value.step, self.compute)
            here = (*here, (rest, 0, 1))
        name, level = self.element(source, (*index[:dim], coordinate, *index[dim + 1 :]), (*mask, *here))
        other, more = self.element(elsewhere, index, mask)
        level = joined(level, more)
        for one in here:
            level = joined(level, self._level(one[0]))
            name, level = self._expression(value.computed, ("within", *one, name, other), level)
        return name, level

    def _gather(self, value: Gather, index: Index, mask: Mask) -> tuple[str, int]:
        source, numbers = value.inputs
        coordinate = self._looked_up(value, numbers, value.map(index), mask)
        return self.element(source, value.place(index, coordinate), mask)

    def _looked_up(self, value: Gather | Scattered, numbers: Value, index: Index, mask: Mask) -> Affine:
        """The coordinate that an element of an index tensor is."""
        at, level = self.element(numbers, index, mask)
        for one in mask:  # computed from what is not read, it may be any number
            at, level = self._expression(
                numbers.computed, ("within", *one, at, "0"), joined(level, self._level(one[0]))
            )
        key = ("index", at, value.size, value.wraps)
        found = self._known(key)
        if found is None:
            v = Variable(self._new("o"), value.size, "o")
            self.level_of[v] = level
            self._emit("index", level, (v, at, value.size, value.wraps))
            found = self._keep(key, (v, level))
        return Affine({found[0]: 1})

    def _onehot(self, value: OneHot, index: Index, mask: Mask) -> tuple[str, int]:
        base, numbers, dim = value.inputs[0], value.inputs[1], value.dim
        row = (*index[:dim], Affine(), *index[dim + 1 :])
        at, level = self.element(numbers, row, mask)
        other, more = self.element(base, index, mask)
        name, also = self._operand(value.value, value.dtype, row, mask)
        level = joined(joined(level, more), joined(also, self._level(index[dim])))
        return self._expression(value.computed, ("equal", index[dim], at, name, other), level)

    @staticmethod
    def _within(expression: Affine, first: Number, size: Number) -> Affine:
        """`expression - first` where that is in [0, size): its lower digits, if `first` is a multiple of `size`."""
        if size != 0 and divides(8, size) and divides(size, first):
            try:
                return expression.divmod(size, never)[1]
            except Reject:
                pass
        return expression + -first

    def _expression(self, computed: str, text: Any, level: int) -> tuple[str, int]:
        name = self._new("v")
        if isinstance(text, tuple) and text[-1] in self.bf16 and text[-2] in self.bf16:
            self.bf16.add(name)
        self._emit("expression", level, (computed, name, text))
        return name, level

    def _load(self, buffer: Buffer, index: Index, mask: Mask) -> tuple[str, int]:
        offset = _offset(buffer, index)
        level, name = self._level(offset, *(one[0] for one in mask)), self._new("l")
        self.buffers.setdefault(buffer.name, buffer)
        self.read_at.setdefault(buffer.name, []).append((offset, mask, self.stage))
        self._emit("load", level, (name, buffer, offset, mask))
        if buffer.dtype is torch.bfloat16:
            self.bf16.add(name)
        return name, level

    def _store(self, store: Store, index: Index, name: str, place: str) -> None:
        parts = isinstance(store.value, Reduction) and store.value.parts is not None
        if not (store.needed or parts):
            return
        value, scattered = store.value, isinstance(store.value, Scattered)
        if isinstance(value, Scattered):
            coordinate = self._looked_up(value, value.inputs[1], (index[value.dim],), ())
            index = (*index[: value.dim], coordinate, *index[value.dim + 1 :])
        offset = _offset(store.buffer, index)
        self.expressions.append(offset)
        self.written_at[store.buffer.name] = offset, self.stage, "scattered" if scattered else place
        if name in self.bf16 and store.buffer.dtype is torch.bfloat16:
            name = f"Exact{{{name}}}"
        self._emit("store", {"full": 3, "row": 1, "after": 2}[place], (store, offset, name))


def _is_precise(value: Value) -> bool:
    return value.dtype not in HALVES and not isinstance(value, Buffer)


def _offset(buffer: Buffer, index: Index) -> Affine:
    offset = Affine()
    for coordinate, stride, size in zip(index, buffer.strides, buffer.shape):
        if size != 1:
            offset = offset + coordinate * stride
    return offset
