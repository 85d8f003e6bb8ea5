"""Runs calls with each form of a family that can compute them."""

from collections.abc import Callable, Iterable
from typing import Any

import cupyops
from cupyops._dispatch.core import forms


def names(family: str) -> list[str]:
    """The forms of a family, of both directions."""
    lists = [one for one in forms.families() if one.family == family]
    return list(dict.fromkeys(form.name for one in lists for form in one.list))


def run(family: str, form: str, calls: Iterable[Callable[[], object]]) -> None:
    """Each call in the simulator, with that form in each direction that has it; it must be able to compute one of them."""
    with cupyops.simulate():
        assert sum(computes(family, form, call) for call in calls) > 0


def computes(family: str, form: str, call: Callable[[], object]) -> bool:
    """True where the form can compute a call, which has then been made."""
    return _made(f"{family}:{form}", call)[0]


def by_form(name: str, call: Callable[[], Any]) -> Any:
    """The result of a call in the simulator with the form of that name; None where the form cannot compute it."""
    with cupyops.simulate():
        return _made(name, call)[1]


def _made(name: str, call: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        with cupyops.use_form(name):
            return True, call()
    except cupyops.InputError as error:
        if f"the form {name.partition(':')[2]} was asked for" not in str(error):
            raise
        return False, None
