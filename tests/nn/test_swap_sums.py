"""Residual sums and the norms that read them are one operator after swap, under autocast; the numbers are what they were."""

import collections
import contextlib
import copy
import functools
import gc
import inspect
import io
import itertools
import pickle
import statistics

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cupyops
from cupyops.nn._swap import sums

HALF = torch.bfloat16


def decorated(function):
    """A decorator that is a closure, as transformers has them."""

    @functools.wraps(function)
    def inside(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return inside


decorated.__module__ = "transformers.utils"  # of other decorators nothing is known


class Part(nn.Module):
    """What is added to the residual: of a half type under autocast."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Base(nn.Module):
    def __init__(self, norm=lambda: nn.LayerNorm(16)):
        super().__init__()
        self.one, self.two, self.first, self.second = norm(), norm(), Part(), Part()


class Block(Base):
    """As timm and nanoGPT write it."""

    def forward(self, x, scale: float = 1.0):
        x = x + self.first(self.one(x))
        return x + self.second(self.two(x))


class Steps(Base):
    """As transformers has it."""

    def forward(self, x, other=None, **kwargs):
        residual = x
        x = self.one(x)
        x = self.first(x)
        x = x + residual
        if other is not None:
            x = x + other
        residual = x
        x = self.two(x)
        x = self.second(x)
        x = residual + x
        return x


class Decorated(Base):
    @decorated
    def forward(self, x, other=None):
        y = self.first(self.one(x)) + x
        return y + self.second(self.two(y))


class Annotated(Base):
    def forward(self, x):
        y: torch.Tensor = x + self.first(self.one(x))
        z: torch.Tensor = y + self.second(self.two(y))
        return z


class Documented(Base):
    """A docstring of several lines, and calls of what the module has imported."""

    def forward(self, x):
        """The sum of the residual
        and of both parts.
        """
        x = x + self.first(self.one(x))
        x = x + self.second(self.two(x))
        if x.dtype == torch.float16:
            x = torch.clamp(x, min=-65000.0, max=65000.0)
        return x


class Super(Base):
    """A closure: `__class__`."""

    def forward(self, x):
        y = x + self.first(self.one(x))
        y = y + self.second(self.two(y))
        super().extra_repr()
        return y


class Model(nn.Module):
    def __init__(self, block=Block, several=nn.ModuleList, wide=True):
        super().__init__()
        self.wide = wide
        blocks = [block() for _ in range(3)]
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.Sequential(*blocks) if several is nn.Sequential else several(blocks)
        self.last, self.head = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.stem(x)
        x = x.float() if self.wide else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def step(model, x, count=False):
    """Loss, gradients, and how often each norm's operator was called."""
    model.zero_grad()
    with cupyops.trace() as trace:
        with torch.autocast(x.device.type, HALF):
            y = model(x)
        y.float().square().mean().backward()
    called = collections.Counter(str(record.operator).removeprefix("cupyops::") for record in trace.records)
    found = {"y": y.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}
    return (found, called, trace) if count else found


def without(model):
    """A copy that is swapped without this."""
    plain = copy.deepcopy(model)
    cupyops.swap(plain, exact=True)
    return plain


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


BLOCKS = [Block, Steps, Decorated, Annotated, Documented, Super]


@pytest.mark.parametrize("block", BLOCKS)
def test_same_numbers(block):
    """Three sums inside the three blocks, and two from a block to the next; the first norm and the last read no sum."""
    torch.manual_seed(0)
    model, x = Model(block), torch.randn(2, 5, 16)
    expected, before, _ = step(without(model), x, count=True)
    assert before["layer_norm"] == 7 and not before["add_norm_lowered"]
    swapped = cupyops.swap(model)
    assert {one.name for one in swapped.replaced if "residual sums with norms" in one.what} == {
        f"blocks.{at}" for at in range(3)
    }
    found, called, _ = step(model, x, count=True)
    assert called["add_norm_lowered"] == 5 and called["layer_norm_lowered"] == 2
    same(found, expected)
    swapped.undo()
    assert type(model.blocks[0]) is block and not any(sums.NEXT in vars(one) for one in model.blocks)


def test_a_residual_that_is_not_contiguous():
    """As of an encoder of sound, whose convolutions leave time last."""
    torch.manual_seed(0)
    model, x = Model(Documented), torch.randn(2, 16, 5).transpose(1, 2)
    model.stem = nn.Identity()
    expected, *_ = step(without(model), x, count=True)
    cupyops.swap(model)
    found, called, _ = step(model, x, count=True)
    assert called["add_norm_lowered"] == 5
    same(found, expected)


def rms():
    return nn.RMSNorm(16)


class InSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OnePlus(InSteps):  # as Gemma has it
    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


NORMS = {"rms": rms, "steps": InSteps, "one_plus": OnePlus, "no_bias": lambda: nn.LayerNorm(16, bias=False)}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms(norm):
    torch.manual_seed(1)
    model, x = Model(lambda: Block(norm)), torch.randn(3, 16)
    expected = step(without(model), x)
    cupyops.swap(model)
    found, called, _ = step(model, x, count=True)
    assert called["add_norm_lowered"] == 5
    same(found, expected)


@pytest.mark.parametrize("norm", [rms, InSteps], ids=["rms", "steps"])
@pytest.mark.parametrize("backend", ["reference", "simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_models_of_one_half_type(backend, norm):
    """Sums and rms_norm of a model that is all of a half type, as near to float64 as one without this.

    A rounding of an early layer goes through all gradients: of one model either way is up to 1.4 times as far as the other.
    The bound is on the mean of several models, 0.96 of 300 whose norms are in steps, and 0.98 in the simulator.
    """
    device, ratios = "cuda" if backend == "gpu" else "cpu", []
    models = 12 if backend != "simulator" else 1 if norm is rms else 5  # of rms they are within 0.1 each
    for half, seed in itertools.product((torch.bfloat16, torch.float16), range(models)):
        torch.manual_seed(seed)
        model, x = Model(lambda: Block(norm), wide=False).to(half), torch.randn(96, 16).to(device, half)
        model = model.to(device)
        wide = copy.deepcopy(model).double()  # whose norms in steps are of float32, which is near enough here
        wide(x.double()).square().mean().backward()
        plain, errors = without(model), []
        cupyops.swap(model)
        for one in (plain, model):
            for _ in range(4 if backend == "gpu" else 1):  # recorded, and replayed
                one.zero_grad()
                simulated = cupyops.simulate("sm_90") if backend == "simulator" else contextlib.nullcontext()
                with simulated, cupyops.trace() as trace:
                    y = one(x)
                    y.float().square().mean().backward()
            names = [record.operator for record in trace.records]
            assert names.count("cupyops::add_rms_norm") == (5 if one is model else 0)
            pairs = zip(one.parameters(), wide.parameters())
            errors.append([float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs])
        assert all(p.grad.dtype is half for p in model.parameters())
        assert max(errors[1]) < (0.1 if half is torch.bfloat16 else 0.0125)
        ratios.append(sum(errors[1]) / sum(errors[0]))
    assert statistics.geometric_mean(ratios) <= 1.1, ratios


def test_of_one_half_type_only_as_the_norm_is():
    """Not of a norm with parameters of float32, of float32 itself, with other sizes, or under autocast."""
    torch.manual_seed(12)
    for norm, change in (
        (rms, lambda model: [module.float() for module in model.modules() if isinstance(module, nn.RMSNorm)]),
        (OnePlus, lambda model: None),
        (lambda: nn.LayerNorm(16), lambda model: None),
        (rms, lambda model: model.float()),
    ):
        model = Model(lambda norm=norm: Block(norm), wide=False).to(HALF)
        change(model)
        plain, x = without(model), torch.randn(2, 16, dtype=model.stem.weight.dtype)
        cupyops.swap(model)
        with cupyops.trace() as trace:
            try:
                expected = plain(x)
            except Exception as error:
                with pytest.raises(type(error)):
                    model(x)
                continue
            torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
        assert "cupyops::add_rms_norm" not in {record.operator for record in trace.records}


def test_kernels_run():
    torch.manual_seed(2)
    model, x = Model(), torch.randn(4, 16)
    expected = step(without(model), x)
    cupyops.swap(model)
    with cupyops.simulate("sm_90"):
        found, _, trace = step(model, x, count=True)
    assert {"norm_lowered_add_fwd", "norm_lowered_add_bwd"} <= {
        one.kernel.partition("<")[0] for one in trace.launches()
    }
    for name, tensor in expected.items():
        assert (found[name].float() - tensor.float()).norm() <= 0.03 * tensor.float().norm() + 1e-6, name


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(16), rms], ids=["layer_norm", "rms_norm"])
def test_on_a_gpu(norm):
    torch.manual_seed(2)
    model, x = Model(lambda: Block(norm)).cuda(), torch.randn(4, 16, device="cuda")
    plain = without(model)
    cupyops.swap(model)
    for _ in range(3):  # recorded, and replayed
        expected = step(plain, x)
        found, called, _ = step(model, x, count=True)
        assert called["add_norm_lowered"] == 5
        for name, tensor in expected.items():
            assert (found[name].float() - tensor.float()).norm() <= 0.03 * tensor.float().norm() + 1e-6, name


def test_gradients_are_as_near_to_float64():
    torch.manual_seed(3)
    model, x = Model(), torch.randn(4, 9, 16)
    truth = copy.deepcopy(model).double()
    truth.stem.register_forward_hook(lambda module, args, y: y.double())
    y = truth.head(truth.last(functools.reduce(lambda x, block: block(x), truth.blocks, truth.stem(x.double()))))
    y.square().mean().backward()
    errors = []
    plain = without(model)
    cupyops.swap(model)
    for one in (plain, model):
        grads = step(one, x)
        errors.append([(grads[n] - p.grad).norm() / p.grad.norm() for n, p in truth.named_parameters()])
    assert all(ours <= 1.5 * theirs + 1e-6 for theirs, ours in zip(*errors))


# --- whoever does something else gets what he had ---------------------------------------------------------------------


def both(change, block=Block, several=nn.ModuleList, x=None):
    """Numbers of a model that somebody changes after the swap are those of one without this."""
    torch.manual_seed(4)
    model = Model(block, several)
    x = torch.randn(2, 5, 16) if x is None else x
    plain = without(model)
    cupyops.swap(model)
    change(plain), change(model)
    expected = step(plain, x)
    found, called, _ = step(model, x, count=True)
    same(found, expected)
    return called


def test_hooks_on_a_norm_hear_float32():
    heard = []

    def listen(model):
        model.blocks[0].two.register_forward_hook(lambda module, args, y: heard.append((args[0].dtype, y.dtype)))

    assert both(listen)["add_norm_lowered"] == 4
    assert heard == [(torch.float32, torch.float32)] * 2


def test_hooks_on_all_modules_hear_float32():
    heard, model, x = [], Model(), torch.randn(2, 16)
    cupyops.swap(model)

    def listen(module, args, y):
        if isinstance(module, nn.LayerNorm):
            heard.append(y.dtype)

    handle = nn.modules.module.register_module_forward_hook(listen)
    try:
        step(model, x)
    finally:
        handle.remove()
    assert heard == [torch.float32] * 7


def test_hooks_that_change_what_a_norm_gets():
    def double(model):
        model.blocks[1].two.register_forward_pre_hook(lambda module, args: (2 * args[0],))

    assert both(double)["add_norm_lowered"] == 4


def test_a_sum_that_is_changed_in_place_is_normalised_anew():
    class InPlace(Base):
        def forward(self, x):
            y = x + self.first(self.one(x))
            y *= 2
            return y + self.second(self.two(y))

    called = both(lambda model: None, InPlace)
    assert called["layer_norm_lowered"] >= 4


def test_blocks_in_another_order():
    def turn(model):
        model.blocks = nn.ModuleList(list(model.blocks)[::-1])

    both(turn)


def test_a_block_that_is_replaced_and_a_norm_with_other_weights():
    def replace(model):
        torch.manual_seed(7)
        model.blocks[1] = Block()
        with torch.no_grad():
            model.blocks[2].one.weight.mul_(3)

    both(replace)


def test_a_block_that_is_called_twice_and_checkpoints():
    class Twice(Model):
        def forward(self, x):
            x = self.stem(x).float()
            for block in self.blocks:
                x = checkpoint(block, block(x), use_reentrant=False)
            return self.head(self.last(x))

    torch.manual_seed(5)
    model, x = Twice(), torch.randn(2, 16)
    expected = step(without(model), x)
    cupyops.swap(model)
    same(step(model, x), expected)


class Checkpoints(Model):
    """Each block, or every second one, is computed again in backward, without the one before it."""

    reentrant, every = False, 1

    def forward(self, x):
        x = self.stem(x).float()
        for at, block in enumerate(self.blocks):
            x = block(x) if at % self.every else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.last(x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("simulated", [True, False])
def test_checkpoints(reentrant, every, simulated):
    torch.manual_seed(6)
    model, x = Checkpoints(), torch.randn(2, 16)
    model.reentrant, model.every = reentrant, every
    expected = step(without(model), x)
    cupyops.swap(model)
    with cupyops.simulate("sm_90") if simulated else contextlib.nullcontext():
        found, called, _ = step(model, x, count=True)
    assert called["add_norm_lowered"]
    if not simulated:
        return same(found, expected)
    for name, tensor in expected.items():
        assert (found[name].float() - tensor.float()).norm() <= 0.03 * tensor.float().norm() + 1e-6, name


@pytest.mark.parametrize("backward", [True, False])
def test_what_no_norm_takes_is_not_kept(backward):
    """A block's result that the next one does not get, as where blocks are dropped at random."""
    torch.manual_seed(13)
    model, alive = Model(), []
    cupyops.swap(model)
    for _ in range(4):
        with torch.autocast("cpu", HALF):
            y = model.blocks[0](torch.randn(2, 16, requires_grad=True))
        if backward:
            y.float().sum().backward()
        del y
        gc.collect()
        alive.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
    assert alive[1] == alive[3]
    with cupyops.simulate("sm_90"), torch.autocast("cpu", HALF):
        y = model.blocks[0](torch.randn(2, 16, requires_grad=True))
        assert len(sums._waiting.of) == 1
        del y
        assert not sums._waiting.of


def test_a_copy_of_a_sum_is_another_tensor():
    torch.manual_seed(14)
    model = Model()
    cupyops.swap(model)
    with torch.no_grad(), torch.autocast("cpu", HALF):
        y = model.blocks[0](torch.randn(2, 16))
        for other in (copy.deepcopy(y), pickle.loads(pickle.dumps(y))):
            assert sums.taken(model.blocks[1].one, other) is None
        assert sums.taken(model.blocks[1].one, y) is not None


def test_without_autocast_and_without_gradients():
    torch.manual_seed(8)
    model, x = Model(), torch.randn(2, 16)
    plain = without(model)
    cupyops.swap(model)
    assert torch.equal(model(x), plain(x))
    with torch.no_grad(), torch.autocast("cpu", HALF):
        assert torch.equal(model(x), plain(x))
    with torch.inference_mode(), torch.autocast("cpu", HALF):
        assert torch.equal(model(x), plain(x))


def test_transforms():
    torch.manual_seed(9)
    model, x = Model(), torch.randn(4, 16)
    plain = without(model)
    cupyops.swap(model)
    with torch.autocast("cpu", HALF):
        torch.testing.assert_close(torch.vmap(model)(x), torch.vmap(plain)(x))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), plain(x), rtol=2e-2, atol=2e-2)


