"""The site builds, strictly and with nothing of another host; what it says of the package is so."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser

import pytest

pytest.importorskip("tornado", reason="what builds and looks at the site is not installed: pip install '.[docs]'")
from docs.pages import ROOT

import cupyops
import cupyops.testing
from cupyops._util.settings import ALL as SETTINGS
from cupyops.bench import model_table, table
from docs import searching

sys.path.insert(0, str(ROOT / "tools"))

import docs_check
import docs_site
import pictures
from figures import results, row

DOCS = ROOT / "docs"


def test_the_table_of_operators_has_each_function():
    listed = re.findall(r"^\| \[`(\w+)`\]\(operators/\1\.md\)(?: \|.*){3}$", docs_site.operators(), re.MULTILINE)
    assert sorted(listed) == list(docs_site.functions())
    assert {name for names in docs_site.KINDS.values() for name in names.split()} < {*listed}
    assert "add" in docs_site.by_kind()[docs_site.OTHERS]  # as every new one, until it is given a kind
    rows = {row.function.strip("`"): row for row in docs_site.rows()}
    assert rows["relu"] == (
        "`relu`", "`torch.nn.functional.relu`", "fp16, bf16, fp32, fp64", "formula", "`ReLU`",
        "Rectified linear unit, max(x, 0) elementwise",
    )  # fmt: skip
    halves = {"attention", "grouped_mm", "scaled_dot_product_attention"}  # as docs/operators.md says
    assert rows["decode_attention"].dtypes == "fp16, bf16, fp32"
    others = {name for name, row in rows.items() if row.dtypes != "fp16, bf16, fp32, fp64"}
    assert others == {*halves, "decode_attention", "quantized_linear", "scaled_mm"}
    assert {rows[name].dtypes for name in halves} == {"fp16, bf16"}
    assert rows["nll_loss"].module == "`NLLLoss`" and rows["scale_shift"].twin == ""
    assert {one.strip("` ") for row in rows.values() for one in row.module.split(",")} - {""} == set(
        docs_site.modules()
    )


def test_the_table_of_modules_has_each():
    table = docs_site.modules_table()
    assert re.findall(r"^\| \[`(\w+)`\]", table, re.MULTILINE) == list(docs_site.modules())
    assert (
        "[`LayerNorm`][cupyops.nn.LayerNorm] | [`layer_norm`](operators/layer_norm.md) | `torch.nn.LayerNorm` |"
        in table
    )
    assert "[`add_rms_norm`](operators/add_rms_norm.md) |  |" in table


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages as they are written for the generator of the site."""
    folder = tmp_path_factory.mktemp("site") / "build" / "docs"
    docs_site.write(folder)
    return folder


def test_each_operator_has_a_page(pages):
    names = {path.stem for path in (pages / "operators").glob("*.md")}
    assert names == set(docs_site.functions())
    text = (pages / "operators" / "layer_norm.md").read_text(encoding="utf-8")
    assert (
        "xhat = (x - mean) rstd" in text
        and text.index("Forward:") < text.index("<code>two_<wbr>pass</code>") < text.index("Backward:")
        and "## Conformance" in text
    )
    assert "![Speed of layer_norm](../assets/op_layer_norm.svg)" in text
    assert "32768x4096 bfloat16" in (pages / "assets" / "op_layer_norm.svg").read_text(encoding="utf-8")
    for name in names:
        text = (pages / "operators" / f"{name}.md").read_text(encoding="utf-8")
        assert f"::: cupyops.{name}\n" in text and "## Equations" in text, name
        assert ("## Forms" in text) != ("## Kernels" in text), name


def test_the_commands_have_all_their_options():
    text = docs_site.commands()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [
        *("new", "check", "simulate", "explain", "port", "compile", "bench", "cache", "doctor")
    ]
    assert all(f"`{option}" in text for option in ("--max-steps", "--junit", "--package", "--jobs"))
    assert "The `__global__` function" in text and '`"relu_fwd<float>"`' in text
    assert "python -m cupyops check [OPTIONS] {MODULE:NAME}" in text


def test_the_matrix_has_each_python_that_the_package_is_for():
    *lines, between, gpu = docs_site.matrix().splitlines()
    assert between == "" and re.search(r"On a GPU, .* Python 3\.\d+\.\d+, PyTorch .* tests passed, 0 failed\.$", gpu)
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 3.11", "| 3.12", "| 3.13", "| 3.14"]
    assert len({line.count(" | ") for line in lines}) == 1 and "passed" in lines[2] and "failed" not in "".join(lines)


