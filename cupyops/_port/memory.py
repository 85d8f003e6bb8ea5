"""Memory of CUDA's own calls: what is allocated is a flat tensor, and copies and fills are of bytes."""

from __future__ import annotations

from dataclasses import replace

from . import values
from .expressions import DTYPE_NAMES, assigned, children, nothing, python, typed
from .program import Node, bare, text, under
from .scope import NotTranslated, Scope, Variable
from .values import STATUS, ULONG, VOID, Type, Value

_KINDS = [f"cudaMemcpy{one}" for one in ("HostToDevice", "DeviceToHost", "DeviceToDevice", "Default", "HostToHost")]


def call(node: Node, base: str, given: Node, scope: Scope) -> Value:
    """`cudaMalloc(&p, bytes)`, `cudaMemset(p, value, bytes)`, `cudaMemcpy(to, from, bytes, kind)`, `cudaFree(p)`."""
    nodes = children(given)
    if base in ("THCudaMalloc", "THCudaFree"):
        nothing(nodes[0], scope)
        nodes = nodes[1:]
    if base.endswith("Async"):
        taken = 4 if base.startswith("cudaMemcpy") else 3
        for one in nodes[taken:]:
            nothing(one, scope)
        nodes, base = nodes[:taken], base.removesuffix("Async")
    if base == "cudaMalloc" and len(nodes) == 2:
        _allocated(node, nodes, scope)
    elif base in ("malloc", "THCudaMalloc") and len(nodes) == 1:
        count = _bytes(nodes[0], scope)
        scope.read(given)
        device = f", device={_device(node, scope)}" if base == "THCudaMalloc" else ""
        code = f"torch.empty({count.code}, dtype=torch.uint8{device})"
        return Value(code, Type("pointer", of=(VOID,)), element="torch.uint8")
    elif base in ("cudaFree", "free", "THCudaFree") and len(nodes) == 1 and nodes[0].type == "identifier":
        scope.before.append(f"{_pointer(nodes[0], scope).code} = None")
    elif base == "memset" and len(nodes) == 3 and text(nodes[1]) == "0" and (to := _host(nodes[0], scope)):
        _to_host(to, "0", _bytes(nodes[2], scope), scope)
    elif base in ("cudaMemset", "memset") and len(nodes) == 3:
        at, value, count = _pointer(nodes[0], scope), python(nodes[1], scope), _bytes(nodes[2], scope)
        scope.before.append(f"cpp.first_bytes({at.code}, {count.code}).fill_({value.at(values.BIT_AND)} & 255)")
    elif base == "cudaMemcpy" and len(nodes) == 4 and bare(text(nodes[3])) in _KINDS:
        count = _bytes(nodes[2], scope)
        _copy(nodes[0], _copied(nodes[1], count, scope), count, scope)
    elif base.endswith("Symbol") and len(nodes) > 2 and [text(one) for one in nodes[3:4]] in ([], ["0"]):
        _of_symbol(node, base == "cudaMemcpyToSymbol", nodes, scope)
    else:
        raise NotTranslated(node, f"{' '.join(text(node).split())[:60]!r}")
    scope.read(given)
    return Value("0", STATUS)


def _of_symbol(node: Node, is_set: bool, nodes: list[Node], scope: Scope) -> None:
    """`cudaMemcpyFromSymbol(&n, count, sizeof(n))`, of a variable of the device, which the kernels have together."""
    symbol, count = text(nodes[not is_set]), _bytes(nodes[2], scope)
    if not scope.program.plain or [one for one in nodes[4:] if bare(text(one)) not in _KINDS]:
        raise NotTranslated(node, f"{' '.join(text(node).split())[:60]!r}")
    variable = f"ext.{scope.program.plain}.globals()[{symbol!r}]"
    found = scope.declare("symbol ", VOID).name
    scope.before.append(f"{found} = {variable}.get()")
    if is_set:
        scope.before.append(f"cpp.first_bytes({found}, {count.code}).copy_({_copied(nodes[1], count, scope)})")
        scope.before.append(f"{variable}.set({found})")
    else:
        _copy(nodes[0], f"cpp.first_bytes({found}, {count.code})", count, scope)


def _copy(to: Node, of: str, count: Value, scope: Scope) -> None:
    """Copy bytes to memory of the host or of a tensor."""
    if (place := _host(to, scope)) is not None:
        _to_host(place, of, count, scope)
    else:
        scope.before.append(f"cpp.first_bytes({_pointer(to, scope).code}, {count.code}).copy_({of})")


