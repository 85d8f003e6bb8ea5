"""Calls of C++ as Python: casts, functions of PyTorch, of the C++ library and of the files, methods of tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .. import cpp
from . import memory, structs, values, vocabulary
from .expressions import (
    DTYPE_NAMES,
    EXPRESSIONS,
    a_tuple,
    arguments,
    assigned,
    children,
    constant_value,
    conversion,
    ctype,
    cursor,
    dtype_of_type,
    nothing,
    on_gpu,
    python,
    typed,
)
from .program import Function, Node, bare, is_stream, parsed, pointee, qualifiers, text, under, walk
from .scope import NotTranslated, Scope, Variable, changed
from .values import BOOL, FLOAT, INT, OPTIONS, TENSOR, VOID, Type, Value
from .vocabulary import name_of, type_of

Named = TypeVar("Named", bound=Any)


def call(node: Node, scope: Scope) -> Value:
    """A call, as an expression."""
    function, given = under(node, "function"), under(node, "arguments")
    if function.type == "field_expression":
        return _method(node, function, given, scope)
    spelled, base = text(function), bare(text(function))
    nodes = children(given)
    if (compared := _comparison(node, function, scope)) is not None:
        return compared
    if (of_lambda := _of_lambda(node, function, given, scope)) is not None:
        return of_lambda
    scope.read(function)
    if re.match(r"(static|reinterpret|const)_cast\b", spelled) and len(nodes) == 1:
        named, *_ = template_arguments(function)
        found = conversion(node, named, text(named), nodes[0], scope)
        scope.read(given)
        return found
    if own := scope.program.own(spelled):
        return _own(node, function, own, given, scope)
    named = {*vocabulary.NUMBERS, *scope.types, *scope.program.aliases, *vocabulary.DTYPES}
    if function.type in ("primitive_type", "sized_type_specifier") or (base in named and len(nodes) == 1):
        found = conversion(node, function, spelled, nodes[0], scope)
        scope.read(given)
        return found
    if base == "cudaGetDeviceProperties" and (variable := scope.find(text(nodes[0]).lstrip("&"))) is not None:
        variable.value = _properties(nodes[1:], scope)
        scope.read(given)
        return Value("0", values.STATUS)
    if base.startswith(("AT_DISPATCH_", "TORCH_DISPATCH_")) and scope.inner is not None:
        return scope.inner(node)
    if spelled in vocabulary.QUERIES or base in vocabulary.REPORTS:
        return status(node, base, given, scope)
    if base in vocabulary.MEMORY:
        return memory.call(node, base, given, scope)
    if (constructed_ := constructed(node, function, spelled, nodes, scope)) is not None:
        scope.read(given)
        return constructed_
    return _library(node, spelled, base, given, scope)


_WHOLE = ("condition_clause", "parenthesized_expression", "init_declarator", "argument_list", "return_statement")


def _comparison(node: Node, function: Node, scope: Scope) -> Value | None:
    """`a < b && c > (d)` of a number `a`, which the parser reads as a call of a template; None for others."""
    name = under(function, "name") if function.type == "template_function" else None
    variable = None if name is None else scope.find(text(name))
    if name is None or variable is None or not variable.value.type.is_number or node.parent.type not in _WHOLE:
        return None
    code = f"({text(name)}){text(node)[name.end_byte - name.start_byte :]}"
    inner = parsed(f"auto found = {code};", "init_declarator", node)
    if inner is None or under(inner, "value").type != "binary_expression":
        return None
    with scope.elsewhere():
        found = python(under(inner, "value"), scope)
    scope.read(node)
    return found


def constructed(node: Node, named: Node, spelled: str, nodes: Sequence[Node], scope: Scope) -> Value | None:
    """Translate a constructor call; None where the type is not known."""
    kind = type_of(spelled, scope.types)
    known = ("dim3", "options", "string", "list", "tuple", "optional", "device", "scalar", *["tensor"] * (not nodes))
    if kind is None or kind.kind not in known:
        return None
    scope.read(named)
    if kind == OPTIONS:
        return _options(node, "dtype", nodes, scope) if nodes else Value("dict()", OPTIONS)
    found = [python(one, scope) for one in nodes]
    return made(node, kind, found, nodes, scope)


def made(node: Node, kind: Type, found: list[Value], nodes: Sequence[Node], scope: Scope) -> Value:
    """A value of a type that is made of others: `dim3 grid(n, 2)`, `std::vector<int> v(3, 1)`. Raises `NotTranslated`."""
    if kind == values.DIM3 and 1 <= len(found) <= 3:
        return replace(a_tuple([_whole(one, part) for one, part in zip(found, nodes)]), type=values.DIM3)
    if len(found) == 1 and (kind.is_number or found[0].type.kind == kind.kind or kind.kind in ("optional", "scalar")):
        return assigned(found[0], kind, node)
    if kind.kind == "list" and kind.of and 1 <= len(found) <= 2 and found[0].type.is_integer and kind.of[0].is_number:
        zero = "0.0" if kind.of[0].kind == "float" else "0"
        filled = assigned(found[1], kind.of[0], node).code if len(found) == 2 else zero
        return Value(f"[{filled}] * {found[0].at(values.TIMES + 1)}", kind, values.TIMES)
    if kind.kind in ("string", "list", "tuple", "optional") and not found:
        return Value({"string": '""', "list": "[]", "tuple": "()", "optional": "None"}[kind.kind], kind)
    if kind.kind == "tensor" and not found:
        return Value("None", TENSOR)
    if kind.kind == "device" and found:
        return Value(f"torch.device({', '.join(one.code for one in found)})", values.DEVICE)
    raise NotTranslated(node, f"a {kind} made of {len(found)} values: {text(node)[:60]!r}")


def _whole(value: Value, node: Node) -> Value:
    """A dimension of a grid: an integer, which a launch refuses where it is negative or too large."""
    if value.type.kind == "float":
        return values.whole(f"int({value.code})")
    if not value.type.is_integer:
        raise NotTranslated(node, f"a {value.type} as a dimension of a grid: {text(node)[:60]!r}")
    return value


def grid(node: Node, scope: Scope) -> Value:
    """A grid or a block of a launch: one number, or three."""
    value = python(node, scope)
    return value if value.type == values.DIM3 else _whole(value, node)


# --- what is nothing ---


def status(node: Node, base: str, given: Node, scope: Scope) -> Value:
    """Translate a call that only reports an error of CUDA's, or waits, as success: errors are exceptions here."""
    for one in children(given):
        if base in vocabulary.REPORTS:
            if python(one, scope).type != values.STATUS:
                raise NotTranslated(one, f"a check of {text(one)[:60]!r}, which is no error of CUDA's")
        else:
            nothing(one, scope)
    scope.read(node)
    return Value("0", values.STATUS)


