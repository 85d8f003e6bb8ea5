"""What plans use of PyTorch that is not public does what they take it to do."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cupyops
from cupyops._util import torch_private


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def x():
    return torch.randn(4, 6)


@pytest.fixture
def check(x):
    return torch_private.tensor_guard([x])


def test_all_is_there():
    assert torch_private.available


def test_the_same_metadata(x, check):
    assert check(x) and check(torch.zeros(4, 6))


OTHERS = {
    "shape": lambda x: torch.randn(6, 4),
    "dimensions": lambda x: torch.randn(4, 6, 1),
    "strides": lambda x: torch.randn(6, 4).t(),
    "expanded": lambda x: torch.randn(6).expand(4, 6),
    "dtype": lambda x: x.half(),
    "int": lambda x: x.int(),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "subclass": lambda x: x.as_subclass(type("Sub", (torch.Tensor,), {})),
    "negative bit": lambda x: torch._neg_view(x),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "array": lambda x: x.numpy(),
    "none": lambda x: None,
    "list": lambda x: x.tolist(),
    "NumPy's number": lambda x: np.float32(1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_metadata(x, check, other):
    assert not check(OTHERS[other](x))


def test_an_inference_tensor(x, check):
    with torch.inference_mode():
        made = torch.randn(4, 6)
        assert not check(x) and not check(made)
    assert not check(made)


def test_the_conjugate_bit():
    x = torch.randn(3, dtype=torch.complex64)
    assert not torch_private.tensor_guard([x])(x.conj())


def test_autocast(x, check):
    with torch.autocast("cpu"):
        assert not check(x)
        assert torch_private.tensor_guard([x])(x)
    assert check(x)


def test_a_dispatch_mode(x, check):
    with Dispatches():
        assert not check(x) and torch_private.dispatch_modes() == 1


@pytest.mark.parametrize(
    "transform", ["grad", "jvp", "vmap", "functionalize"], ids=["grad", "jvp", "vmap", "functionalize"]
)
def test_a_transform_of_torch_func(x, check, transform):
    seen = []

    def look(t):
        seen.append((check(t), check(x), bool(torch_private.functorch_active())))
        return (t * t).sum()

    if transform == "jvp":
        torch.func.jvp(look, (x,), (x,))
    elif transform == "vmap":
        torch.func.vmap(look)(torch.randn(2, 4, 6))
    else:
        getattr(torch.func, transform)(look)(x)
    assert seen == [(False, False, True)]


@pytest.mark.filterwarnings("ignore")
def test_jit_trace(x, check):
    seen = []

    def look(t):
        seen.append(check(t))
        return t + 1

    torch.jit.trace(look, (x,), check_trace=False)
    assert seen == [False]


def test_one_object_twice(x):
    check = torch_private.tensor_guard([x, x.clone()])
    assert check(x, x.clone()) and not check(x, x)


def test_grad_mode_is_not_part_of_the_guard():
    """It is looked at beside it."""
    x = torch.randn(3, requires_grad=True)
    check = torch_private.tensor_guard([x])
    with torch.no_grad():
        assert check(x)


def test_forward_mode_is_not_part_of_the_guard(x, check):
    """It is looked at beside it."""
    with torch.autograd.forward_ad.dual_level():
        assert check(x) and torch_private.forward_mode()
    assert not torch_private.forward_mode()


def test_a_guard_holds_no_tensor():
    import gc
    import weakref

    x = torch.randn(3)
    reference, check = weakref.ref(x), torch_private.tensor_guard([x])
    del x
    gc.collect()
    assert reference() is None and check(torch.randn(3))


def test_function_modes(x, check):
    assert not torch_private.function_mode_enabled() and not torch_private.opaque_modes()
    with torch.device("cpu"):
        assert torch_private.function_mode_enabled() and not torch_private.opaque_modes()
        with Functions() as mode:
            assert torch_private.opaque_modes() and check(x)
            with torch_private.without_function_modes():
                assert not torch_private.function_mode_enabled()
            mode.transparent = True
            assert not torch_private.opaque_modes()


def test_deterministic():
    torch.use_deterministic_algorithms(False)
    assert torch_private.deterministic() is False
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch_private.deterministic() is True


def test_hooks_of_saved_tensors():
    assert torch_private.saved_tensors_hooks(True) is None
    with torch.autograd.graph.save_on_cpu():
        assert torch_private.saved_tensors_hooks(True) is not None
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert torch_private.saved_tensors_hooks(True) is None


def test_whether_the_graph_is_kept(x):
    seen = []
    leaf = x.requires_grad_()
    y = (leaf * leaf).sum()
    leaf.register_hook(lambda grad: seen.append(torch_private.keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_strided(device, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    where = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    made = torch_private.empty_strided(where)((3, 2), (1, 3), torch.float16)
    assert (tuple(made.shape), made.stride(), made.dtype, made.device) == ((3, 2), (1, 3), torch.float16, where)
    assert not made.requires_grad and not made.is_inference() and made._base is None
    assert not deterministic or made.isnan().all()
    with torch.inference_mode():
        assert torch_private.empty_strided(where)((3,), (1,), torch.float32).is_inference()
    assert torch_private.empty_strided(where)((0, 4), (4, 1), torch.uint8).numel() == 0


def test_operators_are_registered_when_torch_ops_is_asked_for_them():
    found, names = [], ("cupyops_lazily", ["one", "other"])
    library = torch.library.Library(names[0], "FRAGMENT")

    def register():
        found.append(1)
        library.define("one(Tensor x) -> Tensor")
        library.impl("one", lambda x: 2 * x, "CPU")

    torch_private.ask_when_missing(*names, register)
    with pytest.raises(AttributeError):
        torch.ops.cupyops_lazily.another  # noqa: B018
    assert not found
    assert torch.ops.cupyops_lazily.one(torch.ones(2)).tolist() == [2.0, 2.0] and found == [1]
    assert torch.ops.cupyops_lazily.one.default.name() == "cupyops_lazily::one"
    assert str(torch.ops.cupyops_lazily.one.default) == "cupyops_lazily.one.default"
    assert torch.ops.cupyops_lazily.one(torch.ones(2)).tolist() == [2.0, 2.0] and found == [1]


def test_importing_registers_nothing_and_torch_ops_has_all():
    code = """
