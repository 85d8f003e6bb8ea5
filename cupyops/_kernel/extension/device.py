"""Split of a C++ extension's file: host code is blanked out, so that device code remains with its line numbers.

A declaration stays where it is marked (`__global__`, `__device__`, a macro that stands for one), and where it is a type, a
constant, an alias or a `constexpr` function that names nothing of the host's libraries. Functions without a mark are host
code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from .known import HOST_OF_STD, is_host, is_host_namespace
from .tokens import Token, tokens

MARKS = frozenset(("__global__", "__device__", "__constant__", "__shared__", "__managed__"))
_KINDS = frozenset(("struct", "class", "union", "enum"))
_OPENS, _CLOSES = {"(": ")", "[": "]", "{": "}"}, frozenset(")]}")
_AFTER_CALL = frozenset(("{", ";", ":", "=", ",", "->", "[", "(", ".", "::"))
_DEFINE = re.compile(r"#\s*define\s+(\w+)(\([\w\s,.\\]*\))?(.*)", re.DOTALL)
_INCLUDE = re.compile(r"#\s*include\b")
_WORD = re.compile(r"[A-Za-z_]\w*")
_ATTRIBUTES = frozenset(("alignas", "__align__", "__attribute__", "__launch_bounds__", "decltype"))
_AFTER_PARAMETERS = frozenset(("const", "noexcept", "override"))


@dataclass
class Device:
    """Result of `split`.

    Attributes:
        text: the text with its host code blanked out.
        kernels: the `__global__` functions, with their namespaces.
        macros: those that were known and those that the text defines, with the words of each.
        renamed: (start, end, name) where a name in the text is to be another: of kernels that share one.
    """

    text: str
    kernels: list[str]
    macros: dict[str, frozenset[str]]
    renamed: list[tuple[int, int, str]]


@dataclass
class _Scan:
    tokens: list[Token]
    marks: frozenset[str]
    kernel_marks: frozenset[str]
    macros: frozenset[str]
    definitions: dict[str, tuple[list[str], str]]  # of the macros of the text: parameters, and what they stand for
    blank: list[tuple[int, int]] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    host: set[str] = field(default_factory=set)  # types that are left out, and what has `using namespace std` before it
    places: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # of each kernel's name: place, parameters
    functions: set[str] = field(default_factory=set)  # functions of device code that are no kernels


def split(text: str, known: dict[str, frozenset[str]] | None = None) -> Device:
    """The device code of a text. `known` are macros that are defined before it, as by headers."""
    found = tokens(text)
    macros: dict[str, frozenset[str]] = dict(known or {})
    for one in filter(None, map(_define, found)):  # one that is defined in several ways may stand for each of them
        macros[one[1]] = macros.get(one[1], frozenset()) | frozenset(_WORD.findall((one[2] or "") + one[3]))
    code = [one for one in found if one.kind != "directive"]
    definitions = {one[1]: (_WORD.findall(one[2] or ""), one[3]) for one in filter(None, map(_define, found))}
    scan = _Scan(
        code, _marks(macros, MARKS), _marks(macros, frozenset(("__global__",))), frozenset(macros), definitions
    )
    if any([one.text for one in code[at : at + 3]] == ["using", "namespace", "std"] for at in range(len(code))):
        scan.host |= HOST_OF_STD
    _items(scan, 0, len(code), "", False)
    kept = [(one.start, one.end) for one in found if one.kind == "directive" and not _INCLUDE.match(one.text)]
    return Device(_blanked(text, scan.blank, kept), scan.kernels, macros, _renamed(scan))


def _define(token: Token) -> re.Match[str] | None:
    return _DEFINE.match(token.text) if token.kind == "directive" else None


def _marks(macros: dict[str, frozenset[str]], given: frozenset[str]) -> frozenset[str]:
    """Marks of device code, and the macros in which one stands."""
    marks = set(given)
    while more := {name for name, words in macros.items() if name not in marks and words & marks}:
        marks |= more
    return frozenset(marks)


def _blanked(text: str, spans: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]) -> str:
    """The text with spaces in the spans, but for line ends and for what is kept."""
    characters = list(text)
    for start, end in spans:
        at = start
        for low, high in [*((low, high) for low, high in kept if start <= low < end), (end, end)]:
            characters[at:low] = [one if one in "\r\n" else " " for one in characters[at:low]]
            at = max(at, high)
    return "".join(characters)


def closing(code: Sequence[Token], at: int, end: int) -> int:
    """Position after the bracket that closes the one at `at`; alternatives behind an `#else` are passed over."""
    depth, branch = 0, code[at].branch
    for index in range(at, end):
        one = code[index]
        if one.kind == "sign" and one.branch <= branch:
            depth += (one.text in _OPENS) - (one.text in _CLOSES)
            if depth == 0:
                return _past_alternatives(code, at, index, end)
    return end


def _past_alternatives(code: Sequence[Token], opening: int, at: int, end: int) -> int:
    """Position after a closing bracket and its alternatives under an `#else`, where the opening one is before the `#if`."""
    one, after = code[at], at + 1
    if one.depth > code[opening].depth:
        while after < end and code[after].depth >= one.depth and code[after].branch > one.branch:
            after += 1
    return after


def angle(code: Sequence[Token], at: int, end: int) -> int:
    """Position after the `>` that closes the `<` at `at`."""
    depth = 0
    while at < end:
        text = code[at].text
        if text in _OPENS:
            at = closing(code, at, end)
            continue
        if text in ("<", "<<<"):
            depth += len(text)
        elif text in (">", ">>>"):
            depth -= len(text)
        elif text in (";", "{"):
            return at
        at += 1
        if depth <= 0:
            return at
    return end


@dataclass
class Item:
    """One declaration: `code[start:end]`; its head goes up to `body`, which is its `{`, or to its end."""

    start: int
    body: int
    end: int
    kind: str  # "function", "type", "other", "call" of a macro


def _items(scan: _Scan, at: int, end: int, namespace: str, member: bool) -> None:
    """Blank out what is host code between two places."""
    code = scan.tokens
    while at < end:
        if code[at].text in (";", "public", "private", "protected", ":") or code[at].text in _CLOSES:
            at += 1
            continue
        inside = _namespace(code, at, end)
        if inside is not None:
            name, body, after = inside
            _items(scan, body + 1, after - 1, f"{namespace}{name}::" if name else namespace, False)
            at = after
            continue
        item = read(code, at, end, scan.macros)
        _decide(scan, item, namespace, member)
        at = item.end


def _namespace(code: Sequence[Token], at: int, end: int) -> tuple[str, int, int] | None:
    """(name, place of its `{`, behind its `}`) where a namespace begins, or an `extern "C" {`."""
    start = at
    if code[at].text == "extern" and at + 2 < end and code[at + 1].kind == "string":
        return ("", at + 2, closing(code, at + 2, end)) if code[at + 2].text == "{" else None
    if code[at].text == "inline":
        start += 1
    if start >= end or code[start].text != "namespace":
        return None
    body = start + 1
    while body < end and code[body].text not in ("{", ";", "="):
        body += 1
    if body >= end or code[body].text != "{":
        return None
    name = "".join(one.text for one in code[start + 1 : body] if one.kind == "name" or one.text == "::")
    return name, body, closing(code, body, end)


def read(code: Sequence[Token], start: int, end: int, macros: frozenset[str]) -> Item:
    """The declaration that begins at `start`."""
    at, parens, assigned, colon = start, False, False, False
    while at < end:
        text = code[at].text
        if text == ";":
            return Item(start, at, at + 1, "function" if parens and not assigned else "other")
        if text == "template" and at + 1 < end and code[at + 1].text == "<":
            at = angle(code, at + 1, end)
        elif text == "operator":  # what follows is a name
            at += 1
            while at < end and code[at].text != "(":
                at += 1
            at += 2 * ([one.text for one in code[at + 1 : at + 3]] == [")", "("])
        elif text == "(":
            is_call = at == start + 1 and code[start].text in macros
            parens = parens or code[at - 1].text not in _ATTRIBUTES
            at = closing(code, at, end)
            if is_call and (at >= end or code[at].text not in _AFTER_CALL):
                return Item(start, at, at, "call")
        elif text == "{":
            after = closing(code, at, end)
            is_type = not parens and any(one.text in _KINDS for one in code[start:at])
            if is_type and not assigned:
                return Item(start, at, _behind(code, after, end), "type")
            is_member = colon and code[at - 1].kind == "name" and code[at - 1].text not in _AFTER_PARAMETERS
            if assigned or not parens or is_member:
                at = after  # the value of a variable, or of a member in a constructor
                continue
            return Item(start, at, after, "function")
        elif text in ("[",):
            at = closing(code, at, end)
        else:
            assigned = assigned or text == "="
            colon = colon or (text == ":" and parens)
            at += 1
    return Item(start, end, end, "other")


def _behind(code: Sequence[Token], at: int, end: int) -> int:
    """Position after the `;` of a type's declaration."""
    while at < end and code[at].text != ";":
        at = closing(code, at, end) if code[at].text in _OPENS else at + 1
    return min(at + 1, end)


