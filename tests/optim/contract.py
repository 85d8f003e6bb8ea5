"""What every optimizer is held to, written once: a test file of an optimizer subclasses `OptimizerContract`.

Each test compares with PyTorch's optimizer, in float64 where rounding matters, over several steps: options, dtypes,
layouts, sizes, groups, state, and whatever the kernel leaves to PyTorch.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from contract import DTYPES
from torch import nn

import cupyops
from cupyops._dispatch import multi_tensor
from cupyops._kernel.compile import compiler

SHAPES = [(5,), (3, 7), (1031,), (4100,), (1,), (), (0,), (2, 3, 4, 5)]


def parameters(device, dtype, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [nn.Parameter(value.to(device, dtype)) for value in values]


def twins(make):
    """Parameters for ours, for PyTorch's, and for PyTorch's in float64."""
    exact = [nn.Parameter(p.detach().to(torch.float64)) for p in make()]
    return make(), make(), exact


def kernels(device):
    """They run there, or in the simulator."""
    return cupyops.simulate(check=False) if device.type == "cpu" else contextlib.nullcontext()


def set_grads(all_params, step, change=lambda grad, index: grad):
    """The same gradients for each list of parameters: those of the first list's dtype."""
    generator = torch.Generator().manual_seed(100 + step)
    first = all_params[0]
    for index, p in enumerate(first):
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device, p.dtype)
        for params in all_params:
            q = params[index]
            q.grad = change(torch.empty_like(q).copy_(grad), index)


def train(all_params, optimizers, steps=4, **kwargs):
    for step in range(steps):
        set_grads(all_params, step, **kwargs)
        for optimizer in optimizers:
            optimizer.step()


def assert_alike(ours, theirs, exact, optimizers, steps=4):
    """As near to float64 as PyTorch is: twice its error, and a unit in the last place for each step's rounding."""
    for index, triple in enumerate(zip(ours, theirs, exact)):
        assert triple[0].stride() == triple[1].stride()
        assert_near(*triple, steps, f"parameter {index}")
        states = [{k: v for k, v in opt.state[p].items() if v is not None} for opt, p in zip(optimizers, triple)]
        assert states[0].keys() == states[1].keys()
        for name in states[0]:
            assert_near(*(state[name] for state in states), steps, f"{name} of parameter {index}")


def assert_near(ours, theirs, exact, steps, what):
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    if ours.numel():
        # what is added up is of order 1, and its roundings do not shrink where a sum happens to cancel
        ulp = torch.finfo(ours.dtype).eps * max(exact.abs().max().item(), 1.0)
        # in float64, as cupyops.testing.Tolerance has it, what is exact to the others rounds too
        allowed = max(steps, 16) * ulp if ours.dtype is torch.float64 else steps * ulp
        error, reference = ((t.detach().double() - exact.detach()).abs().max().item() for t in (ours, theirs))
        assert error <= 2 * reference + allowed, f"{what}: error {error:.3g}, PyTorch's {reference:.3g}, ulp {ulp:.3g}"


def channels_last(p):
    return p.detach().to(memory_format=torch.channels_last)


def misaligned(p):
    return torch.cat([p.detach().flatten()[:1], p.detach().flatten()])[1:].view(p.shape)


LAYOUTS = {
    "channels_last": channels_last,
    "transposed": lambda p: p.detach().transpose(1, 2).contiguous().transpose(1, 2),
    "misaligned": misaligned,
    "every other": lambda p: p.detach().repeat_interleave(2, dim=-1)[..., ::2],
}