import torch, cupyops
from cupyops._operator.derivation import registration
assert not registration._waiting
waiting = len(cupyops.operators())
assert waiting == len(registration._waiting) > 40, waiting
assert torch.ops.cupyops.relu(torch.tensor([-1.0, 2.0]))[0].tolist() == [0.0, 2.0]
assert torch.ops.cupyops.silu_backward.default is not None
assert len(registration._waiting) == waiting - 2
print(torch.compile(lambda x: cupyops.gelu(x), backend="eager", fullgraph=True)(torch.zeros(2)).tolist())
"""
    done = run_python("-c", code, bare=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0.0, 0.0]"


PUBLIC = ("torch.ops.", "torch._foreach_", "torch_private.")  # what PyTorch documents, and our own
ROOT = Path(cupyops.__file__).parent


def private(file):
    """The names of PyTorch that begin with an underscore, as a file of the package imports or names them."""
    tree, found = ast.parse(file.read_text(encoding="utf-8")), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            found += [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return {
        name
        for name in found
        if re.match(r"(torch|forward_ad)[\w.]*\._[a-z]", name, re.IGNORECASE) and not name.startswith(PUBLIC)
    }


def test_no_other_file_names_what_is_private():
    """But for what PyTorch documents, and the backend of torch.compile, which stands on Dynamo and AOTAutograd."""
    found = {file.relative_to(ROOT).as_posix(): names for file in ROOT.rglob("*.py") if (names := private(file))}
    assert [name for name in found if not name.startswith("_compile/")] == ["_util/torch_private.py"]


def test_each_name_is_there():
    """But for those of CUDA, in a PyTorch that has none."""
    cuda = {"current_stream", "current_device"} if torch.version.cuda is None else set()
    for name in (
        set(re.findall(r"^(\w+): ", Path(torch_private.__file__).read_text(encoding="utf-8"), re.MULTILINE)) - cuda
    ):
        assert getattr(torch_private, name) is not None, name
    assert hasattr(torch.autograd, torch_private.RUN_BACKWARD) and hasattr(forward_ad, torch_private.LEVEL)
    assert callable(torch_private.lookup_backend("eager")) and not torch_private.is_forked_after_cuda()


def test_what_they_do(x):
    torch_private.increment_versions([x])
    assert x._version == 1
    with forward_ad.dual_level():
        assert torch_private.forward_mode()
    assert not torch_private.forward_mode()
    assert torch_private.has_kernel("aten::layer_norm", "AutocastCUDA")
    assert "aten::relu" in torch_private.registered_operators()
    y = x.requires_grad_() * 2
    batched = []
    y.register_hook(lambda grad: batched.append(torch_private.is_legacy_batched(grad)))
    torch.autograd.grad(y, x, torch.ones(3, 4, 6), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(4, 6))
    assert batched == [True, False]
    with torch_private.below_autograd():
        assert (x * 2).grad_fn is None


def test_the_newest_that_was_tried_is_what_ci_installs():
    constraints = (ROOT.parent / "constraints.txt").read_text(encoding="utf-8")
    version = re.search(r"^torch==(\d+)\.(\d+)", constraints, re.MULTILINE)
    assert tuple(map(int, version.groups())) == torch_private.TRIED[1]
    requirements = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f"torch>={'.'.join(map(str, torch_private.TRIED[0]))}" in requirements


class OwnFunction(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class OwnDispatch(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_overrides():
    plain = type("Plain", (torch.Tensor,), {})
    kinds = (torch.Tensor, torch.nn.Parameter, plain, int, OwnDispatch)
    assert not any(map(torch_private.has_torch_function, kinds))
    assert torch_private.has_torch_function(OwnFunction) and torch_private.has_torch_function(torch.fx.Proxy)
    kinds = (torch.Tensor, torch.nn.Parameter, plain, int, OwnFunction)
    assert not any(map(torch_private.has_torch_dispatch, kinds))
    assert torch_private.has_torch_dispatch(OwnDispatch)


def test_modes_that_are_asked():
    assert not torch_private.asks_function_modes()
    with torch.device("cpu"):
        assert not torch_private.asks_function_modes()
    with Functions() as mode:
        assert torch_private.asks_function_modes()
        mode.ours = True
        assert not torch_private.asks_function_modes()


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic", "before autograd"])
def test_what_records(tracing):
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []

    def look(x):
        seen.append((torch_private.proxy_mode(), torch_private.recorded()))
        return x + 1

    options = {"pre_dispatch": True} if tracing == "before autograd" else {"tracing_mode": tracing}
    make_fx(look, **options)(torch.ones(2))
    assert seen == [(True, True)]
    assert not torch_private.proxy_mode() and not torch_private.recorded()
    with FakeTensorMode():
        assert not torch_private.proxy_mode() and torch_private.recorded()
    with Dispatches():
        assert not torch_private.recorded()


def test_what_stands_for_others():
    x, seen = torch.ones(2), []
    assert not any(map(torch_private.stands_for, (x, torch.nn.Parameter(x), None, 3, x.numpy())))

    def look(t):
        seen.append(torch_private.stands_for(t))
        return t * 1

    torch.func.vmap(look)(torch.ones(3, 2))
    torch.func.functionalize(look)(x)
    torch.fx.symbolic_trace(look)
    assert len(seen) == 3 and all(seen)
    assert torch_private.stands_for(x.to("meta")) and torch_private.stands_for(FakeTensorMode().from_tensor(x))


def test_autograd_below_the_dispatcher():
    x = torch.ones(2, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        assert not (x * 2).requires_grad
        with torch_private.above_autograd():
            (gradient,) = torch.autograd.grad((x * 2).sum(), x)
        assert not (x * 2).requires_grad
    assert gradient.tolist() == [2.0, 2.0]


def test_formulas_of_open_counters():
    from torch.utils.flop_counter import FlopCounterMode

    assert torch_private.open_flop_registries() == []
    with FlopCounterMode(display=False) as counter:
        assert torch_private.open_flop_registries() == [counter.flop_registry]


def test_outside_of_graphs():
    seen = []

    @torch_private.outside_of_graphs
    def outside(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    assert outside(torch.zeros(1)) == 1
    compiled = torch.compile(lambda x: outside(x * 2) * 2, backend="eager")
    assert compiled(torch.ones(1)) == 6 and seen == [False, False]


def test_skipped_by_dynamo():
    seen = []

    def inner(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def outer(x):
        return inner(x)

    torch_private.skipped_by_dynamo(outer)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: outer(x * 2) * 2, backend="eager")
    assert compiled(torch.ones(1)) == 6 and seen == [False]


def test_torch_export_is_told_from_torch_compile():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x.sin() if torch_private.exporting() else x.cos()

    model, x, seen = Model(), torch.rand(3), []

    def keep(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_method")
        return graph

    assert not torch_private.exporting()
    torch.testing.assert_close(torch.compile(model, backend=keep)(x), x.cos())
    assert seen == ["cos"]
    for strict in (False, True):
        exported = torch.export.export(model, (x,), strict=strict).module()
        torch.testing.assert_close(exported(x), x.sin())
    assert not torch_private.exporting()
