"""The commands that measure nothing: the root, `report` and `doctor`."""

import io
import sys
import warnings
from typing import Annotated

import typer

from thinwire.bench import record
from thinwire.cli import bench, doctor, screen
from thinwire.errors import RecordError
from thinwire.report import tables

app = typer.Typer(
    name="thinwire",
    help="Everything a PyTorch training job puts on the wire, in 1 to 8 bits.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: the same text in a terminal, a pipe and a log
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")


def start() -> None:
    """Run the command line. Where the terminal cannot show a character, a question mark stands for it."""
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


@app.command("report")
def report_command(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help='Records; "-" is standard input.')],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a terminal table.")] = False,
) -> None:
    """Print the tables of records that `thinwire bench ... --json FILE` wrote.

    \b
    Example:
      thinwire bench codec --quick --json codec.json
      thinwire report codec.json
      thinwire report --markdown codec.json >> README.md
    """
    with screen.usage_errors("FILE", RecordError):
        records = [record.read(path) for path in files]
    console = screen.console()
    for number, found in enumerate(records):
        if number:
            typer.echo()
        if markdown:
            typer.echo(tables.markdown(found))
        else:
            tables.show(found, console)


@app.command("doctor")
def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what works on this machine, and what to do about the rest.

    Each line starts with ✓ (works), ✗ (broken) or – (optional, not here). The exit status is 1 only where something
    is broken: python or torch is too old, the reference fails its self-test, or an installed kernel backend does not
    load or gives other bytes than the reference. A missing optional part, a compiler or a GPU say, leaves it at 0.

    \b
    Example:
      thinwire doctor
      thinwire doctor --json
    """
    findings = list(doctor.examine())
    typer.echo(doctor.as_json(findings) if as_json else doctor.as_text(findings, sys.stdout.encoding))
    raise typer.Exit(int(any(finding.works is False for finding in findings)))
