"""tests/support/processes.py: a forked program is as one that an interpreter runs."""

import os
import subprocess
import sys

import pytest
from processes import run_python

both = pytest.mark.parametrize("bare", [False, True], ids=["cupyops", "bare"])


@both
@pytest.mark.parametrize(
    "code",
    [
        "print('ä'); import sys; print('no', file=sys.stderr); sys.exit(3)",
        "import sys; sys.exit('a text')",
        "import os, sys; print(os.getcwd(), sys.argv, __name__, os.environ.get('GIVEN'), os.environ.get('HOME'))",
        "import os; os.write(1, b'past Python')",
        "import here; print(here.VALUE)",
    ],
)
def test_as_by_an_interpreter(bare, code, tmp_path):
    (tmp_path / "here.py").write_text("VALUE = 7\n")
    env = {name: value for name, value in os.environ.items() if name != "HOME"} | {"GIVEN": "x"}
    found = run_python("-c", code, "one", 2, cwd=tmp_path, env=env, bare=bare)
    words = [sys.executable, "-X", "utf8", "-c", code, "one", "2"]
    expected = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8")
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


@both
def test_an_exception_is_told_and_nothing_is_left_for_the_next(bare, tmp_path):
    (tmp_path / "fails.py").write_text("import os\nos.environ['LEFT'] = 'yes'\nraise KeyError('lost')\n")
    done = run_python("fails.py", cwd=tmp_path, bare=bare)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("KeyError: 'lost'")
    done = run_python("-c", "import os; print('LEFT' in os.environ)", bare=bare)
    assert done.stdout == "False\n"


@both
def test_what_is_imported_before(bare):
    done = run_python("-c", "import sys; print('torch' in sys.modules, 'cupyops' in sys.modules)", bare=bare)
    assert done.stdout.split() == ["True", str(not bare)]


@both
def test_one_that_hangs_is_ended(bare):
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", "import time; time.sleep(60)", timeout=1, bare=bare)
