"""The first form that fits is launched; one may be asked for by name; what is chosen can be listened to."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import cupyops
from cupyops._dispatch.core import forms
from cupyops._dispatch.core.forms import Form, Forms, Launch, use_form
from cupyops._dispatch.core.gpu import assume_gpu, gpu

CPU = torch.device("cpu")
CODE = """
__global__ void put(float* y, int value) { y[threadIdx.x] = value * FACTOR; }
"""
put = cupyops.Kernel(CODE, "put", define={"FACTOR": 10})


class Problem(NamedTuple):
    size: int


class Narrow(Form[Problem]):
    name = "narrow"
    value = 1

    def why_not(self, problem, gpu):
        return f"{problem.size} is more than 32" if problem.size > 32 else None

    def why_slower(self, problem, gpu):
        return "a row has more than 8" if problem.size > 8 else None

    def launch(self, problem, gpu):
        return Launch(put, 1, problem.size)


class Wide(Narrow):
    name = "wide"

    def why_not(self, problem, gpu):
        return None if problem.size * 4 <= gpu.shared else "shared memory is too small"

    def why_slower(self, problem, gpu):
        return None


@pytest.fixture
def lists():
    made = [Forms("toy", "forward", [Narrow(), Wide()]), Forms("toy", "backward", [Wide()])]
    yield made
    for one in made:
        forms._lists.remove(one)


def chosen(one, size):
    return one.choose(Problem(size), gpu(CPU)).name


def test_the_first_form_that_fits(lists):
    forward, _ = lists
    assert [chosen(forward, size) for size in (8, 9, 33)] == ["narrow", "wide", "wide"]


def test_none_fits(lists):
    with (
        assume_gpu(shared=64),
        pytest.raises(
            cupyops.InputError, match="no form fits Problem.size=40.*narrow: 40 is more than 32; wide: shared"
        ),
    ):
        chosen(lists[0], 40)


def test_a_form_that_is_asked_for(lists):
    forward, backward = lists
    with use_form("toy:narrow"):
        assert chosen(forward, 20) == "narrow"  # although slower
        assert chosen(backward, 20) == "wide"  # which has no such form
        with pytest.raises(cupyops.InputError, match="the form narrow was asked for, but 33 is more than 32"):
            chosen(forward, 33)
        with use_form("toy.forward:wide"):
            assert chosen(forward, 2) == "wide"
        assert chosen(forward, 20) == "narrow"
    assert chosen(forward, 20) == "wide"


@pytest.mark.parametrize("name", ["toy:absent", "absent:narrow", "toy.backward:narrow", "narrow"])
def test_a_form_that_there_is_not(lists, name):
    with pytest.raises(cupyops.InputError, match=f"there is no form '{name}'; there are "), use_form(name):
        pass


def test_listeners_hear_why(lists):
    heard = []
    forms.listeners.append(heard.append)
    try:
        chosen(lists[0], 9)
    finally:
        forms.listeners.remove(heard.append)
    (choice,) = heard
    assert choice.chosen.name == "wide"
    assert [(form.name, reason) for form, reason in choice.passed_over] == [("narrow", "a row has more than 8")]


def test_names_differ():
    with pytest.raises(cupyops.InputError, match="narrow, narrow are not all different"):
        Forms("toy", "forward", [Narrow(), Narrow()])


def test_launch_and_define(lists):
    y = torch.zeros(4)
    with cupyops.simulate():
        lists[0].launch(Problem(4), gpu(CPU))(y, 3)
        assert y.tolist() == [30.0] * 4
        Launch(put, 1, 4, args=(5,))(y)  # what the form gives comes last
    assert y.tolist() == [50.0] * 4


def test_a_form_that_many_kernels_have(lists):
    """Its launch is that of whichever kernel is asked for."""
    other = cupyops.Kernel(CODE, "put", define={"FACTOR": 7})
    y = torch.zeros(4)
    with cupyops.simulate():
        lists[0].launch(Problem(4), gpu(CPU)).by(other)(y, 3)
    assert y.tolist() == [21.0] * 4


def test_launches_are_made_once_for_a_problem_and_a_gpu(lists):
    first = lists[0].launch(Problem(4), gpu(CPU))
    assert lists[0].launch(Problem(4), gpu(CPU)) is first
    with assume_gpu(multiprocessors=1):
        assert lists[0].launch(Problem(4), gpu(CPU)) is not first


def test_a_launch_is_made_once_for_each_problem_and_card(lists):
    forward, card = lists[0], gpu(CPU)
    launch = forward.launch(Problem(4), card)
    assert forward.launch(Problem(4), card) is launch
    assert forward.launch(Problem(5), card).block == 5
    with use_form("toy:wide"):
        assert forward.launch(Problem(4), card) is not launch


@pytest.mark.parametrize("define", [{"A B": 1}, {"A": 1.5}, {"A": True}, {1: 1}])
def test_define_takes_integers(define):
    with pytest.raises(cupyops.InputError, match="define has .*, expected the name of a macro and an int"):
        cupyops.Kernel(CODE, "put", define=define)


def test_another_gpu():
    before = gpu(CPU)
    with assume_gpu(multiprocessors=1), assume_gpu(shared=1024):
        assert gpu(CPU) == replace(before, multiprocessors=1, shared=1024)
    assert gpu(CPU) == before
    with pytest.raises(cupyops.InputError, match="a GPU has no property 'cores'; it has capability, multiprocessors"):
        assume_gpu(cores=3).__enter__()


def test_the_simulated_architecture():
    with cupyops.simulate("sm_90"):
        assert gpu(CPU).has_clusters
    assert not gpu(CPU).has_clusters


@pytest.mark.gpu
def test_the_card_is_asked():
    found, of = gpu(torch.device("cuda:0")), torch.cuda.get_device_properties(0)
    assert (found.multiprocessors, found.l2) == (of.multi_processor_count, of.L2_cache_size)


def test_every_form_says_what_it_is():
    for each in forms.families():
        for form in each.list:
            assert form.summary, f"{each.family}, {each.direction}: {form.name}"
