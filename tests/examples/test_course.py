"""The exercises of the course: each check says what is missing, and what is wrong with a wrong kernel."""

import contextlib
import importlib
import io
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

for needed in ("IPython", "ipykernel", "nbclient"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import nbformat  # noqa: E402
import notebooks  # noqa: E402
from IPython.core.interactiveshell import InteractiveShell  # noqa: E402

import cupyops  # noqa: E402

# of the exercise as it is given, what is said to be missing
GIVEN = {
    "01_threads": "The kernel has written nothing to its output yet.",
    "02_memory": "The kernel has written nothing to its output yet.",
    "03_coalescing": "in line 7 of the cell a request of a warp touches 16 sectors where 4 would do",
    "04_barriers": "Nothing has diffused: y is x.",
    "05_reductions": "The total is still 0",
    "06_tiles": "The kernel has written nothing to its output yet.",
    "07_tensor_cores": "The kernel has written nothing to its output yet.",
    "08_gradients": "The kernel has written nothing to its output yet.",
}
# of the solution, with a text replaced, what is said to be wrong
WRONG = {
    "01_threads": [
        ("if (i < n) ", "", "Is a guard such as `if (i < n)` missing", "OutOfBounds"),
        ("i < n", "i <= n", "off by one", "offset 4000"),
        ("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x", "Only elements 0 to 255 were written"),
        ("blockIdx.x * blockDim.x", "blockIdx.x * gridDim.x", "elements were not written; the first of them is"),
        ("(1 - t) * a[i] + t * b[i]", "t * a[i] + (1 - t) * b[i]", "t and 1 - t are exchanged"),
        ("(1 - t) * a[i]", "a[i]", "The factor 1 - t of a[i] is missing"),
        ("t * b[i]", "0 * b[i]", "values are wrong. The first is [0]"),
    ],
    "02_memory": [
        ("if (c >= columns) return;", "", "a guard keeps the last ones away"),
        ("x[r * columns + c]", "x[c * rows + r]", "Rows lie one after the other"),
        ("x[r * columns + c]", "x[r * rows + c]", "values are wrong"),
        ("sum += x", "y[c] += x", "Add up in a variable of the thread, which begins with 0"),
        ("float sum = 0;", "float& sum = y[c]; sum = 0;", "The sums are right, but the warps went to global memory"),
        ("r < rows", "r < 1", "Only the first row was taken"),
        ("int r = 0", "int r = 1", "Row 0 is missing"),
        ("r < rows", "r < rows - 1", "The last row is missing"),
        ("r < rows", "r <= rows", "An index leads outside"),
    ],
    "03_coalescing": [
        ("c += blockDim.x", "c += columns", "Only the first 32 columns of each row were written"),
        ("s[row] *", "s[0] *", "All rows were scaled by s[0]"),
        ("int c = threadIdx.x; c", "int c = 2 * threadIdx.x; c", "were not written; the first of them is number 1."),
        ("x[row * columns + c]", "x[c * gridDim.x + row]", "values are wrong"),
    ],
    "04_barriers": [
        ("    __syncthreads();  // everybody has read\n", "", "Each step needs two", "Race"),
        ("    __syncthreads();  // everybody has written\n", "", "Each step needs two", "Race"),
        ("t > 0 && ", "", "The points at the ends have one neighbour alone", "OutOfBounds"),
        ("step < steps", "step < 1", "the rod after one step"),
        ("step < steps", "step <= steps", "the rod after steps + 1 steps"),
        ("step = 0", "step = 1", "the rod after steps - 1 steps"),
        (
            "v = (rod[t - 1] + rod[t + 1]) / 2;\n    __syncthreads();",
            "{ v = (rod[t - 1] + rod[t + 1]) / 2; __syncthreads(); }",
            "Each step needs two, which all 128 threads come to",
        ),
        ("  rod[t] = x[blockIdx.x * 128 + t];\n", "", "uses a value that nothing has written"),
    ],
    "05_reductions": [
        ("i < n ? x[i] : 0", "x[i]", "A thread without an element adds 0"),
        ("s[t] = i < n ? x[i] : 0;", "if (i >= n) return; s[t] = x[i];", "do not `return` above it"),
        (
            "if (t < step) s[t] += s[t + step];\n    __syncthreads();",
            "if (t < step) { s[t] += s[t + step]; __syncthreads(); }",
            "Keep it out of `if (t < step)`",
        ),
        ("s[t + step];\n    __syncthreads();", "s[t + step];", "belongs into each pass", "Race"),
        ("if (t == 0) atomicAdd", "atomicAdd", "256 times too large"),
        ("atomicAdd(y, s[0])", "y[0] += s[0]", "where the blocks meet, add by `atomicAdd(y, ...)`"),
        ("atomicAdd(y, s[0])", "y[0] = s[0]", "where the blocks meet, add by `atomicAdd(y, ...)`"),
        ("step > 0", "step > 1", "Every second element is missing"),
        ("step > 0", "step > 512", "the loop that halves the step is missing"),
        ("if (t == 0)", "if (i == 0)", "Only the first block has added its sum"),
        ("if (t == 0) atomicAdd(y, s[0])", "if (i < n) atomicAdd(y, x[i])", "1000 threads wait for one another"),
    ],
    "06_tiles": [
        ("    __syncthreads();  // the tiles are full\n", "", "Each pass needs two", "Race"),
        ("    __syncthreads();  // the tiles were used\n", "", "Each pass needs two", "Race"),
        ("row < m && ka < k ? a[row * k + ka] : 0", "a[row * k + ka]", "The sizes are no multiples of 16"),
        ("if (row < m && column < n) ", "", "one whose element of c lies outside writes nothing"),
        (
            "a_tile[threadIdx.y][threadIdx.x] = row < m && ka < k ? a[row * k + ka] : 0;",
            "if (row < m && ka < k) a_tile[threadIdx.y][threadIdx.x] = a[row * k + ka];",
            "puts 0 there",
        ),
        ("b_tile[j][threadIdx.x]", "b_tile[threadIdx.x][j]", "The tile of b is read with its row and column exchanged"),
        ("a_tile[threadIdx.y][j]", "a_tile[j][threadIdx.y]", "The tile of a is read with its row and column exchanged"),
        ("k0 < k;", "k0 < 16;", "Only the first tiles were used"),
        ("__syncthreads();  // the tiles are full", "__syncthreads(); sum = 0;", "Only the last tiles count"),
        (
            "if (row < m && column < n) ",
            "sum = 0; if (row < m && column < n) for (int j = 0; j < k; ++j) sum += a[row * k + j] * b[j * n + column];\n"
            "  if (row < m && column < n) ",
            "The product is right, but the threads loaded",
        ),
    ],
    "07_tensor_cores": [
        ("two(lower + k0), two(upper + k0 + 8)", "two(upper + k0 + 8), two(lower + k0)", "Two parts of a are exchanged"),
        ("{two(right + k0), two(right + k0 + 8)}", "{two(right + k0 + 8), two(right + k0)}", "The two parts of b are"),
        ("c[(group + 8) * 8 + pair] =", "c[group * 8 + pair] =", "elements were not written"),
        ("k0 < k;", "k0 < 16;", "Only the first 16 of k were used"),
        ("    mma(sum,", "    sum[0] = sum[1] = sum[2] = sum[3] = 0;\n    mma(sum,", "Only the last 16 of k count"),
        ("    mma(sum,", "    if (lane < 16) mma(sum,", "All 32 threads must come to it together"),
        ("b + group * k", "b + lane * k", "Row r of a begins at a[r * k]"),
        (
            "    mma(sum, a_part, b_part);",
            "    for (int j = 0; j < 16; ++j)\n"
            "      for (int e = 0; e < 4; ++e)\n"
            "        sum[e] += float(a[(group + e / 2 * 8) * k + k0 + j]) * float(b[(pair + e % 2) * k + k0 + j]);",
            "no tensor core was used",
        ),
    ],
    "08_gradients": [
        ("grad_y[i] * s", "s", "The factor grad_y is missing"),
        (" * (1 + b * x[i] * (1 - s))", "", "sigmoid(b x) depends on x, too"),
        ("(1 + b * x[i] * (1 - s))", "(b * x[i] * (1 - s))", "the derivative of the factor x is 1"),
        ("1 + b * x[i]", "1 + x[i]", "The inner derivative is missing"),
        ("1 + b * x[i]", "1 - b * x[i]", "A sign is wrong"),
        ("s * (1 + b * x[i] * (1 - s))", "x[i] * s", "This is grad_y times y"),
        ("if (i >= n) return;", "", "Is a guard such as `if (i < n)` missing"),
    ],
}  # fmt: skip


class Student:
    """Somebody who runs a notebook from the top, in this process."""

    def __init__(self):
        self.shell = InteractiveShell(user_ns={})

    def run(self, source):
        """Return the output of a cell."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            result = self.shell.run_cell(source)
        return output.getvalue(), result


@pytest.fixture(params=notebooks.COURSE, ids=lambda path: path.stem)
def lesson(request, monkeypatch):
    """(name, notebook, a student who has run all cells before the exercise)."""
    monkeypatch.syspath_prepend(str(request.param.parent))
    book, student = notebooks.read(request.param), Student()
    for cell in book.cells:
        if notebooks.EXERCISE in cell.metadata.get("tags", ()):
            break
        if cell.cell_type == "code":
            student.run(cell.source)[1].raise_error()
    yield request.param.stem, book, student
    student.run("%unload_ext cupyops")


def test_the_check_tells_what_is_wrong(lesson):
    name, book, student = lesson
    exercise, check = (notebooks.tagged(book, tag) for tag in (notebooks.EXERCISE, notebooks.CHECK))
    solution = notebooks.solution(book)

    def says(kernel):
        student.run(kernel)[1].raise_error()
        text, result = student.run(check.source)
        result.raise_error()
        return text

    given = says(exercise.source)
    assert given.startswith("Not yet. ") and GIVEN[name] in given
    assert says(solution).startswith("Right. ")
    for old, new, *words in WRONG[name]:
        assert solution.count(old) == 1, old
        said = says(solution.replace(old, new))
        assert said.startswith("Not yet. ") and all(word in said for word in words), f"{old!r} -> {new!r}:\n{said}"


def test_an_exercise_of_a_teacher(monkeypatch, capsys):
    """The one of docs/teach.md, as the last function of exercises.py."""
    monkeypatch.syspath_prepend(str(notebooks.EXAMPLES / "course"))
    page = (notebooks.EXAMPLES.parent / "docs" / "teach.md").read_text(encoding="utf-8")
    (source,) = re.findall(r'^```python title="exercises.py"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    names = dict(vars(importlib.import_module("exercises")))
    exec(source, names)
    for index, verdict in (
        ("n - 1 - i", "Right. Thread i reads element n - 1 - i: 64 requests of 32 warps."),
        ("i", "Not yet. y is x as it was."),
        ("n - i", "Not yet. An index leads outside of a tensor"),
    ):
        body = f"const int i = blockIdx.x * 256 + threadIdx.x; if (i < n) y[i] = x[{index}];"
        text = f"__global__ void reverse(const float* x, float* y, int n) {{ {body} }}"
        names["reverse"](cupyops.Kernel(text, "reverse"))
        assert capsys.readouterr().out.startswith(verdict)


def test_all_are_here():
    assert [path.stem for path in notebooks.COURSE] == list(GIVEN) == list(WRONG)
    assert all(path.stat().st_size < 200_000 for path in notebooks.COURSE)


def test_each_leads_to_the_next():
    for path, after in zip(notebooks.COURSE, notebooks.COURSE[1:]):
        assert f"]({after.name})" in notebooks.read(path).cells[-1].source


def test_what_students_get(tmp_path):
    notebooks.hand_out(tmp_path / "course")
    assert [path.name for path in sorted((tmp_path / "course").iterdir())] == [
        *(path.name for path in notebooks.COURSE),
        "exercises.py",
    ]
    for path in notebooks.COURSE:
        book = notebooks.read(tmp_path / "course" / path.name)
        assert notebooks.tagged(book, notebooks.EXERCISE).source == exercise_of(path).source
        assert not any(
            notebooks.SOLUTION in cell.metadata.get("tags", ()) or cell.get("outputs") for cell in book.cells
        )
        assert notebooks.solution(notebooks.read(path)).removeprefix("%%cuda\n") not in str(book)
        assert not any("](../" in cell.source for cell in book.cells), "a link to what is not handed out"
    with pytest.raises(SystemExit, match="course is there already; name a new folder"):
        notebooks.hand_out(tmp_path / "course")


def exercise_of(path):
    return notebooks.tagged(notebooks.read(path), notebooks.EXERCISE)


@pytest.mark.slow
def test_what_students_hand_in_is_graded(tmp_path, capsys):
    """By the course's own checks, whatever a student's exercises.py says."""
    path = notebooks.COURSE[0]
    answers = {
        "ada": notebooks.solution(notebooks.read(path)),
        "bob": "%%cuda\n__global__ void blend(float* y) { y[0] = 1 }",
    }
    for name, answer in answers.items():
        book = notebooks.read(path)
        notebooks.tagged(book, notebooks.EXERCISE).source = answer
        (tmp_path / name).mkdir()
        (tmp_path / name / "exercises.py").write_text("def threads(kernel): print('Right. As ever.')\n")
        nbformat.write(book, tmp_path / name / path.name)
    notebooks.main(answers=tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("ada/01_threads.ipynb: Right. 1,024 threads")
    assert said[1].startswith("bob/01_threads.ipynb: CompileError: ") and 'error: expected a ";"' in said[1]
    assert len(said) == 2


@pytest.mark.slow
def test_what_cannot_be_graded_is_told_and_the_others_are_graded(tmp_path, capsys):
    dying = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import os\nos._exit(1)")])
    for name, content in (("a", "no notebook"), ("b", nbformat.writes(dying)), ("c/.ipynb_checkpoints", "an old copy")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.ipynb").write_text(content)
    notebooks.main(answers=tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a/x.ipynb: It does not run. NotJSONError: ")
    assert second.startswith("b/x.ipynb: It does not run. DeadKernelError: ")
    with pytest.raises(SystemExit, match="absent holds no notebook; name the folder with the students' folders in it"):
        notebooks.main(answers=tmp_path / "absent")