def _decide(scan: _Scan, item: Item, namespace: str, member: bool) -> None:
    code = scan.tokens
    head = code[item.start : item.body]
    words = {one.text for one in head if one.kind == "name"}
    if words & scan.marks:
        if words & scan.kernel_marks:
            called = head[0].text in scan.definitions and len(head) > 2 and head[1].text == "("
            name = _made_by_macro(scan, head) if called else name_of(head) if item.kind == "function" else ""
            if name and not called:
                name = _distinct(scan, item, namespace, name)
            scan.kernels += [namespace + name] * bool(name and namespace + name not in scan.kernels)
        elif item.kind == "function" and not member:
            scan.functions.add(name_of(head))
        if item.kind == "type":
            _items(scan, item.body + 1, _end_of_body(code, item), "", True)
        return
    if item.kind == "call":
        keep = False
    elif item.kind == "function":
        keep = (
            (member or "constexpr" in words)
            and "friend" not in words
            and not _is_host(code[item.start : item.end], scan.host)
        )
        keep = keep and not (words & {"using"})
    elif item.kind == "type":
        close = _end_of_body(code, item)
        keep = not _is_host(head, scan.host) and not _is_host(code[close : item.end], scan.host)
        keep = keep and not any(_is_host(one, scan.host) for one in _data(scan, item.body + 1, close))
        if keep:
            _items(scan, item.body + 1, close, "", True)
    else:
        keep = not _is_host(code[item.start : item.end], scan.host) and not _is_host_namespace(
            code[item.start : item.end]
        )
    if not keep and item.kind == "type":
        scan.host |= (
            {one.text for one in head if one.kind == "name"} - _KINDS - {"final", "public", "template", "typename"}
        )
    if not keep and item.end > item.start:
        scan.blank.append((code[item.start].start, code[item.end - 1].end))


