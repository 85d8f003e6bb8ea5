"""Kernels that are compiled beside others: which they are, once each, and what cannot be compiled."""

import pytest
import torch

import cupyops
from cupyops._dispatch.attention import launches as attentions
from cupyops._dispatch.core.ahead import compile_beside
from cupyops._dispatch.core.forms import Launch
from cupyops._dispatch.core.gpu import assume_gpu, gpu

TWICE = 'extern "C" __global__ void twice(float* x) {{ x[threadIdx.x] *= {}; }}'


def test_each_is_compiled_once():
    kernel = cupyops.Kernel(TWICE.format(2), "twice")
    launch = Launch(kernel, 1, 32)
    (thread,) = compile_beside([launch], "sm_80")
    assert compile_beside([launch], "sm_80") == []
    thread.join(60)
    assert not thread.is_alive()
    x = torch.ones(32)
    with cupyops.simulate("sm_80"):
        launch(x)
    assert x.eq(2).all()


def test_what_cannot_be_compiled_is_told_by_its_launch(capsys):
    launch = Launch(cupyops.Kernel(TWICE.format("nothing"), "twice"), 1, 32)
    for thread in compile_beside([launch], "sm_80"):
        thread.join(60)
    assert not capsys.readouterr().err
    with cupyops.simulate("sm_80"), pytest.raises(cupyops.CompileError, match="nothing"):
        launch(torch.ones(32))


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_of_attention_it_is_what_backward_launches(arch, needs, monkeypatch):
    torch.use_deterministic_algorithms(False)
    q, k, v = (torch.randn(1, 2, 513, 64).half().requires_grad_(need) for need in needs)
    problems, forward = [], attentions.FORWARD.launch
    seen = lambda problem, card: problems.append(problem) or forward(problem, card)
    monkeypatch.setattr(attentions.FORWARD, "launch", seen)
    shared = 232448 if arch == "sm_90" else 166912
    with cupyops.simulate(arch), assume_gpu(shared=shared), cupyops.trace() as trace:
        y = cupyops.attention(q, k, v, causal="top_left")
        before = len(trace.launches())
        y.sum().backward()
        card = gpu(q.device)
        ahead = {
            launch.kernel.instance(**launch.template).name
            for launch in attentions._of_backward(problems[0], needs, card)
        }
    launched = {record.kernel for record in trace.launches()[before:]}
    assert launched <= ahead
    assert not [name for name in ahead - launched if all(needs)]
