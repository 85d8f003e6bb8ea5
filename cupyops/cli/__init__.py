"""The command line, `python -m cupyops`. What it needs besides, typer and rich, is imported by `main` and not before."""

from ..errors import MissingDependencyError


def main() -> None:
    """Run the command line on `sys.argv`. Raises `MissingDependencyError` where typer or rich is absent."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f'the command line needs typer and rich: {error}\n  pip install "cupyops[cli]"'
        ) from error
    from .app import app

    app(prog_name="python -m cupyops")
