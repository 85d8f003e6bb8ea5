"""The notebooks run from top to bottom, and what they show is what they give."""

import json
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

for needed in ("ipykernel", "nbclient", "ml_dtypes", "sklearn"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import nbformat  # noqa: E402
import notebooks  # noqa: E402
from nbclient.exceptions import CellExecutionError  # noqa: E402

each = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
# those of the course run in test_course.py as well, without a process of their own
each_but_the_course_slowly = pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path in notebooks.COURSE)) for path in notebooks.NOTEBOOKS],
    ids=lambda path: path.stem,
)


def test_there_are_notebooks():
    assert {path.stem for path in notebooks.NOTEBOOKS} - {path.stem for path in notebooks.COURSE} == {
        "your_first_kernel",
        "numpy_style",
    }


@each_but_the_course_slowly
def test_outputs(path):
    now = notebooks.run(path)
    found = [*notebooks.surprises(now), *notebooks.differences(notebooks.read(path), now)]
    assert not found, "\n".join([*found, "if that is as it should be: python tools/notebooks.py"])


@pytest.mark.gpu
@each
def test_on_a_gpu(path):
    """The same cells run there, and each ends as without one: with a text, a picture, an error or nothing."""
    for cell, committed in zip(notebooks.run(path, gpu=True).cells, notebooks.read(path).cells, strict=True):
        assert ends(cell) == ends(committed), cell.id


def ends(cell):
    """The kinds of a cell's outputs; not what PyTorch or CuPy warn of on a machine."""
    return {output.output_type for output in cell.get("outputs", ()) if output.get("name") != "stderr"}


@each
def test_committed_without_traces_of_a_machine(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert not re.search(
        r'[" (](/(home|root|tmp|usr|work|Users)/|[A-Z]:\\\\)|site-packages|0x[0-9a-f]{6,}|\\u001b', text
    )
    book = notebooks.read(path)
    nbformat.validate(book)
    assert json.loads(text)["metadata"] == notebooks._METADATA
    assert all(set(cell.metadata) <= {"tags"} for cell in book.cells)
    numbers = [cell.execution_count for cell in book.cells if cell.cell_type == "code"]
    assert numbers == list(range(1, len(numbers) + 1)), "not run from top to bottom"
    assert not list(notebooks.surprises(book))


@each
def test_links_lead_somewhere(path):
    text = "\n".join(cell.source for cell in notebooks.read(path).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^):]+)\)", re.sub(r"`[^`]*`", "", text))
    assert links
    for link in links:
        assert (path.parent / link.partition("#")[0]).is_file(), link


def book(source, outputs=(), tags=()):
    cell = nbformat.v4.new_code_cell(source, id="one", outputs=[nbformat.v4.new_output(**given) for given in outputs])
    cell.metadata["tags"] = list(tags)
    return nbformat.v4.new_notebook(cells=[cell])


PRINTED = dict(output_type="stream", name="stdout", text="1\n")
PICTURE = dict(output_type="display_data", data={"text/plain": "<Figure>", "image/png": "AAAA"})
ERROR = dict(output_type="error", ename="E", evalue="", traceback=["E: gone"])


def test_a_cell_that_fails(tmp_path):
    nbformat.write(book("1 / 0"), path := tmp_path / "fails.ipynb")
    with pytest.raises(CellExecutionError, match="division by zero"):
        notebooks.run(path)


@pytest.mark.parametrize(
    ("outputs", "tags", "words"),
    [
        ([ERROR], [], "fails without the tag"),
        ([PRINTED], [notebooks.EXPECTED], "does not fail, and has the tag"),
        ([dict(PRINTED, name="stderr")], [], "writes to stderr: 1"),
        ([ERROR], [notebooks.EXPECTED], None),
        ([PRINTED, PICTURE], [], None),
    ],
)
def test_surprises(outputs, tags, words):
    found = list(notebooks.surprises(book("x", outputs, tags)))
    assert [words in text for text in found] == [True] if words else found == []


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (PRINTED, dict(PRINTED, text="2\n"), False),
        (PRINTED, PICTURE, False),
        (PICTURE, dict(PICTURE, data={"text/plain": "<Figure>"}), False),
        (ERROR, dict(ERROR, traceback=["E: another"]), False),
        (PICTURE, dict(PICTURE, data={"text/plain": "<Figure>", "image/png": "BBBB"}), True),
    ],
)
def test_differences(before, now, same):
    assert same == (not list(notebooks.differences(book("x", [before]), book("x", [now]))))


@each
def test_the_first_cell_installs(path):
    """Where cupyops is missing, as on Colab and Kaggle, and by extras that there are."""
    first = next(cell for cell in notebooks.read(path).cells if cell.cell_type == "code")
    extras = re.search(
        r'find_spec\("cupyops"\) is None:.*\n +#.*git\+URL.*\n +%pip install --quiet "cupyops\[([\w,]+)\]"',
        first.source,
    )[1]
    project = tomllib.loads((notebooks.EXAMPLES.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
