"""`python -m cupyops new`: the files of a new operator, which work as they are, from the templates beside this one."""

from __future__ import annotations

import builtins
import importlib.util
import io
import keyword
import re
import shlex
import textwrap
import tokenize
from importlib import resources
from pathlib import Path
from string import Template

from rich.console import Console

from .._util import torch_private
from ..errors import InputError
from . import outputs, words

# For each kind, the function once more, in other words than the reference's: what the test compares with.
KINDS = {
    "raw": "(x + torch.hypot(x, torch.full_like(x, 2.0))) / 2",
    "elementwise": "torch.nn.functional.silu(x)",
    "reduction": "torch.linalg.vector_norm(x, dim=-1).square() / x.shape[-1]",
}
_LONGEST = 40  # characters: longer names would overrun the templates' lines
_COLUMNS = 120  # of a line of CUDA
_HEAD = re.compile(r"^(__global__ void \w+\()(.*?\) \{)$", re.MULTILINE | re.DOTALL)


# Where a package has its Python: in the second the loader of Hugging Face's `kernels` finds it, for every PyTorch and CUDA.
_INSIDE, _HUB = "src", "build/torch-universal"
_LOADED = """
The loader of Hugging Face's `kernels` takes the folder as it is, on every PyTorch and CUDA, where cupyops is installed:

```python
from pathlib import Path

from kernels import get_local_kernel

{name} = get_local_kernel(Path(".")).{name}
```
"""


def run(name: str, kind: str, package: bool, folder: Path, hub: bool = False) -> int:
    """The command; returns its exit code: 0, or 2 for bad arguments."""
    try:
        _check(name, kind)
        if hub and not package:
            raise InputError("--hub says how a package is laid out; give --package too")
        if hub and not re.fullmatch(r"[a-z](?:_?[a-z0-9])+", name):
            raise InputError(
                f"NAME is {name!r}, expected lower case, digits and single _, as the loader of kernels has it"
            )
        root = outputs.folder("--dir", folder / name if package else folder)
        files = {root / path: text for path, text in _files(name, kind, package, hub).items()}
        _write(files)
    except (InputError, OSError) as error:
        words.complain(error)
        return 2
    console = Console()
    for path in files:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    console.print("\nnext:")
    for command in _next(name, package, root, hub):
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _check(name: str, kind: str) -> None:
    """Raises `InputError` for a name that would not work in Python, in CUDA C or in `torch.ops`."""
    if kind not in KINDS:
        raise InputError(f"--kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or keyword.iskeyword(name):
        raise InputError(f"NAME is {name!r}, expected a name of letters, digits and _ that is no Python keyword")
    if len(name) > _LONGEST:
        raise InputError(f"NAME has {len(name)} characters, expected {_LONGEST} at most")
    if hasattr(builtins, name) or name in _names_taken(kind):
        raise InputError(f"NAME is {name!r}, a name that the generated code uses itself; take another")
    spec = importlib.util.find_spec(name)
    origin = None if spec is None else spec.origin  # a folder that is no package has none
    if origin is not None and Path(origin).parent not in (Path.cwd(), Path.cwd() / name):
        raise InputError(f"NAME is {name!r}, which is a module already ({origin}); take another")
    if any(registered.startswith(f"{name}::") for registered in torch_private.registered_operators()):
        raise InputError(f"NAME is {name!r}, which is a namespace of torch.ops already; take another")


def _names_taken(kind: str) -> set[str]:
    """Every name in the generated Python."""
    taken: set[str] = set()
    for template in (f"{kind}.py", "test.py", "bench.py"):
        text = _render(template, "placeholder", kind)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        taken |= {token.string for token in tokens if token.type == tokenize.NAME}
    return taken


def _render(template: str, name: str, kind: str, hub: bool = False) -> str:
    text = resources.files(__package__).joinpath("templates", f"{template}.tmpl").read_text(encoding="utf-8")
    filled = Template(text).substitute(
        name=name,
        expected=KINDS[kind],
        inside=_HUB if hub else _INSIDE,
        loaded=_LOADED.format(name=name) if hub else "",
        dashed=name.replace("_", "-"),
    )
    return _HEAD.sub(_wrapped, filled) if template.endswith(".cu") else filled


def _wrapped(head: re.Match[str]) -> str:
    """A kernel's head with its lines broken between parameters, as clang-format breaks them: where, hangs on the name."""
    parameters = [re.sub(r"\s+", "\xa0", one) for one in re.split(r",\s+", head[2])]  # a space that no line ends at
    lines = textwrap.wrap(", ".join(parameters), _COLUMNS - len(head[1]), break_on_hyphens=False)
    return head[1] + ("\n" + " " * len(head[1])).join(lines).replace("\xa0", " ")


def _files(name: str, kind: str, package: bool, hub: bool = False) -> dict[Path, str]:
    """The text of each file, by its path below the folder."""
    places = {
        f"{kind}.cu": Path(f"{name}.cu"),
        f"{kind}.py": Path(f"{name}.py"),
        "test.py": Path(f"test_{name}.py"),
        "bench.py": Path(f"bench_{name}.py"),
    }
    if package:
        inside = Path(_HUB if hub else _INSIDE, name)
        places = {
            "pyproject.toml": Path("pyproject.toml"),
            "README.md": Path("README.md"),
            "LICENSE": Path("LICENSE"),
            "gitignore": Path(".gitignore"),
            "ci.yml": Path(".github", "workflows", "test.yml"),
            "init.py": inside / "__init__.py",
            f"{kind}.cu": inside / f"{name}.cu",
            f"{kind}.py": inside / f"{name}.py",
            "test.py": Path("tests", f"test_{name}.py"),
            "bench.py": Path("benchmarks", f"bench_{name}.py"),
        }
    if hub:
        places["metadata.json"] = Path(_HUB, "metadata.json")
    return {path: _render(template, name, kind, hub) for template, path in places.items()}


def _write(files: dict[Path, str]) -> None:
    """All of the files or none: what is there already is never written over."""
    if clashes := [str(path) for path in files if path.exists() or path.is_symlink()]:
        listed = "".join(f"\n  {path}" for path in clashes)
        raise InputError(
            f"these files exist already and were left as they are; take another name, or another folder with --dir:{listed}"
        )
    made: list[Path] = []
    try:
        for path, text in files.items():
            _make_folders(path.parent, made)
            with open(path, "x", encoding="utf-8", newline="\n") as file:
                made.append(path)
                file.write(text)
    except BaseException:
        for path in reversed(made):
            path.rmdir() if path.is_dir() else path.unlink()
        raise


def _make_folders(folder: Path, made: list[Path]) -> None:
    """`folder` and those around it that are not there, outermost first, each added to `made`."""
    for path in [path for path in (folder, *folder.parents) if not path.exists()][::-1]:
        path.mkdir()
        made.append(path)


def _next(name: str, package: bool, root: Path, hub: bool = False) -> list[str]:
    """The commands to type."""
    away = [] if root.resolve() == Path.cwd() else [f"cd {shlex.quote(str(root))}"]
    if package:
        inside = f"{_HUB if hub else _INSIDE}/{name}"
        return [
            *away,
            'pip install -e ".[test]"',
            "python -m pytest",
            f"python -m cupyops compile {inside}/{name}.py --arch sm_80,sm_90 --out {inside}/cubins",
        ]
    return [
        *away,
        *([] if importlib.util.find_spec("pytest") else ["pip install pytest"]),
        f"python -m pytest test_{name}.py",
        f"python -m cupyops check {name}:{name}",
        f"python -m cupyops bench bench_{name}.py",
    ]
