"""`cupyops.linear_epilogue`: a linear layer whose result goes through a line of C, where it can in the same kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch.core import shardings
from .._dispatch.elementwise.broadcast import expanded, launched
from .._dispatch.gemm import gemm
from .._dispatch.gemm.epilogues import LINEAR_EPILOGUE, fused, rows_and_columns
from .._dispatch.gemm.linear import check, gradients, multiply, rows_of, too_large, wants_gradient
from .._kernel.kernel import Kernel
from .._operator.derivation.autocast import POLICIES, dtype_for
from .._operator.floating import operator
from .._operator.operator import Operator
from .._util import arguments
from .._util.strides import aligned, contiguous, is_dry
from ..errors import InputError
from . import kernels, linear_text, python, references
from .arguments import checker
from .declaration import Declaration, dtypes_of, parse
from .elementwise import FORWARD
from .gradients import Gradient, check_assigned
from .kernels import Generated, Unit
from .python import caller
from .syntax import Body
from .values import KNOWN

# Functions that were measured to gain in the product's kernel; log1p, erf and expm1 were measured not to, where z is kept.
MEASURED = linear_text.QUICK | {"tanh"}

MUCH = 2048  # of k, from which on products hide that several matrices are captured, and z kept, as measured on an H100

LAYER = ("input", "weight", "bias")  # what every such operator takes before what its text names


def linear_epilogue(
    signature: str,
    epilogue: str,
    backward: str | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    preamble: str = "",
    options: Iterable[str] = (),
    dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
) -> Callable[..., Any]:
    """A linear layer with an epilogue of C: y = f(z, ...), z = input @ weight.T + bias; in one kernel where that is faster.

    On Hopper the epilogue of a product of half types can compute f, from sums that were not rounded. Elsewhere, and where
    it is not measured to be faster, a product is followed by the kernel of an elementwise operator.

    Args:
        signature: `"name(T z, T residual, float scale = 1.0) -> T y"`, as of `cupyops.elementwise`, with one output. The
            first tensor is what the product gives; those after it are captured: each broadcasts to the result, as a
            matrix, a row (out_features,), a column (..., 1) or a number of its own does.
        epilogue: C that assigns the output, as `forward` of `cupyops.elementwise` does.
        backward: C that assigns `grad_z`, and `grad_r` of each captured tensor `r` of type T. By default it is derived.
        reference: the epilogue in PyTorch, a function of the parameters of the signature. By default it is translated.
        preamble: as for `cupyops.elementwise`, and so are `options` and `dtypes`.

    Returns:
        A function of `input` (..., in_features), `weight` (out_features, in_features), `bias` (out_features,) or None, and
        what the signature names after the product. The result is (..., out_features), contiguous. Under autocast what is
        multiplied is cast, and captured tensors are not: where they are wider, so is the result, and PyTorch computes it.

        Backward reads z, which is kept, unless `backward` is given and does not name it. A gradient that is derived is
        computed in fp32: float64 takes the reference, and so does the gradient of an epilogue with integers, `double` or
        functions of the preamble.

    Raises:
        InputError: a signature or C that cannot be read; in a call, as `cupyops.linear` and `cupyops.elementwise` do, and
            where a captured tensor does not broadcast to the result.
        CompileError: at the first launch, where the C does not compile; it shows the line.

    Example:
        >>> quick_gelu = cupyops.linear_epilogue(
        ...     "quick_gelu(T z, T residual) -> T y", "y = z * sigmoid(1.702 * z) + residual"
        ... )
        >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [-5.0, -6.0]])
        >>> quick_gelu(x, weight, torch.tensor([0.0, 17.0]), residual=torch.ones(1, 2))
        tensor([[12.,  1.]])
    """
    module, folder = caller()
    declaration = parse(signature, module)
    _check_form(declaration)
    body = Body(f"{declaration.short}.epilogue", epilogue)
    unit = Unit(declaration.short, preamble, folder, options, dtypes_of(dtypes))
    if reference is None:
        meaning = references.forward(declaration, body)
    else:
        meaning = references.given(declaration, reference)
        check_assigned(body, [declaration.outputs[0].name])
    gradient, of_slopes = None, unit
    if backward is not None:
        gradient = Gradient(declaration, Body(f"{declaration.short}.backward", backward))
    elif (slopes := linear_text.derived(declaration, body)) is not None:
        gradient, of_slopes = Gradient(declaration, slopes), linear_text.slopes(unit, declaration, body)
    layer = Layer(declaration, body, unit, gradient, of_slopes, derived=gradient is not None and backward is None)
    op = operator(declaration.name, autocast="lower", sharding=layer.sharding)(layer.reference(meaning))
    op.forward(layer.forward)
    op.unsupported(layer.unsupported)
    if gradient is not None:
        op.backward(layer.role(), apart=True)
    return _public(op, layer, meaning, module, f"{signature.strip()}: {epilogue.strip()}")


def _check_form(declaration: Declaration) -> None:
    name = declaration.name
    if len(declaration.outputs) != 1 or not declaration.outputs[0].is_typed:
        raise InputError(f"{name}: expected one output of type T")
    if not declaration.parameters[0].is_typed:
        raise InputError(f"{name}: expected the product first, a tensor of type T, such as T z")
    for one in declaration.parameters:
        if one.name in LAYER:
            raise InputError(f"{name}: {one.name!r} is what the layer takes; choose another name")


class Call(NamedTuple):
    """Arguments of the operator: those of the layer, captured tensors and numbers, and whether backward reads z."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    captured: tuple[Tensor, ...]
    scalars: tuple[Any, ...]
    keep: bool


