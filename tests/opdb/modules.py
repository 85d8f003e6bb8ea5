"""The entries of module_db that are of cupyops.nn: a module of ours beside PyTorch's, with the same parameters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.testing._internal.common_utils import gradcheck, gradgradcheck

import cupyops
from cupyops.testing.recast import rounded_otherwise

from .comparison import assert_same, strides, tensors, widened
from .known import MODULES

INFOS = [
    info for info in module_db if info.module_cls.__name__ in MODULES and info.module_cls.__module__[:8] == "torch.nn"
]
WITH_ERRORS = [info for info in INFOS if info.module_error_inputs_func is not None]


def samples(info: Any, device: torch.device, dtype: torch.dtype, training: bool) -> list[Any]:
    """Arguments of constructor and call."""
    options = {"device": device, "dtype": dtype, "requires_grad": True, "training": training}
    found = list(info.module_inputs_func(info, **options))
    # the same twice, by batch_first, which does not matter without a batch
    if info.module_cls is nn.MultiheadAttention:
        for sample in found[1::2]:
            sample.forward_input.kwargs["need_weights"] = False  # else PyTorch computes it, ours or not
    return found


def modes(info: Any) -> tuple[bool, ...]:
    """Training, and evaluation where that is another matter."""
    return (True, False) if info.train_and_eval_differ else (True,)


class Pair:
    """One sample: our module and PyTorch's, with the same parameters, and arguments of its own for each."""

    def __init__(self, info: Any, sample: Any, device: torch.device, dtype: torch.dtype, training: bool) -> None:
        given = sample.constructor_input
        name = info.module_cls.__name__
        self.theirs = info.module_cls(*given.args, **given.kwargs).to(device, dtype).train(training)
        self.ours = getattr(cupyops.nn, name)(*given.args, **given.kwargs).to(device, dtype).train(training)
        self.ours.load_state_dict(self.theirs.state_dict())
        self.given = sample.forward_input
        self.what = f"{name} {sample.desc} in {'training' if training else 'evaluation'}"

    def arguments(self, change: Callable[[Tensor], Tensor] = Tensor.clone) -> tuple[list[Any], dict[str, Any]]:
        """Copies of the arguments of a call, its tensors changed."""

        def one(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return change(value.detach()).requires_grad_(value.requires_grad)

        return [one(value) for value in self.given.args], {name: one(v) for name, v in self.given.kwargs.items()}

    def compare(self, change: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        """Raise unless results, strides, gradients of arguments and parameters, and the buffers afterwards are PyTorch's."""
        before = copy.deepcopy(self.theirs)
        mine, expected = self._both_ways(self.ours, change), self._both_ways(self.theirs, change)

        def truth(near: Callable[[Tensor], Tensor] = widened) -> list[Tensor | None]:
            wide = copy.deepcopy(before).double()
            with torch.no_grad():
                for exact, parameter in zip(wide.parameters(), before.parameters()):
                    exact.copy_(near(parameter))
            return self._both_ways(wide, lambda tensor: near(change(tensor)))

        def conditioned(index: int) -> float:
            """How far one unit in the last place of arguments and parameters carries: where terms cancel, as far as that."""
            source = torch.Generator().manual_seed(0)
            moved = truth(lambda x: rounded_otherwise(x, source) if x.is_floating_point() else x)[index]
            return float((moved - truth()[index]).abs().max())  # type: ignore[operator]

        assert len(mine) == len(expected)
        for index, (a, b) in enumerate(zip(mine, expected, strict=True)):
            assert (a is None) == (b is None), f"result {index} is {a}, PyTorch's {b}"
            if a is not None and b is not None:
                assert strides(a) == strides(b), f"result {index} has strides {a.stride()}, PyTorch's {b.stride()}"
                assert_same(a, b, lambda i=index: truth()[i], f"result {index}", lambda i=index: conditioned(i))  # type: ignore[misc]
        for (name, a), (other, b) in zip(self.ours.named_buffers(), self.theirs.named_buffers(), strict=True):
            assert name == other
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")

    def _both_ways(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """Outputs; then gradients, of what wants one."""
        args, kwargs = self.arguments(change)
        outputs = tensors(module(*args, **kwargs))
        wanted = [one for one in (*args, *kwargs.values(), *module.parameters()) if _wants_gradient(one)]
        takes = [y for y in outputs if y.requires_grad]
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype) for y in takes]
        found = torch.autograd.grad(takes, wanted, grads, allow_unused=True) if takes and wanted else ()
        # those of parameters as `backward` leaves them, laid out as the parameter is
        found = [
            g.contiguous() if g is not None and isinstance(one, nn.Parameter) and one.is_contiguous() else g
            for one, g in zip(wanted, found)
        ]
        return [*[y.detach() for y in outputs], *found]

    def states(self) -> None:
        """Raise unless state dicts go both ways, and what is copied or pickled is the same module."""
        assert list(self.ours.state_dict()) == list(self.theirs.state_dict())
        assert repr(self.ours) == repr(self.theirs) and type(self.ours) is not type(self.theirs)
        self.theirs.load_state_dict(self.ours.state_dict(), strict=True)
        args, kwargs = self.arguments()
        copies = copy.deepcopy(self.ours), pickle.loads(pickle.dumps(self.ours))
        with torch.no_grad():
            expected = tensors(self.ours(*args, **kwargs))
            for one in copies:
                torch.testing.assert_close(tensors(one(*args, **kwargs)), expected, rtol=0, atol=0, equal_nan=True)

    def is_finite(self) -> bool:
        """Whether PyTorch's results are."""
        args, kwargs = self.arguments()
        with torch.no_grad():
            return all(bool(y.isfinite().all()) for y in tensors(copy.deepcopy(self.theirs)(*args, **kwargs)))

    def derivative(self, check: Callable[..., Any], info: Any) -> None:
        """PyTorch's own check, of arguments and parameters."""
        args, kwargs = self.arguments()
        inputs = [one for one in (*args, *kwargs.values(), *self.ours.parameters()) if _wants_gradient(one)]
        names = [name for name, _ in self.ours.named_parameters()]

        def call(*values: Tensor) -> Any:
            exchanged = {id(old): new for old, new in zip(inputs, values)}
            new = lambda value: exchanged.get(id(value), value)
            parameters = {name: new(one) for name, one in zip(names, self.ours.parameters())}
            buffers = {name: one.clone() for name, one in self.ours.named_buffers()}
            keywords = {name: new(value) for name, value in kwargs.items()}
            found = torch.func.functional_call(self.ours, {**parameters, **buffers}, tuple(map(new, args)), keywords)
            return tuple(y for y in tensors(found) if y.requires_grad)

        if inputs:
            check(call, inputs, nondet_tol=info.gradcheck_nondet_tol)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def strided(tensor: Tensor) -> Tensor:
    """The same values, every other element of a larger tensor."""
    return torch.repeat_interleave(tensor, 2, dim=-1)[..., ::2] if tensor.dim() else tensor.clone()


DERIVATIVES: dict[str, Callable[..., Any]] = {"module gradcheck": gradcheck, "module gradgradcheck": gradgradcheck}


def refuses(info: Any, error: Any, kinds: Sequence[type[Exception]], device: torch.device) -> None:
    """Raise unless PyTorch's module refuses, and ours does with one of these errors, where PyTorch's does."""
    given, call = error.module_error_input.constructor_input, error.module_error_input.forward_input
    for cls, allowed in (
        (info.module_cls, (error.error_type,)),
        (getattr(cupyops.nn, info.module_cls.__name__), tuple(kinds)),
    ):
        try:
            with device:
                module = cls(*given.args, **given.kwargs)
            if error.error_on is ModuleErrorEnum.FORWARD_ERROR:
                module(*call.args, **call.kwargs)
        except allowed:
            continue
        raise AssertionError(f"{cls}: no error, expected {allowed}")
