"""Runs a call once and notes what it does on the host: what it allocates, which functions it calls, what it launches.

What depends on the metadata of the arguments alone is the same at each call alike, so a recording can be replayed. What
gives Python the data of a tensor is told apart here, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._kernel.kernel import executors
from ..._kernel.launch import faults
from ..._kernel.launch.pointers import Pointers
from ..._kernel.launch.tensor_map import ADDRESS_ALIGNMENT, TensorMap
from ..._util import observed, torch_private
from ..._util.allocations import EMPTY
from .constants import AccessorRef, MapRef, NoConstant, PointersRef, Ref, freeze
from .kept import Kept
from .steps import Alloc, Bump, Call, Inner, Launch, Recording, Step, View, numbers_in

_SEEN = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "names"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
)
_ASKED = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "dim_order", "__len__"),
    *(
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_neg",
        "is_conj",
        "is_inference",
        "has_names",
    ),
)
_VIEWS = ("T", "mT", "H", "mH", "real", "imag", "data")

# of a tensor what its key says: anything else that is no tensor may depend on its data
_METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in _SEEN if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _ASKED if hasattr(Tensor, name)]
    + [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.is_neg, torch.is_conj]
    + [torch.result_type, torch.promote_types, torch.broadcast_shapes, torch.is_same_size]
)
_GETTERS = frozenset(getattr(Tensor, name).__get__ for name in _VIEWS)
_AUTOGRAD = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.requires_grad_))
_UNAFFECTED = frozenset(
    (
        Tensor.to,
        Tensor.contiguous,
        Tensor.clone,
        torch.clone,
        Tensor.copy_,
        torch.randint,
        torch.zeros,
        torch.zeros_like,
    )
)  # by autocast
_MOST_ALIGNED = 256  # to which every allocation is


class Recorder(TorchFunctionMode):
    """Notes what is done with `inputs` while `run` runs; without `launches`, also what launches nothing is replayed."""

    ours = True

    def __init__(self, inputs: Sequence[Tensor], launches: bool = True) -> None:
        super().__init__()
        self._must_launch = launches
        self.inputs = len(inputs)
        self.reason = ""  # why it cannot be replayed
        self.passing = False  # and worth trying again
        self._operators: list[Any] = []
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._at: list[tuple[int, int] | None] = []  # of each tensor: in which other's memory it lies, and where
        self._steps: list[Step] = []
        self._asked: dict[int, int] = {}
        self._default_dtype = False
        self._paused = False
        self._inner: Inner | None = None
        self._autocast = _autocast_state()
        self._grad = torch.is_grad_enabled()
        self._inside = False  # autograd.Function
        self._device = inputs[0].device
        for tensor in inputs:
            self._number(tensor, None)

    def run(self, function: Callable[[], Any]) -> tuple[Any, Recording | None]:
        """Run `function()` and return its result and its recording; None if it cannot be replayed, and `reason` says why."""
        if faults.debug:
            self.refuse("CUPYOPS_DEBUG waits for each launch")
        with observed.recording(self), self:
            result = function()
        try:
            return result, None if self.reason else self._recording(result)
        finally:
            self._tensors.clear()

    def refuse(self, reason: str, passing: bool = False) -> None:
        """Note that the call cannot be replayed; `passing`: perhaps another time."""
        if not self.reason:
            self.reason, self.passing = reason, passing

    @contextmanager
    def paused(self) -> Any:
        """Record nothing of what is done inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # --- what happens ---

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.reason and not self._paused and func not in _METADATA:
            try:
                self._note(func, args, kwargs, result)
            except NoConstant as found:
                self.refuse(f"{_name(func)} was given {found}")
            except Exception as error:  # the call goes on: it is the recording that has failed
                self.refuse(f"{_name(func)} cannot be recorded: {error}")
        return result

    def ran(self, operator: Any) -> None:
        """The roles of an operator ran, given as its definition: a change of them makes the recording void."""
        if operator not in self._operators:
            self._operators.append(operator)

    def launched(self, specialised: Any, loaded: Any, configuration: Any, args: tuple[Any, ...]) -> None:
        """A kernel was launched."""
        if self.reason:
            return
        if loaded is None and executors.get(self._device.type) is None:
            return  # a dry run
        try:
            arguments = _simulated(specialised, self._device, len(args)) if loaded is None else loaded.arguments
            values = tuple(map(self._argument, arguments, args))
            for argument, value in zip(() if loaded is None else loaded.arguments, args):
                if argument.dtype is None and argument.boundary > 1 and isinstance(value, Tensor):
                    self.alignment(value, argument.boundary)  # which the launch has found to be so
            self._refuse_tables(loaded, args)
            for value in args:
                if isinstance(value, TensorMap):
                    self.alignment(value.tensor, ADDRESS_ALIGNMENT)
            self._steps.append(Launch(specialised, loaded, configuration, values, freeze(values)))
        except NoConstant as found:
            self.refuse(f"{specialised.name} was given {found}")

    def _refuse_tables(self, loaded: Any, args: tuple[Any, ...]) -> None:
        """A table of pointers is copied to the GPU by the host, which generated code does not do."""
        for argument, value in zip(() if loaded is None else loaded.arguments, args):
            if isinstance(value, Pointers) and argument.kind == "pointer":
                self.refuse(
                    f"{argument.name} is a table of pointers in memory; a struct of them, by value, is recorded"
                )

    def bumped(self, tensors: Sequence[Tensor]) -> None:
        """The version counters of these tensors were raised."""
        for tensor in tensors:
            number = self._numbers.get(id(tensor))
            if number is None:
                self.refuse("it changes a tensor that is none of its arguments")
            else:
                self._steps.append(Bump(number))

    def alignment(self, tensor: Tensor, most: int) -> int:
        """The greatest power of two, up to `most`, that the address is a multiple of; this may be asked of addresses."""
        with self.paused():
            address = tensor.data_ptr()
        number = self._numbers.get(id(tensor))
        if number is None:
            self.refuse("it looks at the address of a tensor that is none of its arguments")
        elif self._root(number) < self.inputs:
            root = self._root(number)
            self._asked[root] = max(self._asked.get(root, 1), most)
        elif most > _MOST_ALIGNED:
            self.refuse(f"it asks whether memory of its own is aligned to {most} bytes")
        return min(address & -address, most) if address else most

    def differentiable(
        self, operator: Any, args: tuple[Any, ...], kept: Kept, forward: Callable[[], tuple[Any, Any]]
    ) -> Any:
        """The forward of the one operator of the recording, where a gradient is wanted."""
        start = len(self._steps)
        self._inside = True
        try:
            outputs, saved = forward()
        finally:
            self._inside = False
        if self.reason:
            return outputs, saved
        if self._inner is not None:
            self.refuse("it calls several operators, and a gradient is wanted")
            return outputs, saved
        try:
            values = tuple(self._constant(value) for value in args)
            with self.paused():
                known = kept.values(args)
                strides = tuple(tuple(y.stride()) for y in outputs)
                exact = operator.exact(outputs)
                floating = tuple(all(y is not one for one in exact) for y in outputs)
            self._inner = Inner(
                operator,
                start,
                len(self._steps),
                values,
                freeze(values),
                tuple(self._known(one, "returns").number for one in outputs),
                strides,
                floating,
                tuple(self._known(one, "saves").number for one in saved),
                kept=kept,
                values=known,
            )
        except NoConstant as found:
            self.refuse(f"{operator.name}: {found}")
        return outputs, saved

    # --- what it is ---

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        tensors = list(_tensors((args, kwargs)))
        if func is torch_private.set_grad_enabled:
            return
        if func in _AUTOGRAD:
            return self.refuse(f"{_name(func)} works on the graph")
        results = [result] if result is None or isinstance(result, Tensor) else result
        if not (isinstance(results, (tuple, list)) and all(one is None or isinstance(one, Tensor) for one in results)):
            if tensors:
                self.refuse(f"{_name(func)} gives Python what may depend on data")
            return
        if _name(func) == "__get__" and func not in _GETTERS:
            return self.refuse("it looks at an attribute of a tensor that no key holds")
        if not tensors or func in EMPTY:
            self._default_dtype |= kwargs.get("dtype") is None and not tensors
            if kwargs.get("device") is None and not tensors:
                return self.refuse(f"{_name(func)} is given no device")
        if torch.is_grad_enabled() != (self._grad and not self._inside) and any(one.requires_grad for one in tensors):
            return self.refuse(f"{_name(func)} is called with gradients on or off as a replay has not")
        unknown = [one for one in tensors if id(one) not in self._numbers]
        if unknown:
            return self.refuse(f"{_name(func)} is given a tensor that is none of its arguments")
        if func in EMPTY and self._is_plain(result, kwargs):
            number = self._number(result, None)
            self._steps.append(Alloc(number, tuple(result.shape), result.stride(), result.dtype))
            return
        if _autocast_state() != self._autocast and func not in _UNAFFECTED and not _is_view(results, tensors):
            return self.refuse(f"{_name(func)} is called under another autocast than the operator")
        if result is not None and not _changes(func, kwargs) and all(id(one) in self._numbers for one in results):
            return  # an argument itself, as .contiguous() of what is contiguous
        self._steps.append(
            self._call(func, args, kwargs, results, result is None or isinstance(result, Tensor), tensors)
        )

    def _call(self, func: Any, args: Any, kwargs: Any, results: Any, single: bool, tensors: list[Tensor]) -> Call:
        values, options = self._constant(tuple(args)), self._constant(kwargs)
        key = freeze((values, options))
        bases = {_storage(one): one for one in tensors}
        numbers: list[int | None] = []
        view: tuple[int, int] | None = None
        for one in results:
            if one is None or id(one) in self._numbers:
                numbers.append(None if one is None else self._numbers[id(one)])
                continue
            base = bases.get(_storage(one))
            if base is not None:
                view = self._numbers[id(base)], _offset(one) - _offset(base)
            numbers.append(self._number(one, view if base is not None else None))
        if view is not None and single:
            return View(func, values, options, tuple(numbers), single, (func, key), *view)
        return Call(func, values, options, tuple(numbers), single, (func, key))

    def _is_plain(self, tensor: Any, kwargs: dict[str, Any]) -> bool:
        """Return True if an allocation is memory of the call's device, and nothing more."""
        if kwargs.get("out") is not None or kwargs.get("pin_memory") or tensor.requires_grad:
            return False
        return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device == self._device

    def _argument(self, argument: Any, value: Any) -> Any:
        """Return the constant for an argument of a launch; for an accessor with the sizes and strides of its tensor."""
        found = self._constant(value)
        if isinstance(found, Ref) and argument is not None and argument.accessor is not None:
            return AccessorRef(found, argument.accessor.packed(value, 0))
        return found

    def _constant(self, value: Any) -> Any:
        """An argument with a Ref in the place of each tensor, and arrays as they are now."""
        if isinstance(value, Tensor):
            return self._known(value, "is given")
        if isinstance(value, TensorMap) and value.description is not None:
            return MapRef(self._known(value.tensor, "is given"), value.description, value.written)
        if isinstance(value, Pointers):
            entries = (None if one is None else self._known(one, "is given") for one in value.entries)
            return PointersRef(tuple(entries), value.written)
        if type(value) in (tuple, list):
            return type(value)(self._constant(one) for one in value)
        if type(value) is dict:
            return {name: self._constant(one) for name, one in value.items()}
        return value.copy() if isinstance(value, np.ndarray) else value

    def _known(self, tensor: Tensor, verb: str) -> Ref:
        number = self._numbers.get(id(tensor))
        if number is None:
            raise (
                NoConstant("a tensor that is none of its arguments")
                if verb == "is given"
                else NoConstant(f"it {verb} a tensor that it has made out of sight")
            )
        return Ref(number)

    def _number(self, tensor: Tensor, at: tuple[int, int] | None) -> int:
        number = len(self._tensors)
        self._tensors.append(tensor)  # alive as long as the recording, so that no other has its id
        self._numbers.setdefault(id(tensor), number)
        self._at.append(at)
        return number

    def _root(self, number: int) -> int:
        at = self._at[number]
        return number if at is None else self._root(at[0])

    def _recording(self, result: Any) -> Recording | None:
        try:
            value = self._constant(result)
            key = freeze(value)
        except NoConstant as found:
            self.refuse(f"it returns {found}")
            return None
        if self._must_launch and not any(isinstance(step, Launch) for step in self._steps):
            self.refuse("it launches no kernel")
            return None
        if self._inner is not None:
            outputs = tuple(numbers_in(value))
            if len(self._steps) > self._inner.end or outputs != self._inner.outputs:
                self.refuse("it does more after its operator, and a gradient is wanted")
                return None
        asked = [(root, most, self._tensors[root].data_ptr() % most) for root, most in sorted(self._asked.items())]
        return Recording(
            self.inputs,
            tuple(self._steps),
            value,
            key,
            tuple(asked),
            self._default_dtype,
            tuple(self._operators),
            self._inner,
        )


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _simulated(specialised: Any, device: torch.device, count: int) -> Sequence[Any]:
    """Arguments that a kernel takes where it is simulated; None for each argument where another executor runs it."""
    arch = getattr(executors.get(device.type), "arch", None)
    return (None,) * count if arch is None else specialised.arguments(specialised.binary(arch))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(results: Any, tensors: list[Tensor]) -> bool:
    """Return True if all results share memory with the tensors given: autocast has cast nothing then."""
    given = {_storage(one) for one in tensors}
    return all(one is not None and _storage(one) in given for one in results)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _changes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if the function writes to a tensor that it is given: `copy_`, `+=`, `out=`."""
    name = _name(func)
    return name.endswith("_") or name.startswith("__i") or kwargs.get("out") is not None


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _autocast_state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu"))
