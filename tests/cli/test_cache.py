"""`python -m cupyops cache`: what it shows, removes and refuses."""

import os
import time

import pytest
from typer.testing import CliRunner

from cupyops._kernel.compile import cache
from cupyops._kernel.compile.binary import Binary
from cupyops.cli.app import app


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A cache of three kernels, of which `k0` was used least recently."""
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "nvrtc-12.9-12090"
    folder.mkdir()
    for number in range(3):
        cache.write_entry(folder, f"k{number}", Binary("k", "k", "sm_80", "", ()), b"x" * 10_000)
        then = time.time() - 7200 * (3 - number)
        for suffix in (".json", ".cubin"):
            os.utime(folder / f"k{number}{suffix}", (then, then))
    return tmp_path


def run(*words):
    return CliRunner().invoke(app, ["cache", *words])


def left(root):
    return sorted(path.stem for path in root.rglob("*.cubin"))


def test_show(root, monkeypatch):
    done = run()
    assert done.exit_code == 0 and f"{root}: 3 kernels, " in done.output and "a limit of 4.0 GiB" in done.output
    assert "nvrtc-12.9-12090" in done.output and "2 hours ago" in done.output
    monkeypatch.setenv("CUPYOPS_CACHE_LIMIT", "off")
    assert "no limit" in run("show").output
    assert left(root) == ["k0", "k1", "k2"]


def test_limit(root):
    done = run("limit", "25k")
    assert done.exit_code == 0 and "removed 1 kernel of 3" in done.output
    assert left(root) == ["k1", "k2"]


def test_clean(root):
    done = run("clean")
    assert done.exit_code == 0 and "removed 3 kernels of 3" in done.output
    assert not list(root.rglob("*.json")) and "0 kernels" in run().output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clen"], "'clen': expected one of show, clean, limit; did you mean clean?"),
        (["limit"], "expected a size with limit, as in `cache limit 500M`"),
        (["clean", "5M"], "and none with show and clean"),
        (["limit", "some"], "'some' is no size; expected a number of bytes such as 500M or 2G"),
    ],
)
def test_refused(root, words, said):
    done = run(*words)
    assert done.exit_code == 2 and said in done.output and left(root) == ["k0", "k1", "k2"]