def attribute(node: Node, given: Node, scope: Scope) -> bool:
    """Accept a call that sets a hint for a kernel, or asks for its shared memory, which a launch does itself."""
    nodes = children(given)
    if len(nodes) < 2 or bare(text(nodes[1])) not in vocabulary.ATTRIBUTES_OF_KERNELS:
        raise NotTranslated(node, f"{text(node)[:60]!r}: an attribute of a kernel that is no hint")
    scope.read(given)
    return True


# --- functions ---


def _library(node: Node, spelled: str, base: str, given: Node, scope: Scope) -> Value:
    of_torch = re.match(r"(at|torch|c10)::", spelled) is not None
    if base in vocabulary.STREAMS | vocabulary.GUARDS:
        nothing(node, scope)
        return Value("None", Type("guard"))
    nodes = children(given)
    if re.fullmatch(r"((at::|c10::)?cuda::)?get(Current)?DeviceProperties", spelled):
        scope.read(given)
        return _properties(nodes, scope)
    if base in vocabulary.CEIL:
        left, right = arguments(given, scope)
        return _rounded_up(left, right)
    if base == "GET_BLOCKS":  # ATen's, of blocks of CUDA_NUM_THREADS
        found = arguments(given, scope)
        by = found[1] if len(found) > 1 else values.number(1024, INT, str(vocabulary.OF_LAUNCHES["CUDA_NUM_THREADS"]))
        return _rounded_up(found[0], by)
    if base in vocabulary.TENSORS and of_torch:
        return _allocation(f"torch.{base}", base == "full", given, scope)
    if base in ("dtype", "device", "requires_grad", "CUDA", "memory_format") and of_torch:
        found_ = _options(node, base, nodes, scope)
        scope.read(given)
        return found_
    if base == "elementSize" and len(nodes) == 1:
        return values.whole(f"{arguments(given, scope)[0].at(values.ATOM)}.itemsize", values.LONG, low=1, high=16)
    if base == "getTensorInfo" and len(nodes) == 1:  # which a launch packs of the tensor
        (value,) = arguments(given, scope)
        return replace(value, type=Type("pointer", of=(TENSOR,)), element=f"{value.at(values.ATOM)}.dtype")
    if base in vocabulary.FUNCTIONS and of_torch:
        found = arguments(given, scope)
        is_pair = base in vocabulary.PAIRS and (len(found) > 1 or base in ("sort", "topk"))
        kind = Type("tuple", of=(TENSOR, TENSOR)) if is_pair else TENSOR
        return Value(f"torch.{base}({_given(found, base, 1)})", kind)
    if base.endswith("_out") and base.removesuffix("_out") in vocabulary.FUNCTIONS and of_torch and len(nodes) > 1:
        out, *found = arguments(given, scope)
        name = base.removesuffix("_out")
        return Value(f"torch.{name}({_given(found, name, 1)}, out={out.code})", TENSOR)
    if spelled == "at::slice" and len(nodes) > 1:
        of, *rest = arguments(given, scope)
        return _sliced(node, of.at(values.ATOM), rest)
    if base in vocabulary.SEVERAL and of_torch:
        inner = ", ".join(one.code for one in arguments(given, scope))
        return Value(f"torch.ops.aten.{base}({inner})", Type("tuple", of=(TENSOR,) * vocabulary.SEVERAL[base]))
    if re.fullmatch(r"((at|torch)::)?(indexing::)?Slice", spelled) and len(nodes) <= 3:
        inner = ", ".join(one.code for one in arguments(given, scope))
        return Value(f"slice({inner or None}{', None' * (len(nodes) == 1)})", Type("index"))
    if re.fullmatch(r"((at|torch|c10)::)?toString", spelled) and len(nodes) == 1:
        return Value(f"str({arguments(given, scope)[0].code})", values.STRING)
    if base in ("max", "lowest", "min", "infinity") and (limit := _limit(base, spelled, scope)) is not None:
        scope.read(given)
        return limit
    if base == "time" and spelled in ("time", "std::time") and text(given) in ("(NULL)", "(0)", "(nullptr)", "()"):
        scope.read(given)
        return values.whole("int(time.time())", values.LONG, low=0)
    return _standard(node, spelled, base, given, scope)


