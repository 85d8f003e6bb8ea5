"""Keyword arguments of expressions of attention: tensors and numbers, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._dispatch.attention import launches as attentions
from .._kernel.launch.ctype import C_NAMES
from .._operator.derivation import distributed
from .._util import arguments, symbolic
from ..errors import InputError
from . import places
from .declaration import C_WORDS
from .indexed import Formula, is_name
from .scores import CAPPED, DIMS, NUMBERS, PACKED, SEED, STARTS, TENSORS, P, scores, spelled


class Variant(NamedTuple):
    """A variant of attention as the operator takes it: its text, the captured numbers, and tensors or None."""

    text: str | None = None
    numbers: list[float] | None = None
    tensors: tuple[Tensor | None, ...] = (None,) * TENSORS

    @property
    def given(self) -> list[Tensor]:
        """The tensors that there are."""
        return [one for one in self.tensors if one is not None]


PLAIN = Variant()


def usual(
    softcap: float | None, alibi_slopes: Tensor | None, apart: int | None, score: str | None, captured: dict[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """(score, what is captured) with the scores that have keywords of their own.

    apart: query i is at key i + apart; None, the last query of each of packed sequences is at its last key.
    """
    if softcap is None and alibi_slopes is None:
        return score, captured
    if score is not None:
        name = "softcap" if softcap is not None else "alibi_slopes"
        raise InputError(f"{name} is given beside score; write it into the score, and capture what it takes")
    score = "s"
    if softcap is not None:
        if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 < softcap < math.inf:
            arguments.fail("softcap", softcap, "a number greater than 0, or None")
        score = CAPPED
        captured = captured | {"softcap": float(softcap)}
    if alibi_slopes is not None:
        arguments.floating("alibi_slopes", alibi_slopes)
        if alibi_slopes.dim() not in (1, 2):
            arguments.fail("alibi_slopes", alibi_slopes, "(heads,) or (batch, heads)")
        place = "h" if alibi_slopes.dim() == 1 else "b, h"
        own = ""
        if apart is None:
            lengths = (f"({starts}[b + 1] - {starts}[b])" for starts in reversed(STARTS))
            own = " - ({} - {})".format(*lengths)
        elif apart:
            own, captured = " - alibi_apart", captured | {"alibi_apart": apart}
        score = f"{score} - alibi_slopes[{place}] * abs(k - q{own})"
        captured = captured | {"alibi_slopes": alibi_slopes}
    return score, captured


_MASKS = {
    (kind, dims): spelled(texts[0], texts[1], ["mask_of"])
    for dims in range(DIMS + 1)
    for element in ["mask_of" + (f"[{', '.join('bhqk'[DIMS - dims :])}]" if dims else "")]
    for kind, texts in ((True, (None, element)), (False, (f"s + {element}", None)))
}


def of_mask(mask: Tensor | None) -> Variant:
    """The variant of a mask of bools, or of summands of the scores, that broadcasts to (batch, heads, queries, keys)."""
    if mask is None:
        return PLAIN
    return Variant(_MASKS[mask.dtype == torch.bool, mask.dim()], None, (mask, *[None] * (TENSORS - 1)))


def check_sinks(query: Tensor, sinks: Tensor | None) -> None:
    """Sinks are one number for each head."""
    if sinks is None:
        return
    arguments.floating("sinks", sinks)
    arguments.same_device(query=query, sinks=sinks)
    if sinks.shape != query.shape[1:2]:
        arguments.fail("sinks", sinks, f"({query.shape[1]},), the heads of query")


def with_sinks(y: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention whose rows have one more score each, the sink of their head, that no value goes with."""
    beside = sinks.to(lse.dtype)[:, None]
    unseen = lse == -math.inf  # such a row has zeros, whatever the sink
    seen = torch.where(unseen, 0.0, lse)
    apart = seen - beside
    share, both = torch.sigmoid(apart), seen - torch.nn.functional.logsigmoid(apart)
    return (y * share.unsqueeze(-1)).to(y.dtype), torch.where(unseen, beside, both)


