"""What a small module computes, as a graph that holds for every input: a condition that asks the input is refused."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module


class Unknown(Exception):
    """Why it is not known what a module computes."""


class _Parameter(fx.Proxy):
    tracer: _Tracer
    """Of a parameter, what does not change is known: a condition of its dtype is none of the input."""

    def __getattr__(self, name: str) -> Any:
        value = _find(self.tracer.root, str(self.node.target))
        if name in ("dtype", "shape", "ndim", "is_cuda") and isinstance(value, Tensor):
            return getattr(value, name)
        return super().__getattr__(name)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Parameter(node, self) if node.op == "get_attr" else super().proxy(node)


def graph_of(module: Module) -> fx.Graph:
    """The graph of a module's forward of one tensor, its other arguments by default. The modules inside are called."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if not parameters or any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters[1:]):
        raise Unknown("its forward takes several tensors, or none")
    if parameters[0].kind in (parameters[0].VAR_POSITIONAL, parameters[0].VAR_KEYWORD):
        raise Unknown("its forward takes any arguments")
    fixed = {p.name: p.default for p in parameters[1:] if p.kind is not p.VAR_KEYWORD}
    try:
        return _Tracer().trace(module, concrete_args=fixed)
    except Exception as error:
        raise Unknown(f"its forward cannot be traced ({type(error).__name__})") from error


def probe(module: Module, parameters: dict[str, Tensor], modules: dict[str, Module] | None = None) -> Module:
    """A module that computes as another does, with other parameters and other modules inside, and without hooks."""
    made = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        made.__dict__[name] = dict(made.__dict__[name])
    made._parameters.update({n: torch.nn.Parameter(t) for n, t in parameters.items()})
    made._modules.update(modules or {})
    for name, value in made.__dict__.items():
        if "hooks" in name:
            made.__dict__[name] = type(value)()
    return made


def name_of(node: fx.Node) -> str:
    """A node's operation in one word, whichever way it was written: `mul` for `*`, `torch.mul` and `Tensor.mul`."""
    target: Any = node.target
    word = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return word.strip("_") if node.op != "call_module" else "call_module"


def _find(root: Any, path: str) -> Any:
    """A parameter by its name, without asking for an attribute, which is what is traced."""
    *modules, name = path.split(".")
    for part in modules:
        root = root._modules[part]
    return root._parameters.get(name)
