"""What `port` writes computes what a C++ compiler computes: `port_semantics/results.json` is recorded of g++."""

import json
from pathlib import Path

import pytest

from cupyops._port.port import port

FOLDER = Path(__file__).parent / "port_semantics"
RESULTS = json.loads((FOLDER / "results.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The module of a port of all functions, each of which a host function calls that launches."""
    path = tmp_path_factory.mktemp("semantics") / "functions.cu"
    calls = "".join(f"{name}({', '.join('1' * len(rows[0][0]))});\n" for name, rows in RESULTS.items())
    path.write_text((FOLDER / "functions.cu").read_text().replace("// CALLS", calls))
    found = port([path], str(path))
    assert not [one for one in found.problems if "not translated" in one]
    scope = {"__name__": "functions"}
    exec(compile(found.files["functions.py"], "functions.py", "exec"), scope)
    return scope


@pytest.mark.parametrize("name", RESULTS)
def test_it_computes_what_the_compiler_computes(made, name):
    for given, expected in RESULTS[name]:
        found = made[name](*given)
        same = found == type(found)(expected) or found != found and expected in ("nan", "-nan")
        assert same, (given, found, expected)
