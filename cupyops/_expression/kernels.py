"""The text of kernels around bodies of C, and what it takes to compile it as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .._kernel.compile import source
from .._kernel.kernel import Kernel
from .._kernel.launch.ctype import C_NAMES
from ..errors import InputError
from .declaration import Parameter
from .syntax import Body


class Generated(Kernel):
    """A kernel whose text was put together here. Errors and the simulator show lines of the user's own `pieces`."""

    def __init__(
        self,
        text: str,
        name: str,
        *,
        file: str,
        pieces: Sequence[Body],
        beside: Path | None,
        options: Iterable[str],
        define: Mapping[str, int] | None = None,
        arch: str | None = None,
        strided: bool = False,
        domain: Mapping[str, tuple[Any, ...]],
    ) -> None:
        super().__init__(
            text,
            name,
            options=options,
            define=define,
            arch=arch,
            where=None,
            strided=strided,
            extension=False,
            **domain,
        )
        self._beside = beside
        self._file, self._pieces = file, pieces

    @cached_property
    def source(self) -> source.Source:
        """The text, with the pieces in it also by their own names."""
        whole = source.load(self._code, self._beside)
        own = {piece.name: piece.cuda for piece in self._pieces}
        return dataclasses.replace(whole, name=self._file, includes=whole.includes | own)


class Preamble(Body):
    """Device functions of the user's: CUDA C as it stands."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InputError(f"{self.name} is {self.text!r}, expected CUDA C")

    @cached_property
    def cuda(self) -> str:
        """The text itself."""
        return self.text


@dataclass(frozen=True)
class Unit:
    """Common parts of the kernels of one operator: name, preamble, folder of includes, options, and the dtypes of T."""

    name: str
    preamble: str
    beside: Path | None
    options: Iterable[str]
    dtypes: tuple[torch.dtype, ...]

    def kernel(
        self,
        name: str,
        header: str,
        text: str,
        pieces: Sequence[Body],
        define: Mapping[str, int] | None = None,
        arch: str | None = None,
        strided: bool = False,
        **domain: tuple[Any, ...],
    ) -> Generated:
        """The kernel `name<T, ...>` of a text, which comes after the `header` that it includes and the preamble.

        `define`: what the header asks to be defined; `arch` and `strided` as of a `Kernel`.
        """
        file = f"{name}.cu"
        before = [Preamble(f"{self.name}.preamble", self.preamble)] if self.preamble else []
        start = "\n".join([f'#include "{header}"', *map(piece, before)])
        return Generated(
            numbered(f"{start}\n{text}", file),
            f"{name}<{', '.join(['T', *domain])}>",
            file=file,
            pieces=[*before, *pieces],
            beside=self.beside,
            options=self.options,
            define=define,
            arch=arch,
            strided=strided,
            domain={"T": self.dtypes, **domain},
        )


def numbered(text: str, file: str) -> str:
    """Each `#line` that names no file is back in `file`: it gets the number of the line after it."""
    lines = text.split("\n")
    return "\n".join(
        f'#line {index + 2} "{file}"' if line.strip() == "#line" else line for index, line in enumerate(lines)
    )


def piece(body: Body) -> str:
    """The body, under its own name for the compiler."""
    return f'#line 1 "{body.name}"\n{body.cuda}\n#line'


_NEARLY = ("exp", "sigmoid", "tanh", "log1p")  # what half types have a quicker one of


def element(
    name: str, body: Body, given: Sequence[Parameter], assigned: Sequence[Parameter], nearly: bool = False
) -> str:
    """The device function of one element: `given` by value, `assigned` by reference. `nearly`: for half types too."""
    parameters = [f"{value_type(one)} {one.name}" for one in given]
    parameters += [f"{assigned_type(one)}& {one.name}" for one in assigned]
    function = f"""
