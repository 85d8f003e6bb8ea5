"""A line of Python that fails as a case does."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from typing import Any

import torch
from torch import Tensor

from .._util.torch_private import OpOverload, OpOverloadPacket, tree_map
from .call import tensors_of
from .case import Case
from .shrink import Fails, is_valid
from .tolerance import Tolerance, name

_MOST_VALUES = 64  # of a tensor that is written out
_MOST_OFFSET = 64  # of a storage offset that is kept; of a larger one, where it stands in a line of memory
_ALIGNED = 16

# where public functions are found: the __module__ and __qualname__ of PyTorch's own are others
_HOMES = ("cupyops", "torch", "torch.nn.functional", "torch.Tensor")


def tensor(
    shape: tuple[int, ...],
    dtype: str = "float32",
    seed: int = 0,
    *,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
    high: int = 2,
    requires_grad: bool = False,
    device: str = "cpu",
) -> Tensor:
    """A tensor of which a line of text tells everything: normal values, or integers in [0, high), drawn with `seed`.

    Args:
        shape, strides: strides are contiguous by default; they may be 0, as those of an expanded tensor.
        dtype: such as "float16" or "int64".
        offset: elements of its storage before the first of its own.
        high: one past the largest integer; bools are drawn evenly.

    Example:
        >>> cupyops.testing.tensor((3,), "int64", high=10).shape
        torch.Size([3])
    """
    kind, source = getattr(torch, dtype), torch.Generator().manual_seed(seed)
    extent = shape if strides is None and not offset else (offset + _span(shape, _strides(shape, strides)),)
    if kind.is_floating_point or kind.is_complex:
        wide = torch.complex128 if kind.is_complex else torch.float64
        values = torch.randn(extent, generator=source, dtype=wide)
    else:
        values = torch.randint(0, high, extent, generator=source)
    result = values.to(device, kind)
    if extent is not shape:
        result = result.as_strided(shape, _strides(shape, strides), offset)
    return result.requires_grad_(requires_grad)


def reproduction(case: Case, hazard: str, fails: Fails) -> str:
    """A line that fails as the case does: with values drawn anew if that will do, else with these, if they are few."""
    numbers = itertools.count(1)
    given = {id(t): t for t in case.call.all_tensors()}
    kept = {id(t) for number, t in enumerate(case.call.all_tensors()) if number in case.call.kept}
    drawn = {key: (_written(t), t) if key in kept else _drawn(t, next(numbers)) for key, t in given.items()}
    again = case.call.map(lambda t: drawn[id(t)][1])
    if is_valid(case, again) and fails(case.with_call(again)):
        texts = {key: text for key, (text, _) in drawn.items()}
    else:
        texts = {key: _written(t) if t.numel() else drawn[key][0] for key, t in given.items()}
    show = lambda value: _Text(texts[id(value)] if isinstance(value, Tensor) else _constant(value))  # noqa: E731
    words = [_callable(case.target.function), repr(tree_map(show, list(case.call.args)))]
    if case.call.kwargs:
        words.append(repr(tree_map(show, case.call.kwargs)))
    words += _options(case)
    words += [f"only={hazard!r}", f"backends={case.backend!r}"]
    words += [f"seed={case.seed}"] if case.seed else []
    words += [f"keep={places}"] if (places := _kept_places(case)) else []
    return f"cupyops.testing.check({', '.join(words)})"


def _kept_places(case: Case) -> list[int | str]:
    """The arguments whose tensors keep their values, as `keep` takes them."""
    named: list[tuple[int | str, Any]] = [*enumerate(case.call.args), *case.call.kwargs.items()]
    owners = [place for place, value in named for _ in tensors_of(value)]  # of each tensor, in their order
    return list(dict.fromkeys(owners[number] for number in sorted(case.call.kept)))


def _options(case: Case) -> list[str]:
    """Options of the check that were given beyond the call."""
    words = [f"reference={_callable(case.target.reference)}"] if case.target.reference_given else []
    return words if case.tolerance == Tolerance() else [*words, f"tolerance=cupyops.testing.{case.tolerance}"]


class _Text:
    """Shown as it is by repr, so that expressions may stand in containers."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _constant(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "math.nan" if math.isnan(value) else f"{'-' if value < 0 else ''}math.inf"
    if isinstance(value, complex) and not (math.isfinite(value.real) and math.isfinite(value.imag)):
        return f"complex({_constant(value.real)}, {_constant(value.imag)})"
    return f"torch.{value!r}" if isinstance(value, torch.device) else repr(value)


