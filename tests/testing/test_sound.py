"""Sound operators fail no hazard of any family."""

import pytest
from broken_operators import SOUND, SOUND_CALLS, assert_sound
from selection import slow

from cupyops.testing import check

FAMILIES = [
    "arguments", "derivatives", "devices", "gradients", "layouts", "memory", "values", *slow("compilers", "modes", "sizes"),
]  # fmt: skip


@pytest.mark.parametrize("name, backend", SOUND_CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sound(name, backend, family):
    assert_sound(name, backend, family)


@pytest.mark.parametrize("name, backend", SOUND_CALLS)
def test_launches(name, backend):
    """Without kernels there is no launch to try."""
    if backend == "simulator":
        return assert_sound(name, backend, "launches")
    function, reference, args = SOUND[name]
    names = ["side_stream", "backward_stream", "cuda_graph", "cuda_graph_first_call", "launch_error"]
    report = check(function, args(), reference=reference, only=names, backends="reference")
    assert {row.verdict for row in report.rows} == {"n/a"}, f"\n{report}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("family", ["devices", "launches", "memory"])
def test_sound_on_the_gpu(name, family):
    assert_sound(name, "gpu", family)
