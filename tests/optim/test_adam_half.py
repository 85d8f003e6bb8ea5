"""Adam and AdamW of half types: fp32 master weights and stochastic rounding, against PyTorch in fp32 and in float64."""

import contextlib
import copy
import math
import pickle

import pytest
import torch
from optim.contract import LAYOUTS, kernels, parameters, set_grads
from torch import nn

import cupyops
from cupyops._dispatch import multi_tensor
from cupyops.optim import half

HALF = (torch.float16, torch.bfloat16)
SHAPES = [(5,), (3, 7), (1031,), (4100,), (), (0,), (2, 3, 4, 5)]
OPTIONS = [
    {"lr": 0.01},
    {"lr": 0.01, "weight_decay": 0.1, "maximize": True, "betas": (0.8, 0.95)},
    {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "fused": True},
]
MASTER, STOCHASTIC = {"master_weights": True}, {"stochastic_rounding": True}


@pytest.fixture(params=["kernel", "pytorch"])
def way(request):
    """By kernels, and where they do not serve."""
    return request.param


def running(way, device):
    return kernels(device) if way == "kernel" else contextlib.nullcontext()


def routes(way, device):
    return {"reference" if way == "pytorch" else "simulator" if device.type == "cpu" else "kernel"}


def options_of(way, options):
    return options if way == "kernel" else {**options, "fused": None, "foreach": True}


def stepped(dtype, device, **options):
    """Two steps of every shape: within a unit of PyTorch's in fp32, and with masters theirs to the last place."""
    ours = parameters(device, dtype, SHAPES)
    theirs = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer = cupyops.optim.AdamW(ours, lr=0.01, **options)
    known = {name: value for name, value in options.items() if name in ("weight_decay", "amsgrad")}
    other = torch.optim.AdamW(theirs, lr=0.01, **known)
    for step in range(2):
        set_grads([ours, theirs], step)
        optimizer.step()
        other.step()
    for p, q in zip(ours, theirs):
        unit = torch.finfo(dtype).eps * q.detach().abs().clamp(min=torch.finfo(dtype).tiny)
        assert ((p.detach().float() - q.detach()).abs() <= (3 * unit + 1e-6)).all()
        if options.get("master_weights"):
            torch.testing.assert_close(optimizer.state[p]["master"], q.detach(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "decay", "amsgrad"])
@pytest.mark.parametrize("cls", ["Adam", "AdamW"])
def test_master_is_pytorch_in_fp32(device, way, cls, options):
    """Step by step: master and moments those of fp32 parameters, and the parameters theirs, rounded."""
    for dtype in HALF:
        ours = parameters(device, dtype, SHAPES)
        theirs = [nn.Parameter(p.detach().float()) for p in ours]
        optimizer = getattr(cupyops.optim, cls)(ours, **options_of(way, options), **MASTER)
        # PyTorch's fused kernel takes 1 - beta2 of a beta2 in fp32, an error of 1e-5 in what its other ways have exactly
        other = getattr(torch.optim, cls)(theirs, **{**options, "fused": False})
        with running(way, device):
            for step in range(5):
                set_grads([ours, theirs], step)
                with cupyops.trace() as trace:
                    optimizer.step()
                other.step()
                assert trace.routes() == routes(way, device), str(trace)
        for p, q in zip(ours, theirs):
            state, known = optimizer.state[p], other.state[q]
            torch.testing.assert_close(state["master"], q.detach(), rtol=2e-6, atol=2e-7)
            assert torch.equal(p, state["master"].to(dtype))
            for name in known:
                known_here = known[name].to(state[name].device)
                torch.testing.assert_close(state[name], known_here, rtol=2e-6, atol=1e-7, msg=name)
            assert state.keys() == {*known, "master"} and state["master"].stride() == p.stride()