Place = tuple[Variable | None, Type, str, str]  # a number, or else: elements of that type, in a list, from an index on


def _host(node: Node, scope: Scope) -> Place | None:
    """A variable or an array of the host, as of `&n`, `&v[0]`, `v.data()`; None for other memory."""
    name = under(node, "argument") if node.type == "pointer_expression" and text(node).startswith("&") else None
    variable = scope.find(text(name or node)) if (name or node).type == "identifier" else None
    if name is not None and variable is not None and variable.value.type.is_number:
        scope.read(node)
        return variable, variable.value.type, variable.name, "0"
    if variable is not None and name is None and variable.value.type.kind == "list":
        found = replace(variable.value, type=Type("cursor", of=variable.value.type.of), code="0", element=variable.name)
    elif name is None or name.type == "subscript_expression":
        found = python(node, scope)
    else:
        return None
    scope.read(node)
    is_host = found.type.kind == "cursor" and found.type.of and found.type.of[0].is_number
    return (None, found.type.of[0], found.element, found.code) if is_host else None


def _dtype(kind: Type) -> str:
    return f"torch.{DTYPE_NAMES[kind.kind, kind.bits, kind.signed]}"


def _to_host(place: Place, of: str, count: Value, scope: Scope) -> None:
    """Write bytes, or zeros, to a variable or an array of the host."""
    variable, kind, name, at = place
    size = max(kind.bits // 8, 1)
    length = count.at(values.PLUS + 1) if size == 1 else f"({count.code}) // {size}"
    zero, found = "0.0" if kind.kind == "float" else "0", f"{of}.view({_dtype(kind)})"
    if variable is None:
        end = length if at == "0" else f"{at} + {length}"
        scope.before.append(
            f"{name}[{'' if at == '0' else at}:{end}] = {f'[{zero}] * ({length})' if of == '0' else f'{found}.tolist()'}"
        )
    else:
        scope.before.append(f"{name} = {zero if of == '0' else f'{found}[0].item()'}")
        variable.value = typed(variable.name, kind)


def _copied(node: Node, count: Value, scope: Scope) -> str:
    """The bytes that are copied from memory of the host, or of a tensor."""
    if (place := _host(node, scope)) is None:
        return f"cpp.first_bytes({_pointer(node, scope).code}, {count.code})"
    variable, kind, name, at = place
    of = f"[{name}]" if variable is not None else name if at == "0" else f"{name}[{at}:]"
    return f"cpp.first_bytes(torch.tensor({of}, dtype={_dtype(kind)}), {count.code})"


def _pointer(node: Node, scope: Scope) -> Value:
    found = python(node, scope)
    if found.type.kind != "pointer":
        raise NotTranslated(node, f"{text(node)[:60]!r}: a {found.type}, where the memory of a tensor is expected")
    return found


def _bytes(node: Node, scope: Scope) -> Value:
    return assigned(python(node, scope), ULONG, node)


def _allocated(node: Node, nodes: list[Node], scope: Scope) -> None:
    """A flat tensor on the device of the tensors at hand."""
    target = nodes[0]
    while target.type in ("cast_expression", "parenthesized_expression"):
        target = under(target, "value") or children(target)[0]
    name = under(target, "argument") if text(target).startswith("&") else None
    variable = scope.find(text(name)) if name is not None else None
    if variable is None or variable.value.type.kind != "pointer" or not variable.value.type.of[0].bits:
        raise NotTranslated(node, f"{' '.join(text(node).split())[:60]!r}")
    element = variable.value.type.of[0]
    count = _bytes(nodes[1], scope)
    size = max(element.bits // 8, 1)
    length = count.code if size == 1 else f"({count.code}) // {size}"
    device = _device(node, scope, variable.name)
    scope.before.append(f"{variable.name} = torch.empty({length}, dtype={_dtype(element)}, device={device})")


def _device(node: Node, scope: Scope, but: str = "") -> str:
    kinds = {one.name: one.value.type.kind for frame in scope.frames for one in frame.values()}
    others = [one for one, kind in kinds.items() if kind in ("tensor", "pointer") and one != but]
    if not others:
        raise NotTranslated(node, f"{' '.join(text(node).split())[:60]!r}: on the device of which tensor?")
    return f"{others[0]}.device"