template <typename A> __device__ __forceinline__ void {name}({", ".join(parameters)}) {{
  using T = A;
{piece(body)}
}}
"""
    more = f"namespace nearly {{{function}}}" if nearly and is_nearly(body) else ""
    return f"\nnamespace expression {{{function}{more}}}  // namespace expression\n"


def is_nearly(body: Body) -> bool:
    """Return True if half types have an element() of their own, in the namespace `nearly`."""
    return any(word in body.words for word in _NEARLY)


def called(name: str, body: Body, arguments: str) -> str:
    """The call of element()."""
    whole = f"expression::{name}<A>({arguments});"
    if not is_nearly(body):
        return whole
    return f"if constexpr (sizeof(T) == 2) expression::nearly::{name}<A>({arguments});\n      else {whole}"


def value_type(one: Parameter) -> str:
    """The C type of a parameter inside a body: half types and T are computed in A."""
    if not one.is_tensor:
        return "A" if one.ctype == "float" else one.ctype
    if one.dtype is None or one.dtype.itemsize < 8 and one.dtype.is_floating_point:
        return "A"
    return C_NAMES[one.dtype]


def assigned_type(one: Parameter) -> str:
    """The C type of a parameter that a body assigns: integers narrower than int are one until they are stored.

    From a floating-point number to a narrow integer C says nothing of what does not fit, and compilers differ; of an int
    the low bits are stored, as PyTorch does.
    """
    return "int" if is_narrow(one) else value_type(one)


def is_narrow(one: Parameter) -> bool:
    """Return True for a tensor of integers narrower than int."""
    return one.dtype in (torch.int8, torch.uint8, torch.int16)


def pointee(one: Parameter) -> str:
    """The C type of a tensor's elements."""
    return "T" if one.dtype is None else C_NAMES[one.dtype]


def by_value(scalars: Sequence[Parameter], suffix: str = "") -> list[str]:
    """Declare scalars as parameters of a kernel."""
    return [f"{'::acc_t<T>' if one.ctype == 'float' else one.ctype} {one.name}{suffix}" for one in scalars]


def translated_type(one: Parameter) -> str:
    """The type of a parameter in a translation, where integers are int or long long."""
    found = value_type(one)
    return found if found in ("A", "double", "bool", "int", "long long") else "int"


# In the text of a kernel, parameters have the user's names, which the simulator's messages show. What else is there by name
# begins with ::, or ends in _, as no name of the user's does; members of structs are the user's names with OWN.
OWN = "_own_"

_POINTWISE = """
// What {name} does to K elements: those at `from_` of the inputs, and from `to_` on of the outputs.
template <typename T, bool FLAT> struct {name}_unit {{
  using A = acc_t<T>;
  {members}
  const Layout<{count}>& layout_;

  template <int K> __device__ __forceinline__ void apply_(const Offsets<{count}>& from_, long long to_) const {{
    {units}
#pragma unroll
    for (int k_ = 0; k_ < K; ++k_) {{
      {values}
      {element}
      {results}
    }}
    {stores}
  }}
}};

// Grid, block: see pointwise(). Inputs of any strides, or FLAT, dense outputs; each thread owns whole vectors.
template <typename T, bool FLAT_>
__global__ void {name}({parameters}, const __grid_constant__ ::Layout<{count}> layout_, long long size_) {{
  using A = ::acc_t<T>;
  constexpr int W_ = ::kVecWidth<T>;
  const bool vectors_fit_ = {fits};
  ::pointwise<FLAT_, W_>(layout_, size_, vectors_fit_, ::{name}_unit<T, FLAT_>{{{names}, layout_}});
}}
"""


@dataclass(frozen=True)
class Stored:
    """The text for an output of a pointwise kernel: its type, the test of its address, K of it, a value, the store."""

    pointee: str
    fits: str
    unit: str
    value: str
    store: str


