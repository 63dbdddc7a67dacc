"""Records as tables, for a terminal and for Markdown."""

import html
import re
import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.tools.bench.record import Record
from thinwire.tools.report.cells import ABSENT, TextGrid, counted, text
from thinwire.tools.report.kinds import grids


def show(record: Record, console: Console) -> None:
    for place, laid in enumerate(grids(record)):
        if place:
            console.print()
        show_grid(laid, console)
    console.print(conditions(record), style="dim")


def show_grid(laid: TextGrid, console: Console) -> None:
    """Print one table under its title. On a terminal that is too narrow the last columns are left out, and named."""
    what, how = laid.parts
    console.print(Text.assemble((what, "bold"), how))
    if not laid.rows:
        return
    kept = len(laid.header)
    whole = _rich(laid, ruled=console.is_terminal)
    while kept > laid.labels + 1 and _width(whole, console) > console.width:
        kept -= 1
        whole = _rich(laid.first(kept), ruled=console.is_terminal)
    console.print(whole)
    if left := laid.header[kept:]:
        console.print(f"Left out: {', '.join(left)}. A wider terminal, or a pipe, shows them.", style="dim")


def markdown(record: Record) -> str:
    return "\n".join([*map(markdown_grid, grids(record)), plain(conditions(record))])


def markdown_grid(laid: TextGrid) -> str:
    """One table in Markdown, its title before it and an empty line after it."""
    rule = ["---" if i < laid.labels else "--:" for i in range(len(laid.header))]
    lines = [map(plain, laid.header), rule, *(map(plain, row) for row in laid.rows)]
    return "\n".join([plain(laid.title), "", *(f"| {' | '.join(line)} |" for line in lines if laid.header), ""])


def plain(words: str) -> str:
    """Words that Markdown shows as they are: a record may hold HTML, links, or what ends a cell."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(words, quote=False))


def conditions(record: Record) -> str:
    have = {name: text(value) for name, value in record.conditions.items()}
    device = "" if have["device"] == "cpu" else f"{have['device']}, "
    triton = f"triton {have['triton']}, " if device and have["triton"] != ABSENT else ""
    commit = have["commit"][:12] + ("-dirty" if have["commit"].endswith("-dirty") else "")
    parts = [
        f"{device}{have['cpu']}, {counted(have['threads'], 'thread')}",
        f"thinwire {have['thinwire']}, torch {have['torch']}, {triton}python {have['python']}",
        f"{have['date']}, commit {commit}",
    ]
    return "; ".join([*parts, "interrupted"] if record.conditions.get("interrupted") else parts)


def _rich(laid: TextGrid, *, ruled: bool) -> Table:
    look = box.SIMPLE_HEAD if ruled else None
    table = Table(box=look, show_edge=False, pad_edge=False, padding=(0, 0 if ruled else 1))
    for i, name in enumerate(laid.header):
        if i < laid.labels:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for line in laid.rows:
        table.add_row(*line)
    return table


def _width(table: Table, console: Console) -> int:
    """Columns of the table, were there no edge to fold it at."""
    return console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum
