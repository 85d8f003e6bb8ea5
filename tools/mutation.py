"""Mutation score of the kernels: faults are put into cuda_src one at a time, and the simulator is to notice each.

    python tools/mutation.py [--only softmax] [--arch sm_90] [--json build/mutation.json]

A mutant lacks one __syncthreads(), one __syncwarp() or one wait for asynchronous copies, or has one `<` made `<=`. It is
made in memory; no file is touched. Every operator whose text it is in runs its samples in the simulator, forward and
backward, float32 and float16. A mutant is caught by a check of the simulator, by results that are not those of the
unmutated kernels to the bit, or by the compiler. One for which NVRTC writes the very PTX of the original is equivalent.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from operator_samples import Call, Make, operator_of, run, samples
from ptx_alone import ptx_alone
from torch import Tensor

import cupyops
from cupyops import _simulate
from cupyops._kernel.compile import compiler
from cupyops._kernel.compile.source import Source, cuda_src, strip_comments
from cupyops._kernel.kernel import Kernel, Specialised, kernels
from cupyops.errors import CompileError, SimulatorError

DTYPES = (torch.float32, torch.float16)
MAX_STEPS = 20_000  # many times what any sample takes

_PATTERNS = {
    "syncthreads": re.compile(r"__syncthreads\(\);"),
    "syncwarp": re.compile(r"__syncwarp\(\);"),
    "wait": re.compile(
        r"wait_async<[^;>]*>\(\);|cluster_wait\(\);|asm volatile\(\"cp\.async\.wait_\w+[^;\"]*;?\"[^;]*\);"
    ),
    "bound": re.compile(r"(?<= )<(?= )"),  # a template's bracket has no space before it or none behind it
}


@dataclass(frozen=True)
class Mutant:
    """One fault: at `start` of the file's text, `length` characters become `text`."""

    file: str  # as an #include spells it, or the name of the .cu file
    line: int
    kind: str
    source: str  # the line as it was
    start: int
    length: int
    text: str

    @property
    def name(self) -> str:
        """file:line kind column."""
        return f"{self.file}:{self.line} {self.kind} @{self.start}"

    def apply(self, text: str) -> str:
        """The text with the fault."""
        return text[: self.start] + self.text + text[self.start + self.length :]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: "check", "number", "compiler", "equivalent" or "survived"; and by what."""

    mutant: Mutant
    outcome: str
    by: str = ""
    where: str = ""
    seconds: float = 0.0


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """Every mutant of one file, in the order of the text."""
    code = strip_comments(text)
    found = sorted(
        (match.start(), kind, match) for kind, pattern in _PATTERNS.items() for match in pattern.finditer(code)
    )
    for start, kind, match in found:
        number = text.count("\n", 0, start) + 1
        line = text.splitlines()[number - 1].strip()
        if line.startswith(("#", "static_assert")):
            continue
        yield Mutant(file, number, kind, line, start, len(match.group()), "<=" if kind == "bound" else "")


def all_mutants(only: str = "") -> list[Mutant]:
    """Those of every file that a kernel of the package uses; of one file where `only` is its name without the ending."""
    texts: dict[str, str] = {}
    for kernel in kernels(cuda_src()):
        texts |= {kernel.source.name: kernel.source.text, **kernel.source.includes}
    chosen = {file: text for file, text in texts.items() if only in ("", Path(file).stem)}
    found = [mutant for file in sorted(chosen) for mutant in mutants(file, chosen[file])]
    return sorted(found, key=lambda mutant: (mutant.kind == "bound", "gemm" in mutant.file or "conv" in mutant.file))


# --- one mutant ----------------------------------------------------------------------------------------------------


class Mutated:
    """The kernels that have a mutant's text. While `applied()` is open, they are compiled from the mutated one."""

    def __init__(self, mutant: Mutant) -> None:
        self.kernels = [kernel for kernel in kernels(cuda_src()) if _has(kernel.source, mutant.file)]
        self._sources = [_mutated(kernel.source, mutant) for kernel in self.kernels]
        self._specialised: list[dict[tuple[Any, ...], Specialised]] = [{} for _ in self.kernels]

    @property
    def operators(self) -> set[str]:
        """Whose kernels they are."""
        return {operator_of(kernel.source.name) for kernel in self.kernels}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """May be opened again and again; what is compiled is kept."""
        before = [(kernel, kernel.source, kernel._specialised) for kernel in self.kernels]
        for kernel, source, specialised in zip(self.kernels, self._sources, self._specialised):
            kernel.__dict__["source"], kernel._specialised = source, specialised
        try:
            yield
        finally:
            for kernel, source, specialised in before:
                kernel.__dict__["source"], kernel._specialised = source, specialised