def _properties(nodes: Sequence[Node], scope: Scope) -> Value:
    """The properties of a GPU, by its number or of the current one."""
    of = [python(one, scope) for one in nodes]
    if any(not one.type.is_integer and one.type.kind != "guard" for one in of):
        raise NotTranslated(nodes[0], f"{text(nodes[0])[:60]!r}, where the number of a device is expected")
    return Value("".join(one.code for one in of if one.type.is_integer), Type("properties"))


def _limit(base: str, spelled: str, scope: Scope) -> Value | None:
    """`std::numeric_limits<T>::max()`."""
    match = re.fullmatch(r"(?:std::)?numeric_limits<\s*([\w: ]+?)\s*>::\w+", spelled)
    variable = scope.find(match[1]) if match is not None else None
    if variable is not None and variable.value.type == values.DTYPE:
        return Value(f"cpp.limit({variable.value.code}, {base!r})", Type("scalar"))
    kind = type_of(match[1], scope.types) if match is not None else None
    if kind is None or not kind.is_number:
        return None
    if kind.is_integer and base != "infinity":
        limit = int(kind.high if base == "max" else kind.low)
        return values.number(limit, kind, str(limit))
    if not kind.is_integer and (base != "min"):
        found = {"infinity": "math.inf"}.get(
            base
        ) or f"torch.finfo(torch.float{kind.bits}).{'max' if base == 'max' else 'min'}"
        return Value(found, kind)
    return None


def _rounded_up(left: Value, right: Value) -> Value:
    """`(a + b - 1) / b`."""
    above = values.computed("-", values.computed("+", left, right), values.number(1, INT, "1"))
    if above.low >= 0 and right.low >= 1 and "&" not in above.code:
        divided = values.computed("/", above, right)
        return replace(divided, code=f"cupyops.ceil_div({left.code}, {right.code})", binds=values.ATOM)
    return values.computed("/", above, right)


def _standard(node: Node, spelled: str, base: str, given: Node, scope: Scope) -> Value:
    """Functions of the C and C++ libraries."""
    if base in ("make_tuple", "tie", "make_pair", "forward_as_tuple"):
        return a_tuple(arguments(given, scope), "tuple")
    if base == "get" and spelled.startswith("std::get<"):
        (value,) = arguments(given, scope)
        place = spelled[spelled.index("<") + 1 : spelled.rindex(">")].strip()
        if value.type.kind != "tuple" or not place.isdigit() or int(place) >= len(value.type.of):
            raise NotTranslated(node, f"{text(node)[:60]!r}")
        return typed(f"{value.at(values.ATOM)}[{place}]", value.type.of[int(place)])
    if (
        base == "scalar_type" and spelled == "::detail::scalar_type" and len(children(given)) == 1
    ):  # of ATen's dispatches
        return arguments(given, scope)[0]
    if base == "clamp" and spelled.startswith("std::clamp") and len(children(given)) == 3:
        found = arguments(given, scope)
        if match := re.search(r"<(.*)>", spelled):
            kind = ctype(node, scope, match[1])
            found = [assigned(one, kind, node) for one in found]
        if len({one.type for one in found}) != 1 or not found[0].type.is_number:
            raise NotTranslated(node, f"{text(node)[:60]!r} of {', '.join(str(one.type) for one in found)}")
        return typed(f"min(max({found[0].code}, {found[1].code}), {found[2].code})", found[0].type)
    if spelled in ("getenv", "std::getenv") and len(children(given)) == 1:
        return Value(f"os.environ.get({arguments(given, scope)[0].code})", values.STRING)
    if spelled in ("atoi", "std::atoi") and len(children(given)) == 1:
        return typed(f"cpp.atoi({arguments(given, scope)[0].code})", INT)
    if base == "accumulate" and (added := _accumulated(node, spelled, children(given), scope)) is not None:
        scope.read(given)
        return added
    if base in ("move", "forward") and spelled.startswith("std::"):
        (value,) = arguments(given, scope)
        return value
    single = base.removesuffix("f")
    real = single if single in vocabulary.REAL and base not in vocabulary.REAL else base
    if base in ("min", "max", "abs", "swap", "llabs", "labs") and re.match(r"(std::|::|)\w+(<|$)", spelled):
        return _chosen(node, spelled, {"llabs": "abs", "labs": "abs"}.get(base, base), given, scope)
    if base in ("lround", "llround") and len(children(given)) == 1:
        return values.whole(f"int(cpp.round({arguments(given, scope)[0].code}))", values.LONG)
    if real in vocabulary.REAL and re.match(r"(std::|::|)\w+$", spelled):
        return _real(node, real, base, spelled, given, scope)
    raise NotTranslated(node, f"the function {spelled[:60]}")


def _accumulated(node: Node, spelled: str, nodes: list[Node], scope: Scope) -> Value | None:
    """`std::accumulate(v.begin(), v.end(), 0)`, of integers; None for others."""
    match = re.fullmatch(r"(\w+)\.begin\(\) (\w+)\.end\(\)", " ".join(text(one) for one in nodes[:2]))
    variable = scope.find(match[1]) if match is not None and match[1] == match[2] else None
    if variable is None or spelled != "std::accumulate" or len(nodes) != 3 or not variable.value.type.of:
        return None
    first, of = python(nodes[2], scope), variable.value.type.of[0]
    if not first.type.is_integer or not of.is_integer:
        return None
    return values.converted(Value(f"sum({variable.name}, {first.code})", Type("int", 256)), first.type)


