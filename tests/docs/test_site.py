"""The site builds, strictly and with nothing of another host; what it says of the package is so."""

import ast
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from docs.pages import ROOT

import cupyops
import cupyops.testing
from cupyops.bench import table
from cupyops.doctor.surroundings import SETTINGS

sys.path.insert(0, str(ROOT / "tools"))

import docs_site
from figures import results, row

DOCS = ROOT / "docs"


# --- generated parts ---


def test_the_table_of_operators_has_each_function():
    table = docs_site.operators().splitlines()
    assert len(table) == 2 + len(docs_site.functions()) and len({line.count(" | ") for line in table[2:]}) == 1
    rows = {row.function.strip("`"): row for row in docs_site.rows()}
    assert rows["relu"] == (
        "`relu`",
        "`torch.nn.functional.relu`",
        "fp16, bf16, fp32, fp64",
        "formula",
        "`ReLU`",
        "Rectified linear unit, max(x, 0) elementwise",
    )
    assert rows["nll_loss"].module == "`NLLLoss`" and rows["scale_shift"].twin == ""
    assert {one.strip("` ") for row in rows.values() for one in row.module.split(",")} - {""} == set(
        docs_site.modules()
    )


def test_the_commands_have_all_their_options():
    text = docs_site.commands()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [
        *("compile", "simulate", "check", "explain", "doctor", "new", "port", "bench")
    ]
    assert all(f"`{option}" in text for option in ("--max-steps", "--junit", "--package", "--jobs"))
    assert "The `__global__` function" in text and '`"relu_fwd<float>"`' in text
    assert "python -m cupyops check [OPTIONS] {MODULE:NAME}" in text


def test_figures_of_a_run_that_is_kept(tmp_path):
    assert docs_site.figures(tmp_path / "absent.csv") == ""
    kept = results(row("rope", size="a|b", eager=20), row("add"))
    table.write(kept, tmp_path / "x.csv")
    lines = docs_site.figures(tmp_path / "x.csv").splitlines()
    assert lines[0] == "## On Made <up>" and "- 2.00 times as fast" in lines[3]
    assert lines[-4].split(" | ")[:4] == ["| rope", "a\\|b", "bfloat16", "forward"]
    assert lines[-4].endswith("| GB/s | 4,000 | 2,000 | 2.00 |")
    assert docs_site.on_page_markdown("<!-- figures -->") == docs_site.figures()


def test_an_unknown_mark_is_an_error():
    assert docs_site.on_page_markdown("a\n<!-- settings -->\nb").count("CUPYOPS_") == len(SETTINGS)
    with pytest.raises(KeyError, match="nothing"):
        docs_site.on_page_markdown("<!-- nothing -->")


INSIDE = {"Call", "Failure", "Hazard", "NotApplicable", "Row"}  # what reports and hazards are made of


LIBRARY = {*(f"cupyops.optim.{name}" for name in cupyops.optim.__all__), "cupyops.nn.utils.clip_grad_norm_"}
LIBRARY.add("cupyops.bench.Case")  # imported where a benchmark is declared


def public():
    """Every public function and class."""
    names = [f"cupyops.{name}" for name, value in vars(cupyops).items() if is_public(name, value)]
    names += [f"cupyops.testing.{name}" for name in cupyops.testing.__all__ if name not in INSIDE]
    return {*names, *(f"cupyops.nn.{name}" for name in docs_site.modules()), *LIBRARY}


def is_public(name, value):
    mine = callable(value) and value.__module__.startswith("cupyops")
    return mine and not name.startswith("_") and not name.endswith("_if_asked")


def test_the_api_has_every_public_name_once():
    text = docs_site.on_page_markdown((DOCS / "api.md").read_text(encoding="utf-8"))
    listed = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(public())


def test_the_settings_page_tells_the_values_of_each():
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(CUPYOPS_\w+)` \|", text, re.MULTILINE)) == sorted(SETTINGS)


# --- messages that are quoted ---


def strings():
    """Every text in the package's source, with a hole where a value is put in."""
    for path in (ROOT / "cupyops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


MESSAGES = re.findall(
    r"^\| `([^`]+)`[^|]* \| ", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
)
SOURCE = [" ".join(text.split()) for text in strings()]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_that_the_code_has(message):
    """All its pieces, in order, within one text."""
    pattern = re.compile(".*".join(re.escape(piece.strip()) for piece in message.split("...")))
    assert any(pattern.search(text) for text in SOURCE), message


def test_there_are_messages():
    assert len(MESSAGES) > 40


# --- the site itself ---


class Requests(HTMLParser):
    """What a browser would ask for by itself when it shows a page."""

    def __init__(self):
        super().__init__()
        self.urls = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return
        self.urls += [given[name] for name in ("src", "href") if name in given and tag != "a"]


def test_the_site_builds_and_asks_no_other_host_for_anything(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted(tmp_path.glob("*.html"))
    assert {page.stem for page in pages} >= {path.stem for path in DOCS.glob("*.md")}
    for page in pages:
        requests = Requests()
        requests.feed(page.read_text(encoding="utf-8"))
        assert requests.urls and not [url for url in requests.urls if re.match(r"(https?:)?//", url)], page.name
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    # the function and not the module of that name; its example as code
    assert 'id="cupyops.gelu"' in api and 'id="cupyops.elementwise"' in api
    assert "promote" in api.partition('id="cupyops.elementwise"')[2].partition('id="cupyops.reduction"')[0]
    assert "<summary>Example" not in api and api.count("Examples:") > 20
    assert "cross_entropy" in (tmp_path / "operators.html").read_text(encoding="utf-8")
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