@pytest.mark.parametrize("more", [MASTER, STOCHASTIC], ids=["master", "stochastic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, more):
    """Dense ones by the kernel; what has gaps, and a gradient that lies otherwise, by PyTorch: the same numbers."""
    shapes, found = [(3, 4, 5, 6), (2, 9, 13, 5)], []
    for way in ("kernel", "pytorch"):
        params = [nn.Parameter(LAYOUTS[layout](p)) for p in parameters(device, torch.bfloat16, shapes)]
        optimizer = cupyops.optim.AdamW(params, **options_of(way, {"lr": 0.01}), **more)
        with running(way, device):
            for step in range(2):
                set_grads([params], step)
                with cupyops.trace() as trace:
                    optimizer.step()
        if layout != "every other":
            assert trace.routes() == routes(way, device), str(trace)
        found.append([*map(torch.clone, params)])
    for one, other in zip(*found):
        # the bits are the same, but fp32 before them may differ in its last place
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=1e-6)
        assert (one != other).float().mean() < 0.01


def test_an_update_that_bf16_loses(device, way):
    """Half a unit in the last place and less, a hundred times."""
    with running(way, device):
        ends = {}
        for name, more in (("plain", {}), ("master", MASTER), ("stochastic", STOCHASTIC)):
            p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=device))
            optimizer = cupyops.optim.Adam([p], lr=1e-3, betas=(0.0, 0.0), eps=0.0, **options_of(way, {}), **more)
            for _ in range(20):
                p.grad = torch.full_like(p, -1.0)  # of which a step is lr, where a unit is 0.0078
                optimizer.step()
            ends[name] = p.detach().float().mean().item()
    assert ends["plain"] == 1
    assert ends["master"] == torch.tensor(1.02).bfloat16().item()
    deviation = math.sqrt(20 * 0.0078 * 1e-3 / 4096)
    assert abs(ends["stochastic"] - 1.02) < 4 * deviation