def test_figures_of_a_run_that_is_kept(tmp_path):
    assert docs_site.figures(tmp_path / "absent.csv") == ""
    kept = results(row("rope", size="a|b", eager=20), row("add"))
    table.write(kept, tmp_path / "x.csv")
    lines = docs_site.figures(tmp_path / "x.csv").splitlines()
    assert lines[0] == "### On Made <up>" and "alone: 2.00 times as fast" in lines[3]
    assert lines[-4].split(" | ")[:4] == ["| rope", "a\\|b", "bfloat16", "forward"]
    assert lines[-4].endswith("| GB/s | 4,000 | 2,000 | 2.00 |")
    assert docs_site.filled("<!-- figures -->") == docs_site.figures()


def test_the_table_of_models_has_each_that_was_measured():
    path = docs_site.RESULTS.with_name("h100_models.csv")
    kept, _ = model_table.read(path)
    text = docs_site.models_of(path)
    assert (
        text in docs_site.models()
        and text.startswith("On NVIDIA H100")
        and len(re.findall(r"^\| (?!model|---)", text, re.MULTILINE)) == len(kept)
    )
    swap = next(one for one in kept if (one.model, one.variant) == ("llama", "swap"))
    assert f"| llama | swap | {swap.ms:.1f} | " in text and f"- llama: {swap.about}" in text


def test_an_unknown_mark_is_an_error():
    assert docs_site.filled("a\n<!-- settings -->\nb").count("CUPYOPS_") == len(SETTINGS)
    with pytest.raises(KeyError, match="nothing"):
        docs_site.filled("<!-- nothing -->")


INSIDE = {"Call", "Failure", "Hazard", "NotApplicable", "Row"}  # what reports and hazards are made of


LIBRARY = {*(f"cupyops.optim.{name}" for name in cupyops.optim.__all__), "cupyops.nn.utils.clip_grad_norm_"}
LIBRARY |= {
    "cupyops.nn.linear_log_prob",
    *(f"cupyops.nn.preference.{n}" for n in ("dpo", "grpo", "jsd", "kto", "orpo")),
}
LIBRARY.add("cupyops.bench.Case")  # imported where a benchmark is declared


def public():
    """Every public function and class."""
    names = [f"cupyops.{name}" for name in dir(cupyops) if is_public(name, getattr(cupyops, name))]
    names += [f"cupyops.testing.{name}" for name in cupyops.testing.__all__ if name not in INSIDE]
    names += ["cupyops.integrations.transformers.register", "cupyops.integrations.transformers.callback"]
    return {*names, *(f"cupyops.nn.{name}" for name in docs_site.modules()), *LIBRARY}


def is_public(name, value):
    mine = callable(value) and value.__module__.startswith("cupyops")
    return mine and not name.startswith("_") and not name.endswith("_if_asked")


def test_the_api_has_every_public_name_once(pages):
    text = "".join(path.read_text(encoding="utf-8") for path in pages.rglob("*.md"))
    listed = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(public())


def test_the_api_has_a_page_for_each_topic(pages):
    index = (pages / "api.md").read_text(encoding="utf-8")
    assert "[Kernels](api/kernels.md) | [`Kernel`][cupyops.Kernel], " in index and ":::" not in index
    config = docs_site.configuration(["api/kernels.md"])
    nav = {title: pages for section in config["nav"] for title, pages in section.items()}
    assert {"API": [{"All topics": "api.md"}, "api/kernels.md"]} in nav["Reference"]
    (library,) = (page["Operators"] for page in nav["Use the operators"] if "Operators" in page)
    assert {
        "Softmax and reductions": [f"operators/{name}.md" for name in docs_site.by_kind()["Softmax and reductions"]]
    } in library


