"""What every operator is held to, written once: a test file of an operator subclasses `OperatorContract`.

    class TestRelu(OperatorContract):
        function = staticmethod(cupyops.relu)
        torch_function = staticmethod(torch.nn.functional.relu)
        kernels = {"relu_fwd", "relu_bwd"}

        def samples(self, make):
            yield Sample(make(3, 4))

Each test compares with PyTorch, in float64 where rounding matters: forward and every gradient, for every form of the
kernels that the samples reach. What can go wrong besides, `cupyops.testing.check` tries.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from selection import SEVEN
from torch import Tensor

import cupyops
from cupyops._kernel.launch.specialised import Specialised
from cupyops.testing import Call, Failure, Tolerance, check
from cupyops.testing.call import Outcome, first, gradients, tensors_of
from cupyops.testing.case import Case
from cupyops.testing.target import target

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# on the CPU the reference runs: one dtype shows that it is called rightly (tests/simulator has the kernels, in each dtype)
VALUES = [
    pytest.param("cpu", torch.float32, id="cpu-float32"),
    *(pytest.param("cuda", d, id=f"cuda-{str(d).removeprefix('torch.')}", marks=pytest.mark.gpu) for d in DTYPES),
]

COMPILERS = ("compile_fullgraph", "compile_dynamic")
BACKENDS = ["reference", "simulator", pytest.param("gpu", marks=pytest.mark.gpu)]


class Sample(Call):
    """One call: arguments of the function under test."""


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


def assert_as_good_as_torch(
    ours: Tensor, theirs: Tensor, truth: Tensor, what: str, moved: Tensor | None = None
) -> None:
    """Our error against float64 is within `cupyops.testing.Tolerance` of PyTorch's in the same dtype.

    `moved` is the truth for arguments one unit in the last place away: where terms cancel, the result is the rounding of
    the terms, and it may be as far off as that.
    """
    extra = 0.0
    if moved is not None:
        apart = (moved.detach().double() - truth.detach().double())[theirs.detach().isfinite()].abs()
        extra = apart.max().item() if apart.numel() else 0.0
    Tolerance().judge(ours, theirs, truth, what, extra=extra)


class OperatorContract:
    """Subclass it for an operator; every test here then runs for it."""

    function: Callable[..., Any]
    torch_function: Callable[..., Any]
    kernels: set[str] = set()  # the kernels that forward and backward of the samples launch on a GPU, all of them
    dtypes = DTYPES
    differs: dict[tuple[str, str], str] = {}  # (hazard, backend) that fails, and why that is so
    beside_reference: dict[str, float] = {}  # tolerances of kernels beside the reference, if not assert_close's
    has_backward = True  # kernels for gradients
    too_large = ""  # where the kernels take no call of more than 2^31 elements: their reason

    def samples(self, make: Make) -> Iterator[Sample]:
        """The calls: tails, odd sizes, several blocks, each argument. Tensors from `make`."""
        raise NotImplementedError

    def small_samples(self, make: Make) -> Iterator[Sample]:
        """Calls for `cupyops.testing.check`, which makes its own variants: the most telling first, no two sizes the same."""
        return self.samples(make)

    def layouts(self, make: Make) -> Iterator[Sample]:
        """Calls on views: transposed, expanded, sliced, channels_last, off by one element. By default of the samples."""
        for sample in self.samples(make):
            for change in (transposed, sliced, misaligned):
                yield sample.map(lambda t, change=change: change(t) if t.is_floating_point() else t)

    @classmethod
    def one_dtype(cls) -> torch.dtype:
        """Of a test that runs the kernels in one dtype alone."""
        return torch.float32 if torch.float32 in cls.dtypes else cls.dtypes[0]

    @pytest.mark.parametrize(("device", "dtype"), VALUES)
    def test_forward_and_gradients(self, device, dtype):
        for sample in self.samples(Make(device, dtype)):
            self.compare(sample, repr(sample))

    def test_layouts(self, device):
        for sample in self.layouts(Make(device, torch.float32)):
            self.compare(sample, f"layout {sample!r}", strides=True)

    @pytest.mark.parametrize("kind", ["expanded", "strided", "misaligned"])
    def test_grad_layouts(self, device, kind, dtype=torch.float32):
        for sample in self.samples(Make(device, dtype)):
            self.compare(sample, f"{kind} grad_y, {sample!r}", grad_kind=kind)

    def compare(self, sample: Sample, what: str, strides: bool = False, grad_kind: str = "random") -> None:
        """Results, strides and gradients against PyTorch's; and the inputs are as they were."""
        case = Case(target(self.function, self.torch_function), sample, "reference", Tolerance())
        mine, expected = sample.relaid(), sample.relaid()
        before = [t.detach().clone() for t in mine.tensors()]
        results, theirs = (
            tensors_of(call.of(f)) for call, f in ((mine, self.function), (expected, self.torch_function))
        )
        grads = [grad_of_kind(y, grad_kind) for y in theirs if y.requires_grad]
        try:
            case.judge(Outcome(results, gradients(results, mine, grads)), sample, grads, lenient=False)
        except Failure as failure:
            raise Failure(f"{what}: {failure}") from None
        for index, (a, b) in enumerate(zip(results, theirs)):
            assert not strides or a.stride() == b.stride() or a.numel() < 2, (
                f"{what}: strides of output {index} {a.stride()}, {b.stride()}"
            )
        for index, (t, old) in enumerate(zip(mine.tensors(), before)):
            assert torch.equal(t.nan_to_num(), old.nan_to_num()), f"{what}: input {index} was changed"

    def test_partial_gradients(self, device, dtype=torch.float32):
        """Each input alone wants a gradient; the others get none."""
        apart = max(1e-4, 4 * torch.finfo(dtype).eps)
        wide = dtype if dtype.itemsize > 2 else torch.float64  # in half types PyTorch's own are as far off
        for sample in self.samples(Make(device, dtype)):
            for index in range(len(sample.tensors())):
                one, other = sample.leaves(), sample.map(lambda t: t.to(wide) if t.is_floating_point() else t).leaves()
                for s in (one, other):
                    for position, tensor in enumerate(s.tensors()):
                        tensor.requires_grad_(position == index)
                grad = torch.randn_like(first(other.of(self.torch_function)))
                ours = torch.autograd.grad(first(one.of(self.function)), one.tensors(), grad.to(dtype))
                theirs = torch.autograd.grad(first(other.of(self.torch_function)), other.tensors(), grad)
                torch.testing.assert_close([g.to(wide) for g in ours], [*theirs], rtol=apart, atol=apart)

    def test_deterministic(self, device):
        for sample in self.samples(Make(device, torch.float32)):
            runs = []
            for _ in range(2):
                call = sample.leaves()
                y = first(call.of(self.function))
                runs.append([y, *torch.autograd.grad(y.sum(), call.tensors())] if call.tensors() else [y])
            assert all(torch.equal(a, b) for a, b in zip(*runs)), repr(sample)

    @pytest.mark.slow(but=SEVEN)
    @pytest.mark.parametrize(
        ("backend", "count"),
        [("reference", 2), ("simulator", 1), pytest.param("gpu", 2, marks=pytest.mark.gpu)],
        ids=["reference", "simulator", "gpu"],
    )
    def test_hazards(self, backend, count):
        """Every hazard of `cupyops.testing`, on the first small samples; those of compilers, which trace the function alike
        whatever runs its graph, once where kernels run."""
        make = Make("cuda", self.one_dtype()) if backend == "gpu" else Make("cpu", torch.float32)
        for index, sample in enumerate(itertools.islice(self.small_samples(make), count)):
            report = check(
                self.function,
                sample.args,
                sample.kwargs,
                reference=self.torch_function,
                backends=backend,
                skip=("more_than_2_31", *(COMPILERS if index or backend == "reference" else ())),
                shrink=False,
            )
            unknown = [row for row in report.failures if (row.hazard, backend) not in self.differs]
            assert not unknown, f"\n{report}"

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_jit_trace(self, backend):
        """torch.jit.trace records the reference: what it gives computes the same for other values."""
        make = Make("cuda" if backend == "gpu" else "cpu", torch.float32)
        for sample in self.small_samples(make):
            inputs = [t for t in sample.all_tensors() if t.is_floating_point()]

            def run(*values, sample=sample, inputs=inputs):
                return tuple(tensors_of(sample.with_tensors(inputs, values).of(self.function)))

            with cupyops.simulate() if backend == "simulator" else contextlib.nullcontext():
                leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
                traced = torch.jit.trace(run, leaves, check_trace=False)
            others = [0.5 * t.detach() + 0.1 for t in inputs]
            torch.testing.assert_close(traced(*others), run(*others), equal_nan=True, **self.beside_reference)

    @pytest.mark.gpu
    def test_more_than_2_31(self):
        """The first small call whose results repeat along a dimension, repeated until it has so many elements."""
        options = dict(reference=self.torch_function, backends="gpu", only="more_than_2_31", shrink=False)
        reasons = []
        for sample in self.small_samples(Make("cuda", self.one_dtype())):
            (row,) = check(self.function, sample.args, sample.kwargs, **options).rows
            assert row.verdict != "fail", row.reason
            if row.verdict == "pass":
                return
            reasons.append(row.reason)
        assert self.too_large and any(self.too_large in reason for reason in reasons), reasons

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

    @pytest.mark.gpu
    def test_kernels_run(self):
        """No sample takes the reference on a GPU, and every kernel of the operator is launched by some sample."""
        seen = set()
        for dtype in self.dtypes:
            for sample in self.samples(Make("cuda", dtype)):
                call = sample.leaves()
                with cupyops.trace() as trace:
                    y = first(call.of(self.function))
                    if call.tensors():
                        y.sum().backward()
                assert "reference" not in trace.routes() or y.numel() == 0, f"{sample!r}\n{trace}"
                seen |= {record.kernel.partition("<")[0] for record in trace.launches()}
        assert seen >= self.kernels, f"never launched: {self.kernels - seen}"

    @pytest.mark.gpu
    def test_launches_are_fast(self, monkeypatch):
        """When forward and backward have been recorded, or given up, none takes the full checks.

        That takes eight calls where a public function is given up first, then its operator recorded, then its backward.
        """
        launch, slow = Specialised.launch, []

        def counted(specialised, *args):
            slow.append(specialised.name)
            return launch(specialised, *args)

        for dtype in self.dtypes:
            for sample in self.small_samples(Make("cuda", dtype)):
                call = sample.leaves()
                for _ in range(10):
                    self.both_ways(call)
                with monkeypatch.context() as patch:
                    patch.setattr(Specialised, "launch", counted)
                    self.both_ways(call)
                assert not slow, f"{sample!r}: {slow}"

    def both_ways(self, call):
        outputs = tensors_of(call.of(self.function))
        gradients(outputs, call, [torch.ones_like(y) for y in outputs if y.requires_grad])


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


def grad_of_kind(y: Tensor, kind: str) -> Tensor:
    """A gradient for `y`: random; expanded with stride 0 as `.sum()` gives; strided; misaligned."""
    grad = torch.randn_like(y)
    if kind == "expanded":
        return torch.full((), 0.75, dtype=y.dtype, device=y.device).expand(y.shape)
    return {"strided": sliced, "misaligned": misaligned}.get(kind, lambda t: t)(grad).detach()


def placed(value: Any, device: torch.device) -> Any:
    """Tensors on the device, but for those that are meant to be elsewhere."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)
