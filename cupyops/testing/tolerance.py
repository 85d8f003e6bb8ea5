"""Tolerance of a result against the truth: twice PyTorch's own error, and one unit in the last place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .hazard import Failure


def _units() -> dict[torch.dtype, float]:
    # in float64 the truth is PyTorch's own result, with an error that nobody knows: sums have several units
    return {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 1.0, torch.float64: 16.0}


@dataclass(frozen=True)
class Tolerance:
    """The error against float64 that is allowed: `factor` times PyTorch's in the same dtype, plus `ulps`.

    Attributes:
        factor: of the error that the reference makes in the same dtype.
        ulps: units in the last place of the largest value, by dtype: 1, and 16 for float64, where the truth is no more
            exact than what is judged.
    """

    factor: float = 2.0
    ulps: Mapping[torch.dtype, float] = field(default_factory=_units)

    def allowed(self, theirs: Tensor, truth: Tensor, dtype: torch.dtype | None = None) -> float:
        """The largest error allowed where PyTorch gives `theirs` and float64 `truth`; only finite values count.

        `dtype`: of the results, where it is not that of `theirs`.
        """
        theirs, dtype = computable(theirs), dtype or theirs.dtype
        return self.factor * _error(theirs, theirs, truth) + self.units(dtype, largest(truth))

    def units(self, dtype: torch.dtype, scale: float) -> float:
        """The units in the last place that are allowed in results as large as `scale`; 0 for integers."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        info = torch.finfo(dtype)
        return self.ulps.get(dtype, 1.0) * info.eps * max(scale, info.tiny)

    def excess(self, ours: Tensor, theirs: Tensor, truth: Tensor) -> float:
        """Ratio of our error to the allowed one; infinite where ours is not finite and PyTorch's is."""
        if not ours.numel():
            return 0.0
        dtype = theirs.dtype
        ours, theirs, truth = (computable(t) for t in (ours, theirs, truth))
        error = _error(ours, theirs, truth)
        return error / self.allowed(theirs, truth, dtype) if error else 0.0

    def judge(
        self, ours: Tensor, theirs: Tensor, truth: Tensor, what: str, slack: float = 1.0, extra: float = 0.0
    ) -> None:
        """Raise `Failure` where `ours` is too far off, or of another shape, dtype or device than `theirs`.

        Values that are not finite must be the very same. `slack`: how many times the allowed error is let pass; `extra`: an
        error that is let pass in any case.
        """
        same_form(ours, theirs, what)
        dtype = ours.dtype
        if not (ours.dtype.is_floating_point or ours.dtype.is_complex):
            ours, theirs = computable(ours), computable(theirs)
            if not torch.equal(ours, theirs):
                raise Failure(f"{what}: {_place(ours != theirs, ours, theirs)}")
            return
        ours, theirs, truth = (computable(t) for t in (ours, theirs, truth))
        same_special_values(ours, theirs, what)
        error, allowed = _error(ours, theirs, truth), self.allowed(theirs, truth, dtype)
        if error > max(slack * allowed, extra):
            raise Failure(
                f"{what}: error {error:.3g} where {allowed:.3g} is allowed "
                f"(PyTorch's own in {name(dtype)}: {_error(theirs, theirs, truth):.3g}); {_worst(ours, theirs, truth)}"
            )


def same_form(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Raise `Failure` unless shape, dtype and device are the same."""
    for attribute in ("shape", "dtype", "device"):
        found, expected = getattr(ours, attribute), getattr(theirs, attribute)
        if found != expected:
            raise Failure(f"{what}: {attribute} {_show(found)}, PyTorch's is {_show(expected)}")


def same_special_values(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Raise `Failure` unless NaN and infinities stand in the same places."""
    a, b = ours.detach(), theirs.detach()
    if _all_finite(a) and _all_finite(b):
        return
    wrong = (a.isnan() != b.isnan()) | (a.isinf() != b.isinf()) | (a.isinf() & b.isinf() & (a.sign() != b.sign()))
    if wrong.any():
        raise Failure(f"{what}: {_place(wrong, a, b)}")


def name(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def computable(tensor: Tensor) -> Tensor:
    """The values in a dtype in which PyTorch computes and compares on a CPU: two real numbers for a complex one."""
    values = tensor.detach()
    if values.dtype in _COMPUTABLE:
        return values
    if values.is_complex():
        whole = values.dtype in (torch.complex64, torch.complex128)
        return torch.view_as_real((values if whole else values.to(torch.complex64)).resolve_conj())
    if values.is_floating_point() and values.itemsize == 1:
        return values.float()
    return values.to(_UNSIGNED.get(values.dtype, values.dtype))


_COMPUTABLE = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool))
# of which PyTorch knows little more than the names
_UNSIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


def largest(tensor: Tensor) -> float:
    """The largest of the absolute values that are finite, of complex numbers of their parts; 0 where there is none."""
    values = computable(tensor).double()
    if not _all_finite(values):
        values = values[values.isfinite()]
    return max(abs(value.item()) for value in values.aminmax()) if values.numel() else 0.0


def _all_finite(tensor: Tensor) -> bool:
    """True if no value is NaN or infinite: in one pass, for NaN is both the least and the greatest."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(math.isfinite(value.item()) for value in tensor.aminmax())


def _error(ours: Tensor, theirs: Tensor, truth: Tensor) -> float:
    """The largest, where PyTorch's result is finite."""
    theirs, off = theirs.detach(), ours.detach().double() - truth.detach().double()
    if not _all_finite(theirs):
        off = off[theirs.isfinite()]
    if not off.numel():
        return 0.0
    error = off.abs().max().item()
    return float("inf") if math.isnan(error) else error


def _worst(ours: Tensor, theirs: Tensor, truth: Tensor) -> str:
    off = (ours.detach().double() - truth.detach().double()).abs().nan_to_num(nan=float("inf"))
    off = torch.where(theirs.detach().isfinite(), off, -1.0)
    return _at(int(off.flatten().argmax()), ours, theirs, truth)


def _place(wrong: Tensor, ours: Tensor, theirs: Tensor) -> str:
    count = int(wrong.sum())
    return f"{_at(int(wrong.flatten().int().argmax()), ours, theirs)}; {count} of {wrong.numel()} differ"


def _at(flat: int, ours: Tensor, theirs: Tensor, truth: Tensor | None = None) -> str:
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), ours.shape)]
    a, b, *rest = (_number(t.detach().flatten()[flat]) for t in (ours, theirs, truth) if t is not None)
    return f"at {index} {a}, PyTorch {b}{f', exact {rest[0]}' if rest else ''}"


def _number(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.is_floating_point() or value.is_complex() else str(value.item())


def _show(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