def variant(
    score: str | None,
    mask: str | None,
    captured: Mapping[str, Any],
    query: Tensor,
    key: Tensor,
    packed: Mapping[str, Any] | None = None,
    dropped: Mapping[str, Any] | None = None,
) -> Variant:
    """The variant of a call. Raises `InputError` for an expression, or something captured, that cannot be used.

    packed: what `sequences` gives. dropped: what `dropout` does.
    """
    if score is None and mask is None and not (packed or dropped):
        if captured:
            raise InputError(
                f"{next(iter(captured))} is no argument of attention, and there is neither score nor mask to name it"
            )
        return PLAIN
    if not torch.compiler.is_compiling():  # of which the expressions are no part; the operator reads them there
        _check(score, mask, captured)
    tensors, numbers, types = {}, {}, []
    for name, value in {**(packed or {}), **captured, **(dropped or {})}.items():
        if isinstance(value, Tensor):
            tensors[name] = _tensor(name, value, query)
        else:
            number = _number(name, value)
            numbers[name] = float(number)
            types.append(f"{name}:{'bool' if isinstance(number, bool) else 'int' if isinstance(number, int) else 'A'}")
    for what, found, most in (("tensors", tensors, TENSORS), ("numbers", numbers, NUMBERS)):
        if len(found) > most:
            names = ", ".join("what dropout_p takes" if name in (SEED, P) else name for name in found)
            raise InputError(f"{names}: an expression captures at most {most} {what}; put some into one tensor")
    text = spelled(score, mask, [*tensors, *types])
    if not torch.compiler.is_compiling():
        given = tuple(tensors.values())
        size = *query.shape[:3], key.shape[2]
        if packed is not None:
            size = packed["cu_seqlens_q"].shape[0] - 1, size[1], packed["max_seqlen_q"], packed["max_seqlen_k"]
        scores(text, given).check(given, size)
    # no empty list, which torch.compile would take for one of tensors
    return Variant(text, list(numbers.values()) or None, (*tensors.values(), *[None] * (TENSORS - len(tensors))))


def dropout(p: float, query: Tensor) -> dict[str, Any] | None:
    """Return a variant's captures for dropout: a random number, from which the mask is made; None where all is kept."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        arguments.fail("dropout_p", p, "a probability in [0, 1]")
    if p == 0:
        return None
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=query.device)
    return {SEED: distributed.alike(seed, query), P: float(p)}


def sequences(
    query: Tensor,
    key: Tensor,
    starts: tuple[Tensor | None, Tensor | None],
    longest: tuple[int | None, int | None],
    last: bool,
) -> dict[str, Any] | None:
    """Return a variant's captures for packed sequences in (tokens, heads, head_dim); None where none are given."""
    if all(one is None for one in (*starts, *longest)):
        return None
    of_tokens(query, key)
    found: dict[str, Any] = {}
    for name, one, other in zip(STARTS, starts, reversed(starts)):
        if not isinstance(one, Tensor) or one.dtype not in (torch.int32, torch.int64) or one.dim() != 1 or len(one) < 2:
            arguments.fail(name, one, "(sequences + 1,), int32 or int64: where each begins, and where the last ends")
        if isinstance(other, Tensor) and other.shape != one.shape:
            arguments.fail(name, one, f"{tuple(other.shape)}, as many sequences as the other has")
        arguments.same_device(query=query, **{name: one})
        found[name] = one
    for name, most, x in zip(PACKED, longest, (query, key)):
        if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most < 2**29:
            arguments.fail(name, most, "an int, the rows of the longest sequence")
        side = name[-1]
        at = found[f"cu_seqlens_{side}"]
        arguments.in_range(f"cu_seqlens_{side}[{{}}]", at, x.shape[0] + 1, f"one of {x.shape[0]} tokens, or their end,")
        length = f"the length of sequence {{}} by cu_seqlens_{side}"
        arguments.in_range(length, at[1:] - at[:-1], most + 1, f"at most {name},")
        found[name] = most
    return found | {"tokens_q": query.shape[0], "tokens_k": key.shape[0], "last_diagonal": last}


