"""The README and every page say what is so: their Python and their commands run, and print what stands below them."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from docs.pages import LANGUAGES, PAGES, ROOT, Reading, steady

import cupyops
from cupyops.cli import jobs

HEADINGS = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.fixture
def reader(monkeypatch, tmp_path):
    """A reader without a GPU, in a terminal of 100 columns."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # a process of its own would import PyTorch once more; tests/test_cli_compile.py has those
    monkeypatch.setattr(jobs, "ProcessPoolExecutor", lambda processes, mp_context, initializer: ThreadPoolExecutor(1))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    yield lambda page: Reading(page, tmp_path)
    vars(sys).pop("ps1", None)  # IPython's: what comes after is in no session


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs_and_prints_what_it_shows(page, reader):
    reading = reader(page)
    assert {block.language for block in reading.blocks} <= LANGUAGES
    reading.read()
    assert not cupyops.simulating()
    for block, printed in reading.seen:
        assert steady(printed) == steady(block.body), f"{page.name}:{block.line}"


def anchors(text):
    """What `page.md#...` can lead to, as GitHub and mkdocs both name it."""
    titles = HEADINGS.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_the_page_links_to_is_there(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file() and target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link
