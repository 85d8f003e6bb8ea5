"""Every public operator where something records, transforms, wraps, counts or copies: PyTorch's value, or a clear error.

The calls are in tests/support/samples.py; what each way of PyTorch makes of them is compared with PyTorch's own function.
"""

import contextlib
import copy
import io
import pickle

import pytest
import samples
import torch
from selection import SEVEN
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from toys import Module, Wrapper

import cupyops
from cupyops.testing.call import tensors_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor"),
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),  # once in a process
    pytest.mark.parametrize("operator", samples.DIFFERENTIABLE),
]

IN_FULL, OF_SEVEN = (pytest.param("simulator", marks=pytest.mark.slow(but=some)) for some in ((), SEVEN))
backends = pytest.mark.parametrize("backend", ["reference", IN_FULL], indirect=True)
both = pytest.mark.parametrize("backend", ["reference", OF_SEVEN], indirect=True)


@pytest.fixture
def backend(request):
    """Where nothing else is said, the reference; else as a test is parametrised."""
    name = getattr(request, "param", "reference")
    with cupyops.simulate() if name == "simulator" else contextlib.nullcontext():
        yield name


def close(found, expected):
    """The tensors of two results are the same but for rounding."""
    torch.testing.assert_close(tensors_of(found), tensors_of(expected), rtol=2e-4, atol=2e-4, equal_nan=True)


def total(function):
    """`function` with the sum of its floating-point outputs as its result."""

    def call(*values):
        return sum(y.sum() for y in tensors_of(function(*values)) if y.is_floating_point())

    return call


def others(edge):
    """Other values of the same kind."""
    return [0.5 * t.detach() + 0.1 if t.is_floating_point() else t.clone() for t in edge.inputs]


def differentiable(edge):
    """The places of the tensors that want a gradient."""
    return tuple(index for index, tensor in enumerate(edge.inputs) if tensor.requires_grad)


def gradients(function, values):
    wanted = [value for value in values if value.requires_grad]
    return torch.autograd.grad(total(function)(*values), wanted, allow_unused=True)


def export(edge):
    return torch.export.export(Module(edge.ours), tuple(edge.leaves)).module()


def decomposed(edge):
    return decompositions(torch.export.export(Module(edge.ours), tuple(edge.leaves))).module()


def decompositions(program):
    """The program, in the ops of PyTorch alone."""
    table = {**torch.export.default_decompositions(), **cupyops.decompositions()}
    program = program.run_decompositions(table)
    assert not [node for node in program.graph.nodes if str(node.target).startswith("cupyops.")], program.graph
    return program


RECORDERS = {
    "export": export,
    "run_decompositions": decomposed,
    "make_fx": lambda edge: make_fx(edge.ours)(*edge.leaves),
    "make_fx before autograd": lambda edge: make_fx(edge.ours, pre_dispatch=True)(*edge.leaves),
    "make_fx symbolic": lambda edge: make_fx(edge.ours, tracing_mode="symbolic")(*edge.leaves),
    "functionalize": lambda edge: torch.func.functionalize(edge.ours),
}


@backends
@pytest.mark.parametrize("recorder", RECORDERS)
def test_recorded(operator, recorder, backend):
    """What is recorded computes the same of other values."""
    edge = samples.edge(operator)
    found = RECORDERS[recorder](edge)
    close(found(*others(edge)), edge.torch(*others(edge)))


def test_fx(operator):
    """torch.fx makes of each a call of the public function, which copies and pickles of the graph find again."""
    edge = samples.edge(operator)
    public = getattr(cupyops, operator)
    names = "abcdefgh"[: len(edge.inputs)]
    traced = eval(f"lambda {', '.join(names)}: call({', '.join(names)})", {"call": edge.of(public)})
    graph = torch.fx.symbolic_trace(traced)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [public]
    for one in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        close(one(*others(edge)), edge.of(public)(*others(edge)))


@both
def test_dynamic(operator, backend):
    """torch.export keeps each size a symbol that it keeps one of PyTorch's function, and with no narrower a range."""
    edge = samples.edge(operator)
    shapes = {"args": tuple(dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in edge.inputs)}
    program, twin = (
        torch.export.export(Module(function), tuple(edge.leaves), dynamic_shapes=shapes)
        for function in (edge.ours, edge.torch)
    )
    ours, theirs = bounds(program), bounds(twin)
    assert [one for one, other in zip(ours, theirs) if isinstance(one, int) and not isinstance(other, int)] == []
    assert all(one is None or other is not None for one, other in zip(map(most, ours), map(most, theirs)))
    close(program.module()(*others(edge)), edge.torch(*others(edge)))


