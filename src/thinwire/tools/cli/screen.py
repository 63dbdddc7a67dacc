"""What the commands share on the screen: consoles, the progress bar, errors without tracebacks."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import typer
from rich import progress as bars
from rich.console import Console

from thinwire.errors import ThinwireError
from thinwire.tools.bench.record import Progress

WIDE = 1 << 16  # columns of what is not a terminal: a pipe has no edge to wrap at
INTERRUPTED = 130  # exit statuses: what a shell gives for SIGINT
NO_READER = 141  # and for SIGPIPE


@contextlib.contextmanager
def without_traceback() -> Iterator[None]:
    """Turn Ctrl-C and an output that cannot be written into an exit status."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):  # the latter at a question
        typer.echo("\ninterrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        # What is left in the buffer would fail again when python ends.
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise typer.Exit(NO_READER) from None
        typer.echo(f"Error: standard output cannot be written: {error.strerror}", err=True)
        raise typer.Exit(1) from None


_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _Console(Console):
    """Raises BrokenPipeError when the reader goes away, for the root command to set the exit status."""

    def on_broken_pipe(self) -> None:
        """rich would exit with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console(*, stderr: bool = False) -> Console:
    """A console on standard output or error: no color unless it is a terminal, none under NO_COLOR."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDE
    return _Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """A bar on standard error with the case at hand and the time left; nothing where that is no terminal."""
    shown = console(stderr=True)
    text = bars.TextColumn("{task.description}")
    times = (bars.TimeElapsedColumn(), bars.TextColumn("left"), bars.TimeRemainingColumn())
    parts = (text, bars.BarColumn(), bars.MofNCompleteColumn(), *times)
    with bars.Progress(*parts, console=shown, transient=True, disable=not shown.is_terminal) as bar:

        def follow(cases: Sequence[Any]) -> Iterable[Any]:
            task = bar.add_task("", total=len(cases))
            for case in cases:
                bar.update(task, description=str(case))
                yield case
                bar.advance(task)

        yield follow


@contextlib.contextmanager
def usage_errors(flag: str | None, *kinds: type[Exception]) -> Iterator[None]:
    """Report errors of these kinds as usage errors: the text, the flag, and exit status 2."""
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error), param_hint=flag) from None


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Report a ThinwireError without a traceback: its text, and exit status 1."""
    try:
        yield
    except ThinwireError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
