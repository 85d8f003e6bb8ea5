"""What cupyops.swap joins with a batch normalisation: relu, and a residual before it; and where it leaves them apart."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyops


class Block(nn.Module):
    """As torchvision's ResNets have them."""

    def __init__(self, down=False):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.downsample = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)) if down else None

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class WithIdentities(Block):
    """As timm's: what is left out is an Identity, and the sum is in place of the result."""

    def __init__(self):
        super().__init__()
        self.drop, self.act1, self.act2 = nn.Identity(), nn.ReLU(inplace=True), nn.ReLU(inplace=True)

    def forward(self, x):
        shortcut = x
        x = self.act1(self.drop(self.bn1(self.conv1(x))))
        x = self.drop(self.bn2(self.conv2(x)))
        x = x + shortcut
        return self.act2(x)


class ByFunctions(Block):
    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return torch.relu(x + self.bn2(self.conv2(out)))


class PreActivated(Block):
    """The normalisation comes first; the sum has no relu."""

    def forward(self, x):
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return out + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.layers = nn.Sequential(Block(), Block(down=True))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


class InPlaceOfTheResidual(Block):
    """The residual itself is changed."""

    def forward(self, x):
        twice = 2 * x
        twice += self.bn2(self.conv2(x))
        return self.relu(twice)


class UsedTwice(Block):
    def forward(self, x):
        y = self.bn1(self.conv1(x))
        return self.relu(y) + y


class ChangedBetween(Block):
    """The input of the normalisation, read by another, is changed in place before the sum."""

    def forward(self, x):
        x = 2 * x
        y = self.bn1(x)
        identity = self.relu(x)
        return F.relu(y + identity)


class AnotherInTraining(Block):
    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return 2 * y if self.training else y


class WithoutGradient(Block):
    def forward(self, x):
        with torch.no_grad():
            x = self.conv1(x)
        return self.relu(self.bn1(x))


class Remembers(Block):
    def forward(self, x):
        self.last = self.relu(self.bn1(self.conv1(x)))
        return self.last


class Doubled(Block):
    """The sum of the result with itself is none with a residual."""

    def forward(self, x):
        y = self.bn1(self.conv1(x))
        return self.relu(y + y)


def image(channels=8, size=6):
    return torch.randn(3, channels, size, size)


def joined(model, x):
    """The operators of a call, of which some are one for several modules."""
    with cupyops.trace() as trace:
        copy.deepcopy(model)(x)
    return [r.operator.removeprefix("cupyops::") for r in trace.records if "batch_norm" in r.operator]


def assert_alike(ours, theirs, x, rtol=1e-4):
    """Results, gradients of everything, statistics; in training and not."""
    for training in (True, True, False):
        found = []
        for model in (ours, theirs):
            model.train(training)
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            torch.manual_seed(1)
            (y * torch.randn_like(y)).sum().backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            found.append((y.detach(), leaf.grad, *grads, *(b.clone() for b in model.buffers())))
        torch.testing.assert_close(*found, rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("make", [Block, lambda: Block(down=True), WithIdentities, ByFunctions, PreActivated, Net])
def test_joined(make):
    torch.manual_seed(0)
    theirs = make()
    ours, x = copy.deepcopy(theirs), image(3 if make is Net else 8)
    before = [type(module) for module in ours.modules()]
    report = cupyops.swap(ours)
    assert any("batch_norm_act" in one.what for one in report.replaced), report
    assert joined(ours, x).count("batch_norm_act") == {Net: 5}.get(make, 2)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert_alike(ours, theirs, x)
    with cupyops.simulate():
        assert_alike(ours, theirs, x)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), _saved(ours)):
        assert_alike(copied, copy.deepcopy(theirs), x)
    report.undo()
    assert [type(module) for module in ours.modules()] == before
    assert_alike(ours, theirs, x)


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "make",
    [InPlaceOfTheResidual, UsedTwice, AnotherInTraining, WithoutGradient, Remembers, Doubled],
    ids=lambda make: make.__name__,
)
def test_left_apart(make):
    torch.manual_seed(0)
    theirs = make()
    ours, x = copy.deepcopy(theirs), image()
    cupyops.swap(ours)
    assert "batch_norm_act" not in joined(ours, x)
    assert_alike(ours, theirs, x)


