"""`cupyops.reduction`: a differentiable reduction from a few expressions of C."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dispatch.core import shardings
from .._dispatch.core.forms import Forms
from .._dispatch.elementwise.broadcast import empty_output, expanded
from .._dispatch.reduce.reduction import finalizing_block, fold_forms, launched
from .._kernel.kernel import Kernel, ceil_div
from .._operator.floating import operator
from .._operator.operator import Operator
from .._util import arguments
from .._util.strides import is_dry
from ..errors import InputError
from . import folds, kernels, references
from .arguments import checker
from .declaration import Declaration, dtypes_of, parse
from .folds import COUNT, Fold
from .functions import computed_in
from .gradients import Gradient
from .kernels import Unit
from .python import caller, public
from .syntax import Body

# The forms of every reduction that is made of C, whose kernels are no part of them: see `Launch.by`.
FORWARD = Forms("reduction", "forward", fold_forms(None))


def reduction(
    signature: str,
    *,
    map: str,
    reduce: str,
    identity: str,
    post: str = "a",
    backward: str | None = None,
    reference: Callable[..., Any] | None = None,
    preamble: str = "",
    options: Iterable[str] = (),
    dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
    promote: bool = False,
    autocast: str | None = None,
) -> Callable[..., Any]:
    """A reduction of C over any dimensions: one pass over the inputs, in a fixed order, and differentiable.

    The result is `post` of the elements' `map` values, put together by `reduce`. All are computed in fp32, in fp64 for
    fp64, and rounded once, at the end; the words of C are those of `cupyops.elementwise`.

    Args:
        signature: `"name(T x, T weight, float p = 2.0) -> T y"`, as of `cupyops.elementwise`, with one output. Several
            tensors are broadcast together.
        map: an expression of the inputs' elements and the numbers.
        reduce: an expression of `a` and `b`, associative and commutative. `max(a, b)` keeps NaN, `fmax(a, b)` drops it.
        identity: an expression of what changes nothing: `"0"` for a sum, `"-INFINITY"` for a maximum.
        post: an expression of `a`, what the elements came to, and `n`, how many they were.
        backward: C that assigns `grad_x` for each tensor `x` of type T, an element at a time. It is given `grad_y` and `y`
            of the element's result, the inputs, the numbers and `n`. Without it the gradient is the reference's.
        reference: the reduction in PyTorch: a function of the same parameters, and `dim`, a tuple of ints from 0 on in
            order, and `keepdim`. By default it is translated from the C.
        preamble: as for `cupyops.elementwise`, and so are `options`, `dtypes`, `promote` and `autocast`.

    Returns:
        A function with the parameters of the signature, then `dim=None`, an int, a tuple, or None for all dimensions (an
        empty tuple means all too), and `keepdim=False`. Where there is nothing to reduce, the result is `post` of the
        identity.

    Raises:
        InputError: as for `cupyops.elementwise`; a dimension that there is not, or that is given twice.
        CompileError: at the first launch, where the C does not compile; it shows the line.

    Example:
        >>> norm2 = cupyops.reduction(
        ...     "norm2(T x) -> T y",
        ...     map="x * x", reduce="a + b", identity="0", post="sqrt(a)",
        ...     backward="grad_x = y > 0 ? grad_y * x / y : 0",
        ... )
        >>> norm2(torch.tensor([[3.0, 4.0], [6.0, 8.0]]), dim=1)
        tensor([ 5., 10.])
    """
    module, folder = caller()
    declaration = parse(signature, module)
    _check_form(declaration)
    fold = Fold.of(declaration.short, map=map, reduce=reduce, post=post, identity=identity)
    unit = Unit(declaration.short, preamble, folder, options, dtypes_of(dtypes))
    derive = reference is None
    meaning = folds.reference(declaration, fold) if reference is None else folds.given(declaration, reference)
    gradient = derivative = None
    if backward is not None:
        gradient = Gradient(declaration, Body(f"{declaration.short}.backward", backward), (COUNT,), shapes=True)
        derivative = references.backward(gradient) if derive else None
    count = len(declaration.tensors)
    op = operator(
        declaration.name,
        autocast=autocast,
        sharding=lambda *args: shardings.folded(args[:count], *args[-2:]),
    )(meaning)
    op.forward(_forward(declaration, *folds.kernels(unit, declaration, fold)))
    if gradient is not None:
        _set_backward(op, gradient, unit, derivative)
    doc = f"{signature.strip()}: map {map}, reduce {reduce}, post {post}, identity {identity}"
    more = ("dim: int | tuple[int, ...] | None = None", "keepdim: bool = False")
    return public(op, declaration, _checked(declaration, checker(declaration, unit.dtypes, promote)), module, doc, more)


def _check_form(declaration: Declaration) -> None:
    if len(declaration.outputs) != 1:
        raise InputError(f"{declaration.name}: expected one output of a reduction, got {len(declaration.outputs)}")
    for one in declaration.scalars:
        if one.name in ("a", "b"):
            raise InputError(f"{declaration.name}: {one.name!r} is what is reduced; choose another name for the number")


def _checked(declaration: Declaration, checker: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The arguments as the operator takes them: `dim` as a list, counted from the front, in order."""
    count = len(declaration.tensors)

    def checked(values: Sequence[Any], dim: Any, keepdim: Any) -> list[Any]:
        found = checker(values)
        if not isinstance(keepdim, bool):
            arguments.fail("keepdim", keepdim, "a bool")
        ndim = max(tensor.dim() for tensor in found[:count])
        listed = list(dim) if isinstance(dim, (tuple, list)) else [] if dim is None else [dim]
        given = [arguments.dim("dim", one, ndim) for one in listed]
        # by comparison, since torch.compile sorts no symbols
        dims = [one for one in range(ndim) if not given or any(one == other for other in given)]
        if ndim and given and len(dims) < len(given):
            arguments.fail("dim", dim, "each dimension once")
        return [*found, dims, keepdim]

    return checked


