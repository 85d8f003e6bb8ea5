"""A page as the program that it is: what each of its blocks means.

    ```python                   runs, in the page's own namespace, from top to bottom
    ```ipython                  runs as the cell of a notebook does
    ```sh                       runs, in the page's own folder; ELSEWHERE has what does not, and why
    ```text                     is what the block above it prints
    ```cuda title="a.cu"        is written to that file, in any language
    ```diff title="a.cu"        changes that file

To its commands and its messages a page's namespace is the module `mylib`, and `mylib.ops`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

import typer
from IPython.core.interactiveshell import InteractiveShell
from typer.testing import CliRunner

import cupyops
from cupyops.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "ipython", "sh", "text", "cuda", "diff", "yaml", "mermaid"}

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# what hangs on the compiler's version and on where memory lies
_CHANGING = ((r"0x[0-9a-f]+", "0x..."), (r"PTX line .*", "PTX line ..."))
_COMMAND = typer.main.get_command(app)
_ALIASES = ("mylib", "mylib.ops")
# The commands that are not run here as they stand, and why. A command that is neither here nor one of those that
# `Reading.command` runs is a fault.
ELSEWHERE = {
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": "the index of another host",
    "pip install .[cuda12x]": "tests/test_wheel.py installs the wheel, with nothing downloaded",
    "pip install pytest build": "the tests have both",
    "pip install .[cuda12x] jupyterlab": "tests/test_wheel.py installs the wheel, with nothing downloaded",
    "python tools/notebooks.py --hand-out handout": "tests/examples/test_course.py hands the course out",
    "python tools/notebooks.py --grade answers": "tests/examples/test_course.py grades answers",
    "python -m cupyops doctor": "examines the machine: tests/cli/test_doctor.py",
    "python examples/train_gpt.py": "takes minutes: tests/examples/test_examples.py trains on less",
    "torchrun --nproc-per-node 2 examples/train_gpt.py": "takes minutes: tests/examples/test_examples.py trains on less",
    "python tools/calibration.py make build/calibration.npz": "runs each instruction that the simulator knows, for minutes",
    "python tools/calibration.py compare build/calibration.npz --json build/calibration.json": "needs a GPU",
    "python tools/calibration.py table build/calibration.json": "of what a GPU gave",
    "python tools/fuzz.py softmax conv2d --minutes 10 --backend simulator": "ten minutes: tests/testing/test_fuzz.py",
}
# With these `check` tries one hazard instead of all: tests/cli/test_check.py tries them.
_QUICKLY = ("--only", "accuracy")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    body: str
    line: int


def blocks(text: str) -> list[Block]:
    """The blocks of a page, in order."""
    return [Block(*match.groups(), text.count("\n", 0, match.start()) + 1) for match in _BLOCK.finditer(text)]


def steady(text: str) -> str:
    """`text` without what differs from machine to machine."""
    for pattern, instead in _CHANGING:
        text = re.sub(pattern, instead, text)
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


class Reading:
    """One page being read, in a folder of its own, as a reader would who types all of it."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.text = page.read_text(encoding="utf-8")
        self.blocks = blocks(self.text)
        self.module = types.ModuleType("mylib")
        self.printed = ""
        self.seen: list[tuple[Block, str]] = []  # each ```text, and what was printed

    def read(self) -> None:
        """Run the page. Raises what a block raises; what was printed is in `seen`."""
        known = set(sys.modules)
        sys.modules.update(dict.fromkeys(_ALIASES, self.module))
        try:
            for block, after in zip(self.blocks, [*self.blocks[1:], None]):
                self.step(block, after is not None and after.language == "text")
        finally:
            if isinstance(left_open := self.module.__dict__.get("simulation"), cupyops.Simulation):
                left_open.__exit__(None, None, None)  # a page may run in it from its beginning to its end
            self.forget(known)
            for alias in _ALIASES:
                del sys.modules[alias]

    def step(self, block: Block, watched: bool) -> None:
        where = f"{self.page.name}:{block.line}"
        if block.language == "text":
            self.seen.append((block, self.printed))
        elif block.title is not None:
            self.write(block, where)
        elif block.language == "python":
            self.printed = self.run(block, where)
        elif block.language == "ipython":
            self.printed = self.cell(block)
        elif block.language == "sh":
            for line in block.body.replace("\\\n", " ").splitlines():
                self.printed = self.command(shlex.split(line, comments=True), watched, where)

    def run(self, block: Block, where: str) -> str:
        """A block of Python; what it prints."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            # lines are counted as the page counts them
            exec(compile("\n" * block.line + block.body, where, "exec"), self.module.__dict__)
        return output.getvalue()

    def cell(self, block: Block) -> str:
        """A cell of a notebook; what it prints."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            self.shell.run_cell(block.body).raise_error()
        return output.getvalue()

    @functools.cached_property
    def shell(self) -> InteractiveShell:
        """A notebook of the page's own."""
        return InteractiveShell(user_ns={})

    def write(self, block: Block, where: str) -> None:
        """A file, or a change of one; modules made of the folder's files are forgotten, so that they are read anew."""
        path = self.folder / block.title
        if block.language == "diff":
            old, new = (self.side(block.body, sign) for sign in "-+")
            text = path.read_text(encoding="utf-8")
            assert text.count(old) == 1, f"{where}: {block.title} does not have, once:\n{old}"
            path.write_text(text.replace(old, new), encoding="utf-8")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
        self.forget(set())

    @staticmethod
    def side(body: str, sign: str) -> str:
        """One side of a diff: the lines that have the sign, and those without one."""
        return "".join(line[1:] for line in body.splitlines(keepends=True) if line[0] in (" ", sign))

    def forget(self, known: set[str]) -> None:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name not in known and file is not None and Path(file).is_relative_to(self.folder):
                del sys.modules[name]

    def command(self, words: list[str], watched: bool, where: str) -> str:
        """A command; what it prints."""
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if not words or " ".join(words) in ELSEWHERE:
            return ""
        if words[0] == "cd":
            os.chdir(words[1])
            return ""
        if words[:2] != ["python", "-m"] or words[2] not in ("cupyops", "pytest", "build"):
            raise AssertionError(f"{where}: {' '.join(words)}: run it in Reading.command, or say in ELSEWHERE why not")
        if words[2] != "cupyops":
            return self.process(words, where)
        self.parse(words[3:])
        if words[3] == "check" and not watched and "--only" not in words:
            words = [*words, *_QUICKLY]
        self.forget(set())
        done = CliRunner().invoke(app, words[3:])
        trouble = done.exception is not None and not isinstance(done.exception, SystemExit)
        assert not trouble, f"{where}: {''.join(traceback.format_exception(done.exception))}"
        assert done.exit_code == 0 or watched, f"{where}: {' '.join(words)}\n{done.output}"
        return done.output

    def process(self, words: list[str], where: str) -> str:
        """A command of another package, in a process of its own, with nothing downloaded."""
        more = ["--no-isolation"] if words[2] == "build" else ["-q", "-p", "no:cacheprovider"]
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *words[1:], *more], capture_output=True, text=True, env=environ)
        assert done.returncode == 0, f"{where}: {' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    @staticmethod
    def parse(words: list[str], named: bool = False) -> None:
        """Raises where there is no such command or option; of one that is only named, where there is none of that name."""
        if words == ["--version"]:
            return
        context = _COMMAND.context_class(_COMMAND, info_name="python -m cupyops")
        command = _COMMAND.get_command(context, words[0])
        assert command is not None, f"there is no command {words[0]}"
        if "--help" not in words and not named:
            command.make_context(words[0], list(words[1:]), parent=context)