def _chosen(node: Node, spelled: str, base: str, given: Node, scope: Scope) -> Value:
    """`min`, `max` and `abs` of numbers."""
    nodes = children(given)
    if len(nodes) == 1 and nodes[0].type == "initializer_list":
        found = arguments(nodes[0], scope)
        scope.read(given)
    else:
        found = arguments(given, scope)
    if base == "swap" or not found or not all(one.type.is_number for one in found):
        raise NotTranslated(node, f"the function {spelled[:60]} of {', '.join(str(one.type) for one in found)}")
    if match := re.search(r"<(.*)>", spelled):
        kind = ctype(node, scope, match[1])
        found = [assigned(one, kind, node) for one in found]
    if base == "abs":
        value = values.promoted(found[0])
        high = max(abs(value.low), abs(value.high)) if value.type.is_integer else value.high
        return Value(f"abs({value.code})", value.type, low=0, high=high, sized=value.sized)
    found = [values.promoted(it) if it.type.is_integer and len({it.type for it in found}) > 1 else it for it in found]
    kind = found[0].type
    for one in found[1:]:
        kind = values.common(kind, one.type)
    found = [one if one.type == kind else assigned(one, kind, node) for one in found]
    pick = min if base == "min" else max
    code = f"{base}({', '.join(one.code for one in found)})"
    return Value(
        code, kind, low=pick(one.low for one in found), high=pick(one.high for one in found),
        sized=any(one.sized for one in found),
    )  # fmt: skip


def _real(node: Node, real: str, base: str, spelled: str, given: Node, scope: Scope) -> Value:
    """Functions of numbers with a fraction: in float where C++ computes in float, which rounds once more."""
    found = arguments(given, scope)
    if not all(one.type.is_number for one in found) or len(found) != (2 if real in vocabulary.OF_TWO else 1):
        raise NotTranslated(node, f"the function {spelled[:60]} of {', '.join(str(one.type) for one in found)}")
    floats = all(one.type == FLOAT for one in found)
    is_float = base != real or (floats and (spelled.startswith("std::") or real in {*vocabulary.EXACT, "sqrt"}))
    if is_float:
        found = [assigned(one, FLOAT, node) for one in found]
    code = f"{'cpp' if hasattr(cpp, real) else 'math'}.{real}({', '.join(one.code for one in found)})"
    if real in vocabulary.ASKED:
        return Value(code, BOOL, low=0, high=1)
    if real in vocabulary.EXACT:
        return Value(code, FLOAT if is_float else values.DOUBLE)
    made_ = Value(code, values.DOUBLE)
    if not is_float:
        return made_
    if real != "sqrt":
        scope.note(f"{text(node)[:60]}: computed in double and rounded to float; C++'s may differ in the last bit")
    return assigned(made_, FLOAT, node)


def _of_lambda(node: Node, function: Node, given: Node, scope: Scope) -> Value | None:
    """The call of a lambda, at once or by its name; None for other calls."""
    while function.type == "parenthesized_expression" and len(children(function)) == 1:
        function = children(function)[0]
    variable = scope.find(text(function)) if function.type == "identifier" else None
    if function.type != "lambda_expression" and (variable is None or variable.value.type.kind != "function"):
        return None
    found, nodes = python(function, scope), children(given)
    returns, *kinds = found.type.of
    if len(nodes) != len(kinds):
        raise NotTranslated(node, f"a lambda of {len(kinds)} parameters, of {len(nodes)} arguments")
    codes = [assigned(python(one, scope), kind, one).code for one, kind in zip(nodes, kinds)]
    scope.read(given)
    return typed(f"{found.code}({', '.join(codes)})", returns)


# --- functions of the files ---


def _own(node: Node, function: Node, candidates: list[Function], given: Node, scope: Scope) -> Value:
    nodes = children(given)
    called = _resolved(node, visible(text(function), candidates, scope), nodes, scope)
    found, types = list[Value](), dict[str, Type]()
    passed, outputs = list[str](), list[str]()
    written = template_arguments(function)
    for name, place in called.types.items():
        if place < len(written):
            types[name] = ctype(written[place], scope)
    for one, (spelled, name) in zip(nodes, called.parameters):
        if is_stream(spelled):
            nothing(one, scope)
            continue
        if name in called.pointees:
            scope.read(one)
            one = under(one, "argument")
        value = python(one, scope)
        plain = re.sub(r"\bconst\b|[&\s]", "", spelled)
        if plain in called.types:
            deduced = called.types[plain] >= len(written)
            if deduced and types.setdefault(plain, value.type) != value.type:
                raise NotTranslated(node, f"the type {plain} of {called.called}: {types[plain]} or {value.type}")
            value = assigned(value, types[plain], one)
        elif (kind := _parameter(spelled, called, scope)) is not None:
            is_same = kind.kind == "struct" and "&" in spelled and value.type == kind
            value = value if is_same else assigned(value, kind, one, lax=kind == FLOAT)
        if value.type.kind == "list" and "&" not in spelled and name in changed(called.body):
            value = replace(value, code=f"list({value.code})", binds=values.ATOM)
        if name in written_to(called):
            if one.type != "identifier":
                raise NotTranslated(one, f"{text(one)[:60]!r}, which {called.called} writes to")
            outputs.append(value.code)
        found.append(value)
        passed.append(value.code)
    if missing := [name for name in called.types if name not in types]:
        raise NotTranslated(node, f"the template parameter {missing[0]} of {called.called}, which is not written")
    scope.read(given)
    passed += _by_name(node, function, called, nodes, found, scope)
    known = scope.types | types | {name: Type("scalar") for name, is_type in called.template if name and is_type}
    returns = Type("result", name="result")
    if called.returns != "auto":
        returns = type_of(called.returns, known) or ctype(node, replace(scope, types=known), called.returns)
    code = f"{scope.request(called, types)}({', '.join(passed)})"
    if len({*outputs}) != len(outputs):
        raise NotTranslated(node, f"{text(node)[:60]!r}: a variable that {called.called} writes to by two names")
    if outputs:  # one call alone may have such results
        scope.writer = "" if scope.written else code
        scope.written += outputs
    return typed(code, returns)


