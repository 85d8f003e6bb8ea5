"""All of op_db and module_db, not our operators alone, through the backend of torch.compile: compiled is what eager is.

Results, strides, gradients and inputs afterwards of PyTorch's own samples, in float32, bfloat16, int64 and bool; of modules
in the first two, with buffers among the inputs. In the simulator a drawn part, with `--every-sample` all of it (an hour or
more); on a GPU all.
"""

import random
from collections import Counter
from types import SimpleNamespace

import kept
import pytest
import torch
from opdb import modules
from opdb.backends import BACKENDS, drawn
from opdb.graphs import OTHER_LAYOUT, UNWRITTEN, tried
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal.common_modules import module_db

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SIMULATOR, GPU = (next(b for b in BACKENDS if b.name == name) for name in ("simulator", "gpu"))
MOST = 24  # samples of an entry on a GPU; of the simulator's drawn part one
DRAWN = 24  # entries of a dtype
CPU_LAYOUT = "maxunpool", "multilabelmarginloss"  # whose FakeTensors are laid out otherwise than the CPU's results

pytestmark = pytest.mark.filterwarnings("ignore")


def name_of(info):
    return ".".join(filter(None, (info.name, info.variant_test_name)))


def entries(dtype, device):
    """Entries that PyTorch supports in a dtype, and whose results are numbers."""
    supported = [info for info in database.op_db if dtype in info.supported_dtypes(device)]
    return [info for info in supported if not info.name.startswith(UNWRITTEN)]


def module_infos(dtype, device):
    """Entries of module_db: its own list of dtypes has no halves, which PyTorch refuses where it has no kernels."""
    return [info for info in module_db if info.module_cls.__module__.startswith("torch.nn.")]


def samples_of(info, dtype, device):
    """Samples of an entry of op_db: (function, sample)."""
    options = {"requires_grad": dtype in info.supported_backward_dtypes(device.type)}
    return [(info.op, sample) for sample in info.sample_inputs(device, dtype, **options)]


def module_samples_of(info, dtype, device):
    """Samples of an entry of module_db, in training and evaluation: the first argument is the state of the module."""
    found = []
    for training in modules.modes(info):
        for one in modules.samples(info, device, dtype, training):
            given, call = one.constructor_input, one.forward_input
            torch.manual_seed(0)
            module = info.module_cls(*given.args, **given.kwargs).to(device, dtype).train(training)

            def function(state, *args, module=module, **options):
                return torch.func.functional_call(module, state, args, options)

            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            text = f"{one.desc} {given.args} {given.kwargs}, {'training' if training else 'evaluation'}"
            shown = dict(input=state, args=call.args, kwargs=call.kwargs, summary=lambda text=text: text)
            found.append((function, SimpleNamespace(**shown)))
    return found


KINDS = {  # argument of a test: (dtypes, entries in a dtype and on a device, name of an entry)
    "info": (DTYPES, entries, name_of),
    "module": (DTYPES[:2], module_infos, lambda info: info.module_cls.__name__),
}


def pytest_generate_tests(metafunc):
    kind = next(kind for kind in KINDS if kind in metafunc.fixturenames)
    dtypes, listed, name = KINDS[kind]
    every, cases = metafunc.config.option.every_sample, []
    for backend, marks in ((SIMULATOR, []), (GPU, [pytest.mark.gpu])):
        if backend is GPU and not torch.cuda.is_available():
            continue
        for dtype in dtypes:
            found = listed(dtype, backend.device.type)
            if backend is SIMULATOR and not every:
                found = random.Random(0).sample(found, DRAWN)
            most = 1 if backend is SIMULATOR and not every else MOST
            cases += [
                pytest.param(
                    info, dtype, backend, most, marks=marks, id=f"{name(info)}-{str(dtype)[6:]}-{backend.name}"
                )
                for info in found
            ]
    metafunc.parametrize(f"{kind},dtype,backend,most", cases)


@pytest.fixture
def strict(monkeypatch):
    """A failure of the backend is an error; kernels of the simulator are compiled once for all tests."""
    if not torch.cuda.is_available():
        kept.texts_alone(monkeypatch)
    monkeypatch.setenv("CUPYOPS_STRICT", "1")
    monkeypatch.setattr(database, "wrapper_set_seed", lambda op, *args, **options: op(*args, **options))  # not traced


def judge(name, samples, backend, most, record_property):
    """Raise with every sample that is not as eager; the outcomes."""
    outcomes, errors = Counter(), []
    samples, _ = drawn(samples, most)
    for function, sample in samples:
        try:
            outcomes[tried(function, sample, backend)] += 1
        except AssertionError as error:
            error.add_note(f"{name}({sample.summary()})")
            errors.append(error)
    record_property("compiled samples", {**outcomes, "wrong": len(errors)})
    plain = name.removeprefix("nn.functional.").replace("_", "").lower()
    assert not outcomes[OTHER_LAYOUT] or plain.startswith(CPU_LAYOUT)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(samples)}", errors)


def test_samples(info, dtype, backend, most, strict, record_property):
    judge(name_of(info), samples_of(info, dtype, backend.device), backend, most, record_property)


def test_modules(module, dtype, backend, most, strict, record_property):
    name = module.module_cls.__name__
    judge(name, module_samples_of(module, dtype, backend.device), backend, most, record_property)