def _distinct(scan: _Scan, item: Item, namespace: str, name: str) -> str:
    """The name of a kernel: of several with one name, but other parameters, each has a number."""
    code = scan.tokens
    at = next(
        index for index in range(item.start, item.body) if code[index].text == name and code[index + 1].text == "("
    )
    parameters = " ".join(one.text for one in code[at + 1 : closing(code, at + 1, item.body)])
    places = scan.places.setdefault(namespace + name, [])
    different = list(dict.fromkeys(one for _, one in [*places, (at, parameters)] if "=" not in one))
    places.append((at, parameters))
    count = different.index(parameters) + 1 if parameters in different else 1
    return name if count == 1 else f"{name}_{count}"


def _renamed(scan: _Scan) -> list[tuple[int, int, str]]:
    """Names of their own for kernels that share one, and for device functions that are called as a kernel is."""
    code, found = scan.tokens, dict[int, str]()
    for places in scan.places.values():
        different = list(dict.fromkeys(one for _, one in places if "=" not in one))
        for at, parameters in places:
            if parameters in different[1:]:
                found[at] = f"{code[at].text}_{different.index(parameters) + 1}"
    kernels = {code[at].text: {other for other, _ in places} for places in scan.places.values() for at, _ in places}
    for at, one in enumerate(code[:-1]):
        shared = one.text in scan.functions and at not in kernels.get(one.text, {at})
        if shared and code[at + 1].text in ("(", "<") and code[at - 1].text not in (".", "->"):
            found[at] = f"{one.text}_of_device"
    return [(code[at].start, code[at].end, name) for at, name in found.items()]