def test_stochastic_rounding_is_unbiased(device, way):
    """Of parameter and moments, over many elements of one value: the mean is that of fp32, and only neighbours appear."""
    n = 2**15
    p = nn.Parameter(torch.full((n,), 1.0, dtype=torch.bfloat16, device=device))
    exact = nn.Parameter(p.detach().double())
    optimizer = cupyops.optim.AdamW([p], lr=0.3, betas=(0.9, 0.99), **options_of(way, {}), **STOCHASTIC)
    other = torch.optim.AdamW([exact], lr=0.3, betas=(0.9, 0.99))
    p.grad, exact.grad = torch.full_like(p, 0.7), torch.full_like(exact, torch.tensor(0.7).bfloat16().item())
    with running(way, device):
        optimizer.step()
    other.step()
    pairs = [(p.detach(), exact.detach()), *((optimizer.state[p][k], other.state[exact][k]) for k in half.FLOATS[:2])]
    for found, known in pairs:
        value, unit = known[0].item(), 2.0 ** (math.floor(math.log2(abs(known[0].item()))) - 7)
        down = math.floor(value / unit) * unit
        assert set(found.unique().tolist()) == {down, down + unit}
        share = (value - down) / unit
        assert 0.02 < share < 0.98, "a value that says nothing"
        up = (found == down + unit).double().mean().item()
        assert abs(up - share) < 4 * math.sqrt(share * (1 - share) / n)
    ups = torch.stack([found == found.max() for found, _ in pairs]).double()
    independent = torch.corrcoef(ups).abs() - torch.eye(3, device=device, dtype=torch.float64)
    assert independent.max() < 4 / math.sqrt(n)
    neighbours = torch.corrcoef(torch.stack((ups[0, :-1], ups[0, 1:])))[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(n)


def steps_of(params, optimizer, steps, device, way="kernel"):
    with running(way, device):
        for step in steps:
            set_grads([params], step)
            optimizer.step()
    return [p.detach().clone() for p in params]


def stochastic(device, **options):
    params = parameters(device, torch.bfloat16, SHAPES)
    return params, cupyops.optim.AdamW(params, lr=0.01, **STOCHASTIC, **options)


def test_the_seed_says_the_bits(device):
    first, again, other = (steps_of(*stochastic(device, seed=seed), range(3), device) for seed in (5, 5, 6))
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    params, _ = stochastic(device)
    whole = nn.Parameter(params[3].detach().clone())
    groups = cupyops.optim.AdamW([{"params": [params[3]]}, {"params": [whole]}], lr=0.01, **STOCHASTIC)
    one, two = steps_of([params[3], whole], groups, range(1), device)
    whole.grad = params[3].grad
    assert not torch.equal(one, two), "groups have numbers of their own"


def test_kernel_and_pytorch_draw_the_same(device):
    """Of numbers that are exact in fp32: a step of lr * sign."""
    found = []
    for way in ("kernel", "pytorch"):
        params = parameters(device, torch.bfloat16, [(37,), (64, 130), (8193,)])
        options = options_of(
            way, {"lr": 2.0**-10, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0, "amsgrad": True}
        )
        optimizer = cupyops.optim.AdamW(params, **options, **STOCHASTIC)
        for p in params:
            p.grad = torch.ones_like(p)
        with running(way, device):
            optimizer.step()
            optimizer.step()
        found.append([p.detach() for p in params])
    # the approximate square root and quotient are of a place of fp32, which a random number seldom falls into
    for one, other in zip(*found):
        assert (one != other).float().mean() < 2e-3


@pytest.mark.parametrize("more", [MASTER, STOCHASTIC], ids=["master", "stochastic"])
@pytest.mark.parametrize("duplicate", ["state_dict", "deepcopy", "pickle"])
def test_goes_on_bit_by_bit(device, more, duplicate):
    """With the state in its own dtype, which PyTorch's load_state_dict would make the parameter's."""
    params = parameters(device, torch.bfloat16, SHAPES)
    optimizer = cupyops.optim.AdamW(params, lr=0.01, **more)
    steps_of(params, optimizer, range(2), device)
    if duplicate == "state_dict":
        others = [nn.Parameter(p.detach().clone()) for p in params]
        other = cupyops.optim.AdamW(others, lr=1.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        make = copy.deepcopy if duplicate == "deepcopy" else lambda one: pickle.loads(pickle.dumps(one))
        other = make(optimizer)
        others = other.param_groups[0]["params"]
    assert all(other.state[q].keys() == optimizer.state[p].keys() for p, q in zip(params, others))
    whole, rest = steps_of(params, optimizer, range(2, 5), device), steps_of(others, other, range(2, 5), device)
    assert all(map(torch.equal, whole, rest))
    for p, q in zip(params, others):
        for name, value in optimizer.state[p].items():
            assert value.dtype is other.state[q][name].dtype and torch.equal(value, other.state[q][name]), name


def test_from_a_state_without_master_and_to_one(device):
    params = parameters(device, torch.bfloat16, SHAPES)
    plain = torch.optim.AdamW(params, lr=0.01)
    set_grads([params], 0)
    plain.step()
    optimizer = cupyops.optim.AdamW(params, lr=0.01, **MASTER)
    optimizer.load_state_dict(plain.state_dict())
    for p in params:
        assert torch.equal(optimizer.state[p]["master"], p.detach().float())
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32
    steps_of(params, optimizer, range(1, 3), device)
    back = torch.optim.AdamW(params, lr=0.01)
    back.load_state_dict(optimizer.state_dict())
    set_grads([params], 3)
    back.step()
    assert all(p.isfinite().all() for p in params)


def test_a_parameter_that_is_changed_is_noticed(device, way):
    """As by a checkpoint that is loaded after the first step."""
    params = parameters(device, torch.float16, [(33,), (8,)])
    optimizer = cupyops.optim.AdamW(params, lr=0.0, weight_decay=0.0, **options_of(way, {}), **MASTER)
    steps_of(params, optimizer, range(1), device, way)
    with torch.no_grad():
        params[0][3:7] = 2.5
        params[1].copy_(torch.arange(8.0))
    expected = [p.detach().clone() for p in params]
    after = steps_of(params, optimizer, range(1, 2), device, way)
    assert all(map(torch.equal, after, expected))
    assert all(torch.equal(optimizer.state[p]["master"], p.detach().float()) for p in params)


@pytest.mark.parametrize("more", [MASTER, STOCHASTIC], ids=["master", "stochastic"])
def test_grad_scaler(device, way, more):
    """A step that is skipped changes nothing and counts nothing; gradients are unscaled in place."""
    dtype = torch.bfloat16
    params, twins = (parameters(device, dtype, [(5,), (4100,)]) for _ in range(2))
    optimizer = cupyops.optim.AdamW(params, lr=0.01, fused=True, **more)
    other = cupyops.optim.AdamW(twins, lr=0.01, fused=True, **more)
    with running(way, device):
        for step, infinite in enumerate((0.0, 1.0, 0.0)):
            set_grads([params, twins], step)
            expected = [p.grad.clone() for p in params]
            for p in params:
                p.grad.mul_(1024.0)
            optimizer.grad_scale = torch.full((), 1024.0, device=device)
            optimizer.found_inf = torch.full((), infinite, device=device)
            optimizer.step()
            if not infinite:
                other.step()
                assert all(torch.equal(p.grad, known) for p, known in zip(params, expected))
            assert all(map(torch.equal, params, twins))
    assert [optimizer.state[p]["step"].item() for p in params] == [2.0, 2.0]


@pytest.mark.parametrize("more", [MASTER, STOCHASTIC], ids=["master", "stochastic"])
def test_what_is_not_half_is_as_ever(device, more):
    """And beside half types, in one group."""
    ours, theirs = ([*parameters(device, torch.float32), *parameters(device, torch.float64)] for _ in range(2))
    halves = parameters(device, torch.bfloat16, SHAPES)
    optimizer = cupyops.optim.AdamW([*ours, *halves], lr=0.1, **more)
    other = torch.optim.AdamW(theirs, lr=0.1)
    with running("kernel", device):
        for step in range(4):
            set_grads([ours, theirs], step)
            set_grads([halves], step)
            with cupyops.trace() as trace:
                optimizer.step()
            other.step()
        assert trace.routes() == routes("kernel", device)
    torch.testing.assert_close(ours, theirs)
    assert all("master" not in optimizer.state[p] for p in ours)


def test_more_tensors_than_a_launch_names(device):
    """A tensor has numbers of its own in the second launch too, and gradients that move."""
    shapes = [(1 + index % 5,) for index in range(multi_tensor.capacity(6) + 9)]
    for more in (MASTER, STOCHASTIC):
        found = []
        for way in ("kernel", "pytorch"):
            params = parameters(device, torch.bfloat16, shapes)
            optimizer = cupyops.optim.AdamW(params, **options_of(way, {"lr": 0.01}), **more)
            found.append(steps_of(params, optimizer, range(3), device, way))
        different = sum(int((a != b).sum()) for a, b in zip(*found))
        assert different <= 2, different


def test_infinite_and_nan(device, way):
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3e38, -3e38], device=device)
    for more in (MASTER, STOCHASTIC):
        p = nn.Parameter(values.bfloat16())
        p.grad = torch.zeros_like(p)
        optimizer = cupyops.optim.AdamW([p], lr=0.1, weight_decay=0.0, **options_of(way, {}), **more)
        with running(way, device):
            optimizer.step()
        torch.testing.assert_close(p.detach(), values.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "dtype", "words"),
    [
        ({**MASTER, **STOCHASTIC}, torch.bfloat16, "stochastic_rounding is True .* nothing is lost"),
        (STOCHASTIC, torch.float16, "a parameter is a tensor of shape .*, torch.float16 .* master_weights=True serves"),
        ({**MASTER, "differentiable": True}, torch.bfloat16, "differentiable is True"),
        ({**STOCHASTIC, "seed": -1}, torch.bfloat16, "seed is -1"),
        ({**STOCHASTIC, "seed": 0.5}, torch.bfloat16, "seed is 0.5"),
    ],
)
def test_errors(options, dtype, words):
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    for cls in (cupyops.optim.Adam, cupyops.optim.AdamW):
        with pytest.raises(cupyops.InputError, match=words):
            cls([p], **options)
        with pytest.raises(cupyops.InputError, match=words):
            cls([{"params": [nn.Parameter(torch.ones(1))]}], **{**options, "seed": 0}).add_param_group(
                {"params": [p], **options}
            )