def _forward(declaration: Declaration, fold: Kernel, finish: Kernel) -> Callable[..., Any]:
    """The launch of the forward kernels: one, or two where a result is put together by several blocks."""
    count, output = len(declaration.tensors), declaration.outputs[0]

    def launch(*args: Any) -> Any:
        *scalars, dims, keepdim = args[count:]
        inputs: Sequence[Tensor] = expanded(*args[:count])
        shape, dtype = inputs[0].shape, inputs[0].dtype
        kept = [dim for dim in range(len(shape)) if dim not in dims]
        result = _reduced_shape(shape, dims) if keepdim else [shape[dim] for dim in kept]
        y = inputs[0].new_empty(result, dtype=output.dtype or dtype)
        if is_dry(y) or y.numel() == 0:
            return y, ()
        n = math.prod(shape[dim] for dim in dims)
        if n == 0:
            _finish(finish, y.new_empty(0, dtype=computed_in(dtype)), y, scalars, n, 0, dtype)
            return y, ()
        strides = tuple(y.stride(dim) for dim in kept) if keepdim else y.stride()
        found, inputs = launched(FORWARD, inputs, dims, strides, dtype.itemsize)
        slabs: int = found.extra
        partial = y.new_empty((slabs, y.numel()), dtype=computed_in(dtype)) if slabs else None
        found.by(fold)(*inputs, y, partial, *scalars, n, T=dtype)
        if partial is not None:
            _finish(finish, partial, y, scalars, n, slabs, dtype)
        return y, ()

    return launch


def _finish(
    kernel: Kernel, partial: Tensor, y: Tensor, scalars: Sequence[Any], n: int, slabs: int, dtype: torch.dtype
) -> None:
    """y from the partial results of the slabs, of which there may be none."""
    block = finalizing_block(y.numel(), slabs)
    kernel[ceil_div(y.numel(), block[0]), block](partial, y, *scalars, n, slabs, y.numel(), T=dtype)


def _reduced_shape(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """The shape of a result that keeps its dimensions."""
    return [1 if dim in dims else size for dim, size in enumerate(shape)]


def _set_backward(op: Operator, gradient: Gradient, unit: Unit, derivative: Callable[..., Any] | None) -> None:
    """The backward roles: an elementwise kernel over the shape of the inputs, and the same in PyTorch."""
    inputs, scalars, assigned = gradient.inputs, gradient.scalars, gradient.assigned
    kernel = kernels.gradients(unit, "bwd", gradient.body, inputs, scalars, assigned)
    tensors, output = [one.name for one in gradient.declaration.tensors], gradient.declaration.outputs[0].name

    def laid_out(values: dict[str, Any]) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """The values, those of the output with every dimension; and the inputs over their whole shape."""
        whole = expanded(*[values[name] for name in tensors])
        shape = whole[0].shape
        kept = _reduced_shape(shape, values["dim"])
        n = math.prod(shape[dim] for dim in values["dim"])
        of_output = {name: values[name].reshape(kept) for name in (f"grad_{output}", output) if name in values}
        return values | of_output | {"n": n}, whole

    def launch(values: dict[str, Any]) -> Any:
        values, whole = laid_out(values)
        return gradient.launch(kernel, values, empty_output(*whole))

    def derived(values: dict[str, Any]) -> Any:
        values, whole = laid_out(values)
        return derivative(whole[0].shape, *gradient.given(values)) if derivative is not None else None

    op.backward(gradient.role(launch, "dim", "needs_grad"))
    if derivative is not None:
        op.reference_backward(gradient.role(derived, "dim"))
