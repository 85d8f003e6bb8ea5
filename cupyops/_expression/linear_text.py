"""The text of the kernels of a product with an epilogue that is a line of C: on Hopper, and of its gradient everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .._dispatch.gemm.epilogues import COMPUTED
from .._kernel.kernel import HALF
from . import kernels
from .declaration import Declaration, Parameter
from .kernels import OWN, Generated, Unit
from .slopes import slopes as slopes_of
from .syntax import Body
from .values import KNOWN

# Words that Dual numbers do not support: a body with one has the gradient of the reference.
_UNDERIVED = {"lgamma", "double", "int", "long", "bool", "_Bool", "goto", "return", "struct", "for", "while", "do"}
_UNDERIVED |= {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_DERIVED = {*(name.removesuffix("f") for name in KNOWN), "i", "A", "T", "float"}  # "i": if, without its f
_DUAL = "::expression::Dual"

# Functions of few instructions. A text of these with so few characters compiles in a second though there is a copy of it for
# each of a thread's sums; a loop over the sums takes up to 5% longer where there is little of k.
QUICK = frozenset({"exp", "sigmoid", "sqrt", "rsqrt", "fabs", "abs", "max", "min", "fmax", "fmin", "fma"})
_SHORT = 64
_NEARLY = "prec-div", "prec-sqrt"  # NVRTC's options: quotients and roots as exact as a result of 16 bits can show
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")


@dataclass(frozen=True)
class Derived(Body):
    """The gradient of a body: for each tensor that has one, the body computed with that tensor's slope beside its value."""

    names: tuple[str, ...] = ()  # that it reads and assigns
    code: str = ""
    ones: frozenset[str] = frozenset()  # the tensors whose gradient is that of the result

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name that occurs."""
        return frozenset(self.names)

    @cached_property
    def cuda(self) -> str:
        """CUDA text of the body."""
        return self.code


def derived(declaration: Declaration, body: Body) -> Derived | None:
    """The gradient of `body`, to come after `slopes`; None where it is not to be had in this way."""
    known = {one.name for one in declaration.parameters} | {declaration.outputs[0].name}
    called = body.words - known
    if called & _UNDERIVED or any(one.ctype == "double" for one in declaration.scalars):
        return None
    if {name.removesuffix("f") for name in _CALLED.findall(body.clean)} - _DERIVED:
        return None
    y = declaration.outputs[0].name
    given = [*declaration.tensors, *declaration.scalars]
    of = slopes_of(body, y, [one.name for one in given])
    read = frozenset().union(*of.reads.values())
    parts = []
    for one in declaration.differentiable:
        if one.name in of.ones:
            parts.append(f"  grad_{one.name} = grad_{y};")
            continue
        passed = [other.name if other.name in read else "0" for other in given]
        values = ", ".join(f"{_DUAL}({name}, 1)" if other is one else name for name, other in zip(passed, given))
        call = f"expression::{declaration.short}_slopes<{_DUAL}>({values}, of_)"
        parts.append(f"  {{ {_DUAL} of_; {call}; grad_{one.name} = grad_{y} * of_.slope; }}")
    assigned = [f"grad_{one.name}" for one in declaration.differentiable]
    names = f"grad_{y}", *sorted(read), *assigned
    return Derived(f"{declaration.short}.gradient", body.text, names, "\n".join(parts), of.ones)


def slopes(unit: Unit, declaration: Declaration, body: Body) -> Unit:
    """The unit of the gradient's kernel: before it stands the body, for numbers with their slope."""
    function = kernels.element(
        f"{unit.name}_slopes", body, [*declaration.tensors, *declaration.scalars], declaration.outputs
    )
    return replace(unit, preamble=f'{unit.preamble}\n#include "common/elementwise/dual.cuh"\n{function}')


_FUSED = """
template <typename T> struct {name}_epilogue : wgmma_gemm::Computed {{
  using A = acc_t<T>;
  static constexpr int AT_ONCE = {at_once};
  static constexpr bool UNROLLED = {unrolled};
  {members}

  template <int N> struct Captured {{
    static constexpr int PAIRS = N;
    {pairs}
    template <bool WHOLE>
    __device__ __forceinline__ void load(const {name}_epilogue& all_, int row_, int column_, int m_, int n_) {{
      {loads}
    }}
    template <int I> __device__ __forceinline__ A of(const {name}_epilogue& all_, A z_, int c_) const {{
      A y_{{}};
      {element}
      return y_;
    }}
  }};
}};

// Grid, block, shared memory, who owns what: see gemm_wgmma(). Of each captured tensor the strides of rows and columns.
template <typename T, {sizes}>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    {name}_wgmma(const __grid_constant__ TensorMap a_, const __grid_constant__ TensorMap b_,
                 const __grid_constant__ TensorMap y_map_, const __grid_constant__ TensorMap kept_map_, T* y_, T* kept_,
                 const T* bias_{parameters}, int m_, int n_, int k_, int pitch_, int group_) {{
  using Shape_ = wgmma_gemm::Shape<M_, N_, STAGES_, SLOTS_, CLUSTER_, 1, PINGPONG_, LATE_>;
  extern __shared__ __align__(1024) char memory_[];
  const ::{name}_epilogue<T> epilogue_{{{{}}{values}}};
  wgmma_gemm::Problem<T> problem_{{a_, b_, y_map_, y_, bias_, m_, n_, k_, 1, 0, 0, pitch_, group_,
                                   b_, kept_map_, kept_, n_, 0}};
  problem_.computed = &epilogue_;
  wgmma_gemm::multiply<T, Shape_, false, false, ::{name}_epilogue<T>>(problem_, memory_);
}}
"""


