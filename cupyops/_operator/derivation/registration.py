"""The registered route: an operator as `ns::name` and `ns::name_backward` in torch.library.

Both return `Tensor[]`: the outputs, the new values of what is updated, and what is saved; the gradients that are needed. One
that works in place has an op that mutates its arguments, and beside it `ns::name_functional`, which leaves them alone. CPU,
CUDA, fake tensors and autograd are served, from the same roles as the eager route. The one user of torch.library.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..._kernel.launch import versions
from ..._util import callers, symbolic, torch_private
from ..._util.strides import is_dry, restride
from ...errors import InputError
from . import cache_tag, schema
from .definition import Definition, NoKernel, differentiable_alias, like_outputs, wants_gradient
from .kept import Kept, by_kernels, by_reference
from .unsaved import unsaved

_waiting: dict[str, Registration] = {}  # by the qualified name of the op
_known: dict[str, Registration] = {}  # by name, those that PyTorch knows: each is what it was registered as, for good
_registering = threading.RLock()


def register(name: str) -> bool:
    """Register the ops of the name `name`, if they wait for that; True.

    torch.compile calls it while it traces, as a function of a constant, and does not look inside.
    """
    with _registering:
        if (found := _waiting.pop(name, None)) is not None:
            found.register()
    if (known := _known.get(name)) is not None:
        known.tag()
    return True


register._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result, which
# imports the compiler


ROLES = ("", "_backward", "_functional", "_functional_backward")
"""Suffixes of the names of an operator's ops."""


