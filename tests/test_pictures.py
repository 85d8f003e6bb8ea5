"""The pictures in docs/assets show what is so: they are made again, and compared with what is committed."""

import re
import struct
import sys
from pathlib import Path

import pytest
from processes import run_python

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import pictures

PAGES = [pictures.ROOT / "README.md", *(pictures.ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("name", ["models.svg", "kernels.svg"])
def test_a_plot_is_of_the_figures_there_are(name):
    assert pictures.plots()[name] == (pictures.ASSETS / name).read_text(encoding="utf-8")


def words(picture):
    """What the picture says, without how long each hazard took, by which the columns are as wide as they are."""
    said = "\n".join(re.findall(r"<text[^>]*>(.*?)</text>", picture))
    return re.sub(r"(pass|fail|n/a) +\d+\.\d+", r"\1", said).split()


def test_the_terminal_shows_what_the_commands_print():
    scenes = list(pictures.session(run_python))
    compile_error, failed, passed = ("\n".join(lines) for _, lines in scenes[1:])
    assert "hint: NVRTC has no C++ library" in compile_error
    assert "0 passed, 1 failed" in failed and "1 passed, 0 failed" in passed
    assert words(pictures.terminal(scenes)) == words((pictures.ASSETS / "terminal.svg").read_text(encoding="utf-8"))


def test_no_picture_is_large():
    for path in pictures.ASSETS.iterdir():
        assert path.stat().st_size < 200_000, path.name


def test_the_race_is_a_picture_and_its_kernel_has_one(tmp_path, monkeypatch):
    """What the picture shows: that kernel, in the simulator, is a race at that line."""
    data = (pictures.ASSETS / "race.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and (width, height) == pictures.RACE_SIZE
    import torch

    import cupyops

    kernel = cupyops.Kernel(pictures.RACE, "block_sum")
    with cupyops.simulate(), pytest.raises(cupyops.SimulatorError, match=r"with no barrier in between[\s\S]*:8 "):
        kernel[4, 256](torch.ones(1000), torch.empty(4), 1000)


def test_each_picture_is_shown_somewhere():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in pictures.ASSETS.glob("*.[ps][nv]g"):
        assert f"assets/{path.name})" in text, path.name
