"""Settings of models of Hugging Face's transformers as a whole: attention, experts, and the loss function."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..._util import observed
from ...ops._cross_entropy import cross_entropy_fp32
from . import calls, classes, heads, proof
from .experts import EXPERTS
from .report import Reason
from .tables import ATTENTION, OF_EXPERTS

_HALF = (torch.float16, torch.bfloat16)
_NO_MODEL = "logits: kept, since no model of transformers has a loss of its own"


def settings(
    names: dict[Module, list[str]], choice: Callable[[list[str]], Reason | None], exact: bool, keep_logits: bool
) -> tuple[list[str], list[Callable[[], None]]]:
    """Set attention, experts and loss of the models of transformers among modules; what was set, and what sets it back."""
    said: list[str] = []
    resets: list[Callable[[], None]] = []
    library = sys.modules.get("transformers")
    base = getattr(library, "PreTrainedModel", None)
    if base is None:
        return said if keep_logits else [_NO_MODEL], resets
    models = {m: called for m, called in names.items() if isinstance(m, base) and choice(called) is None}
    said += dict.fromkeys(_of_tables(models))
    said += dict.fromkeys(_set_losses(models, resets))
    said += () if keep_logits else dict.fromkeys(_set_heads(models, lambda head: choice(names[head]), resets))
    return said, resets


# --- attention and experts --------------------------------------------------------------------------------------------


def _of_tables(models: Iterable[Module]) -> list[str]:
    """Describe the attention and the experts of models, which their modules take from our tables."""
    said = []
    for model in models:
        recipes = [recipe for one in model.modules() if (recipe := classes.recipe_of(type(one))) is not None]
        used = {name for recipe in recipes if recipe.kind == "calls" for name in recipe.values[1]}
        now = getattr(model.config, "_attn_implementation", None)
        if now == "sdpa" and "attention" in used:
            said.append(f'attention: "sdpa", now "{ATTENTION}"')
        elif now not in (None, "sdpa", ATTENTION):
            said.append(f'attention: "{now}", kept: only "sdpa" is the same function')
        if OF_EXPERTS in used:
            implementation = getattr(model.config, "_experts_implementation", None)
            said.append(f'experts: "{implementation}", now "{EXPERTS}"')
    return said


# --- the loss -------------------------------------------------------------------------------------------------------


def _of_floats(logits: Tensor, labels: Tensor, ignore_index: int, reduction: str = "mean") -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction=reduction)


def _masked(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Tensor:
    """`ForMaskedLMLoss`, without its copy of the logits in fp32, and without the logits where a head gives none."""
    labels = labels.view(-1).to(logits.device)
    loss = heads.loss_of(logits, vocab_size)
    if loss is None and observed.is_left_to_compilers(logits):
        loss = functools.partial(_of_floats, logits.view(-1, vocab_size))
    elif loss is None:
        loss = functools.partial(cross_entropy_fp32, logits.view(-1, vocab_size))
    if num_items_in_batch is None:
        return loss(labels, ignore_index)
    total = loss(labels, ignore_index, "sum")
    items = num_items_in_batch
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def _causal(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """`ForCausalLMLoss`, as `_masked`."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    return _masked(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


_OF_HALF: dict[str, Callable[..., Tensor]] = {"ForCausalLMLoss": _causal, "ForMaskedLMLoss": _masked}


@functools.cache
def _of_half(function: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """Return our function for a loss of transformers with logits of half types, once both have been compared."""
    ours = _OF_HALF.get(getattr(function, "__name__", ""))
    if ours is None or not str(getattr(function, "__module__", "")).startswith("transformers.loss"):
        return None
    labels, logits = torch.tensor([[1, 6, -100, 0, 3]]), [proof.random((1, 5, 7), torch.bfloat16, 0)]
    for items in (None, 3, torch.tensor(7)):
        of: dict[str, Any] = {"labels": labels, "vocab_size": 7, "num_items_in_batch": items}
        if not proof.alike(functools.partial(function, **of), functools.partial(ours, **of), logits):
            return None
    return ours


class Loss:
    """A loss function of transformers that calls functions of cupyops; pickled as the one that it was made of.

    Args:
        function: a function of a module.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.found = function, list[str]()
        self._ours = calls.rewritten(function, calls.Options(rotates=False, exact=False), self.found) or function
        self._of_half = _of_half(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        logits = args[0] if args else kwargs.get("logits")
        if (
            self._of_half is not None
            and isinstance(logits, Tensor)
            and (logits.dtype in _HALF or heads.are_rows(logits))
        ):
            return self._of_half(*args, **kwargs)
        return self._ours(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def is_known(self) -> bool:
        """True if this loss accepts a head's rows in place of logits."""
        return self._of_half is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return Loss, (self.function,)


def _set_losses(models: dict[Module, list[str]], resets: list[Callable[[], None]]) -> list[str]:
    said = []
    for model in models:
        forward = inspect.unwrap(type(model).forward)
        if "_loss_function" in vars(model) or "loss_function" not in forward.__code__.co_names:
            continue
        function: Any = model.loss_function
        loss: Any = Loss(function)
        if loss.found:
            model._loss_function = loss
            resets.append(functools.partial(_forget, model, "_loss_function", loss))
            said.append(f"loss: {loss.function.__name__}, now by {', '.join(dict.fromkeys(loss.found))} of cupyops")
    return said


def _forget(module: Module, name: str, value: Any) -> None:
    """Take an attribute of ours back, unless somebody has put another in its place."""
    if vars(module).get(name) is value:
        del vars(module)[name]


def _set_heads(
    models: Iterable[Module], why_kept: Callable[[Module], Reason | None], resets: list[Callable[[], None]]
) -> list[str]:
    """Join heads and losses, of which `_set_losses` has set the losses. why_kept: why a head stays as it is, or None."""
    said = []
    for model in models:
        if (refusal := _why_logits(model)) is None:
            found, reset = heads.join(model, why_kept)
            if reset is None:
                refusal = found
            else:
                resets.append(reset)
                said.append(f"logits: none when it trains; {found} and the loss are one fused_linear_cross_entropy")
        if refusal:
            said.append(f"logits: kept, since {refusal}")
    return said or [_NO_MODEL]


def _why_logits(model: Module) -> str | None:
    """Return why the loss of a model needs logits, "" for a model without a loss, None where a head's rows will do."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return ""
    loss = vars(model).get("_loss_function")
    if isinstance(loss, Loss):
        return None if loss.is_known else f"{loss.function.__name__} is another loss"
    if loss is not None:
        return "its loss_function is not one of transformers"
    if "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names:
        return f"{getattr(model.loss_function, '__name__', 'its loss_function')} is another loss"
    return "its forward computes the loss itself, without loss_function"
