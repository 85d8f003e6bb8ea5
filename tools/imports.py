"""The imports between the folders of a package, as a diagram.

An arrow points to what is imported, lazily or not. One that follows from others is left out: if A imports B and B imports C,
it says nothing about the order that A imports C as well. `--write` puts the diagram into docs/design.md.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- imports: written by tools/imports.py -->", "<!-- end of imports -->"

Graph = dict[str, set[str]]


def imported(package: Path, path: Path) -> Iterator[tuple[str, ...]]:
    """What a file imports of its own package, as parts below it: `from ..ops import relu` is ("ops", "relu")."""
    here = path.relative_to(package).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = here[: len(here) - node.level + 1] + module
            elif module[:1] == (package.name,):
                base = module[1:]
            else:
                continue
            yield from ((*base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            yield from (tuple(name[1:]) for name in names if name[0] == package.name)


def graph(package: Path) -> Graph:
    """The folders and single modules at the top of a package, and what each imports of the others."""
    found: Graph = defaultdict(set)
    for path in package.rglob("*.py"):
        if path == package / "__init__.py":
            continue
        room = path.relative_to(package).parts[0].removesuffix(".py")
        found[room] |= {parts[0] for parts in imported(package, path) if parts and parts[0] != room}
    rooms = set(found)
    return {room: targets & rooms for room, targets in sorted(found.items())}


def reachable(of: Graph, start: str) -> set[str]:
    """All that is imported by way of others."""
    seen: set[str] = set()
    pending = list(of[start])
    while pending:
        room = pending.pop()
        if room not in seen:
            seen.add(room)
            pending += of[room]
    return seen


def direct(of: Graph) -> Graph:
    """Without the arrows that follow from others. Rooms in a circle keep theirs."""
    further = {room: reachable(of, room) for room in of}
    return {
        room: {
            target
            for target in targets
            if not any(target in further[other] and room not in further[other] for other in targets - {target})
        }
        for room, targets in of.items()
    }


def circles(of: Graph) -> set[str]:
    """The rooms that import themselves by way of others."""
    return {room for room in of if room in reachable(of, room)}


def diagram(of: Graph) -> str:
    """In the language of Mermaid, which GitHub and the site draw."""
    arrows = [f"  {room} --> {target}" for room, targets in of.items() for target in sorted(targets)]
    alone = [f"  {room}" for room in of if not of[room] and not any(room in targets for targets in of.values())]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, *alone, "```"])


def written(text: str) -> str:
    """The page with the diagram of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{PAGE} has no {BEGIN} before {END}")
    return f"{before}{BEGIN}\n\n{diagram(direct(graph(ROOT / 'cupyops')))}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "package", nargs="?", type=Path, default=ROOT / "cupyops", help="by default cupyops of this tree"
    )
    parser.add_argument("--all", action="store_true", help="keep arrows that follow from others")
    parser.add_argument("--write", action="store_true", help="put the diagram into docs/design.md")
    asked = parser.parse_args()
    if asked.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    of = graph(asked.package.resolve())
    print(diagram(of if asked.all else direct(of)))
    if around := circles(of):
        print(f"in a circle: {', '.join(sorted(around))}")


if __name__ == "__main__":
    main()