def _mutated(source: Source, mutant: Mutant) -> Source:
    if mutant.file == source.name:
        return replace(source, text=mutant.apply(source.text))
    return replace(source, includes=source.includes | {mutant.file: mutant.apply(source.includes[mutant.file])})


def _has(source: Source, file: str) -> bool:
    return file == source.name or file in source.includes


class Examiner:
    """Runs samples, and remembers what the unmutated kernels give and which of them each sample launches."""

    def __init__(self, arch: str = "sm_80") -> None:
        self._arch = arch
        self._known: dict[tuple[int, torch.dtype], tuple[list[Tensor], set[str]]] = {}
        self._samples = list(samples())

    def examine(self, mutant: Mutant, only: str = "", dtypes: Sequence[torch.dtype] = DTYPES) -> Verdict:
        """Run the samples of the operators that have the text, or of one of them, until one catches the mutant."""
        start = time.perf_counter()
        mutated, outcome = Mutated(mutant), "equivalent"
        for number, (operator, _) in enumerate(self._samples):
            for dtype in dtypes if operator in mutated.operators and only in ("", operator) else ():
                verdict = self._sample(mutant, mutated, number, dtype)
                if verdict.outcome == "survived":
                    outcome = "survived"
                elif verdict.outcome != "equivalent":
                    return replace(verdict, seconds=round(time.perf_counter() - start, 2))
        return Verdict(mutant, outcome, seconds=round(time.perf_counter() - start, 2))

    def _sample(self, mutant: Mutant, mutated: Mutated, number: int, dtype: torch.dtype) -> Verdict:
        operator, call = self._samples[number]
        where = f"{operator} {number} {str(dtype).removeprefix('torch.')}"
        expected, launched = self._original(number, dtype)
        original = self._texts(mutated.kernels, launched)
        try:
            with mutated.applied():
                if self._texts(mutated.kernels, launched) == original:
                    return Verdict(mutant, "equivalent")
                found = self._results(call, dtype)[0]
        except SimulatorError as error:
            return Verdict(mutant, "check", type(error).__name__, where)
        except CompileError:
            return Verdict(mutant, "compiler", where=where)
        same = len(found) == len(expected) and all(map(_same, found, expected))
        return Verdict(mutant, "survived") if same else Verdict(mutant, "number", where=where)

    def _original(self, number: int, dtype: torch.dtype) -> tuple[list[Tensor], set[str]]:
        key = number, dtype
        if key not in self._known:
            self._known[key] = self._results(self._samples[number][1], dtype)
        return self._known[key]

    def _texts(self, among: list[Kernel], launched: set[str]) -> dict[str, str]:
        """The code that the compiler makes of each kernel launched, of those that have the mutant's text."""
        return {
            name: _code(compiler.build(kernel.source, name, self._arch, kernel.options).ptx)
            for name in launched
            for kernel in among
            if kernel.base == name.partition("<")[0]
        }

    def _results(self, call: Call, dtype: torch.dtype) -> tuple[list[Tensor], set[str]]:
        """The results of a sample, and the names of the kernels that it launched."""
        with cupyops.simulate(self._arch, max_steps=MAX_STEPS), cupyops.trace() as trace:
            results = run(call, Make(dtype))
        return results, {record.kernel for record in trace.launches()}