def fused(unit: Unit, declaration: Declaration, body: Body, lies: Sequence[tuple[bool, str]]) -> Generated:
    """The product's kernel with its epilogue, which takes (maps, y, kept, bias, (tensor, its strides)..., scalars, sizes).

    lies: of each captured tensor whether rows have elements of their own, and how columns lie: "Same", "Pairs" or "Anyhow".
    """
    name, (product, *captured), scalars = unit.name, declaration.tensors, declaration.scalars
    types = [
        f"wgmma_gemm::Matrix<{kernels.pointee(one)}, {str(rows).lower()}, wgmma_gemm::k{columns}>"
        for one, (rows, columns) in zip(captured, lies)
    ]
    members = [f"{kind} {one.name}{OWN};" for kind, one in zip(types, captured)]
    members += [f"{kernels.value_type(one)} {one.name}{OWN};" for one in scalars]
    given = {product.name: "z_"}
    given |= {one.name: f"{one.name}_pairs_.template at<I>(c_)" for one in captured}
    given |= {one.name: f"all_.{one.name}{OWN}" for one in scalars}
    arguments = [given[one.name] for one in (*declaration.tensors, *scalars)]
    parameters = [
        f"const {kernels.pointee(one)}* __restrict__ {one.name}, long long {one.name}_row_, long long {one.name}_column_"
        for one in captured
    ] + kernels.by_value(scalars)
    values = [f"{{{one.name}, {one.name}_row_, {one.name}_column_}}" for one in captured]
    values += [one.name for one in scalars]
    text = _FUSED.format(
        name=name,
        at_once=_at_once(captured, lies),
        unrolled=str(_is_short(body, unit.preamble) or registers(captured, lies) > 1).lower(),
        members="\n  ".join(members),
        pairs="\n    ".join(f"wgmma_gemm::Pairs<{kind}, N> {one.name}_pairs_;" for kind, one in zip(types, captured)),
        loads="\n      ".join(
            f"{one.name}_pairs_.template load<WHOLE>(all_.{one.name}{OWN}, row_, column_, m_, n_);" for one in captured
        ),
        element=kernels.called(f"{name}_element", body, ", ".join([*arguments, "y_"])),
        sizes=", ".join(
            f"{'bool' if isinstance(value, bool) else 'int'} {key}_" for key, value in COMPUTED.fixed.items()
        ),
        parameters="".join(f", {one}" for one in parameters),
        values="".join(f", {one}" for one in values),
    )
    device = kernels.element(
        f"{name}_element", body, [*declaration.tensors, *scalars], declaration.outputs, nearly=True
    )
    domain: dict[str, Any] = {key: (value,) for key, value in COMPUTED.fixed.items()}
    nearly = [f"-{one}=false" for one in _NEARLY if not any(one in given for given in unit.options)]
    return replace(unit, dtypes=HALF, options=(*nearly, *unit.options)).kernel(
        f"{name}_wgmma",
        "gemm/computed_wgmma.cuh",
        device + text,
        [body],
        arch="sm_90a",
        strided=True,
        **domain,
    )


def _is_short(body: Body, preamble: str) -> bool:
    """Return True if the body is short enough for a copy for each of a thread's sums."""
    return not (preamble or body.words & KNOWN - QUICK) and len(body.clean) <= _SHORT


def registers(captured: Sequence[Parameter], lies: Sequence[tuple[bool, str]]) -> float:
    """Registers of a thread for its captures with each pair of sums; where that is more than one, a loop takes longer."""
    return sum(
        (3 if columns == "Anyhow" else max(1, (one.dtype or HALF[0]).itemsize // 2)) / (1 if rows else 2)
        for one, (rows, columns) in zip(captured, lies)
        if columns != "Same"
    )


def _at_once(captured: Sequence[Parameter], lies: Sequence[tuple[bool, str]]) -> int:
    """Number of pairs of each capture loaded before use: as many as there are registers for, beside the sums."""
    needed = registers(captured, lies)
    return 16 if needed <= 1 else 8 if needed <= 2 else 4