def test_input_that_is_changed_before_the_sum():
    """With a gradient PyTorch refuses it."""
    torch.manual_seed(0)
    theirs = ChangedBetween()
    ours, x = copy.deepcopy(theirs), image()
    cupyops.swap(ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


def test_exact_joins_nothing():
    model = Net()
    report = cupyops.swap(model, exact=True)
    assert not any("batch_norm_act" in one.what for one in report.replaced)
    assert "batch_norm_act" not in joined(model, image(3))


@pytest.mark.parametrize("skip", ["bn2", "relu", nn.BatchNorm2d])
def test_what_is_skipped_is_called(skip):
    """By its own class; where it is one of those joined, the others are called one by one."""
    torch.manual_seed(0)
    theirs = Block()
    ours, x = copy.deepcopy(theirs), image()
    cupyops.swap(ours, skip=skip)
    assert joined(ours, x).count("batch_norm_act") == (1 if skip == "bn2" else 0)
    assert_alike(ours, theirs, x)


@pytest.mark.parametrize("name", ["bn1", "relu"])
@pytest.mark.parametrize(
    "make", [Block, lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())], ids=["block", "sequence"]
)
def test_hooks_are_heard(name, make):
    """Those that are there before the swap, and those that come after it."""
    model, x = make(), image()
    heard = []
    name = {"bn1": "0", "relu": "1"}[name] if isinstance(model, nn.Sequential) else name
    cupyops.swap(model)
    handle = model.get_submodule(name).register_forward_hook(lambda module, given, y: heard.append(y.min().item()))
    model(x)
    assert heard and (min(heard) < 0) == (name in ("bn1", "0"))
    handle.remove()
    assert "batch_norm_act" in joined(model, x)


def test_a_module_that_is_put_in_its_place_is_called():
    model, x = Block(), image()
    cupyops.swap(model)
    model.bn1 = nn.Identity()
    model.relu = nn.Sigmoid()
    found = model(x)
    out = torch.sigmoid(model.conv1(x))
    torch.testing.assert_close(found, torch.sigmoid(model.bn2(model.conv2(out)) + x))


def test_what_the_forward_asks_for_may_change():
    """A module that was none, one that is none now: the module's own forward runs."""
    torch.manual_seed(0)
    theirs = Block()
    ours, x = copy.deepcopy(theirs), image()
    cupyops.swap(ours)
    down = nn.Conv2d(8, 8, 1)
    ours.downsample, theirs.downsample = down, copy.deepcopy(down)
    assert_alike(ours, theirs, x)


@pytest.mark.parametrize(
    ("options", "freeze"),
    [({"momentum": None}, False), ({"track_running_stats": False}, False), ({"affine": False}, False), ({}, True)],
    ids=str,
)
def test_options_of_the_normalisation(options, freeze):
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, **options), nn.ReLU(inplace=True))
    if freeze:  # as in fine-tuning: the statistics stay, the rest is trained
        theirs.train = lambda mode=True: theirs
        theirs[1].eval()
    ours, x = copy.deepcopy(theirs), image()
    if freeze:
        ours.train = lambda mode=True: ours
    cupyops.swap(ours)
    assert any("batch_norm_act" in name for name in joined(ours, x))
    assert_alike(ours, theirs, x)


def test_a_shared_relu_and_a_shared_normalisation():
    torch.manual_seed(0)
    act, norm = nn.ReLU(inplace=True), nn.BatchNorm2d(8)
    theirs = nn.Sequential(norm, act, nn.Conv2d(8, 8, 1), norm, act)
    ours, x = copy.deepcopy(theirs), image()
    cupyops.swap(ours)
    assert joined(ours, x).count("batch_norm_act") == 2
    assert_alike(ours, theirs, x)


def test_the_synchronised_is_left_alone():
    model = nn.Sequential(nn.SyncBatchNorm(8), nn.ReLU())
    cupyops.swap(model)
    assert type(model[0]) is nn.SyncBatchNorm and type(model) is nn.Sequential


def test_sequences_of_other_dimensions_and_other_classes():
    class Layer(nn.Sequential):
        pass

    for sequence in (
        Layer(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
        nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.ReLU()),
    ):
        ours, x = copy.deepcopy(sequence), torch.randn(6, 8)
        cupyops.swap(ours)
        assert joined(ours, x).count("batch_norm_act") == 1 and isinstance(ours, type(sequence))
        assert_alike(ours, sequence, x)
        assert len(ours[:2]) == 2


def test_residual_of_another_dtype():
    """As under autocast, where only some modules lower the dtype: one after the other."""
    torch.manual_seed(0)
    theirs = Block()
    ours, x = copy.deepcopy(theirs), image()
    cupyops.swap(ours)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ours(x), theirs(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-2)


def test_compiled_and_recorded():
    torch.manual_seed(0)
    theirs = Net()
    ours, x = copy.deepcopy(theirs), image(3)
    cupyops.swap(ours)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_alike(compiled, theirs, x)
    graph = torch.fx.symbolic_trace(ours)
    torch.testing.assert_close(graph(x), theirs(x))


def test_double_precision():
    torch.manual_seed(0)
    theirs = Net().double()
    ours, x = copy.deepcopy(theirs), image(3).double()
    cupyops.swap(ours)
    assert_alike(ours, theirs, x)
