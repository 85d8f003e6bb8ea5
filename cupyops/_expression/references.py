"""References and gradients in PyTorch, made of the same C that the kernels are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import python
from .declaration import Declaration, Parameter
from .gradients import Gradient
from .kernels import translated_type
from .syntax import Body
from .translation import Translation
from .values import DTYPES


def opening(typed: str, tensors: Sequence[Parameter], scalars: Sequence[Parameter]) -> list[str]:
    """The first lines of a function: T, as the tensor `typed` tells it, and every parameter as what it is in C."""
    lines = [f"T, device_ = {typed}.dtype, {typed}.device", "A = c_.computed_in(T)"]
    lines += [f"{one.name}_0 = {one.name}.to({DTYPES[translated_type(one)]})" for one in tensors]
    lines += [f"{one.name}_0 = c_.number({one.name}, {DTYPES[translated_type(one)]}, device_)" for one in scalars]
    return lines


def whole_shape(tensors: Sequence[Parameter]) -> str:
    """The expression of the shape that the tensors broadcast to."""
    shapes = [f"{one.name}.shape" for one in tensors]
    return shapes[0] if len(shapes) == 1 else f"c_.torch.broadcast_shapes({', '.join(shapes)})"


def types(parameters: Sequence[Parameter]) -> dict[str, str]:
    """The C type of each, as a translation is given it."""
    return {one.name: translated_type(one) for one in parameters}


def dtype(one: Parameter) -> str:
    """The dtype of an output, in the functions made here."""
    return "T" if one.dtype is None else f"c_.{one.dtype}"


def forward(declaration: Declaration, body: Body) -> Callable[..., Any]:
    """The reference: of tensors, then scalars."""
    parameters, outputs, tensors = python.internal(declaration), declaration.outputs, declaration.tensors
    translation = Translation(body, types(parameters), types(outputs))
    lines = opening(tensors[0].name, tensors, declaration.scalars) + translation.lines
    lines.append(f"shape_ = {whole_shape(tensors)}")
    inputs = f"({python.listed([one.name for one in tensors])})"
    finished = [f"c_.finish({translation.result(one.name)}, {dtype(one)}, shape_, {inputs})" for one in outputs]
    lines.append(f"return {', '.join(finished)}")
    return python.define(declaration.short, python.annotated(parameters), lines, {}, python.returns(outputs))


def given(declaration: Declaration, reference: Callable[..., Any]) -> Callable[..., Any]:
    """A reference of the user's, which takes the parameters in the order of the signature, as one of the operator's."""
    call = f"reference_({', '.join(one.name for one in declaration.parameters)})"
    if len(declaration.outputs) > 1:
        call = f"tuple({call})"
    return python.define(
        declaration.short,
        python.annotated(python.internal(declaration)),
        [f"return {call}"],
        {"reference_": reference},
        python.returns(declaration.outputs),
    )


def backward(gradient: Gradient) -> Callable[..., Any]:
    """The gradients of the inputs over the whole shape `shape_`: of that, then of what the gradient goes by."""
    translation = Translation(gradient.body, types([*gradient.inputs, *gradient.scalars]), types(gradient.assigned))
    lines = opening(gradient.typed, gradient.inputs, gradient.scalars) + translation.lines
    summed = [
        f"c_.summed({translation.result(f'grad_{one.name}')}, {gradient.like(one)}, shape_)"
        if one.is_floating
        else "None"
        for one in gradient.declaration.tensors
    ]
    lines.append(f"return ({python.listed(summed)})")
    return python.define("gradient", ", ".join(["shape_", *gradient.names, *gradient.extra]), lines, {})
