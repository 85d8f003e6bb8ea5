"""Python functions put together as text: real signatures and defaults, for Python, `help` and torch.compile alike."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._operator.operator import Operator
from . import functions
from .declaration import SCALARS, Declaration, Parameter

_numbers = itertools.count(1)


def define(name: str, parameters: str, lines: Sequence[str], names: Mapping[str, Any], returns: str = "") -> Any:
    """The function `def name(parameters): lines`, which sees `names`, and functions.py as `c_`; tracebacks show it."""
    names = {"c_": functions, **names}
    # a name with an underscore at its end is none that a signature can have
    inner = [f"def made_({parameters}){returns}:", *(f"    {line}" for line in lines), "return made_"]
    text = f"def make_({', '.join(names)}):\n" + "".join(f"    {line}\n" for line in inner)
    file = f"<cupyops {name} {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    # the globals of a module that there is: torch.compile looks for them there
    exec(compile(text, file, "exec", dont_inherit=True), vars(functions), made)
    function = made["make_"](*names.values())
    function.__name__ = function.__qualname__ = name
    return function


def caller() -> tuple[str, Path | None]:
    """The module that calls the function that calls this: its name, and its folder; None in a notebook or at a prompt."""
    frame = sys._getframe(2)
    file = frame.f_code.co_filename
    return frame.f_globals.get("__name__", "__main__"), Path(file).resolve().parent if os.path.isfile(file) else None


def annotated(parameters: Sequence[Parameter], defaults: bool = False) -> str:
    """Parameters as a Python signature has them."""
    return ", ".join(
        f"{one.name}: {'Tensor' if one.is_tensor else SCALARS[one.ctype].__name__}"
        + (f" = {one.default!r}" if defaults and one.default is not None else "")
        for one in parameters
    )


def returns(outputs: Sequence[Parameter]) -> str:
    """The annotation of the result."""
    return " -> Tensor" if len(outputs) == 1 else f" -> tuple[{', '.join(['Tensor'] * len(outputs))}]"


def listed(names: Sequence[str]) -> str:
    """The names as the items of a list or tuple."""
    return "".join(f"{name}, " for name in names)


def internal(declaration: Declaration) -> list[Parameter]:
    """The parameters in the order of the operator behind the public function: tensors, those of T first; scalars."""
    return [*declaration.tensors, *declaration.scalars]


def public(
    op: Operator,
    declaration: Declaration,
    checked: Callable[[Sequence[Any]], list[Any]],
    module: str,
    doc: str,
    more: Sequence[str] = (),
) -> Callable[..., Any]:
    """The public function: the parameters of the signature, and `more`; it checks them and calls the operator."""
    own = ", ".join([annotated(declaration.parameters, defaults=True), *more])
    inside = ", ".join(one.name for one in internal(declaration))
    after = "".join(f", {one.partition(':')[0]}" for one in more)
    lines = [f"return op_(*checked_(({inside},){after}))"]
    function = define(declaration.short, own, lines, {"op_": op, "checked_": checked}, returns(declaration.outputs))
    function.__doc__, function.__module__ = doc, module
    shown: Callable[..., Any] = op.interface(function)
    return shown
