"""Operators with lists of tensors among their parameters: of each length of the lists, an operator of single tensors.

So what is derived of an operator knows single tensors alone: gradients, plans, the op in torch.library, the checks. The
author's functions see lists; between the two stand functions of as many parameters as there are tensors.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._util import torch_private
from ..errors import InputError
from .derivation import schema
from .operator import Operator, registered

Lengths = tuple[int | None, ...]
_NAME = re.compile(r"_of_((?:\d+|none)(?:_(?:\d+|none))*)(?:_functional)?(?:_backward)?")


class OperatorOfLists(Operator):
    """An operator whose parameters are tensors and lists of tensors, of any length.

    What `torch.ops` has are the operators of single tensors: `mylib::total_of_3` for calls with three.
    """

    def __init__(
        self, name: str, reference: Callable[..., Any], parameters: Sequence[inspect.Parameter], **options: Any
    ):
        self.parameters = list(parameters)
        self.lists = {
            i: found for i, one in enumerate(parameters) if (found := schema.in_list(one.annotation)) is not None
        }
        self._returned = typing.get_type_hints(reference).get("return", inspect.Parameter.empty)
        self._returns_list = schema.in_list(self._returned) is not None
        self._given: list[
            tuple[str, Callable[..., Any], dict[str, Any]]
        ] = []  # the roles, to be given to each operator
        self._author, self._options = reference, options
        self.by_lengths: dict[Lengths, Operator] = {}
        functools.update_wrapper(self, reference)
        self._defined_in = getattr(reference, "__module__", "") or ""
        self.name, self.reference, self.public = name, reference, self
        self.of(tuple(1 for _ in self.lists))  # which refuses now what no length would do
        registered(name, self)
        namespace, _, short = name.partition("::")
        torch_private.ask_for_family(namespace, f"{short}_of_", self._asked_for)

    @property
    def definition(self) -> Any:  # type: ignore[override]
        """Definition for lists of one tensor: for what does not depend on the lengths."""
        return self.of(tuple(1 for _ in self.lists)).definition

    def of(self, lengths: Lengths) -> Operator:
        """The operator of single tensors for lists of these lengths; None for a list that is None."""
        found = self.by_lengths.get(lengths)
        if found is None:
            flat = _Flat(self, lengths)
            end = "_".join("none" if one is None else str(one) for one in lengths)
            options: dict[str, Any] = {
                option: flat.names(value) if option in ("mutates", "updates", "mixed") else value
                for option, value in self._options.items()
            }
            found = Operator(f"{self.name}_of_{end}", flat.reference(self._author), **options)
            for role, function, more in self._given:
                flat.give(found, role, function, more)
            self.by_lengths[lengths] = found
        return found

    def _asked_for(self, name: str) -> None:
        """An op is asked for by its name, as where an exported program is loaded."""
        if (match := _NAME.fullmatch(name, len(self.name.partition("::")[2]))) is not None:
            lengths = tuple(None if one == "none" else int(one) for one in match.group(1).split("_"))
            if len(lengths) == len(self.lists):
                self.of(lengths)

    # --- the roles: those of the author, kept for the operators that are to come ---

    def _give(self, role: str, function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        if role in ("forward", "unsupported", "fake"):
            schema.check_takes(self.name, self.parameters, role, function, needs_grad=role == "forward")
        self._given = [one for one in self._given if one[0] != role] + [(role, function, more)]
        for lengths, found in self.by_lengths.items():
            _Flat(self, lengths).give(found, role, function, more)
        return function

    def forward(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Set the forward role, like `Operator.forward`; lists of tensors come as lists, and outputs may be one."""
        return self._give("forward", launch)

    def backward(
        self,
        launch: Callable[..., Any] | None = None,
        *,
        reads: Mapping[str, Sequence[str]] = schema.NOTHING,
        apart: bool = False,
    ) -> Any:
        """Set the backward role, like `Operator.backward`; a list's gradient is a list or None, its `needs_grad` a tuple."""
        if launch is None:
            return functools.partial(self.backward, reads=reads, apart=apart)
        return self._give("backward", launch, reads=reads, apart=apart)

    def reference_backward(self, gradient: Callable[..., Any]) -> Callable[..., Any]:
        """Set the role, like `Operator.reference_backward`, with lists as backward has them."""
        return self._give("reference_backward", gradient)

    def unsupported(self, reason: Callable[..., str | None]) -> Callable[..., str | None]:
        """Set the role, like `Operator.unsupported`; lists of tensors come as lists."""
        return self._give("unsupported", reason)

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the role, like `Operator.fake`; lists of tensors come as lists, and outputs may be returned as one."""
        return self._give("fake", function)

    # --- the call ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self.parameters):
            args = schema.bind(self.name, self.parameters, args, kwargs)
        flat: list[Any] = []
        lengths: list[int | None] = []
        for index, value in enumerate(args):
            if index not in self.lists:
                flat.append(value)
            elif isinstance(value, (list, tuple)):
                flat.extend(value)
                lengths.append(len(value))
            elif value is None and schema.may_be_none(self.parameters[index].annotation):
                lengths.append(None)
            else:
                raise InputError(
                    f"{self.name}: {self.parameters[index].name} is {type(value).__name__}, expected a list of tensors"
                )
        if is_dynamo_compiling():
            _make(self.name, *lengths)
        found = self.of(tuple(lengths))(*flat)
        if not self._returns_list:
            return found
        return [found] if isinstance(found, Tensor) or not isinstance(found, (list, tuple)) else list(found)


def _make(name: str, *lengths: int | None) -> bool:
    """Make the operator for these lengths, if there is none; torch.compile calls it and does not look inside."""
    of = registered(name)
    assert isinstance(of, OperatorOfLists)
    of.of(lengths)
    return True


_make._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result


class _Flat:
    """Between an author's functions, which take lists of some lengths, and functions of single tensors."""

    def __init__(self, of: OperatorOfLists, lengths: Lengths) -> None:
        self.of = of
        left = iter(lengths)
        # of each parameter its own name, or those of its tensors; None where the list is None
        self.parts: dict[str, list[str] | str | None] = {}
        self.parameters: list[inspect.Parameter] = []
        for index, one in enumerate(of.parameters):
            if index not in of.lists:
                self.parts[one.name] = one.name
                self.parameters.append(one.replace(default=one.empty))
                continue
            length = next(left)
            names = None if length is None else [f"{one.name}_{number}" for number in range(length)]
            self.parts[one.name] = names
            self.parameters += [schema.parameter(name, of.lists[index]) for name in names or ()]
        flat = [one.name for one in self.parameters]
        if twice := [name for name in flat if flat.count(name) > 1]:
            raise InputError(f"{of.name}: {twice[0]} is a parameter, and what a tensor of a list is called; rename it")
        first = next(iter(lengths))
        self.outputs = (first or 0) if of._returns_list else None

    def names(self, given: Sequence[str]) -> tuple[str, ...]:
        """Names of parameters, with those of its tensors in the place of each list."""
        found: list[str] = []
        for name in given:
            part = self.parts.get(name, name)
            found += [] if part is None else [part] if isinstance(part, str) else part
        return tuple(found)

    def nested(self, values: Sequence[Any]) -> list[Any]:
        """Single values as the author's parameters have them."""
        left = iter(values)
        return [
            None if part is None else next(left) if isinstance(part, str) else [next(left) for _ in part]
            for part in self.parts.values()
        ]

    def outputs_of(self, found: Any) -> Any:
        """A list of outputs as a tuple; of one, itself."""
        if self.outputs is None or found is None:
            return found
        if not isinstance(found, (list, tuple)) or len(found) != self.outputs:
            raise InputError(
                f"{self.of.name}: the outputs are {type(found).__name__}"
                f"{f' of {len(found)}' if isinstance(found, (list, tuple)) else ''}, expected a list of {self.outputs}: as "
                "many tensors as the first list of the arguments has"
            )
        return found[0] if self.outputs == 1 else tuple(found)

    def reference(self, author: Callable[..., Any]) -> Callable[..., Any]:
        """The reference of single tensors."""
        returned: Any = self.of._returned
        if self.outputs is not None:
            returned = Tensor if self.outputs == 1 else tuple[(Tensor,) * self.outputs]  # type: ignore[misc]
        shown = self._shown(author, lambda *args: self.outputs_of(author(*self.nested(args))), self.parameters)
        shown.__annotations__ = {one.name: one.annotation for one in self.parameters} | {"return": returned}
        return shown

    def give(self, op: Operator, role: str, author: Callable[..., Any], more: dict[str, Any]) -> None:
        """Give an operator of single tensors one of the author's roles."""
        if role in ("backward", "reference_backward"):
            function = self._backward(author)
        elif role == "unsupported":
            function = self._shown(author, lambda *args: author(*self.nested(args)), self.parameters)
        else:
            function = self._forward(author)
        if "reads" in more:
            more = {
                **more,
                "reads": {one: self.names(by) for name, by in more["reads"].items() for one in self.names([name])},
            }
        given = getattr(op, role)
        given(function, **more) if more else given(function)

    def _forward(self, author: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **asked: Any) -> Any:
            if asked.get("needs_grad") is not None:
                asked["needs_grad"] = self._needs(asked["needs_grad"])
            found = author(*self.nested(args), **asked)
            pair = isinstance(found, (tuple, list)) and len(found) == 2
            return (self.outputs_of(found[0]), found[1]) if pair else found

        asks = [one for name, one in inspect.signature(author).parameters.items() if name == "needs_grad"]
        return self._shown(author, forward, [*self.parameters, *asks])

    def _backward(self, author: Callable[..., Any]) -> Callable[..., Any]:
        """A backward that is given, and gives, single tensors."""
        parts: list[list[str] | str | None] = []
        outputs: list[str] | None = None
        for place, name in enumerate(inspect.signature(author).parameters):
            if place == 1 and self.outputs is not None:
                outputs = [f"{name.removeprefix('grad_')}_{number}" for number in range(self.outputs)]
                parts.append([f"grad_{one}" for one in outputs])
            elif outputs and self.parts.get(name) is None and name == outputs[0].rpartition("_")[0]:
                parts.append(outputs)
            else:
                parts.append(self.parts.get(name, name))

        def backward(*values: Any) -> Any:
            left = iter(values)
            given = [
                None if part is None else next(left) if isinstance(part, str) else [next(left) for _ in part]
                for part in parts
            ]
            for index, part in enumerate(parts):
                if part == "needs_grad":
                    given[index] = self._needs(given[index])
            return self._gradients(author(*given))

        flat = [name for part in parts for name in ([] if part is None else [part] if isinstance(part, str) else part)]
        return self._shown(author, backward, [schema.parameter(name, None) for name in flat])

    def _gradients(self, found: Any) -> Any:
        """Flatten what a backward of the author's returns into a gradient for each tensor, in order."""
        if found is None:
            return None
        tensors = [
            one for one in self.of.parameters if schema.is_tensor(one.annotation) or schema.in_list(one.annotation)
        ]
        found = (found,) if isinstance(found, Tensor) else found
        in_tuple = len(found) == 1 and (found[0] is None or isinstance(found[0], (list, tuple)))
        if len(tensors) == 1 and not in_tuple:
            found = (found,)  # of the only list, in no tuple
        if len(found) > len(tensors):
            raise InputError(
                f"{self.of.name}: backward gave {len(found)} gradients, expected one for each of {len(tensors)} tensors and "
                "lists"
            )
        flat: list[Any] = []
        for one, gradient in zip(tensors, (*found, *[None] * len(tensors))):
            part = self.parts[one.name]
            if isinstance(part, str):
                flat.append(gradient)
            elif part is not None:
                gradients = [None] * len(part) if gradient is None else gradient
                if not isinstance(gradients, (list, tuple)) or len(gradients) != len(part):
                    raise InputError(
                        f"{self.of.name}: backward returned {type(gradient).__name__} for {one.name}, expected a list of "
                        f"{len(part)} gradients, or None"
                    )
                flat += gradients
        return tuple(flat)

    def _needs(self, needs: Any) -> Any:
        """`needs_grad` as the author's parameters have it: of a list, a tuple of bools."""
        left = iter(needs)
        given = {
            name: () if part is None else next(left) if isinstance(part, str) else tuple(next(left) for _ in part)
            for name, part in self.parts.items()
        }
        return _needs_type(tuple(given))(**given)

    def _shown(
        self, author: Callable[..., Any], function: Callable[..., Any], parameters: Sequence[inspect.Parameter]
    ) -> Any:
        """`function` under the author's name, with these parameters to be seen; plans look at the author's globals."""

        @functools.wraps(author)
        def shown(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        shown.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return shown


@functools.cache
def _needs_type(names: tuple[str, ...]) -> Any:
    return namedtuple("NeedsGrad", names)  # type: ignore[misc]
