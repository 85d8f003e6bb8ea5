"""The notebooks of examples/: run from top to bottom, and their outputs written into them.

    python tools/notebooks.py                      run each, without a GPU, and write what it gives
    python tools/notebooks.py --check              run each, and say where that is not what it has
    python tools/notebooks.py --hand-out FOLDER    write the course for students: without solutions and outputs
    python tools/notebooks.py --grade FOLDER       run the notebooks of students, and print what the checks say

What is committed is made where no GPU is used, so that it is the same on every machine. A notebook of the course has three
tagged cells: the exercise, its check, and the solution, a folded text with a block of CUDA.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import nbformat
import typer
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
COURSE = sorted((EXAMPLES / "course").glob("*.ipynb"))
NOTEBOOKS = [*sorted(EXAMPLES.glob("*.ipynb")), *COURSE]
EXERCISE, CHECK, SOLUTION = "exercise", "check", "solution"
EXPECTED = "raises-exception"  # the tag of a cell that is to fail, as nbclient knows it
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def read(path: Path) -> Any:
    """The notebook as it is committed."""
    return nbformat.read(path, as_version=4)


def tagged(book: Any, tag: str) -> Any:
    """The cell with a tag, of which there is one."""
    (cell,) = (cell for cell in book.cells if tag in cell.metadata.get("tags", ()))
    return cell


def solution(book: Any) -> str:
    """The exercise's cell as it is right."""
    (code,) = re.findall(r"^```cuda\n(.*?)^```$", tagged(book, SOLUTION).source, re.MULTILINE | re.DOTALL)
    return f"%%cuda\n{code}"


def hand_out(folder: Path) -> None:
    """Write the course into a new folder, with no solutions and no outputs. Raises `SystemExit` where it is not new.

    A link to a page or a notebook that is not handed out becomes its text.
    """
    if folder.exists():
        raise SystemExit(f"{folder} is there already; name a new folder")
    folder.mkdir(parents=True)
    shutil.copy(EXAMPLES / "course" / "exercises.py", folder)
    for path in COURSE:
        book = read(path)
        book.cells = [cell for cell in book.cells if SOLUTION not in cell.metadata.get("tags", ())]
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
            else:
                cell.source = re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", cell.source)
        nbformat.write(book, folder / path.name)


def grade(path: Path) -> str:
    """The verdict of the check in one line, with the course's own exercises.py; or why there is none.

    A student's code runs as any program of yours does: do this in a container.
    """
    try:
        book = run(path, folder=EXAMPLES / "course", go_on=True)
    except Exception as error:  # a file that is no notebook, a cell that does not end, a kernel that died
        return f"It does not run. {type(error).__name__}: {_lines(str(error), 1)}"
    texts = [_texts(cell) for cell in _code(book) if CHECK in cell.metadata.get("tags", ())]
    failed = [output for cell in _code(book) for output in cell.outputs if output.output_type == "error"]
    expected = [output for cell in _code(book) if _is_expected(cell) for output in cell.outputs]
    errors = [f"{output.ename}: {_lines(output.evalue, 2)}" for output in failed if output not in expected]
    return (errors or [_lines(text, 1) for text in texts] or ["it has no cell with the check"])[0]


def _lines(text: str, count: int) -> str:
    """The first lines, as one."""
    return " ".join([line.strip() for line in text.splitlines() if line.strip()][:count])


def run(path: Path, gpu: bool = False, folder: Path | None = None, go_on: bool = False) -> Any:
    """The notebook with the outputs that it gives now, in a kernel of this interpreter.

    It runs in `folder`, by default its own; with `gpu` on a GPU, where there is one. Raises `CellExecutionError` at a cell
    that fails without the tag, unless it is to `go_on`.
    """
    book = read(path)
    with TemporaryDirectory() as socket:
        ours = KernelSpecManager(kernel_dirs=[])  # which leaves ipykernel's own: no other interpreter's kernel
        manager = AsyncKernelManager(
            kernel_name="python3", kernel_spec_manager=ours, transport="ipc", ip=f"{socket}/kernel"
        )
        place = {"metadata": {"path": str(folder or path.parent)}}
        client = NotebookClient(book, km=manager, timeout=120, record_timing=False, resources=place, allow_errors=go_on)
        client.execute(cleanup_kc=True, env=_environment(gpu))
    book.metadata = nbformat.from_dict(_METADATA)
    return book


def surprises(book: Any) -> Iterator[str]:
    """Of a notebook that has run: cells whose tag and whose end do not agree, and what was written to stderr."""
    for cell in _code(book):
        failed = any(output.output_type == "error" for output in cell.outputs)
        expected = _is_expected(cell)
        if failed != expected:
            yield f"cell {cell.id} {'fails without' if failed else 'does not fail, and has'} the tag {EXPECTED}"
        for output in cell.outputs:
            if output.get("name") == "stderr":
                yield f"cell {cell.id} writes to stderr: {output.text}"


def differences(committed: Any, now: Any) -> Iterator[str]:
    """By cell, where the text of the outputs is another, or where a picture is there in one alone."""
    for old, new in zip(_code(committed), _code(now), strict=True):
        if (was := _texts(old)) != (found := _texts(new)):
            yield f"cell {old.id}: committed\n{was}\nnow\n{found}"


def _environment(gpu: bool) -> dict[str, str]:
    """This process's, without the settings that would change what a notebook shows."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CUPYOPS_") or name == "CUPYOPS_CACHE_DIR"
    }
    return plain | {"COLUMNS": "120"} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})


def _is_expected(cell: Any) -> bool:
    """Whether the cell is to fail."""
    return EXPECTED in cell.metadata.get("tags", ())


def _code(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def _texts(cell: Any) -> str:
    """The outputs of a cell, with the kind of a picture in its place."""
    # a bar of progress, which a busy machine shows for a moment, leaves an output without text
    return "\n".join(filter(None, map(_text, cell.outputs)))


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return "\n".join([output.data.get("text/plain", ""), *sorted(set(output.data) - {"text/plain"})])


@app.command()
def main(
    check: Annotated[bool, typer.Option("--check", help="compare, and write nothing")] = False,
    students: Annotated[Path | None, typer.Option("--hand-out", help="a new folder for the course")] = None,
    answers: Annotated[Path | None, typer.Option("--grade", help="a folder of answers, at any depth")] = None,
) -> None:
    """Run each notebook; write its outputs, or compare them. Or hand out the course, or grade it."""
    if students is not None:
        hand_out(students)
        typer.echo(f"{students}: {len(COURSE)} notebooks without their solutions, and exercises.py")
        return
    if answers is not None:
        paths = [path for path in sorted(answers.rglob("*.ipynb")) if ".ipynb_checkpoints" not in path.parts]
        if not paths:
            raise SystemExit(f"{answers} holds no notebook; name the folder with the students' folders in it")
        for path in paths:
            typer.echo(f"{path.relative_to(answers)}: {grade(path)}")
        return
    changed = 0
    for path in NOTEBOOKS:
        now = run(path)
        found = [*surprises(now), *differences(read(path), now)]
        changed += bool(found)
        typer.echo("\n".join([f"{path.name}: {len(found)} cells differ or surprise", *found]))
        if not check:
            nbformat.write(now, path)
    raise typer.Exit(int(check and changed > 0))


if __name__ == "__main__":
    app()
