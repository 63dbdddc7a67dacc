"""Records as tables, for a terminal and for Markdown; imports nothing of bench but its schema.

To add the table of a kind: list its columns in `TABLES`. Kinds that are not listed, such as those of the studies in
benchmarks/, get a plain table of all columns.
"""

import html
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.tools.bench.record import CURVE, Record, Row, Value

ABSENT = "–"


@dataclass(frozen=True)
class TextGrid:
    """A table before it has a look: texts only; the first `labels` columns name the row, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]
    labels: int = 1

    @property
    def parts(self) -> tuple[str, str]:
        """The title in two parts: what the table is, and how to read it."""
        what = re.split(r"(?=[.:;] )", self.title, maxsplit=1)[0]
        return what, self.title.removeprefix(what)


@dataclass(frozen=True)
class Column:
    """A column of a table: its header, the column of the record, how a value is written, and what it means."""

    header: str
    name: str
    show: Callable[[Value], str]
    means: str = ""

    def cell(self, row: Row) -> str:
        return self.show(row.get(self.name))


def grid(what: str, rows: Sequence[Row], columns: Sequence[Column], labels: int, how: str = "") -> TextGrid:
    """A line per row, without empty columns. Labels that all rows share go into the title, and what columns mean."""
    named = columns[:labels]
    same = [one for one in named if len(rows) > 1 and len(distinct(rows, one.name)) == 1]
    shared = ", ".join(f"{one.header} {one.cell(rows[0])}" for one in same if rows[0].get(one.name) is not None)
    kept = [one for one in columns if one not in same and any(one.cell(row) != ABSENT for row in rows)]
    cells = [[one.cell(row) for one in kept] for row in rows]
    meanings = "; ".join([how] * bool(how) + [f"{one.header}: {one.means}" for one in kept if one.means])
    title = ". ".join(filter(None, (what, shared, meanings)))
    return TextGrid(title, [one.header for one in kept], cells, sum(one in named for one in kept))


def distinct(rows: Sequence[Row], column: str) -> list[str]:
    """The texts of a column, each once, in order."""
    return list(dict.fromkeys(text(row.get(column)) for row in rows))


def text(value: Value) -> str:
    """A value as it is, or a dash. Line breaks become spaces; control codes and the like become "\ufffd"."""
    shown = ABSENT if value is None else str(value)
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "\ufffd" for letter in shown)


def number(value: Value, times: float = 1) -> float | None:
    """The value, `times` as large, where it is a finite number."""
    try:
        found = times * float(value) if isinstance(value, float | int) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def fixed(decimals: int, sign: str = "") -> Callable[[Value], str]:
    """4.53, or +0.012 with a sign; never -0.00."""

    def show(value: Value) -> str:
        found = number(value)
        return ABSENT if found is None else f"{found:{sign}z.{decimals}f}"

    return show


def scientific(value: Value) -> str:
    """9.50e-3."""
    found = number(value)
    if found is None:
        return ABSENT
    mantissa, exponent = f"{found:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}" if found else "0"


def significant(value: Value, times: float = 1) -> str:
    """Three digits: 0.0123, 1.23, 12.3, 1234."""
    found = number(value, times)
    if found is None:
        return ABSENT
    decimals = 2 - math.floor(math.log10(abs(found))) if found else 0
    return f"{found:.{max(0, decimals)}f}"


def scaled(times: float) -> Callable[[Value], str]:
    return lambda value: significant(value, times)


def percent(value: Value) -> str:
    """0.4%, 5.2%, 96%."""
    found = number(value)
    return ABSENT if found is None else f"{100 * found:.{0 if found >= 0.1 else 1}f}%"


def counted(count: int | str, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"


MS = (Column("ms", "ms_p50", significant), Column("p20", "ms_p20", significant), Column("p80", "ms_p80", significant))
SPEEDUPS = (Column("over fp32", "speedup_plain", significant), Column("over bf16", "speedup_bf16", significant))


def texts(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, name, text) for name in names)


# By kind: the title, the columns, and how many of them are labels. A column that no row fills is left out.
TABLES: dict[str, tuple[str, tuple[Column, ...], int]] = {
    "collectives": (
        "over fp32, over bf16: speedup over torch's own",
        (
            *texts("verb", "model", "codec", "algorithm", "connections"),
            *texts("feedback", "world", "nodes", "link", "numel"),
            *(MS[0], *SPEEDUPS, Column("kB", "bytes_per_rank", scaled(1e-3), "sent per rank")),
            Column("limit", "wire_limit_share", percent, "share of the link's rate"),
            Column("CPU ms", "cpu_ms_per_rank", significant),
            Column("host ms", "host_ms", significant, "until a call returns"),
            Column("steady ms", "host_steady_ms", significant),
            Column("GPU ms", "gpu_busy_ms", significant),
            *texts("launches"),
            Column("rel. error", "rel_error", scientific),
            *texts("identical"),
        ),
        10,
    ),
    "loss": (
        "delta: validation loss less fp32's of the same seed, in nats; low, high: its 95 % interval; more tokens: what "
        "fp32 would save for the same loss; null: fp32 with a relative noise of 1e-6",
        (
            *texts("size", "optimizer", "parallel", "params", "tokens", "world", "seeds", "arm"),
            Column("bits", "bits", fixed(2)),
            Column("val. loss", "val_loss", fixed(4)),
            Column("delta", "delta_nats", fixed(4, "+")),
            *(Column(end, f"delta_{end}", fixed(4, "+")) for end in ("low", "high")),
            Column("more tokens, %", "tokens_more_percent", fixed(1)),
        ),
        8,
    ),
    "link": (
        "Messages that all ranks send at once, each to the next rank; p20, p80: percentiles of the rounds",
        (*texts("world", "link", "backend", "nbytes"), *MS, Column("Gbit/s", "gbit_per_s", significant)),
        4,
    ),
}


GRIDS: dict[str, Callable[[Sequence[Row]], list[TextGrid]]] = {}  # kinds whose tables are more than a list of columns


def grids(record: Record) -> list[TextGrid]:
    if not (rows := record.rows):
        return [TextGrid(f"{record.kind}: no rows", [], [])]
    if record.kind in GRIDS:
        return GRIDS[record.kind](rows)
    if record.kind in TABLES:
        return [table(record.kind, rows)]
    by_schema: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_schema.setdefault(tuple(name for name in row if name != CURVE), []).append(row)
    return [_plain_grid(record.kind, names, found) for names, found in by_schema.items()]


def _plain_grid(kind: str, names: Sequence[str], rows: Sequence[Row]) -> TextGrid:
    """Every column, numbers to three digits; what all rows have alike goes into the title."""
    labels = [n for n in names if isinstance(rows[0][n], str) or (len(rows) > 1 and len(distinct(rows, n)) == 1)]
    ordered = [*labels, *(name for name in names if name not in labels)]
    return grid(kind, rows, [Column(name, name, _plain) for name in ordered], len(labels))


def _plain(value: Value) -> str:
    return significant(value) if isinstance(value, float) else text(value)


def table(kind: str, rows: Sequence[Row], what: str = "") -> TextGrid:
    """The table of a kind; `what` begins its title."""
    title, columns, labels = TABLES[kind]
    return grid(what, rows, columns, labels, title)


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
    unfolded = console.options.update(max_width=sys.maxsize)
    kept = len(laid.header)
    table = _rich(laid, kept, ruled=console.is_terminal)
    while kept > laid.labels + 1 and console.measure(table, options=unfolded).maximum > console.width:
        kept -= 1
        table = _rich(laid, kept, ruled=console.is_terminal)
    console.print(table)
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


def _rich(laid: TextGrid, kept: int, *, ruled: bool) -> Table:
    """The first `kept` columns."""
    look = box.SIMPLE_HEAD if ruled else None
    table = Table(box=look, show_edge=False, pad_edge=False, padding=(0, 0 if ruled else 1))
    for i, name in enumerate(laid.header[:kept]):
        if i < laid.labels:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for line in laid.rows:
        table.add_row(*line[:kept])
    return table