def of_tokens(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors of packed sequences, which have three dimensions."""
    for name, x in zip(("query", "key", "value"), tensors):
        arguments.tensor(name, x)
        if x.dim() != 3:
            arguments.fail(name, x, "(tokens, heads, head_dim) beside cu_seqlens_q")
    return tensors


def _check(score: Any, mask: Any, names: Iterable[str]) -> None:
    """The expressions are text, and name all that is captured."""
    used: set[str] = set()
    for name, one in (("score", score), ("mask", mask)):
        if one is not None:
            if isinstance(one, Tensor):
                arguments.fail(name, one, f'an expression of C that names it, such as {name}="of[q, k]", of=...')
            if not isinstance(one, str) or "\f" in one:
                arguments.fail(name, one, "an expression of C, or None")
            used |= Formula.of(name, one).words
    for name in names:
        if not is_name(name) or C_WORDS.fullmatch(name) or name.endswith("_"):
            raise InputError(f"the keyword {name} is a name that expressions have for something else; choose another")
        if name not in used:
            raise InputError(f"{name} is named in neither score nor mask; leave it out, or name it there")


def _tensor(name: str, value: Tensor, query: Tensor) -> Tensor:
    if value.dtype not in C_NAMES or value.dtype.is_complex:
        arguments.fail(name, value, "a tensor of floating-point numbers, integers or bools")
    if value.dim() > DIMS or not value.numel():
        arguments.fail(name, value, f"a tensor of at most {DIMS} dimensions that has elements")
    arguments.same_device(query=query, **{name: value})
    return value


def _number(name: str, value: Any) -> float | int | bool:
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        arguments.fail(name, value, "a number or a tensor")
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        arguments.fail(name, value, "an integer of 32 bits")
    return value


def is_packed(variant: Variant) -> bool:
    """Return True if the rows are those of several sequences."""
    return variant.text is not None and scores(variant.text, variant.given).packed


def unpacked(variant: Variant, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values of packed sequences, with a place of the batch for each sequence."""
    found = scores(variant.text or "", variant.given)
    known = dict(zip(found.numbers, variant.numbers or []))
    longest = [max(1, int(known[name])) for name in PACKED]
    if not symbolic.is_symbolic((query, key)):
        longest = [max(1, min(most, x.shape[2])) for most, x in zip(longest, (query, key))]
    sides = zip((query, key, value), (0, 1, 1))
    return [places.unpacked(x, variant.given[side], longest[side]) for x, side in sides]


def packed(variant: Variant, y: Tensor, lse: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The results of sequences, as their tokens lie; of a token of none, zeros and -inf."""
    return places.packed(y, variant.given[0], tokens, 0.0), places.packed(lse, variant.given[0], tokens, -math.inf)


def bound(
    variant: Variant, low: int | None, high: int | None
) -> tuple[int | None, int | None, attentions.Variant | None]:
    """Return (low, high, variant): the bounds that the mask sets, and the variant for the rest of it."""
    if variant.text is None:
        return low, high, None
    found, numbers = scores(variant.text, variant.given), variant.numbers or []
    low, high = found.bounds(low, high, numbers)
    if not found.changes:
        return low, high, None
    packed = None
    if found.packed:
        known = dict(zip(found.numbers, numbers))
        packed = variant.given[0].shape[0] - 1, int(known["max_seqlen_q"]), int(known["max_seqlen_k"])
    of, masked = found.bound(numbers, variant.given)
    starts = tuple(variant.given[:2]) if found.packed else ()
    return low, high, attentions.Variant(of, packed, starts, masked, found.drops)


def why_not(variant: Variant) -> str | None:
    """Return why the kernels do not compute a variant, or None."""
    return None if variant.text is None else scores(variant.text, variant.given).why_not(variant.given)


def gradients(
    eager: Callable[[Variant], tuple[Tensor, Tensor]],
    variant: Variant,
    needs: Sequence[bool],
    grads: tuple[Tensor, Tensor | None],
) -> list[Tensor | None]:
    """The gradients of captured tensors that are needed: in PyTorch, with the scores in memory."""
    if not any(needs):
        return [None] * TENSORS
    with torch.enable_grad():
        given = [one if one is None else one.detach().requires_grad_(need) for one, need in zip(variant.tensors, needs)]
        results = eager(variant._replace(tensors=tuple(given)))
    wanted = [one for one in given if one is not None and one.requires_grad]
    both = [(y, grad) for y, grad in zip(results, grads) if grad is not None]
    found = iter(torch.autograd.grad([y for y, _ in both], wanted, [grad for _, grad in both]))
    return [next(found) if one is not None and one.requires_grad else None for one in given]


def drop(variant: Variant, weights: Tensor) -> Tensor:
    """Weights (batch, heads, queries, keys) as the variant has them."""
    if variant.text is None:
        return weights
    return scores(variant.text, variant.given).drop(weights, variant.numbers or [], variant.given)


def change(
    variant: Variant, bounds: tuple[int | None, int | None], scores_: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scores (batch, heads, queries, keys) as the variant has them, and which keys are seen; both may depend on tensors."""
    if variant.text is None:
        return scores_, seen
    return scores(variant.text, variant.given).change(bounds, scores_, seen, variant.numbers or [], variant.given)
