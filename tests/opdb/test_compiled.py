"""All of op_db, not our operators alone, through the backend of torch.compile: compiled is what eager is.

Results, strides, gradients and inputs afterwards of PyTorch's own samples, in float32, bfloat16, int64 and bool. In the
simulator a drawn part, with `--every-sample` all of it (an hour or more); on a GPU all.
"""

import random
from collections import Counter

import kept
import pytest
import torch
from opdb.backends import BACKENDS, drawn
from opdb.graphs import OTHER_STRIDES, UNWRITTEN, tried
from torch.testing._internal import common_methods_invocations as database

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SIMULATOR, GPU = (next(b for b in BACKENDS if b.name == name) for name in ("simulator", "gpu"))
MOST = 24  # samples of an entry on a GPU; of the simulator's drawn part one
DRAWN = 24  # entries of a dtype
CPU_STRIDES = ("max_unpool",)  # whose FakeTensor has other strides than the CPU's result

pytestmark = pytest.mark.filterwarnings("ignore")


def name_of(info):
    return ".".join(filter(None, (info.name, info.variant_test_name)))


def entries(dtype, device):
    """Entries that PyTorch supports in a dtype, and whose results are numbers."""
    supported = [info for info in database.op_db if dtype in info.supported_dtypes(device)]
    return [info for info in supported if not info.name.startswith(UNWRITTEN)]


def pytest_generate_tests(metafunc):
    if "info" not in metafunc.fixturenames:
        return
    every, cases = metafunc.config.option.every_sample, []
    for backend, marks in ((SIMULATOR, []), (GPU, [pytest.mark.gpu])):
        if backend is GPU and not torch.cuda.is_available():
            continue
        for dtype in DTYPES:
            found = entries(dtype, backend.device.type)
            if backend is SIMULATOR and not every:
                found = random.Random(0).sample(found, DRAWN)
            most = 1 if backend is SIMULATOR and not every else MOST
            cases += [
                pytest.param(
                    info, dtype, backend, most, marks=marks, id=f"{name_of(info)}-{str(dtype)[6:]}-{backend.name}"
                )
                for info in found
            ]
    metafunc.parametrize("info,dtype,backend,most", cases)


def test_samples(info, dtype, backend, most, monkeypatch, record_property):
    if backend is SIMULATOR:
        kept.texts_alone(monkeypatch)
    monkeypatch.setenv("CUPYOPS_STRICT", "1")
    monkeypatch.setattr(database, "wrapper_set_seed", lambda op, *args, **options: op(*args, **options))  # not traced
    options = {"requires_grad": dtype in info.supported_backward_dtypes(backend.device.type)}
    samples, _ = drawn(list(info.sample_inputs(backend.device, dtype, **options)), most)
    outcomes, errors = Counter(), []
    for sample in samples:
        try:
            outcomes[tried(info.op, sample, backend)] += 1
        except AssertionError as error:
            error.add_note(f"{name_of(info)}({sample.summary()})")
            errors.append(error)
    record_property("compiled samples", {**outcomes, "wrong": len(errors)})
    assert not outcomes[OTHER_STRIDES] or name_of(info).removeprefix("nn.functional.").startswith(CPU_STRIDES)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(samples)}", errors)