def _parameter(spelled: str, called: Function, scope: Scope) -> Type | None:
    templates = {name: values.DTYPE if is_type else INT for name, is_type in called.template if name}
    aliases = {name: kind for name, what in scope.program.aliases.items() if (kind := type_of(what)) is not None}
    kind = type_of(spelled, aliases | templates)
    if kind is not None and kind == values.DTYPE and re.sub(r"\bconst\b|[&\s]", "", spelled) in templates:
        return Type("scalar")  # a number of the template's type
    return kind or structs.kind_of(spelled, scope.program)


def written_to(function: Function) -> set[str]:
    """The parameters of a function that are references, and that it assigns to: what it returns besides its result."""
    names = changed(function.body)
    found = set()
    for spelled, name in function.parameters:
        is_reference = "&" in spelled and not re.search(r"\bconst\b", spelled) and "&&" not in spelled
        if is_reference and name in names and _is_assigned(function.body, name):
            found.add(name)
    return found


def _is_assigned(body: Node, name: str) -> bool:
    for node in walk(body):
        field = {"assignment_expression": "left", "update_expression": "argument"}.get(node.type)
        if field is not None and text(pointee(under(node, field))) == name:
            return True
    return False


def visible(name: str, candidates: Sequence[Named], scope: Scope) -> list[Named]:
    """The functions of a name that C++ finds: those of the namespace that is written, else of the innermost around."""
    if written := qualifiers(name):
        fits = [one for one in candidates if one.space[-len(written) :] == written]
    else:
        around = [one for one in candidates if one.space == scope.space[: len(one.space)]]
        fits = [one for one in around if len(one.space) == max(len(one.space) for one in around)]
    return fits or list(candidates)


def _distance(of: Type, to: Type | None) -> int:
    if to is None:
        return 9
    return 0 if of == to else 1 if of.kind == to.kind else 2 if of.is_number and to.is_number else 9


def _resolved(node: Node, candidates: list[Function], nodes: list[Node], scope: Scope) -> Function:
    """The function that a call means: of overloads that which takes so many arguments, of these types."""
    fits = [one for one in candidates if len(one.parameters) - len(one.defaults) <= len(nodes) <= len(one.parameters)]
    if len({one.space for one in fits}) == 1:  # each file has functions of its own
        nearest = sorted(fits, key=lambda one: one.file == scope.file)
        fits = list({tuple(ctype for ctype, _ in one.parameters): one for one in nearest}.values())
    if len(fits) > 1:
        found = [python(one, scope).type for one in nodes]

        def distance(function: Function) -> int:
            kinds = [_parameter(spelled, function, scope) for spelled, _ in function.parameters]
            return sum(_distance(of, to) for of, to in zip(found, kinds))

        ranked = sorted(fits, key=distance)
        if distance(ranked[0]) < distance(ranked[1]) and distance(ranked[0]) < 9:
            return ranked[0]
        raise NotTranslated(node, f"which of the {len(fits)} functions {candidates[0].called} is called")
    if not fits:
        raise NotTranslated(node, f"{candidates[0].called} of {len(nodes)} arguments")
    return fits[0]


def _by_name(
    node: Node, function: Node, called: Function, nodes: list[Node], found: list[Value], scope: Scope
) -> list[str]:
    """Template arguments of a function of the files, which its Python takes by name."""
    passed, written = [], template_arguments(function)
    pointers = [(value, spelled) for value, (spelled, _) in zip(found, called.taken)]
    for place, (name, is_type) in enumerate(called.template):
        if not name:
            continue
        given = template_argument(written[place], is_type, scope) if place < len(written) else None
        of = [value for value, spelled in pointers if re.search(rf"\b{name}\b[^<>]*\*", spelled)]
        given = given or (of[0].element or f"{of[0].at(values.ATOM)}.dtype" if of else None)
        if given is None:
            raise NotTranslated(node, f"the template parameter {name} of {called.called}, which is not written")
        passed.append(f"{name_of(name)}={given}")
    return passed


def template_arguments(function: Node) -> list[Node]:
    """The template arguments that are written; none where there are none."""
    return next((children(one) for one in walk(function) if one.type == "template_argument_list"), [])


def template_argument(node: Node, is_type: bool, scope: Scope) -> str:
    """The Python of a template argument: a dtype, or a value. Raises `NotTranslated`."""
    name = text(node)
    if not is_type:
        found = named_value(node, scope)
        scope.read(node)
        if found.type.kind == "bool" and not found.loose:
            return found.code
        return values.promoted(found).code if found.type.is_integer else found.code
    dtype = dtype_of_type(node, name, scope)
    scope.read(node)
    return dtype


def named_value(node: Node, scope: Scope) -> Value:
    """The value of a template argument, of which the parser takes a name for a type. Raises `NotTranslated`."""
    while node.type == "type_descriptor" and node.named_children:
        node = node.named_children[0]
    if node.type != "type_identifier":
        return python(node, scope)
    name = text(node)
    variable = scope.find(name)
    if variable is not None:
        return variable.value
    if name in scope.program.constants:
        found = constant_value(name, scope.program.constants[name][0], scope)
        if found is not None:
            scope.used.add(name)
            return replace(found, code=name_of(name), binds=values.ATOM)
    raise NotTranslated(node, f"the name {name}, which the files do not define")


# --- methods ---


