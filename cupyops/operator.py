"""The author's kit: write the operator in PyTorch, then give it kernels.

An operator is a reference (what it means, in PyTorch), a forward (the launch of its kernel) and a backward. Everything
else is derived here, once: the routes below, `torch.library` registration with shapes for torch.compile and torch.export,
double backward, `torch.func`, forward-mode AD, autocast.

    plain tensors where kernels run, no gradient wanted      forward
    the same, gradient wanted                                one autograd.Function around forward and backward
    backward under create_graph=True                         gradient through the reference
    torch.compile, export, FakeTensor, modes, subclasses     the registered torch.library op
    torch.func transform, forward-mode AD                    the reference
    CPU tensors, and what `unsupported` names                the reference
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from . import arrays, trace
from .errors import CupyopsError, InputError
from .kernel import FLOATING, executors
from .layout import restride

_PLAIN = (Tensor, Parameter)
_FLOATING = frozenset(FLOATING)
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_registry: dict[str, Operator] = {}

# Autocast policies, named for what PyTorch's lists do: the dtype that floating inputs are cast to, per device type.
_LOWER = {"cuda": "lower", "cpu": "lower"}
AUTOCAST: dict[str, dict[str, str]] = {
    "lower": _LOWER,  # to the autocast dtype: matmul, linear, convolutions
    "fp32": {"cuda": "fp32"},  # to float32 on CUDA: softmax, norms, losses
    "fp32_everywhere": {"cuda": "fp32", "cpu": "fp32"},  # nll_loss, which the CPU's list has too
}


def operator(name: str, *, autocast: str | None = None) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of its reference: the first of the three functions.

    Args:
        name: qualified, `"namespace::name"`; it is also the name of the op in `torch.ops`.
        autocast: None, `"lower"` (cast to the autocast dtype), `"fp32"` or `"fp32_everywhere"`: what PyTorch's autocast
            does for the operator of this kind.

    The reference is annotated: `Tensor`, `Tensor | None`, `int`, `float`, `bool`, `str`, `list[int]`, `torch.dtype` and
    their optional forms in; `Tensor` or a tuple of them out.

    Example:
        >>> @cupyops.operator("mylib::double")
        ... def double(x: Tensor) -> Tensor:
        ...     return 2 * x
    """
    namespace, _, short = name.partition("::")
    if not (namespace.isidentifier() and short.isidentifier()):
        raise InputError(f'operator name {name!r} is not of the form "namespace::name"')
    if autocast is not None and autocast not in AUTOCAST:
        raise InputError(f"autocast is {autocast!r}, expected None or one of {', '.join(map(repr, AUTOCAST))}")
    return lambda reference: Operator(name, reference, AUTOCAST.get(autocast or "", {}))


def operators() -> dict[str, Operator]:
    """The registry: qualified name -> `Operator`, built-in and user-defined alike."""
    return dict(_registry)