def test_a_group_may_have_its_own(device):
    p, q = parameters(device, torch.bfloat16, [(9,), (9,)])
    optimizer = cupyops.optim.AdamW([{"params": [p], **MASTER}, {"params": [q]}], lr=0.1)
    steps_of([p, q], optimizer, range(3), device)
    assert "master" in optimizer.state[p] and "master" not in optimizer.state[q]


def test_masters_that_are_asked_for_later(device):
    """The master begins as the parameter, and the moments go on."""
    params = parameters(device, torch.bfloat16, SHAPES)
    optimizer = cupyops.optim.AdamW(params, lr=0.1)
    steps_of(params, optimizer, range(3), device)
    moments = [optimizer.state[p]["exp_avg"].clone() for p in params]
    optimizer.param_groups[0].update(MASTER, lr=0.0)
    steps_of(params, optimizer, range(3, 6), device)
    for p, moment in zip(params, moments):
        assert torch.equal(optimizer.state[p]["master"], p.detach().float())
        assert p.numel() < 2 or not torch.equal(optimizer.state[p]["exp_avg"], moment.float())


def test_an_optimizer_of_before_there_were_these_options(device):
    """Unpickled."""
    params = parameters(device, torch.float32)
    optimizer = cupyops.optim.AdamW(params, lr=0.1)
    old = optimizer.__getstate__()
    for options in (old["defaults"], *old["param_groups"]):
        for name in half.OPTIONS:
            del options[name]
    again = cupyops.optim.AdamW.__new__(cupyops.optim.AdamW)
    again.__setstate__(old)
    (more,) = parameters(device, torch.bfloat16, [(3,)])
    again.add_param_group({"params": [more]})
    set_grads([[*params, more]], 0)
    with running("kernel", device):
        again.step()
    assert again.param_groups[1]["master_weights"] is False


