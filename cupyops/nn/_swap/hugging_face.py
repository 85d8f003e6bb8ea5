"""What Hugging Face's transformers asks of a model as a whole: which attention, which experts, and which loss."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from ..._dispatch.attention import taken_mask
from ...ops._cross_entropy import cross_entropy_fp32
from . import calls, classes, experts, heads, packed, proof

ATTENTION = "cupyops"
_HALF = (torch.float16, torch.bfloat16)
_NO_MODEL = "logits: kept, since no model of transformers has a loss of its own"


def settings(
    names: dict[Module, list[str]], choice: Callable[[list[str]], str | None], exact: bool, keep_logits: bool
) -> tuple[list[str], list[Callable[[], None]]]:
    """Set attention, experts and loss of the models of transformers among modules; what was set, and what sets it back."""
    said: list[str] = []
    resets: list[Callable[[], None]] = []
    library = sys.modules.get("transformers")
    base = getattr(library, "PreTrainedModel", None)
    if base is None:
        return said if keep_logits else [_NO_MODEL], resets
    models = {m: called for m, called in names.items() if isinstance(m, base) and choice(called) is None}
    said += dict.fromkeys(_set_attention(models, resets))
    said += () if exact else dict.fromkeys(_set_experts(models, resets))
    said += dict.fromkeys(_set_losses(models, resets))
    said += () if keep_logits else dict.fromkeys(_set_heads(models, lambda head: choice(names[head]), resets))
    return said, resets


# --- attention ------------------------------------------------------------------------------------------------------


@functools.cache
def register() -> None:
    """Make `attn_implementation="cupyops"` known to transformers, with the masks of "sdpa". A second call does nothing.

    What attention with a mask, dropout or a cache of another length is, remains transformers' own function.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    Example:
        >>> cupyops.integrations.transformers.register()
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # type: ignore[import-not-found]

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, mask)
    if (interface := _experts_interface()) is not None:
        interface.register(experts.EXPERTS, experts.experts)


def _register_where_it_is() -> None:
    """A model that was pickled after a swap names our attention."""
    if "transformers" in sys.modules:
        register()


classes.BEFORE_UNPICKLING.append(_register_where_it_is)


def mask(**given: Any) -> Tensor | None:
    """The mask of "sdpa", which is none while a CUDA graph is captured too, where eagerly it is none whatever tensors hold.

    Some versions of transformers make one then, as they could not look into a mask of padding, of which there is none.
    """
    from transformers.masking_utils import sdpa_mask  # type: ignore[import-not-found]

    if given.get("attention_mask") is None and _captured() and _all_see(**given):
        return None
    return sdpa_mask(**given)  # type: ignore[no-any-return]


def _captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and not is_dynamo_compiling()


def _all_see(
    kv_length: int,
    q_length: int | None = None,
    cache_position: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Whether without padding the lengths alone say that a flag says what a mask would."""
    if local_size is not None and kv_length >= local_size:
        return False
    if q_length is None and cache_position is not None:
        q_length = cache_position.shape[0]
    return allow_is_bidirectional_skip or (allow_is_causal_skip and q_length in (1, kv_length))


def attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of "sdpa" by `cupyops.scaled_dot_product_attention`; with a mask or dropout, or what "sdpa" may know
    beyond that, transformers' own function."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # type: ignore[import-not-found]

    # a cache of another length: which diagonal is meant, transformers knows
    extra = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux", "sinks"))
    if attention_mask is not None:
        attention_mask = taken_mask(attention_mask)
    if attention_mask is not None or dropout or extra or query.shape[2] != key.shape[2] or query.dim() != 4:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    grouped = getattr(module, "num_key_value_groups", 1) > 1
    y = packed.attention(
        query, key, value, is_causal=bool(causal) and query.shape[2] > 1, scale=scaling, enable_gqa=grouped
    )
    return y.transpose(1, 2).contiguous(), None


def _set_attention(models: Iterable[Module], resets: list[Callable[[], None]]) -> list[str]:
    said = []
    for config, asks in _configs(models):
        now = getattr(config, "_attn_implementation", None)
        if now == "sdpa" and asks:
            said.append('attention: "sdpa", kept: the model\'s code asks for it by name')
        elif now == "sdpa" and hasattr(config, "_attn_implementation_internal"):
            register()
            config._attn_implementation_internal = ATTENTION
            resets.append(functools.partial(setattr, config, "_attn_implementation_internal", now))
            said.append('attention: "sdpa", now "cupyops"')
        elif now is not None and now != ATTENTION:
            said.append(f'attention: "{now}", kept: only "sdpa" is the same function')
    return said


def _configs(models: Iterable[Module]) -> list[tuple[Any, bool]]:
    """The configurations of models, and whether a model that reads one has other code for "sdpa" than for other names."""
    found: dict[int, tuple[Any, bool]] = {}
    for model in models:
        before = found.get(id(model.config), (None, False))[1]
        found[id(model.config)] = (model.config, before or any(map(_asks_for_sdpa, _files(model))))
    return list(found.values())


def _files(model: Module) -> set[str]:
    """The Python modules that the classes of a model and of all that is inside are from, PyTorch's and ours aside."""
    names = {base.__module__ for one in model.modules() for base in type(one).__mro__}
    return {name for name in names if name != "builtins" and not classes.is_library(name)}


@functools.cache
def _asks_for_sdpa(file: str) -> bool:
    """Whether a model's file has the word "sdpa" in its functions; the library's own files, which name all, apart."""
    if file.split(".")[:1] == ["transformers"] and not file.startswith("transformers.models."):
        return False
    try:
        source = inspect.getsource(sys.modules[file])
    except (OSError, TypeError, KeyError):
        return True  # who knows
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return any(isinstance(value, str) and value == "sdpa" for value in constants)


# --- experts ---------------------------------------------------------------------------------------------------------


def _experts_interface() -> Any:
    """Where transformers looks for what experts compute; None of versions that have no such place."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # type: ignore[import-not-found]
    except ImportError:
        return None
    return ALL_EXPERTS_FUNCTIONS


def _set_experts(models: Iterable[Module], resets: list[Callable[[], None]]) -> list[str]:
    said = []
    for model in models:
        for module in model.modules():
            config = getattr(module, "config", None)
            now = getattr(config, "_experts_implementation", None)
            if not hasattr(type(module), "_apply_gate") or now not in experts.THEIRS or _experts_interface() is None:
                continue
            register()
            config._experts_implementation_internal = experts.EXPERTS  # type: ignore[union-attr]
            resets.append(functools.partial(setattr, config, "_experts_implementation_internal", now))
            said.append(f'experts: "{now}", now "{experts.EXPERTS}"')
    return said


# --- the loss -------------------------------------------------------------------------------------------------------


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
    if loss is None:
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
    """What computes a loss of transformers for logits of half types, where both have been seen to be the same."""
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
        self._ours = calls.rewritten(function, False, self.found) or function
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
        """Whether it is one of those that take a head's rows in the place of logits."""
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
            resets.append(functools.partial(vars(model).pop, "_loss_function", None))
            said.append(f"loss: {loss.function.__name__}, now by {', '.join(dict.fromkeys(loss.found))} of cupyops")
    return said


def _set_heads(
    models: Iterable[Module], why_kept: Callable[[Module], str | None], resets: list[Callable[[], None]]
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
    """Why the loss of a model takes logits, "" of a model that has no loss; None where it takes a head's rows as well."""
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
