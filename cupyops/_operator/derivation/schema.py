"""Schema of an operator for torch.library, from the reference's annotations."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError

NOTHING: Mapping[str, Sequence[str]] = MappingProxyType({})


def typed_signature(
    name: str, reference: Callable[..., Any], mutates: Sequence[str] = ()
) -> tuple[list[inspect.Parameter], int]:
    """The parameters with their annotations resolved, and the number of outputs."""
    parameters, hints = typed_parameters(name, reference), _hints(name, reference)
    if not any(is_tensor(one.annotation) for one in parameters):
        raise InputError(f"{name}: the reference has no parameter annotated Tensor, expected one at least")
    count = _outputs(name, hints.get("return", inspect.Parameter.empty), parameters, mutates)
    try:
        # refuses what torch.library cannot express, now and not at the first torch.compile
        arguments(parameters, mutates)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    return parameters, count


@functools.lru_cache(maxsize=8)  # asked by the definition of an operator, more than once
def _hints(name: str, reference: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(reference)
    except NameError as error:
        raise InputError(
            f"{name}: an annotation of the reference cannot be resolved: {error}; import that name"
        ) from error


def typed_parameters(name: str, reference: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters with their annotations resolved."""
    hints = _hints(name, reference)
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
        if _holds_tensors(hints[given.name]) and in_list(hints[given.name]) is None:
            raise InputError(
                f"{name}: parameter {given.name} is annotated {hints[given.name]}; put tensors into a list[Tensor], "
                "list[Tensor | None] or list[Tensor] | None, or make them parameters of their own"
            )
        parameters.append(parameter(given.name, hints[given.name], given.default))
    return parameters


def bind(
    name: str, parameters: Sequence[inspect.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Arguments in the order of the parameters, defaults filled in. `axis` is `dim` where there is a `dim`."""
    values = list(args)
    if len(values) > len(parameters):
        raise TypeError(f"{name} takes {len(parameters)} argument{'s' * (len(parameters) != 1)}, got {len(values)}")
    left = dict(kwargs)
    if "axis" in left and "dim" not in left and any(one.name == "dim" for one in parameters):
        left["dim"] = left.pop("axis")
    for one in parameters[len(values) :]:
        if one.name not in left and one.default is inspect.Parameter.empty:
            got = f"; it got {', '.join(left)}" if left else ""
            raise TypeError(f"{name} misses the argument {one.name!r}{got}")
        values.append(left.pop(one.name) if one.name in left else one.default)
    if left:
        raise TypeError(f"{name} got an unexpected or repeated argument {next(iter(left))!r}")
    return tuple(values)


_NUMBERS: Mapping[Any, tuple[tuple[type, ...], str]] = MappingProxyType(
    {  # by annotation: what a kernel takes, and its name in messages
        int: ((int, np.integer, torch.SymInt), "an int"),
        float: ((float, int, np.integer, np.floating, torch.SymInt, torch.SymFloat), "a number"),
        bool: ((bool, int, np.bool_, torch.SymBool), "a bool"),
        str: ((str,), "a str"),
        torch.dtype: ((torch.dtype,), "a torch.dtype"),
    }
)


def plain(parameters: Sequence[inspect.Parameter]) -> list[tuple[int, Any, tuple[type, ...], str]]:
    """The parameters that are numbers and the like: (place, the usual type, all that it may be, that in words).

    Of a list of such the types are those of its elements.
    """
    found: list[tuple[int, Any, tuple[type, ...], str]] = []
    for index, one in enumerate(parameters):
        optional = may_be_none(one.annotation)
        inner = typing.get_args(one.annotation) if optional else (one.annotation,)
        kind = next(x for x in inner if x is not type(None))
        if typing.get_origin(kind) in (list, Sequence) and (of := typing.get_args(kind)[0]) in _NUMBERS:
            types_, words = _NUMBERS[of]
            found.append((index, list, types_, f"a list of {words.split()[-1]}s" + " or None" * optional))
        elif kind in _NUMBERS:
            types_, words = _NUMBERS[kind]
            found.append((index, kind, (*types_, type(None)) if optional else types_, words + " or None" * optional))
    return found


def check_takes(
    name: str, parameters: Sequence[inspect.Parameter], role: str, launch: Callable[..., Any], needs_grad: bool = False
) -> None:
    """A role takes the reference's arguments, in their order. Raises `InputError` where it has other parameters."""
    try:
        given = inspect.signature(launch).parameters
    except (TypeError, ValueError):  # a function of C, which does not say
        return
    expected = [one.name for one in parameters]
    asked = {"needs_grad": None} if needs_grad and "needs_grad" in given else {}
    names = [one for one in given if one not in asked]
    try:
        inspect.signature(launch).bind(*expected, **asked)
        if names == expected or sorted(names) != sorted(expected):
            return
    except TypeError:
        pass
    also = ", and needs_grad=None where it asks for that" if needs_grad else ""
    raise InputError(
        f"{name}: {role} takes ({', '.join(map(str, given.values()))}), expected what the reference takes, in "
        f"its order{also}: ({', '.join(expected)})"
    )


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
    """Return True if the function is annotated `-> None`."""
    return typing.get_type_hints(reference).get("return") is type(None)


def parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """An ordinary parameter."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, default=default)


def is_tensor(annotation: Any) -> bool:
    """Return True if the annotation is `Tensor` or `Tensor | None`."""
    return annotation is Tensor or (may_be_none(annotation) and Tensor in typing.get_args(annotation))


def in_list(annotation: Any) -> Any:
    """Return the annotation of the entries of a list of tensors; None for other annotations."""
    inner = typing.get_args(annotation)
    if may_be_none(annotation):
        return in_list(next(one for one in inner if one is not type(None)))
    listed = typing.get_origin(annotation) in (list, Sequence)
    return inner[0] if listed and inner and is_tensor(inner[0]) else None


def may_be_none(annotation: Any) -> bool:
    """Return True if the annotation allows None."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in typing.get_args(
        annotation
    )


def _holds_tensors(annotation: Any) -> bool:
    """Return True if the annotation is a list, tuple or dictionary of tensors."""
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
