"""A base for the twins of torch.nn's modules: how torch.fx and torch.jit take them."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InputError


def parameter(module: torch.nn.Module, name: str) -> Any:
    """A parameter, or what stands in its place, without the slow search for an attribute."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


class Twin:
    """A base of modules that stand for one of torch.nn."""

    def _cupyops_leaf(self, *args: Any, **kwargs: Any) -> Any:
        """A node that calls the module, as torch.fx has for a module of torch.nn, which it does not look into.

        None where it is to look into the module: where that is what is traced, or of a class that somebody has derived.
        """
        proxy = args[0]
        if not isinstance(proxy, torch.fx.Proxy) or not type(self).__module__.startswith("cupyops.nn."):
            return None
        tracer: Any = proxy.tracer
        if getattr(tracer, "root", self) is self:
            return None
        return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

    def __prepare_scriptable__(self) -> Any:
        raise not_scriptable(self)


def not_scriptable(module: Any) -> InputError:
    """The error of torch.jit.script for a module that runs operators of cupyops."""
    return InputError(
        f"torch.jit.script cannot compile {type(module).__name__}, which runs operators of cupyops: call undo() of what "
        "cupyops.swap returned and script the model as it was, or use torch.jit.trace, torch.export or torch.compile"
    )