def _another(name: str) -> str:
    """A name like this one, which no op has."""
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(one for one in numbered if one not in _known and one not in _waiting)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return decompositions of our ops into PyTorch's, for `ExportedProgram.run_decompositions` and `make_fx`.

    Returns a dictionary: an op of torch.ops, of each operator that PyTorch knows (after a graph with it has been made), and
    a function that computes it by the operator's reference. torch.onnx.export needs no table.

    >>> class Model(torch.nn.Module):
    ...     def forward(self, x):
    ...         return cupyops.gelu(x)
    >>> program = torch.export.export(Model(), (torch.ones(3),))
    >>> table = {**torch.export.default_decompositions(), **cupyops.decompositions()}
    >>> nodes = program.run_decompositions(table).graph.nodes
    >>> print(*(node.target for node in nodes if node.op == "call_function"))
    aten.gelu.default
    """
    from . import tables

    with _registering:
        return {known.op: tables.decomposition(known.of) for known in _known.values() if "op" in known.__dict__}


def inside(op: Any) -> Callable[..., Any] | None:
    """Return the function of an op of ours below autograd, on tensors with memory; None for other ops and in-place ones.

    Unlike the op's, its results may share memory with the arguments.
    """
    schema_of = getattr(op, "_schema", None)
    name = "" if schema_of is None else schema_of.name
    for end in ("_backward", ""):
        found = _known.get(name.removesuffix(end))
        if found is not None and not found.of.mutated and name == f"{found.name}{end}":
            return found.backward_below if end else found.forward_with_defaults
    return None


class Registration:
    """The ops of one Definition, registered when they are first asked for: here, in torch.ops or by torch.compile.

    Compiled and exported graphs, and those that wait for their backward, know an op by its name. So a name that PyTorch
    knows stays what it is, and another definition of the operator is an op of another `name`.
    """

    library: torch.library.Library
    op: Any
    backward_op: Any
    in_place: Any

    def __init__(self, of: Definition) -> None:
        self.of = of
        self._tagged_roles: list[Any] = []
        with _registering:
            self._wait(of.name if of.name not in _known else _another(of.name))
        if self.name != of.name:
            warnings.warn(
                f"{of.name} is defined anew after PyTorch has come to know it, as by torch.compile: graphs that were made "
                f"with the operator before keep it, and in torch.ops this one is {self.name}",
                stacklevel=callers.outside(),
            )

    def _wait(self, name: str) -> None:
        """Announce the ops under this name, to be registered when they are first asked for."""
        self.name = name
        _waiting[name] = self
        namespace, _, short = name.partition("::")
        names = [f"{short}{more}" for more in ROLES]
        torch_private.ask_when_missing(namespace, names, lambda: register(name))

    def __getattr__(self, name: str) -> Any:
        if name not in ("library", "op", "backward_op", "in_place"):
            raise AttributeError(name)
        register(self.name)
        return self.__dict__[name]

    def register(self) -> None:
        """Tell torch.library."""
        of = self.of
        _known[self.name] = self
        namespace, _, name = self.name.partition("::")
        self.library = torch.library.Library(namespace, "FRAGMENT")
        if of.mutated:
            self.in_place = self._define_in_place(namespace, name)
            name = f"{name}_functional"
        self.library.define(f"{name}{schema.arguments(of.parameters)} -> Tensor[]")
        lists = [schema.parameter(one, Sequence[Tensor]) for one in ("grad_outputs_", "outputs_", "saved_")]
        needs = schema.parameter("needs_grad_", Sequence[bool])
        backward = schema.arguments([*lists, *map(schema.optional, of.parameters), needs])
        self.library.define(f"{name}_backward{backward} -> Tensor[]")
        for key in ("CPU", "CUDA"):
            self.library.impl(name, self._forward, key)
            self.library.impl(f"{name}_backward", self._backward, key)
        qualified = f"{namespace}::{name}"
        torch.library.register_fake(qualified, self._tagged(self._forward), lib=self.library)
        torch.library.register_fake(f"{qualified}_backward", self._backward, lib=self.library)
        torch.library.register_autograd(qualified, self._differentiate, setup_context=self._setup, lib=self.library)
        torch.library.register_autograd(
            f"{qualified}_backward", self._differentiate_twice, setup_context=self._setup_twice, lib=self.library
        )
        self.op = getattr(getattr(torch.ops, namespace), name).default
        self.backward_op = getattr(getattr(torch.ops, namespace), f"{name}_backward").default
        from . import tables  # which imports the counter

        tables.enter(of, self.op, self.backward_op)
        recorder = torch_private.ProxyTorchDispatchMode
        torch.library.register_torch_dispatch(qualified, recorder, tables.recording(of), lib=self.library)

    def tag(self) -> None:
        """Have what the operator is in torch.compiler's cache keys: a graph is about to be made with it."""
        roles = self.of.roles()
        if roles != self._tagged_roles:
            self._tagged_roles = roles
            cache_tag.enter(self.name, roles)
        cache_tag.put()

    def _tagged(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """`fake`, which a graph with the op runs before its key is made, be it made by way of torch.ops."""

        @functools.wraps(fake)
        def tagged(*args: Any, **kwargs: Any) -> Any:
            self.tag()
            return fake(*args, **kwargs)

        return tagged

    def call(self, args: tuple[Any, ...]) -> Any:
        """The operator through PyTorch's dispatcher."""
        if self.of.mutated:
            self.in_place(*args)
            return self.of.returned(self.of.changed(args))
        outputs = self.op(*args)
        for index, value in zip(self._updated(args), outputs[self.of.outputs :]):
            args[index].copy_(value.detach())
        return self.of.without_history(outputs[0] if self.of.outputs == 1 else tuple(outputs[: self.of.outputs]))

    def _updated(self, args: Sequence[Any]) -> list[int]:
        """Indices of the updated arguments. The op leaves them alone, and returns their new values behind its outputs."""
        return [index for index in self.of.updated if args[index] is not None]

    def give_way(self) -> None:
        """Leave the name to another definition (a notebook cell run again), if PyTorch does not know it yet."""
        with _registering:
            if _waiting.pop(self.name, None) is not None:
                self._wait(_another(self.of.name))

    # --- in place: an op that mutates; where a gradient is wanted the op on copies, and PyTorch's own copy ---

    def _define_in_place(self, namespace: str, name: str) -> Any:
        self.library.define(f"{name}{schema.arguments(self.of.parameters, self.of.mutates)} -> ()")
        for key in ("CPU", "CUDA"):
            self.library.impl(name, self._mutate, key)
        self.library.impl(name, self._mutate_differentiably, "Autograd")
        torch.library.register_fake(self.name, self._tagged(self._mutate), lib=self.library)
        return getattr(getattr(torch.ops, namespace), name).default

    def _mutate(self, *args: Any, **kwargs: Any) -> None:
        args = self.of.bind(args, kwargs)
        if self.of.why_not(args) is None:
            self.of.run_forward(args)
        else:
            self.of.run_reference(args)
            versions.raise_all(self.of.changed(args))

    def _mutate_differentiably(self, *args: Any, **kwargs: Any) -> None:
        args = self.of.bind(args, kwargs)
        if wants_gradient(self.of.given(args)):
            for tensor, value in zip(self.of.changed(args), self.op(*self._with_copies(args))):
                tensor.copy_(value)
        else:
            with torch_private.below_autograd():
                self.in_place(*args)

    def _with_copies(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, with a copy of each tensor that is changed."""
        return [value.clone() if index in self.of.mutated else value for index, value in enumerate(args)]

    # --- below autograd: real tensors, and fake ones for shapes ---

    def _forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        args = self.of.bind(args, kwargs)
        return self._forward_of_copies(args) if self.of.mutated else _fresh(self.forward_below(*args), args)

    def forward_with_defaults(self, *args: Any) -> list[Tensor]:
        """`forward_below`, without trailing arguments that equal their defaults."""
        return self.forward_below(*self.of.bind(args, {}))

    def forward_below(self, *args: Any) -> list[Tensor]:
        """Return the outputs, the new values of updated arguments, and the saved tensors."""
        copies = [value.clone() if index in self._updated(args) else value for index, value in enumerate(args)]
        updated = [copies[index] for index in self._updated(args)]
        if self.of.why_not(args) is None:
            with suppress(NoKernel):
                outputs, saved = self.of.run_forward(copies)
                return [*outputs, *updated, *saved]
        # as elsewhere, where PyTorch takes its functions apart above autograd: below it has other rules for symbolic sizes,
        # of which that of nll_loss gives another shape
        with torch_private.above_autograd(), torch.no_grad():
            found = self.of.run_reference(copies)
        return [*([found] if self.of.outputs == 1 else found), *updated, *unsaved(self.of, args)]

    def _forward_of_copies(self, args: tuple[Any, ...]) -> list[Tensor]:
        copies = self._with_copies(args)
        if self.of.why_not(args) is None:
            outputs, saved = self.of.run_forward(copies)
            return _fresh([*outputs, *saved], args)
        self.of.run_reference(copies)
        return _fresh([*self.of.changed(copies), *unsaved(self.of, args)], args)

    def _backward(self, grads: Any, outputs: Any, saved: Any, *rest: Any) -> list[Tensor]:
        return _fresh(self.backward_below(grads, outputs, saved, *rest), (*grads, *outputs, *saved, *rest[:-1]))

    def backward_below(self, grads: Any, outputs: Any, saved: Any, *rest: Any) -> list[Tensor]:
        """The gradients that are needed."""
        *args, needs = rest
        if self._refused_now(args) is not None:
            found = self._by_reference(grads, by_reference(args), needs)
            found = self._laid_out(found, grads, outputs, saved, args, needs)
            return [grad for grad in found if grad is not None]
        all_outputs = self.of.kept(needs).all_outputs(outputs)
        with torch_private.above_autograd(), torch.no_grad():  # a role may differentiate something itself
            found = self.of.run_backward(grads, all_outputs, tuple(saved), args, needs)
        missing = [one.name for one, need, grad in zip(self.of.parameters, needs, found) if need and grad is None]
        if missing:
            raise InputError(f"{self.of.name}: backward gave no gradient for {', '.join(missing)}; return one for each")
        return [grad for grad in found if grad is not None]

    def _refused_now(self, args: Sequence[Any]) -> str | None:
        """Return why the kernels do not serve these sizes, which a graph may have been made for, or None."""
        known = self.of.refusal is not None and all(args[index] is not None for index in self.of.required)
        return self.of.refused(args) if known else None

    def _by_reference(self, grads: Any, args: Any, needs: Any) -> list[Tensor | None]:
        """The gradients through the reference, below autograd: in the backward of a graph that was made for kernels."""
        with torch_private.above_autograd(), torch.no_grad():
            return self.of.reference_gradient(list(grads), args, needs)

    def _laid_out(
        self, found: list[Tensor | None], grads: Any, outputs: Any, saved: Any, args: Any, needs: Any
    ) -> list[Tensor | None]:
        """Lay gradients out as the kernels would, which a graph that was made for other sizes counts on."""
        given = [list(grads), list(outputs), list(saved), list(args)]
        if not is_dry(grads[0]):
            examples = iter(symbolic.examples([one for group in given for one in group]))
            given = [[next(examples) for _ in group] for group in given]
        all_outputs = self.of.kept(needs).all_outputs(given[1])
        try:
            alike = self.of.run_backward(given[0], all_outputs, tuple(given[2]), given[3], needs)
        except Exception:  # it relies on having been refused
            return found
        pairs = zip(found, alike, strict=True)
        return [one if one is None or like is None else restride(one, like.stride()) for one, like in pairs]

    # --- autograd ---

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        count = self.of.outputs
        ctx.by_kernels = self.of.why_not(inputs) is None and self.of.launch_backward is not None
        kept = self._choose_kept(ctx)
        ctx.values = kept.values(inputs)
        ctx.strides = [y.stride() for y in output[:count]]
        saved = output[count + len(self._updated(inputs)) :]
        ctx.save_for_backward(*kept.pack(inputs, output, saved if ctx.by_kernels else ()))

    def _choose_kept(self, ctx: Any) -> Kept:
        if not ctx.by_kernels:
            return self.of.kept_by_reference
        # of trailing arguments that equal their defaults nothing is said, since they need no gradient
        needs = [*_needed(ctx), *[False] * self.of.arity][: self.of.arity]
        return self.of.kept(needs)

    def _differentiate(self, ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        # the dispatcher leaves out trailing arguments that equal their defaults, and wants no gradient for them
        given = len(ctx.needs_input_grad)
        needs = [*_needed(ctx), *[False] * (self.of.arity - given)]
        grads = grads[: self.of.outputs]
        args, outputs, saved = self._choose_kept(ctx).unpack(ctx.values, ctx.saved_tensors)
        if not ctx.by_kernels:
            return _returned(ctx, self.of.reference_gradient(grads, args, needs)[:given])
        args = by_reference(args) if torch.is_grad_enabled() else by_kernels(args)
        kept = [y for y in outputs if y is not None]
        gradients = iter(self.backward_op(like_outputs(grads, ctx.strides), kept, list(saved), *args, needs))
        return _returned(ctx, [next(gradients) if need else None for need in needs[:given]])

    def _setup_twice(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        grads, outputs, saved, *args, needs = inputs
        ctx.needs = needs
        ctx.counts = (len(grads), len(outputs), len(saved))
        ctx.values = [None if isinstance(a, Tensor) else a for a in args]
        ctx.save_for_backward(*grads, *outputs, *saved, *(args[i] for i in self.of.tensors))

    def _differentiate_twice(self, ctx: Any, grad_gradients: list[Tensor]) -> tuple[Any, ...]:
        n_grads, n_outputs, n_saved = ctx.counts
        with torch.enable_grad():
            tensors = [None if t is None else differentiable_alias(t) for t in ctx.saved_tensors]
            grads, tensors = tensors[:n_grads], tensors[n_grads:]
            outputs, tensors = tensors[:n_outputs], tensors[n_outputs:]
            saved, inputs = tensors[:n_saved], tensors[n_saved:]
            args = list(ctx.values)
            for index, tensor in zip(self.of.tensors, inputs):
                args[index] = tensor
            all_outputs = self.of.kept(ctx.needs).all_outputs(outputs)
            found = self.of.differentiable_backward(grads, all_outputs, tuple(saved), args, ctx.needs)
            sources = [t for t in (*grads, *outputs, *inputs) if t is not None and t.requires_grad]
            gradients = [grad for grad in found if grad is not None]
            second = torch.autograd.grad(gradients, sources, grad_gradients, create_graph=True, allow_unused=True)
        gradient = {id(t): g for t, g in zip(sources, second)}
        to_args: list[Any] = [None] * self.of.arity
        for index, tensor in zip(self.of.tensors, inputs):
            to_args[index] = gradient.get(id(tensor))
        to_grads, to_outputs = ([gradient.get(id(t)) for t in group] for group in (grads, outputs))
        return (to_grads, to_outputs, [None] * n_saved, *to_args, None)


def _needed(ctx: Any) -> list[bool]:
    """Flags of the arguments: True if its gradient is wanted. PyTorch takes an empty list, of numbers too, for tensors."""
    return [need is True for need in ctx.needs_input_grad]


def _returned(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients; for an empty list an empty list."""
    return tuple([] if isinstance(need, list) else one for need, one in zip(ctx.needs_input_grad, gradients))


def _fresh(results: list[Tensor], inputs: Sequence[Any]) -> list[Tensor]:
    """An op of torch.library may not return an input, nor one tensor twice, nor a view of either: such a one is copied.

    So is one that is expanded, whose base is known of a fake tensor alone.
    """
    seen = {_storage(value) for value in inputs if isinstance(value, Tensor)}
    fresh = []
    for tensor in results:
        view = tensor._base is not None
        shared = _storage(tensor) in seen or (view and is_dry(tensor)) or _is_expanded(tensor)
        fresh.append(tensor.clone() if shared else tensor.detach() if view else tensor)
        seen.add(_storage(tensor))
    return fresh


def _is_expanded(tensor: Tensor) -> bool:
    return any(
        symbolic.known(stride == 0) and not symbolic.known(size == 1)
        for stride, size in zip(tensor.stride(), tensor.shape)
    )


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's storage, by which views are recognised: below autograd a view does not know its base."""
    return tensor.untyped_storage()._cdata
