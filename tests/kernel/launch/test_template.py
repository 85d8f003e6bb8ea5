"""Template parameters: the forms of a kernel's name."""

import pytest
import torch

from cupyops._kernel.launch.template import Template
from cupyops.errors import InputError, LaunchError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("f", ("f", ())),
        ("f<T>", ("f", ("T",))),
        (" layer_norm_fwd < T ,VEC,  N > ", ("layer_norm_fwd", ("T", "VEC", "N"))),
        ("f<>", ("f", ())),
        ("a::b::f<T>", ("a::b::f", ("T",))),
        ("::f", ("f", ())),
        ("f<float, 4>", ("f", ())),
        ("f<half, N, true, unsigned int, float4, ::Add>", ("f", ("N",))),
        ("f<T*, Pair<int, 3>, -1, (1 > 0)>", ("f", ())),
    ],
)
def test_names(name, expected):
    template = Template(name, {})
    assert (template.base, template.template) == expected


@pytest.mark.parametrize("name", ["", "f(", "f<T", "1f", "f<T>>", "f;g", "f<T> g", 'f<"x">', "f<(T>)", "a:f", "a::"])
def test_names_of_another_form(name):
    with pytest.raises(InputError, match="is not of the form"):
        Template(name, {})


def test_values_in_the_name_stay_where_they_are():
    template = Template("ns::f<float, N, ::Add>", {"N": (1, 2)})
    assert template.instances() == ["ns::f<float, 1, ::Add>", "ns::f<float, 2, ::Add>"]
    assert repr(template) == "ns::f<float, N, ::Add>"


def test_a_name_that_may_be_meant_as_a_type_says_so():
    with pytest.raises(LaunchError, match="launch with Add=..., or write ::Add where a type of the source is meant"):
        Template("f<float, Add>", {}).values({})


DOMAIN = {"T": (torch.float32, torch.float64), "N": (1, 2), "FLAG": (False, True)}


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (lambda N, FLAG: N == 1 or FLAG, 6),
        (lambda FLAG, N: N == 1 or FLAG, 6),
        (lambda T: T is torch.float32, 4),
        (lambda *, N: N == 2, 4),
        (lambda N, **rest: N == 2 and rest.keys() == {"T", "FLAG"}, 4),
        (lambda N, bound=1: bound == N, 4),
        (lambda: True, 8),
    ],
)
def test_where_is_given_what_it_names(where, count):
    """Whatever other parameters there are, and in which order they stand."""
    assert len(Template("f<T, N, FLAG>", DOMAIN, where).combinations()) == count


@pytest.mark.parametrize("where", [lambda T, C: True, lambda *values: True, lambda n: True])
def test_where_can_name_template_parameters_alone(where):
    with pytest.raises(
        InputError, match=r"kernel f<T, N>: where= takes .*, expected one of its template parameters: T, N"
    ):
        Template("f<T, N>", {}, where)
