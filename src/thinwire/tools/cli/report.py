"""`thinwire report`: records as tables, as plots and as a page; two of a kind, compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.errors import RecordError
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Record
from thinwire.tools.cli import screen
from thinwire.tools.report import compare, draw, page, tables
from thinwire.tools.report.cells import text

HTML = "Write one page there: to x.html, or to index.html in a directory."
PNG = "Write every plot to that directory."
WORSE = "Exit with 1 where the second record is worse by more than noise, or lacks rows of the first."


def command(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help='Records; "-" is standard input.')],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a terminal table.")] = False,
    png: Annotated[str | None, typer.Option(metavar="DIR", help=PNG)] = None,
    html: Annotated[str | None, typer.Option(metavar="PATH", help=HTML)] = None,
    whole: screen.All = False,
    fail_on_regression: Annotated[bool, typer.Option("--fail-on-regression", help=WORSE)] = False,
) -> None:
    """Show records: tables, plots, an HTML page; two of a kind are compared.

    Records are what `thinwire bench ... --json FILE` writes. Two records of one kind are compared after their tables,
    the second with the first, row by row. A row got worse where its change lies beyond the spread of both runs.

    --png and --html need the extra "report" (matplotlib). The page needs nothing else: no network, no scripts.

    \b
    Example:
      thinwire report --markdown step.json >> README.md
      thinwire report step.json link.json --html page.html --png plots
      thinwire report before.json after.json --fail-on-regression
    """
    pictures = _target(png, "--png")
    document = _target(html, "--html")
    with screen.usage_errors("FILE", RecordError):
        records = [record.read(path) for path in files]
    comparable = compare.comparable(records)
    names = _names(files, comparable)
    if fail_on_regression and not comparable:
        raise typer.BadParameter(_why_not(records), param_hint="--fail-on-regression")
    with screen.plain_errors():
        if pictures or document:
            draw.check()
        _print(records, names, screen.console(), markdown)
        written = _write(records, names, pictures, document)
    worse = fail_on_regression and compare.compare(*records).is_worse
    raise typer.Exit(int(worse or not written))


def _target(path: str | None, flag: str) -> Path | None:
    """A path to write to, which standard output is not."""
    if path in ("", "-"):
        raise typer.BadParameter(f"expected a path, got {path!r}", param_hint=flag)
    return None if path is None else Path(path)


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
    if compare.comparable(records):
        laid = compare.grid(compare.compare(*records))
        typer.echo(f"\n{tables.markdown_grid(laid)}" if markdown else "")
        if not markdown:
            tables.show_grid(laid, console)
    elif len(records) == 2:
        typer.echo(f"not compared: {_why_not(records)}", err=True)


def _why_not(records: list[Record]) -> str:
    kinds = list(dict.fromkeys(found.kind for found in records))
    if len(records) != 2:
        return f"expected two records to compare, got {len(records)}"
    if len(kinds) > 1:
        return f"a {kinds[0]} and a {kinds[1]} record measure different things; two of one kind can be compared"
    labels = ", ".join(compare.LABELS[kinds[0]])
    return f"the two {kinds[0]} records share no row: none has the same {labels} in both"


def _write(records: list[Record], names: list[str], png: Path | None, html: Path | None) -> bool:
    """Write the page and the plots; whether all could be written."""
    files: dict[str, Callable[[], None]] = {}
    if html is not None:
        is_page = html.suffix.lower() in (".html", ".htm") and not html.is_dir()
        place = html if is_page else html / page.INDEX
        files[str(place)] = lambda: page.save(page.page(records, names=names), place)
    if png is not None:
        charts = [chart for found in records for chart in draw.charts(found)]
        if charts:
            files[str(png)] = lambda: page.write_pngs(charts, png) and None
        else:
            typer.echo("no plots: the records hold nothing to draw", err=True)
    written = screen.write_all(files)
    for path in files if written else ():
        typer.echo(f"wrote {path}", err=True)
    return written
