"""Template parameters: the forms of a kernel's name."""

import pytest

from cupyops._kernel.launch.template import Template
from cupyops.errors import InputError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("f", ("f", ())),
        ("f<T>", ("f", ("T",))),
        (" layer_norm_fwd < T ,VEC,  N > ", ("layer_norm_fwd", ("T", "VEC", "N"))),
        ("f<>", ("f", ())),
    ],
)
def test_names(name, expected):
    template = Template(name, {})
    assert (template.base, template.template) == expected


@pytest.mark.parametrize("name", ["", "f(", "f<T", "1f", "f<T*>", "f;g", "f<T> g", 'f<"x">', "f<T<int>>"])
def test_names_of_another_form(name):
    with pytest.raises(InputError, match="is not of the form"):
        Template(name, {})
