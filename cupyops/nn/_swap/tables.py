"""transformers' tables of functions, with ours where they have "sdpa" for attention, and the usual ones for experts.

A model asks such a table at each call for the function that its configuration names. A swapped module asks one of these,
so configurations, which models may share, stay as they are, and what is set in one later is heeded.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..._dispatch.attention.attention import taken_mask
from ..._kernel.graph import capturing
from . import experts, packed

ATTENTION = "cupyops"
OF_EXPERTS = "experts"  # as a report names them
_EXTRA = frozenset(("position_bias", "softcap", "s_aux", "sinks"))  # that "sdpa" may know of


class Table:
    """One of transformers' tables, in which some functions are others.

    Args:
        theirs: the table, an `AttentionInterface` or `ExpertsInterface`.
        name: what is replaced, in words.
        instead: gives the function for a name and what `theirs` has for that.
    """

    def __init__(self, theirs: Any, name: str, instead: Callable[[str, Any], Any]) -> None:
        self.theirs, self.name, self.instead = theirs, name, instead

    def __getitem__(self, name: str) -> Any:
        return self.instead(name, self.theirs[name])

    def get_interface(self, name: str, default: Any) -> Any:
        """The function of a name; `default` for "eager"."""
        return self.instead(name, self.theirs.get_interface(name, default))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)


def table_of(value: Any, exact: bool) -> Table | None:
    """Return our table for one of transformers, None for anything else. With `exact`, experts are left alone."""
    if "transformers" not in sys.modules or not str(type(value).__module__).startswith("transformers."):
        return None
    _load()
    from transformers import AttentionInterface  # type: ignore[import-not-found]

    if isinstance(value, AttentionInterface):
        return Table(value, "attention", _attention_instead)
    theirs = _experts_interface()
    if theirs is not None and not exact and isinstance(value, type(theirs)):
        return Table(value, OF_EXPERTS, _experts_instead)
    return None


def _attention_instead(name: str, found: Any) -> Any:
    return attention if found is _their_attention() else found


_sdpa: Any = (
    None  # transformers' module: torch.compile cannot read it from sys.modules, and an import costs each call time
)


def _load() -> None:
    global _sdpa
    _sdpa = importlib.import_module("transformers.integrations.sdpa_attention")


def _their_attention() -> Any:
    """Return transformers' function of "sdpa"."""
    return _sdpa.sdpa_attention_forward


def _experts_instead(name: str, found: Any) -> Any:
    return experts.experts if name in experts.THEIRS else found


def _experts_interface() -> Any:
    """Return transformers' registry of functions for experts; None in versions that have none."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # type: ignore[import-not-found]
    except ImportError:
        return None
    return ALL_EXPERTS_FUNCTIONS


@functools.cache
def register() -> None:
    """Make `attn_implementation="cupyops"` known to transformers, with the masks of "sdpa". A second call does nothing.

    What attention with a mask, dropout or a cache of another length is, remains transformers' own function.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    Example:
        >>> cupyops.integrations.transformers.register()
    """
    _load()
    from transformers import AttentionInterface, AttentionMaskInterface  # type: ignore[import-not-found]

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, mask)
    if (interface := _experts_interface()) is not None:
        interface.register(experts.EXPERTS, experts.experts)


def mask(**given: Any) -> Tensor | None:
    """The mask of "sdpa", which is none while a CUDA graph is captured too, where eagerly it is none whatever tensors hold.

    Some versions of transformers make one then, as they could not look into a mask of padding, of which there is none.
    """
    from transformers.masking_utils import sdpa_mask  # type: ignore[import-not-found]

    if given.get("attention_mask") is None and capturing() and _all_see(**given):
        return None
    return sdpa_mask(**given)  # type: ignore[no-any-return]


def _all_see(
    kv_length: int,
    q_length: int | None = None,
    cache_position: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Return whether, without padding, the lengths alone tell that a flag can stand for the mask."""
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
    # a cache of another length: which diagonal is meant, transformers knows
    extra = not _EXTRA.isdisjoint(kwargs) and any(kwargs.get(name) is not None for name in _EXTRA)
    if attention_mask is not None:
        attention_mask = taken_mask(attention_mask)
    if attention_mask is not None or dropout or extra or query.shape[2] != key.shape[2] or query.dim() != 4:
        return _their_attention()(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    grouped = getattr(module, "num_key_value_groups", 1) > 1
    y = packed.attention(
        query, key, value, is_causal=bool(causal) and query.shape[2] > 1, scale=scaling, enable_gqa=grouped
    )
    return y.transpose(1, 2).contiguous(), None
