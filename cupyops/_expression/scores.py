"""A line of C that changes attention's scores, and one that says which keys are seen: in PyTorch, and in the kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._dispatch.attention.attention import Parts
from .._dispatch.attention.map import Maps, Masked
from .._dispatch.core.forms import Launch
from .._kernel.kernel import Kernel
from .._kernel.launch.ctype import C_NAMES
from .._util import arguments
from .._util.philox import ROUNDS
from . import kernels, python
from .indexed import Formula, Indexed, at
from .intervals import Interval, intervals
from .places import dropped, places, seen_in
from .shifts import shift
from .uses import Uses
from .values import DTYPES

TENSORS, DIMS, NUMBERS = 4, 4, 16  # how many may be captured; of a tensor how many dimensions
_GIVEN = 2 * TENSORS * DIMS + NUMBERS  # attention::kGiven
# of packed sequences: where each begins and the last ends, then numbers
STARTS = ("cu_seqlens_q", "cu_seqlens_k")
PACKED = ("max_seqlen_q", "max_seqlen_k", "tokens_q", "tokens_k", "last_diagonal")
CAPPED = "softcap * tanh(s / softcap)"  # as `softcap=` says it
SEED, P = "seed_", "p_"  # of dropout: a tensor of one int64, and the probability
_PLACES = {"b": "int", "h": "int", "q": "int", "k": "int"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTS = {torch.bool: "bool", torch.int64: "long long"}
_HEADERS = {"mma": "attention/variant_mma.cuh", "wgmma": "attention/variant_wgmma.cuh"}
# what kernels do not differentiate by s
_NOT_DIFFERENTIATED = {"lgamma": "lgamma's derivative", "double": "double in a score"}


@dataclass(frozen=True)
class Tensors:
    """A captured tensor: its name, its dtype, how many dimensions it has."""

    name: str
    dtype: torch.dtype
    dims: int

    @property
    def ctype(self) -> str:
        """The C type of an element in an expression."""
        return "A" if self.dtype in _FLOATS else _INTS.get(self.dtype, "int")


def spelled(score: str | None, mask: str | None, names: Sequence[str]) -> str:
    """All that makes a variant as one text, by which an operator and a plan know it.

    `names`: of tensors, then of numbers, which have their C type after them, `window:int`.
    """
    return "\f".join((str(score or ""), str(mask or ""), " ".join(names)))


class Scores:
    """Meaning of a variant's text: the expressions in PyTorch, and the kernels that are compiled for them at need."""

    def __init__(self, text: str, captured: Sequence[tuple[torch.dtype, int]]) -> None:
        score, mask, names = text.split("\f")
        words = [name.partition(":") for name in names.split()]
        self.numbers = {name: ctype for name, _, ctype in words if ctype}
        tensors = [name for name, _, ctype in words if not ctype]
        self.tensors = [Tensors(name, *of) for name, of in zip(tensors, captured)]
        self.packed, self.drops = tuple(tensors[:2]) == STARTS, SEED in tensors
        self.score, self.mask = (
            Formula.of(name, one) if one else None for name, one in (("score", score), ("mask", mask))
        )
        given = _PLACES | self.numbers | {one.name: one.ctype for one in self.tensors if not one.dims}
        indexed = {one.name: (one.dims, one.ctype) for one in self.tensors if one.dims}
        self._sizes: dict[str, list[tuple[int, int]]] = {}  # of each tensor the dimensions that are those of scores
        self._scoring, self._seeing = (
            None if one is None else self._function(one, given | more, indexed, result)
            for one, more, result in ((self.score, {"s": "A"}, "A"), (self.mask, {}, "bool"))
        )
        self._intervals: list[Interval] = []
        rest = self.mask
        if self.mask is not None and not self.packed:  # whose bounds may be of another diagonal
            self._intervals, rest = intervals(self.mask, [name for name, ctype in self.numbers.items() if ctype != "A"])
        # kernels, beyond the bounds
        self.changes = self.packed or self.drops or self.score is not None or rest is not None
        self._rest, self._uses = rest, Uses.of(rest)
        self._in_kernels = self.score  # the usual cap is by the tanh of the hardware there
        if self.score is not None and score.startswith(CAPPED):
            self._in_kernels = Formula.of("score", score.replace(CAPPED, "softcapped_(s, softcap)", 1))
        self._shift = None if self.score is None else shift(self.score)
        self._text = self._cuda(rest)
        self._kernels: dict[tuple[str, bool], Kernel] = {}

    # --- in PyTorch ---

    def _function(
        self, formula: Formula, given: dict[str, str], indexed: dict[str, tuple[int, str]], result: str
    ) -> Callable[..., Tensor]:
        translation = Indexed(formula, given, indexed, {formula.assigned: result})
        for name, dim, place in translation.places:
            if place in _PLACES:
                self._sizes.setdefault(name, []).append((dim, [*_PLACES].index(place)))
        lines = ["T, device_ = s.dtype, s.device", "A = c_.computed_in(T)", "s_0 = s"]
        lines += [f"{one.name}_0 = {one.name}.to({DTYPES[one.ctype]})" for one in self.tensors]
        lines += [f"{name}_0 = c_.number({name}, {DTYPES[ctype]}, device_)" for name, ctype in self.numbers.items()]
        names = [
            "aligned_",
            "s",
            *(f"{name}_0" for name in _PLACES),
            *(one.name for one in self.tensors),
            *self.numbers,
        ]
        lines += [*translation.lines, f"return {translation.result(formula.assigned)}"]
        function: Callable[..., Tensor] = python.define(formula.assigned, ", ".join(names), lines, {"at_": at})
        return function

    def check(self, tensors: Sequence[Tensor], size: Sequence[int]) -> None:
        """Tensors whose index is a place of scores are as large there, or 1; where it is a row, or larger."""
        for one, x in zip(self.tensors, tensors):
            for dim, place in () if one.name in STARTS else self._sizes.get(one.name, ()):
                if x.shape[dim] not in (1, size[place]) and (place < 2 or x.shape[dim] < size[place]):
                    what = ("batches", "heads", "queries", "keys")[place]
                    arguments.fail(one.name, x, f"size {size[place]}, the {what}, or 1 in dimension {dim}")

    def change(
        self,
        bounds: tuple[int | None, int | None],
        scores: Tensor,
        seen: Tensor | None,
        numbers: Sequence[float],
        tensors: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Scores (batch, heads, queries, keys) as they are to be, and which keys are seen where `seen` says so too.

        Of packed sequences, each is one of the batch, and the bounds are those of each.
        """
        if self.packed:
            known = dict(zip(self.numbers, numbers))
            tokens = int(known["tokens_q"]), int(known["tokens_k"])
            seen = seen_in(scores, (tensors[0], tensors[1]), tokens, bounds, known["last_diagonal"] > 0)
        given = not self.packed, scores, *places(scores), *tensors, *numbers
        if self._seeing is not None:
            mask = self._seeing(*given)
            seen = mask if seen is None else seen & mask
        if self._scoring is not None:
            scores = self._scoring(*given).expand(scores.shape)
        return scores, None if seen is None else seen.expand(scores.shape)

    def drop(self, weights: Tensor, numbers: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
        """Weights (batch, heads, queries, keys), of which some are 0 and the others as much larger, as kernels have it."""
        if not self.drops:
            return weights
        seed = tensors[[one.name for one in self.tensors].index(SEED)]
        return dropped(weights, tuple(places(weights)), seed, dict(zip(self.numbers, numbers))[P])

    def bounds(self, low: int | None, high: int | None, numbers: Sequence[float]) -> tuple[int | None, int | None]:
        """The bounds of the keys that a query sees, those that the mask says among them."""
        known = dict(zip(self.numbers, numbers))
        for one in self._intervals:
            least, most = one.bounds(known)
            low = least if low is None or (least is not None and least > low) else low
            high = most if high is None or (most is not None and most < high) else high
        return low, high

    # --- in the kernels ---

    def why_not(self, tensors: Sequence[Tensor]) -> str | None:
        """Return why kernels do not compute the variant, or None."""
        for word, reason in _NOT_DIFFERENTIATED.items():
            if self.score is not None and word in self.score.words:
                return reason
        if any(one.dtype not in C_NAMES for one in self.tensors):
            return "a captured tensor of a dtype that C does not have"
        return "a captured tensor of 2^31 elements" if any(max(x.shape, default=0) >= 2**31 for x in tensors) else None

    def bound(
        self, numbers: Sequence[float], tensors: Sequence[Tensor]
    ) -> tuple[Callable[[Launch[Any], Maps | None], Launch[Any]], Masked | None]:
        """Return the function that turns plain kernels' launches into this variant's, and the mask that maps are made of."""
        places = [*tensors, *[None] * (TENSORS - len(tensors))]

        def of(launch: Launch[Parts], maps: Maps | None) -> Launch[Parts]:
            extra = launch.extra
            lists, strides = (None, ()) if maps is None else maps.lists(extra.blocks)
            queries, values = (None if one is None else of(one, maps) for one in (extra.queries, extra.values))
            extra = extra._replace(map=lists, queries=queries, values=values)
            args = *launch.args, *places, lists, self._pack_given(numbers, tensors, strides)
            return replace(launch, kernel=self.kernel(launch.kernel, maps is not None), args=args, extra=extra)

        by_batch, by_head, dense = self._uses.differ(self.tensors, tensors)
        if self._rest is None or self.packed or (by_head and dense):  # as many bytes to read as it could save
            return of, None

        def look(grid: int, block: int, *args: Any) -> None:
            self._looking[grid, block](*args, *places, None, self._pack_given(numbers, tensors))

        return of, Masked(look, by_batch, by_head)

    def _pack_given(self, numbers: Sequence[float], tensors: Sequence[Tensor], strides: Sequence[int] = ()) -> Any:
        """`struct Given`: the sizes and strides of tensors, and the numbers; the strides of a map."""
        given = np.zeros(_GIVEN + 3, dtype=np.int64)
        given[_GIVEN:][: len(strides)] = strides
        for index, one in enumerate(tensors):
            for dim in range(one.dim()):
                where = 2 * (DIMS * index + dim)
                given[where], given[where + 1] = one.shape[dim], one.stride(dim)
        for index, (number, ctype) in enumerate(zip(numbers, self.numbers.values())):
            given[2 * TENSORS * DIMS + index] = np.float64(number).view(np.int64) if ctype == "A" else int(number)
        return given

    def kernel(self, plain: Kernel, mapped: bool = False) -> Kernel:
        """The kernel of this variant that takes the place of a plain one. mapped: with a map of its mask."""
        base, engine = f"{plain.base}_variant", plain.base.rpartition("_")[2]
        name = f"{base}<{', '.join(plain.template)}>"
        return self._kernel(name, base, _HEADERS[engine], mapped, plain.arch, plain.domain)

    @property
    def _looking(self) -> Kernel:
        """The kernel that looks at the mask for a map."""
        return self._kernel("attention_map_cells", "attention_map_cells", "attention/variant_map.cuh", True, None, {})

    def _kernel(
        self, name: str, base: str, header: str, mapped: bool, arch: str | None, domain: Mapping[str, tuple[Any, ...]]
    ) -> Kernel:
        if (base, mapped) not in self._kernels:
            file = f"{base}.cu"
            text = self._text.replace(_MAPS, str(mapped).lower())
            self._kernels[base, mapped] = kernels.Generated(
                kernels.numbered(f'{text}\n#include "{header}"\n', file),
                name,
                file=file,
                pieces=[one for one in (self._in_kernels, self.mask) if one is not None],
                beside=None,
                options=(),
                arch=arch,
                strided=True,
                domain=domain,
            )
        return self._kernels[base, mapped]

    def _reaching(self, score: str) -> str:
        """A score that softmax can multiply by log2(e); one that is capped can be in any case."""
        capped = self._in_kernels is not self.score and not self.tensors
        return score if capped else f"expression::in_reach_({score})"

    def _cuda(self, mask: Formula | None) -> str:
        """The struct that the kernels know the variant by."""
        declared, members, passed = [], [], []
        for index, one in enumerate(self.tensors):
            element, sizes = C_NAMES.get(one.dtype, "void"), f"given.sizes + {2 * DIMS * index}"
            kind = f"attention::Captured<{element}, {one.dims}>"
            made = f"{kind}{{static_cast<const {element}*>(c{index}), {sizes}}}"
            declared.append(f"{kind if one.dims else one.ctype} {one.name}")
            passed.append(made if one.dims else f"static_cast<{one.ctype}>({made}())")
        for index, (name, ctype) in enumerate(self.numbers.items()):
            own = f"{name}_"  # as no other member is called
            kind, where = ("float", "number") if ctype == "A" else (ctype, "integer")
            members.append((own, kind, f"given.{where}({2 * TENSORS * DIMS + index})"))
            declared.append(f"{ctype} {name}")
            passed.append(f"static_cast<{ctype}>({own})")
        at = ["int b", "int h", "int q", "int k"]
        functions = [
            _FUNCTION.format(
                name=name,
                result=result,
                assigned=one.assigned,
                parameters=", ".join([*parameters, *declared]),
                piece=kernels.piece(one),
            )
            for name, one, result, parameters in (
                ("score", self._in_kernels, "A", ["A s", *at]),
                ("shift", self._shift, "A", at),
                ("mask", mask, "bool", at),
            )
            if one is not None
        ]
        values = ", ".join(["b", "h", "q", "k", *passed])
        names = [*(one.name for one in self.tensors), *self.numbers]
        return _VARIANT.format(
            functions="\n".join(functions),
            scores=str(self.score is not None).lower(),
            shifts=str(self._shift is not None).lower(),
            masks=str(mask is not None).lower(),
            members="\n  ".join(f"const {ctype} {name};" for name, ctype, _ in members),
            made="".join(f", {name}(static_cast<{ctype}>({value}))" for name, ctype, value in members),
            score=self._reaching(f"expression::attention_score<A>(s, {values})") if self.score is not None else "s",
            shift=f"expression::attention_shift<float>({values})" if self._shift is not None else "0",
            mask=f"expression::attention_mask<A>({values})" if mask is not None else "true",
            maps=_MAPS,
            drops=str(self.drops).lower(),
            seed=dict(zip(names, passed))[SEED] if self.drops else 0,
            p={name: value for name, _, value in members}[f"{P}_"] if self.drops else 0,
            packed=str(self.packed).lower(),
            sequence=f"attention::packed(sizes, batch, {passed[0]}, {passed[1]}, tokens_q_, tokens_k_, last_diagonal_)"
            if self.packed
            else "{sizes, 0, 0}",
        )


_FUNCTION = """
namespace expression {{
template <typename A> __device__ __forceinline__ {result} attention_{name}({parameters}) {{
  using T = A;
  {result} {assigned};
{piece}
  return {assigned};
}}
}}  // namespace expression
"""
_MAPS = "MAPS_"  # whether there is a map, in the text of a variant
_VARIANT = (
    f"""
#define PHILOX_ROUNDS {ROUNDS}"""
    + """
#include "attention/variant.cuh"
{functions}
namespace attention {{
struct Variant {{
  static constexpr bool kScores = {scores}, kShifts = {shifts}, kMasks = {masks}, kMaps = {maps};
  static constexpr bool kDrops = {drops}, kPacked = {packed};
  const void *c0, *c1, *c2, *c3;
  const Given& given;
  const Map map;
  const Dropout dropout;
  {members}

  __device__ __forceinline__ Variant(const void* c0, const void* c1, const void* c2, const void* c3, const int* lists,
                                     const Given& given)
      : c0(c0), c1(c1), c2(c2), c3(c3), given(given), map{{lists, given.map}}, dropout({seed}, {p}){made} {{}}
  template <typename A> __device__ __forceinline__ A score(A s, int b, int h, int q, int k) const {{
    return {score};
  }}
  __device__ __forceinline__ float shift(int b, int h, int q, int k) const {{
    return {shift};
  }}
  __device__ __forceinline__ bool seen(int b, int h, int q, int k) const {{
    using A = float;
    return {mask};
  }}
  __device__ __forceinline__ Sequence sequence(const Sizes& sizes, int batch) const {{
    return {sequence};
  }}
}};
}}  // namespace attention
"""
)


@functools.lru_cache(maxsize=1024)
def _scores(text: str, captured: tuple[tuple[torch.dtype, int], ...]) -> Scores:
    return Scores(text, captured)


def scores(text: str, tensors: Sequence[Tensor]) -> Scores:
    """Return the variant of a text, cached by the tensors' dtypes and dimensions. Raises `InputError` for a wrong text."""
    return _scores(text, tuple((one.dtype, one.dim()) for one in tensors))
