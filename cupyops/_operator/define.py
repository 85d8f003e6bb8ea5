"""`operator`, which makes an operator of its reference: of single tensors, or of lists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import InputError
from .derivation import schema
from .derivation import sharding as shardings
from .derivation.autocast import POLICIES
from .lists import OperatorOfLists
from .operator import Operator


def operator(
    name: str,
    *,
    autocast: str | None = None,
    mutates: Iterable[str] = (),
    updates: Iterable[str] = (),
    mixed: Iterable[str] = (),
    dtypes: Iterable[torch.dtype] | torch.dtype | None = None,
    sharding: str | Callable[..., str] | None = None,
    nondifferentiable: Iterable[int] = (),
    nondeterministic: bool | str = False,
) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of its reference: the first of the three functions.

    Args:
        name: qualified, `"namespace::name"`; it is also the name of the op in `torch.ops`.
        autocast: `"lower"` (cast to the autocast dtype), `"fp32"` (on a GPU cast to float32, as softmax and norms are) or
            `"fp32_everywhere"` (on a CPU too, as losses are): what PyTorch's autocast does for an operator of this kind.
            Inputs are cast, and inside every role autocast is off, as `torch.amp.custom_fwd(cast_inputs=...)` has it.
            None: nothing is cast, and autocast is inside as it is outside.
        mutates: the parameters that the operator changes in place. They are its outputs: the reference returns them, in
            this order, or nothing, and so does every call. Its backward can name the outputs and not what they were before;
            without one the reference is differentiated, and a second derivative needs a `reference_backward`.
        updates: the parameters, each `Tensor | None`, that the reference and forward change in place beside what they
            return: statistics, on which no output and no gradient depends. Backward does not get them, and where the
            reference is differentiated, they are None. An operator has `mutates` or `updates`.
        mixed: the parameters that the kernels take in another floating-point dtype than the other tensors. Without that,
            calls that mix float16, bfloat16, float32 and float64 take the reference.
        dtypes: what the kernels take as the first tensor and as any other that is floating-point or complex; calls with
            others take the reference. None: what the kernels declare counts, be it integers, masks, complex numbers or
            float8. Calls of a floating-point dtype that they do not declare take the reference then, where nothing is
            changed in place; an integer of another width is an error of the launch.
        sharding: how the work on DTensors may be split: the dimensions of each tensor that goes in and comes out, as einsum
            names them, or a function of the reference's arguments that returns that. `"...k, nk, +n -> ...n"`, linear's:
            a small letter may be split over devices; one that no output has is summed over; a capital, as in
            `"...C, C -> ...C"`, is whole on each; `...` are dimensions that broadcast and may be split; `+` is before what
            is added once to a sum, `size=` before the sizes in a parameter of that name; `*` is a whole tensor, and `#` a
            seed, to which each device adds the number of its part. None: DTensors are gathered, and every device does all
            the work.
        nondifferentiable: the places of outputs that have no gradient though they are floating-point, as statistics that are
            reported: they require none, on any route, and backward gets zeros for each. Integers and bools never have one.
        nondeterministic: the kernels give other bits from call to call, as a sum by `atomicAdd` of floats does: True, or the
            reason in words. Under `torch.use_deterministic_algorithms(True)` calls then take the reference, and a backward
            of a forward that kernels have run before raises, as PyTorch's own do; with `warn_only=True` the kernels run, and
            each call warns. `cupyops.testing.check` tells where this is missing.

    Gradients are those of floating-point and complex tensors; an integer or a bool has None. Those of complex tensors follow
    PyTorch's convention: the conjugate of the derivative. A tensor with a conjugate or negative bit takes the reference.

    The reference is annotated: `Tensor`, `Tensor | None`, `int`, `float`, `bool`, `str`, `list[int]`, `torch.dtype`,
    `list[Tensor]` and
    their optional forms in; `Tensor` or a tuple of them out.

    Raises:
        InputError: a name, annotation, policy or dtype that cannot be used.

    Example:
        >>> @cupyops.operator("mylib::double")
        ... def double(x: Tensor) -> Tensor:
        ...     return 2 * x
        >>> @cupyops.operator("mylib::double_", mutates=("x",))
        ... def double_(x: Tensor) -> Tensor:
        ...     return x.mul_(2)
    """
    if callable(name):
        raise InputError(
            f'write @cupyops.operator("namespace::{getattr(name, "__name__", "my_op")}"): an operator has a name, by which '
            "torch.ops knows it"
        )
    if not isinstance(name, str):
        raise InputError(f'operator name {name!r} is no text such as "mylib::my_op"')
    namespace, _, short = name.partition("::")
    if not (namespace.isidentifier() and short.isidentifier()):
        raise InputError(f'operator name {name!r} is not of the form "namespace::name", such as "mylib::my_op"')
    if autocast not in POLICIES:
        raise InputError(f"autocast is {autocast!r}, expected one of {', '.join(map(repr, POLICIES))}")
    changed = (mutates,) if isinstance(mutates, str) else tuple(mutates)
    served = None if dtypes is None else (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if served is not None and (wrong := [one for one in served if not isinstance(one, torch.dtype)]):
        raise InputError(f"{name}: dtypes has {wrong[0]!r}, expected dtypes such as torch.float32")
    if changed and autocast is not None:
        raise InputError(
            f"{name}: autocast casts copies, which an operator that works in place would change in vain; "
            "leave autocast or mutates out"
        )
    rule = shardings.same(sharding) if isinstance(sharding, str) else sharding

    def make(reference: Callable[..., Any]) -> Operator:
        options: dict[str, Any] = {
            "autocast": POLICIES[autocast],
            "mutates": changed,
            "updates": tuple(updates),
            "mixed": tuple(mixed),
            "dtypes": served,
            "nondifferentiable": tuple(nondifferentiable),
            "nondeterministic": nondeterministic
            if isinstance(nondeterministic, str)
            else "as declared" * nondeterministic,
        }
        parameters = schema.typed_parameters(name, reference)
        if any(schema.in_list(one.annotation) is not None for one in parameters):
            if rule is not None:
                raise InputError(f"{name}: sharding has no rule for lists of tensors; leave it out")
            return OperatorOfLists(name, reference, parameters, **options)
        made = Operator(name, reference, **options)
        made.definition.sharding = rule
        return made

    return make
