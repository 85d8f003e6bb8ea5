"""Floating-point numbers that become integers: one meaning in the reference, in the simulator and on a GPU."""

import math

import pytest
import torch

import cupyops

WHOLE = {"uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int": torch.int32, "long long": torch.int64}
PLAIN = [-2.5, -20, 300, 0, -0.0, 1.999, -129, 255, 256, 32768, 65535, -1e6, 2.0**31 - 256, -(2.0**31)]
FAR = [2.0**31, 3e9, -3e9, 2.0**40, -1e19, 1e30, math.inf, -math.inf]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def on(backend, function, *args):
    if backend == "reference":
        return function(*args)
    if backend == "gpu":
        return function(*(one.cuda() for one in args)).cpu()
    with cupyops.simulate():
        return function(*args)


BACKENDS = ["reference", "simulator", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ctype", WHOLE)
def test_what_fits_an_int_is_as_in_pytorch(backend, ctype):
    """Cut towards zero; narrower types have the low bits."""
    convert = cupyops.elementwise(f"plain_{ctype.replace(' ', '_')}(T x) -> {ctype} y", "y = x")
    for dtype in DTYPES:
        x = torch.tensor(PLAIN).to(dtype)
        x = torch.where(x.abs() < 2**31, x, 0)  # half types round up
        assert on(backend, convert, x).tolist() == x.double().to(torch.int64).to(WHOLE[ctype]).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_numbers_themselves(backend):
    convert = cupyops.elementwise("numbers_of_it(T x) -> uint8 y", "y = x")
    assert on(backend, convert, torch.tensor([-2.5, -20.0, 300.0])).tolist() == [254, 236, 44]


def exact(number, bits):
    """The nearest integer of so many bits."""
    if math.isinf(number):
        return (1 << bits - 1) - 1 if number > 0 else -(1 << bits - 1)
    return max(-(1 << bits - 1), min((1 << bits - 1) - 1, int(number)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ctype", WHOLE)
@pytest.mark.parametrize("body", ["y = x", "{ctype} z = x; y = z", "y = ({ctype})x"])
def test_what_does_not_fit_becomes_the_nearest(backend, ctype, body):
    """Of which narrower types have the low bits again."""
    spelled = {"uint8": "int", "int8": "int", "int16": "int"}.get(ctype, ctype)
    name = f"far_{ctype.replace(' ', '_')}_{len(body)}"
    convert = cupyops.elementwise(f"{name}(T x) -> {ctype} y", body.format(ctype=spelled))
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(FAR, dtype=dtype)
        wide = [exact(number, 64 if ctype == "long long" else 32) for number in x.tolist()]
        assert on(backend, convert, x).tolist() == torch.tensor(wide).to(WHOLE[ctype]).tolist()


@pytest.mark.parametrize("ctype", WHOLE)
def test_nan_is_the_same_everywhere(ctype):
    convert = cupyops.elementwise(f"nan_{ctype.replace(' ', '_')}(T x) -> {ctype} y", "y = x")
    for dtype in DTYPES:
        x = torch.tensor([math.nan, 1.0], dtype=dtype)
        assert on("reference", convert, x).tolist() == on("simulator", convert, x).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bool_is_what_is_not_zero(backend):
    convert = cupyops.elementwise("truth_of(T x) -> bool y", "y = x")
    assert on(backend, convert, torch.tensor([0.0, -0.0, 0.3, math.nan, -1e30])).tolist() == [
        False, False, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_read_again_is_not_narrowed_before_it_is_stored(backend):
    op = cupyops.elementwise("read_again(T x) -> uint8 y, int z", "y = x; z = y + 1")
    with cupyops.simulate() if backend == "simulator" else cupyops.plans():
        y, z = op(torch.tensor([300.0]).cuda() if backend == "gpu" else torch.tensor([300.0]))
    assert (y.item(), z.item()) == (44, 301)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ctype", WHOLE)
def test_reductions(backend, ctype):
    total = cupyops.reduction(
        f"total_{ctype.replace(' ', '_')}(T x) -> {ctype} y", map="x", reduce="a + b", identity="0"
    )
    for numbers in ([-2.0, -0.5], [200.0, 100.5], [3e9, 0.0], [-1e30, 0.0]):
        wide = exact(math.fsum(numbers), 64 if ctype == "long long" else 32)
        assert on(backend, total, torch.tensor(numbers)).item() == torch.tensor(wide).to(WHOLE[ctype]).item()
    big = torch.full((3, 5000), 0.125)
    assert on(backend, lambda x: total(x, 1), big).tolist() == [torch.tensor(625).to(WHOLE[ctype]).item()] * 3


def test_literals():
    op = cupyops.elementwise(
        "literal_conversions(T x) -> int y, uint8 z, int w", "y = 3e9; z = -2.5; w = INFINITY; y += 0 * x"
    )
    assert [one.item() for one in op(torch.zeros(1))] == [2**31 - 1, 254, 2**31 - 1]