@pytest.mark.parametrize("more", [MASTER, STOCHASTIC], ids=["master", "stochastic"])
def test_counted_on_the_device(device, more):
    """`capturable`, where the kernel reads the steps: as where the host counts them."""
    found = []
    for options in ({}, {"capturable" if device.type == "cuda" else "fused": True}):
        params = parameters(device, torch.bfloat16, SHAPES)
        found.append(steps_of(params, cupyops.optim.AdamW(params, lr=0.01, **options, **more), range(4), device))
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.parametrize("more", [MASTER, STOCHASTIC], ids=["master", "stochastic"])
def test_cuda_graph(more):
    """Replays go on as steps do: other bits each time."""
    lists = [parameters("cuda", torch.bfloat16, SHAPES) for _ in range(2)]
    optimizers = [cupyops.optim.AdamW(params, lr=0.01, capturable=True, **more) for params in lists]
    set_grads(lists, 0)
    for optimizer in optimizers:
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for _ in range(3):
        graph.replay()
        optimizers[1].step()
        assert all(map(torch.equal, *lists))


@pytest.mark.gpu
@pytest.mark.parametrize("more", [MASTER, STOCHASTIC], ids=["master", "stochastic"])
def test_large(more):
    """A chunk of many, and its rest."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(2**24 + 5, device="cuda").bfloat16())
    exact = nn.Parameter(p.detach().float())
    optimizer, other = cupyops.optim.AdamW([p], lr=0.01, **more), torch.optim.AdamW([exact], lr=0.01)
    for _ in range(3):
        p.grad = torch.randn(p.shape, device="cuda").bfloat16()
        exact.grad = p.grad.float()
        optimizer.step()
        other.step()
    error = (p.detach().float() - exact.detach()).abs() / exact.detach().abs().clamp(min=0.05)
    assert error.max() < (2**-8 if more is MASTER else 2**-4)
    assert abs((p.detach().double() - exact.detach().double()).mean()) < 6e-6
