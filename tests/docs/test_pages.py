"""The README and every page say what is so: their Python and their commands run, and print what stands below them."""

import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from docs.pages import ELSEWHERE, LANGUAGES, PAGES, ROOT, Reading, blocks, steady

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
    return lambda page: Reading(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs_and_prints_what_it_shows(page, reader):
    reading = reader(page)
    assert {block.language for block in reading.blocks} <= LANGUAGES
    reading.read()
    assert not cupyops.simulating()
    for block, printed in reading.seen:
        assert steady(printed) == steady(block.body), f"{page.name}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_block_slips_through(page):
    """Whatever looks like a block is one that is run, written or compared."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^[ >]*(?:```|~~~).*$", text, re.MULTILINE)
    assert len(fences) == 2 * len(blocks(text)), fences


def test_what_is_not_run_here_stands_on_a_page():
    shown = {" ".join(words) for page in PAGES for words in commands(page)}
    assert set(ELSEWHERE) <= shown


def test_a_command_that_nobody_runs_is_a_fault(reader):
    with pytest.raises(AssertionError, match=r"x:1: curl example: run it in Reading.command, or say in ELSEWHERE"):
        reader(PAGES[0]).command(["curl", "example"], False, "x:1")


def commands(page):
    """The commands of a page's blocks, as words."""
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "sh" and block.title is None:
            for line in block.body.replace("\\\n", " ").splitlines():
                yield shlex.split(line, comments=True)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_a_command_in_a_sentence_is_one_that_there_is(page):
    """Its options, its file, its target; but for what stands for a reader's own, as NAME or `...`."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for text in re.findall(r"`((?:python|torchrun|make) [^`]+)`", prose):
        words = [word for word in text.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        files = [word for word in words if re.match(r"(tools|examples|benchmarks|tests)/", word)]
        assert all((ROOT / file).exists() for file in files), text
        if re.fullmatch(r"make [a-z-]+( [A-Z]+=\S+)*", text):
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), text
        if words[:3] == ["python", "-m", "cupyops"] and not re.search(r"\.\.\.|\b[A-Z]{2,}\b", text):
            Reading.parse(shlex.split(text)[3:], named=len(words) == 4)


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
