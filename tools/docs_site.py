"""Writes the pages of the site, with the tables that are made from the package. `make docs` calls it and builds the site.

    python tools/docs_site.py

A page has a comment such as `<!-- operators -->` where a table or a list stands that this module makes, from the registry,
the commands, the settings and the public names. So none of them can be out of date. Each operator has a page of its own,
and so has each section of docs/api.md.
"""

from __future__ import annotations

import csv
import inspect
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import docs_operators
import torch
import yaml
from docs_operators import table
from release import PLACEHOLDER

import cupyops
import cupyops.nn
from cupyops._util.settings import ALL as SETTINGS
from cupyops._warmup.reachable import kernels_of
from cupyops.bench import model_table, report
from cupyops.bench.table import read

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.csv"
MATRIX = ROOT / "tests" / "matrix.csv"
GPU_REPORT = ROOT / "tests" / "gpu_report.json"
WIDE = {"operators", "figures", "conformance"}  # pages of tables, which get the width of the table of contents
KINDS = {  # sections of the table of operators; what stands in none of them is in the last
    "Activations and gates": "bias_gelu geglu gelu relu silu swiglu",
    "Attention": "attention decode_attention rope scaled_dot_product_attention",
    "Convolution and pooling": "avg_pool2d conv2d max_pool2d",
    "Losses": "cross_entropy fused_linear_cross_entropy kl_div nll_loss",
    "Matrix products": "gated_linear grouped_mm linear linear_act matmul quantized_linear scaled_mm",
    "Normalization": "add_rms_norm batch_norm batch_norm_act group_norm layer_norm rms_norm",
    "Softmax and reductions": "amax log_softmax mean softmax sum var",
}
OTHERS = "Elementwise and others"
_C = re.compile(r'"?\b(?:__\w+__|\w+<\w+>)"?')  # words of C in a text for a terminal
_MARK = re.compile(r"^<!-- (\w+) -->$", re.MULTILINE)


class Row(NamedTuple):
    """One function of the library, as a table tells it."""

    function: str
    twin: str
    dtypes: str
    second: str
    module: str
    summary: str


def functions() -> dict[str, Callable[..., Any]]:
    """The operators of the library by name: what `cupyops.ops` exports."""
    found = vars(cupyops.ops).items()
    return {
        name: function
        for name, function in sorted(found)
        if not (name.startswith("_") or isinstance(function, ModuleType))
    }


def modules() -> dict[str, type[torch.nn.Module]]:
    """The modules of `cupyops.nn` by name."""
    found = sorted(vars(cupyops.nn).items())
    return {name: one for name, one in found if isinstance(one, type) and issubclass(one, torch.nn.Module)}


def rows() -> Iterator[Row]:
    """A row for each function."""
    for name, function in functions().items():
        text = inspect.getdoc(function) or ""
        twin = re.search(r"as `(torch\.[\w.]+)`", text)
        own = [op for op in cupyops.operators().values() if op.reference.__module__ == f"cupyops.ops._{name}"]
        domains = [kernel.domain.get("T", ()) for op in own for kernel in kernels_of(op)]
        formulas = {op.definition.gradient is not None for op in own}
        yield Row(
            function=f"`{name}`",
            twin=f"`{twin[1]}`" if twin else "",
            dtypes=", ".join(shown for dtype, shown in DTYPES.items() if any(dtype in domain for domain in domains)),
            second="formula" if formulas == {True} else "reference" if formulas == {False} else "both",
            module=", ".join(f"`{one}`" for one, module in modules().items() if _is_by(module, name)),
            summary=_summary(text),
        )


def _is_by(module: type[torch.nn.Module], function: str) -> bool:
    """True if a module is made of that function, by its docstring or by its name."""
    said = re.search(r"by `cupyops\.(\w+)`", module.__doc__ or "")
    return said[1] == function if said else _stem(module.__name__) == _stem(function)


def _stem(name: str) -> str:
    """The part that the names of a function and of its module share."""
    return name.replace("_", "").lower().removesuffix("loss")


def _summary(text: str) -> str:
    """The first sentence of a docstring, without what it says of the twin."""
    first = " ".join(text.partition("\n\n")[0].split())
    return first.partition("; as `")[0].rstrip(".").replace("|", "\\|")


def by_kind() -> dict[str, list[str]]:
    """The names of the functions by kind."""
    kinds = {name: kind for kind, names in KINDS.items() for name in names.split()}
    found: dict[str, list[str]] = {kind: [] for kind in (*KINDS, OTHERS)}
    for name in functions():
        found[kinds.get(name, OTHERS)].append(name)
    return found