def bounds(program):
    """Of each size of each input the number that it is bound to, or the range."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    sizes = [size for value in values for size in value.shape]
    exprs = [size if isinstance(size, int) else size.node.expr for size in sizes]
    return [int(one) if isinstance(one, int) or one.is_number else program.range_constraints.get(one) for one in exprs]


def most(bound):
    """The greatest size of a range; None where it has none."""
    upper = getattr(bound, "upper", None)
    return None if upper is None or upper > 2**60 else int(upper)


@both
def test_flops(operator, backend):
    """A FlopCounterMode counts what it counts of PyTorch's function, forward and backward."""
    if "attention" in operator:
        pytest.skip(
            "PyTorch counts nothing of its fused function on a CPU; ours runs the reference once more in backward"
        )
    if operator == "grouped_mm" and backend == "simulator":
        pytest.skip("where kernels might run, and none does, the reference is run once more in backward")
    edge, found = samples.edge(operator), []
    for function in (edge.ours, edge.torch):
        leaves = edge.leaves
        with FlopCounterMode(display=False) as forward:
            y = total(function)(*leaves)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)
        found.append((forward.get_total_flops(), backward.get_total_flops()))
    assert found[0] == found[1]


def test_onnx(operator):
    """ONNX's own evaluator finds the values in the model."""
    pytest.importorskip("onnxscript")
    edge = samples.edge(operator)
    model = onnx(edge.ours, edge)
    if operator != "dropout":  # of whose random numbers the evaluator has none
        # of an average over padding it has another idea than PyTorch: the same of PyTorch's own model
        other = onnx(edge.torch, edge) if operator == "avg_pool2d" else edge.torch
        close(model(*others(edge)), other(*others(edge)))


def onnx(function, edge):
    """The function as exported to ONNX."""
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
    model = torch.onnx.export(Module(function), tuple(edge.leaves), dynamo=True, verbose=False).model_proto
    names = [one.name for one in model.graph.input]

    def evaluate(*values):
        found = evaluator(model).run(None, {name: value.numpy() for name, value in zip(names, values)})
        return [torch.from_numpy(one) for one in found]

    return evaluate