class Layer:
    """The roles of one such operator."""

    def __init__(
        self,
        declaration: Declaration,
        body: Body,
        unit: Unit,
        gradient: Gradient | None,
        of_slopes: Unit,
        derived: bool,
    ) -> None:
        self.declaration, self.body, self.unit, self.gradient = declaration, body, unit, gradient
        self.product, *self.captured = declaration.tensors
        self.is_derived = derived
        self.calls = body.words & KNOWN
        self.keeps = gradient is not None and self.product.name in gradient.body.words
        self.ones: frozenset[str] = getattr(gradient and gradient.body, "ones", frozenset())
        self._apart = kernels.pointwise(
            unit, "fwd", body, declaration.tensors, declaration.scalars, declaration.outputs
        )
        self._fused: dict[tuple[tuple[bool, str], ...], Generated] = {}
        if gradient is not None:
            self._slopes: Kernel = kernels.gradients(
                of_slopes, "bwd", gradient.body, gradient.inputs, gradient.scalars, gradient.assigned
            )

    @property
    def names(self) -> list[str]:
        """Names of the operator's parameters, in their order."""
        return [*LAYER, *(one.name for one in (*self.captured, *self.declaration.scalars)), "keep_"]

    def reference(self, epilogue: Callable[..., Any]) -> Callable[..., Any]:
        """Make the operator's reference, which takes the arguments in its order."""
        parameters = python.annotated([*self.captured, *self.declaration.scalars])
        layer = "input: Tensor, weight: Tensor, bias: Tensor | None"
        given = "".join(f", {name}" for name in self.names[len(LAYER) : -1])
        lines = [f"return epilogue_(linear_(input, weight, bias){given}).contiguous()"]
        names = {"epilogue_": epilogue, "linear_": F.linear}
        signature = ", ".join(filter(None, (layer, parameters, "keep_: bool")))
        made: Callable[..., Any] = python.define(self.declaration.short, signature, lines, names, " -> Tensor")
        return made

    def _call(self, args: Sequence[Any]) -> Call:
        first, second = len(LAYER), len(LAYER) + len(self.captured)
        input, weight, bias = args[:first]
        return Call(input, weight, bias, tuple(args[first:second]), tuple(args[second:-1]), args[-1])

    def sharding(self, *args: Any) -> str:
        """Return the sharding rule for work on DTensors."""
        call = self._call(args)
        return shardings.linear_epilogue(call.weight, call.captured)

    def unsupported(self, *args: Any) -> str | None:
        """Return why kernels do not compute a call, or None."""
        call = self._call(args)
        if call.input.dtype not in self.unit.dtypes:
            return f"the operator is not of {call.input.dtype}"
        if self.is_derived and call.input.dtype == torch.float64:
            return "a gradient that is derived is computed in fp32"
        return too_large(math.prod(call.input.shape[:-1]), *call.weight.shape)

    def forward(self, *args: Any) -> Any:
        """Compute the layer by the product's own kernel, or by one that follows it."""
        call = self._call(args)
        rows, (weight, bias) = rows_of(call.input), contiguous(call.weight, call.bias)
        y = call.input.new_empty((*call.input.shape[:-1], weight.shape[0]))
        kept = torch.empty_like(y) if call.keep else None
        found = [rows_and_columns(one, y.shape) for one in call.captured]
        lies = [one for one in found if one is not None]
        how = [] if is_dry(y) else [_lies(one, *strides) for one, strides in zip(call.captured, lies)]
        measured = self._is_measured(rows.shape[1], how)
        plan = fused(LINEAR_EPILOGUE, rows, (weight,), measured=measured) if len(lies) == len(found) else None
        if plan is not None:
            kernel = self._kernel(how)
            strided = [value for one, (row, column) in zip(call.captured, lies) for value in (one, row, column)]
            plan.compute(kernel, y, kept, bias, *strided, *call.scalars)
        else:
            z = torch.empty_like(y) if kept is None else kept
            multiply(rows, weight, bias, z, turn_b=True)
            if not is_dry(y) and y.numel():
                launch, walked = launched(FORWARD, y, expanded(z, *call.captured))
                launch.by(self._apart)(*walked, y, *call.scalars, T=y.dtype)
        return y, () if kept is None else (kept,)

    def _is_measured(self, k: int, lies: Sequence[tuple[bool, str]]) -> bool:
        """Return True if the product's kernel was measured faster with such an epilogue, for large products."""
        if self.unit.preamble:
            return False
        if not any(rows and columns != "Same" for rows, columns in lies):
            return self.calls <= MEASURED
        return self.calls <= linear_text.QUICK and (k >= MUCH or linear_text.registers(self.captured, lies) <= 1)

    def _kernel(self, lies: Sequence[tuple[bool, str]]) -> Generated:
        """The kernel for captured tensors that lie so."""
        key = tuple(lies)
        if key not in self._fused:
            self._fused[key] = linear_text.fused(self.unit, self.declaration, self.body, lies)
        return self._fused[key]

    def role(self) -> Callable[..., Any]:
        """The backward role, which goes by the names of its parameters."""
        assert self.gradient is not None
        y = self.declaration.outputs[0].name
        names = ["saved", f"grad_{y}", *LAYER]
        names += [name for name in self.gradient.names if name not in (f"grad_{y}", self.product.name)]
        names.append("needs_grad")
        items = ", ".join(f"{name!r}: {name}" for name in names)
        lines = [f"return function_({{{items}}})"]
        role: Callable[..., Any] = python.define("backward", ", ".join(names), lines, {"function_": self.backward})
        return role

    def backward(self, values: dict[str, Any]) -> list[Tensor | None]:
        """Compute the layer's gradients from that of z, and those of captured tensors."""
        gradient, needs = self.gradient, values["needs_grad"]
        assert gradient is not None
        grad_y = values[gradient.first]
        through = needs.input or needs.weight or needs.bias
        wanted = {self.product.name: through} | {one.name: getattr(needs, one.name) for one in self.captured}
        computed = {name: need and name not in self.ones for name, need in wanted.items()}
        found: list[Tensor | None] = [None] * len(self.declaration.tensors)
        if any(computed.values()):
            values = values | {self.product.name: values["saved"][0] if values["saved"] else grad_y}
            values["needs_grad"] = SimpleNamespace(**computed)
            found = gradient.launch(self._slopes, values, grad_y)
        for index, one in enumerate(self.declaration.tensors):
            if one.name in self.ones and wanted[one.name]:
                found[index] = grad_y if index == 0 else _summed(grad_y, values[one.name])
        grad_z, *others = found
        if grad_z is None:
            return [None, None, None, *others]
        layer = SimpleNamespace(x=needs.input, weight=needs.weight, bias=needs.bias)
        return [*gradients(grad_z, values["input"], values["weight"], values["bias"], layer), *others]


