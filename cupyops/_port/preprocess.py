"""C++'s preprocessor, for host code: it expands macros, and leaves branches of `#if` out; lines keep their numbers.

A macro that is a number keeps its name, and becomes a constant of the Python.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .._kernel.compile.source import read as read_file
from .._kernel.extension.tokens import Token, line_of, tokens

_DEFINE = re.compile(r"#\s*define\s+(\w+)(\(([\w\s,.\\]*)\))?(.*)", re.DOTALL)
_INCLUDE = re.compile(r'#\s*include\s*[<"]([^<>"\n]+)[>"]')
_CONDITION = re.compile(r"#\s*(if|ifdef|ifndef|elif|else|endif|undef)\b(.*)", re.DOTALL)
_NUMBER = re.compile(r"-?(\d[\w.']*|\.\d[\w.]*)")


@dataclass(frozen=True)
class Macro:
    """A macro: its parameters, None for one without brackets, and the text that it stands for, in a file's line."""

    parameters: tuple[str, ...] | None
    body: str
    place: str


@functools.cache
def _predefined() -> dict[str, str]:
    """Macros that a compiler of host code and PyTorch's headers define, as numbers."""
    version = [re.sub(r"\D.*", "", one) or "0" for one in torch.__version__.split("+")[0].split(".")[:3]]
    cuda = [int(one) for one in (torch.version.cuda or "12.8").split(".")[:2]]
    names = dict(zip(("TORCH_VERSION_MAJOR", "TORCH_VERSION_MINOR", "TORCH_VERSION_PATCH"), version))
    made = str(cuda[0] * 1000 + cuda[1] * 10)
    names |= dict.fromkeys(("CUDA_VERSION", "CUDART_VERSION"), made)
    return (
        names
        | dict.fromkeys(("__NVCC__", "__CUDACC__", "WITH_CUDA", "__x86_64__", "__linux__"), "1")
        | {"__cplusplus": "201703", "__CUDACC_VER_MAJOR__": str(cuda[0]), "__CUDACC_VER_MINOR__": str(cuda[1])}
    )