# --- a tensor in words -------------------------------------------------------------------------------------------------


def _drawn(given: Tensor, seed: int) -> tuple[str, Tensor]:
    options = _layout(given)
    if not given.is_floating_point() and not given.is_complex() and given.dtype != torch.bool:
        options["high"] = int(given.long().max()) + 1 if given.numel() else 2
        if options["high"] < 1:
            return _written(given), given
    if given.requires_grad:
        options["requires_grad"] = True
    if given.is_cuda:
        options["device"] = "cuda"
    words = [repr(tuple(given.shape)), repr(name(given.dtype)), str(seed)]
    words += [f"{key}={value!r}" for key, value in options.items()]
    return f"cupyops.testing.tensor({', '.join(words)})", tensor(tuple(given.shape), name(given.dtype), seed, **options)


def _written(given: Tensor) -> str:
    values = given.detach().resolve_conj().resolve_neg()
    layout = _layout(values)
    if layout:
        strides, offset = layout.get("strides", tuple(values.stride())), layout.get("offset", 0)
        values = values.as_strided((_span(given.shape, strides),), (1,))
    if values.numel() > _MOST_VALUES:
        return f"<the sample's {tuple(given.shape)}>"
    text = repr(tree_map(lambda value: _Text(_constant(value)), values.tolist()))
    text = f"[0] * {offset} + {text}" if layout and offset else text
    device = ", device='cuda'" if given.is_cuda else ""
    made = f"torch.tensor({text}, dtype={given.dtype}{device})"
    if layout:
        made += f".as_strided({tuple(given.shape)}, {strides}{f', {offset}' if offset else ''})"
    return f"{made}.requires_grad_()" if given.requires_grad else made


def _layout(given: Tensor) -> dict[str, Any]:
    """Strides and offset, where they are not the plain ones."""
    offset = given.storage_offset()
    offset = offset if offset <= _MOST_OFFSET else _MOST_OFFSET + offset % _ALIGNED
    found: dict[str, Any] = {} if given.is_contiguous() else {"strides": tuple(given.stride())}
    return {**found, "offset": offset} if offset else found


def _strides(shape: tuple[int, ...], given: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride()) if given is None else given


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last, the gaps among them."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides))


# --- a function in words -----------------------------------------------------------------------------------------------


def _callable(function: Any) -> str:
    """An expression for a function; for one that has no name of its own, what it is called."""
    module, short = getattr(function, "__module__", None), getattr(function, "__name__", "")
    qualified = getattr(function, "__qualname__", short)
    for home in _HOMES:
        if _is_at(home, short, function):
            return f"{home}.{short}"
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{function}"
    if _is_at(module, qualified, function):
        return qualified if module == "__main__" else f"{module}.{qualified}"
    if hasattr(function, "definition"):
        return f"cupyops.operators()[{function.name!r}]"
    return f"{module}.{qualified}" if qualified else f"<{type(function).__name__}>"


def _is_at(home: str | None, path: str, function: Any) -> bool:
    """True if `home.path` is the function."""
    first, *rest = (*(home or "").split("."), *path.split("."))
    try:
        return functools.reduce(getattr, rest, sys.modules[first]) is function
    except (KeyError, AttributeError):
        return False
