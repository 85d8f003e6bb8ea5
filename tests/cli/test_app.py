"""`python -m cupyops` itself, without a command."""

from typer.testing import CliRunner

import cupyops
from cupyops.cli.app import app


def test_the_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"cupyops {cupyops.__version__}\n")
