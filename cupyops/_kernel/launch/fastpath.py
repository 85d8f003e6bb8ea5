"""The launch of a kernel as one generated function: all checks, and as little Python as there can be.

A launch costs the driver 2.5 us; a loop over descriptors of the parameters, and a function for each step, cost Python 2 us
more. So a function is written out for each kernel's signature, once. It only knows the case in which all is well, and hands
everything else to the full path, which mends or explains it.
"""

from __future__ import annotations

import builtins
import keyword
import struct
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._util import observed, torch_private
from .configuration import Configuration
from .signature import Argument, layout
from .tensor_map import ALIGNMENT, TensorMap
from .versions import this_thread

_ACCESSOR = -1  # in the place of a boundary: a tensor is packed there
Configure = Callable[[Configuration, Callable[..., None]], Callable[..., None]]


class Refused(Exception):
    """Signal of a generated launch that the full path is to look at this call."""


def entry(arguments: Sequence[Argument], device: int, function: int, slots: Any, new_slot: Any) -> tuple[Any, ...]:
    """Tuple that a launch looks up by its template values: everything that differs between the instances of a kernel."""
    pack_into = struct.Struct(layout(arguments)[0]).pack_into
    pointers = [argument.dtype for argument in arguments if argument.kind == "pointer"]
    sizes = [argument.accessor or argument.size for argument in arguments if argument.kind == "struct"]
    return device, function, pack_into, slots, new_slot, *pointers, *sizes


def configure(
    arguments: Sequence[Argument],
    template: Sequence[str],
    anchor: int | None,
    table: dict[Any, tuple[Any, ...]],
    full: Callable[..., None],
) -> Configure:
    """`configure(configuration, cu_launch)` gives the launch function for these dimensions; `table` is keyed by `key`.

    It serves each instance whose `boundaries` are those of `arguments`; others are not to be put into the table.
    """
    names = _names(arguments, template)
    checks, packed, known = [], [], []
    for index, (name, argument) in enumerate(zip(names, arguments)):
        value = name
        if argument.kind == "pointer":
            dtype, value = f"_d{index}", f"_v{index}"
            known.append(dtype)
            checks += [
                f"if {name} is None: {value} = 0",
                f"elif ({name}.dtype is not {dtype} and {dtype} is not None) or {name}.get_device() != _device: raise _Refused",
                *[f"elif {name}.{bit}(): raise _Refused" for bit in _bits(argument)],
                f"else: {value} = {name}.data_ptr() or _address({name})",
            ]
            if (boundary := _checked_boundary(argument)) > 1:
                checks.append(f"if {value} & {boundary - 1}: raise _Refused")
        elif argument.kind == "integer":
            checks.append(f"if {name}.__class__ is not int and not isinstance({name}, _integers): raise _Refused")
        elif argument.kind == "bool":
            checks.append(f"if {name}.__class__ is not bool: raise _Refused")
        elif argument.kind == "float":
            checks.append(f"if {name}.__class__ is not float and {name}.__class__ is not int: raise _Refused")
        packed.append(value)
    for index, (name, argument) in enumerate(zip(names, arguments)):
        if argument.kind == "struct":
            known.append(f"_s{index}")
            if argument.accessor is not None:  # which raises where the full path is to look
                checks.append(f"_v{index} = _s{index}.of({name}, _device)")
                packed[index] = f"_v{index}"
                continue
            wrong = f"{name}.__class__ not in _structs"
            if argument.takes_map:
                wrong += f" and ({name}.__class__ is not _TensorMap or {name}.get_device() != _device)"
            checks.append(f"if {name}.nbytes != _s{index} or ({wrong}): raise _Refused")
            packed[index] = f"{name}.tobytes()"
    if torch.cuda.device_count() > 1:
        checks.append("if _current_device() != _device: raise _Refused")
    expression = template[0] if len(template) == 1 else f"({''.join(one + ', ' for one in template)})"
    parameters = [f"{name}=_missing" for name in names] + ["*_extra"] + [f"{one}=_missing" for one in template]
    maps = [name for name, argument in zip(names, arguments) if argument.takes_map]
    written = [name for name, argument in zip(names, arguments) if argument.is_written]
    raise_versions = f"if not _this_thread.in_role: _raise_versions({_without_none(written)})" if written else ""
    if maps:
        given = f"[_one.tensor for _one in ({', '.join(maps)},) if _one.__class__ is _TensorMap and _one.written]"
        raise_versions += f"\n            if not _this_thread.in_role: _raise_versions({given})"
    source = f"""
def configure(_configuration, _launch):
    _gx, _gy, _gz = _configuration.grid
    _bx, _by, _bz = _configuration.block
    _shared = _configuration.shared
    def launch({", ".join(parameters)}, **_others):
        try:
            _device, _function, _pack_into, _slots, _new_slot, {"".join(name + ", " for name in known)} = _table[{expression}]
            if ({_unanchored(names, anchor, maps)}) or _observed.watching or _is_jit_tracing() or _forward_ad.{torch_private.LEVEL} >= 0 or (_function_modes() and _records()):
                raise _Refused
            {(chr(10) + " " * 12).join(checks)}
            if _extra or _others: raise _Refused
            _slot = _slots.pop() if _slots else _new_slot()
            _pack_into(_slot[0], 0, {", ".join(packed)})
            {raise_versions}
            _launch(_function, _gx, _gy, _gz, _bx, _by, _bz, _shared, _stream(_device), _slot[2], 0)
            _slots.append(_slot)
            return
        except Exception:
            pass
        _args, _named = _in_order({tuple(names)!r}, ({"".join(one + ", " for one in names)}), _missing)
        _template = {{name: value for name, value in zip({tuple(template)!r}, ({"".join(one + ", " for one in template)})) if value is not _missing}}
        _full(_configuration, (*_args, *_extra), _template | _named | _others)
    launch._torchdynamo_disable, launch._torchdynamo_disable_msg = True, _why
    return launch
"""
    scope: dict[str, Any] = {
        "_missing": object(),
        "_why": torch_private.LAUNCH,
        "_table": table,
        "_full": full,
        "_in_order": _in_order,
        "_stream": torch_private.current_stream,
        "_current_device": torch_private.current_device,
        "_is_jit_tracing": torch_private.is_jit_tracing,
        "_function_modes": torch_private.function_mode_enabled,  # one of which is open while make_fx records real tensors
        "_records": torch_private.proxy_mode,
        "_forward_ad": torch_private.forward_ad,
        "_observed": observed,
        "_address": _address,
        "_integers": (int, np.integer),  # a bool too
        "_structs": (np.ndarray, np.void),
        "_TensorMap": TensorMap,
        "_Tensor": Tensor,
        "_Parameter": torch.nn.Parameter,
        "_Refused": Refused,
        "_this_thread": this_thread,
        "_raise_versions": torch_private.increment_versions,
    }
    exec(compile(source, f"<launch of {len(arguments)} arguments>", "exec"), scope)
    found: Any = scope["configure"]
    launches = (one for one in found.__code__.co_consts if isinstance(one, types.CodeType))
    for code in launches:  # which torch.compile is not to trace
        torch_private.skip_code(code)
    return found  # type: ignore[no-any-return]


