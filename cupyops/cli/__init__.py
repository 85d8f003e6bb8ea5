"""The command line, `python -m cupyops`. What it needs besides, typer, rich and packaging, is imported by `main` alone."""

import gc

from .._util.garbage import collected_later
from ..errors import MissingDependencyError


def main() -> None:
    """Run the command line on `sys.argv`. Raises `MissingDependencyError` where one of its packages is absent."""
    with collected_later():
        try:
            import packaging  # noqa: F401
            import rich  # noqa: F401
            import typer  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                f'the command line needs typer, rich and packaging: {error}\n  pip install "cupyops[cli]"'
            ) from error
        from . import streams
        from .app import app

    streams.plain()
    gc.freeze()  # what has been imported stays until the end, and then goes with the process: nothing is to look through it
    try:
        app(prog_name="python -m cupyops")
    finally:
        gc.freeze()
