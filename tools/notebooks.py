"""The notebooks of examples/: run from top to bottom, and their outputs written into them.

    python tools/notebooks.py            run each, without a GPU, and write what it gives
    python tools/notebooks.py --check    run each, and say where that is not what it has

What is committed is made where no GPU is used, so that it is the same on every machine.
"""

from __future__ import annotations

import os
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
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
EXPECTED = "raises-exception"  # the tag of a cell that is to fail, as nbclient knows it
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def read(path: Path) -> Any:
    """The notebook as it is committed."""
    return nbformat.read(path, as_version=4)


def run(path: Path, gpu: bool = False) -> Any:
    """The notebook with the outputs that it gives now, in a kernel of this interpreter.

    Raises `CellExecutionError` at a cell that fails without the tag. With `gpu` it runs there, where there is one.
    """
    book = read(path)
    with TemporaryDirectory() as folder:
        ours = KernelSpecManager(kernel_dirs=[])  # which leaves ipykernel's own: no other interpreter's kernel
        manager = AsyncKernelManager(
            kernel_name="python3", kernel_spec_manager=ours, transport="ipc", ip=f"{folder}/kernel"
        )
        place = {"metadata": {"path": str(path.parent)}}
        client = NotebookClient(book, km=manager, timeout=120, record_timing=False, resources=place)
        client.execute(cleanup_kc=True, env=_environment(gpu))
    book.metadata = nbformat.from_dict(_METADATA)
    return book


def surprises(book: Any) -> Iterator[str]:
    """Of a notebook that has run: cells whose tag and whose end do not agree, and what was written to stderr."""
    for cell in _code(book):
        failed = any(output.output_type == "error" for output in cell.outputs)
        expected = EXPECTED in cell.metadata.get("tags", ())
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
def main(check: Annotated[bool, typer.Option("--check", help="compare, and write nothing")] = False) -> None:
    """Run each notebook; write its outputs, or compare them."""
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
