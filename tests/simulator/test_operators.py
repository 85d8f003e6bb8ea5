"""Every instance of every kernel of cuda_src, executed with all checks on, and compared with PyTorch in float64.

The calls are in cases.py: each operator's own samples, forward and backward, and what they leave out. Each kernel runs once
every time; each instance, every layout and order where the operator has changed.
"""

import collections
import copy
import importlib.util
import math
import os
import re
import sys
import threading
from contextlib import contextmanager, suppress

import kept
import pytest
import torch
from contract import DTYPES, Make, first
from processes import run_python
from selection import SEVEN
from simulator import cases
from simulator.cases import CPU, KERNELS, OPERATORS, operator_of

import cupyops
from cupyops._simulate import Simulation
from cupyops.testing import Failure
from cupyops.testing.case import Case

# PyTorch says so once in a process, of a sample of conv2d
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

EXAMPLES = cases.TESTS.parent / "examples"
CONTRACTS = list(dict.fromkeys(contract for found in cases.contracts().values() for contract in found))


@pytest.fixture(autouse=True)
def kept_texts(monkeypatch):
    kept.texts_alone(monkeypatch)


@contextmanager
def simulated(**options):
    """`simulate`, where kernels run, and no operator's reference."""
    with cupyops.simulate(**options), cupyops.trace() as trace:
        yield trace
    assert "reference" not in trace.routes(), str(trace)
    assert {record.route for record in trace.launches()} == {"simulator"}, str(trace)


# --- every instance ---


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_instance(operator, dtype):
    """In one text, of bfloat16 that for sm_90; where ours differs between sm_80 and sm_90, in both.

    A kernel whose dtype does not matter is declared, and tested, for one of them.
    """
    jobs = cases.instances(operator, dtype)
    first, second = ("sm_80", "sm_90") if cases.arch_of(operator, dtype) == "sm_80" else ("sm_90", "sm_80")
    calls = list(cases.calls(operator, dtype))
    declared = {job.name for job in jobs}
    launched = [launched_by(call, first, operator) & declared for call in calls]
    differ = {job.name for job in jobs if cases.differs(job)}
    left = declared - set().union(*launched) | differ
    alone = {job.name for job in jobs if job.arch.endswith("a")}  # what is for one architecture
    again = [(call, names) for call, names in zip(calls, launched) if not names & alone]
    # those that reached such code again, and others as long as some is left
    for call, names in sorted(again, key=lambda one: not one[1] & differ):
        if not (names & differ or left):
            break
        found = launched_by(call, second, operator) & declared
        launched.append(found)
        left -= found
    assert not left
    assert set().union(*launched) == declared


def launched_by(call, arch, operator):
    """The instances of an operator's kernels that a call launches, as all it does in the simulator."""
    torch.manual_seed(0)
    with cupyops.simulate(arch), cupyops.trace() as trace:
        call()
    assert "reference" not in trace.routes(), str(trace)
    by_us = [record for record in trace.launches() if record.kernel != "torch.add"]  # which adds residuals to products
    assert {record.route for record in by_us} <= {"simulator"}, str(trace)
    return {name for record in trace.launches() if base(name := record.kernel) in bases(operator)}


def bases(operator):
    """The names of an operator's kernels, without their template values."""
    return {kernel.base for kernel in KERNELS if operator_of(kernel.source.name) == operator}


def base(name):
    return name.partition("<")[0]


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_kernel_once(operator):
    """By as few calls as reach them all, in one dtype where that will do; which one differs from operator to operator."""
    missing = bases(operator)
    turn = OPERATORS.index(operator) % 3
    for dtype in (*DTYPES[turn:3], *DTYPES[:turn], DTYPES[3]):
        arch = cases.arch_of(operator, dtype)
        for call in few(missing, [(call, would_launch(call, arch)) for call in cases.calls(operator, dtype)]):
            missing = missing - set(map(base, launched_by(call, arch, operator)))
        if not missing:
            return
    assert not missing, "no call launches them"


def few(wanted, calls):
    """Of (call, threads of each kernel that it launches) cheap ones that together launch all that is wanted."""
    reach = [(call, set(threads) & wanted, sum(threads.values())) for call, threads in calls]
    while reach := [one for one in reach if one[1]]:
        call, found, _ = max(reach, key=lambda one: len(one[1]) / one[2])
        yield call
        reach = [(other, names - found, cost) for other, names, cost in reach]


