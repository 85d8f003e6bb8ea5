"""PTX text -> `Module`.

Names declared inside `{ }` (inline assembly, call sequences) are made unique here, so that later stages see one flat list
of instructions for each function.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from ..errors import InvalidPtx
from .ptx import (
    SIZES,
    Address,
    Function,
    Guard,
    Immediate,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Place,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(loc|file|version|target|address_size)\b([^\n]*)")
_FUNCTION = re.compile(r"(?:\.(?:visible|weak|extern|noreturn)\s+)*\.(entry|func)\b")
_HEAD = re.compile(
    r"\.(?:entry|func)\s*(?:\.\w+\s+)*(?P<results>\([^)]*\))?\s*(?P<name>[\w$]+)\s*(?:\((?P<parameters>[^)]*)\))?",
    re.DOTALL,
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern|common|managed)\s+)*\.(?P<space>shared|global|const|local|param)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?(?P<types>(?:\.\w+\s+)+?)(?:\.ptr\b[^,]*?\s)?(?P<name>[\w$%]+)\s*"
    r"(?P<extents>(?:\[\s*\d*\s*\])*)\s*(?:=\s*(?P<initial>.*))?$",
    re.DOTALL,
)  # fmt: skip
_INSTRUCTION = re.compile(
    r"(?:@(?P<negated>!?)(?P<guard>[%\w$]+)\s+)?(?P<opcode>[a-z]\w*)(?P<modifiers>(?:\.[\w:]+)*)\s*(?P<operands>.*)$",
    re.DOTALL,
)
_IGNORED = (".pragma", ".maxnreg", ".callprototype", ".minnctapersm")
_NAME = re.compile(r"[%$A-Za-z_][\w$]*(?:\.[xyzw])?$")
_BRACKET = re.compile(r"[{\[(]")
_INTEGER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_SPECIALS = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)(\.[xyzw])?$"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer|globaltimer_lo|globaltimer_hi)$"
    r"|%(cluster_ctarank|cluster_nctarank|is_explicit_cluster|dynamic_smem_size|total_smem_size|aggr_smem_size)$"
    r"|%envreg\d+$|%lanemask_(eq|le|lt|ge|gt)$|WARP_SZ$"
)


def parse(text: str) -> Module:
    """Read a PTX text. Raises `InvalidPtx`."""
    parser = _Parser(text)
    try:
        return parser.module()
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        raise InvalidPtx(f"PTX line {parser.line}: cannot be read ({error!r})") from error


@dataclass(slots=True)
class _Scope:
    """Names declared within a pair of braces."""

    start: int  # of its instructions in the function's body
    names: dict[str, str] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)  # of targets


class _Parser:
    def __init__(self, text: str) -> None:
        # comments become blanks, so that lines keep their numbers
        self._text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
        self._position = 0
        self._line = 1
        self._module = Module()
        self._function: Function | None = None
        self._scopes: list[_Scope] = []  # the innermost last; the function's own body is none of them
        self._depth = 0
        self._place: Place | None = None
        self._places: dict[tuple[str, ...], Place] = {}  # by file, line and column
        self._unique = 0
        self._known: dict[str, Operand] = {}

    def module(self) -> Module:
        while self._skip_space():
            self._statement()
        if self._depth:
            raise InvalidPtx("PTX ends inside a function")
        return self._module

    @property
    def line(self) -> int:
        """Number of the line that is being parsed."""
        return self._line

    # --- moving on ---

    def _skip_space(self) -> bool:
        match = _SPACE.match(self._text, self._position)
        assert match is not None
        if match.end() > self._position:
            self._advance(match.end())
        return self._position < len(self._text)

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._position, end)
        self._position = end

    def _until(self, stops: str) -> str:
        """The text up to the first of `stops`."""
        ends = [end for stop in stops if (end := self._text.find(stop, self._position)) >= 0]
        if not ends:
            raise InvalidPtx(f"PTX line {self._line}: {stops!r} expected before the end")
        end = min(ends)
        text = self._text[self._position : end]
        self._advance(end)
        return text

    # --- statements ---

    def _statement(self) -> None:
        char = self._text[self._position]
        if char == "{":
            self._open()
        elif char == "}":
            self._close()
        elif char == ";":
            self._advance(self._position + 1)
        elif char == ".":
            self._directive()
        elif self._function is not None and (match := _LABEL.match(self._text, self._position)):
            self._function.body.append(Label(match.group(1)))
            self._advance(match.end())
        else:
            self._declaration_or_instruction()

    def _directive(self) -> None:
        if match := _LINE_DIRECTIVE.match(self._text, self._position):
            self._line_directive(match.group(1), match.group(2))
            self._advance(match.end())
        elif self._text.startswith(".section", self._position):
            self._until("}")
            self._advance(self._position + 1)
        elif _FUNCTION.match(self._text, self._position):
            self._function_head()
        else:
            self._declaration_or_instruction()

    def _open(self) -> None:
        if self._function is None:
            raise InvalidPtx(f"PTX line {self._line}: a brace outside a function")
        self._advance(self._position + 1)
        self._depth += 1
        if self._depth > 1:
            self._scopes.append(_Scope(len(self._function.body)))

    def _close(self) -> None:
        if not self._depth:
            raise InvalidPtx(f"PTX line {self._line}: a closing brace too many")
        self._advance(self._position + 1)
        self._depth -= 1
        if self._depth == 0:
            self._function = None
        else:
            self._rename_labels(self._scopes.pop())

    def _rename_labels(self, scope: _Scope) -> None:
        """Labels of inline assembly are its own; the compiler's ($L...) are the function's."""
        assert self._function is not None
        part = self._function.body[scope.start :]
        inner = {item.name for item in part if isinstance(item, Label) and not item.name.startswith("$L")}
        if not inner:
            return
        self._unique += 1
        for item in part:
            if isinstance(item, Label):
                item.name = self._unique_label(item.name, inner)
            elif item.opcode in ("bra", "brx"):
                item.operands = tuple(
                    self._unique_target(operand, inner | set(scope.tables)) for operand in item.operands
                )
        for name in scope.tables:
            targets = self._function.branch_targets.pop(name)
            unique = self._unique_label(name, set(scope.tables))
            self._function.branch_targets[unique] = tuple(self._unique_label(target, inner) for target in targets)

    def _unique_target(self, operand: Operand, inner: set[str]) -> Operand:
        return Symbol(self._unique_label(operand.name, inner)) if isinstance(operand, Symbol) else operand

    def _unique_label(self, name: str, inner: set[str]) -> str:
        return f"$L_scope{self._unique}_{name}" if name in inner else name

    def _line_directive(self, kind: str, rest: str) -> None:
        words = rest.replace(",", " ").split()
        if kind == "loc":
            self._place = self._place_of(words)
        elif kind == "file":
            match = re.search(r'"(.*?)"', rest)
            if match is None:
                raise InvalidPtx(f"PTX line {self._line}: .file without a name")
            self._module.files[int(words[0])] = match.group(1)
        elif kind == "target":
            self._module.target = words[0]

    def _place_of(self, words: list[str]) -> Place:
        """`1 42 5 function_name $L inlined_at 2 7 3`; an earlier directive said where 2 7 3 itself was inlined."""
        outer = None
        if "inlined_at" in words:
            at = words[words.index("inlined_at") + 1 :][:3]
            outer = self._places.get(tuple(at)) or Place(int(at[0]), int(at[1]))
        here = self._places[tuple(words[:3])] = Place(int(words[0]), int(words[1]), outer)
        return here

    # --- functions ---

    def _function_head(self) -> None:
        line = self._line
        head = self._until("{;")
        match = _HEAD.search(head)
        if match is None:
            raise InvalidPtx(f"PTX line {line}: cannot read the function {head[:80]!r}")
        function = Function(
            match["name"],
            ".entry" in head,
            [self._variable(part, line) for part in _split(match["parameters"] or "")],
            [self._variable(part, line) for part in _split((match["results"] or "()")[1:-1])],
        )
        if self._text[self._position] == ";":  # a declaration
            self._module.functions.setdefault(function.name, function)
            return
        function.defined = True
        _limits(function, head[match.end() :])
        self._module.functions[function.name] = self._function = function
        self._known.clear()
        self._place = None

    def _declaration_or_instruction(self) -> None:
        line = self._line
        text = self._until(";").strip()
        self._position += 1  # past the semicolon
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith(".branchtargets"):
            self._branch_targets(text)
        elif text.startswith(_IGNORED):
            return
        elif match := re.match(r"\.(?:alias|attribute)\b", text):
            raise InvalidPtx(f"PTX line {line}: {match.group()} is not covered: {text[:80]}")
        elif text.startswith("."):
            self._declare(self._variable(text, line))
        elif self._function is not None:
            self._function.body.append(self._instruction(text, line))
        else:
            raise InvalidPtx(f"PTX line {line}: {text[:80]!r} outside a function")

    def _branch_targets(self, text: str) -> None:
        """`table: .branchtargets a, b;` names the targets of a brx.idx."""
        table = self._function.body.pop() if self._function is not None and self._function.body else None
        if self._function is None or not isinstance(table, Label):
            raise InvalidPtx(f"PTX line {self._line}: a .branchtargets without a label")
        if self._scopes:
            self._scopes[-1].tables.append(table.name)
        self._function.branch_targets[table.name] = tuple(_split(text.removeprefix(".branchtargets")))

    def _declare(self, variable: Variable) -> None:
        if self._function is None:
            self._module.variables[variable.name] = variable
            return
        if self._scopes:
            self._unique += 1
            unique = f"{variable.name}$scope{self._unique}"
            self._scopes[-1].names[variable.name] = unique
            variable.name = unique
        self._function.variables[variable.name] = variable

    def _registers(self, text: str) -> None:
        if self._function is None:
            raise InvalidPtx(f"PTX line {self._line}: {text[:80]!r} outside a function")
        match = re.match(r"\.reg\s*(?:\.v\d\s+)?\.(\w+)\s+(.*)", text, re.DOTALL)
        if match is None:
            raise InvalidPtx(f"PTX line {self._line}: cannot read {text[:80]!r}")
        for part in _split(match.group(2)):
            family = re.match(r"(%?[\w$]+)<(\d+)>", part)
            names = [f"{family.group(1)}{i}" for i in range(int(family.group(2)))] if family else [part]
            for name in names:
                unique = name
                if self._scopes:
                    self._unique += 1
                    unique = f"{name}$scope{self._unique}"
                    self._scopes[-1].names[name] = unique
                self._function.registers[unique] = match.group(1)

    def _variable(self, text: str, line: int) -> Variable:
        match = _VARIABLE.match(text.strip())
        if match is None:
            raise InvalidPtx(f"PTX line {line}: cannot read the variable {text[:80]!r}")
        kind = match["types"].split()[-1][1:]
        count = 1
        extents = re.findall(r"\[\s*(\d*)\s*\]", match["extents"])
        for extent in extents:
            count *= int(extent or 0)
        initial = (match["initial"] or "").strip()
        values = tuple(_split(initial[1:-1]) if initial.startswith("{") else [initial]) if initial else ()
        if kind not in SIZES:
            raise InvalidPtx(f"PTX line {line}: the type .{kind} is not covered: {text[:80]}")
        return Variable(
            match["space"], match["name"], kind, int(match["align"] or SIZES[kind]), count * SIZES[kind], values
        )

    # --- instructions ---

    def _instruction(self, text: str, line: int) -> Instruction:
        match = _INSTRUCTION.match(text)
        if match is None:
            raise InvalidPtx(f"PTX line {line}: cannot read {text[:80]!r}")
        guard = Guard(self._resolve(match["guard"]), bool(match["negated"])) if match["guard"] else None
        operands = tuple(self._operand(part, line) for part in _split(match["operands"]))
        modifiers = tuple(match["modifiers"].split(".")[1:])
        return Instruction(match["opcode"], modifiers, operands, guard, line, self._place, " ".join(text.split()))

    def _resolve(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope.names:
                return scope.names[name]
        return name

    def _operand(self, text: str, line: int) -> Operand:
        """The operand, parsed once for each text in which no name of an inner scope can stand."""
        if self._scopes:
            return self._parse_operand(text, line)
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._parse_operand(text, line)
        return known

    def _parse_operand(self, text: str, line: int) -> Operand:
        if not text:
            raise InvalidPtx(f"PTX line {line}: cannot read an operand: there is none")
        if text[0] in "{(":
            return Vector(tuple(self._operand(part, line) for part in _split(text[1:-1])))
        if text[0] == "[":
            return self._address(text[1:-1], line)
        if text[0] == "!":
            return Negated(self._operand(text[1:], line))
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self._operand(first, line), self._operand(second, line))
        if text == "_":
            return Sink()
        return _immediate(text) or self._name(text, line)

    def _name(self, text: str, line: int) -> Operand:
        name = self._resolve(text)
        assert self._function is not None
        if name in self._function.registers:
            return Register(name)
        if _SPECIALS.match(text):
            return Special(text)
        if not _NAME.match(text):
            raise InvalidPtx(f"PTX line {line}: cannot read the operand {text!r}")
        return Symbol(name)

    def _address(self, text: str, line: int) -> Address:
        first, *more = _split(text) or [""]
        base, plus, offset = first.partition("+")
        inner = self._operand(base, line)
        if isinstance(inner, Immediate):
            return Address(Immediate("int", 0), inner.value)
        if plus and not _INTEGER.match(offset.strip()):
            raise InvalidPtx(f"PTX line {line}: cannot read the operand '[{text}]'")
        return Address(inner, int(offset, 0) if plus else 0, tuple(self._operand(part, line) for part in more))


def _limits(function: Function, directives: str) -> None:
    """.maxntid, .reqntid, .reqnctapercluster, .maxnreg and .minnctapersm."""
    if limit := re.search(r"\.maxnreg\s+(\d+)", directives):
        function.registers_each = int(limit.group(1))
    if blocks := re.search(r"\.minnctapersm\s+(\d+)", directives):
        function.min_blocks = max(1, int(blocks.group(1)))
    for name, values in re.findall(r"\.(maxntid|reqntid|reqnctapercluster)\s+([\d, ]+)", directives):
        extents = tuple(int(value) for value in values.split(","))
        product = 1
        for extent in extents:
            product *= extent
        if name == "reqnctapercluster":
            x, y, z = (*extents, 1, 1)[:3]
            function.cluster = (x, y, z)
        else:
            function.max_threads = product
            if name == "reqntid":
                x, y, z = (*extents, 1, 1)[:3]
                function.required_block = (x, y, z)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    if not _BRACKET.search(text):
        return [part for part in map(str.strip, text.split(",")) if part]
    parts, depth, current = [], 0, ""
    for char in text:
        depth += 1 if char in "{[(" else -1 if char in "}])" else 0
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return [part for part in (*parts, current.strip()) if part]


def _immediate(text: str) -> Immediate | None:
    if text[0] not in "-0123456789":
        return None
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate("f32", int(text[2:], 16))
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Immediate("f64", int(text[2:], 16))
    if match := _INTEGER.match(text):
        return Immediate(
            "int", int(match.group(1) + match.group(2), 0 if match.group(2)[:2].lower() in ("0x", "0b") else 10)
        )
    if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
        return Immediate("f64", int.from_bytes(struct.pack(">d", float(text)), "big"))
    return None
