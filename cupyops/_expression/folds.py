"""The text of the kernels of a reduction, and its reference in PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._dispatch.reduce.reduction import DEFINE, FORM
from . import python
from .declaration import Declaration, Parameter
from .kernels import OWN, Generated, Unit, by_value, element, is_narrow, pointee, value_type
from .references import dtype, opening, types, whole_shape
from .syntax import Body
from .translation import Translation

COUNT = Parameter("n", "long long", False)  # how many elements are reduced to one
LEFT, RIGHT, TOTAL = (Parameter(name, "float", False) for name in ("a", "b", "a"))

# Functions of PyTorch for expressions of C, which are written without blanks.
_KNOWN = {"a+b": "c_.torch.sum", "b+a": "c_.torch.sum", "a*b": "c_.product", "b*a": "c_.product"}
_KNOWN |= {"max(a,b)": "c_.torch.amax", "max(b,a)": "c_.torch.amax"}
_KNOWN |= {"min(a,b)": "c_.torch.amin", "min(b,a)": "c_.torch.amin"}


@dataclass(frozen=True)
class Fold:
    """The four expressions of a reduction, each as a body that assigns `result_`."""

    map: Body
    reduce: Body
    post: Body
    identity: Body

    @classmethod
    def of(cls, name: str, **expressions: str) -> Fold:
        """Build the fold from what the user wrote of each role."""
        return cls(**{role: _assigning(f"{name}.{role}", text) for role, text in expressions.items()})

    @property
    def bodies(self) -> list[Body]:
        """Bodies of all four expressions."""
        return [self.map, self.reduce, self.post, self.identity]


RESULT = Parameter("result_", "float", False)


def _assigning(name: str, text: str) -> Body:
    body = Body(name, text)  # says what is wrong with it as the user wrote it
    if ";" in body.clean[:-1]:
        raise body.error(0, "is several statements, expected one expression")
    if assigned := re.match(r"\s*(\w+)\s*=(?!=)", body.clean):
        raise body.error(0, f"is an assignment, expected one expression: leave out `{assigned[1]} =`")
    return Body(name, f"result_ = {text}")


_RULE = """
// What {name} combines and how, for values in A.
template <typename A> struct {name}_rule {{
  static constexpr bool kEach = true;
  {members}
  long long n;

  __device__ __forceinline__ A map_({mapped}) const {{
    A result_{{}};
    expression::{name}_map<A>({map_given}, result_);
    return result_;
  }}
  __device__ __forceinline__ A combine_(A a, A b) const {{
    A result_{{}};
    expression::{name}_reduce<A>({scalars_given}a, b, result_);
    return result_;
  }}
  template <int U, int E, typename Number>
  __device__ __forceinline__ void take_(A& state_, const A (&values_)[U][E], int valid_, int, Number) const {{
#pragma unroll
    for (int i_ = 0; i_ < U; ++i_) {{
#pragma unroll
      for (int e_ = 0; e_ < E; ++e_) state_ = i_ < valid_ ? combine_(state_, values_[i_][e_]) : state_;
    }}
  }}
  __device__ __forceinline__ A post_(A a) const {{
    A result_{{}};
    expression::{name}_post<A>({scalars_given}a, n, result_);
    return result_;
  }}
  __device__ __forceinline__ A identity_() const {{
    A result_{{}};
    expression::{name}_identity<A>({scalars_given}result_);
    return result_;
  }}
}};
"""

_KERNEL = """
template <typename T> struct {name}_unit {{
  using A = acc_t<T>;
  using State = A;
  using Value = A;
  static constexpr bool kTakesVectors = false;
  {name}_rule<A> rule_;
  {members}
  A* __restrict__ partial_;  // [slabs x results], null where there is one slab
  long long results_;

  template <int K> struct Loaded {{ {vectors} }};
  template <int K> static __device__ __forceinline__ Loaded<K> none_() {{ return {{}}; }}
  template <int K, typename V>
  __device__ __forceinline__ Loaded<K> load_(const Offsets<{kept}>& from_, const Offsets<{count}>& at_,
                                             const V& vector_) const {{
    return {{{loads}}};
  }}
  template <typename Loaded> __device__ __forceinline__ A value_(const Loaded& loaded_, int k_) const {{
    return rule_.map_({values});
  }}
  template <int K>
  __device__ __forceinline__ int until_vector_(const Offsets<{kept}>& from_, long long begin_, int length_) const {{
    const int until_ = until_vector<K>({first}{own} + from_.at[0] + begin_);
    return {alike} ? until_ : length_;
  }}
  __device__ __forceinline__ void store_(A value_, long long slab_, long long at_) const {{
    if (partial_) partial_[slab_ * results_ + at_] = value_;
    else {y}{own}[at_] = from_body<{out}>({whole}(rule_.post_(value_)));
  }}
}};

