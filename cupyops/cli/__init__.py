"""The command line, `python -m cupyops`. What it needs besides, typer, rich and packaging, is imported by `main` alone."""

from ..errors import MissingDependencyError


def main() -> None:
    """Run the command line on `sys.argv`. Raises `MissingDependencyError` where one of its packages is absent."""
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
    app(prog_name="python -m cupyops")
