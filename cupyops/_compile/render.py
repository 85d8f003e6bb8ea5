"""The instructions of a kernel as CUDA C, with its grid and block."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from .index import Affine, Reject, Variable
from .rules.numbers import literal
from .size import Number, Real, Size, about, at_most, ceiling, divides, named, same
from .trace import Instruction, Mask, Trace
from .values import COMPUTED, STORED, Buffer, Range, Reduction, Store, is_column

# Blocks are counted for one number of multiprocessors, that of an H100 or H200, on every GPU: so sums have the same bits.
MULTIPROCESSORS = 132
THREADS = 2048  # resident on a multiprocessor
WARP_ROW = 1024  # columns up to which a warp has a row
MOST_ARGUMENTS = 40  # pointers that a launch of bundled kernels takes
MOST_PARTS, MOST_BLOCKS = 8, 2 * MULTIPROCESSORS  # different kernels in a launch, and blocks of each
OPERATION = {"sum": "Sum", "max": "Max", "min": "Min"}
INDENT = "  "
# functions that say little in the name of a kernel
UNNAMED = {"for", "if", "load", "store", "to_shared", "alignas", "gridDim", "sizeof", "of", "add", "mul", "sub"}


def start(reduction: Reduction) -> str:
    """Initial value of a reduction."""
    kind = COMPUTED[reduction.dtype]
    return {"sum": f"({kind})0", "max": f"lowest<{kind}>()", "min": f"highest<{kind}>()"}[reduction.op]


def _made(one: Instruction) -> tuple[Any, tuple[Any, ...]]:
    """(the name of what an instruction computes, what it computes it of)."""
    made, *used = one.data if one.what != "expression" else one.data[1:]  # after its type in C
    return getattr(made, "name", made), tuple(used)


class Rendered:
    """A kernel: its text, the buffers that it takes, the stores that it writes, grid and block."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.total_of = {top: total for total, top in trace.online.items()}
        self._merge_loops()
        self.inner: Variable | None = self.order["c"][-1] if self.order["c"] else None
        self.outputs = [s for s in trace.stores if s.needed]
        self.varying = self._varying()
        self._shape()
        self.text = self._text()

    # -- loops ---------------------------------------------------------------------------------------------------------

    def _merge_loops(self) -> None:
        """Neighbouring loop variables that every expression uses as one become one."""
        self.merged: dict[Variable, Variable | None] = {}
        self.order: dict[str, list[Variable]] = {}
        expressions = list(self.trace.expressions)
        for kind, given in self.trace.order.items():
            variables, k = list(given), 0
            while k + 1 < len(variables):
                outer, inner = variables[k], variables[k + 1]
                if any(not same(e.terms.get(outer, 0), e.terms.get(inner, 0) * inner.size) for e in expressions):
                    k += 1
                    continue
                both = Variable(f"{outer.name}{inner.name}", outer.size * inner.size, outer.kind)
                expressions = [
                    Affine({both if v is inner else v: c for v, c in e.terms.items() if v is not outer}, e.const)
                    for e in expressions
                ]
                self.merged[outer], self.merged[inner] = None, both
                variables[k : k + 2] = [both]
                k = max(k - 1, 0)
            self.order[kind] = variables

    def _plain(self, expression: Affine) -> Affine:
        """The expression in merged variables."""
        while any(v in self.merged for v in expression.terms):
            terms: dict[Variable, Number] = {}
            for v, c in expression.terms.items():
                to = self.merged.get(v, v)
                if to is not None:
                    terms[to] = terms.get(to, 0) + c
            expression = Affine(terms, expression.const)
        return expression

    def _varying(self) -> set[str]:
        """Names of what differs between the columns that a thread has at a time; all else is computed once before them."""
        found = {name for one, name in self.trace.reductions.items() if is_column(one)}

        def varies(one: Any) -> bool:
            if isinstance(one, str):
                return not found.isdisjoint(re.findall(r"\w+", one))
            if isinstance(one, Affine):
                return any(v is self.inner or v.name in found for v in self._plain(one).terms)
            return isinstance(one, tuple) and any(map(varies, one))

        for code in self.trace.code.values():
            for one in code:
                name, used = _made(one)
                if isinstance(name, str) and varies(used):
                    found.add(name)
        return found

    def _shape(self) -> None:
        """Grid, block, and how many elements a thread has at a time."""
        trace = self.trace
        buffers = [*trace.buffers.values(), *(s.buffer for s in self.outputs)]
        large = [b for b in buffers if about(b.numel) >= about(trace.rows * trace.columns) // 2] or buffers
        smallest = min((b.dtype.itemsize for b in large if b.dtype.itemsize > 1), default=4)
        self.vector = min(8, 16 // smallest)
        while not divides(self.vector, self.inner.size if self.inner else 1):
            self.vector //= 2
        total = trace.rows * trace.columns * trace.batch
        self.wide = total >= 2**31 - 1 or any(_extent(b) >= 2**31 - 1 for b in buffers)
        self.sums = [r for r in trace.reductions if is_column(r)]
        self.iterations, self.static, self.many_rows, self.tiles = 1, True, False, 1
        {"flat": self._shape_flat, "row": self._shape_rows, "column": self._shape_columns}[trace.space.kind]()

    def _shape_flat(self) -> None:
        columns = self.trace.columns
        self.threads, self.rows_of_block = 256, 1
        if any(about(buffer.numel) >= 2 * about(columns) for buffer in self._gathered()):
            self.vector = min(self.vector, 2)  # neighbouring threads read what lies near
        while self.threads > 64 and about(columns) < MULTIPROCESSORS * self.threads * self.vector:
            self.threads //= 2
        self.grid = (ceiling(columns, self.threads * self.vector) or 1, 1)
        self.block = self.threads

    def _gathered(self) -> list[Buffer]:
        """Buffers of which a thread reads an element for each of its columns, at a computed place."""
        loads = [one.data for code in self.trace.code.values() for one in code if one.what == "load"]
        return [
            buffer
            for _, buffer, offset, _ in loads
            if any(v.kind == "o" and v.name in self.varying for v in offset.terms)
        ]

    def _shape_rows(self) -> None:
        trace, rows = self.trace, about(self.trace.rows)
        columns = about(trace.columns)
        chunks = ceiling(columns, self.vector)
        reduces = any(not is_column(r) for r in trace.reductions)
        if chunks <= 32:
            self.threads = 1 << (chunks - 1).bit_length()
        elif chunks <= (96 if reduces else 64) or (columns <= WARP_ROW and reduces and not self.sums):
            self.threads = 32
        else:  # groups of columns that a thread has: 16 elements
            groups = max(2, (16 if reduces else 4) // self.vector)
            self.threads = min(1024, 32 * math.ceil(chunks / groups / 32))
        self.iterations = ceiling(ceiling(trace.columns, self.vector), self.threads)
        self.static = isinstance(self.iterations, int) and self.iterations * self.vector <= (32 if self.sums else 64)
        if self.sums and not self.static:
            raise Reject("rows too long to keep column sums")
        self.block = max(self.threads, 128) if self.threads <= 32 else self.threads
        self.rows_of_block = self.block // self.threads
        if rows < MULTIPROCESSORS * self.rows_of_block:
            while self.rows_of_block > 1 and self.rows_of_block > math.ceil(rows / MULTIPROCESSORS):
                self.rows_of_block //= 2
            self.rows_of_block = max(self.rows_of_block, math.ceil(32 / self.threads))
            self.block = self.threads * self.rows_of_block
        self.grid = (ceiling(trace.rows, self.rows_of_block), 1)
        resident = MULTIPROCESSORS * THREADS // self.block
        parameters = any(one.what == "load" and one.level == 2 for code in trace.code.values() for one in code)
        if not self.sums and self.static and about(self.grid[0]) >= 2 * resident and parameters:
            self.grid, self.many_rows = (resident, 1), True  # parameters are read once for several rows
        if self.sums:
            self.grid, self.many_rows = (self._parts(), 1), True

    def _shape_columns(self) -> None:
        trace = self.trace
        parts = any(r.parts is not None for r in self.sums)
        columns = about(trace.columns)
        many = about(trace.batch) * columns > MULTIPROCESSORS * 256
        if not parts and not many:  # adds up parts: narrow tiles, or few blocks would work
            self.vector = min(self.vector, 4)
        widest = min(64, 256 // self.vector) if parts or many else 8
        chunks = ceiling(columns, self.vector)
        widths = [1 << k for k in range(7) if min(8, chunks) <= 1 << k <= widest] or [widest]
        # few lanes beyond the end: on an H200 the gradient of gelu and a bias over 384 columns took 139 us for 224
        self.threads = min(widths, key=lambda width: (ceiling(chunks, width) * width, -width))
        self.tiles = ceiling(trace.columns, self.threads * self.vector)
        self.block = 256
        self.rows_of_block = self.block // self.threads
        if not parts:
            while self.rows_of_block > 1 and self.rows_of_block // 2 >= about(trace.rows):
                self.rows_of_block //= 2
            self.block = self.threads * self.rows_of_block
        self.grid = (self.tiles * trace.batch, self._parts() if parts else 1)
        self.many_rows = True

    def parts(self) -> int:
        """Best number of parts of column sums for this kernel."""
        trace = self.trace
        if trace.space.kind == "row":
            most = max(MULTIPROCESSORS, MULTIPROCESSORS * 512 // self.block)
            return max(1, min(most, ceiling(about(trace.rows), self.rows_of_block * 2)))
        wanted = ceiling(MULTIPROCESSORS * 4, about(self.grid[0]))
        return max(1, min(wanted, ceiling(about(trace.rows), self.rows_of_block * 8)))

    def _parts(self) -> int:
        return next(r.parts for r in self.sums if r.parts is not None)

    # -- text ----------------------------------------------------------------------------------------------------------

    def _text(self) -> str:
        self.integer = "long long" if self.wide else "int"
        self.written = {s.buffer.name for s in self.outputs}
        self.arguments = list(self.trace.buffers.values())
        known = {b.name for b in self.arguments}
        for store in self.outputs:
            if store.buffer.name not in known:
                known.add(store.buffer.name)
                self.arguments.append(store.buffer)
        self.pointer = {b.name: f"g{k}" for k, b in enumerate(self.arguments)}
        self.parameters = [
            _parameter(b, f"g{k}", is_written=b.name in self.written) for k, b in enumerate(self.arguments)
        ]
        self.body, self.numbers, declared = _with_numbers(self._body(), self.wide)
        self.parameters += declared
        self.name = _name(self.trace.space.kind, self.body)
        return _function(self.name, self.block, self.parameters, self.body)

    def _body(self) -> list[str]:
        trace, kind = self.trace, self.trace.space.kind
        self.hoisted: list[str] = []
        self.within_rows = True
        self.kept: dict[Any, str] = {}
        out = [f"const int lane = threadIdx.x % {self.threads}, team = threadIdx.x / {self.threads};"]
        if kind == "column":
            out.append(f"const int tile = blockIdx.x % {self.tiles};")
            out += self._coordinates("b", f"(int)(blockIdx.x / {self.tiles})")
        for one in self.sums:
            name, v, n = trace.reductions[one], self.vector, self.iterations
            out.append(f"{COMPUTED[one.dtype]} {name}_a[{n}][{v}];")
            out.append(f"for (int i = 0; i < {n}; i++) for (int j = 0; j < {v}; j++) {name}_a[i][j] = {start(one)};")
        of_rows = [r for r in trace.reductions if not is_column(r)]
        if of_rows and self.threads > 32:
            turns = 2 if self.many_rows else 1
            out.append(f"__shared__ alignas(8) char held[{turns}][{trace.stages}][{len(of_rows)}][32][8];")
        body: list[str] = []
        for stage in range(trace.stages + 1):
            row, inner = (trace.code.get((stage, part), []) for part in ("row", "inner"))
            once = self._row_section(row)
            if kind == "flat" and any(one.what == "load" and one.data[1].name in self.written for one in row):
                body += self._inner_section(inner, once)  # threads beyond the end read nothing that others overwrite
                continue
            body += once
            if inner:
                body += self._inner_section(inner)
                reduced = [one.data[0] for one in inner if one.what == "accumulate" and not is_column(one.data[0])]
                body += self._reduce(reduced, stage)
        if kind == "flat":
            return out + body
        out += self.hoisted
        out += self._over_rows([line for line in body if line])
        return out + (self._after_rows() if self.sums else [])

    def _over_rows(self, body: list[str]) -> list[str]:
        trace = self.trace
        axis = self._axis()
        out = []
        cast = "(long long)" if self.wide else ""
        begin = f"{cast}blockIdx.{axis} * {self.rows_of_block}"
        if self.many_rows:
            out.append("int turn = 0;")
            if trace.space.kind == "column":
                out.append("#pragma unroll 4" if len(trace.buffers) <= 3 else "#pragma unroll 2")
            step = f"{cast}gridDim.{axis} * {self.rows_of_block}"
            out.append(f"for ({self.integer} row0 = {begin}; row0 < {trace.rows}; row0 += {step}, turn++) {{")
        else:
            out.append(f"{{ const {self.integer} row0 = {begin};")
        if self._ragged():
            out.append(f"const bool live = row0 + team < {trace.rows};")
            out.append(f"const {self.integer} row = live ? row0 + team : {trace.rows - 1};")
        else:
            out.append(f"const {self.integer} row = row0 + team;")
        return [*out, *self._coordinates("r", "row"), *body, "}"]

    def _axis(self) -> str:
        return "y" if self.trace.space.kind == "column" else "x"

    def _ragged(self) -> bool:
        return self.trace.space.kind != "flat" and not divides(self.rows_of_block, self.trace.rows)

    def _coordinates(self, kind: str, position: str) -> list[str]:
        """The loop variables of a kind from their common position."""
        variables = self.order[kind]
        lines, step = [], 1
        for k in range(len(variables) - 1, -1, -1):
            v = variables[k]
            text = f"({position})" if k == len(variables) - 1 else f"({position}) / {step}"
            if k:
                text = f"({text}) % {v.size}"
            lines.append(f"const {self.integer} {v.name} = {text};")
            step *= v.size
        return lines

    def _reduce(self, reductions: Sequence[Reduction], stage: int) -> list[str]:
        """Write the reduction of threads' values to those of rows."""
        names = [(self.trace.reductions[r], COMPUTED[r.dtype], OPERATION[r.op]) for r in reductions]
        threads = self.threads
        if threads <= 32:
            return [f"const {kind} {name} = reduce<{op}, {threads}>({name}_t);" for name, kind, op in names]
        if any(r in self.total_of for r in reductions):
            return [line for r in reductions for line in self._reduce_online(r)]
        turn = "turn & 1" if self.many_rows else "0"
        lines = [
            f"{kind}* {name}_h = ({kind}*)held[{turn}][{stage}][{k}]; to_shared<{op}>({name}_t, {name}_h);"
            for k, (name, kind, op) in enumerate(names)
        ]
        lines += ["__syncthreads();"] if names else []
        return lines + [f"const {kind} {name} = from_shared<{op}, {threads}>({name}_h);" for name, kind, op in names]

    def _reduce_online(self, top: Reduction) -> list[str]:
        """The maximum of a row, and the sum of exponentials that each thread has about its own maximum."""
        name, kind, op, threads = self.trace.reductions[top], COMPUTED[top.dtype], OPERATION[top.op], self.threads
        lines = [
            f"__shared__ {kind} {name}_h[32]; __syncthreads(); to_shared<{op}>({name}_t, {name}_h); __syncthreads();",
            f"const {kind} {name} = from_shared<{op}, {threads}>({name}_h);",
        ]
        if top in self.total_of:
            s = self.trace.reductions[self.total_of[top]]
            lines += [
                f"__shared__ {kind} {s}_h[32];",
                f"{s}_t = {name}_t == {name} ? {s}_t : {s}_t * exp({name}_t - {name});",
                f"to_shared<Sum>({s}_t, {s}_h); __syncthreads();",
                f"const {kind} {s} = from_shared<Sum, {threads}>({s}_h);",
            ]
        return lines

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _c(self, expression: Affine, each: bool) -> str:
        """The expression in C; `each`: of one of the columns of a thread, which is called cj."""
        names = {self.inner: "cj"} if each and self.inner is not None else None
        return self._plain(expression).text(names)

    def _condition(self, mask: Mask, each: bool) -> str:
        parts = []
        for expression, low, high in mask:
            plain = self._plain(expression)
            text = self._c(expression, each and not self._same_for_all(plain, low, high))
            if not at_most(low, plain.least):
                parts.append(f"{text} >= {low}")
            if not at_most(plain.most + 1, high):
                parts.append(f"{text} < {high}")
        return " && ".join(f"({p})" for p in parts)

    def _reads_where(self, buffer: Buffer, mask: Mask, each: bool) -> str:
        """Condition under which an element is read: threads beyond the last row read nothing that others overwrite."""
        condition = self._condition(mask, each)
        if not (self.within_rows and self._ragged() and any(one.buffer is buffer for one in self.outputs)):
            return condition
        return f"live && {condition}" if condition else "live"

    def _same_for_all(self, plain: Affine, low: Number, high: Number) -> bool:
        """Return True if a condition holds for all columns of a thread or for none."""
        v, inner = self.vector, self.inner
        if inner is None or not same(plain.terms.get(inner, 0), 1) or any(t.kind == "o" for t in plain.terms):
            return False
        whole = [plain.const, low, high, *(c for t, c in plain.terms.items() if t is not inner)]
        return all(divides(v, one) for one in whole)

    def _expression(self, text: Any, each: bool) -> str:
        if isinstance(text, str):
            return text
        if text[0] == "within":
            _, expression, low, high, value, other = text
            condition = self._condition(((expression, low, high),), each) or "true"
            return f"({condition}) ? {value} : {other}"
        _, expression, at, value, other = text
        return f"({self._c(expression, each)} == {at}) ? {value} : {other}"

    def _statement(self, one: Instruction, each: bool) -> str:
        """An instruction for a single element."""
        text: str = getattr(self, f"_write_{one.what}")(*one.data, each)
        return text

    def _write_expression(self, kind: str, name: str, text: Any, each: bool) -> str:
        return f"const {kind} {name} = {self._expression(text, each)};"

    def _write_range(self, name: str, value: Range, expression: Affine, each: bool) -> str:
        kind, at = value.computed, self._c(expression, each)
        begin, step = literal(value.start, value.dtype), literal(value.step, value.dtype)
        return f"const {kind} {name} = {begin} + ({kind})({at}) * {step};"

    def _write_integer(self, v: Variable, expression: Affine, operator: str, divisor: Number, each: bool) -> str:
        text = self._c(expression, each)
        if not at_most(0, expression.least):  # in what a mask hides
            if isinstance(divisor, Size) and not _narrow(divisor):
                raise Reject("a divisor of more than 32 bits")
            name = "floor_quotient" if operator == "/" else "floor_remainder"
            return f"const {self.integer} {v.name} = {name}(({self.integer})({text}), {divisor});"
        return f"const {self.integer} {v.name} = ({text}) {operator} {divisor};"

    def _write_index(self, v: Variable, at: str, size: Number, wraps: bool, each: bool) -> str:
        checked = f"checked_index<{str(wraps).lower()}>({at}, {literal(size, torch.int64)})"
        return f"const {self.integer} {v.name} = {checked};"

    def _write_load(self, name: str, buffer: Buffer, offset: Affine, mask: Mask, each: bool) -> str:
        condition = self._reads_where(buffer, mask, each)
        value = f"load({self.pointer[buffer.name]}[{self._c(offset, each)}])"
        if condition:
            value = f"({condition}) ? {value} : ({COMPUTED[buffer.dtype]})0"
        return f"const {COMPUTED[buffer.dtype]} {name} = {value};"

    # -- sections ------------------------------------------------------------------------------------------------------

    def _row_section(self, code: Sequence[Instruction]) -> list[str]:
        out = []
        for one in code:
            if one.what != "store":
                out.append(self._statement(one, False))
                continue
            store, offset, name = one.data
            guard = " && ".join(["lane == 0", *(["live"] if self._ragged() else [])])
            out.append(f"if ({guard}) {self._assign(store, offset, name, False)}")
        return out

    def _assign(self, store: Store, offset: Affine, name: str, each: bool) -> str:
        kind = STORED[store.buffer.dtype]
        return f"{self.pointer[store.buffer.name]}[{self._c(offset, each)}] = store<{kind}>({name});"

    def _access(self, offset: Affine, mask: Mask = ()) -> str:
        """Classify the access of a thread's columns to memory: "vector", "one" (the same element for all) or "each"."""
        plain, v, inner = self._plain(offset), self.vector, self.inner
        masks = [(self._plain(e), low, high) for e, low, high in mask]
        if any(t.kind == "o" and t.name in self.varying for e in (plain, *(m[0] for m in masks)) for t in e.terms):
            return "each"
        own = [m for m in masks if inner in m[0].terms]  # type: ignore[arg-type]
        if not all(self._same_for_all(*m) for m in own):
            return "each"
        if inner is None or inner not in plain.terms:
            return "each" if own else "one"
        aligned = all(divides(v, c) for c in (plain.const, *(c for t, c in plain.terms.items() if t is not inner)))
        return "vector" if same(plain.terms[inner], 1) and v > 1 and aligned else "each"

    def _inner_section(self, code: Sequence[Instruction], once: Sequence[str] = ()) -> list[str]:
        """A loop over the columns of a row; `once` begins it."""
        before = self._accumulators(code)
        lines = self._elements(code, before, [], live="if (live) " if self._ragged() else "")
        return before + self._over_columns([*once, *lines])

    def _elements(
        self, code: Sequence[Instruction], before: list[str], first: Sequence[str], *, live: str
    ) -> list[str]:
        """The columns that a thread has at a time: vector loads, the elements one by one, vector stores.

        `first` begins the work on an element; what belongs before the loop over columns is appended to `before`.
        """
        loads: list[str] = []
        inner: list[str] = []
        stores: list[str] = []
        for one in code:
            if one.what == "load":
                self._inner_load(one, before, loads, inner)
            elif one.what == "store":
                store, offset, name = one.data
                kind, pointer = STORED[store.buffer.dtype], self.pointer[store.buffer.name]
                if self._access(offset) == "vector":
                    vector = f"w{len(stores)}"
                    loads.append(f"Vector<{kind}, {self.vector}> {vector};")
                    inner.append(f"{vector}.v[j] = store<{kind}>({name});")
                    at = f"{pointer} + {self._c(offset, False)}"
                    stores.append(f"{live}*(Vector<{kind}, {self.vector}>*)({at}) = {vector};")
                else:
                    inner.append(live + self._assign(store, offset, name, True))
            elif one.what == "accumulate":
                inner.append(self._accumulate(one.data[0], one.data[1], live))
            else:
                varies = _made(one)[0] in self.varying
                (inner if varies else loads).append(self._statement(one, varies))
        column = f" const {self.integer} cj = {self.inner.name} + j;" if self.inner is not None else ""
        lines = [*loads, "#pragma unroll", f"for (int j = 0; j < {self.vector}; j++) {{{column}", *first]
        room, after = self._online(code)
        return [*room, *lines, *(INDENT + line for line in inner), "}", *after, *stores]

    def _online(self, code: Sequence[Instruction]) -> tuple[list[str], list[str]]:
        """(room for the columns that a thread has now, its maximum and sum of exponentials with these)."""
        room, after, names = [], [], self.trace.reductions
        for one in code:
            if one.what == "accumulate" and one.data[0] in self.total_of:
                name, total = names[one.data[0]], self.total_of[one.data[0]]
                exactness = "Precise" if self.trace.exact or total in self.trace.precise else "Fast"
                room.append(f"{COMPUTED[total.dtype]} {name}_x[{self.vector}];")
                after.append(f"online<{exactness}>({name}_t, {names[total]}_t, {name}_x);")
        return room, after

    def _accumulators(self, code: Sequence[Instruction]) -> list[str]:
        out, names = [], self.trace.reductions
        for one in code:
            if one.what == "accumulate" and not is_column(one.data[0]):
                reduction = one.data[0]
                out.append(f"{COMPUTED[reduction.dtype]} {names[reduction]}_t = {start(reduction)};")
                if reduction in self.total_of:
                    out.append(f"{COMPUTED[reduction.dtype]} {names[self.total_of[reduction]]}_t = 0;")
        return out

    def _accumulate(self, reduction: Reduction, name: str, live: str) -> str:
        own, column = self.trace.reductions[reduction], is_column(reduction)
        if reduction in self.total_of:
            return f"{own}_x[j] = {name};"
        to = f"{own}_a[it][j]" if column else f"{own}_t"
        return (
            f"{live if column else ''}{to} = {OPERATION[reduction.op]}::of({to}, ({COMPUTED[reduction.dtype]}){name});"
        )

    def _inner_load(self, one: Instruction, before: list[str], loads: list[str], inner: list[str]) -> None:
        name, buffer, offset, mask = one.data
        how = self._access(offset, mask)
        if how != "vector":
            (loads if how == "one" else inner).append(self._statement(one, how == "each"))
            return
        trace, stored, computed = self.trace, STORED[buffer.dtype], COMPUTED[buffer.dtype]
        vector = f"Vector<{stored}, {self.vector}>"
        condition = self._reads_where(buffer, mask, False)
        read = f"*(const {vector}*)({self.pointer[buffer.name]} + {self._c(offset, False)})"
        keeps = self.static and (trace.space.kind == "row" or (trace.space.kind == "column" and one.level == 2))
        keeps = keeps and self.within_rows  # what is read afterwards is read for the first time
        if not keeps:
            line = f"{name}_v = {read};"
            loads.append(
                f"{vector} {name}_v; " + (f"if ({condition}) {line} else {name}_v = {{}};" if condition else line)
            )
            inner.append(f"const {computed} {name} = load({name}_v.v[j]);")
            return
        key = (buffer.name, self._plain(offset), tuple((self._plain(e), low, high) for e, low, high in mask))
        if key not in self.kept:
            kept = self.kept[key] = f"k{len(self.kept)}"
            line = f"{kept}[it] = {read};"
            if self.many_rows and one.level == 2 and not condition:
                self.hoisted += [f"{vector} {kept}[{self.iterations}];", *self._over_columns([line])]
            else:
                before.append(f"{vector} {kept}[{self.iterations}];")
                loads.append(f"if ({condition}) {line} else {kept}[it] = {{}};" if condition else line)
        inner.append(f"const {computed} {name} = load({self.kept[key]}[it].v[j]);")

    def _over_columns(self, lines: Sequence[str]) -> list[str]:
        """A loop over the groups of columns that a thread has."""
        kind, t, v, columns = self.trace.space.kind, self.threads, self.vector, self.trace.columns
        groups = {"flat": ("blockIdx.x", self.grid[0]), "column": ("tile", self.tiles), "row": ("it", self.iterations)}
        number, count = groups[kind]
        at = f"const {self.integer} at = (({self.integer}){number} * {t} + lane) * {v};"
        body = [*self._coordinates("c", "at"), *lines]
        body = [at, *body] if same(count * t * v, columns) else [at, f"if (at < {columns}) {{", *body, "}"]
        if kind == "row" and not same(self.iterations, 1):
            unroll = "#pragma unroll" if self.static else "#pragma unroll 4"
            return [unroll, f"for (int it = 0; it < {self.iterations}; it++) {{", *body, "}"]
        return ["{ const int it = 0;", *body, "}"]

    def _after_rows(self) -> list[str]:
        """Sums of columns over the rows of a block, then what follows from them."""
        trace, t, v, rows = self.trace, self.threads, self.vector, self.rows_of_block
        out = [f"const int part = blockIdx.{self._axis()};"]
        if rows > 1:
            for one in self.sums:
                op, name = OPERATION[one.op], trace.reductions[one]
                out.append(f"over_rows<{op}, {t}, {v}, {rows}, {self.iterations}>({name}_a);")
        self.within_rows = False
        names = [(COMPUTED[r.dtype], trace.reductions[r]) for r in self.sums]
        first = [f"const {computed} {name} = {name}_a[it][j];" for computed, name in names]
        lines = self._elements(trace.code.get(("after", "after"), []), [], first, live="")
        return [*out, "if (team == 0) {", *self._over_columns(lines), "}"]

    # -- several kernels in one launch ----------------------------------------------------------------------------------

    def is_small(self) -> bool:
        """Return True for a kernel that takes no longer than its launch, whose blocks count on nothing but their number."""
        blocks = self.grid[0]
        if self.numbers or self.wide or not isinstance(blocks, int) or blocks > MOST_BLOCKS or self.grid[1] > 1:
            return False
        return self.trace.space.kind != "column" and not self.many_rows

    def as_run(self) -> str | None:
        """Write the loop body over one contiguous range, whose length the launch gives; None for other kernels."""
        loops = self.order["c"]
        if self.trace.space.kind != "flat" or len(loops) > 1 or self.wide:
            return None
        if self.numbers or isinstance(self.trace.columns, Size) or self.trace.columns > 1 << 24:
            return None
        for code in self.trace.code.values():
            for one in code:
                if one.what == "load":
                    offset, mask = self._plain(one.data[2]), one.data[3]
                elif one.what == "store":
                    offset, mask = self._plain(one.data[1]), ()
                elif one.what == "expression" and isinstance(one.data[2], str):
                    continue
                else:
                    return None
                if mask or offset.const or any(v is not self.inner or c != 1 for v, c in offset.terms.items()):
                    return None
        return "|".join(self.parameters) + "\n" + "\n".join(self._run())

    def _run(self) -> list[str]:
        """The body of `as_run`, in which `block` and `length` are variables."""
        code = self.trace.code.get((0, "row"), []), self.trace.code.get((0, "inner"), [])
        self.static = False  # nothing is kept over a loop
        lines = self._elements([*code[0], *code[1]], [], [], live="")
        self.static = True
        at = f"const int at = (block * {BUNDLED} + threadIdx.x) * {self.vector};"
        return [at, "if (at < length) {", *self._coordinates("c", "at"), *lines, "}"]


BUNDLED = 128  # threads of a block of bundled kernels


class Joint:
    """Several kernels, which do not wait for each other and have no sizes among their parameters, as one launch."""

    arguments: list[Buffer]
    block: int
    numbers: tuple[Any, ...] = ()

    def __init__(self, kernels: Sequence[Rendered]) -> None:
        self.kernels = list(kernels)
        self.outputs: list[Store] = [s for k in kernels for s in k.outputs]

    def _write(self, kind: str, parameters: Sequence[str], body: Sequence[str], blocks: int) -> None:
        self.grid, self.name = (blocks, 1), _name(kind, body)
        self.text = _function(self.name, self.block, parameters, body)


class Bundle(Joint):
    """Runs over memory of the same text."""

    def __init__(self, kernels: Sequence[Rendered]) -> None:
        super().__init__(kernels)
        self.arguments, self.block, first = [b for k in kernels for b in k.arguments], BUNDLED, kernels[0]
        parameters, lines, begin = [], [], 0
        names = [p.rsplit(" ", 1)[1] for p in first.parameters]
        for n, kernel in enumerate(kernels):
            blocks = math.ceil(kernel.trace.columns / (BUNDLED * kernel.vector))
            parameters += [f"{p.rsplit(' ', 1)[0]} p{n}_{k}" for k, p in enumerate(kernel.parameters)]
            given = " ".join(f"{name} = p{n}_{k};" for k, name in enumerate(names))
            which = ("else " if n else "") + (f"if (block < {begin + blocks})" if n + 1 < len(kernels) else "")
            lines.append(f"{which} {{ block -= {begin}; length = {kernel.trace.columns}; {given} }}")
            begin += blocks
        declared = [p.replace(" __restrict__", "") + ";" for p in first.parameters]
        self._write("runs", parameters, ["int block = blockIdx.x, length;", *declared, *lines, *first._run()], begin)


class SideBySide(Joint):
    """Small kernels, of which each has blocks of its own."""

    def __init__(self, kernels: Sequence[Rendered]) -> None:
        super().__init__(kernels)
        self.arguments, self.block = _distinct([b for k in kernels for b in k.arguments]), max(k.block for k in kernels)
        written = {s.buffer.name for s in self.outputs}
        place = {b.name: f"g{n}" for n, b in enumerate(self.arguments)}
        parameters = [_parameter(b, place[b.name], is_written=b.name in written) for b in self.arguments]
        body, begin = [], 0
        for n, kernel in enumerate(kernels):
            end = begin + kernel.grid[0]
            body.append(("} else " if n else "") + (f"if (blockIdx.x < {end}) {{" if n + 1 < len(kernels) else "{"))
            body += [f"if (threadIdx.x >= {kernel.block}) return;"] if kernel.block < self.block else []
            names = {kernel.pointer[b.name]: place[b.name] for b in kernel.arguments}
            body += [INDENT + _moved(line, names, begin) for line in kernel.body]
            begin = end
        self._write("parts", parameters, [*body, "}"], begin)

    @staticmethod
    def fits(kernels: Sequence[Rendered]) -> bool:
        """Return True if kernels that do not wait for each other can be parts of one."""
        block = max(k.block for k in kernels)
        if len(kernels) > MOST_PARTS or len(_distinct([b for k in kernels for b in k.arguments])) > MOST_ARGUMENTS:
            return False
        return all(k.block == block or "__syncthreads" not in k.text for k in kernels)  # threads too many leave at once


def _distinct(buffers: Sequence[Buffer]) -> list[Buffer]:
    return list({b.name: b for b in buffers}.values())


def _moved(line: str, names: dict[str, str], begin: int) -> str:
    """A line of a kernel with other names of pointers, and with its blocks from `begin` on."""
    line = re.sub(r"\bg\d+\b", lambda found: names[found[0]], line)
    return line.replace("blockIdx.x", f"(blockIdx.x - {begin})") if begin else line


def _parameter(buffer: Buffer, name: str, *, is_written: bool) -> str:
    return f"{'' if is_written else 'const '}{STORED[buffer.dtype]}* __restrict__ {name}"


def _with_numbers(body: Sequence[str], wide: bool) -> tuple[list[str], list[Any], list[str]]:
    """(a body with parameters in the place of sizes, these sizes, the parameters)."""
    found: dict[Any, str] = {}
    body = named(body, lambda size: found.setdefault(size, f"n{len(found)}"))
    kinds = ["double" if isinstance(one, Real) else "long long" if wide or not _narrow(one) else "int" for one in found]
    return body, list(found), [f"const {kind} {name}" for kind, name in zip(kinds, found.values())]


def _narrow(size: Size) -> bool:
    return -(2**31) <= size < 2**31 - 1


def _function(name: str, block: int, parameters: Sequence[str], body: Sequence[str]) -> str:
    lines = "\n".join(INDENT + line for line in body)
    return f"__global__ void __launch_bounds__({block}) {name}(\n    {', '.join(parameters)}) {{\n{lines}\n}}\n"


def _name(kind: str, body: Sequence[str]) -> str:
    """Name of a kernel: what it runs over, the first of the functions that it calls, and a digest of its text."""
    text = "\n".join(body)
    called = [one for one in dict.fromkeys(re.findall(r"\b([a-z]\w+)\(", text)) if one not in UNNAMED]
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return "_".join([kind, *called[:4], digest])


def _extent(buffer: Buffer) -> int:
    """Elements between the first and the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.strides)) if buffer.numel else 0