def would_launch(call, arch):
    """How many threads a call launches of each kernel. None runs: what is computed then is wrong, and is not looked at."""
    threads = collections.Counter()

    def launch(simulation, specialised, device, configuration, args):
        threads[base(specialised.name)] += math.prod((*configuration.grid, *configuration.block))

    def judge(*args, **options):
        raise Failure("nothing was computed")

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, cupyops.simulate(arch), suppress(Exception):
        patch.setattr(Simulation, "__call__", launch)
        patch.setattr(Case, "judge", judge)
        call()
    return threads


def test_no_instance_is_left_out():
    """The tests above are of every kernel and every value of its template, each once."""
    tested = [(job.source.name, job.name) for of in OPERATORS for dtype in DTYPES for job in cases.instances(of, dtype)]
    declared = {(k.source.name, name) for k in KERNELS for name in k.instances()}
    assert len(tested) == len(declared) and set(tested) == declared


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_some_text_differs_between_architectures(dtype):
    differs = any(cases.differs(job) for job in cases.instances("softmax", dtype))
    assert differs == (dtype != torch.float64)  # whose only form asks nothing of the architecture
    assert not any(cases.differs(job) for job in cases.instances("relu", dtype))


# --- layouts, order ---


@pytest.mark.slow(but=SEVEN)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
def test_layouts(contract):
    """Inputs transposed, strided, channels_last, off by one element. In a half type, whose results are rounded once."""
    test = contract()
    with simulated():
        for sample in test.layouts(Make(CPU, torch.float16)):
            test.compare(sample, f"layout {sample!r}", strides=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["expanded", "strided", "misaligned"])
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
def test_grad_layouts(contract, kind):
    test = contract()
    with simulated():
        test.test_grad_layouts(CPU, kind, test.one_dtype())


@pytest.mark.slow
@pytest.mark.parametrize("contract", [one for one in CONTRACTS if one.has_backward], ids=lambda c: c.__name__)
def test_partial_gradients(contract):
    test = contract()
    with simulated():
        test.test_partial_gradients(CPU, test.one_dtype())


@pytest.mark.slow(but=SEVEN)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
def test_the_order_changes_nothing(contract):
    """The same bits whatever the order of blocks, and of diverged threads."""
    test = contract()
    for sample in test.samples(Make(CPU, test.one_dtype())):
        sizes = [t.numel() for t in (*sample.args, *sample.kwargs.values()) if isinstance(t, torch.Tensor)]
        if not 0 < min(sizes) <= max(sizes) < 5000:
            continue
        results = []
        for seed in (None, 1, 2):
            torch.manual_seed(0)
            call = sample.leaves()
            with simulated(seed=seed, check=seed == 1):
                y = first(call.of(test.function))
                grads = torch.autograd.grad(y, call.tensors(), torch.randn_like(y)) if call.tensors() else ()
            results.append((y, *grads))
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], result)), repr(sample)


def test_layouts_are_no_more_than_views():
    """What lies before, between and behind a view's elements is left alone."""
    storage = torch.full((64,), 7.0)
    x, y = storage[1:62:2], torch.empty(0)
    with simulated():
        y = cupyops.add(x, x, alpha=2)
        plain = cupyops.relu(storage[3:40])
        cupyops.relu(storage[1:30], inplace=True)
    assert torch.equal(y, torch.full((31,), 21.0)) and torch.equal(plain, torch.full((37,), 7.0))
    assert torch.equal(storage, torch.full((64,), 7.0))


def test_empty_tensors():
    """Nothing is launched for nothing."""
    x = torch.randn(0, 3, requires_grad=True)
    weight = torch.randn(4, 3, requires_grad=True)
    with cupyops.simulate(), cupyops.trace() as trace:
        cupyops.softmax(cupyops.relu(x), 1).sum().backward()
        cupyops.scale_shift(x, weight[0], weight[1])
        assert cupyops.linear(x, weight).shape == (0, 4)
    assert not trace.launches() and x.grad.shape == (0, 3)


# --- training ---


