"""What every operator is held to, written once: a test file of an operator subclasses `OperatorContract`.

    class TestRelu(OperatorContract):
        function = staticmethod(cupyops.relu)
        torch_function = staticmethod(torch.nn.functional.relu)
        kernels = {"relu_fwd", "relu_bwd"}

        def samples(self, make):
            yield Sample(make(3, 4))

Each test compares with PyTorch, in float64 where rounding matters: forward and every gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cupyops

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Sample:
    """One call: arguments of the function under test."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def map(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """The same call with each tensor changed."""
        convert = lambda value: change(value) if isinstance(value, Tensor) else value
        return Sample(*map(convert, self.args), **{name: convert(value) for name, value in self.kwargs.items()})

    def leaves(self) -> Sample:
        """The same call on fresh leaves: what required a gradient does so again."""
        return self.map(lambda t: t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad))

    def tensors(self) -> list[Tensor]:
        """The tensors that want a gradient, in order."""
        return [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor) and v.requires_grad]

    def call(self, function: Callable[..., Any]) -> Any:
        return function(*self.args, **self.kwargs)

    def closure(self, function: Callable[..., Any]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """(f, inputs) with f of the differentiable tensors alone."""
        inputs = tuple(self.tensors())

        def f(*values: Tensor) -> Any:
            replace = {id(old): new for old, new in zip(inputs, values)}
            return self.map(lambda t: replace.get(id(t), t)).call(lambda *a, **k: first(function(*a, **k)))

        return f, inputs

    def __repr__(self) -> str:
        show = lambda v: f"{tuple(v.shape)}:{v.stride()}" if isinstance(v, Tensor) else repr(v)
        return ", ".join([*map(show, self.args), *(f"{name}={show(value)}" for name, value in self.kwargs.items())])


class Make:
    """Makes the tensors of samples on one device and in one dtype."""

    def __init__(self, device: Any, dtype: torch.dtype, requires_grad: bool = True, seed: int = 0) -> None:
        self.device, self.dtype, self.requires_grad = torch.device(device), dtype, requires_grad
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, low: float | None = None, high: float = 1.0) -> Tensor:
        """Normal values, or uniform in [low, high)."""
        value = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if low is not None:
            value = low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return value.to(self.device, self.dtype).requires_grad_(self.requires_grad)

    def integers(self, *shape: int, high: int) -> Tensor:
        """int64 values in [0, high)."""
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)


def first(result: Any) -> Tensor:
    """The output that has a gradient."""
    return result[0] if isinstance(result, (tuple, list)) else result


def assert_as_good_as_torch(
    ours: Tensor, theirs: Tensor, truth: Tensor, what: str, moved: Tensor | None = None
) -> None:
    """Our error against float64 is at most twice PyTorch's in the same dtype, plus one unit in the last place.

    Values that are not finite agree exactly. `moved` is the truth for arguments one unit in the last place away: where
    terms cancel, the result is the rounding of the terms, and it may be as far off as that.
    """
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, f"{what}: {ours.shape} {ours.dtype}"
    assert ours.device == theirs.device, f"{what}: on {ours.device}"
    if not ours.dtype.is_floating_point:
        assert torch.equal(ours, theirs), f"{what}: integer results differ"
        return
    a, b, exact = ours.detach().double(), theirs.detach().double(), truth.detach().double()
    odd = ~torch.isfinite(b)
    assert torch.equal(a[odd].nan_to_num(nan=1.25), b[odd].nan_to_num(nan=1.25)), f"{what}: non-finite values differ"
    assert torch.isfinite(a[~odd]).all(), f"{what}: not finite where PyTorch's is"
    a, b, exact = a[~odd], b[~odd], exact[~odd]
    if a.numel() == 0:
        return
    scale = exact.abs().max().item()
    ulp = torch.finfo(ours.dtype).eps * max(scale, torch.finfo(ours.dtype).tiny)
    error, reference = (a - exact).abs().max().item(), (b - exact).abs().max().item()
    if ours.dtype == torch.float64:
        ulp *= 16  # the truth is PyTorch's own float64 result then, with an error that is not known: sums have several
    ulp += 0 if moved is None else (moved.detach().double()[~odd] - exact).abs().max().item()
    assert error <= 2 * reference + ulp, f"{what}: error {error:.3g}, PyTorch's {reference:.3g}, one ulp {ulp:.3g}"


class OperatorContract:
    """Subclass it for an operator; every test here then runs for it."""

    function: Callable[..., Any]
    torch_function: Callable[..., Any]
    kernels: set[str] = set()  # the kernels that forward and backward of the samples launch on a GPU, all of them
    dtypes = DTYPES
    gradcheck_options: dict[str, Any] = {}

    def samples(self, make: Make) -> Iterator[Sample]:
        """The calls: tails, odd sizes, several blocks, each argument. Tensors from `make`."""
        raise NotImplementedError

    def small_samples(self, make: Make) -> Iterator[Sample]:
        """Calls small enough for numerical differentiation."""
        return self.samples(make)

    def layouts(self, make: Make) -> Iterator[Sample]:
        """Calls on views: transposed, expanded, sliced, channels_last, off by one element. By default of the samples."""
        for sample in self.samples(make):
            for change in (transposed, sliced, misaligned):
                yield sample.map(lambda t, change=change: change(t) if t.is_floating_point() else t)

    # --- values ---

    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
    def test_forward_and_gradients(self, device, dtype):
        for sample in self.samples(Make(device, dtype)):
            self.compare(sample, repr(sample))

    def test_layouts(self, device):
        for sample in self.layouts(Make(device, torch.float32)):
            self.compare(sample, f"layout {sample!r}", strides=True)

    @pytest.mark.parametrize("kind", ["expanded", "strided", "misaligned"])
    def test_grad_layouts(self, device, kind):
        for sample in self.samples(Make(device, torch.float32)):
            self.compare(sample, f"{kind} grad_y, {sample!r}", grad_kind=kind)

    def compare(self, sample: Sample, what: str, strides: bool = False, grad_kind: str = "random") -> None:
        exact = sample.map(lambda t: t.detach().to(torch.float64) if t.is_floating_point() else t)
        exact = exact.map(lambda t: t.requires_grad_() if t.is_floating_point() else t)
        mine, theirs = relayed(sample), relayed(sample)
        before = [t.detach().clone() for t in mine.tensors()]
        y, expected, truth = (
            s.call(f) for s, f in ((mine, self.function), (theirs, self.torch_function), (exact, self.torch_function))
        )
        results = [tuple(r) if isinstance(r, (tuple, list)) else (r,) for r in (y, expected, truth)]
        assert len(results[0]) == len(results[1])
        for index, (a, b, c) in enumerate(zip(*results)):
            assert_as_good_as_torch(a, b, c, f"{what}: output {index}")
            assert not strides or a.stride() == b.stride() or a.numel() < 2, (
                f"{what}: strides {a.stride()}, {b.stride()}"
            )
        if not mine.tensors():
            return
        y, expected, truth = first(y), first(expected), first(truth)
        grad = grad_of_kind(y, grad_kind)
        wanted = [s.tensors() for s in (mine, theirs)]
        ours = torch.autograd.grad(y, wanted[0], grad, allow_unused=True)
        reference = torch.autograd.grad(expected, wanted[1], grad, allow_unused=True)
        flags = [
            t.requires_grad
            for t in (*sample.args, *sample.kwargs.values())
            if isinstance(t, Tensor) and t.is_floating_point()
        ]
        leaves = [t for t, flag in zip(exact.tensors(), flags) if flag]
        best = torch.autograd.grad(truth, leaves, grad.double(), allow_unused=True, retain_graph=True)
        moved = [None] * len(best)
        if grad_kind == "expanded":
            # a constant gradient makes terms cancel outright: what is left is the rounding of each, one ulp up or down
            step = torch.finfo(grad.dtype).eps * torch.randn_like(grad, dtype=torch.float64).sign()
            moved = torch.autograd.grad(truth, leaves, grad.double() * (1 + step), allow_unused=True)
        for index, (a, b, c, d) in enumerate(zip(ours, reference, best, moved)):
            assert (a is None) == (b is None), f"{what}: gradient {index} is {a}, PyTorch's {b}"
            if a is not None:
                assert_as_good_as_torch(a, b, c, f"{what}: gradient {index}", d)
        for index, (t, old) in enumerate(zip(mine.tensors(), before)):
            assert torch.equal(t.nan_to_num(), old.nan_to_num()), f"{what}: input {index} was changed"

    def test_partial_gradients(self, device):
        """Each input alone wants a gradient; the others get none."""
        for sample in self.samples(Make(device, torch.float32)):
            for index in range(len(sample.tensors())):
                one, other = sample.leaves(), sample.leaves()
                for s in (one, other):
                    for position, tensor in enumerate(s.tensors()):
                        tensor.requires_grad_(position == index)
                grad = torch.randn_like(first(other.call(self.torch_function)))
                ours = torch.autograd.grad(first(one.call(self.function)), one.tensors(), grad)
                theirs = torch.autograd.grad(first(other.call(self.torch_function)), other.tensors(), grad)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def test_deterministic(self, device):
        for sample in self.samples(Make(device, torch.float32)):
            runs = []
            for _ in range(2):
                call = sample.leaves()
                y = first(call.call(self.function))
                runs.append([y, *torch.autograd.grad(y.sum(), call.tensors())] if call.tensors() else [y])
            assert all(torch.equal(a, b) for a, b in zip(*runs)), repr(sample)

    def test_retained_graph_and_accumulation(self, device):
        for sample in self.samples(Make(device, torch.float32)):
            call = sample.leaves()
            y = first(call.call(self.function))
            once = torch.autograd.grad(y.sum(), call.tensors(), retain_graph=True)
            twice = torch.autograd.grad(y.sum(), call.tensors())
            assert all(torch.equal(a, b) for a, b in zip(once, twice)), repr(sample)

    # --- derivatives ---

    def test_gradcheck(self, device):
        for sample in self.small_samples(Make(device, torch.float64)):
            f, inputs = sample.closure(self.function)
            assert torch.autograd.gradcheck(f, inputs, **self.gradcheck_options), repr(sample)

    def test_gradgradcheck(self, device):
        for sample in self.small_samples(Make(device, torch.float64)):
            f, inputs = sample.closure(self.function)
            assert torch.autograd.gradgradcheck(f, inputs, **self.gradcheck_options), repr(sample)

    def test_gradient_penalty(self, device):
        for sample in self.small_samples(Make(device, torch.float64)):
            values = []
            for function in (self.function, self.torch_function):
                call = sample.leaves()
                grads = torch.autograd.grad(first(call.call(function)).pow(2).sum(), call.tensors(), create_graph=True)
                penalty = sum(g.pow(2).sum() for g in grads)
                values.append(torch.autograd.grad(penalty, call.tensors(), allow_unused=True, materialize_grads=True))
            torch.testing.assert_close(values[0], values[1])

    def test_functorch(self, device):
        """grad, vmap, vmap(grad), jvp: by the reference, so equal to PyTorch's own."""
        for sample in self.small_samples(Make(device, torch.float64)):
            (f, inputs), (g, _) = sample.closure(self.function), sample.closure(self.torch_function)
            inputs = tuple(t.detach() for t in inputs)
            everything = tuple(range(len(inputs)))
            total = lambda h: lambda *a: h(*a).pow(2).sum()
            transforms = [
                lambda h: torch.func.grad(total(h), everything)(*inputs),
                lambda h: torch.func.jvp(h, inputs, tuple(torch.ones_like(t) for t in inputs)),
                lambda h: torch.func.vmap(torch.func.grad(total(h), everything))(
                    *(torch.stack([t, 2 * t]) for t in inputs)
                ),
            ]
            for transform in transforms:
                torch.testing.assert_close(transform(f), transform(g))

    def test_forward_mode(self, device):
        for sample in self.small_samples(Make(device, torch.float64)):
            tangents = []
            for function in (self.function, self.torch_function):
                f, inputs = sample.closure(function)
                with torch.autograd.forward_ad.dual_level():
                    duals = [torch.autograd.forward_ad.make_dual(t.detach(), torch.ones_like(t)) for t in inputs]
                    tangents.append(torch.autograd.forward_ad.unpack_dual(f(*duals)).tangent)
            torch.testing.assert_close(tangents[0], tangents[1])

    # --- compilers ---

    def test_opcheck(self, device):
        for sample in self.small_samples(Make(device, torch.float32)):
            for op, args in registered_calls(sample, self.function):
                torch.library.opcheck(op, args)

    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_compile(self, device, dynamic):
        torch._dynamo.reset()
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        compiled = torch.compile(self.function, fullgraph=True, dynamic=dynamic, backend=backend)
        for sample in list(self.small_samples(Make(device, torch.float32)))[:4]:
            eager, other = sample.leaves(), sample.leaves()
            y, z = first(eager.call(self.function)), first(other.call(compiled))
            torch.testing.assert_close(z, y)
            assert z.stride() == y.stride()
            if eager.tensors():
                grad = torch.randn_like(y)
                ours = torch.autograd.grad(z, other.tensors(), grad)
                torch.testing.assert_close(ours, torch.autograd.grad(y, eager.tensors(), grad))

    def test_export(self, device):
        for sample in list(self.small_samples(Make(device, torch.float32, requires_grad=False)))[:2]:
            function = self.function

            class Module(torch.nn.Module):
                def forward(self, *args, **kwargs):
                    return first(function(*args, **kwargs))

            program = torch.export.export(Module(), sample.args, sample.kwargs)
            assert any("cupyops" in str(node.target) for node in program.graph.nodes), (
                "the operator is not in the graph"
            )
            torch.testing.assert_close(sample.call(program.module()), first(sample.call(self.function)))

    # --- PyTorch's modes ---

    def test_autocast(self, device):
        for low in (torch.float16, torch.bfloat16):
            for given in (torch.float32, low):
                for sample in self.samples(Make(device, given)):
                    with torch.autocast(device.type, dtype=low):
                        ours = theirs = None
                        try:
                            theirs = first(sample.leaves().call(self.torch_function))
                        except RuntimeError:
                            continue  # PyTorch itself has no kernel for this dtype on this device
                        call = sample.leaves()
                        ours = first(call.call(self.function))
                    assert ours.dtype == theirs.dtype, (
                        f"{given} under autocast {low}: {ours.dtype}, PyTorch's {theirs.dtype}"
                    )
                    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
                    if call.tensors():
                        grads = torch.autograd.grad(ours.float().sum(), call.tensors(), allow_unused=True)
                        assert all(g is None or g.dtype == t.dtype for g, t in zip(grads, call.tensors()))

    def test_no_grad_and_inference_mode(self, device):
        for sample in self.samples(Make(device, torch.float32)):
            expected = first(sample.call(self.function))
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    y = first(sample.call(self.function))
                assert not y.requires_grad and torch.equal(y, expected)

    def test_fake_tensors(self, device):
        from torch._subclasses.fake_tensor import FakeTensorMode

        for sample in self.samples(Make(device, torch.float32, requires_grad=False)):
            real = first(sample.call(self.function))
            with FakeTensorMode() as mode:
                fake = first(sample.map(mode.from_tensor).call(self.function))
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype), repr(sample)

    def test_numpy(self):
        for sample in self.samples(Make("cpu", torch.float32, requires_grad=False)):
            y = first(sample.map(lambda t: t.numpy()).call(self.function))
            assert isinstance(y, (np.ndarray, np.generic)), type(y)
            torch.testing.assert_close(torch.from_numpy(np.asarray(y)), first(sample.call(self.function)))

    def test_signature_is_torch_s(self):
        """Same argument names, order and defaults as PyTorch's function, where that has a Python signature."""
        try:
            theirs = inspect.signature(self.torch_function)
        except (ValueError, TypeError):
            pytest.skip("PyTorch's function is built in and shows no signature")
        mine = [(p.name, p.default) for p in inspect.signature(self.function).parameters.values()]
        known = [(p.name, p.default) for p in theirs.parameters.values() if not p.name.startswith("_")]
        ignored = {"size_average", "reduce"}  # deprecated
        assert [p for p in mine if p[0] not in ignored] == [p for p in known if p[0] not in ignored]

    # --- GPU only ---

    @pytest.mark.gpu
    def test_kernels_run(self):
        """No sample takes the reference on a GPU, and every kernel of the operator is launched by some sample."""
        seen = set()
        for dtype in self.dtypes:
            for sample in self.samples(Make("cuda", dtype)):
                call = sample.leaves()
                with cupyops.trace() as trace:
                    y = first(call.call(self.function))
                    if call.tensors():
                        y.sum().backward()
                assert "reference" not in trace.routes() or y.numel() == 0, f"{sample!r}\n{trace}"
                seen |= {record.kernel.partition("<")[0] for record in trace.launches()}
        assert seen >= self.kernels, f"never launched: {self.kernels - seen}"

    @pytest.mark.gpu
    def test_cuda_graph(self):
        for sample in list(self.small_samples(Make("cuda", torch.float32)))[:3]:
            call = sample.leaves()

            def step(call=call):
                y = first(call.call(self.function))
                return [y.detach(), *torch.autograd.grad(y.sum(), call.tensors())]

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()
            with torch.no_grad():
                for tensor in call.tensors():
                    tensor.mul_(0.5)
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(captured, step())

    @pytest.mark.gpu
    def test_side_stream(self):
        for sample in list(self.samples(Make("cuda", torch.float32)))[:2]:
            expected = first(sample.call(self.function))
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)
                inputs = sample.map(lambda t: t.detach().clone())
                y = first(inputs.call(self.function))
            stream.synchronize()
            assert torch.equal(y, expected)