def _end_of_body(code: Sequence[Token], item: Item) -> int:
    return closing(code, item.body, item.end) - 1


def _data(scan: _Scan, at: int, end: int) -> Iterator[Sequence[Token]]:
    """The members of a type that are no functions, without which it is another type."""
    while at < end:
        item = read(scan.tokens, at, end, scan.macros)
        if item.kind == "other":
            yield scan.tokens[item.start : item.end]
        at = max(item.end, at + 1)


def name_of(head: Sequence[Token]) -> str:
    """Return a function's name: the word before the last parenthesis at the top level of its head."""
    name, at = "", 0
    while at < len(head):
        text = head[at].text
        if text == "template" and at + 1 < len(head) and head[at + 1].text == "<":
            at = angle(head, at + 1, len(head))
        elif text == "(":
            before = head[at - 1] if at else None
            if before is not None and before.kind == "name" and not before.text.startswith("__"):
                name = before.text
            at = closing(head, at, len(head))
        else:
            at += 1
    return name


def _made_by_macro(scan: _Scan, call: Sequence[Token]) -> str:
    """The name of the kernel that `KERNEL(add, +)` defines; empty where the macro does not say, as that of a header."""
    parameters, body = scan.definitions.get(call[0].text, ([], ""))
    values: list[list[str]] = [[]]
    depth = 0
    for one in call[2:-1]:
        depth += (one.text in _OPENS) - (one.text in _CLOSES)
        if one.text == "," and not depth:
            values.append([])
        else:
            values[-1].append(one.text)
    given = dict(zip(parameters, ("".join(one) if len(one) == 1 else " ".join(one) for one in values)))
    text = _WORD.sub(lambda word: given.get(word[0], word[0]), body.replace("\\\n", " ").replace("\\\r\n", " "))
    code = tokens(re.sub(r"\s*##\s*", "", text))
    if not any(one.text == "__global__" for one in code):
        return ""
    item = read(code, 0, len(code), frozenset())
    return name_of(code[: item.body]) if item.kind == "function" else ""


def _is_host_namespace(code: Sequence[Token]) -> bool:
    """Return True for `using namespace at::cuda::detail;` and the like, whose namespace device code lacks."""
    if [one.text for one in code[:2]] != ["using", "namespace"]:
        return False
    return is_host_namespace([one.text for one in code[2:] if one.kind == "name"])


def _is_host(code: Sequence[Token], host: Set[str]) -> bool:
    """Return True if the code names something of the host's libraries, or of the parts left out of the file."""
    for index, one in enumerate(code):
        if one.kind != "name" or (index and code[index - 1].text in ("::", ".", "->")):
            continue
        path = [one.text]
        at = index + 1
        while at + 1 < len(code) and code[at].text == "::" and code[at + 1].kind == "name":
            path.append(code[at + 1].text)
            at += 2
        if is_host(path) or (len(path) == 1 and one.text in host):
            return True
    return False
