"""The backward of an operator made of C: one elementwise kernel for all its gradients, and what they are summed to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._dispatch.core.forms import Forms, Launch
from .._dispatch.core.gpu import Gpu
from .._dispatch.elementwise.broadcast import Broadcast, Strided, laid_out_as_output, launched
from .._kernel.kernel import Kernel
from .._util.strides import is_dry
from . import python
from .declaration import Declaration, Parameter
from .functions import computed_in
from .syntax import Body


class _Located(Strided):
    """The kernels of users' operators take the layout in either form."""

    def launch(self, problem: Broadcast, gpu: Gpu) -> Launch:
        return replace(super().launch(problem, gpu), template={"FLAT": False})


class _Flat(_Located):
    name = "flat"
    summary = "a thread owns a vector; the inputs are laid out as the outputs are"

    def why_not(self, problem: Broadcast, gpu: Gpu) -> str | None:
        return None if laid_out_as_output(problem) else "an input is laid out otherwise than the outputs"

    def launch(self, problem: Broadcast, gpu: Gpu) -> Launch:
        return replace(super().launch(problem, gpu), template={"FLAT": True})


def forms(direction: str) -> Forms[Broadcast]:
    """The forms of every operator that is made of C, whose kernels are no part of them: see `Launch.by`."""
    of_any: Any = None
    return Forms("elementwise", direction, [_Flat(of_any), _Located(of_any)])


BACKWARD = forms("backward")


def check_assigned(body: Body, names: Iterable[str]) -> None:
    """The body mentions each name that it is to assign. Raises `InputError`."""
    for name in names:
        if name not in body.words:
            raise body.error(0, f"{name} is never assigned")


class Gradient:
    """Inputs of a backward body, and the roles of the operator that are made of it.

    `inputs` and `scalars` are what the body mentions, `extra` those of the scalars that are no parameters. `names` is what
    the roles ask for, which is kept for them: with `shapes` every input, for the shapes.
    """

    def __init__(
        self, declaration: Declaration, body: Body, extra: Sequence[Parameter] = (), shapes: bool = False
    ) -> None:
        if not declaration.graded:
            raise body.error(0, "no output is of a floating-point dtype, so there is no gradient")
        self.declaration, self.body = declaration, body
        self.first = f"grad_{declaration.graded[0].name}"
        grads = [replace(one, name=f"grad_{one.name}") for one in declaration.outputs]
        self.assigned = [Parameter(f"grad_{one.name}", "T", True) for one in declaration.differentiable]
        check_assigned(body, [one.name for one in self.assigned])
        read = [one for one in grads if one.is_floating] + [*declaration.tensors, *declaration.outputs]
        self.inputs = [one for one in read if one.name in body.words]
        self.scalars = [one for one in (*declaration.scalars, *extra) if one.name in body.words]
        if not self.inputs:
            raise body.error(0, f"mentions none of {', '.join(one.name for one in read)}")
        # what tells T; the gradients of the outputs are there in any case
        self.typed = next((one.name for one in grads if one.is_typed), declaration.tensors[0].name)
        kept = {one.name for one in self.inputs} | {self.typed}
        if shapes:
            kept |= {one.name for one in declaration.tensors}
        elif len(declaration.tensors) > 1:  # a lone input has the output's shape; of several each is to be known
            kept |= {one.name for one in declaration.differentiable}
        self.names = [one.name for one in grads]
        self.names += [one.name for one in read if one.name in kept and one.name not in self.names]
        self.names += [one.name for one in self.scalars if one not in extra]
        self.extra = [one.name for one in self.scalars if one in extra]

    def given(self, values: dict[str, Any]) -> list[Any]:
        """The values of `names`, then of `extra`."""
        return [values[name] for name in (*self.names, *self.extra)]

    def like(self, one: Parameter) -> str:
        """A tensor of the shape and dtype of that input."""
        return one.name if one.name in self.names else self.typed

    def role(self, function: Callable[..., Any], *more: str) -> Callable[..., Any]:
        """`function(values by name)` as a role of the operator, which goes by the names of its parameters."""
        names = ["saved", *self.names, *more]
        items = ", ".join(f"{name!r}: {name}" for name in names)
        return python.define("role", ", ".join(names), [f"return function_({{{items}}})"], {"function_": function})

    def launch(self, kernel: Kernel, values: dict[str, Any], like: Tensor) -> list[Tensor | None]:
        """The gradients of the inputs, in their order, computed over the shape and in the dense layout of `like`."""
        shape, dtype = like.shape, values[self.typed].dtype
        found: list[Tensor | None] = []
        wide = 0
        for index, one in enumerate(self.declaration.differentiable):
            if not getattr(values["needs_grad"], one.name):
                found.append(None)
                continue
            whole = one.name not in values or values[one.name].shape == shape
            wide |= (not whole and dtype != computed_in(dtype)) << index
            found.append(torch.empty_like(like, dtype=dtype if whole else computed_in(dtype)))
        expanded = [values[one.name].expand(shape) for one in self.inputs]
        if not is_dry(like) and like.numel():
            launch, inputs = launched(BACKWARD, like, expanded, dtype.itemsize)
            scalars = [values[one.name] for one in self.scalars]
            launch.by(kernel)(*inputs, *found, *scalars, wide, T=dtype)
        summed = {
            one.name: _summed(gradient, values.get(one.name), dtype)
            for one, gradient in zip(self.declaration.differentiable, found)
        }
        return [summed.get(one.name) for one in self.declaration.tensors]


def _summed(gradient: Tensor | None, like: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Sum a gradient over the whole shape to the input's, in the dtype it was computed in, and round it once."""
    if gradient is None or like is None or gradient.shape == like.shape:
        return gradient
    return gradient.sum_to_size(like.shape).to(dtype).contiguous()
