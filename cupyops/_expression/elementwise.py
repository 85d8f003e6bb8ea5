"""`cupyops.elementwise`: a differentiable operator from one line of C, and one for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._dispatch.core import shardings
from .._dispatch.elementwise.broadcast import empty_output, expanded, launched
from .._kernel.kernel import Kernel
from .._operator.floating import operator
from .._operator.operator import Operator
from .._util.strides import is_dry
from . import kernels, references
from .arguments import checker
from .declaration import Declaration, dtypes_of, parse
from .gradients import Gradient, check_assigned, forms
from .kernels import Unit
from .python import caller, public
from .syntax import Body

FORWARD = forms("forward")


def elementwise(
    signature: str,
    forward: str,
    backward: str | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    preamble: str = "",
    options: Iterable[str] = (),
    dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
    promote: bool = False,
    autocast: str | None = None,
) -> Callable[..., Any]:
    """An elementwise operator of C: it broadcasts, loads 16 bytes at a time, and is differentiable.

    Args:
        signature: `"name(T x, bool[] mask, float scale = 1.0) -> T y"`. `T x` is a tensor of the dtype that all tensors of
            type T share, `bool[] mask` one of a fixed dtype (`bool`, `int8` to `int64`, `uint8`); `float`, `double`,
            `int`, `long long` and `bool` are numbers. There may be several outputs, of any dtype. The name may be
            qualified, `"mylib::name"`; else its namespace is `user_` and the module's name, or `user` in a script or a
            notebook. A later definition of a name takes it over.
        forward: C that assigns every output: one statement or several, with local variables, `if` and `?:`. It is
            computed in fp32, in fp64 for fp64; `float` and `T` name that type, literals are of it, and the one rounding is
            at the end; for half types `exp` and `sigmoid` are as exact as those can show. `max` and `min` keep NaN as
            `torch.maximum` does; `fmax` and `fmin` drop it.
        backward: C that assigns `grad_x` for each tensor `x` of type T. It is given `grad_y`, the inputs, the numbers and,
            by name, the outputs. It must be the gradient of `forward`; `cupyops.testing.check` finds out. Without it the
            gradient is that of the reference: everywhere right, but slower, and it keeps more memory.
        reference: the operator in PyTorch: a function of the same parameters. By default it is translated from `forward`.
            Needed where that has a loop or calls what only the preamble defines.
        preamble: CUDA C before the kernels: `__device__` functions, `#include`, `#define`.
        options: further options for NVRTC.
        dtypes: what T may be: of fp16, bf16, fp32 and fp64, all by default.
        promote: bring tensors of different floating-point dtypes to one, as PyTorch does; otherwise an error.
        autocast: as for `cupyops.operator`.

    Returns:
        A function with the parameters of the signature. It takes tensors and arrays, and every route of
        `cupyops.operator`; the operator itself is in `cupyops.operators()`.

    Raises:
        InputError: a signature or C that cannot be read, an unknown name, an output or gradient that is not assigned; in
            a call, an argument of another dtype, device or kind, and shapes that do not broadcast.
        CompileError: at the first launch, where the C does not compile; it shows the line.

    Example:
        >>> swish = cupyops.elementwise(
        ...     "swish(T x, float beta = 1.0) -> T y",
        ...     "y = x * sigmoid(beta * x)",
        ...     "float s = sigmoid(beta * x); grad_x = grad_y * s * (1 + beta * x * (1 - s))",
        ... )
        >>> x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
        >>> swish(x, beta=2.0)
        tensor([-0.1192,  0.0000,  0.8808], grad_fn=<...>)
    """
    module, folder = caller()
    declaration = parse(signature, module)
    body = Body(f"{declaration.short}.forward", forward)
    unit = Unit(declaration.short, preamble, folder, options, dtypes_of(dtypes))
    if reference is None:
        meaning = references.forward(declaration, body)
    else:
        meaning = references.given(declaration, reference)
        check_assigned(body, [one.name for one in declaration.outputs])
    gradient = None
    if backward is not None:
        gradient = Gradient(declaration, Body(f"{declaration.short}.backward", backward))
        derivative = references.backward(gradient) if reference is None else None
    sharding = shardings.pointwise(len(declaration.tensors), len(declaration.outputs))
    op = operator(declaration.name, autocast=autocast, sharding=sharding)(meaning)
    op.forward(
        _forward(
            declaration,
            kernels.pointwise(unit, "fwd", body, declaration.tensors, declaration.scalars, declaration.outputs),
        )
    )
    if gradient is not None:
        _set_backward(op, gradient, unit, derivative)
    return public(
        op, declaration, checker(declaration, unit.dtypes, promote), module, f"{signature.strip()}: {forward.strip()}"
    )


def _forward(declaration: Declaration, kernel: Kernel) -> Callable[..., Any]:
    """The launch of the forward kernel."""
    count, outputs = len(declaration.tensors), declaration.outputs

    def launch(*args: Any) -> Any:
        inputs = expanded(*args[:count])
        like = empty_output(*inputs)
        dtype = like.dtype
        found = [
            like if index == 0 and one.is_typed else torch.empty_like(like, dtype=one.dtype or dtype)
            for index, one in enumerate(outputs)
        ]
        if not is_dry(like) and like.numel():
            launch, walked = launched(FORWARD, like, inputs)
            launch.by(kernel)(*walked, *found, *args[count:], T=dtype)
        return found[0] if len(found) == 1 else tuple(found), ()

    return launch


def _set_backward(op: Operator, gradient: Gradient, unit: Unit, derivative: Callable[..., Any] | None) -> None:
    """The backward roles: of the kernel, and in PyTorch where that could be derived."""
    kernel = kernels.gradients(unit, "bwd", gradient.body, gradient.inputs, gradient.scalars, gradient.assigned)
    op.backward(gradient.role(lambda values: gradient.launch(kernel, values, values[gradient.first]), "needs_grad"))
    if derivative is not None:
        op.reference_backward(
            gradient.role(lambda values: derivative(values[gradient.first].shape, *gradient.given(values)))
        )