def _of_struct(node: Node, value: Value, method: str, given: list[Value], scope: Scope) -> Value:
    """A method of a struct that is a `return` alone, in the place of its call. Raises `NotTranslated`."""
    found = structs.method(value.type.name, method, scope.program)
    body = children(under(found[0], "body")) if len(found) == 1 else []
    if len(body) != 1 or body[0].type != "return_statement" or not children(body[0]) or changed(found[0]):
        raise NotTranslated(node, f"the method {method} of the struct {value.type.name}")
    own, taken = structs.frame(value, scope.program), structs.parameters(found[0])
    if len(taken) != len(given) or "auto" in (spelled := text(under(found[0], "type"))):
        raise NotTranslated(node, f"the method {method} of the struct {value.type.name}")
    for one, (parameter, name) in zip(given, taken):
        if "*" in text(parameter) or not re.fullmatch(r"[\w.+*/ -]+", one.code):
            raise NotTranslated(node, f"{one.code} as the argument {name} of the method {method}")
        one = assigned(one, ctype(under(parameter, "type"), scope), node)
        own[name] = Variable(replace(one, code=one.at(values.ATOM), binds=values.ATOM), name)
    frames, scope.frames = scope.frames, [own]
    try:
        with scope.elsewhere():
            result = assigned(python(children(body[0])[0], scope), ctype(node, scope, spelled), node)
    finally:
        scope.frames = frames
    scope.read(node)
    return replace(result, code=result.at(values.ATOM), binds=values.ATOM)


def _method(node: Node, function: Node, given: Node, scope: Scope) -> Value:
    of, named = under(function, "argument"), under(function, "field")
    method, nodes = bare(text(named)) or text(named), children(given)
    if re.fullmatch(r"(at|torch)::globalContext\(\)", text(of)) and method == "alertNotDeterministic":
        (value,) = arguments(given, scope)
        scope.read(function)
        return Value(f"cpp.alert({value.code})", VOID)
    value = python(of, scope)
    scope.read(function)
    kind = value.type.kind
    if kind == "struct":
        return _of_struct(node, value, method, arguments(given, scope), scope)
    if kind == "options":
        return _with_option(node, value, method, nodes, given, scope)
    if kind == "optional":
        if method == "value_or" and len(nodes) == 1 and re.fullmatch(r"[\w.]+", value.code):
            other = assigned(arguments(given, scope)[0], value.type.of[0], node)
            code = f"{value.code} if {value.code} is not None else {other.at(values.CHOICE)}"
            return replace(typed(code, value.type.of[0]), binds=values.CHOICE)
        if method == "has_value" and not nodes:
            return Value(f"{value.at(values.COMPARE + 1)} is not None", BOOL, values.COMPARE)
        if method == "value" and not nodes:
            return replace(value, type=value.type.of[0])
        if text(function)[of.end_byte - function.start_byte :].startswith("->"):
            value = replace(value, type=value.type.of[0])
            kind = value.type.kind
    if kind == "guard" and method in ("stream", "device", "device_index", "get_device") and not nodes:
        return value
    if kind == "stream" and method == "str" and not nodes:
        return replace(value, type=values.STRING)
    if kind == "tensor":
        return _of_tensor(node, value, method, named, given, scope)
    if kind == "list" and not nodes and method in ("size", "empty"):
        if method == "empty":
            return Value(f"not {value.at(values.NOT)}", BOOL, values.NOT)
        return values.whole(f"len({value.code})", values.ULONG, low=0, high=values.SIZE_LIMIT, sized=True)
    if kind == "list" and method in ("push_back", "emplace_back") and len(nodes) == 1:
        (one,) = arguments(given, scope)
        element = assigned(one, value.type.of[0], node) if value.type.of else one
        return Value(f"{value.at(values.ATOM)}.append({element.code})", VOID)
    if kind == "list" and not nodes and method in ("front", "back", "at") or (kind == "list" and method == "at"):
        index = {"front": "0", "back": "-1"}.get(method) or arguments(given, scope)[0].code
        return typed(f"{value.at(values.ATOM)}[{index}]", value.type.of[0])
    if kind == "map" and method == "at" and len(nodes) == 1:
        return typed(f"{value.at(values.ATOM)}[{arguments(given, scope)[0].code}]", value.type.of[1])
    if kind == "list" and not nodes and method == "data" and (found := cursor(value, values.number(0, INT, "0"))):
        return found
    if kind == "list" and method == "slice" and len(nodes) == 2:  # of an ArrayRef: from an element on, so many
        first, count = arguments(given, scope)
        if first.type.is_integer and first.low >= 0 and count.type.is_integer:
            end = values.computed("+", first, count)
            return replace(value, code=f"{value.at(values.ATOM)}[{first.code}:{end.code}]", binds=values.ATOM)
    if kind == "list" and not nodes and method == "vec":
        return replace(value, code=f"list({value.code})", binds=values.ATOM)
    if kind == "device" and not nodes and method in ("type", "is_cuda", "is_cpu", "index"):
        if method == "index":
            return values.whole(f"{value.at(values.ATOM)}.index", low=0)
        tensor = value.code.removesuffix(".device")
        if method == "type":
            return Value(f"{value.at(values.ATOM)}.type", Type("kind of device"), element=tensor)
        if tensor != value.code:
            return on_gpu(tensor, method == "is_cuda")
    if kind == "dtype" and not nodes and method == "is_cuda" and value.element:
        return on_gpu(value.element)
    if kind == "dtype" and not nodes and method in ("scalarType", "toScalarType"):
        return replace(value, element="")
    if kind == "pointer" and not nodes and method in ("data",):
        return value
    if kind == "scalar" and not nodes and method in ("toFloat", "toDouble", "toInt", "toLong", "toBool", "to"):
        to = {"toFloat": FLOAT, "toDouble": values.DOUBLE, "toInt": INT, "toLong": values.LONG, "toBool": BOOL}[method]
        code = {"toFloat": "cpp.to_float", "toBool": "bool", "toDouble": "float"}.get(method, "int")
        return replace(typed(f"{code}({value.code})", to))
    raise NotTranslated(node, f"the method {method} of a {value.type}")


