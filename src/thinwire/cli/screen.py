"""What the commands share on the screen: consoles, the progress bar, errors without tracebacks."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as Bar,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from thinwire.bench.record import Progress
from thinwire.errors import ThinwireError

WIDE = 240  # columns of what is not a terminal: a pipe has no edge to wrap at


def console(*, stderr: bool = False) -> Console:
    """A console on standard output or error: no colour unless it is a terminal, none under NO_COLOR."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDE, highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """A bar on standard error with the case at hand and the time left; nothing where that is no terminal."""
    shown = console(stderr=True)
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    with Bar(*parts, *left, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        yield lambda cases: _follow(bar, cases)


def _follow(bar: Bar, cases: Sequence[Any]) -> Iterable[Any]:
    task = bar.add_task("", total=len(cases))
    for case in cases:
        bar.update(task, description=str(case))
        yield case
        bar.advance(task)


@contextlib.contextmanager
def usage_errors(flag: str, *kinds: type[Exception]) -> Iterator[None]:
    """An error of these kinds is the user's: its text, the flag it came by, and exit status 2."""
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error), param_hint=flag) from None


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """An error thinwire raises on purpose: its text, and exit status 1."""
    try:
        yield
    except ThinwireError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
