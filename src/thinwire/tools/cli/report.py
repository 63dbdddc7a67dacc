"""`thinwire report`: records as tables."""

from pathlib import Path
from typing import Annotated

import typer

from thinwire.errors import RecordError
from thinwire.tools import report
from thinwire.tools.bench import record
from thinwire.tools.cli import screen
from thinwire.tools.report import text


def command(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help='Records; "-" is standard input.')],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a terminal table.")] = False,
) -> None:
    """Show records as tables. Records are what `thinwire bench ... --json FILE` writes.

    \b
    Example:
      thinwire report step.json link.json
      thinwire report --markdown step.json >> README.md
    """
    with screen.usage_errors("FILE", RecordError):
        records = [record.read(path) for path in files]
    if any(found.kind == "train" for found in records):
        from thinwire.tools.cli import demo  # with torch, which other records do without

        report.GRIDS.setdefault("train", demo.grids)
    for place, (file, found) in enumerate(zip(files, records, strict=True)):
        if place:
            typer.echo()
        if len(files) > 1:
            name = "standard input" if file == "-" else text(Path(file).name)
            typer.echo(f"{report.plain(name)}\n" if markdown else name)
        if markdown:
            typer.echo(report.markdown(found))
        else:
            report.show(found, screen.console())