def _of_tensor(node: Node, value: Value, method: str, named: Node, given: Node, scope: Scope) -> Value:
    base, nodes = value.at(values.ATOM), children(given)
    if method in vocabulary.POINTERS:
        if nodes:
            raise NotTranslated(node, f"the method {method} with arguments")
        element = type_of(text(written[0]), scope.types) if (written := template_arguments(named)) else None
        of = Type("pointer", of=(element if element is not None and element.is_number else TENSOR,))
        return replace(value, type=of, element=_element(named, base, scope))
    if method == "accessor" and not nodes:
        return _accessor(node, named, base, scope)
    if method in ("new_empty", "new_zeros", "new_ones", "new_full"):
        return _allocation(f"{base}.{method}", method == "new_full", given, scope)
    if method in ("is_cuda", "is_cpu") and not nodes:
        return on_gpu(base, method == "is_cuda")
    if method == "defined" and not nodes:
        return Value(f"{value.at(values.COMPARE + 1)} is not None", BOOL, values.COMPARE)
    if method == "type" and not nodes:
        return Value(f"{base}.dtype", values.DTYPE, element=base)
    if method == "options" and not nodes:
        return Value("", OPTIONS, options={"dtype": f"{base}.dtype", "device": f"{base}.device"})
    if method in vocabulary.PROPERTIES and not nodes:
        attribute_, kind = vocabulary.PROPERTIES[method]
        code = f"{base}.{attribute_}"
        if kind == "size":
            return replace(values.size(code))
        if kind == "sizes":
            return Value(code, Type("list", of=(values.LONG,)), sized=True)
        types = {"dtype": values.DTYPE, "device": values.DEVICE, "bool": BOOL, "int": INT, "tensor": TENSOR}
        return replace(typed(code, types[kind]))
    if method in vocabulary.SIZES and len(nodes) == 1:
        (one,) = arguments(given, scope)
        return replace(values.size(f"{base}.{method}({one.code})"))
    if method == "item" and not nodes:
        kind_ = ctype(written[0], scope) if (written := template_arguments(named)) else Type("scalar")
        cast = "cpp.to_float" if kind_ == FLOAT else kind_.kind if kind_.is_number else ""
        return typed(f"{cast}({base}.item())" if cast else f"{base}.item()", kind_)
    if method == "is_same" and len(nodes) == 1:
        return Value(f"{base} is {arguments(given, scope)[0].code}", BOOL, values.COMPARE)
    is_item = method == "index_put_" and len(nodes) == 2
    if is_item or method in ("index", "slice", "toType", "set_requires_grad", "is_same_size", "equal"):
        return _renamed(node, base, method, given, scope)
    found = [python(one, scope) for one in nodes]
    scope.read(given)
    inner = _given(found, method)
    if method in vocabulary.LISTS:
        return Value(f"{base}.{method}({inner})", Type("list", of=(TENSOR,)))
    if method in vocabulary.PAIRS and (found or method in ("sort",)):
        return Value(f"{base}.{method}({inner})", Type("tuple", of=(TENSOR, TENSOR)))
    if method in vocabulary.METHODS:
        return Value(f"{base}.{method}({inner})", TENSOR)
    raise NotTranslated(node, f"the method {method}")


def _accessor(node: Node, named: Node, base: str, scope: Scope) -> Value:
    """`x.accessor<int, 2>()`: the elements of a tensor of the host."""
    written = template_arguments(named)
    element = type_of(text(written[0]), scope.types) if len(written) == 2 else None
    if element is None or not element.is_number or not text(written[1]).isdigit():
        raise NotTranslated(node, f"an accessor of other elements than numbers: {text(node)[:60]!r}")
    scope.read(named)
    return Value(base, Type("accessor", int(text(written[1])), of=(element,)))


def _element(named: Node, base: str, scope: Scope) -> str:
    """The Python of the dtype behind a pointer: as it is written, else that of the tensor."""
    if not (written := template_arguments(named)):
        return f"{base}.dtype"
    name = " ".join(re.sub(r"\bconst\b", " ", text(written[0])).split())
    variable = scope.find(name)
    if variable is not None and variable.value.type == values.DTYPE:
        return f"{base}.dtype"
    kind = type_of(name, scope.types)
    spelled = vocabulary.DTYPES.get(name) or (
        DTYPE_NAMES.get((kind.kind, kind.bits, kind.signed)) if kind is not None else None
    )
    return f"torch.{spelled}" if spelled else f"{base}.dtype"


def _renamed(node: Node, base: str, method: str, given: Node, scope: Scope) -> Value:
    """Methods that Python says in another way."""
    found = arguments(given, scope)
    codes = [one.code for one in found]
    if method == "index_put_":  # of numbers and slices too, which Python's takes in brackets alone
        return Value(f"{base}.__setitem__({codes[0]}, {codes[1]})".replace("'...'", "..."), VOID)
    if method == "index" and len(codes) == 1:
        return Value(f"{base}[{codes[0]}]".replace("'...'", "..."), TENSOR)
    if method == "slice" and codes:
        return _sliced(node, base, found)
    if method in ("toType", "set_requires_grad") and len(codes) == 1:
        return Value(f"{base}.{'to' if method == 'toType' else 'requires_grad_'}({codes[0]})", TENSOR)
    if method == "is_same_size" and len(codes) == 1:
        return Value(f"{base}.shape == {found[0].at(values.ATOM)}.shape", BOOL, values.COMPARE)
    if method == "equal" and len(codes) == 1:
        return Value(f"torch.equal({base}, {codes[0]})", BOOL)
    raise NotTranslated(node, f"the method {method}")