def test_sequential_copies_and_pickles():
    torch.manual_seed(10)
    model, x = Model(several=nn.Sequential), torch.randn(2, 16)
    expected = step(without(model), x)
    cupyops.swap(model)
    assert step(model, x, count=True)[1]["add_norm_lowered"] == 5
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert one.state_dict().keys() == model.state_dict().keys()
        assert vars(one.blocks[0])[sums.NEXT][0] is one.blocks[1].one
        found, called, _ = step(one, x, count=True)
        assert called["add_norm_lowered"] == 5
        same(found, expected)


def test_what_is_left_alone():
    for options in ({"exact": True}, {"skip": nn.LayerNorm}, {"skip": Block}, {"only": nn.Linear}):
        model = Model()
        swapped = cupyops.swap(model, **options)
        found, called, _ = step(model, torch.randn(2, 16), count=True)
        assert not called["add_norm_lowered"], options
        swapped.undo()


@pytest.mark.parametrize("change", [False, True])
def test_text_that_is_not_what_runs(change):
    """A forward whose code is another than that of its text keeps its code."""

    class Other(Base):
        def forward(self, x):
            x = x + self.first(self.one(x)) * 1.5
            return x + self.second(self.two(x))

    if change:
        code = Other.forward.__code__
        Other.forward.__code__ = code.replace(co_consts=tuple(2.5 if one == 1.5 else one for one in code.co_consts))
    swapped = cupyops.swap(Model(Other))
    assert any("residual sums" in one.what for one in swapped.replaced) is not change


def test_a_file_that_has_changed_since_it_was_imported(monkeypatch):
    """Its text says nothing of the model: what it says there is left alone, and nothing fails."""
    monkeypatch.setattr(inspect, "getsourcelines", lambda function: (["def step():\n", "    return 1\n"], 1))

    class Other(Base):
        def forward(self, x):
            x = x + self.first(self.one(x)) * 0.5
            return x + self.second(self.two(x))

    swapped = cupyops.swap(Model(Other))
    assert not any("residual sums" in one.what or "half" in one.what for one in swapped.replaced)
    assert {one.name for one in swapped.replaced} >= {"blocks.0.one", "last", "head"}


def test_tracebacks_name_the_line():
    model = Model()
    cupyops.swap(model)
    with pytest.raises(cupyops.errors.InputError) as error:
        model.blocks[0](torch.randn(2, 17))
    frames = [(entry.frame.code.name, entry.lineno + 1) for entry in error.traceback if str(entry.path) == __file__]
    first = Block.forward.__code__.co_firstlineno
    assert ("forward", first + 1) in frames