def _public(op: Operator, layer: Layer, meaning: Callable[..., Any], module: str, doc: str) -> Callable[..., Any]:
    """The public function: the layer's arguments, and what the signature names after the product."""
    declaration = layer.declaration
    captured = replace(declaration, parameters=declaration.parameters[1:])
    checked = checker(captured, layer.unit.dtypes, promote=False)
    typed = [one.name for one in layer.captured if one.is_typed]

    def call(input: Any, weight: Any, bias: Any, *given: Any) -> Any:
        check(input, weight, bias)
        if weight.dim() != 2:
            arguments.fail("weight", weight, "shape (out_features, in_features)")
        if input.dtype not in layer.unit.dtypes:
            arguments.fail("input", input, f"a tensor of {' or '.join(map(str, layer.unit.dtypes))}")
        values = checked(given)
        tensors = dict(zip([one.name for one in captured.tensors], values))
        if tensors:
            arguments.same_device(input=input, **tensors)
            gemm.check_dtypes(input=input, **{name: tensors[name] for name in typed})
        shape = (*input.shape[:-1], weight.shape[0])
        for name, tensor in tensors.items():
            _check_broadcasts(name, tensor, shape)
        lower = dtype_for(POLICIES["lower"], input.device)
        if lower is not None and any(
            tensors[name].dtype != lower for name in typed
        ):  # it casts what is multiplied alone
            wide = torch.promote_types(lower, tensors[typed[0]].dtype)
            cast = [value.to(wide) if name in typed else value for name, value in zip(tensors, values)]
            return meaning(F.linear(input, weight, bias).to(wide), *cast, *values[len(tensors) :]).contiguous()
        keep = layer.keeps and wants_gradient(input, weight, bias, *tensors.values())
        return op(input, weight, bias, *values, keep)

    all_default = all(one.default is not None for one in captured.parameters)
    own = f"input: Tensor, weight: Tensor, bias: Tensor | None{' = None' if all_default else ''}"
    parameters = ", ".join(filter(None, (own, python.annotated(captured.parameters, defaults=True))))
    inside = ", ".join([*LAYER, *(one.name for one in python.internal(captured))])
    lines = [f"return call_({inside})"]
    function = python.define(declaration.short, parameters, lines, {"call_": call}, " -> Tensor")
    function.__doc__, function.__module__ = doc, module
    shown: Callable[..., Any] = op.interface(function)
    return shown


def _lies(one: Tensor, row: int, column: int) -> tuple[bool, str]:
    """Classify the layout of a captured tensor with these strides: see `linear_text.fused`."""
    in_pairs = column == 1 and row % 2 == 0 and one.shape[-1] % 2 == 0 and aligned(one, 2 * one.element_size())
    return row != 0, "Same" if column == 0 else "Pairs" if in_pairs else "Anyhow"


def _summed(grad_y: Tensor, like: Tensor) -> Tensor:
    """The gradient of what is added, which may have been broadcast."""
    return grad_y if like.shape == grad_y.shape else grad_y.sum_to_size(like.shape)


def _check_broadcasts(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    sizes = tensor.shape
    if len(sizes) > len(shape) or any(size not in (1, own) for size, own in zip(reversed(sizes), reversed(shape))):
        arguments.fail(name, tensor, f"a shape that broadcasts to {tuple(shape)}, that of the result")
