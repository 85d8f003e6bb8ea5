"""Heads and losses of transformers in one: a model that trains computes its loss and makes no logits.

While such a model's forward runs, its head gives the rows that it was given, and the loss function takes them and the head's
weight. The forward hands what the head gives to the loss and into its output alone: its text is read for that.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Linear, Module, Parameter

from ...errors import InputError
from ...ops._fused_linear_cross_entropy import SCRATCH, fused_linear_cross_entropy
from . import classes, texts
from .report import Reason

_HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass
class _Run:
    """A forward that runs: of which model, with which head, and what the head gave in the place of logits."""

    model: Module
    head: Module
    rows: Tensor | None = None


_now: ContextVar[_Run | None] = ContextVar("_now", default=None)


def are_rows(rows: Tensor) -> bool:
    """Return whether a tensor is the rows that a head has given in the place of logits."""
    run = None if is_dynamo_compiling() else _now.get()
    return run is not None and run.rows is rows


def loss_of(rows: Tensor, classes: int) -> Callable[..., Tensor] | None:
    """The loss as a function of targets, ignore_index and reduction, if `rows` are a head's in the place of logits."""
    if not are_rows(rows):
        return None
    run: Any = _now.get()
    head = run.head
    if head.out_features != classes:
        raise InputError(
            f"the head has {head.out_features} classes, and the loss {classes}; swap with keep_logits=True"
        )
    flat = rows.reshape(-1, rows.shape[-1])

    def loss(targets: Tensor, ignore_index: int, reduction: str = "mean") -> Tensor:
        options: Any = {"ignore_index": ignore_index, "reduction": reduction, "scratch": SCRATCH}
        return fused_linear_cross_entropy(flat, head.weight, targets, head.bias, **options)

    return loss


def join(model: Module, why_kept: Callable[[Module], Reason | None]) -> tuple[str, Callable[[], None] | None]:
    """Have a model whose loss function is ours make no logits when it trains: in words, and what takes that back.

    why_kept: why a head is to stay as it is, None where it is not.
    """
    name = _name(model)
    head = None if name is None else getattr(model, name)
    if name is None or head is None:
        return "its forward does more with them than give them to the loss, or the head is no Linear of its own", None
    if (reason := why_kept(head)) is not None:
        return f"{name} stays as it is: {reason.text}", None
    if "forward" in vars(head):
        return f"{name} has a forward of its own", None
    hooks = _Hooks(model, name, list(inspect.signature(model.forward).parameters).index("labels"))
    before = model.register_forward_pre_hook(hooks.before, with_kwargs=True)
    after = model.register_forward_hook(hooks.after, always_call=True)
    ours = head.forward = functools.partial(_forward, head)

    def reset() -> None:
        before.remove()
        after.remove()
        if vars(head).get("forward") is ours:
            del vars(head)["forward"]

    return name, reset


class _Hooks:
    """Before and after the forward of a model.

    Args:
        model: the model, whose class has the forward that was read.
        head: its name in the model.
        at: which of the forward's parameters `labels` is.
    """

    def __init__(self, model: Module, head: str, at: int) -> None:
        self.head, self.at = head, at
        self.cls = classes.original(type(model)) or type(model)
        self.forward = self.cls.forward

    def before(self, model: Module, args: Any, kwargs: Any) -> None:
        labels = args[self.at] if len(args) > self.at else kwargs.get("labels")
        head = getattr(model, self.head)
        trains = model.training and torch.is_grad_enabled() and not is_dynamo_compiling()
        # of parameters in parts, as FSDP2 has them, the whole is there while the head's own forward runs
        whole = type(head.weight) is Parameter and not head._forward_pre_hooks and not head._forward_hooks
        as_read = self.cls.forward is self.forward and "forward" not in vars(model)
        if labels is not None and trains and whole and as_read and _now.get() is None:
            _now.set(_Run(model, head))

    def after(self, model: Module, args: Any, output: Any) -> Any:
        run = None if is_dynamo_compiling() else _now.get()
        if run is None or run.model is not model:
            return None
        _now.set(None)
        return None if run.rows is None else _without(output, run.rows)


def _forward(head: Linear, input: Tensor) -> Tensor:
    """A head's forward, which gives its input where the loss is to take that."""
    run, device = None if is_dynamo_compiling() else _now.get(), input.device.type
    if run is not None and run.head is head and run.rows is None:
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        if dtype in _HALF:
            run.rows = input.view_as(input)
            return run.rows
    return type(head).forward(head, input)


def _without(output: Any, rows: Tensor) -> Any:
    """A forward's output, a tuple or one of transformers', with None in the place of logits."""
    if isinstance(output, tuple):
        return tuple(None if one is rows else one for one in output)
    if getattr(output, "logits", None) is rows:
        return dataclasses.replace(output, logits=None)
    return output


def _name(model: Module) -> str | None:
    """The head's name, if the forward gives its logits to the loss function and into the output, and does nothing else."""
    tree = texts.parsed(inspect.unwrap(type(model).forward))
    if tree is None:
        return None
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    heads = {node: _head_of(node, model) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    calls = [node for node, head in heads.items() if head is not None]
    if len(calls) != 1 or "labels" not in inspect.signature(model.forward).parameters:
        return None
    match above[calls[0]]:
        case ast.Assign(targets=[ast.Name(id=name)]) if _is_plain(name, tree, above):
            return heads[calls[0]]
    return None


def _head_of(call: ast.Call, model: Module) -> str | None:
    """The name of the head, if that is what is called: `self.lm_head(...)`."""
    get: Any = getattr(model, "get_output_embeddings", lambda: None)
    match call.func:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            head = model._modules.get(name)
            return name if isinstance(head, Linear) and head is get() else None
    return None


def _is_plain(name: str, tree: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a variable is assigned once, and goes to the loss function and into the output alone."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    read = [node for node in found if isinstance(node.ctx, ast.Load)]
    return len(found) == len(read) + 1 and all(_is_handed_on(node, above) for node in read)


def _is_handed_on(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    parent = above[node]
    match above[parent] if isinstance(parent, ast.keyword) else parent:
        case ast.Call(func=ast.Attribute(attr="loss_function")):
            return True
        case ast.Call(func=ast.Name(id=called)):
            return "Output" in called and isinstance(parent, ast.keyword)
        case ast.Tuple(elts=[_]):  # (logits,) + outputs[1:]
            return True
    return False
