"""What the repository holds: source, and figures a line each; nothing large, for every clone has it for ever."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 200_000  # bytes


def test_every_committed_file_is_small():
    if not (ROOT / ".git").exists():
        pytest.skip("not in a clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    large = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in files if path.is_file()}
    assert len(large) > 500 and {name: size for name, size in large.items() if size > LARGEST} == {}