def _sliced(node: Node, base: str, found: Sequence[Value]) -> Value:
    """`x.slice(dim, start, end)`."""
    codes = [one.code for one in found]
    if len(codes) > 4 or not all(one.type.is_integer or one.type.kind in ("optional", "none") for one in found):
        raise NotTranslated(node, f"{text(node)[:60]!r}")
    bounds = codes[1:] if len(codes) > 2 else [*codes[1:], "None"]
    inner = f"slice({', '.join(bounds)})" if codes[1:] else "slice(None)"
    if codes[0] == "0":
        return Value(f"{base}[{inner}]", TENSOR)
    if found[0].low < 0:
        raise NotTranslated(node, f"a slice of the dimension {codes[0]}: {text(node)[:60]!r}")
    return Value(f"{base}[(slice(None),) * {found[0].at(values.ATOM)} + ({inner},)]", TENSOR)


# --- options ---


def _keywords(value: Value) -> str:
    """Options as keyword arguments: `dtype=torch.int32, device=x.device`."""
    return ", ".join(f"**{code}" if key == "**" else f"{key}={code}" for key, code in value.options.items())


def as_dict(value: Value) -> str:
    """Options as a value."""
    return f"dict({_keywords(value)})"


def _with_option(node: Node, value: Value, method: str, nodes: list[Node], given: Node, scope: Scope) -> Value:
    if not nodes and method in ("device", "dtype") and method in value.options:
        return Value(value.options[method], values.DEVICE if method == "device" else values.DTYPE)
    given_ = _options(node, method, nodes, scope)
    scope.read(given)
    options = dict(value.options)
    if "**" in options and given_.options:
        inner = ", ".join(f"{key}={code}" for key, code in given_.options.items())
        return replace(value, options={"**": f"dict({options['**']}, {inner})"})
    return replace(value, options=options | dict(given_.options))


def _options(node: Node, key: str, nodes: Sequence[Node], scope: Scope) -> Value:
    if len(nodes) > 2 or not nodes:
        raise NotTranslated(node, f"the option {text(node)[:60]}")
    if key == "layout" and re.fullmatch(r"(at|torch|c10)::(kStrided|Layout::Strided)", text(nodes[0])):
        scope.read(nodes[0])
        return Value("", OPTIONS)
    found = [python(one, scope) for one in nodes]
    code = found[0].code
    if key == "requires_grad" and found[0].type == BOOL:
        return Value("", OPTIONS, options={} if code == "False" else {"requires_grad": code})
    if key == "CUDA":
        scope.note("allocated on the current GPU, as at::CUDA does")
        return Value("", OPTIONS, options={"dtype": code, "device": '"cuda"'})
    if key == "dtype" and found[0].type.kind == "kind of device":
        key = "device"
    if key in ("dtype", "device"):
        if found[0].checked:
            scope.note("allocated on the current GPU")
        if len(found) == 2:
            code = f'f"cuda:{{{found[1].code}}}"'
        if found[0].type == OPTIONS:
            return found[0]
        return Value("", OPTIONS, options={key: code})
    if key == "memory_format":
        return Value("", OPTIONS, options={key: code})
    raise NotTranslated(node, f"the option {key}")


def _given(found: Sequence[Value], name: str, of: int = 0) -> str:
    """Arguments of a function of PyTorch; Python has some by their names alone. `of` is 1 if the first is the tensor."""
    first, names = vocabulary.KEYWORDS.get(name.removesuffix("_"), (len(found), ()))
    kept, kinds = [], {"format": "memory_format", "kind of device": "device", "device": "device", "dtype": "dtype"}
    for place, one in enumerate(found):
        keyword = kinds.get(one.type.kind) if name != "to" or one.type.kind == "format" else None
        keyword = keyword or (names[place - first - of] if 0 <= place - first - of < len(names) else None)
        if one.type == OPTIONS:
            kept.append(_keywords(one))
        elif one.type == values.DTYPE and one.element and not of and name == "zeros":  # `x.type()`
            kept.append(f"dtype={one.code}, device={one.element}.device")
        else:
            kept.append(f"{keyword}={one.code}" if keyword else one.code)
    return ", ".join(sorted(filter(None, kept), key=lambda one: re.match(r"\w+=|\*\*", one) is not None))


def _allocation(called: str, filled: bool, given: Node, scope: Scope) -> Value:
    """`torch::zeros({n, 3}, options)`, `x.new_full({n}, 3)`; `filled` where a value follows the sizes."""
    found = [python(one, scope) for one in children(given)]
    scope.read(given)
    if filled and found and found[0].type.is_integer:
        found[0] = replace(found[0], code=f"({found[0].code},)", binds=values.ATOM)
    return Value(f"{called}({_given(found, 'zeros')})", TENSOR)


def _compound(node: Node, scope: Scope) -> Value:
    """`dim3{a, b}`, `at::Device{...}`."""
    named, given = under(node, "type"), under(node, "value")
    found = constructed(node, named, text(named), children(given), scope)
    if found is None:
        raise NotTranslated(node, f"the type {text(named)}")
    scope.read(given)
    return found


EXPRESSIONS["call_expression"] = call
EXPRESSIONS["compound_literal_expression"] = _compound