@dataclass
class Preprocessor:
    """Files of an extension, in the order in which a compiler meets them.

    Attributes:
        folders: of options `-I`.
        macros: those that are defined here.
        constants: macros that keep their names.
        texts: the text of each file, by its path: without directives, and with macros expanded.
        taken: (file, line, name) of conditions on a name that nothing defines, which is taken as not defined.
    """

    folders: Sequence[Path] = ()
    macros: dict[str, Macro] = field(default_factory=dict)
    constants: dict[str, Macro] = field(default_factory=dict)
    texts: dict[Path, str] = field(default_factory=dict)
    taken: list[tuple[str, int, str]] = field(default_factory=list)
    expanded: set[str] = field(default_factory=set)  # constants that are defined in several ways: their text is put in
    _known: set[str] = field(default_factory=set)

    def define(self, options: Iterable[str]) -> None:
        """Options such as `-DNAME=3`."""
        for one in options:
            if match := re.fullmatch(r"-D\s*(\w+)(?:=(.*))?", one):
                self.macros[match[1]] = Macro(None, match[2] or "1", one)

    def file(self, path: Path) -> None:
        """A file, after the headers of its own that it includes."""
        where = path.resolve()
        if where in self.texts:
            return
        self.texts[where] = ""  # while it is read, for headers that include each other
        self.texts[where] = self.text(read_file(where), path)

    def text(self, content: str, path: Path) -> str:
        """A text as the compiler goes on with it."""
        out, run, at = [], list[Token](), 0
        active = [(True, True)]  # of each condition: whether its branch is taken, whether one was

        def flush(until: int) -> None:
            nonlocal at
            out.append(
                self._written(content, run, at, until, path.name)
                if all(one for one, _ in active)
                else _blank(content[at:until])
            )
            run.clear()
            at = until

        for one in tokens(content):
            if one.kind != "directive":
                run.append(one)
                continue
            flush(one.start)
            self._directive(one, content, path, active)
            out.append(_blank(content[one.start : one.end]))
            at = one.end
        flush(len(content))
        return "".join(out)

    def _directive(self, one: Token, content: str, path: Path, active: list[tuple[bool, bool]]) -> None:
        line = re.sub(r"\\\r?\n", " ", _uncommented(one.text))
        place = line_of(content, one.start)
        if match := _CONDITION.match(line):
            self._condition(match[1], match[2].strip(), active, path.name, place)
        elif not all(taken for taken, _ in active):
            return
        elif match := _DEFINE.match(line):
            self._define(match, f"{path.name}:{place}")
        elif match := _INCLUDE.match(line):
            folders = (path.parent, path.parent / "include", path.parent.parent / "include", path.parent.parent)
            found = next((one / match[1] for one in (*folders, *self.folders) if (one / match[1]).is_file()), None)
            if found is not None:
                self.file(found)

    def _define(self, match: re.Match[str], place: str) -> None:
        name, body = match[1], " ".join(match[4].split())
        parameters = None if match[2] is None else tuple(one.strip() for one in match[3].split(",") if one.strip())
        macro = Macro(parameters, body, place)
        before = self.macros.get(name)
        if name in self.constants and before is not None and before.body != body:
            self.expanded.add(name)
        self.macros[name] = macro
        self._known.add(name)
        if name not in self.expanded and self._is_constant(macro):
            self.constants[name] = macro

    def _is_constant(self, macro: Macro) -> bool:
        """Return True for a number, or an expression of constants in brackets, which is a whole wherever it stands."""
        if macro.parameters is not None or _NUMBER.fullmatch(macro.body):
            return macro.parameters is None
        run = tokens(macro.body)
        if not run or run[0].text != "(" or _arguments(run, 0)[1] != len(run):
            return False
        names = {one.text for one in run if one.kind == "name"}
        return names <= set(self.constants) and all(one.kind in ("name", "number", "sign") for one in run)

    def _condition(self, word: str, rest: str, active: list[tuple[bool, bool]], file: str, line: int) -> None:
        if word == "undef":
            if all(taken for taken, _ in active) and self.macros.pop(rest, None) is not None and rest in self.constants:
                self.expanded.add(rest)
        elif word == "endif":
            if len(active) > 1:
                active.pop()
        elif word in ("else", "elif"):
            _, done = active.pop() if len(active) > 1 else (True, True)
            outside = all(taken for taken, _ in active)
            holds = not done and outside and (word == "else" or self._holds(rest, file, line))
            active.append((holds, done or holds))
        else:
            asked = {"ifdef": f"defined({rest})", "ifndef": f"!defined({rest})"}.get(word, rest)
            holds = all(taken for taken, _ in active) and self._holds(asked, file, line)
            active.append((holds, holds))

    def _holds(self, asked: str, file: str, line: int) -> bool:
        """Return True if the condition of an `#if` holds; a name that nothing defines is 0, as in C++."""
        given = _predefined()

        def defined(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            self._ask(name, file, line)
            return str(int(name in self.macros or name in given))

        code = re.sub(r"\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))", defined, asked)
        code = re.sub(r"\b__has_\w+\s*\([^()]*\)", "0", code)
        code = self._expanded(tokens(code), frozenset(), file, line, every=True)

        def named(match: re.Match[str]) -> str:
            self._ask(match[0], file, line)
            return given.get(match[0], "1" if match[0] == "true" else "0")

        code = re.sub(r"\b[A-Za-z_]\w*", named, re.sub(r"(\b\d\w*?)[uUlL]+\b", r"\1", code))
        try:
            return bool(value(code))
        except ValueError:
            self.taken.append((file, line, asked))
            return False

    def _ask(self, name: str, file: str, line: int) -> None:
        if name not in {*self.macros, *_predefined(), *self._known, "__CUDA_ARCH__"}:
            self.taken.append((file, line, name))

    # --- macros ---

    def _written(self, content: str, run: Sequence[Token], start: int, end: int, file: str) -> str:
        """A stretch of code with its macros expanded: what stands between its tokens stays, without comments."""
        out, at, index, line = [], start, 0, line_of(content, start)
        run = _with_lines(content, run)
        while index < len(run):
            one = run[index]
            if one.kind == "lines":
                index += 1
                continue
            out.append(_spaces(content[at : one.start]))
            line += content.count("\n", at, one.start)
            text, after = self._expand_at(run, index, frozenset(), file, line, False)
            out.append(text)
            lines = content.count("\n", one.start, run[after - 1].end)
            out.append("\n" * (lines - text.count("\n")))
            line += lines
            at, index = run[after - 1].end, after
        out.append(_spaces(content[at:end]))
        return "".join(out)

    def _expand_at(
        self, run: Sequence[Token], index: int, hidden: frozenset[str], file: str, line: int, every: bool
    ) -> tuple[str, int]:
        """The text of what begins at a token, with its macro expanded, and the place behind it."""
        name = run[index].text
        if run[index].kind != "name" or name in hidden:
            return name, index + 1
        if name in ("__LINE__", "__FILE__"):
            return (str(line) if name == "__LINE__" else f'"{file}"'), index + 1
        macro = self.macros.get(name)
        if macro is None or (name in self.constants and name not in self.expanded and not every):
            return name, index + 1
        if macro.parameters is None:
            return self._expanded(tokens(macro.body), hidden | {name}, file, line, every), index + 1
        opening = index + 1
        while opening < len(run) and run[opening].kind == "lines":
            opening += 1
        if opening >= len(run) or run[opening].text != "(":
            return name, index + 1
        given, after = _arguments(run, opening)
        return self._called(macro, given, hidden | {name}, file, line, every), after

    def _expanded(self, run: Sequence[Token], hidden: frozenset[str], file: str, line: int, every: bool = False) -> str:
        out, index = [], 0
        while index < len(run):
            gap = " " if index and run[index - 1].end < run[index].start and run[index].kind != "lines" else ""
            text, index = self._expand_at(run, index, hidden, file, line, every)
            out += [gap, text]
        return "".join(out)

    def _called(
        self, macro: Macro, given: list[list[Token]], hidden: frozenset[str], file: str, line: int, every: bool
    ) -> str:
        names = list(macro.parameters or ())
        values: dict[str, list[Token]] = {}
        if names and names[-1].endswith("..."):
            last = names.pop().removesuffix("...") or "__VA_ARGS__"
            rest = given[len(names) :]
            values[last] = [one for place, part in enumerate(rest) for one in ([_COMMA] if place else []) + part]
        values |= dict(zip(names, given))
        body, out, index = tokens(macro.body), list[str](), 0
        while index < len(body):
            one, text = body[index], body[index].text
            before = body[index - 1] if index else None
            pasted = (index + 2 < len(body) and body[index + 1].text == "#" and body[index + 2].text == "#") or (
                index > 1 and body[index - 1].text == "#" and body[index - 2].text == "#"
            )
            if text == "#" and index + 1 < len(body) and body[index + 1].text == "#":
                while out and not out[-1].strip():
                    out.pop()
                index += 2
                continue
            if text == "#" and index + 1 < len(body) and body[index + 1].text in values:
                spelled = _spelled(values[body[index + 1].text]).replace("\\", "\\\\").replace('"', '\\"')
                out += [" ", f'"{spelled}"']
                index += 2
                continue
            if before is not None and before.end < one.start and not (index > 1 and pasted and before.text == "#"):
                out.append(" ")
            if one.kind == "name" and text in values:
                part = values[text]
                out.append(_spelled(part) if pasted else self._expanded(part, hidden - {text}, file, line, every))
            else:
                out.append(text)
            index += 1
        text = "".join(out)
        return self._expanded(_with_lines(text, tokens(text)), hidden, file, line, every)


_COMMA = Token("sign", ",", 0, 1)
_OPENS, _CLOSES = frozenset("([{"), frozenset(")]}")


def _with_lines(text: str, run: Sequence[Token]) -> list[Token]:
    """Tokens, and between them the line ends."""
    found: list[Token] = []
    for one in run:
        if found and (lines := text.count("\n", found[-1].end, one.start)):
            found.append(Token("lines", "\n" * lines, found[-1].end, one.start))
        found.append(one)
    return found


def _spelled(run: Sequence[Token]) -> str:
    out: list[str] = []
    run = [one for one in run if one.kind != "lines"]
    for index, one in enumerate(run):
        apart = index and (run[index - 1].end < one.start or run[index - 1].text == ",")
        out.append((" " if apart else "") + one.text)
    return "".join(out)


def _arguments(run: Sequence[Token], at: int) -> tuple[list[list[Token]], int]:
    """The arguments of a macro, whose bracket opens at `at`, and the place behind it."""
    found: list[list[Token]] = [[]]
    depth = 0
    for index in range(at, len(run)):
        one = run[index]
        is_bracket = one.kind == "sign"
        depth += is_bracket and one.text in _OPENS
        depth -= is_bracket and one.text in _CLOSES
        if depth == 0:
            return (found if found != [[]] else [[]]), index + 1
        if one.text == "," and depth == 1 and is_bracket:
            found.append([])
        elif index > at:
            found[-1].append(one)
    return found, len(run)


def _uncommented(text: str) -> str:
    return re.sub(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', lambda one: one[1] or " ", text, flags=re.DOTALL)


def _blank(text: str) -> str:
    return re.sub(r"[^\r\n]", " ", text)


def _spaces(gap: str) -> str:
    """Blank out the text between two tokens: spaces and comments."""
    return gap if gap.isspace() or not gap else _blank(gap)


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.Mod: lambda a, b: a % b,
    ast.FloorDiv: lambda a, b: a // b, ast.LShift: lambda a, b: a << b, ast.RShift: lambda a, b: a >> b,
    ast.BitAnd: lambda a, b: a & b, ast.BitOr: lambda a, b: a | b,
    ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b, ast.Lt: lambda a, b: a < b, ast.LtE: lambda a, b: a <= b,
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b,
}  # fmt: skip


@functools.cache
def value(code: str) -> int:
    """The value of an expression of numbers, as conditions have them. Raises `ValueError` for others."""
    code = code.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    try:
        return _value(ast.parse(re.sub(r"!(?!=)", " not ", code).strip() or "0", mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(code) from error


def _value(node: ast.expr) -> int:
    """The value of a condition. Raises `ValueError` for what is none of the preprocessor's."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand)
        return int(not inner) if isinstance(node.op, ast.Not) else -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BoolOp):
        values = [_value(one) for one in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATIONS:
        return int(_OPERATIONS[type(node.ops[0])](_value(node.left), _value(node.comparators[0])))
    raise ValueError
