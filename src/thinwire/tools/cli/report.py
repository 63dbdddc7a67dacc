"""`thinwire report`: records as tables; two of a kind, compared."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.errors import RecordError
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Record
from thinwire.tools.cli import screen
from thinwire.tools.report import compare, tables
from thinwire.tools.report.cells import text

WORSE = "Exit with 1 where the second record is worse by more than noise, or lacks rows of the first."


def command(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help='Records; "-" is standard input.')],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a terminal table.")] = False,
    whole: screen.All = False,
    fail_on_regression: Annotated[bool, typer.Option("--fail-on-regression", help=WORSE)] = False,
) -> None:
    """Show records as tables; two of a kind are compared.

    Records are what `thinwire bench ... --json FILE` writes. Two records of one kind are compared after their tables,
    the second with the first, row by row. A row got worse where its change lies beyond the spread of both runs.

    \b
    Example:
      thinwire report step.json link.json
      thinwire report --markdown step.json >> README.md
      thinwire report before.json after.json --fail-on-regression
    """
    with screen.usage_errors("FILE", RecordError):
        records = [record.read(path) for path in files]
    comparison = compare.compare(*records) if compare.comparable(records) else None
    if fail_on_regression and comparison is None:
        raise typer.BadParameter(_why_not(records), param_hint="--fail-on-regression")
    _print(records, _names(files, comparison is not None), screen.console(), markdown)
    if comparison is not None:
        laid = compare.grid(comparison)
        typer.echo(f"\n{tables.markdown_grid(laid)}" if markdown else "")
        if not markdown:
            tables.show_grid(laid, screen.console())
    elif len(records) == 2:
        typer.echo(f"not compared: {_why_not(records)}", err=True)
    raise typer.Exit(int(fail_on_regression and comparison is not None and comparison.is_worse))


def _names(files: list[str], compared: bool) -> list[str]:
    """What tells several records apart: their files, and which is the old one. One needs no name."""
    names = ["standard input" if file == "-" else text(Path(file).name) for file in files]
    names = names if len(set(names)) == len(names) else list(map(text, files))
    if compared:
        return [f"{age}: {name}" for age, name in zip(("old", "new"), names, strict=True)]
    return names if len(names) > 1 else []


def _print(records: list[Record], names: list[str], console: Console, markdown: bool) -> None:
    for number, found in enumerate(records):
        if number:
            typer.echo()
        if names:
            typer.echo(f"{tables.plain(names[number])}\n" if markdown else names[number])
        if markdown:
            typer.echo(tables.markdown(found))
        else:
            tables.show(found, console)


def _why_not(records: list[Record]) -> str:
    kinds = list(dict.fromkeys(found.kind for found in records))
    if len(records) != 2:
        return f"expected two records to compare, got {len(records)}"
    if len(kinds) > 1:
        return f"a {kinds[0]} and a {kinds[1]} record measure different things; two of one kind can be compared"
    labels = ", ".join(compare.LABELS[kinds[0]])
    return f"the two {kinds[0]} records share no row: none has the same {labels} in both"
