"""Turns at the launches on a type of device: who has them, and who gets them back."""

import itertools

import pytest

from cupyops._kernel.launch.executors import Turn, executors


def runs(*args):
    """An executor."""


@pytest.fixture(params=[False, True], ids=["nothing before", "one before"])
def before(request):
    """What `executors` holds for "cpu", if anything."""
    if request.param:
        executors["cpu"] = runs
    yield dict(executors)
    executors.pop("cpu", None)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_turns_end_in_any_order(before, order):
    """The launches are with the one that began last among those under way, and in the end with whom they were at first."""
    own = [lambda *args: None for _ in range(3)]
    turns = [Turn("cpu", one) for one in own]
    left = set(range(3))
    for number in order:
        assert executors["cpu"] is own[max(left)]
        turns[number].end()
        left.remove(number)
    assert executors == before


def test_types_of_device_have_turns_of_their_own(before):
    first, other = Turn("cpu", runs), Turn("xpu", runs)
    first.end()
    assert executors == before | {"xpu": runs}
    other.end()
    assert executors == before
