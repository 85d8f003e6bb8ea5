"""Types of a kernel's parameters, read from the name that the compiler gave it.

A C++ compiler writes the types of a function's parameters into its symbol, as the Itanium ABI has it: `_Z1fPKfi` is
`f(const float*, int)`. Typedefs, macros and template parameters are resolved there, which no reading of the text can do.
What this module does not know it says nothing of: it never guesses.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_BUILT_IN = {
    "v": "void", "b": "bool", "c": "char", "a": "signed char", "h": "unsigned char", "s": "short",
    "t": "unsigned short", "i": "int", "j": "unsigned int", "l": "long", "m": "unsigned long", "x": "long long",
    "y": "unsigned long long", "n": "__int128", "o": "unsigned __int128", "f": "float", "d": "double", "w": "wchar_t",
}  # fmt: skip


class Type(NamedTuple):
    """A type of C: a "name", an "instance" of a template, or what is made `of` others, such as a "pointer" or a "function".

    "dependent" is what may be a typedef, since it is a member of what hangs on the kernel's template parameters.
    """

    kind: str
    name: str = ""
    of: tuple[Any, ...] = ()

    @property
    def is_known(self) -> bool:
        """True if the type is written out in full; types that a template makes of its parameters are not."""
        return self.kind != "dependent" and all(one.is_known for one in self.of)

    def __str__(self) -> str:
        """Write the type as this package writes C types: `const float*`; a pointer to an array is one to its elements."""
        inside = str(self.of[0]) if self.of and self.kind != "function" else self.name
        if self.kind == "pointer":
            return f"{inside}*"
        if self.kind == "const":
            return f"{inside} const" if inside.endswith("*") else f"const {inside}"
        return inside


class _Unknown(Exception):
    """The name has something that is not read here."""


@functools.lru_cache(maxsize=4096)
def parameters(symbol: str) -> tuple[Type, ...] | None:
    """The types of the parameters of the function `symbol`; None where the symbol does not tell.

    Of a function template that was made of one function type, `f<void (*)(float*)>`, those of that type.
    """
    if not symbol.startswith("_Z"):
        return None
    try:
        found = _Reader(symbol).function()
    except (_Unknown, IndexError, RecursionError):
        return None
    return found if all(one.is_known for one in found) else None


class _Reader:
    """A symbol, gone through once. What may be repeated is kept as it comes, and later named by its number."""

    def __init__(self, symbol: str) -> None:
        self.text, self.at = symbol, 2
        self.seen: list[Type] = []  # S_, S0_, S1_ ...
        self.template: list[Type] = []  # T_, T0_ ...

    def function(self) -> tuple[Type, ...]:
        """The parameters of the whole."""
        is_template = self._name_of_function()
        first = self.template[0] if len(self.template) == 1 else None
        if is_template:
            self._type()  # what it returns
        if self.at >= len(self.text):
            raise _Unknown  # no function
        found = self._types(lambda: self.at >= len(self.text))
        if not found and first is not None and first.kind == "pointer" and first.of[0].kind == "function":
            return tuple(first.of[0].of)
        return found

    # --- names ---

    def _name_of_function(self) -> bool:
        """Read past the function's own name; return True if it is an instance of a template."""
        if self._accept("N"):
            is_template = self._nested(own=True)
            self.seen.pop()  # the function itself is not among what is repeated
            return is_template
        name = self._source_name()
        if not self._peek("I"):
            return False
        self.seen.append(Type("name", name))
        self.template = self._arguments()
        return True

    def _nested(self, own: bool = False) -> bool:
        """Read `N...E` after its N; return True if it ends with template arguments, which are those of the function."""
        self._match(r"[rVK]*")
        whole: Type | None = None
        ends = False
        while not self._accept("E"):
            ends = False
            if self._peek("S"):
                whole = self._substitution()
                continue
            if self._peek("T"):
                whole = Type("dependent", str(self._template_parameter()))
            elif self._peek("I"):
                if whole is None:
                    raise _Unknown
                arguments, ends = self._arguments(), True
                whole = _instance(whole, arguments)
                if own:
                    self.template = arguments
            else:
                name = self._source_name()
                whole = Type("name", name) if whole is None else self._member(whole, name)
            self.seen.append(whole)
        return ends

    def _source_name(self) -> str:
        self._match(r"L?")
        size = int(self._match(r"\d+"))
        name = self.text[self.at : self.at + size]
        self.at += size
        if len(name) < size:
            raise _Unknown
        return name

    def _member(self, of: Type, name: str) -> Type:
        """`of::name`. In a template the compiler leaves it unresolved, where `of` hangs on a parameter."""
        hangs = of.kind == "dependent" or (of.kind == "instance" and bool(self.template))
        return Type("dependent" if hangs else "name", f"{of.name}::{name}")

    def _arguments(self) -> list[Type]:
        """`I...E`."""
        self._match("I")
        found = []
        while not self._accept("E"):
            if self._accept("L"):
                self._type()
                found.append(Type("name", self._match(r"[^E_]*")))
                self._match("E")
            elif self._peek("J") or self._peek("X"):
                raise _Unknown
            else:
                found.append(self._type())
        return found

    # --- types ---

    def _types(self, ended: Callable[[], bool]) -> tuple[Type, ...]:
        found = []
        while not ended():
            found.append(self._type())
        return tuple(found) if found != [Type("name", "void")] else ()

    def _type(self) -> Type:
        letter = self.text[self.at]
        if letter in _BUILT_IN:
            self.at += 1
            return Type("name", _BUILT_IN[letter])
        return self._repeatable_type(letter)

    def _repeatable_type(self, letter: str) -> Type:
        """A type that may be repeated."""
        if letter == "S":
            found = self._substitution()
            if not self._peek("I"):
                return found
            found = _instance(found, self._arguments())
        elif letter == "T":
            found = self._template_parameter()
            if self._peek("I"):  # a template that is a parameter, which may be an alias of anything
                found = Type("dependent", found.name)
                self.seen.append(found)
                found = _instance(found, self._arguments())
        elif letter in "rVK":
            qualifiers, inside = self._match(r"[rVK]+"), self._type()
            found = Type("const", of=(inside,)) if "K" in qualifiers else inside
        elif self._accept("P"):
            found = Type("pointer", of=(self._type(),))
        elif self._accept("A"):
            self._match(r"\d*_")
            found = Type("array", of=(self._type(),))
        elif self._accept("F"):
            self._match(r"Y?")
            self._type()
            found = Type("function", "a function", self._types(lambda: self._accept("E")))
        elif self._accept("N"):
            self._nested()
            found = self.seen.pop()
        elif letter.isdigit():
            found = Type("name", self._source_name())
            if self._peek("I"):
                self.seen.append(found)
                found = _instance(found, self._arguments())
        else:  # references, members of classes, decltype: nothing that a launch can pass
            raise _Unknown
        self.seen.append(found)
        return found

    def _substitution(self) -> Type:
        self._match("S")
        if self._accept("t"):
            return Type("name", "std")
        number = self._match(r"[0-9A-Z]*")
        self._match("_")
        return self.seen[int(number, 36) + 1 if number else 0]

    def _template_parameter(self) -> Type:
        self._match("T")
        number = self._match(r"[0-9A-Z]*")
        self._match("_")
        return self.template[int(number, 36) + 1 if number else 0]

    # --- characters ---

    def _peek(self, letter: str) -> bool:
        return self.text.startswith(letter, self.at)

    def _accept(self, letter: str) -> bool:
        if self.at >= len(self.text):
            raise _Unknown
        found = self._peek(letter)
        self.at += found
        return found

    def _match(self, pattern: str) -> str:
        match = re.compile(pattern).match(self.text, self.at)
        if match is None:
            raise _Unknown
        self.at = match.end()
        return match.group()


def _instance(template: Type, arguments: list[Type]) -> Type:
    """`template<arguments>`."""
    kind = "dependent" if template.kind == "dependent" else "instance"
    return Type(kind, f"{template.name}<{', '.join(map(str, arguments))}>")