// Grid, block: see fold(). Inputs of any strides; y is contiguous.
template <typename T, int FORM>
__global__ void CUPYOPS_FOLD {name}({parameters}, ::acc_t<T>* __restrict__ partial_{scalars}, long long n,
                       const __grid_constant__ ::Layout<{kept}> kept_, const __grid_constant__ ::Layout<{count}> reduced_,
                       const __grid_constant__ ::Division division_, long long results_) {{
  const ::{name}_unit<T> unit_{{{{{given_comma}n}}, {names}, partial_, results_}};
  ::fold<FORM, ::kVecWidth<T>>(unit_, kept_, reduced_, division_);
}}
"""

_FINISH = """
template <typename T> struct {name}_unit {{
  {name}_rule<acc_t<T>> rule_;
  {out}* __restrict__ {y}{own};

  __device__ __forceinline__ void store_(acc_t<T> value_, long long, long long at_) const {{
    {y}{own}[at_] = from_body<{out}>({whole}(rule_.post_(value_)));
  }}
}};

// Grid, block: see finalize_slabs().
template <typename T>
__global__ void {name}(const acc_t<T>* __restrict__ partial_, {out}* __restrict__ {y}{scalars}, long long n,
                       long long slabs_, long long results_) {{
  ::finalize_slabs<::acc_t<T>>(::{name}_unit<T>{{{{{given_comma}n}}, {y}}}, partial_, slabs_, results_);
}}
"""


def kernels(unit: Unit, declaration: Declaration, fold: Fold) -> tuple[Generated, Generated]:
    """The kernels of fold() and of finalize_slabs()."""
    tensors, scalars, y = declaration.tensors, declaration.scalars, declaration.outputs[0]
    pointers = [f"const {pointee(one)}* __restrict__ {one.name}" for one in tensors]
    pointers.append(f"{pointee(y)}* __restrict__ {y.name}")
    shared = {
        "own": OWN,
        "count": len(tensors),
        "kept": len(tensors) + 1,
        "given_comma": "".join(f"{one.name}, " for one in scalars),
        "scalars": "".join(f", {one}" for one in by_value(scalars)),
        "y": y.name,
        "out": pointee(y),
        "whole": "static_cast<int>" if is_narrow(y) else "",
    }

    def rule(name: str) -> str:
        parts = [
            element(f"{name}_{role}", body, more, [RESULT])
            for role, body, more in (
                ("map", fold.map, [*tensors, *scalars]),
                ("reduce", fold.reduce, [*scalars, LEFT, RIGHT]),
                ("post", fold.post, [*scalars, TOTAL, COUNT]),
                ("identity", fold.identity, scalars),
            )
        ]
        return "".join(parts) + _RULE.format(
            name=name,
            members="\n  ".join(f"{value_type(one)} {one.name}{OWN};" for one in scalars),
            mapped=", ".join(f"{value_type(one)} {one.name}{OWN}" for one in tensors),
            map_given=", ".join(f"{one.name}{OWN}" for one in (*tensors, *scalars)),
            scalars_given="".join(f"{one.name}{OWN}, " for one in scalars),
        )

    first, second = f"{unit.name}_fwd", f"{unit.name}_finish"
    # one input is never broadcast along a vector; a line of neighbours, whose stride is a vector's or 1, not either
    broadcast = "false" if len(tensors) == 1 else "vector_.stride[{index}][0] == 0"
    alike = [
        f"until_vector<K>({one.name}{OWN} + from_.at[{index}] + begin_) == until_"
        for index, one in enumerate(tensors[1:], 1)
    ]
    loads = [
        f"load_unit_once<K>({one.name}{OWN} + from_.at[{index}] + at_.at[{index}], {broadcast.format(index=index)})"
        for index, one in enumerate(tensors)
    ]
    whole = _KERNEL.format(
        name=first,
        members="\n  ".join(f"{one}{OWN};" for one in pointers),
        vectors=" ".join(f"Vec<{pointee(one)}, K> {one.name}{OWN};" for one in tensors),
        loads=", ".join(loads),
        first=tensors[0].name,
        alike=" && ".join(alike) or "true",
        values=", ".join(f"to_body(loaded_.{one.name}{OWN}.data[k_])" for one in tensors),
        parameters=", ".join(pointers),
        names=", ".join([one.name for one in tensors] + [y.name]),
        **shared,
    )
    header = "common/reduce/reduction.cuh"
    return (
        unit.kernel(first, header, rule(first) + whole, fold.bodies, DEFINE, FORM=FORM),
        unit.kernel(second, header, rule(second) + _FINISH.format(name=second, **shared), fold.bodies, DEFINE),
    )


def reference(declaration: Declaration, fold: Fold) -> Callable[..., Any]:
    """The reference: of tensors, scalars, `dim` and `keepdim`."""
    tensors, scalars, y = declaration.tensors, declaration.scalars, declaration.outputs[0]
    lines = opening(tensors[0].name, tensors, scalars)
    lines.append(f"shape_ = {whole_shape(tensors)}")
    mapped = _translated(fold.map, [*tensors, *scalars], lines)
    lines.append(f"identity_ = {_translated(fold.identity, scalars, lines)}")
    lines.append(f"mapped_ = {mapped}.expand(shape_)")
    function = _KNOWN.get("".join(fold.reduce.text.partition("=")[2].split()).rstrip(";"))
    if function is None:
        combined: list[str] = []
        result = _translated(fold.reduce, [*scalars, LEFT, RIGHT], combined)
        lines += ["def combine_(a_0, b_0):", *(f"    {line}" for line in (*combined, f"return {result}"))]
        function = "c_.in_pairs(combine_, identity_)"
    lines.append(f"a_0 = c_.folded({function}, mapped_, dim, keepdim, identity_)")
    lines.append("n_0 = c_.number(c_.count(shape_, dim), c_.torch.int64, device_)")
    post = _translated(fold.post, [*scalars, TOTAL, COUNT], lines)
    lines.append(f"return c_.finish({post}, {dtype(y)}, a_0.shape, ({python.listed([one.name for one in tensors])}))")
    return python.define(declaration.short, _parameters(declaration), lines, {}, " -> Tensor")


def given(declaration: Declaration, function: Callable[..., Any]) -> Callable[..., Any]:
    """A reference of the user's, which takes the parameters in the order of the signature, then `dim` and `keepdim`."""
    names = ", ".join(one.name for one in declaration.parameters)
    lines = [f"return function_({names}, dim=tuple(dim), keepdim=keepdim)"]
    return python.define(declaration.short, _parameters(declaration), lines, {"function_": function}, " -> Tensor")


def _parameters(declaration: Declaration) -> str:
    return f"{python.annotated(python.internal(declaration))}, dim: list[int], keepdim: bool"


def _translated(body: Body, parameters: Sequence[Parameter], lines: list[str]) -> str:
    """The expression of a body's result, after the lines for it."""
    translation = Translation(body, types(parameters), types([RESULT]))
    lines += translation.lines
    return translation.result(RESULT.name)
