"""What the commands of the studies share: python -m benchmarks.NAME --help."""

from collections.abc import Callable, Collection, Sequence
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks import delay, kinds as _tables  # noqa: F401, the tables of studies
from thinwire.tools import report
from thinwire.tools.bench.record import Record
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.flags import Device, Words, option
from thinwire.tools.local.link import BenchError, ShapedLink

Codecs = Annotated[Words, option("Codecs such as int8,int4:block=32,mode=affine; may be repeated.")]
MOST = 1 << 60  # elements; torch cannot count more of them


def start(command: Callable[..., None]) -> None:
    """Run a module's command."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    app()


def show_with_notes(record: Record, console: Console) -> None:
    """The tables; rows' notes go to standard error, and where one has no time the status is 1."""
    report.show(record, console)
    noted = [row for row in record.rows if row.get("note")]
    for row in noted:
        what = " ".join(str(row[name]) for name in ("op", "codec", "dtype") if name in row)
        typer.echo(f"{what}, {row['numel']} elements: {row['note']}", err=True)
    if any(row.get("ms_p50") is None for row in noted):
        raise typer.Exit(1)


def shaped(link: str | None) -> ShapedLink | None:
    """The link that --link names, if any; it may have a delay."""
    with screen.usage_errors("--link", BenchError):
        return None if link is None else delay.parse(link)


def words(given: Sequence[str] | None, allowed: Collection[str], flag: str) -> list[str] | None:
    """The words of a flag that may be repeated, each one of `allowed`; None where the flag was not given."""
    found = flags.pieces(given)
    for word in found:
        if word not in allowed:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(allowed)}", param_hint=flag)
    return found or None


def check_device(device: Device | None) -> None:
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here; use --device cpu", param_hint="--device")