TRANSFORMS = {
    "grad": lambda f, edge: torch.func.grad(total(f), differentiable(edge)),
    "vmap": lambda f, edge: lambda *v: torch.func.vmap(f)(*[torch.stack([one, one.clone()]) for one in v]),
    "functional_call": lambda f, edge: lambda *v: torch.func.functional_call(Module(f), {}, v),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of a function that PyTorch cannot batch
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(operator, transform):
    edge = samples.edge(operator)
    if transform == "vmap" and operator == "dropout":
        pytest.skip("PyTorch asks whether each example is to have another mask")
    ours, theirs = (TRANSFORMS[transform](f, edge)(*others(edge)) for f in (edge.ours, edge.torch))
    close(ours, theirs)


def test_jvp(operator):
    """Forward mode, as a directional derivative, which the gradient gives too."""
    edge = samples.edge(operator, torch.float64)
    places = differentiable(edge)

    def of(function):
        def call(*some):
            values = others(edge)
            for place, value in zip(places, some):
                values[place] = value
            return total(function)(*values)

        return call

    primals = tuple(others(edge)[place] for place in places)
    tangents = tuple(torch.ones_like(one) for one in primals)
    _, found = torch.func.jvp(of(edge.ours), primals, tangents)
    close(found, sum(one.sum() for one in torch.func.grad(of(edge.torch), tuple(range(len(places))))(*primals)))


@backends
def test_batched_gradients(operator, backend):
    """Several gradients at once, as `torch.autograd.functional.jacobian(vectorize=True)` asks for them."""
    edge = samples.edge(operator)
    found = []
    for function in (edge.ours, edge.torch):
        leaves = edge.leaves
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        ys = [y for y in tensors_of(function(*leaves)) if y.requires_grad]
        grads = [torch.stack([torch.ones_like(y), 2 * torch.ones_like(y)]) for y in ys]
        found.append(torch.autograd.grad(ys, wanted, grads, is_grads_batched=True, allow_unused=True))
    close(*found)


@backends
def test_penalty(operator, backend):
    """A penalty on the gradient of the results' sum: its own gradient, and zero where it has none."""
    if operator == "dropout":
        pytest.skip("PyTorch's draws another mask")
    edge, found = samples.edge(operator), []
    for function in (edge.ours, edge.torch):
        leaves = edge.leaves
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with sdpa_kernel(SDPBackend.MATH):  # PyTorch's attention on a CPU has no second derivative otherwise
            first = torch.autograd.grad(total(function)(*leaves), wanted, create_graph=True, materialize_grads=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        second = [torch.zeros_like(leaf) for leaf in wanted]
        if penalty.requires_grad:
            second = torch.autograd.grad(penalty, wanted, materialize_grads=True)
        found.append([*first, *second])
    close(*found)


@pytest.mark.parametrize("backend", [OF_SEVEN], indirect=True)
def test_compiled_autograd(operator, backend):
    """A backward, replayed ones too, is called by the graph that it makes, and not traced with the launches in it."""
    edge = samples.edge(operator)

    def backward():
        torch.manual_seed(0)  # of what draws a mask
        leaves = edge.leaves
        total(edge.ours)(*leaves).backward()
        return [leaf.grad for leaf in leaves if leaf.requires_grad]

    for _ in range(4):
        expected = backward()
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        for _ in range(2):
            close([one for one in backward() if one is not None], [one for one in expected if one is not None])


@backends
@pytest.mark.parametrize("policy", ["all", "selective"])
def test_checkpoint(operator, policy, backend):
    edge = samples.edge(operator)

    def keep(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "cupyops" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"context_fn": lambda: create_selective_checkpoint_contexts(keep)} if policy == "selective" else {}
    ours = edge.leaves
    found = gradients(lambda *v: checkpoint(edge.ours, *v, use_reentrant=False, **options), ours)
    close(found, gradients(edge.torch, edge.leaves))


class Counting(Tensor):
    """Says which functions of PyTorch it is given to."""

    seen: list = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@both
def test_torch_function(operator, backend):
    """A tensor that overrides PyTorch's functions sees them, whichever argument it is, and after plain calls too."""
    edge = samples.edge(operator)
    expected = edge.torch(*others(edge))
    for place in differentiable(edge):
        for _ in range(3):
            edge.ours(*others(edge))
        values = others(edge)
        values[place] = values[place].as_subclass(Counting)
        Counting.seen = []
        found = edge.ours(*values)
        names = {getattr(one, "__module__", None) or getattr(one, "__name__", "") for one in Counting.seen}
        assert Counting.seen and not any("cupyops" in str(name) for name in names)
        assert any(getattr(one, "__name__", "__get__") != "__get__" for one in Counting.seen), Counting.seen
        close([one.as_subclass(Tensor) for one in tensors_of(found)], expected)


def test_torch_function_mode(operator):
    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    edge = samples.edge(operator)
    with Seeing():
        found = edge.ours(*others(edge))
    close(found, edge.torch(*others(edge)))


@backends
def test_torch_dispatch(operator, backend):
    edge = samples.edge(operator)
    values = [Wrapper(one) for one in others(edge)]
    found = tensors_of(edge.ours(*values))
    assert all(isinstance(one, Wrapper) for one in found)
    close([one.elem for one in found], edge.torch(*others(edge)))


def nested(value):
    return torch.nested.nested_tensor([value.detach(), value.detach()[:1]], layout=torch.jagged)


def quantised(value):
    return torch.quantize_per_tensor(value.detach(), 0.1, 0, torch.qint8)


LAYOUTS = {"nested": nested, "sparse": lambda v: v.detach().to_sparse(), "quantised": quantised}


@backends
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(operator, layout, backend):
    """Of a tensor without plain memory comes what comes of PyTorch's function, or an error.

    Where PyTorch has no such function, what comes of the functions that the reference is written in.
    """
    edge = samples.edge(operator)
    place = differentiable(edge)[0]
    values = others(edge)
    values[place] = LAYOUTS[layout](values[place])
    try:
        expected = edge.torch(*values)
    except Exception:
        with pytest.raises(Exception, match=".") if samples.refuses_alike(operator) else contextlib.suppress(Exception):
            edge.ours(*values)
        return
    pairs = zip(tensors_of(edge.ours(*values)), tensors_of(expected))
    for one, other in pairs:
        assert (one.layout, one.dtype, type(one)) == (other.layout, other.dtype, type(other))
        close(*(plain(each) for each in (one, other)))


def plain(value):
    if value.is_nested:
        return value.values()
    return value.dequantize() if value.is_quantized else value.to_dense()


class Holding(torch.nn.Module):
    """A module that holds the public function of an operator and the operator itself."""

    def __init__(self, name):
        super().__init__()
        self.function = getattr(cupyops, name)
        self.operator = cupyops.operators().get(f"cupyops::{name}")
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, edge):
        return edge.of(self.function)(*others(edge))


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": saved,
    "AveragedModel": lambda module: torch.optim.swa_utils.AveragedModel(module).module,
}


@pytest.mark.parametrize("way", COPIES)
def test_copies(operator, way):
    edge, module = samples.edge(operator), Holding(operator)
    found = COPIES[way](module)
    assert found is not module and found.function is module.function and found.operator is module.operator
    close(found(edge), module(edge))