def operators() -> str:
    """A table of the library for each kind; what is long has its place on each operator's page."""
    known = {row.function.strip("`"): row for row in rows()}
    parts = []
    for kind, names in by_kind().items():
        lines = [
            (
                f"[`{name}`](operators/{name}.md)",
                known[name].summary,
                known[name].twin.replace("torch.nn.functional.", "F."),
            )
            for name in names
        ]
        parts.append(f"## {kind}\n\n" + table(("function", "what it computes", "as in PyTorch"), lines))
    return "\n\n".join(parts)


def modules_table() -> str:
    """The modules, with the function that each is of."""
    by = {name: row.function.strip("`") for row in rows() for name in re.findall(r"`(\w+)`", row.module)}
    lines = []
    for name, one in modules().items():
        twin = re.search(r"as `(torch\.nn\.\w+)`", one.__doc__ or "")
        link = f"[`{by[name]}`](operators/{by[name]}.md)" if name in by else ""
        lines.append((f"[`{name}`][cupyops.nn.{name}]", link, f"`{twin[1]}`" if twin else ""))
    return table(("module", "function", "as in PyTorch"), lines)


def commands() -> str:
    """Every command with its arguments and options."""
    import typer
    from typer.cli import get_docs_for_click

    from cupyops.cli.app import app

    command: Any = typer.main.get_command(app)
    context: Any = command.context_class(command, info_name="python -m cupyops")
    parts = []
    for name in command.list_commands(context):
        text = get_docs_for_click(obj=command.get_command(context, name), ctx=context, name=name)
        text = re.sub(r"^(#+) .*$", f"## {name}", text, count=1, flags=re.MULTILINE)
        text = re.sub(r"^```console\n\$ ", "```text\npython -m cupyops ", text, flags=re.MULTILINE)
        parts.append(_C.sub(r"`\g<0>`", text).strip())
    return "\n\n".join(parts)


def settings() -> str:
    """The variables of the environment."""
    return table(("variable", "what it does"), ((f"`{name}`", one.meaning) for name, one in SETTINGS.items()))


def figures(path: Path = RESULTS) -> str:
    """The figures of a benchmark run that is kept in the repository; empty if there is none."""
    if not path.is_file():
        return ""
    results = read(path)
    others = report.peers(results)
    head = ["operator", "size", "dtype", "way", "unit", "cupyops", *others, "speed-up"]
    said = [f"### On {results.machine.get('gpu', 'a GPU')}", "", *(f"- {line}" for line in report.summary(results)), ""]
    lines = []
    for row, way in results.measured():
        speedup = row.speedup(way)
        rates = [report.rate(row, who, way) for who in ("ours", *others)]
        cells = [row.op, row.size, row.dtype, way, row.unit, *rates, "" if speedup is None else f"{speedup:.2f}"]
        lines.append([cell.replace("|", "\\|") for cell in cells])
    return "\n".join([*said, table(head, lines)])


def models() -> str:
    """Training steps of whole models, as they are kept, on each card."""
    return "\n\n".join(models_of(RESULTS.with_name(f"{card}_models.csv")) for card in ("h100", "h200"))


def models_of(path: Path) -> str:
    """The table of one run."""
    found, machine = model_table.read(path)
    lines = []
    for one in found:
        base = model_table.base_of(found, one.model)
        gain = f"{base.ms / one.ms:.2f}" if base is not None and base is not one else ""
        figures = f"{one.ms:.1f}", gain, f"{one.rate:,.0f} {one.unit}", f"{one.peak_gib:.2f}"
        lines.append((one.model, one.variant, *figures))
    head = "model", "variant", "ms a step", "speed-up", "a second", "peak GiB"
    about = (f"- {name}: {about}" for name, about in {one.model: one.about for one in found}.items())
    where = f"On {machine.get('gpu', 'a GPU')}, with PyTorch {machine.get('torch', '')}:"
    return "\n".join([where, "", table(head, lines), "", *about])


def devices() -> str:
    """The figures of tools/distributed.py, for each pair of cards."""
    return "\n\n".join(devices_of(RESULTS.with_name(f"{card}x2_distributed.csv")) for card in ("h100", "h200"))


def devices_of(path: Path) -> str:
    """The table of one run."""
    lines = path.read_text(encoding="utf-8").splitlines()
    about = [line[2:] for line in lines if line.startswith("# ")]
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    head = "", "model", "ms a step", "peak GiB", "collectives of a step", "losses"
    where = f"On {about[0].removeprefix('gpu: ')}, {about[2]}:"
    return f"{where}\n\n{table(head, (row.values() for row in rows))}"