class Operator:
    """An operator: call it as a function; complete it with `.forward`, `.backward` and, where useful, the other roles."""

    def __init__(self, name: str, reference: Callable[..., Any], autocast: dict[str, str]) -> None:
        functools.update_wrapper(self, reference)
        self.name = name
        self.reference = reference
        self.parameters, self.returns = _typed_signature(name, reference)
        self._arity = len(self.parameters)
        self._defaults = tuple(parameter.default for parameter in self.parameters)
        self.tensors = tuple(i for i, parameter in enumerate(self.parameters) if _is_tensor_type(parameter.annotation))
        self.outputs = len(self.returns)
        self._autocast = autocast
        self._forward: Callable[..., Any] | None = None
        self._backward: _Backward | None = None
        self._reference_backward: _Backward | None = None
        self._unsupported: Callable[..., str | None] | None = None
        self._plans: tuple[_Plan, _Plan] | None = None
        # Function.apply of Python only looks for functorch, as the guard has done already: the C method saves 1 us
        self._apply = super(torch.autograd.Function, _autograd_function(self)).apply
        self.public: Callable[..., Any] = self
        self._registration = _Registration(self)
        _registry[name] = self

    # --- the roles ---

    def forward(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """The launch of the forward kernel: takes the reference's arguments, returns `(y, saved)`.

        `y` is the output (a tuple of them, if there are several); `saved` a tuple of the tensors that backward needs
        besides inputs and outputs. It allocates and launches, nothing else: it is also run dry, on tensors without
        storage, to learn the shapes.
        """
        self._forward = launch
        return launch

    def backward(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """The launch of the backward kernel: takes `saved`, a `grad_*` per output, and by name what else it needs.

        What it can name: any parameter of the operator; an output, as `y` where its gradient is `grad_y`; `needs_grad`, a
        named tuple of bools, one for each parameter. Only tensors that are named are kept alive until then. Each gradient
        arrives with its output's shape, dtype and strides. Returns the gradient of each Tensor parameter, in order (None
        for one that has none); trailing ones may be left out.
        """
        self._backward, self._plans = _Backward(self, launch), None
        return launch

    def reference_backward(self, gradient: Callable[..., Any]) -> Callable[..., Any]:
        """The gradient in differentiable PyTorch, with backward's signature, for double backward.

        Where it is not given, the reference is differentiated twice, and every tensor input is kept alive for that.
        """
        self._reference_backward, self._plans = _Backward(self, gradient), None
        return gradient

    def unsupported(self, reason: Callable[..., str | None]) -> Callable[..., str | None]:
        """Why the kernels have no case for these arguments, or None: takes the reference's arguments, looks at metadata."""
        self._unsupported = reason
        return reason

    def interface(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The public face, where it differs from the reference: checks and normalises arguments, calls the operator.

        Takes CuPy, NumPy and DLPack arrays too, and `axis` for `dim`.
        """

        @functools.wraps(function)
        def public(*args: Any, **kwargs: Any) -> Any:
            if args and type(args[0]) in _PLAIN and "axis" not in kwargs:
                return function(*args, **kwargs)
            return arrays.call(function, args, kwargs)

        self.public = public
        return public

    # --- the call ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self._compiling(self._bind(args, kwargs))
        if kwargs or len(args) != self._arity:
            args = self._bind(args, kwargs)
        wants_grad = self._served_by_kernels(args)
        if wants_grad is None:
            return self._traced(args) if trace.active is not None else self._route(args)(args)
        if wants_grad and torch.is_grad_enabled():
            return self._apply(*args)
        return self._forward(*args)[0]  # type: ignore[misc]

    def _served_by_kernels(self, args: tuple[Any, ...]) -> bool | None:
        """The guard of the fast path, well under a microsecond: whether a gradient is wanted; None for any other route."""
        if _functorch_active() or _dispatch_modes() or forward_ad._current_level >= 0 or trace.active is not None:
            return None
        wants_grad, first, dtype = False, None, None
        for index in self.tensors:
            tensor = args[index]
            if type(tensor) is Tensor or type(tensor) is Parameter:
                if first is None:
                    first, dtype = tensor, tensor.dtype
                    if not tensor.is_cuda or dtype not in _FLOATING:
                        return None
                elif tensor.device != first.device:
                    return None
                elif tensor.dtype is not dtype and (tensor.is_floating_point() or tensor.is_complex()):
                    return None
                if tensor.requires_grad:
                    wants_grad = True
                if tensor.is_neg():
                    return None
            elif tensor is not None:
                return None
        if self._forward is None or (self._autocast and torch.is_autocast_enabled("cuda")):
            return None
        if self._unsupported is not None and self._unsupported(*args) is not None:
            return None
        return wants_grad

    def _route(self, args: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
        """The route of a call that is not being compiled."""
        if _functorch_active() or forward_ad._current_level >= 0:
            return self._by_reference
        if _dispatch_modes():
            return self._by_dispatcher
        given = [args[index] for index in self.tensors if args[index] is not None]
        if any(not isinstance(value, Tensor) for value in given):
            return self._by_arrays
        if any(type(tensor) not in (Tensor, Parameter) for tensor in given):
            return self._by_dispatcher
        if any(tensor.device != given[0].device for tensor in given):
            return self._by_mixed_devices
        if not self._has_kernels(given):
            return self._by_reference
        if self._autocast_dtype(given[0].device) is not None:
            return self._by_autocast
        return self._by_kernels if self.why_not(args) is None else self._by_reference

    def _has_kernels(self, given: Sequence[Tensor]) -> bool:
        return self._forward is not None and bool(given) and given[0].device.type in executors

    def why_not(self, args: tuple[Any, ...]) -> str | None:
        """Why the kernels have no case for these arguments; None where they have."""
        dtype = None
        for index in self.tensors:
            tensor = args[index]
            if tensor is not None:
                found = tensor.dtype
                if dtype is None:
                    dtype = found
                    if found not in FLOATING:
                        return f"no kernel for {found}"
                    if tensor.is_neg():
                        return "negative bit"
                elif found is not dtype and (found.is_floating_point or found.is_complex):
                    return f"no kernel for {dtype} with {found}"
        return self._unsupported(*args) if self._unsupported is not None else None

    def _by_kernels(self, args: tuple[Any, ...]) -> Any:
        if torch.is_grad_enabled() and any(args[i] is not None and args[i].requires_grad for i in self.tensors):
            return self._apply(*args)
        return self._forward(*args)[0]  # type: ignore[misc]

    def _by_reference(self, args: tuple[Any, ...]) -> Any:
        return self.reference(*args)

    def _by_dispatcher(self, args: tuple[Any, ...]) -> Any:
        args = self._cast(args)
        _share_with_dtensor(self, args)
        outputs = self._registration.op(*args)
        return outputs[0] if self.outputs == 1 else tuple(outputs[: self.outputs])

    def _by_autocast(self, args: tuple[Any, ...]) -> Any:
        device = next(args[i].device.type for i in self.tensors if args[i] is not None)
        with torch.autocast(device, enabled=False):
            return self(*self._cast(args))

    def _by_arrays(self, args: tuple[Any, ...]) -> Any:
        for index in self.tensors:
            value = args[index]
            if not (value is None or isinstance(value, Tensor) or arrays.kind_of(value)):
                name = self.parameters[index].name
                raise InputError(f"{self.name}: {name} is {type(value).__name__}, expected a tensor or an array")
        return arrays.call(self, args, {})

    def _by_mixed_devices(self, args: tuple[Any, ...]) -> Any:
        found = ", ".join(f"{self.parameters[i].name} on {args[i].device}" for i in self.tensors if args[i] is not None)
        raise InputError(f"{self.name}: tensors on different devices: {found}")

    def _compiling(self, args: tuple[Any, ...]) -> Any:
        return self.reference(*args) if _functorch_active() else self._by_dispatcher(args)

    def _traced(self, args: tuple[Any, ...]) -> Any:
        route = self._route(args)
        names = {"_by_kernels": "kernel", "_by_reference": "reference", "_by_dispatcher": "torch.library"}
        shown = names.get(route.__name__)
        if shown is None:
            return route(args)
        tensor = next((args[i] for i in self.tensors if isinstance(args[i], Tensor)), None)
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        with trace.operator(self.name, shown, dtype, self._note(shown, args, tensor)):
            return route(args)

    def _note(self, route: str, args: tuple[Any, ...], tensor: Tensor | None) -> str:
        if route != "reference":
            return ""
        if _functorch_active() or forward_ad._current_level >= 0:
            return "torch.func or forward-mode AD"
        if tensor is not None and tensor.device.type not in executors:
            return f"tensors on {tensor.device.type}"
        return self.why_not(args) or "no kernel"

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments in the order of the signature, defaults filled in."""
        if not kwargs and len(args) == self._arity:
            return args
        values = list(args)
        if len(values) > self._arity:
            raise TypeError(f"{self.name} takes {self._arity} arguments, got {len(values)}")
        left = dict(kwargs)
        for parameter in self.parameters[len(values) :]:
            name = parameter.name
            if name not in left and name == "dim" and "axis" in left:
                left["dim"] = left.pop("axis")
            if name not in left and parameter.default is inspect.Parameter.empty:
                raise TypeError(f"{self.name} misses the argument {name!r}")
            values.append(left.pop(name) if name in left else parameter.default)
        if left:
            raise TypeError(f"{self.name} got an unexpected or repeated argument {next(iter(left))!r}")
        return tuple(values)

    # --- autocast ---

    def _autocast_dtype(self, device: torch.device) -> torch.dtype | None:
        policy = self._autocast.get(device.type)
        if policy is None or not torch.is_autocast_enabled(device.type):
            return None
        return torch.float32 if policy == "fp32" else torch.get_autocast_dtype(device.type)

    def _cast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Floating inputs cast as autocast asks; float64 is left alone, as PyTorch leaves it."""
        first = next((args[i] for i in self.tensors if args[i] is not None), None)
        dtype = self._autocast_dtype(first.device) if first is not None and self._autocast else None
        if dtype is None:
            return args

        def cast(value: Any) -> Any:
            castable = isinstance(value, Tensor) and value.dtype.is_floating_point and value.dtype != torch.float64
            return value.to(dtype) if castable else value

        return tuple(cast(value) for value in args)

    # --- what forward and backward share ---

    def runs_kernels(self, args: tuple[Any, ...]) -> bool:
        """Whether the kernels serve these arguments; true of fake tensors as of the real ones they stand for."""
        given = [args[i] for i in self.tensors if args[i] is not None]
        return self._has_kernels(given) and self.why_not(args) is None

    def run_forward(self, args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(outputs, saved) by the forward kernels."""
        try:
            outputs, saved = self._forward(*args)  # type: ignore[misc]
        except CupyopsError as error:
            error.add_note(f"in the forward of operator {self.name}")
            raise
        return (outputs,) if self.outputs == 1 else tuple(outputs), tuple(saved)

    def run_backward(
        self, grads: Sequence[Tensor | None], outputs: Sequence[Tensor], saved: Sequence[Tensor], args: Any, needs: Any
    ) -> list[Tensor | None]:
        """The gradient of each parameter (None for what is not a tensor or not needed) by the backward kernels."""
        assert self._backward is not None
        try:
            return self._backward(grads, outputs, saved, args, needs)
        except CupyopsError as error:
            error.add_note(f"in the backward of operator {self.name}")
            raise

    def differentiable_backward(
        self, grads: Sequence[Tensor | None], outputs: Sequence[Any], saved: Sequence[Any], args: Any, needs: Any
    ) -> list[Tensor | None]:
        """The same gradients with a graph of their own: by `reference_backward`, else from the reference."""
        if self._reference_backward is None:
            return self.reference_gradient(grads, args, needs)
        return self._reference_backward(grads, outputs, saved, args, needs)

    def reference_gradient(self, grads: Sequence[Tensor | None], args: Any, needs: Any) -> list[Tensor | None]:
        """The gradients as PyTorch finds them through the reference, run once more for that."""
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # aliases, so that an input passed twice gets two gradients and not twice their sum
            aliases = [_differentiable_alias(a) if isinstance(a, Tensor) else a for a in args]
            found = self.reference(*aliases)
        pairs = zip((found,) if self.outputs == 1 else found, grads)
        pairs = [(y, grad) for y, grad in pairs if grad is not None and y.requires_grad]
        wanted = [i for i, need in enumerate(needs) if need]
        gradients = torch.autograd.grad(
            [y for y, _ in pairs],
            [aliases[i] for i in wanted],
            [grad for _, grad in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
        result: list[Tensor | None] = [None] * self._arity
        for index, gradient in zip(wanted, gradients):
            result[index] = gradient
        return result

    def plan(self, kernels: bool) -> _Plan:
        """What is kept alive for backward."""
        plans = self._plans
        if plans is None:
            roles = [role for role in (self._backward, self._reference_backward) if role is not None]
            named = {i for role in roles for i in role.inputs}
            every = self._reference_backward is None
            kept = tuple(i for i in self.tensors if every or i in named)
            outputs = tuple(i for i in range(self.outputs) if any(i in role.outputs for role in roles))
            plans = self._plans = (_Plan(self, self.tensors, ()), _Plan(self, kept, outputs))
        return plans[kernels]

    def __repr__(self) -> str:
        return f"Operator({self.name})"


class _Backward:
    """A backward launch, with its parameters understood once: what it names is what it is given."""

    def __init__(self, op: Operator, launch: Callable[..., Any]) -> None:
        self.op = op
        self.launch = launch
        names = list(inspect.signature(launch).parameters)
        grads = names[1 : 1 + op.outputs]
        if not names or names[0] != "saved" or len(grads) != op.outputs or not all(n.startswith("grad_") for n in grads):
            expected = ", ".join(["saved", *(["grad_y"] if op.outputs == 1 else [f"grad_y{i}" for i in range(op.outputs)])])
            raise InputError(f"{op.name}: a backward begins with ({expected}); this one has ({', '.join(names)})")
        outputs = {name.removeprefix("grad_"): index for index, name in enumerate(grads)}
        position = {parameter.name: index for index, parameter in enumerate(op.parameters)}
        self.needs_type = namedtuple("NeedsGrad", list(position))  # type: ignore[misc]
        self.wants: list[tuple[str, int]] = []
        for name in names[1 + op.outputs :]:
            if name == "needs_grad":
                self.wants.append(("needs", 0))
            elif name in position:
                self.wants.append(("argument", position[name]))
            elif name in outputs:
                self.wants.append(("output", outputs[name]))
            else:
                known = ", ".join([*position, *outputs, "needs_grad"])
                raise InputError(f"{op.name}: backward asks for {name!r}; it can have {known}")
        self.inputs = {index for kind, index in self.wants if kind == "argument"}
        self.outputs = {index for kind, index in self.wants if kind == "output"}

    def __call__(self, grads: Any, outputs: Any, saved: Any, args: Any, needs: Any) -> list[Tensor | None]:
        extra = [
            args[index] if kind == "argument" else outputs[index] if kind == "output" else self.needs_type(*needs)
            for kind, index in self.wants
        ]
        found = self.launch(tuple(saved), *grads, *extra)
        found = (found,) if isinstance(found, Tensor) or found is None else found
        if len(found) > len(self.op.tensors):
            raise InputError(f"{self.op.name}: backward gave {len(found)} gradients for {len(self.op.tensors)} tensors")
        result: list[Tensor | None] = [None] * len(args)
        for index, gradient in zip(self.op.tensors, found):
            if needs[index]:
                result[index] = gradient
        return result


class _Plan:
    """What backward keeps of a call: which tensor inputs, which outputs; besides, whatever forward saved."""

    def __init__(self, op: Operator, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.count = op.outputs
        self.arity = len(op.parameters)
        self.others = tuple(i for i in range(self.arity) if i not in op.tensors)

    def values(self, args: Sequence[Any]) -> list[Any]:
        """The arguments that are not tensors, None in the place of those that are."""
        values: list[Any] = [None] * self.arity
        for index in self.others:
            values[index] = args[index]
        return values

    def pack(self, args: Sequence[Any], outputs: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor | None]:
        """One list for save_for_backward."""
        return [*[args[i] for i in self.inputs], *[outputs[i] for i in self.outputs], *saved]

    def unpack(self, values: list[Any], tensors: Sequence[Any]) -> tuple[list[Any], list[Any], tuple[Any, ...]]:
        """(arguments, outputs, saved), None in the place of each tensor that was not kept."""
        args, first, second = list(values), len(self.inputs), len(self.inputs) + len(self.outputs)
        for index, tensor in zip(self.inputs, tensors):
            args[index] = tensor
        return args, self.all_outputs(tensors[first:second]), tuple(tensors[second:])

    def all_outputs(self, kept: Sequence[Any]) -> list[Any]:
        """The outputs that were kept, in their places."""
        outputs: list[Any] = [None] * self.count
        for index, tensor in zip(self.outputs, kept):
            outputs[index] = tensor
        return outputs


def _autograd_function(op: Operator) -> type[torch.autograd.Function]:
    """The autograd.Function of the eager route; `forward(ctx, ...)` merged, since setup_context costs 8 us a call."""

    def forward(ctx: Any, *args: Any) -> Any:
        outputs, saved = op.run_forward(args)
        plan = op.plan(kernels=True)
        ctx.values = plan.values(args)
        ctx.strides = [y.stride() for y in outputs]
        ctx.save_for_backward(*plan.pack(args, outputs, saved))
        if op.outputs == 1:
            return outputs[0]
        ctx.mark_non_differentiable(*(y for y in outputs if not y.dtype.is_floating_point))
        return outputs

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        args, outputs, saved = op.plan(kernels=True).unpack(ctx.values, ctx.saved_tensors)
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return tuple(op.differentiable_backward(grads, outputs, saved, args, needs))
        grads = _like_outputs(grads, ctx.strides)
        if trace.active is None:
            return tuple(op.run_backward(grads, outputs, saved, args, needs))
        with trace.operator(f"{op.name} (backward)", "kernel"):
            return tuple(op.run_backward(grads, outputs, saved, args, needs))

    name = "".join(part.capitalize() for part in op.name.partition("::")[2].split("_"))
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def _like_outputs(grads: Sequence[Tensor | None], strides: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Gradients laid out as their outputs were: an expanded or transposed one is copied, once, here."""
    return tuple([g if g is None else restride(g, s) for g, s in zip(grads, strides)])


class _Registration:
    """The op of an Operator in torch.library: `ns::name` and `ns::name_backward`, for CPU, CUDA, fake and autograd.

    Both return `Tensor[]`: outputs and what is saved, gradients of what is needed.
    """

    def __init__(self, op: Operator) -> None:
        previous = _registry.get(op.name)
        if previous is not None:
            previous._registration.library._destroy()  # a notebook cell run again
        namespace, _, short = op.name.partition("::")
        self.operator = op
        self.library = torch.library.Library(namespace, "FRAGMENT")
        self.library.define(f"{short}{_schema(op.parameters)} -> Tensor[]")
        optional = [p.replace(default=p.empty, annotation=_optional(p.annotation)) for p in op.parameters]
        lists = [_parameter(name, Sequence[Tensor]) for name in ("grad_outputs_", "outputs_", "saved_")]
        needs = _parameter("needs_grad_", Sequence[bool])
        self.library.define(f"{short}_backward{_schema([*lists, *optional, needs])} -> Tensor[]")
        for key in ("CPU", "CUDA"):
            self.library.impl(short, self._run, key)
            self.library.impl(f"{short}_backward", self._run_backward, key)
        torch.library.register_fake(op.name, self._run, lib=self.library)
        torch.library.register_fake(f"{op.name}_backward", self._run_backward, lib=self.library)
        torch.library.register_autograd(op.name, self._differentiate, setup_context=self._setup, lib=self.library)
        torch.library.register_autograd(
            f"{op.name}_backward", self._differentiate_twice, setup_context=self._setup_twice, lib=self.library
        )
        packet = getattr(torch.ops, namespace)
        self.op = getattr(packet, short).default
        self.backward_op = getattr(packet, f"{short}_backward").default

    def _run(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        op = self.operator
        args = op._bind(args, kwargs)
        if op.runs_kernels(args):
            outputs, saved = op.run_forward(args)
            return _no_aliases([*outputs, *saved], args)
        found = op.reference(*args)
        return _no_aliases([found] if op.outputs == 1 else list(found), args)

    def _run_backward(self, grads: Any, outputs: Any, saved: Any, *rest: Any) -> list[Tensor]:
        *args, needs = rest
        op = self.operator
        found = op.run_backward(grads, op.plan(kernels=True).all_outputs(outputs), saved, args, needs)
        missing = [op.parameters[i].name for i, need in enumerate(needs) if need and found[i] is None]
        if missing:
            raise InputError(f"{op.name}: backward gave no gradient for {', '.join(missing)}")
        return _no_aliases([g for g in found if g is not None], (*grads, *args))

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        op = self.operator
        ctx.kernels = op.runs_kernels(inputs)
        plan = op.plan(ctx.kernels)
        ctx.values = plan.values(inputs)
        ctx.strides = [y.stride() for y in output[: op.outputs]]
        ctx.save_for_backward(*plan.pack(inputs, output, output[op.outputs :]))

    def _differentiate(self, ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        op = self.operator
        needs = list(ctx.needs_input_grad)
        args, outputs, saved = op.plan(ctx.kernels).unpack(ctx.values, ctx.saved_tensors)
        if not ctx.kernels:
            return tuple(op.reference_gradient(grads[: op.outputs], args, needs))
        dense = _like_outputs(grads[: op.outputs], ctx.strides)
        kept = [y for y in outputs if y is not None]
        gradients = iter(self.backward_op(dense, kept, list(saved), *args, needs))
        return tuple(next(gradients) if need else None for need in needs)

    def _setup_twice(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        grads, outputs, saved, *args, needs = inputs
        ctx.needs = needs
        ctx.counts = (len(grads), len(outputs), len(saved))
        ctx.values = tuple(None if isinstance(a, Tensor) else a for a in args)
        ctx.save_for_backward(*grads, *outputs, *saved, *(args[i] for i in self.operator.tensors))

    def _differentiate_twice(self, ctx: Any, grad_gradients: list[Tensor]) -> tuple[Any, ...]:
        op = self.operator
        n_grads, n_outputs, n_saved = ctx.counts
        with torch.enable_grad():
            tensors = [None if t is None else _differentiable_alias(t) for t in ctx.saved_tensors]
            grads, tensors = tensors[:n_grads], tensors[n_grads:]
            outputs, tensors = tensors[:n_outputs], tensors[n_outputs:]
            saved, inputs = tensors[:n_saved], tensors[n_saved:]
            args = list(ctx.values)
            for index, tensor in zip(op.tensors, inputs):
                args[index] = tensor
            all_outputs = op.plan(kernels=True).all_outputs(outputs)
            found = op.differentiable_backward(grads, all_outputs, saved, args, ctx.needs)
            sources = [t for t in (*grads, *outputs, *inputs) if t is not None and t.requires_grad]
            second = torch.autograd.grad(
                [g for g in found if g is not None], sources, grad_gradients, create_graph=True, allow_unused=True
            )
        gradient = {id(t): g for t, g in zip(sources, second)}
        to_args: list[Any] = [None] * len(args)
        for index, tensor in zip(op.tensors, inputs):
            to_args[index] = gradient.get(id(tensor))
        to_grads, to_outputs = ([gradient.get(id(t)) for t in group] for group in (grads, outputs))
        return (to_grads, to_outputs, [None] * n_saved, *to_args, None)


def _differentiable_alias(tensor: Tensor) -> Tensor:
    """`tensor` under another identity, so that a gradient with respect to it can be asked for."""
    if tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_() if tensor.dtype.is_floating_point else tensor


def _no_aliases(results: list[Tensor], inputs: Sequence[Any]) -> list[Tensor]:
    """An op of torch.library may not return one of its inputs or one tensor twice: such a one is copied."""
    seen = {id(value) for value in inputs}
    fresh = []
    for tensor in results:
        fresh.append(tensor.clone() if id(tensor) in seen or tensor._base is not None else tensor)
        seen.add(id(tensor))
    return fresh


def _share_with_dtensor(op: Operator, args: tuple[Any, ...]) -> None:
    """Filled in below: DTensor asks each op how it may be sharded."""


# --- schemas -----------------------------------------------------------------------------------------------------


def _typed_signature(name: str, reference: Callable[..., Any]) -> tuple[list[inspect.Parameter], tuple[Any, ...]]:
    """The parameters with their annotations resolved, and the types of the outputs."""
    hints = typing.get_type_hints(reference)
    parameters = []
    for parameter in inspect.signature(reference).parameters.values():
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(f"{name}: parameter {parameter.name} of the reference needs a type annotation")
        parameters.append(_parameter(parameter.name, hints[parameter.name], parameter.default))
    if not any(_is_tensor_type(parameter.annotation) for parameter in parameters):
        raise InputError(f"{name}: the reference has no parameter annotated Tensor")
    returned = hints.get("return")
    returns = typing.get_args(returned) if typing.get_origin(returned) is tuple else (returned,)
    if any(one is not Tensor for one in returns):
        raise InputError(f"{name}: the reference is annotated to return {returned}, expected Tensor or tuple[Tensor, ...]")
    return parameters, returns


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, default=default)


def _is_tensor_type(annotation: Any) -> bool:
    return annotation is Tensor or Tensor in typing.get_args(annotation)


def _optional(annotation: Any) -> Any:
    return typing.Optional[Tensor] if _is_tensor_type(annotation) else annotation


def _schema(parameters: Sequence[inspect.Parameter]) -> str:
    """The arguments of a torch.library schema: `(Tensor x, SymInt[] stride)`."""

    def stub() -> None: ...

    # torch.library infers no default for a list, nor for what stands before one; our calls always give every argument
    plain = all(not isinstance(parameter.default, (list, tuple)) for parameter in parameters)
    listed = [
        p.replace(annotation=_schema_type(p.annotation), default=p.default if plain else p.empty) for p in parameters
    ]
    stub.__signature__ = inspect.Signature(listed, return_annotation=Tensor)  # type: ignore[attr-defined]
    return torch.library.infer_schema(stub, mutates_args=()).rpartition(" -> ")[0]


def _schema_type(annotation: Any) -> Any:
    """`list[int]` and `X | None` as torch.library spells them."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return Sequence[inner[0]]  # type: ignore[valid-type]
    if type(None) in inner:
        return typing.Optional[_schema_type(next(one for one in inner if one is not type(None)))]
    return annotation
