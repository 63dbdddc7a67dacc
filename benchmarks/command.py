"""What the commands of the studies share: python -m benchmarks.NAME --help."""

from collections.abc import Callable

import typer

from benchmarks import delay, kinds as _tables  # noqa: F401, the tables of studies
from thinwire.tools.cli import screen
from thinwire.tools.local.link import BenchError, ShapedLink

MOST = 1 << 60  # elements; torch cannot count more of them


def start(command: Callable[..., None]) -> None:
    """Run a module's command."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    app()


def shaped(link: str | None) -> ShapedLink | None:
    """The link that --link names, if any; it may have a delay."""
    with screen.usage_errors("--link", BenchError):
        return None if link is None else delay.parse(link)
