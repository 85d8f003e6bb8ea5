"""A fault of the GPU ends the process of the test, and no more than that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
CONFTEST = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import faults

def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.option.numprocesses:
        config.pluginmanager.register(faults.Watch(lambda: True))
"""
TESTS = """
def test_passes(): pass
def test_fails(): assert False
def test_next(): pass
def test_last(): pass
"""


@pytest.mark.parametrize("processes", [0, 1])
def test_what_ends(tmp_path, processes):
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", f"-n{processes}", "-p", "no:cacheprovider", "test_it.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    if processes:
        assert "2 failed, 3 passed" in ran.stdout and "test_fails - worker 'gw0' crashed" in ran.stdout
    else:
        assert "1 failed, 1 passed" in ran.stdout and "test_fails has left the GPU with a fault" in ran.stdout
