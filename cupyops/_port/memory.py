"""Memory of CUDA's own calls: what is allocated is a flat tensor, and copies and fills are of bytes."""

from __future__ import annotations

from . import values
from .expressions import DTYPE_NAMES, assigned, children, nothing, python, typed
from .program import Node, bare, text, under
from .scope import NotTranslated, Scope
from .values import STATUS, ULONG, VOID, Type, Value

_KINDS = [f"cudaMemcpy{one}" for one in ("HostToDevice", "DeviceToHost", "DeviceToDevice", "Default", "HostToHost")]


def call(node: Node, base: str, given: Node, scope: Scope) -> Value:
    """`cudaMalloc(&p, bytes)`, `cudaMemset(p, value, bytes)`, `cudaMemcpy(to, from, bytes, kind)`, `cudaFree(p)`."""
    nodes = children(given)
    if base.endswith("Async"):
        taken = 4 if base.startswith("cudaMemcpy") else 3
        for one in nodes[taken:]:
            nothing(one, scope)
        nodes = nodes[:taken]
    if base == "cudaMalloc" and len(nodes) == 2:
        _allocated(node, nodes, scope)
    elif base == "malloc" and len(nodes) == 1:
        count = _bytes(nodes[0], scope)
        scope.read(given)
        return Value(
            f"torch.empty({count.code}, dtype=torch.uint8)", Type("pointer", of=(VOID,)), element="torch.uint8"
        )
    elif (
        base == "cudaMemcpy"
        and len(nodes) == 4
        and text(nodes[3]) == "cudaMemcpyDeviceToHost"
        and _to_host(nodes, scope)
    ):
        pass
    elif base in ("cudaFree", "free") and len(nodes) == 1 and nodes[0].type == "identifier":
        scope.before.append(f"{_pointer(nodes[0], scope).code} = None")
    elif base.startswith("cudaMemset") and len(nodes) == 3:
        to, value, count = _pointer(nodes[0], scope), python(nodes[1], scope), _bytes(nodes[2], scope)
        scope.before.append(f"cpp.first_bytes({to.code}, {count.code}).fill_({value.at(values.BIT_AND)} & 255)")
    elif base.startswith("cudaMemcpy") and len(nodes) == 4 and bare(text(nodes[3])) in _KINDS:
        to, of, count = _pointer(nodes[0], scope), _pointer(nodes[1], scope), _bytes(nodes[2], scope)
        scope.before.append(f"cpp.first_bytes({to.code}, {count.code}).copy_(cpp.first_bytes({of.code}, {count.code}))")
    else:
        raise NotTranslated(node, f"{' '.join(text(node).split())[:60]!r}")
    scope.read(given)
    return Value("0", STATUS)


def _to_host(nodes: list[Node], scope: Scope) -> bool:
    """Translate a copy to a variable or an array of the host, `cudaMemcpy(&n, p, sizeof(int), ...)`; False for others."""
    target, name = nodes[0], None
    if text(target).startswith("&") and target.type == "pointer_expression":
        name = under(target, "argument")
        if name.type == "subscript_expression" and text(under(name, "indices")).strip("[ ]") == "0":
            name = under(name, "argument")
    elif target.type == "call_expression" and text(target).endswith(".data()"):
        name = under(under(target, "function"), "argument")
    elif target.type == "identifier":
        name = target
    variable = scope.find(text(name)) if name is not None and name.type == "identifier" else None
    if variable is None:
        return False
    is_list = variable.value.type.kind == "list" and bool(variable.value.type.of)
    kind = variable.value.type.of[0] if is_list else variable.value.type
    if not kind.is_number or (is_list == (target.type == "pointer_expression" and "[" not in text(target))):
        return False
    of, count = _pointer(nodes[1], scope), _bytes(nodes[2], scope)
    found = f"cpp.first_bytes({of.code}, {count.code}).view(torch.{DTYPE_NAMES[kind.kind, kind.bits, kind.signed]})"
    if is_list:
        scope.before.append(f"{variable.name}[: ({count.code}) // {max(kind.bits // 8, 1)}] = {found}.tolist()")
    else:
        scope.before.append(f"{variable.name} = {found}[0].item()")
        variable.value = typed(variable.name, kind)
    for one in (nodes[0], nodes[3]):
        scope.read(one)
    return True


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
    kinds = {one.name: one.value.type.kind for frame in scope.frames for one in frame.values()}
    others = [one for one, kind in kinds.items() if kind in ("tensor", "pointer") and one != variable.name]
    if not others:
        raise NotTranslated(node, f"{' '.join(text(node).split())[:60]!r}: on the device of which tensor?")
    count = _bytes(nodes[1], scope)
    dtype = f"torch.{DTYPE_NAMES[element.kind, element.bits, element.signed]}"
    size = max(element.bits // 8, 1)
    length = count.code if size == 1 else f"({count.code}) // {size}"
    scope.before.append(f"{variable.name} = torch.empty({length}, dtype={dtype}, device={others[0]}.device)")