def _same(a: Tensor, b: Tensor) -> bool:
    """To the bit."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _code(ptx: str) -> str:
    """PTX without what only tells where it comes from."""
    kept = re.split(r"^\s*\.section\b", ptx, maxsplit=1, flags=re.MULTILINE)[0]
    return re.sub(r"^\s*(//|\.loc\b|\.file\b).*\n", "", kept, flags=re.MULTILINE)


# --- all of them ---------------------------------------------------------------------------------------------------

_examiner: Examiner | None = None


def _begin(folder: str, arch: str) -> None:
    """A worker's start: mutants are kept in no cache that anything else reads."""
    global _examiner
    os.environ["CUPYOPS_CACHE_DIR"] = folder
    compiler.compile = ptx_alone  # type: ignore[assignment]
    torch.set_num_threads(1)
    _examiner = Examiner(arch)


def _examine(mutant: Mutant) -> Verdict:
    assert _examiner is not None
    _simulate._programs.clear()  # of the mutant before
    return _examiner.examine(mutant)


def examine_all(chosen: list[Mutant], processes: int, advance: Callable[[Verdict], Any], arch: str) -> None:
    """Hand each verdict to `advance` as it comes."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(processes, context, _begin, (folder, arch)) as pool,
    ):
        futures = [pool.submit(_examine, mutant) for mutant in chosen]
        for future in concurrent.futures.as_completed(futures):
            advance(future.result())


def main(
    only: Annotated[str, typer.Option(help="a file of cuda_src, without its ending")] = "",
    kind: Annotated[str, typer.Option(help=f"one of {', '.join(_PATTERNS)}")] = "",
    json_: Annotated[Path, typer.Option("--json", help="where the verdicts go")] = Path("build/mutation.json"),
    arch: Annotated[str, typer.Option(help="whose PTX is run")] = "sm_80",
    processes: Annotated[int, typer.Option(min=1)] = 2,
    again: Annotated[bool, typer.Option("--again", help="only those that survived when the JSON was written")] = False,
) -> None:
    """Examine every mutant and print the score."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    chosen = [mutant for mutant in all_mutants(only) if kind in ("", mutant.kind)]
    before = _read(json_) if again else []
    survivors = {verdict.mutant for verdict in before if verdict.outcome == "survived"}
    chosen = [mutant for mutant in chosen if not again or mutant in survivors]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        so_far = [verdict for verdict in before if verdict.mutant not in chosen]

        def advance(verdict: Verdict) -> None:
            so_far.append(verdict)
            _write(json_, so_far)  # a whole run takes long
            progress.update(task, advance=1, description=f"{verdict.mutant.name}: {verdict.outcome}")

        examine_all(chosen, processes, advance, arch)
    print_table(console, so_far)


def _read(path: Path) -> list[Verdict]:
    records = json.loads(path.read_text(encoding="utf-8"))
    return [Verdict(**record | {"mutant": Mutant(**record["mutant"])}) for record in records]


def _write(path: Path, verdicts: list[Verdict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1), encoding="utf-8")


def print_table(console: Any, verdicts: list[Verdict]) -> None:
    """A line for each file, one for each check, and the survivors."""
    from rich.table import Table

    outcomes = ("check", "number", "compiler", "equivalent", "survived")
    table = Table("file", "mutants", *outcomes)
    by_file: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_file.setdefault(verdict.mutant.file, []).append(verdict)
    for file, own in [*by_file.items(), ("all", verdicts)]:
        table.add_row(file, str(len(own)), *(str(sum(v.outcome == outcome for v in own)) for outcome in outcomes))
    console.print(table)
    for verdict in verdicts:
        if verdict.outcome == "survived":
            console.print(f"survived: {verdict.mutant.name}  {verdict.mutant.source}", markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