class OptimizerContract:
    """A subclass names the classes, the kernel and the options to try."""

    ours: Any
    theirs: Any  # PyTorch's, or what is written in PyTorch by itself
    kernel: Any
    arrays: int  # that a table names for each tensor
    usual: dict[str, Any]  # options of the tests that are about something else
    options: list[dict[str, Any]]  # to be tried, in every dtype
    simulated: list[dict[str, Any]]  # options that reach every instance
    bad: list[dict[str, Any]]
    capturable: dict[str, Any] = {}  # what a step in a CUDA graph needs
    more: tuple[str, ...] = ()  # arguments that PyTorch's has not
    flips = 0.0  # the part of the elements that may go the other way, where a rule has a jump

    def optimizers_of(self, lists, **options):
        """Ours for the first list, PyTorch's for the others."""
        return [cls(params, **options) for cls, params in zip((self.ours, self.theirs, self.theirs), lists)]

    def compare(self, make, options, change=lambda grad, index: grad, steps=4):
        """Some steps by all three."""
        lists = twins(make)
        optimizers = self.optimizers_of(lists, **options)
        train(lists, optimizers, steps, change=change)
        assert_alike(*lists, optimizers, steps)

    def test_options(self, device):
        for options in self.options:
            for dtype in DTYPES:
                self.compare(lambda dtype=dtype: parameters(device, dtype), {"lr": 0.1, **options})

    def test_signature_is_torch_s(self):
        """And where ours has more, it comes last, by name alone, and off."""
        ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (self.ours, self.theirs))
        told = lambda parameters: [(one.name, one.kind, one.default) for one in parameters.values()]
        assert told(ours)[: len(theirs)] == told(theirs)
        more = list(ours.values())[len(theirs) :]
        assert [one.name for one in more] == list(self.more)
        assert all(one.kind is one.KEYWORD_ONLY and not one.default for one in more)

    def test_bad_options(self):
        for bad in self.bad:
            with pytest.raises(ValueError):  # noqa: PT011 - the words are PyTorch's own
                self.ours([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **bad})

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("grad_layout", ["as the parameter", "contiguous", "misaligned", "every other"])
    def test_layouts(self, device, layout, grad_layout):
        def make():
            return [
                nn.Parameter(LAYOUTS[layout](p))
                for p in parameters(device, torch.float32, [(3, 4, 5, 6), (2, 9, 13, 5)])
            ]

        def change(grad, index):
            if grad_layout == "contiguous":
                return grad.contiguous()
            return LAYOUTS.get(grad_layout, lambda g: g)(grad)

        self.compare(make, {"lr": 0.1, **self.usual}, change)

    def test_more_tensors_than_a_launch_names(self, device):
        shapes = [(1 + index % 5,) for index in range(2 * multi_tensor.capacity(self.arrays) + 7)]
        self.compare(lambda: parameters(device, torch.float32, shapes), {"lr": 0.1, **self.usual}, steps=3)

    def test_gradients_come_and_go(self, device):
        """None is skipped; a parameter's first gradient, whenever it comes, is its first step."""
        lists = twins(lambda: parameters(device, torch.float32))
        optimizers = self.optimizers_of(lists, lr=0.1, **self.usual)
        for step, absent in enumerate([{0, 2}, {1}, {2, 3}, set()]):
            set_grads(lists, step, change=lambda grad, index, absent=absent: None if index in absent else grad)
            for optimizer in optimizers:
                optimizer.step()
            assert_alike(*lists, optimizers)

    def test_groups_and_dtypes(self, device):
        def make():
            return [
                *parameters(device, torch.float32),
                *parameters(device, torch.bfloat16),
                *parameters(device, torch.float64),
            ]

        def groups(params):
            return [{"params": params[::2], "lr": 0.3}, {"params": params[1::2], "weight_decay": 0.2}]

        lists = twins(make)
        optimizers = self.optimizers_of(map(groups, lists), lr=0.1, **self.usual)
        train(lists, optimizers)
        assert_alike(*lists, optimizers)

    def test_scheduler(self, device):
        lists = twins(lambda: parameters(device, torch.float32))
        optimizers = self.optimizers_of(lists, lr=0.1, **self.usual)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
        for step in range(3):
            set_grads(lists, step)
            for optimizer, scheduler in zip(optimizers, schedulers):
                optimizer.step()
                scheduler.step()
        assert_alike(*lists, optimizers)

    @pytest.mark.parametrize("where", ["cpu", "device"])
    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_tensor_learning_rate(self, device, where, shape):
        for dtype in (torch.float32, torch.float64):
            lists = twins(lambda dtype=dtype: parameters(device, dtype))
            # all three share it
            rate = torch.full(shape, 0.1, device=device if where == "device" else "cpu", dtype=dtype)
            optimizers = self.optimizers_of(lists, lr=rate, **self.usual)
            for step in range(3):
                set_grads(lists, step)
                for optimizer in optimizers:
                    optimizer.step()
                rate.mul_(0.5)
            assert_alike(*lists, optimizers)

    def test_state_dict_goes_both_ways(self, device):
        lists = twins(lambda: parameters(device, torch.float32))
        options = {"lr": 0.1, **self.usual}
        optimizers = self.optimizers_of(lists, **options)
        train(lists, optimizers)
        swapped = [self.theirs(lists[0], **options), self.ours(lists[1], **options), optimizers[2]]
        swapped[0].load_state_dict(optimizers[0].state_dict())
        swapped[1].load_state_dict(optimizers[1].state_dict())
        train(lists, swapped)
        for a, b in zip(lists[0], lists[1]):
            torch.testing.assert_close(a, b)
        assert swapped[0].state_dict()["param_groups"] == swapped[1].state_dict()["param_groups"]

    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
    )
    def test_copies_are_independent(self, device, duplicate):
        params = parameters(device, torch.float32)
        optimizer = self.ours(params, lr=0.1, **self.usual)
        train([params], [optimizer])
        other = duplicate(optimizer)
        before = [p.detach().clone() for p in params]
        others = other.param_groups[0]["params"]
        train([others], [other])
        assert all(torch.equal(p, old) for p, old in zip(params, before))
        train([params], [optimizer])
        torch.testing.assert_close(list(params), list(others))

    def test_closure_and_hooks(self, device):
        params = parameters(device, torch.float32)
        optimizer = self.ours(params, lr=0.1)
        self.theirs(params, lr=0.1)  # whose class PyTorch patches too
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))

        def closure():
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in params)
            loss.backward()
            calls.append("closure")
            return loss

        first, second = optimizer.step(closure), optimizer.step(closure)
        assert calls == ["pre", "closure", "post"] * 2
        assert second < first

    def test_zero_grad(self, device):
        params = parameters(device, torch.float32)
        optimizer = self.ours([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, **self.usual)
        set_grads([params], 0)
        grads = [p.grad for p in params]
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is grad and not grad.any() for p, grad in zip(params, grads))
        optimizer.zero_grad()
        assert all(p.grad is None for p in params)
        set_grads([params], 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.zero_grad()
        assert f"Optimizer.zero_grad#{self.ours.__name__}.zero_grad" in {event.name for event in profile.events()}
        assert all(p.grad is None for p in params)

    def test_autograd_notices_the_change(self, device):
        p = nn.Parameter(torch.randn(4, device=device))
        optimizer = self.ours([p], lr=0.1, **self.usual)
        loss = p.square().sum()
        p.grad = torch.ones_like(p)
        before = p._version
        optimizer.step()
        assert p._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def scaled(self, device, infinite, around=lambda optimizer, step: contextlib.nullcontext(), **options):
        """Four steps of ours and PyTorch's under a scaler; in step number `infinite` a gradient is."""
        lists = [parameters(device, torch.float32, [(5,), (4100,)]) for _ in range(2)]
        usual = {"lr": 0.1, **self.usual}
        optimizers = [self.ours(lists[0], **usual, **options), self.theirs(lists[1], **usual)]
        scalers = [torch.amp.GradScaler(device.type, init_scale=1024.0) for _ in optimizers]
        for step in range(4):
            set_grads(lists, step)
            for params, optimizer, scaler in zip(lists, optimizers, scalers):
                scaler.scale(torch.ones((), device=device))
                for p in params:
                    p.grad.mul_(scaler.get_scale())
                if step == infinite:
                    params[1].grad[77] = torch.inf
                with around(optimizer, step):
                    scaler.step(optimizer)
                scaler.update()
            torch.testing.assert_close(*lists)
        return lists

    def test_grad_scaler(self, device):
        """fused=True: the scaler leaves unscaling, and skipping where a gradient is infinite, to the step."""
        ours, theirs = self.scaled(device, 1, fused=True)
        torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs])

    def test_grad_scaler_skips_the_first_step(self, device):
        self.scaled(device, 0, fused=True)

    def test_grad_scaler_in_a_capture(self, device, monkeypatch):
        """What a CUDA graph captures asks nothing of the GPU: the step heeds the scaler, without fused=True too."""

        @contextlib.contextmanager
        def around(optimizer, step):
            with monkeypatch.context() as capture, kernels(device):
                if isinstance(optimizer, self.ours) and step:  # the first one makes the state
                    capture.setattr("cupyops.optim.fused.capturing", lambda: True)
                    capture.setattr(torch.Tensor, "item", _waits)
                yield

        defaults = self.ours(parameters(device, torch.float32), lr=0.1).defaults
        self.scaled(device, 1, around, **({"capturable": True} if "capturable" in defaults else {}))

    @pytest.mark.parametrize(
        "options", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}]
    )
    def test_what_was_asked_for_is_pytorch_s(self, device, options):
        lists = twins(lambda: parameters(device, torch.float32))
        optimizers = self.optimizers_of(lists, lr=0.1, **self.usual, **options)
        for step in range(2):
            set_grads(lists, step)
            with torch.no_grad() if options.get("differentiable") else torch.enable_grad():
                for params in lists if options.get("differentiable") else ():
                    for p in params:
                        p.requires_grad_(False)
            with cupyops.trace() as trace:
                optimizers[0].step()
            assert trace.routes() == {"reference"}
            for optimizer in optimizers[1:]:
                optimizer.step()
        for a, b in zip(lists[0], lists[1]):
            assert torch.equal(a, b)

    def test_complex_beside_real(self, device):
        lists = [[*parameters(device, torch.float32), *parameters(device, torch.complex64, [(3, 2)])] for _ in range(2)]
        optimizers = self.optimizers_of(lists, lr=0.1, **self.usual)
        train(lists, optimizers)
        torch.testing.assert_close(lists[0], lists[1])

    def test_negative_bit(self, device):
        p, q = (nn.Parameter(torch.ones(5, device=device)) for _ in range(2))
        z = torch.randn(5, dtype=torch.complex64, device=device)
        for param, cls in ((p, self.ours), (q, self.theirs)):
            param.grad = z.conj().imag
            assert param.grad.is_neg()
            cls([param], lr=0.1).step()
        assert torch.equal(p, q)

    def test_compiled_step(self, device):
        lists = [parameters(device, torch.float32) for _ in range(2)]
        optimizers = self.optimizers_of(lists, lr=0.1, **self.usual)
        compiled = torch.compile(optimizers[0].step, backend="aot_eager")
        for step in range(2):
            set_grads(lists, step)
            compiled()
            optimizers[1].step()
        torch.testing.assert_close(lists[0], lists[1])

    def test_table_is_the_struct_of_the_kernel(self):
        for name in self.kernel.instances():
            binary = compiler.build(self.kernel.source, name, "sm_80", self.kernel.options)
            tables = [multi_tensor.struct(n).itemsize for n in (self.arrays, self.arrays + 1)]  # with amsgrad one more
            assert set(tables) & {parameter.size for parameter in binary.parameters}, name
            end = 0
            for parameter in binary.parameters:
                end = -(-end // parameter.align) * parameter.align + parameter.size
            assert end <= 4096, f"{name}: {end} bytes of kernel parameters"

    @pytest.mark.gpu
    def test_one_launch_for_all(self):
        params = parameters("cuda", torch.float32, [(3, 5)] * 60)
        optimizer = self.ours(params, lr=0.1, **self.usual)
        for step in range(2):
            set_grads([params], step)
            with cupyops.trace() as trace:
                optimizer.step()
            assert [record.kernel.partition("<")[0] for record in trace.records] == [self.kernel.base], str(trace)

    @pytest.mark.gpu
    def test_every_instance_runs(self):
        seen = set()
        for dtype in DTYPES:
            for options in self.simulated:
                params = parameters("cuda", dtype)
                set_grads([params], 0)
                with cupyops.trace() as trace:
                    self.ours(params, lr=0.1, **options).step()
                assert trace.routes() == {"kernel"}, str(trace)
                seen |= {record.kernel for record in trace.launches()}
        assert seen == set(self.kernel.instances())

    @pytest.mark.gpu
    @pytest.mark.parametrize("layout", ["channels_last", "transposed", "misaligned"])
    def test_dense_layouts_are_served(self, layout):
        params = [nn.Parameter(LAYOUTS[layout](p)) for p in parameters("cuda", torch.float32, [(3, 4, 5, 6)])]
        set_grads([params], 0)
        with cupyops.trace() as trace:
            self.ours(params, lr=0.1).step()
        assert trace.routes() == {"kernel"}, str(trace)

    @pytest.mark.gpu
    def test_a_new_rate_rebuilds_no_table(self, monkeypatch):
        params = parameters("cuda", torch.float32)
        optimizer = self.ours(params, lr=0.1, **self.usual)
        set_grads([params], 0)
        optimizer.step()
        optimizer.step()
        monkeypatch.setattr(multi_tensor, "tables", None)
        optimizer.param_groups[0]["lr"] = 0.05
        optimizer.step()

    @pytest.mark.gpu
    @pytest.mark.parametrize("numel", [2**20 + 3, 2**24])
    def test_large(self, numel):
        lists = [parameters("cuda", torch.float32, [(numel,), (7,)]) for _ in range(2)]
        optimizers = self.optimizers_of(lists, lr=0.1, **self.usual)
        train(lists, optimizers, steps=3)
        for ours, theirs in zip(*lists):
            apart = ~torch.isclose(ours, theirs, rtol=1.3e-6, atol=1e-5)
            assert int(apart.sum()) <= self.flips * numel

    @pytest.mark.gpu
    def test_more_than_2_31_elements(self):
        if torch.cuda.mem_get_info()[0] < 20 * 2**30:
            pytest.skip("needs 20 GB of free GPU memory")
        p = nn.Parameter(torch.zeros(2**31 + 4099, dtype=torch.float16, device="cuda"))
        p.grad = torch.ones_like(p)
        self.ours([p], lr=0.5).step()
        assert torch.all(p == -0.5)

    @pytest.mark.gpu
    def test_cuda_graph_follows_the_learning_rate_and_counts(self):
        lists = [parameters("cuda", torch.float32) for _ in range(2)]
        rate = torch.tensor(0.1, device="cuda")
        ours = self.ours(lists[0], lr=rate, **self.usual, **self.capturable)
        theirs = self.theirs(lists[1], lr=0.1, **self.usual)
        set_grads(lists, 0)
        ours.step()
        theirs.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours.step()
        for value in (0.1, 0.05, 0.2):
            rate.fill_(value)
            theirs.param_groups[0]["lr"] = value
            graph.replay()
            theirs.step()
            torch.testing.assert_close(lists[0], lists[1])

    @pytest.mark.gpu
    def test_the_first_step_is_not_captured(self):
        params = parameters("cuda", torch.float32)
        set_grads([params], 0)
        optimizer = self.ours(params, lr=0.1, **self.usual, **self.capturable)
        torch.cuda.synchronize()
        graph = torch.cuda.graph(torch.cuda.CUDAGraph())
        with pytest.raises(cupyops.LaunchError, match="run a step before the capture"), graph:
            optimizer.step()

    @pytest.mark.gpu
    def test_side_stream(self):
        lists = [parameters("cuda", torch.float32) for _ in range(2)]
        set_grads(lists, 0)
        for p in lists[1]:
            p.grad.mul_(3)
        self.theirs(lists[1], lr=0.1).step()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            for p in lists[0]:
                p.grad.mul_(3)
            optimizer = self.ours(lists[0], lr=0.1)
            optimizer.step()
        stream.synchronize()
        torch.testing.assert_close(lists[0], lists[1])

    @pytest.mark.gpu
    def test_two_devices(self):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        lists = [[*parameters("cuda:0", torch.float32), *parameters("cuda:1", torch.float32)] for _ in range(2)]
        optimizers = self.optimizers_of(lists, lr=0.1, **self.usual)
        train(lists, optimizers)
        torch.testing.assert_close(lists[0], lists[1])


def _waits(tensor):
    raise AssertionError("a value is read, which waits for the GPU")
