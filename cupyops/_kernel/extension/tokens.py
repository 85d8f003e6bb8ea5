"""The tokens of CUDA C++, each where it stands: no text is lost, whatever strings, raw strings and comments are in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<comment>//(?:\\\r?\n|[^\n])*+|/\*.*?(?:\*/|\Z))
  | (?P<space>\s+|\\\r?\n)
  | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?(?:\)(?P=mark)"|\Z))
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*+"?)
  | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n]){1,10}')
  | (?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*+)
  | (?P<name>[A-Za-z_$]\w*+)
  | (?P<sign><<<|>>>|::|->|&&|\|\||[=!<>+\-*/%&|^]=|\+\+|--|\.\.\.|.)
    """,
    re.DOTALL | re.VERBOSE,
)
_DIRECTIVE = re.compile(r"#(?:\\\r?\n|/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*+\"?|[^\n])*", re.DOTALL)
_CONDITION = re.compile(r"#\s*(if|ifdef|ifndef|elif|else|endif)\b")


@dataclass(frozen=True, slots=True)
class Token:
    """One token: "name", "number", "string", "char", "sign", or "directive", which is a whole line of the preprocessor.

    Attributes:
        branch: how many `#else` or `#elif` it stands under: of alternatives the first alone has balanced brackets.
        depth: how many conditions it stands under.
    """

    kind: str
    text: str
    start: int
    end: int
    branch: int = 0
    depth: int = 0


def tokens(text: str) -> list[Token]:
    """Every token but comments and spaces, in order."""
    found: list[Token] = []
    at, fresh = 0, True  # whether nothing but spaces stands before it in its line
    branches: list[int] = []
    while at < len(text):
        if fresh and text[at] == "#" and (line := _DIRECTIVE.match(text, at)) is not None:
            condition = _CONDITION.match(line.group())
            word = condition[1] if condition is not None else ""
            if word.startswith("if"):
                branches.append(0)
            elif word.startswith("el") and branches:
                branches[-1] = 1
            elif word == "endif" and branches:
                branches.pop()
            found.append(Token("directive", line.group(), at, line.end(), sum(branches), len(branches)))
            at = line.end()
            continue
        match = _TOKEN.match(text, at)
        assert match is not None  # the last alternative takes any character
        kind = match.lastgroup or "sign"
        kind = {"mark": "string", "raw": "string"}.get(kind, kind)
        if kind == "space":
            fresh = fresh or "\n" in match.group()
        elif kind != "comment":
            fresh = False
            found.append(Token(kind, match.group(), at, match.end(), sum(branches), len(branches)))
        at = match.end()
    return found


def line_of(text: str, at: int) -> int:
    """The number of the line, from 1, in which a place of the text lies."""
    return text.count("\n", 0, at) + 1