# --- layouts -----------------------------------------------------------------------------------------------------


def transposed(tensor: Tensor) -> Tensor:
    """The same values, with the last two dimensions stored the other way round."""
    if tensor.dim() < 2:
        return tensor
    return tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_(tensor.requires_grad)


def sliced(tensor: Tensor) -> Tensor:
    """The same values, every other element of a larger tensor."""
    if tensor.dim() < 1:
        return tensor
    larger = tensor.detach().repeat_interleave(2, dim=-1)
    return larger[..., ::2].requires_grad_(tensor.requires_grad)


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, contiguous, one element past a 16-byte boundary."""
    flat = torch.cat([tensor.detach().flatten()[:1], tensor.detach().flatten()])
    return flat[1:].view(tensor.shape).requires_grad_(tensor.requires_grad)


def relayed(sample: Sample) -> Sample:
    """Fresh leaves with the very strides and offset of the sample's tensors."""

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.detach().untyped_storage().clone()
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        fresh.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return fresh.requires_grad_(tensor.requires_grad)

    return sample.map(copy)


def grad_of_kind(y: Tensor, kind: str) -> Tensor:
    """A gradient for `y`: random; expanded with stride 0 as `.sum()` gives; strided; misaligned."""
    grad = torch.randn_like(y)
    if kind == "expanded":
        return torch.full((), 0.75, dtype=y.dtype, device=y.device).expand(y.shape)
    return {"strided": sliced, "misaligned": misaligned}.get(kind, lambda t: t)(grad).detach()


def registered_calls(sample: Sample, function: Callable[..., Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    """The torch.library calls that `function` makes for this sample."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "cupyops" and "backward" not in op.name():
                calls.append((op, args))
            return op(*args, **(kwargs or {}))

    with Recorder():
        sample.leaves().call(function)
    assert calls, "the function calls no registered operator"
    fresh = lambda v: (
        v.detach().clone(memory_format=torch.preserve_format).requires_grad_(v.requires_grad)
        if isinstance(v, Tensor)
        else v
    )
    return [(op, tuple(fresh(value) for value in args)) for op, args in calls]
