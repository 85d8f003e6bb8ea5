"""The author's kit: write the operator in PyTorch, then give it kernels.

An operator is a reference (what it means, in PyTorch), a forward (the launch of its kernel) and a backward. Everything
else is derived, and each call takes one route:

    plain tensors where kernels run, no gradient wanted      forward
    the same, gradient wanted                                one autograd.Function around forward and backward
    backward under create_graph=True                         gradient through the reference
    torch.compile, export, FakeTensor, modes, subclasses     the registered torch.library op
    torch.func transform, forward-mode AD, torch.jit.trace   the reference
    CPU tensors, and what `unsupported` names                the reference

The first two are recorded and replayed for calls alike: see derivation/plans.py.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .._kernel.kernel import executors
from .._util import by_need, observed, torch_private, tracing
from .._util.by_name import ByName
from ..errors import InputError
from . import arrays
from .derivation import distributed, overrides, results
from .derivation.autocast import cast, dtype_for
from .derivation.autograd import differentiable
from .derivation.constants import MISS
from .derivation.definition import Definition, NoKernel, wants_gradient
from .derivation.plans import Plans
from .derivation.public import public
from .derivation.registration import ROLES, Registration, register

_ALL: Mapping[str, Sequence[str]] = MappingProxyType({})  # each tensor is read for every gradient
_PLAIN = frozenset((Tensor, Parameter))
_functorch_active = torch_private.functorch_active
_dispatch_modes = torch_private.dispatch_modes

_registry: dict[str, Operator] = {}


def operators() -> dict[str, Operator]:
    """The registry: qualified name -> `Operator`, built-in and user-defined alike."""
    by_need.load()
    return dict(_registry)


def registered(name: str, operator: Operator | None = None) -> Operator:
    """The operator of a name in the registry, which `operator` is from now on, if given."""
    if operator is not None:
        _refuse_names_of_roles(name)
        _registry[name] = operator
    return _registry[name]


def _refuse_names_of_roles(name: str) -> None:
    """`ns::f` is `ns::f_backward` too in torch.ops, where it has its gradient."""
    for end in filter(None, ROLES):
        of, role = name.removesuffix(end), end.strip("_").replace("_", " ")
        if of != name and of in _registry:
            raise InputError(
                f"{name} is what torch.ops calls the {role} op of {of}; choose another name, such as {of}_grad"
            )
        if f"{name}{end}" in _registry:
            raise InputError(
                f"{name}{end} is an operator already, and is what torch.ops would call the {role} op of {name}; give one of "
                "them another name"
            )


class Operator(ByName):
    """An operator: call it as a function; complete it with `.forward`, `.backward` and, where useful, the other roles."""

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        autocast: dict[str, str],
        mutates: tuple[str, ...] = (),
        updates: tuple[str, ...] = (),
        mixed: tuple[str, ...] = (),
        dtypes: tuple[torch.dtype, ...] | None = None,
        nondifferentiable: tuple[int, ...] = (),
        nondeterministic: str = "",
    ) -> None:
        functools.update_wrapper(self, reference)
        self._defined_in = getattr(reference, "__module__", "") or ""
        _refuse_names_of_roles(name)
        self.name = name
        self.reference = reference
        self.public: Callable[..., Any] = self  # what users call: the interface, where there is one
        self.definition = Definition(
            name, reference, mutates, updates, mixed, dtypes, autocast, nondifferentiable, nondeterministic
        )
        self._tensors = self.definition.tensors
        self._first = self._tensors[0]
        self._by_roles: Callable[..., Any] | None = None  # with a gradient; made at the first call
        self._plans = Plans(name, self._of_values, self._first, tuple, settled=self._settled)
        if name in _registry:
            _registry[name].definition.forget_plans()
            _registry[name]._registration.give_way()
        self._registration: Registration = Registration(self.definition)
        _registry[name] = self

    # --- the roles ---

    def forward(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """The launch of the forward kernel: takes the reference's arguments, returns `(y, saved)`.

        `y` is the output (a tuple of them, if there are several); `saved` a tuple of the tensors that backward needs
        besides inputs and outputs. It allocates and launches, nothing else: it is also run dry, on tensors without
        storage, to learn the shapes. Where the operator works in place, `y` is what it mutates, or None.

        It may have one parameter more, `needs_grad=None`: a named tuple of bools, which gradients a backward will be asked
        for, so that it may do some of that work at once. None where there is no backward, or where torch.compile has it.
        """
        self.definition.set_forward(launch)
        self._has_another_role()
        return launch

    def backward(
        self,
        launch: Callable[..., Any] | None = None,
        *,
        reads: Mapping[str, Sequence[str]] = _ALL,
        apart: bool = False,
    ) -> Callable[..., Any]:
        """The launch of the backward kernel: takes `saved`, a `grad_*` per output, and by name what else it needs.

        What it can name: any parameter of the operator; an output, as `y` where its gradient is `grad_y`; `needs_grad`, a
        named tuple of bools, one for each parameter; `last`, whether the graph is freed after this, so that `saved` may be
        overwritten and returned. Only tensors that are named are kept alive until then. Each gradient
        arrives with its output's shape, dtype and strides. Returns the gradient of each Tensor parameter, in order (None
        for one that has none); trailing ones may be left out.

        Args:
            launch: the role.
            reads: for which gradients a tensor is read: `{"x": ("weight",)}` says that only the gradient of `weight`
                depends on `x`. Where none of those is asked for, as in a frozen layer, `x` is not kept: what is given in
                its place has its shape, dtype and device, and no values. `()`: none depends on it, as of a bias that is
                added at the end. That is of the gradient itself, and not of how backward finds it: where the reference is
                differentiated, zeros take its place. A tensor that is not named here is kept for every backward.
            apart: each gradient costs much by itself, as a product does: of large tensors `needs_grad` then has those alone
                that the backward under way will use. `torch.autograd.grad` for one of several makes it fewer than forward
                was told of; to ask takes some microseconds.

        Example:
            >>> @cupyops.operator("mylib::scaled")
            ... def scaled(x: Tensor, weight: Tensor) -> Tensor:
            ...     return x * weight
            >>> @scaled.backward(reads={"x": ("weight",), "weight": ("x",)})
            ... def backward(saved, grad_y, x, weight, needs_grad):
            ...     return grad_y * weight if needs_grad.x else None, grad_y * x if needs_grad.weight else None
        """
        if launch is None:
            return functools.partial(self.backward, reads=reads, apart=apart)
        self.definition.set_backward(launch, reads, apart)
        self._has_another_role()
        return launch

    def reference_backward(self, gradient: Callable[..., Any]) -> Callable[..., Any]:
        """The gradient in differentiable PyTorch, with backward's signature, for double backward.

        Where it is not given, the reference is differentiated twice, and every tensor input is kept alive for that. What
        forward `saved` counts as constant in it.
        """
        self.definition.set_gradient(gradient)
        self._has_another_role()
        return gradient

    def unsupported(self, reason: Callable[..., str | None]) -> Callable[..., str | None]:
        """Set the function that tells from metadata why the kernels have no case for the reference's arguments, or None."""
        self.definition.check_takes("unsupported", reason)
        self.definition.refusal = reason
        self._has_another_role()
        return reason

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the function that `torch.compile` and `torch.export` run in place of forward, to learn its outputs' shapes.

        Needed where forward reads values, as one does whose output has as many elements as it counts: such a size is
        `torch.library.get_ctx().new_dynamic_size()`. It takes the reference's arguments, tensors without storage, and
        returns `(y, saved)` as forward does. Elsewhere forward itself is run, and its launches are left out.
        """

        def checked(*args: Any) -> Any:
            found = function(*args)
            results.check_form(self.name, self.definition.outputs, bool(self.definition.mutated), found)
            return found

        self.definition.fake = checked
        return function

    def interface(
        self,
        function: Callable[..., Any] | None = None,
        *,
        twin: Callable[..., Any] | None = None,
        hands_on: bool = False,
    ) -> Any:
        """The public face, where it differs from the reference: checks and normalises arguments, calls the operator.

        Takes CuPy, NumPy and DLPack arrays too, and `axis` for `dim`. A function that `hands_on` its arguments to the
        operator as they are needs no help with arrays. Calls alike are replayed from a recorded plan, its checks included.

        `twin` is PyTorch's function of the same parameters and meaning, if there is one. Tensors that override what
        PyTorch's functions do (by `__torch_function__` or `__torch_dispatch__`), nested, sparse and quantised ones are given
        to it, and so is every call while a torch-function mode is open: they know it, and do not know ours.
        """
        if function is None:
            return functools.partial(self.interface, twin=twin, hands_on=hands_on)

        @functools.wraps(function)
        def with_arrays(*args: Any, **kwargs: Any) -> Any:
            if args and type(args[0]) in _PLAIN and "axis" not in kwargs:
                return function(*args, **kwargs)
            return arrays.call(function, args, kwargs)

        alone = hands_on or self.definition.mutated  # what works in place takes tensors alone
        self.public = public(function, function if alone else with_arrays, self.name, twin)
        return self.public

    def replayed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Replay another function that checks arguments and calls the operator, checks included, as the public one is."""
        shown: Callable[..., Any] = public(function, function, self.name)
        return shown

    # --- the call ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        definition = self.definition
        if is_dynamo_compiling():
            return self._compiling(definition.bind(args, kwargs))
        if kwargs or len(args) != definition.arity:
            args = definition.bind(args, kwargs)
        if observed.unplanned:
            return self._otherwise(args)
        try:
            entries = self._plans.table.get(args[self._first].shape, ())
        except Exception:  # no tensor
            entries = ()
        for entry in entries:
            found = entry(*args)
            if found is not MISS:
                return found
        return self._plans.call(args)

    def _of_values(self, *args: Any) -> Any:
        return self._otherwise(args)

    def _settled(self, args: tuple[Any, ...], reason: str, alike: bool) -> Callable[..., Any]:
        """Return the function for more calls of a known signature, without a choice of route if it is the kernels'."""
        if self._route(args)[0] != "kernel" or self.definition.nondeterministic:  # which the settings of PyTorch decide
            return self._of_values

        def by_kernels(*args: Any) -> Any:
            # what the guards of a signature do not see: no tensor's keys tell of a level of forward mode that is open
            return self._otherwise(args) if torch_private.forward_mode() else self._by_kernels(args)

        return by_kernels

    def _has_another_role(self) -> None:
        self._by_roles = None

    def _otherwise(self, args: tuple[Any, ...]) -> Any:
        """The call by the route that `_route` finds, with a word about it for an open trace."""
        self.definition.check_numbers(args)
        name, run, note = self._route(args)
        if name and name != "kernel":
            kind = observed.Faster if isinstance(note, observed.Faster) else str
            observed.refuse(kind(f"{self.name} takes the {name} route" + (f": {note}" if note else "")))
        if tracing.active is None or not name:
            return run(args)
        if name == "kernel" and self._plans.reason:
            note = f"not replayed: {self._plans.reason}"
        tensor = next(iter(self.definition.given(args)), None)
        dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
        with tracing.operator(self.name, name, dtype, note):
            return run(args)

    def _route(self, args: tuple[Any, ...]) -> tuple[str, Callable[[tuple[Any, ...]], Any], str]:
        """(name, function, note) of the route of a call that is not being compiled; no name where it leads to another."""
        if torch_private.is_jit_tracing():  # a trace holds what PyTorch's own operators do, and would lose a launch
            return "reference", self._by_reference, "torch.jit.trace"
        if _functorch_active() or torch_private.forward_mode():
            return "reference", self._by_reference, "torch.func or forward-mode AD"
        if (node := overrides.node(self, args, {})) is not None:
            return "", lambda args: node, ""
        given = self.definition.given(args)
        if (why := overrides.of_functions(given) or overrides.of_layout(given)) is not None:
            return "reference", self._by_reference, why
        if any(distributed.is_spread(value) for value in given):
            return "", self._by_parts, ""
        if torch_private.recorded():
            return "torch.library", self._by_dispatcher, ""
        absent = any(args[index] is None for index in self.definition.required)
        if absent or any(not isinstance(value, Tensor) for value in given):
            return "", self._by_arrays, ""
        if any(type(tensor) not in _PLAIN for tensor in given):
            return "torch.library", self._by_dispatcher, ""
        if any(tensor.device != given[0].device for tensor in given):
            return "", self._by_mixed_devices, ""
        if _dispatch_modes() and (given[0].device.type in executors or not torch_private.open_flop_registries()):
            return "torch.library", self._by_dispatcher, ""  # a counter of flops counts a reference by what it calls
        if given[0].device.type in executors and dtype_for(self.definition.autocast, given[0].device) is not None:
            return "", self._by_autocast, ""  # which kernels serve is asked of what is cast
        reason = self.definition.why_not(args)
        return ("kernel", self._by_kernels, "") if reason is None else ("reference", self._by_reference, reason)

    def _by_kernels(self, args: tuple[Any, ...]) -> Any:
        definition = self.definition
        if (recorder := observed.recorder()) is not None:
            recorder.ran(definition)
        try:
            if not wants_gradient(definition.given(args)):
                return definition.returned(definition.run_forward(args)[0])
            if self._by_roles is None:
                self._by_roles, definition.apply = differentiable(definition)
            return self._by_roles(*args)
        except NoKernel:  # from now on the route knows
            return self._otherwise(args)

    def _by_reference(self, args: tuple[Any, ...]) -> Any:
        return self.definition.call_reference(self._cast(args))

    def _by_dispatcher(self, args: tuple[Any, ...]) -> Any:
        return self._registration.call(self._cast(args))

    def _by_parts(self, args: tuple[Any, ...]) -> Any:
        return distributed.call_operator(self, self.definition, args)

    def _compiling(self, args: tuple[Any, ...]) -> Any:
        given = self.definition.given(args)
        if overrides.of_functions(given) or overrides.of_layout(given):
            return self._by_reference(args)
        register(self._registration.name)
        if any(distributed.is_spread(args[index]) for index in self._tensors):
            return self._by_parts(args)
        return self._by_reference(args) if _functorch_active() else self._by_dispatcher(args)

    def _by_autocast(self, args: tuple[Any, ...]) -> Any:
        device = self.definition.given(args)[0].device.type
        args = self._cast(args)
        with torch.autocast(device, enabled=False):
            return self(*args)

    def _by_arrays(self, args: tuple[Any, ...]) -> Any:
        for index in self._tensors:
            value = args[index]
            known = isinstance(value, Tensor) or arrays.kind_of(value)
            if not known and (value is not None or index in self.definition.required):
                name = self.definition.parameters[index].name
                raise InputError(f"{self.name}: {name} is {type(value).__name__}, expected a tensor or an array")
        if self.definition.mutated or self.definition.updated:
            raise InputError(f"{self.name} works in place and would change a copy of an array; give it plain tensors")
        return arrays.call(self, args, {})

    def _by_mixed_devices(self, args: tuple[Any, ...]) -> Any:
        names = [self.definition.parameters[i].name for i in self._tensors if args[i] is not None]
        found = ", ".join(f"{name} on {t.device}" for name, t in zip(names, self.definition.given(args)))
        raise InputError(f"{self.name}: tensors on different devices: {found}; move them to one")

    def _cast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as autocast asks for them."""
        policy, given = self.definition.autocast, self.definition.given(args)
        if not policy or not given:
            return args
        dtype = dtype_for(policy, given[0].device)
        return args if dtype is None else cast(args, dtype)

    def _reduced(self, protocol: Any) -> Any:
        """Pickled as an entry of the registry, where no module has it by a name."""
        return _registered, (self.name, self._defined_in)

    def __repr__(self) -> str:
        return f"Operator({self.name})"


def _registered(name: str, module: str) -> Operator:
    """The operator of a name, as pickle finds it: importing its module may define it."""
    if name not in _registry and module:
        with suppress(ImportError):
            importlib.import_module(module)
    if name not in _registry:
        raise InputError(
            f"there is no operator {name} in this process; import the module that defines it ({module}) first"
        )
    return _registry[name]
