"""The root of the command line: every command is entered here, one line each."""

import io
import sys
import warnings
from typing import Annotated

import typer

from thinwire.tools.bench import record
from thinwire.tools.cli import advise, bench, demo, doctor, report, screen

_EPILOG = """\b
Exit status:
  0    done
  1    it failed, something is broken (doctor), or a result got worse or is missing (report
       --fail-on-regression)
  2    the command was not understood: the message says what is allowed
  130  interrupted; what was measured until then is kept
  141  the reader of the output went away (thinwire report ... | head -1)
\b
Example:
  thinwire demo
  thinwire doctor
  thinwire bench codec --quick --json codec.json
  thinwire report codec.json --html codec.html
  thinwire --install-completion
"""
app = typer.Typer(
    name="thinwire",
    cls=screen.Group,
    help="Everything a PyTorch training job puts on the wire, in 1 to 8 bits.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: the same text in a terminal, a pipe and a log
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.command)
app.add_typer(bench.app, name="bench")
app.command("advise")(advise.command)
app.command("report")(report.command)
app.command("doctor")(doctor.command)


def start() -> None:
    """Run the command line. Where the terminal cannot show a character, a question mark stands for it."""
    screen.fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.formatwarning = _one_line
    app(prog_name="thinwire")


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning is for the user of the command: its text, not where the code gave it."""
    return f"Warning: {message}\n"


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"thinwire {record.version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Everything a PyTorch training job puts on the wire, in 1 to 8 bits."""