def matrix(path: Path = MATRIX) -> str:
    """The results of `make test-matrix` for each Python, and of the last GPU run."""
    with open(path, encoding="utf-8", newline="") as file:
        head, *lines = csv.reader(file)
    gpu = json.loads(GPU_REPORT.read_text(encoding="utf-8"))
    passed = sum(one["passed"] for one in gpu["runs"].values())
    failed = sum(one["failed"] for one in gpu["runs"].values())
    return (
        f"{table(head, lines)}\n\nOn a GPU, the last run was with an {gpu['gpu']}, Python {gpu['python']}, PyTorch "
        f"{gpu['torch']} and {gpu['cupy']}: {passed:,} tests passed, {failed} failed."
    )


def directives(names: list[str]) -> str:
    """Directives that mkdocstrings replaces by the docstrings of `names`."""
    return "\n\n".join(f"::: {name}" for name in names)


ATTENTION = "h100_attention", "h200_decode_attention"
GENERATED: dict[str, Callable[[], str]] = {
    "operators": operators,
    "modules_table": modules_table,
    "commands": commands,
    "settings": settings,
    "figures": figures,
    "attention": lambda: "\n\n".join(figures(RESULTS.with_name(f"{name}.csv")) for name in ATTENTION),
    "fusions": lambda: "\n\n".join(figures(RESULTS.with_name(f"{card}_fusions.csv")) for card in ("h100", "h200")),
    "group_norm": lambda: figures(RESULTS.with_name("h200_group_norm.csv")),
    "models": models,
    "devices": devices,
    "matrix": matrix,
    "modules": lambda: directives([f"cupyops.nn.{name}" for name in modules()]),
    "errors": lambda: directives([f"cupyops.{name}" for name in vars(cupyops) if name.endswith("Error")]),
}


def filled(markdown: str) -> str:
    """A page with its marks replaced by the generated parts. Raises KeyError for an unknown mark."""
    return _MARK.sub(lambda match: GENERATED[match[1]](), markdown)


def split_api(text: str, folder: Path) -> list[str]:
    """Write a page for each section of the API, and a first page that lists their names; the pages' paths."""
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    paths, lines = [], []
    for section in sections:
        title, _, body = section.partition("\n")
        paths.append(f"api/{re.sub(r'[^a-z]+', '_', title.lower())}.md")
        names = re.findall(r"^::: (cupyops\.(\S+))$", body, re.MULTILINE)
        lines.append((f"[{title}]({paths[-1]})", ", ".join(f"[`{short}`][{full}]" for full, short in names)))
        (folder / paths[-1]).parent.mkdir(exist_ok=True)
        (folder / paths[-1]).write_text(f"# {title}\n{body}", encoding="utf-8")
    (folder / "api.md").write_text(f"{head}{table(('topic', 'names'), lines)}\n", encoding="utf-8")
    return paths


def configuration(api: list[str]) -> dict[str, Any]:
    """mkdocs.yml, with the generated pages in the navigation, and the repository if pyproject.toml has its URL."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    kinds = [{kind: [f"operators/{name}.md" for name in names]} for kind, names in by_kind().items()]
    below = {
        "api.md": {"API": [{"All topics": "api.md"}, *api]},
        "operators.md": {"Operators": [{"All operators": "operators.md"}, *kinds]},
    }
    config["nav"] = [
        {title: [below.get(page, page) for page in pages] if isinstance(pages, list) else pages}
        for section in config["nav"]
        for title, pages in section.items()
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = {name.lower(): url for name, url in project.get("urls", {}).items()}
    if (url := urls.get("repository", "")) and PLACEHOLDER not in url:
        config["repo_url"] = url
    return dict(config)


def write(folder: Path) -> None:
    """All pages and pictures, and beside them the configuration, ready for the generator of the site."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for path in folder.glob("*.md"):
        text = filled(path.read_text(encoding="utf-8"))
        path.write_text(f"---\nhide: [toc]\n---\n\n{text}" if path.stem in WIDE else text, encoding="utf-8")
    docs_operators.write(list(rows()), folder)
    api = split_api((folder / "api.md").read_text(encoding="utf-8"), folder)
    text = yaml.safe_dump(configuration(api), sort_keys=False).replace("ROOT/", f"{ROOT}/")
    (folder.parent / "mkdocs.yml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(ROOT / "build" / "docs")