def key(values: Sequence[Any]) -> Any:
    """The key of the table for template values."""
    return values[0] if len(values) == 1 else tuple(values)


def boundaries(arguments: Sequence[Argument]) -> tuple[tuple[str, int], ...]:
    """Name and assumed alignment of each argument; the alignment also marks possible tensor maps."""
    return tuple((argument.name, _checked_boundary(argument)) for argument in arguments)


def _names(arguments: Sequence[Argument], template: Sequence[str]) -> list[str]:
    """Names of the generated function's arguments: the kernel's, where a name is unique and means nothing else."""
    given = [argument.name for argument in arguments]
    return [
        f"_a{index}"
        if keyword.iskeyword(name)
        or name.startswith("_")
        or name in template
        or hasattr(builtins, name)
        or given.count(name) > 1
        else name
        for index, name in enumerate(given)
    ]


def _in_order(names: Sequence[str], values: Sequence[Any], missing: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Split arguments: (the values up to the first that is missing, those after it by name)."""
    count = next((index for index, value in enumerate(values) if value is missing), len(values))
    return values[:count], {name: one for name, one in zip(names[count:], values[count:]) if one is not missing}


def _checked_boundary(argument: Argument) -> int:
    """1 where any address will do; that a tensor begins at a whole element of its dtype is taken for granted here."""
    if argument.accessor is not None:
        return _ACCESSOR
    if argument.kind == "struct":
        return ALIGNMENT if argument.takes_map else 1
    return argument.boundary if argument.dtype is None else 1


def _unanchored(names: Sequence[str], anchor: int | None, maps: Sequence[str]) -> str:
    """Return the expression that is true where no tensor tells the device, so that the full path must report it."""
    of_map = f"{maps[0]}.__class__ is not _TensorMap" if maps else "True"
    if anchor is None:
        return of_map
    first = names[anchor]
    no_tensor = f"type({first}) is not _Tensor and type({first}) is not _Parameter"
    return f"{no_tensor} and ({first} is not None or {of_map})" if maps else no_tensor


def _bits(argument: Argument) -> list[str]:
    """Names of the bits by which a tensor's values may differ from its memory; integers have none."""
    if argument.dtype is None:
        return ["is_conj", "is_neg"]
    if not argument.template and not (argument.dtype.is_floating_point or argument.dtype.is_complex):
        return []
    return ["is_conj", "is_neg"] if argument.dtype.is_complex else ["is_neg"]


def _without_none(names: Sequence[str]) -> str:
    """Return the expression for a sequence of the named values that are not None."""
    every = "".join(f"{name}, " for name in names)
    present = " and ".join(f"{name} is not None" for name in names)
    return f"({every}) if {present} else [_one for _one in ({every}) if _one is not None]"


def _address(tensor: Tensor) -> int:
    """The address of a tensor that says 0: right for one without elements, a sign of one without storage otherwise."""
    if tensor.numel():
        raise Refused
    return 0
