"""An extension of griffe, which reads the docstrings for the site.

The section "Example:" of a docstring is shown as code, as griffe's own "Examples:" is. Where the package has a function of
the name of one of its modules, as `cupyops.elementwise`, the name means the function.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^( *)Example:$", re.MULTILINE)


class Names(griffe.Extension):
    """Applies both rules after the package has been read and before anything is shown."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called for the package with all that is in it."""
        _show_examples(pkg)
        for name, module in list(pkg.modules.items()):
            if name in module.members and not module.members[name].is_module:
                pkg.members[name] = griffe.Alias(name, module.members[name], parent=pkg)


def _show_examples(obj: griffe.Object) -> None:
    """Rename the section in the docstring of `obj`, and of what is in it."""
    if obj.docstring is not None:
        obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
    for member in obj.members.values():
        if isinstance(member, griffe.Object):
            _show_examples(member)