def example(name):
    spec = importlib.util.spec_from_file_location(f"simulated_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_one_step_of_a_network():
    """The example's network on two images, and torch.nn's twin in float32 and float64: loss, gradients, weights after."""
    SimpleCNN = example("mnist_cnn").SimpleCNN
    ours, theirs = SimpleCNN(), SimpleCNN(torch.nn)
    theirs.load_state_dict(ours.state_dict())
    exact = copy.deepcopy(theirs).double()
    images, labels = torch.randn(2, 1, 28, 28), torch.tensor([3, 8])
    losses = []
    with simulated() as trace:
        for model, nll, sgd in [
            (ours, cupyops.nn.NLLLoss(), cupyops.optim.SGD),
            (theirs, torch.nn.NLLLoss(), torch.optim.SGD),
            (exact, torch.nn.NLLLoss(), torch.optim.SGD),
        ]:
            loss = nll(model(images.to(next(model.parameters()).dtype)), labels)
            loss.backward()
            sgd(model.parameters(), lr=0.1, momentum=0.9).step()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1])
    for name, triple in zip(
        ours.state_dict(), zip(ours.parameters(), theirs.parameters(), exact.parameters()), strict=True
    ):
        for a, b, c in (triple, [p.grad for p in triple]):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
            torch.testing.assert_close(a.double(), c, rtol=1e-4, atol=1e-6)
    launched = {record.kernel.partition("<")[0] for record in trace.launches()}
    assert launched >= {
        "conv2d_direct", "conv2d_direct_bwd_weight", "max_pool2d_fwd_bands", "max_pool2d_bwd_bands", "relu_fwd", "relu_bwd",
        "gemm_fwd", "softmax_fwd_tiny_rows", "softmax_bwd_tiny_rows", "nll_loss_fwd", "nll_loss_bwd_rows", "sgd_step",
    }  # fmt: skip


@pytest.mark.parametrize("asked", ["1", "sm_90"])
def test_a_program_that_simulates_throughout(asked):
    """CUPYOPS_SIMULATE, for a program that knows nothing of it, and trains by its own kernels."""
    command = [EXAMPLES / "add_model.py", "--epochs", 50, "--size", 20, "--lr", 0.1, "--trace"]
    environment = os.environ | {"CUPYOPS_SIMULATE": asked, "CUPYOPS_CUBIN_PATH": str(kept.TEXTS), "COLUMNS": "200"}
    done = run_python(*command, env=environment, bare=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first_step = [line for line in done.stdout.splitlines() if "vector_add_fwd<float>" in line and "simulator" in line]
    assert first_step, done.stdout
    losses = [float(loss) for loss in re.findall(r"loss after 50 epochs: (\S+)", done.stdout)]
    assert len(losses) == 1 and losses[0] < 1e-6, done.stdout


def test_backward_in_another_thread():
    x = torch.randn(300, 7, requires_grad=True)
    results = []

    def work():
        y = cupyops.softmax(x, 1)
        results.append((y, *torch.autograd.grad(y.pow(2).sum(), x)))

    with simulated() as trace:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = torch.softmax(x, 1)
    expected = (expected, *torch.autograd.grad(expected.pow(2).sum(), x))
    assert len(results) == 2 and len(trace.launches()) == 4
    for result in results:
        torch.testing.assert_close(result, expected)


# --- PyTorch's own machinery ---


def test_the_compiled_graph_launches():
    torch._dynamo.reset()
    function = torch.compile(lambda x: cupyops.silu(x) + 1, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 3, requires_grad=True)
    with simulated() as trace:
        y = function(x)
        y.sum().backward()
    assert [record.kernel for record in trace.launches()] == ["silu_fwd<float>", "silu_bwd<float>"]
    torch.testing.assert_close(y, torch.nn.functional.silu(x) + 1)


# --- errors ---


def test_bad_arguments_are_told_as_ever():
    with cupyops.simulate(), cupyops.trace() as trace:
        with pytest.raises(cupyops.InputError, match="weight has shape"):
            cupyops.linear(torch.ones(2, 3), torch.ones(4, 5))
        with pytest.raises(cupyops.InputError, match="input is on cpu|weight is on meta"):
            cupyops.linear(torch.ones(2, 3), torch.ones(4, 3, device="meta"))
    assert not trace.launches()


@pytest.mark.parametrize("function", [cupyops.nll_loss, cupyops.cross_entropy])
def test_a_target_out_of_range_stops_the_kernel(function, capsys):
    """On the CPU too then: the kernel prints it and traps."""
    with cupyops.simulate(), pytest.raises(cupyops.SimulatorError, match=r"trap|Trap") as caught:
        function(torch.zeros(2, 3), torch.tensor([0, 5]))
    assert "target[1] is 5, expected ignore_index or a class in [0, 3)" in capsys.readouterr().out
    assert any("cupyops::" in note for note in caught.value.__notes__)