def pointwise(
    unit: Unit,
    role: str,
    body: Body,
    inputs: Sequence[Parameter],
    scalars: Sequence[Parameter],
    outputs: Sequence[Parameter],
) -> Generated:
    """The elementwise kernel that takes (inputs, outputs, scalars, layout, size)."""
    stored = [
        Stored(
            pointee(one),
            f"::fits_vec<{pointee(one)}, W_>({one.name})",
            f"Vec<{pointee(one)}, K> {one.name}_unit_;",
            f"from_body<{pointee(one)}>({one.name}_value_)",
            f"store_vec<{pointee(one)}, K>({one.name}{OWN} + to_, {one.name}_unit_);",
        )
        for one in outputs
    ]
    return _pointwise(unit, role, body, inputs, scalars, outputs, stored)


WIDE = Parameter("wide_", "unsigned", False)


def gradients(
    unit: Unit,
    role: str,
    body: Body,
    inputs: Sequence[Parameter],
    scalars: Sequence[Parameter],
    outputs: Sequence[Parameter],
) -> Generated:
    """The elementwise kernel that takes (inputs, gradients, scalars, wide, layout, size).

    A gradient is null where nobody wants it; of T, or of acc_t<T> where the bit of it in `wide` says so.
    """
    stored = [
        Stored(
            "void",
            f"::fits_vec<A, W_>(static_cast<const A*>({one.name}))",
            f"Vec<A, K> {one.name}_unit_;",
            f"{one.name}_value_",
            f"store_gradient<T, K>({one.name}{OWN}, {WIDE.name}{OWN} >> {index} & 1, to_, {one.name}_unit_);",
        )
        for index, one in enumerate(outputs)
    ]
    return _pointwise(unit, role, body, inputs, scalars, outputs, stored, [WIDE])


def _pointwise(
    unit: Unit,
    role: str,
    body: Body,
    inputs: Sequence[Parameter],
    scalars: Sequence[Parameter],
    outputs: Sequence[Parameter],
    stored: Sequence[Stored],
    more: Sequence[Parameter] = (),
) -> Generated:
    name, count = f"{unit.name}_{role}", len(inputs)
    pointers = [(f"const {pointee(one)}", one) for one in inputs]
    pointers += [(two.pointee, one) for one, two in zip(outputs, stored)]

    def declared(suffix: str = "") -> list[str]:
        return [f"{kind}* __restrict__ {one.name}{suffix}" for kind, one in pointers] + by_value(
            [*scalars, *more], suffix
        )

    broadcast = [f"layout_.stride[{index}][0] == 0" for index in range(count)]
    fits = [
        f"((!FLAT_ && {flat}) || ::fits_vec<{pointee(one)}, W_>({one.name}))" for one, flat in zip(inputs, broadcast)
    ]
    loads = [
        f"const auto {one.name}_unit_ = load_unit<K>({one.name}{OWN} + from_.at[{index}], !FLAT && {broadcast[index]});"
        for index, one in enumerate(inputs)
    ]
    given = [f"to_body({one.name}_unit_.data[k_])" for one in inputs] + [f"{one.name}{OWN}" for one in scalars]
    text = _POINTWISE.format(
        name=name,
        parameters=", ".join(declared()),
        members="\n  ".join(f"{one};" for one in declared(OWN)),
        names=", ".join(one.name for one in (*inputs, *outputs, *scalars, *more)),
        count=count,
        fits=" && ".join([*fits, *(one.fits for one in stored)]),
        units="\n    ".join([*loads, *(one.unit for one in stored)]),
        values="\n      ".join(f"{assigned_type(one)} {one.name}_value_{{}};" for one in outputs),
        element=called(f"{name}_element", body, ", ".join([*given, *(f"{one.name}_value_" for one in outputs)])),
        results="\n      ".join(f"{one.name}_unit_.data[k_] = {two.value};" for one, two in zip(outputs, stored)),
        stores="\n    ".join(one.store for one in stored),
    )
    device = element(f"{name}_element", body, [*inputs, *scalars], outputs, nearly=True)
    return unit.kernel(name, "common/elementwise/expression.cuh", device + text, [body], FLAT=(False, True))
