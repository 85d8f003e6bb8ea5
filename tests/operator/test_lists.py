"""Operators with lists of tensors: every route, gradient and plan, for lists of any length."""

import pickle
import textwrap

import plan_driver as driver
import pytest
import torch
from plan_samples import counted, plainly, same
from processes import run_python
from torch import Tensor

import cupyops
from cupyops import InputError
from cupyops.testing import check

CODE = """
struct In { const float* at[8]; };
struct Out { float* at[8]; };
__global__ void weighted_fwd(In xs, const float* w, int count, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = 0;
  for (int k = 0; k < count; ++k) sum += w[k] * xs.at[k][i];
  y[i] = sum;
}
__global__ void weighted_bwd(const float* w, const float* grad_y, Out grad_xs, int count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  for (int k = 0; k < count; ++k) if (grad_xs.at[k]) grad_xs.at[k][i] = w[k] * grad_y[i];
}
__global__ void scale_all(In xs, Out ys, float by, int count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) for (int k = 0; k < count; ++k) ys.at[k][i] = by * xs.at[k][i];
}
"""
weighted_fwd, weighted_bwd, scale_all = (
    cupyops.Kernel(CODE, name) for name in ("weighted_fwd", "weighted_bwd", "scale_all")
)


def grid(n):
    return cupyops.ceil_div(n, 32), 32


@cupyops.operator("cupyops_lists::weighted", dtypes=torch.float32)
def weighted(xs: list[Tensor], w: Tensor) -> Tensor:
    """The sum of w[k] * xs[k]."""
    return sum(w[k] * x for k, x in enumerate(xs))


@weighted.forward
def weighted_forward(xs, w):
    y = torch.empty(xs[0].shape, device=w.device)
    xs, w = [x.contiguous() for x in xs], w.contiguous()
    weighted_fwd[grid(y.numel())](cupyops.pointers(xs), w, len(xs), y, y.numel())
    return y, ()


@weighted.backward
def weighted_backward(saved, grad_y, xs, w, needs_grad):
    grad_y, w = grad_y.contiguous(), w.contiguous()
    grad_xs = [torch.empty_like(grad_y) if need else None for need in needs_grad.xs]
    if any(needs_grad.xs):
        to = cupyops.pointers(grad_xs, written=True)
        weighted_bwd[grid(grad_y.numel())](w, grad_y, to, len(xs), grad_y.numel())
    return grad_xs, torch.stack([(grad_y * x).sum() for x in xs]) if needs_grad.w else None


@weighted.unsupported
def weighted_unsupported(xs, w):
    alike = all(x.shape == xs[0].shape and x.dtype == xs[0].dtype for x in xs)
    return None if alike and w.shape == (len(xs),) and len(xs) <= 8 else "other shapes, or more than 8"


@cupyops.operator("cupyops_lists::scaled", dtypes=torch.float32)
def scaled(xs: list[Tensor], by: float = 2.0) -> list[Tensor]:
    """Each times `by`."""
    return [by * x for x in xs]


@scaled.forward
def scaled_forward(xs, by):
    ys, xs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs], [x.contiguous() for x in xs]
    for x, y in zip(xs, ys):  # a launch for each, as their sizes differ
        one = cupyops.pointers([x]), cupyops.pointers([y], written=True)
        scale_all[grid(x.numel())](*one, by, 1, x.numel())
    return ys, ()


@scaled.backward
def scaled_backward(saved, grad_ys, by, needs_grad):
    return [None if g is None or not need else by * g for g, need in zip(grad_ys, needs_grad.xs)]


def lists(count, *shape):
    torch.manual_seed(count)
    return [torch.randn(*shape, requires_grad=k != 1) for k in range(count)], torch.randn(count, requires_grad=True)


