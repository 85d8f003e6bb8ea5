"""From the reference's annotations to the schema by which torch.library knows an operator."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError


def typed_signature(
    name: str, reference: Callable[..., Any], mutates: Sequence[str] = ()
) -> tuple[list[inspect.Parameter], int]:
    """The parameters with their annotations resolved, and the number of outputs."""
    try:
        hints = typing.get_type_hints(reference)
    except NameError as error:
        raise InputError(
            f"{name}: an annotation of the reference cannot be resolved: {error}; import that name"
        ) from error
    parameters = []
    for given in inspect.signature(reference).parameters.values():
        if given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD):
            stars = "*" if given.kind is given.VAR_POSITIONAL else "**"
            raise InputError(
                f"{name}: {stars}{given.name} of the reference stands for any number of arguments, and an operator has a "
                "schema; give each of them a parameter of its own"
            )
        if given.kind is given.KEYWORD_ONLY:
            raise InputError(
                f"{name}: parameter {given.name} of the reference can be given by keyword alone, but an operator takes all "
                "its arguments in order: leave the * out, and make it keyword-only in an interface"
            )
        if given.name not in hints:
            raise InputError(f"{name}: parameter {given.name} of the reference needs a type annotation")
        if _holds_tensors(hints[given.name]):
            raise InputError(
                f"{name}: parameter {given.name} is a list of tensors; give each tensor a parameter of its own"
            )
        parameters.append(parameter(given.name, hints[given.name], given.default))
    if not any(is_tensor(one.annotation) for one in parameters):
        raise InputError(f"{name}: the reference has no parameter annotated Tensor, expected one at least")
    count = _outputs(name, hints.get("return", inspect.Parameter.empty), parameters, mutates)
    try:
        arguments(
            parameters, mutates
        )  # refuses what torch.library cannot express, now and not at the first torch.compile
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    return parameters, count


def _outputs(name: str, returned: Any, parameters: Sequence[inspect.Parameter], mutates: Sequence[str]) -> int:
    """The number of outputs, as the return annotation has it."""
    tensors = [one.name for one in parameters if one.annotation is Tensor]
    if wrong := [one for one in mutates if one not in tensors or list(mutates).count(one) > 1]:
        raise InputError(f"{name}: mutates names {wrong[0]!r}, expected each of some of: {', '.join(tensors)}")
    returns = typing.get_args(returned) if typing.get_origin(returned) is tuple else (returned,)
    if mutates and returned is type(None):
        return len(mutates)
    if any(one is not Tensor for one in returns):
        shown = "nothing" if returned is inspect.Parameter.empty else returned
        hint = "; a number is returned as a tensor without dimensions" if {int, float, bool} & set(returns) else ""
        raise InputError(
            f"{name}: the reference is annotated to return {shown}, expected Tensor or a tuple of them{hint}"
        )
    if mutates and len(returns) != len(mutates):
        raise InputError(
            f"{name}: the reference returns {len(returns)} tensors, but an operator that works in place returns what it "
            f"mutates, or None: {', '.join(mutates)}; return these"
        )
    return len(returns)


def returns_nothing(reference: Callable[..., Any]) -> bool:
    """Whether it is annotated `-> None`."""
    return typing.get_type_hints(reference).get("return") is type(None)


def parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """An ordinary parameter."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, default=default)


def is_tensor(annotation: Any) -> bool:
    """Whether it says `Tensor` or `Tensor | None`."""
    return annotation is Tensor or (typing.get_origin(annotation) is not list and Tensor in typing.get_args(annotation))


def _holds_tensors(annotation: Any) -> bool:
    """Whether it says a list, tuple or dictionary of tensors: autograd follows none into an operator."""
    return any(one is Tensor or _holds_tensors(one) for one in typing.get_args(annotation)) and not is_tensor(
        annotation
    )


def optional(one: inspect.Parameter) -> inspect.Parameter:
    """The parameter as the backward op has it: no default, and None in the place of a tensor that is not needed."""
    annotation = typing.Optional[Tensor] if is_tensor(one.annotation) else one.annotation
    return one.replace(default=one.empty, annotation=annotation)


def arguments(parameters: Sequence[inspect.Parameter], mutates: Sequence[str] = ()) -> str:
    """The arguments of a torch.library schema: `(Tensor x, SymInt[] stride)`; `Tensor(a0!) x` for one that is mutated."""

    def stub() -> None: ...

    # torch.library infers no default for a list, nor for what stands before one; our calls always give every argument
    plain = all(not isinstance(one.default, (list, tuple)) for one in parameters)
    listed = [
        one.replace(annotation=_spelled(one.annotation), default=one.default if plain else one.empty)
        for one in parameters
    ]
    stub.__signature__ = inspect.Signature(listed, return_annotation=Tensor)  # type: ignore[attr-defined]
    try:
        return torch.library.infer_schema(stub, mutates_args=tuple(mutates)).rpartition(" -> ")[0]
    except ValueError as error:
        message = re.sub(r"The valid types are: .*", "", str(error), flags=re.DOTALL)
        raise InputError(
            f"torch.library has no schema for these parameters: {message.strip()}; "
            "use tensors, numbers, strings and lists of them"
        ) from error


def _spelled(annotation: Any) -> Any:
    """`list[int]` and `X | None` as torch.library spells them."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return Sequence[inner[0]]  # type: ignore[valid-type]
    if type(None) in inner:
        return typing.Optional[_spelled(next(one for one in inner if one is not type(None)))]
    return annotation