@pytest.mark.parametrize(
    "urls, shown",
    [
        ("", None),
        (f'Repository = "https://git.{docs_site.PLACEHOLDER}/x"', None),
        ('Repository = "https://a.b/x"', "https://a.b/x"),
    ],
)
def test_the_link_to_the_repository_appears_with_its_url(urls, shown, tmp_path, monkeypatch):
    (tmp_path / "mkdocs.yml").write_text("nav: []", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(f"[project.urls]\n{urls}\n", encoding="utf-8")
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    assert docs_site.configuration([]).get("repo_url") == shown


def test_the_settings_page_tells_the_values_of_each():
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(CUPYOPS_\w+)` \|", text, re.MULTILINE)) == sorted(SETTINGS)


@cache
def source():
    """Every text in the package's source, with a hole where a value is put in."""
    return [" ".join(text.split()) for text in strings()]


def strings():
    for path in (ROOT / "cupyops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


MESSAGES = re.findall(
    r"^\| `([^`]+)`[^|]* \| ", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_that_the_code_has(message):
    """All its pieces, in order, within one text."""
    pattern = re.compile(".*".join(re.escape(piece.strip()) for piece in message.split("...")))
    assert any(pattern.search(text) for text in source()), message


def test_there_are_messages():
    assert len(MESSAGES) > 40


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


@pytest.fixture(scope="module")
def site(pages):
    """The built site."""
    folder = pages.parent
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.mark.slow
def test_the_site_asks_no_other_host_for_anything(site):
    pages = sorted(site.rglob("*.html"))
    assert {page.stem for page in pages} >= {path.stem for path in DOCS.glob("*.md")} | set(docs_site.functions())
    for page in pages:
        requests = Requests()
        requests.feed(page.read_text(encoding="utf-8"))
        assert requests.urls and not [url for url in requests.urls if re.match(r"(https?:)?//", url)], page.name
    api = "".join(page.read_text(encoding="utf-8") for page in (site / "api").iterdir())
    # the function and not the module of that name; its example as code; the signature on several lines
    assert 'id="cupyops.Kernel"' in api and 'id="cupyops.elementwise"' in api
    assert "promote" in api.partition('id="cupyops.elementwise"')[2].partition('id="cupyops.reduction"')[0]
    assert "<summary>Example" not in api and api.count("Examples:") > 20
    lines = re.sub(r"<[^>]*>", "", api).splitlines()
    assert any(line.strip().startswith("options: ") and line.endswith(",") for line in lines)
    assert "cross_entropy" in (site / "operators.html").read_text(encoding="utf-8")
    assert 'id="cupyops.gelu"' in (site / "operators" / "gelu.html").read_text(encoding="utf-8")
    assert (site / "search.json").stat().st_size > 100_000


@pytest.mark.slow
def test_the_search_finds_what_people_look_for(site):
    index = searching.Index(json.loads((site / "search.json").read_text(encoding="utf-8")))
    found = {text: index.hits(text)[:3] for text in docs_check.SEARCHES}
    missed = [
        (text, hits)
        for text, hits in found.items()
        if not any(hit.startswith(docs_check.SEARCHES[text]) for hit in hits)
    ]
    assert missed == []


def test_the_order_in_which_the_search_finds():
    def item(location, title, path, text):
        return {"location": location, "title": title, "path": path, "text": text}

    items = [
        item("text", "A", ["Docs"], "<p>a race, and <b>later</b> a condition</p>"),
        item("near", "B", ["Docs"], "<p>is the race condition</p>"),
        item("path", "C", ["Race"], "<p>condition</p>"),
        item("title", "Races", ["Docs"], "<p>of a condition</p>"),
        item("none", "Race", ["Docs"], "<p>alone</p>"),
    ]
    index = searching.Index({"config": {"separator": r"[\s.,-]+"}, "items": items})
    assert index.hits("race-Condition") == ["title", "path", "near", "text"]
    assert index.hits("race zebra") == []


@pytest.mark.slow
def test_no_link_leads_nowhere(site):
    assert not list(docs_check.broken_links(site))


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="x"><a href="b.html#y"><a href="c.html"><a href="a.html#x">', encoding="utf-8"
    )
    (tmp_path / "b.html").write_text("<p>", encoding="utf-8")
    assert len(list(docs_check.broken_links(tmp_path))) == 2


@pytest.fixture
def chromium():
    return pictures.browser() or pytest.skip("no Chromium")


@pytest.mark.slow
def test_pages_in_a_browser(site, chromium):
    """`make docs-check` looks at all pages."""
    some = ["index.html", "conformance.html", "operators/layer_norm.html"]
    assert docs_check.in_browser(chromium, site, some) == []


def test_a_page_that_is_too_wide_is_found(tmp_path, monkeypatch, chromium):
    monkeypatch.setattr(docs_check, "SEARCHES", {"Kernel": "api/kernels.html"})
    page = "<article><table><tr><td><div style='width: 3000px'>x</div></table></article><script>nothing()</script>"
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    with_search = '<button class="md-search__button" onclick="0"></button>'
    (tmp_path / "index.html").write_text(with_search, encoding="utf-8")
    found = docs_check.in_browser(chromium, tmp_path, ["a.html"], patience=0.5)
    assert any("TABLE ends at" in text for text in found) and any("nothing is not defined" in text for text in found)
    assert any("the search for Kernel" in text for text in found)


def test_what_a_page_stores_does_not_count(tmp_path, monkeypatch, chromium):
    """A page that is left sees the scheme change and may store its own again, after the next page has begun."""
    monkeypatch.setattr(docs_check, "SEARCHES", {})
    page = """<body><script>
      localStorage.setItem("scheme", "slate");
      const dark = matchMedia("(prefers-color-scheme: dark)").matches;
      document.body.dataset.mdColorScheme = localStorage.getItem("scheme") ?? (dark ? "slate" : "default");
    </script>"""
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    (tmp_path / "index.html").write_text("<p>", encoding="utf-8")
    found = docs_check.in_browser(chromium, tmp_path, ["a.html"], patience=0.5)
    assert found and not any("other scheme" in text for text in found)  # the search finds nothing here