def gradients(function, xs, *rest):
    xs = [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
    rest = [one.detach().clone().requires_grad_() if torch.is_tensor(one) else one for one in rest]
    found = function(xs, *rest)
    outputs = found if isinstance(found, list) else [found]
    leaves = [one for one in (*xs, *rest) if torch.is_tensor(one) and one.requires_grad]
    torch.manual_seed(0)
    taken = [y for y in outputs if y.requires_grad]
    return [*outputs, *torch.autograd.grad(taken, leaves, [torch.randn(y.shape).to(y.device) for y in taken])]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_values_and_gradients(count):
    """Of nine there is no kernel."""
    xs, w = lists(count, 3, 5)
    with cupyops.simulate(), cupyops.trace() as trace:
        found = gradients(weighted, xs, w)
    assert trace.records[0].route == ("simulator" if count < 9 else "reference")
    expected = gradients(lambda xs, w: (torch.stack(xs) * w[:, None, None]).sum(0), xs, w)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_outputs(count):
    xs = [torch.randn(size, requires_grad=True) for size in range(4, 4 + count)]
    with cupyops.simulate():
        found = gradients(scaled, xs, 3.0)
    assert isinstance(found, list) and len(scaled(xs)) == count
    torch.testing.assert_close(found, gradients(lambda xs, by: [x * by for x in xs], xs, 3.0))


def test_the_contract():
    xs, w = lists(3, 3, 5)
    rows = "accuracy partial_gradients strided misaligned double_backward vmap deterministic inputs_unchanged opcheck"
    known = cupyops.testing.hazards()
    asked = [one for one in rows.split() if one in known]
    assert len(asked) > 6
    check(weighted, [xs, w], only=asked, backends=["reference", "simulator"]).raise_if_failed()
    xs[1].requires_grad_()  # an output takes a gradient where any input does
    check(scaled, [xs], only=asked, backends=["reference", "simulator"]).raise_if_failed()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_for_each_length(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(lambda xs, w: 2 * weighted(xs, w), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with cupyops.simulate():
        for count in (2, 4, 2):
            xs, w = lists(count, 6)
            torch.testing.assert_close(gradients(compiled, xs, w), gradients(lambda xs, w: 2 * weighted(xs, w), xs, w))


class Model(torch.nn.Module):
    """Calls it."""

    def forward(self, xs, w):
        return weighted(xs, w)


def test_exported_and_loaded_elsewhere(tmp_path):
    """In a process that has not called it, and knows the operator by its module alone."""
    xs, w = lists(5, 6)
    program = torch.export.export(Model(), ([x.detach() for x in xs], w.detach()))
    assert next(str(one.target) for one in program.graph.nodes if one.op == "call_function") == (
        "cupyops_lists.weighted_of_5.default"
    )
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save(([x.detach() for x in xs], w.detach(), weighted(xs, w).detach()), tmp_path / "expected.pt")
    (tmp_path / "known.py").write_text(
        textwrap.dedent("""
        import torch
        import cupyops

        @cupyops.operator("cupyops_lists::weighted")
        def weighted(xs: list[torch.Tensor], w: torch.Tensor) -> torch.Tensor:
            return sum(w[k] * x for k, x in enumerate(xs))

        xs, w, expected = torch.load("expected.pt")
        assert torch.equal(torch.export.load("program.pt2").module()(xs, w), expected)
        """)
    )
    done = run_python("known.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_transforms():
    xs, w = lists(3, 6)
    xs = [x.detach() for x in xs]
    found = torch.func.grad(lambda w: weighted(xs, w).sum())(w.detach())
    torch.testing.assert_close(found, torch.stack([x.sum() for x in xs]))
    batched = torch.func.vmap(lambda x: weighted([x, 2 * x], torch.ones(2)))(torch.ones(4, 3))
    torch.testing.assert_close(batched, torch.full((4, 3), 3.0))
    assert torch.autograd.gradgradcheck(
        lambda a, b, w: weighted([a, b], w), [torch.rand(n, dtype=torch.float64, requires_grad=True) for n in (3, 3, 2)]
    )


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_plans(gradient):
    """Structs of pointers are filled by the generated code, with tensors elsewhere at each call."""
    with driver.driver() as known, torch.set_grad_enabled(gradient):
        run = gradients if gradient else lambda function, *args: [function(*args)]
        for _ in range(6):
            run(weighted, *lists(3, 3, 5))
        known.launches.clear()
        kept = [lists(3, 3, 5) for _ in range(3)]  # other memory
        xs, w = kept[1]
        xs = [x.detach().clone().add_(1).requires_grad_(x.requires_grad) for x in xs]
        with counted() as count:
            found = run(weighted, xs, w)
        assert (count.misses, count.backward_misses) == (0, 0), weighted.of((3,))._plans.reason
        assert known.launches == ["weighted_fwd"] + ["weighted_bwd"] * gradient
        assert same(found, plainly(run, weighted, xs, w))


def test_in_place():
    @cupyops.operator("cupyops_lists::clamp_", mutates=("xs",))
    def clamp_(xs: list[Tensor], most: float) -> None:
        for x in xs:
            x.clamp_(max=most)

    xs = [torch.tensor([1.0, 5.0]), torch.tensor([7.0])]
    assert clamp_(xs, 3.0) is None and [x.tolist() for x in xs] == [[1.0, 3.0], [3.0]]
    assert [x._version for x in xs] == [1, 1]
    leaf = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(_clamped(clamp_, 4 * leaf), leaf)[0].tolist() == [0.0, 0.0]
    rows = ["accuracy", "gradcheck", "no_gradient_wanted"]
    sample = [[torch.randn(3), torch.randn(2)], 0.5]
    check(clamp_, sample, only=rows, backends="reference").raise_if_failed()
    torch.compile(lambda xs: clamp_(xs, 2.0), fullgraph=True, backend="aot_eager")(xs)
    assert [x.tolist() for x in xs] == [[1.0, 2.0], [2.0]]


def _clamped(clamp_, y):
    clamp_([y], 3.0)
    return y.sum()


def test_lists_that_may_be_none_and_entries_that_may():
    @cupyops.operator("cupyops_lists::chosen")
    def chosen(x: Tensor, others: list[Tensor | None], more: list[Tensor] | None = None) -> Tensor:
        return x + sum(one for one in others if one is not None) + (sum(more) if more else 0)

    x, y = torch.ones(2), torch.tensor([1.0, 2.0])
    assert chosen(x, [y, None, y]).tolist() == [3.0, 5.0]
    assert chosen(x, [None], more=[y]).tolist() == [2.0, 3.0]
    assert chosen(x, []).tolist() == [1.0, 1.0]


Tensors = list[Tensor]


def test_an_annotation_by_another_name():
    @cupyops.operator("cupyops_lists::aliased")
    def aliased(xs: "Tensors") -> Tensor:
        return torch.cat(xs)

    assert aliased([torch.ones(1), torch.zeros(2)]).tolist() == [1.0, 0.0, 0.0]


def test_pickled_and_found():
    assert pickle.loads(pickle.dumps(weighted)) is weighted
    assert cupyops.operators()["cupyops_lists::weighted"] is weighted and "sum" in weighted.__doc__


def test_refusals():
    x = torch.ones(2)
    with pytest.raises(InputError, match="xs is Tensor, expected a list of tensors"):
        weighted(x, x)
    with pytest.raises(InputError, match="of 1, expected a list of 2: as many"):
        _of_outputs(lambda xs: xs[:1])([x, x])
    with pytest.raises(InputError, match=r"annotated dict\[str, torch.Tensor\]"):
        cupyops.operator("cupyops_lists::wrong")(_annotated)
    with pytest.raises(InputError, match=r"forward takes \(x\), expected what the reference takes.*\(xs, w\)"):
        weighted.forward(lambda x: None)
    with pytest.raises(InputError, match="xs_0 is a parameter"):

        @cupyops.operator("cupyops_lists::twice")
        def twice(xs: list[Tensor], xs_0: Tensor) -> Tensor: ...

    with pytest.raises(TypeError, match="misses the argument 'w'"):
        weighted([x])
    y = weighted([x.requires_grad_()], torch.ones(1))
    assert y.tolist() == [1.0, 1.0]


def _annotated(x: dict[str, Tensor]) -> Tensor: ...


def _of_outputs(function):
    @cupyops.operator("cupyops_lists::outputs")
    def outputs(xs: list[Tensor]) -> list[Tensor]:
        return function(xs)

    return outputs


@pytest.mark.gpu
def test_on_a_gpu():
    """Values, gradients, plans with tensors elsewhere at each call, and a CUDA graph."""
    xs, w = lists(3, 3, 5)
    expected = gradients(lambda xs, w: (torch.stack(xs) * w[:, None, None]).sum(0), xs, w)
    with cupyops.trace() as trace:
        found = gradients(weighted, [x.detach().cuda().requires_grad_(x.requires_grad) for x in xs], w.detach().cuda())
    assert trace.routes() == {"kernel"}
    torch.testing.assert_close(found[0].cpu(), expected[0])
    kept = []
    with torch.no_grad():
        for seed in range(8):
            torch.manual_seed(seed)
            kept.append(([torch.randn(3, 5, device="cuda") for _ in range(3)], torch.randn(3, device="cuda")))
            found, wanted = weighted(*kept[-1]), (torch.stack(kept[-1][0]) * kept[-1][1][:, None, None]).sum(0)
            torch.testing.assert_close(found, wanted)
        assert weighted.of((3,))._plans.plans, weighted.of((3,))._plans.reason
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = weighted(*kept[0])
        kept[0][0][1].fill_(2)
        graph.replay()
        torch.testing.assert_close(captured, (torch.stack(kept[0][0]) * kept[0][1][:, None, None]).sum(0))
