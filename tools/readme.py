"""README.md as a package index shows it: its relative links and pictures lead to the repository, at the tag of the version.

The build backend asks for it (`tool.hatch.metadata.hooks.custom` of pyproject.toml), so every wheel and sdist has it. The
repository is that of `project.urls`. Where its host is none that is known here, links stay relative, and a warning says so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Where hosts have pictures, and pages, of a repository at a tag.
FORGES = {
    "github.com": ("raw/{tag}", "blob/{tag}"),
    "gitlab.com": ("-/raw/{tag}", "-/blob/{tag}"),
    "codeberg.org": ("raw/tag/{tag}", "src/tag/{tag}"),
}
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)\s]+)(?=\))")


def absolute(text: str, repository: str, tag: str) -> str:
    """`text` with absolute links. Raises `ValueError` where the host of the repository is not known."""
    host = urlsplit(repository).hostname
    if host not in FORGES:
        raise ValueError(f"tools/readme.py does not know where {host} has the files of a repository; add it to FORGES")
    pictures, pages = (
        f"{repository.removesuffix('.git').rstrip('/')}/{form.format(tag=tag)}/" for form in FORGES[host]
    )

    def replaced(part: str) -> str:
        return _LINK.sub(lambda match: match[1] + (pictures if _is_picture(match[2]) else pages) + match[2], part)

    # every second part is code, in which `](` is no link
    return "".join(part if number % 2 else replaced(part) for number, part in enumerate(_CODE.split(text)))


def relative(text: str) -> Iterator[str]:
    """The links and pictures that lead nowhere on another host."""
    for part in _CODE.split(text)[::2]:
        yield from (match[2] for match in _LINK.finditer(part))


def _is_picture(path: str) -> bool:
    return path.endswith((".png", ".svg", ".gif", ".jpg"))


class Readme(MetadataHookInterface):
    """The hook of hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`."""
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        version = re.search(r'^__version__ = "(.+)"$', (root / "cupyops" / "__init__.py").read_text(), re.MULTILINE)
        try:
            text = absolute(text, metadata.get("urls", {}).get("Repository", ""), f"v{version[1] if version else ''}")
        except ValueError as unknown:
            count = len(list(relative(text)))
            print(f"README.md: {count} links and pictures lead nowhere on a package index: {unknown}", file=sys.stderr)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
