"""tools/nsight.py, with a stand-in for ncu: what it asks for, and what it makes of the answer."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NCU = """#!{python}
import csv, sys
if "{fails}":
    sys.exit("==ERROR== no permission")
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
print("==PROF== Connected to process 1")
out = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\\n")
out.writerow(["ID", "Kernel Name", "thread Domain:Push/Pop_Range:PL_Type", *metrics])
out.writerow(["", "", "", *["unit"] * len(metrics)])
of = {{"gpu__time_duration.sum": "1,500", "dram__bytes_read.sum": "2000000", "launch__block_size": "256"}}
def row(name, case, waits):
    numbers = [of.get(m, waits if "long_scoreboard" in m else "n/a" if "sleeping" in m else "0.25") for m in metrics]
    out.writerow(["0", name, case, *numbers])
row("void relu_fwd<float>(const T1 *, T1 *)", '7  "<default domain>:relu 2^20 float32:none:none"', "9.5")
row("void relu_bwd<float>(const T1 *, T1 *)", "", "3")
row("void sum<float>(const T1 *)", '8  "<default domain>:sum 8x8 float32:none:none"', "4")
"""


def run(tmp_path, *arguments, fails=""):
    ncu = tmp_path / "bin" / "ncu"
    ncu.parent.mkdir()
    ncu.write_text(NCU.format(python=sys.executable, fails=fails))
    ncu.chmod(ncu.stat().st_mode | stat.S_IXUSR)
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "nsight.py", *arguments], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PATH": f"{ncu.parent}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip


def test_each_kernel_has_a_line_under_its_case(tmp_path):
    done = run(tmp_path, "relu", "--json", tmp_path / "x.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    assert [(one["case"], one["kernel"]) for one in found] == [
        ("relu 2^20 float32", "relu_fwd<float>"),
        ("relu 2^20 float32", "relu_bwd<float>"),  # a thread of autograd's is in no range
        ("sum 8x8 float32", "sum<float>"),
    ]
    assert (found[0]["us"], found[0]["read MB"], found[0]["threads"]) == (1.5, 2, 256)
    assert found[0]["stalls"].startswith("long_scoreboard 9.5, ")
    assert [line for line in done.stdout.splitlines() if "relu_bwd<float>" in line and "256" in line]


def test_what_cannot_be_profiled(tmp_path):
    done = run(tmp_path, "relu", fails="yes")
    assert done.returncode == 1
    assert "no permission" in done.stderr
    tool = [sys.executable, ROOT / "tools" / "nsight.py"]
    done = subprocess.run(tool, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "not on the PATH" in done.stderr
