"""Contents of the repository: source, and figures a line each; nothing large, for every clone has it for ever; few lines."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 200_000  # bytes
LINES = {("cupyops", "cuda_src"): 112_680, ("tests",): 84_100, ("tools",): 8_311}  # at most; of records none count
RECORDS = (".csv", ".json")  # written by tools and test runs


def listed(*folders):
    """The files that git knows, in all folders by default."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a clone")
    command = ["git", "ls-files", "-z", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_every_committed_file_is_small():
    files = listed()
    large = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in files}
    assert len(large) > 500 and {name: size for name, size in large.items() if size > LARGEST} == {}


@pytest.mark.parametrize("folders", LINES, ids=" + ".join)
def test_lines_only_fall(folders):
    """The next change may use what an earlier one has deleted, once the number here is lowered to what was reached."""
    found = sum(path.read_bytes().count(b"\n") for path in listed(*folders) if path.suffix not in RECORDS)
    most = LINES[folders]
    assert found <= most, (
        f"{' and '.join(folders)} have {found:,} lines, {found - most:,} more than tests/test_repository.py allows: delete "
        f"as many, or argue for them in CHANGELOG.md and raise the number"
    )
    assert found > most - 500, f"lower the number of {' and '.join(folders)} in tests/test_repository.py to {found:,}"
