"""An author's definition of an operator, and what follows from it whichever route a call takes.

A `Definition` holds the roles (reference, forward, backward ...) and runs them. `autograd.py` and `registration.py` derive
the eager and the registered operator from it; `operator.py` chooses between them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, WrongDtype, executors
from ..._kernel.launch import versions
from ..._kernel.launch.versions import left_alone, this_thread
from ..._util import arguments, observed, symbolic, torch_private
from ..._util.arguments import warn
from ..._util.strides import has_bits, is_dry, restride
from ...errors import CupyopsError, InputError, LaunchError
from . import results, schema
from .autocast import POLICIES, without
from .backward import Backward
from .kept import Kept, by_kernels, by_reference

_ROLES = frozenset(("launch_forward", "launch_backward", "gradient", "refusal", "unpooled"))
_NO_POLICY = POLICIES[None]


class NoKernel(LaunchError):
    """A launch has found that there is no kernel for the dtypes of a call: the reference is to run."""


class Definition:
    """The roles of one operator. Tensors are passed about as lists over all parameters or all outputs, None where absent."""

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        mutates: tuple[str, ...] = (),
        updates: tuple[str, ...] = (),
        mixed: tuple[str, ...] = (),
        dtypes: tuple[torch.dtype, ...] | None = None,
        autocast: Mapping[str, str] = _NO_POLICY,
        nondifferentiable: tuple[int, ...] = (),
        nondeterministic: str = "",
    ) -> None:
        self.name = name
        self.autocast = autocast  # of each device type; with one, the roles run with autocast off
        self.reference = reference
        self.dtypes = dtypes
        self.parameters, self.outputs = schema.typed_signature(name, reference, mutates)
        self.mutates = mutates
        self.mutated = tuple(i for name in mutates for i, one in enumerate(self.parameters) if one.name == name)
        self.silent = schema.returns_nothing(reference)
        self.arity = len(self.parameters)
        self.tensors = tuple(i for i, one in enumerate(self.parameters) if schema.is_tensor(one.annotation))
        self.updated = self._positions("updates", updates)
        self.mixed = frozenset(self._positions("mixed", mixed))
        self._unserved: dict[
            tuple[torch.dtype, ...], str
        ] = {}  # dtypes for which a launch has found no kernel, and why
        self.nondeterministic = nondeterministic  # why its kernels give other bits from call to call
        self.constant = frozenset(nondifferentiable)  # outputs without a gradient
        if wrong := [one for one in nondifferentiable if mutates or one not in range(self.outputs)]:
            places = "none, since it works in place" if mutates else ", ".join(map(str, range(self.outputs)))
            raise InputError(f"{name}: nondifferentiable has {wrong[0]!r}, expected places of outputs: {places}")
        if updates and mutates:
            raise InputError(
                f"{name}: an operator that mutates {', '.join(mutates)} cannot have updates as well; name all in mutates"
            )
        self._plain = schema.plain(self.parameters)
        self.required = frozenset(i for i in self.tensors if self.parameters[i].annotation is Tensor)
        if always := [self.parameters[i].name for i in self.updated if i in self.required]:
            raise InputError(f"{name}: updates names {always[0]!r}, a Tensor; expected one that may be None")
        self.forward: Callable[..., Any] | None = None  # as the author wrote it
        self.forward_asks = False  # for needs_grad
        self.backward_asks = False  # for last
        self.backward_chooses = False  # the gradients that will be used
        self.named: Callable[..., Any] = lambda needs: None  # NeedsGrad of a tuple, where there is a backward
        self.dependents: weakref.WeakSet[Any] = weakref.WeakSet()  # plans, to be forgotten where a role changes
        self.unpooled: frozenset[int] = frozenset()  # places of saved tensors that backward has returned
        self.gives_gradients = False  # as they should be; until then they are looked at
        self._leaves_alone = True  # backward its inputs; until then it is looked at
        self.apply: Callable[..., Any] = lambda run, *tensors: None  # of its autograd.Function
        self.launch_forward: Callable[..., Any] | None = None  # as calls run it
        self.launch_backward: Backward | None = None
        self.gradient: Backward | None = None  # reference_backward
        self.refusal: Callable[..., str | None] | None = None  # unsupported
        self.fake: Callable[..., Any] | None = None  # forward, of tensors without storage
        self.sharding: Callable[..., str] | None = None  # the rule for DTensors, of arguments
        self._choose_kept()

    def _positions(self, option: str, names: Sequence[str]) -> tuple[int, ...]:
        """Indices of the tensors of these names among the parameters."""
        tensors = {self.parameters[index].name: index for index in self.tensors}
        if wrong := [name for name in names if name not in tensors]:
            raise InputError(f"{self.name}: {option} names {wrong[0]!r}, expected one of: {', '.join(tensors)}")
        return tuple(tensors[name] for name in names)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments in the order of the signature, defaults filled in."""
        if not kwargs and len(args) == self.arity:
            return args
        return schema.bind(self.name, self.parameters, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _ROLES and self.dependents:
            self.forget_plans()

    def forget_plans(self) -> None:
        """Forget what was recorded of the roles."""
        for plans in list(self.dependents):
            plans.forget()

    def check_numbers(self, args: Sequence[Any]) -> None:
        """Check that numbers and other arguments have their annotations' types, so that all routes accept the same calls."""
        for index, usual, types, words in self._plain:
            value = args[index]
            fits = type(value) is usual or isinstance(value, types)
            if usual is list:
                fits = value is None and words.endswith("None")
                fits |= isinstance(value, (list, tuple)) and all(isinstance(one, types) for one in value)
            if not fits:
                several = value if isinstance(value, (list, tuple)) else [value]
                if torch_private.is_jit_tracing() and any(isinstance(one, Tensor) for one in several):
                    continue  # sizes, as torch.jit.trace has them
                arguments.fail(f"{self.name}: {self.parameters[index].name}", value, words)

    def roles(self) -> list[Any]:
        """List the functions and the options that the author has given."""
        functions = [one and one.launch for one in (self.launch_backward, self.gradient)]
        options = [self.mutates, self.updated, self.mixed, self.dtypes, self.autocast, self.constant]
        return [self.reference, self.forward, *functions, self.refusal, self.fake, self.sharding, *options]

    # --- whether the kernels serve a call ---

    def given(self, args: Sequence[Any]) -> list[Any]:
        """The values of the Tensor parameters, without the Nones."""
        return [args[index] for index in self.tensors if args[index] is not None]

    def why_not(self, args: Sequence[Any]) -> str | None:
        """Return why the kernels do not serve these arguments, or None. The answer is the same for fake tensors."""
        tensors = self.given(args)
        if self.launch_forward is None:
            return "no kernel"
        if not tensors or tensors[0].device.type not in executors:
            return f"tensors on {tensors[0].device.type}" if tensors else "no tensor"
        if (reason := self.why_not_dtypes(args)) is not None:
            return reason
        if self.nondeterministic and torch_private.deterministic() and not _warns_only():
            return f"deterministic algorithms are asked for, and its kernels are not: {self.nondeterministic}"
        if self.mutated and self.launch_backward is None and wants_gradient(tensors):
            return "no backward, and the inputs are overwritten"
        for tensor in tensors:
            if has_bits(tensor):
                return "negative bit" if tensor.is_neg() else "conjugate bit"
        return self.refused(args)

    def refused(self, args: Sequence[Any]) -> str | None:
        """Return the answer of the author's `unsupported`. It is asked about example sizes, so that no symbol is bound."""
        if self.refusal is None:
            return None
        if symbolic.is_symbolic(args):
            args = symbolic.examples(args)
        return self.refusal(*args)

    def _learns(self, error: WrongDtype, args: Sequence[Any]) -> bool:
        """Remember that a launch had no kernel for the arguments' dtypes; return whether that holds for all such calls.

        Of floating-point and complex dtypes that an argument has. An integer of another width is a slip of the author's.
        Where something is changed in place, it may have been changed already.
        """
        floating = isinstance(error.dtype, torch.dtype) and (error.dtype.is_floating_point or error.dtype.is_complex)
        dtypes = tuple(tensor.dtype for tensor in self.given(args))
        if self.dtypes is not None or not floating or error.dtype not in dtypes or self.mutated or self.updated:
            return False
        self._unserved[dtypes] = f"no kernel for {error.dtype}: {error}"
        return True

    def why_not_dtypes(self, args: Sequence[Any]) -> str | None:
        """Return why the kernels do not serve these dtypes, or None: some are not declared, or the usual four are mixed.

        What else there is may stand beside any other: integers, masks, complex numbers, float8.
        """
        if self._unserved and (reason := self._unserved.get(tuple(one.dtype for one in self.given(args)))) is not None:
            return reason
        dtypes, first = self.dtypes, self.given(args)[0].dtype
        if dtypes is not None and first not in dtypes:
            return f"no kernel for {first}"
        one = first if first in FLOATING else None
        for index in self.tensors:
            if args[index] is None:
                continue
            dtype = args[index].dtype
            if dtypes is not None and dtype not in dtypes and (dtype.is_floating_point or dtype.is_complex):
                return f"no kernel for {first} with {dtype}"
            if dtype in FLOATING and index not in self.mixed:
                one = one or dtype
                if dtype is not one:
                    return f"no kernel for {one} with {dtype}"
        return None

    # --- the roles, run ---

    def add_note(self, error: CupyopsError, role: str) -> None:
        """Say in whose launch an error arose, where it does not say so itself."""
        if not str(error).startswith(self.name):
            error.add_note(f"in the {role} of operator {self.name}")

    def heed_determinism(self, role: str, tensors: Sequence[Any]) -> None:
        """Say where deterministic algorithms are asked for what kernels that are not are about to run."""
        if not self.nondeterministic or not torch_private.deterministic() or any(map(is_dry, tensors)):
            return
        message = (
            f"{self.name} ({role}) does not have a deterministic implementation ({self.nondeterministic}), but you set "
            f"'torch.use_deterministic_algorithms(True{', warn_only=True' if _warns_only() else ''})'"
        )
        if not _warns_only():
            raise RuntimeError(message)
        warn(message)

    def run_forward(
        self, args: Sequence[Any], needs: Sequence[bool] | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(outputs, saved) by the forward kernels; `needs`, where a backward by kernels follows."""
        assert self.launch_forward is not None
        if self.nondeterministic:
            self.heed_determinism("forward", self.given(args))
        outer, this_thread.in_role = this_thread.in_role, True
        try:
            outputs, saved = without(self.autocast, self._launch_forward, args, needs)
        except CupyopsError as error:
            self.add_note(error, "forward")
            if isinstance(error, WrongDtype) and self._learns(error, args):
                raise NoKernel(str(error)) from error
            raise
        finally:
            this_thread.in_role = outer
        if self.mutated:
            return self.changed(args), saved
        return (outputs,) if self.outputs == 1 else outputs, saved

    def _launch_forward(self, args: Sequence[Any], needs: Sequence[bool] | None) -> Any:
        assert self.launch_forward is not None
        if self.fake is not None and any(map(is_dry, self.given(args))):
            return self.fake(*args)
        return self.launch_forward(*args, **self.asked(needs))

    def asked(self, needs: Sequence[bool] | None) -> dict[str, Any]:
        """Extra arguments of the forward kernels, where they ask for them."""
        return {"needs_grad": self.named(tuple(needs))} if self.forward_asks and needs is not None else {}

    def call_reference(self, args: Sequence[Any]) -> Any:
        """Make a call by the reference."""
        found = self.run_reference(args)
        return self.returned(self.changed(args)) if self.mutated else self.without_history(found)

    def without_history(self, found: Any) -> Any:
        """Return the outputs of a call, with those that have no gradient detached."""
        if not self.constant:
            return found
        if self.outputs == 1:
            return found.detach()
        return tuple(y.detach() if index in self.constant else y for index, y in enumerate(found))

    def exact(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that take no gradient."""
        return [y for index, y in enumerate(outputs) if index in self.constant or not takes_gradient(y)]

    def run_reference(self, args: Sequence[Any]) -> Any:
        """Run the reference under the operator's autocast policy."""
        return without(self.autocast, self.reference, *args)

    def changed(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The arguments that are changed in place."""
        return tuple(args[index] for index in self.mutated)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """Outputs as a call returns them."""
        return None if self.silent else outputs[0] if self.outputs == 1 else tuple(outputs)

    def run_backward(
        self, grads: Any, outputs: Any, saved: Any, args: Any, needs: Any, last: bool = False
    ) -> list[Tensor | None]:
        """The gradient of each parameter (None for what is no tensor or not needed) by the backward kernels.

        `last`: nobody will look at `saved` after them.
        """
        if self.launch_backward is None:
            return self.reference_gradient(grads, args, needs)
        if self.nondeterministic:
            self.heed_determinism("backward", [one for one in grads if one is not None])
        args = by_kernels(args)
        try:
            last_too = (last,) if self.backward_asks else ()
            launch = self.launch_backward if self._leaves_alone else self._backward_looked_at
            return without(self.autocast, launch, grads, outputs, saved, args, needs, *last_too)  # type: ignore[no-any-return]
        except CupyopsError as error:
            self.add_note(error, "backward")
            raise

    def differentiable_backward(
        self, grads: Any, outputs: Any, saved: Any, args: Any, needs: Any
    ) -> list[Tensor | None]:
        """Compute the gradients with a graph of their own: by `reference_backward`, else from the reference."""
        args = by_reference(args)
        if self.gradient is None:
            if self.mutated:
                missing = "a second derivative needs a reference_backward, since forward overwrites"
                raise InputError(f"{self.name}: {missing} {', '.join(self.mutates)}")
            return self.reference_gradient(grads, args, needs)
        return without(  # type: ignore[no-any-return]
            self.autocast, self.gradient, grads, outputs, saved, args, needs
        )

    def reference_gradient(self, grads: Any, args: Any, needs: Any) -> list[Tensor | None]:
        """The gradients as PyTorch finds them through the reference, run once more for that."""
        instead = getattr(executors.get(self.given(args)[0].device.type), "reference", None)
        if instead is not None:  # who asks what would run
            instead(self.name)
            return [torch.empty_like(value) if need else None for value, need in zip(args, needs)]
        return without(self.autocast, self._through_reference, grads, args, needs)  # type: ignore[no-any-return]

    def _through_reference(self, grads: Any, args: Any, needs: Any) -> list[Tensor | None]:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # aliases, so that an input passed twice gets two gradients and not twice their sum
            aliases = [differentiable_alias(a) if isinstance(a, Tensor) else a for a in args]
            values = [alias.clone() if i in self.mutated else alias for i, alias in enumerate(aliases)]
            found = self.reference(*values)
            found = self.changed(values) if self.mutated else (found,) if self.outputs == 1 else found
        pairs = zip(found, grads)
        used = [(y, grad) for y, grad in pairs if grad is not None and y.requires_grad]
        wanted = [i for i, need in enumerate(needs) if need]
        gradients = torch.autograd.grad(
            [y for y, _ in used],
            [aliases[i] for i in wanted],
            [grad for _, grad in used],
            create_graph=create_graph,
            allow_unused=True,
        )
        result: list[Tensor | None] = [None] * self.arity
        for index, gradient in zip(wanted, gradients):
            result[index] = gradient
        return result

    # --- the roles, given ---

    def set_forward(self, launch: Callable[..., Any]) -> None:
        """Take the forward role. What it returns is checked until a call of the same dtypes has returned what it should.

        Not of our own, which tests compare: for the first tensor without storage PyTorch imports its compiler, for up
        to a second.
        """
        seen: set[tuple[torch.dtype, ...]] = set()

        self.check_takes("forward", launch, needs_grad=not self.mutated)

        def looked_at(*args: Any, **asked: Any) -> Any:
            given = self.given(args)
            dtypes = tuple([tensor.dtype for tensor in given])
            if dtypes in seen and observed.recorder() is None:
                return launch(*args, **asked)
            with self._left_alone(args):
                found = launch(*args, **asked)
            if dtypes in seen:
                return found
            results.check_form(self.name, self.outputs, bool(self.mutated), found)
            if not any(is_dry(tensor) for tensor in given):
                if not self.mutated:
                    results.check_outputs(self.name, self.reference, args, found[0])
                    results.check_fresh(
                        self.name, [(one.name, args[i]) for i, one in enumerate(self.parameters)], found[0]
                    )
                seen.add(dtypes)
            return found

        self._unserved.clear()
        self.forward, self.launch_forward = launch, self._runnable(launch if _is_own(launch) else looked_at)
        self.forward_asks = not self.mutated and "needs_grad" in inspect.signature(launch).parameters

    @contextmanager
    def _left_alone(self, args: Sequence[Any]) -> Iterator[None]:
        """Raise `InputError` where code inside changes a tensor that the operator does not declare to change."""
        changed = [args[i] for i in (*self.mutated, *self.updated) if args[i] is not None]
        with observed.unseen():
            given = [(self.parameters[i].name, args[i]) for i in self.tensors if args[i] is not None]
            inputs = [(name, one) for name, one in given if not is_dry(one) and not shares_memory(one, changed)]
            before = [torch_private.version(one) for _, one in inputs]
        with left_alone([(name, one, f", or declare operator(..., mutates=({name!r},))") for name, one in inputs]):
            yield
        with observed.unseen():
            after = [torch_private.version(one) for _, one in inputs]
        for (name, _), was, now in zip(inputs, before, after):
            if was != now:
                raise InputError(
                    f"{self.name}: forward changes {name} in place, and the operator does not say so, so that a gradient "
                    f"would be wrong: work on {name}.clone(), or declare operator(..., mutates=({name!r},))"
                )

    def _backward_looked_at(self, grads: Any, outputs: Any, saved: Any, args: Any, *more: Any) -> Any:
        """Run backward, and check that its launches change nothing but `saved`, until that has held once."""
        assert self.launch_backward is not None
        given = [("the gradient of an output", one) for one in grads]
        given += [("an output", one) for one in outputs]
        given += [(one.name, value) for one, value in zip(self.parameters, args)]
        tensors = [(name, one, "") for name, one in given if isinstance(one, Tensor)]
        if any(is_dry(one) for _, one, _ in tensors):
            return self.launch_backward(grads, outputs, saved, args, *more)
        with left_alone(tensors):
            found = self.launch_backward(grads, outputs, saved, args, *more)
        self._leaves_alone = True
        return found

    def check_takes(self, role: str, launch: Callable[..., Any], needs_grad: bool = False) -> None:
        """A role takes the reference's arguments, in their order. Raises `InputError` where it has other parameters."""
        schema.check_takes(self.name, self.parameters, role, launch, needs_grad)

    def _runnable(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an in-place forward so that it checks first, and returns the result of a call."""
        if self.updated:

            def updating(*args: Any) -> tuple[Any, Any]:
                tensors = {i: args[i] for i in self.updated if args[i] is not None}
                for index, tensor in tensors.items():
                    refuse_in_place(f"{self.name}: {self.parameters[index].name}", tensor)
                found = launch(*args)
                versions.raise_all(tensors.values())
                return found

            return updating
        if not self.mutated:
            return launch

        def in_place(*args: Any) -> tuple[Any, Any]:
            tensors = self.changed(args)
            for name, tensor in zip(self.mutates, tensors):
                refuse_in_place(f"{self.name}: {name}", tensor)
            found = launch(*args)
            _, saved = (None, ()) if found is None else found
            versions.raise_all(tensors)
            return self.returned(tensors), saved

        return in_place

    def set_backward(self, launch: Callable[..., Any], reads: Mapping[str, Sequence[str]], apart: bool = False) -> None:
        """Take the backward role."""
        self.launch_backward = role = Backward(self, launch, "backward", reads)
        self.gives_gradients, self._leaves_alone = False, _is_own(launch)
        self.named, self.backward_asks = role.named, ("last", 0) in role.wants
        self.backward_chooses = apart
        self._choose_kept()

    def set_gradient(self, gradient: Callable[..., Any]) -> None:
        """Take the reference_backward role."""
        self.gradient = Backward(self, gradient, "reference_backward")
        self._choose_kept()

    def _choose_kept(self) -> None:
        """Choose what is kept: for kernels what the roles name, and all inputs where the reference is differentiated."""
        roles = [role for role in (self.launch_backward, self.gradient) if role is not None]
        named = {i for role in roles for i in role.inputs}
        everything = self.gradient is None or self.launch_backward is None
        lasting = tuple(i for i in self.tensors if i not in self.updated)
        inputs = tuple(i for i in lasting if i not in self.mutated and (everything or i in named))
        outputs = tuple(i for i in range(self.outputs) if any(i in role.outputs for role in roles))
        self.kept_by_kernels = Kept(self.arity, self.tensors, self.outputs, inputs, outputs)
        self.kept_by_reference = Kept(self.arity, self.tensors, self.outputs, lasting, ())
        self._kept_by_needs: dict[tuple[bool, ...], Kept] = {}

    @property
    def kept_by_gradient(self) -> bool:
        """True if the tensors kept depend on the gradients that will be asked for."""
        return self.launch_backward is not None and self.launch_backward.reads_by_gradient

    def kept(self, needs: Sequence[bool]) -> Kept:
        """Return which tensors are kept for a backward by kernels that will be asked for these gradients."""
        if not self.kept_by_gradient:
            return self.kept_by_kernels
        key = tuple(needs)
        if key not in self._kept_by_needs:
            assert self.launch_backward is not None
            self._kept_by_needs[key] = self.kept_by_kernels.without(*self.launch_backward.unread(key))
        return self._kept_by_needs[key]


def shares_memory(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Return True if a tensor shares its storage with one of the others."""
    return any(tensor.untyped_storage()._cdata == one.untyped_storage()._cdata for one in others)


def _is_own(launch: Callable[..., Any]) -> bool:
    """Return True if a role is one of this package, which its tests look at."""
    return str(getattr(launch, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def like_outputs(grads: Sequence[Tensor | None], strides: Sequence[Any]) -> list[Tensor | None]:
    """Gradients laid out as their outputs were: an expanded or transposed one is copied, once, here."""
    return [grad if grad is None else restride(grad, stride) for grad, stride in zip(grads, strides)]


def differentiable_alias(tensor: Tensor) -> Tensor:
    """`tensor` under another identity, so that a gradient with respect to it can be asked for."""
    if tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_() if takes_gradient(tensor) else tensor


def takes_gradient(tensor: Tensor) -> bool:
    """Return True if the tensor has a dtype that autograd differentiates."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def wants_gradient(tensors: Sequence[Tensor]) -> bool:
    """Return True if autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _warns_only() -> bool:
    return torch.is_deterministic_algorithms_warn_only_enabled()


def refuse_in_place(name: str, tensor: Tensor) -> None:
    """Raise `InputError` for what PyTorch does not change in place either."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise InputError(
            f"{name} is an inference tensor, which cannot be changed in place outside inference mode; give a copy of it"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
        raise InputError(f"{name} is expanded: several of its elements are one place in memory; give a copy of it")
