"""A call of an operator as the command line gives it: `randn(3,5)`, `randint(0,10,3)`, `1`, `"sum"`."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._operator.operator import Operator
from ..errors import InputError
from ..testing import Call
from ..testing.target import Target
from . import modules
from .words import near

_MAKER = re.compile(r"(\w+)\((.*)\)(?::(\w+))?")
FORMS = (
    "randn(3,5), rand(n), randint(low,high,n), zeros(n), ones(n), full(n,value), arange(n), each with :float16 or another "
    'dtype; a number, true, none, (2, 3), "text"'
)
# Shapes that are tried where no argument is given.
_USUAL = ((4, 33), (7,), (2, 3, 8, 9))

_Make = Callable[[list[Any], torch.Generator], Tensor]

_MAKERS: dict[str, _Make] = {
    "randn": lambda n, source: torch.randn(n, generator=source),
    "rand": lambda n, source: torch.rand(n, generator=source),
    "randint": lambda n, source: torch.randint(n[0], n[1], n[2:], generator=source),
    "zeros": lambda n, source: torch.zeros(n),
    "ones": lambda n, source: torch.ones(n),
    "full": lambda n, source: torch.full(n[:-1], n[-1]),
    "arange": lambda n, source: torch.arange(*n),
    "empty": lambda n, source: torch.empty(n),
}


def load(path: str) -> Any:
    """The function that `package.module:name` or `file.py:name` names. Raises `InputError`."""
    module, _, attribute = path.rpartition(":")
    if not module or not attribute:
        before, _, name = path.rpartition(".")
        meant = f"; did you mean {before}:{name}?" if before and not module and name != "py" else ""
        raise InputError(
            f"{path!r} names no function: expected MODULE:NAME, such as cupyops:relu or file.py:name{meant}"
        )
    found: Any = modules.load(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            raise InputError(f"{path!r}: {module} has no {part!r}; name one of its functions{near(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{path!r} is {type(found).__name__}, expected an operator or a function")
    return found


def call(of: Target, args: Sequence[str], seed: int) -> Call:
    """The call of these words, `name=` before a keyword argument; without words, one that the reference takes."""
    source = torch.Generator().manual_seed(seed)
    return _usual(of, source) if not args else parsed(args, source)


def parsed(args: Sequence[str], source: torch.Generator) -> Call:
    """The call of these words, with random numbers from `source`."""
    values, keywords = [], {}
    for text in args:
        match = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", text, re.DOTALL)
        if match is None:
            values.append(_value(text, text, source))
        else:
            keywords[match[1]] = _value(match[2], text, source)
    return Call(*values, **keywords)


def _value(text: str, word: str, source: torch.Generator) -> Any:
    match = _MAKER.fullmatch(text.strip())
    if match is not None and match[1] in _MAKERS:
        return _tensor(word, match, source)
    try:
        return {"true": True, "false": False, "none": None}[text.strip().lower()]
    except KeyError:
        pass
    if re.fullmatch(r"torch\.\w+", text) and isinstance(getattr(torch, text[6:], None), torch.dtype):
        return getattr(torch, text[6:])
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        pass
    if re.fullmatch(r"[A-Za-z_]\w*", text):
        return text  # "sum", which a shell has taken the quotes from
    raise InputError(f"--arg is {word!r}, expected one of: {FORMS}")


def _tensor(word: str, match: re.Match[str], source: torch.Generator) -> Tensor:
    try:
        numbers = list(ast.literal_eval(f"({match[2]},)" if match[2].strip() else "()"))
        made = _MAKERS[match[1]](numbers, source)
        if match[3]:
            made = made.to(getattr(torch, match[3]))
    except (ValueError, SyntaxError, TypeError, RuntimeError, IndexError, AttributeError) as error:
        raise InputError(f"--arg is {word!r}: {str(error).partition(chr(10))[0]}") from error
    return made.requires_grad_(made.is_floating_point())


def _usual(of: Target, source: torch.Generator) -> Call:
    for shape in _USUAL:
        for candidate in _candidates(of, shape, source):
            if _is_accepted(of, candidate):
                return candidate
    raise InputError(f"{of.name} takes none of the usual calls: give its arguments with --arg, each one of: {FORMS}")


def _is_accepted(of: Target, candidate: Call) -> bool:
    """True if the reference takes the call without a warning."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            candidate.of(of.reference)
    except Exception:  # whatever a reference says to arguments that are not its own
        return False
    return True


def _candidates(of: Target, shape: tuple[int, ...], source: torch.Generator) -> Iterator[Call]:
    """Calls with every required tensor of this shape; and with the first alone, the others as its last dimension."""
    operator = of.operator
    count = len(operator.definition.required) if isinstance(operator, Operator) else 1
    for others in (shape, shape[-1:]):
        shapes = [shape, *[others] * (count - 1)]
        tensors = [torch.randn(one, generator=source).requires_grad_() for one in shapes]
        yield Call(*tensors)
        yield Call(*tensors, len(shape) - 1)
        yield Call(*tensors[:1], shape[-1:], *tensors[1:])
