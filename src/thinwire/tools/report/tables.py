"""Records as tables, for a terminal and for Markdown.

To add the tables of a kind: write a function Record -> list[Grid] and enter it in `_GRIDS`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from thinwire.tools.bench.record import Record, Row, Value
from thinwire.tools.report import kernels, qat
from thinwire.tools.report.cells import (
    ABSENT,
    Grid,
    Tone,
    counted,
    distinct,
    fixed,
    number,
    percent,
    scientific,
    signed,
    significant,
    text,
)


def grids(record: Record) -> list[Grid]:
    """The tables of a record."""
    return _GRIDS[record.kind](record) if record.rows else [Grid(f"{record.kind}: no rows", [], [])]


def grid(record: Record) -> Grid:
    """The first table of a record, which for most kinds is the only one."""
    return grids(record)[0]


def show(record: Record, console: Console) -> None:
    """Print the tables and the conditions."""
    for place, laid in enumerate(grids(record)):
        if place:
            console.print()
        show_grid(laid, console)
    console.print(conditions(record), style="dim", soft_wrap=not console.is_terminal)


def show_grid(laid: Grid, console: Console) -> None:
    """Print one table under its title: ruled on a terminal that is as wide, plain aligned columns elsewhere."""
    what, how = laid.told
    console.print(Text.assemble((what, "bold"), how), soft_wrap=not console.is_terminal)
    if laid.rows:
        ruled = _rich(laid, ruled=True)
        fits = console.is_terminal and _width(ruled, console) <= console.width
        _print_whole(ruled if fits else _rich(laid, ruled=False), console)


def markdown(record: Record) -> str:
    """The same tables in Markdown."""
    return "\n".join([*map(markdown_grid, grids(record)), conditions(record)])


def markdown_grid(laid: Grid) -> str:
    """One table in Markdown, its title before it and an empty line after it."""
    rule = ["---" if i < laid.labels else "--:" for i in range(len(laid.header))]
    lines = ["| " + " | ".join(map(_escaped, cells)) + " |" for cells in (laid.header, rule, *laid.rows) if cells]
    return "\n".join([laid.title, "", *lines, ""])


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def conditions(record: Record) -> str:
    """One line that says where the numbers come from."""
    have = {name: text(value) for name, value in record.conditions.items()}
    device = "" if have["device"] == "cpu" else f"{have['device']}, "
    triton = f"triton {have['triton']}, " if device and have["triton"] != ABSENT else ""
    parts = [
        f"{device}{have['cpu']}, {counted(have['threads'], 'thread')}",
        f"thinwire {have['thinwire']}, torch {have['torch']}, {triton}python {have['python']}",
        f"{have['date']}, commit {have['commit'][:12]}",
    ]
    return "; ".join([*parts, "interrupted"] if record.conditions.get("interrupted") else parts)


def _codec_grids(record: Record) -> list[Grid]:
    codecs = list(dict.fromkeys(text(row["codec"]) for row in record.rows))
    distributions = list(dict.fromkeys(text(row["distribution"]) for row in record.rows))
    at = {(text(row["codec"]), text(row["distribution"])): row for row in record.rows}
    scored = "gaussian" if "gaussian" in distributions else distributions[0]
    rows = []
    for codec in codecs:
        found = [at.get((codec, name)) for name in distributions]
        first = next(row for row in found if row)
        score = at.get((codec, scored), {}).get("db_above_rd")
        rows.append([codec, fixed(first["wire_bits"], 2), *(_nmse(row) for row in found), fixed(score, 2)])
    title = f"NMSE by distribution. bits: all bytes of the wire; dB: above the Gaussian bound at those bits ({scored})"
    return [Grid(title, ["codec", "bits", *distributions, "dB"], rows)]


def _nmse(row: Row | None) -> str:
    return scientific(row["nmse"]) if row else ABSENT


def _collectives_grids(record: Record) -> list[Grid]:
    header = ["verb", "codec", "algorithm", "world", "link", "numel", "ms", "×plain", "×bf16", "bytes", "limit"]
    rows = [_collective_cells(row) for row in record.rows]
    return [Grid(_collectives_title(record), [*header, "CPU ms", "rel. error", "identical"], rows, labels=5)]


def _collectives_title(record: Record) -> str:
    threads, cores = (", ".join(distinct(record.rows, name)) for name in ("threads", "cores"))
    return (
        f"Ranks of {counted(threads, 'thread')} on {counted(cores, 'core')}. ×plain, ×bf16: torch's time over "
        "thinwire's; bytes: sent by a rank; limit: share of the link's rate; CPU ms: a rank's"
    )


def _collective_cells(row: Row) -> list[str]:
    labels = [text(row[name]) for name in ("verb", "codec", "algorithm", "world", "link", "numel")]
    labels[2] = f"auto: {labels[2]}" if row.get("auto") else labels[2]
    labels[3] = f"{labels[3]} on {text(row['nodes'])} nodes" if row.get("nodes") else labels[3]
    times = [significant(row[name]) for name in ("ms_p50", "speedup_plain", "speedup_bf16")]
    wire = [fixed(row["bytes_per_rank"], 0), percent(row["wire_limit_share"])]
    return [
        *labels,
        *times,
        *wire,
        significant(row["cpu_ms_per_rank"]),
        scientific(row["rel_error"]),
        _verdict(row["identical"]),
    ]


@dataclass(frozen=True)
class _Column:
    """A column of the train table; it is left out where no row has a value."""

    header: str
    name: str
    show: Callable[[Value], str]


def _train_grids(record: Record) -> list[Grid]:
    columns = [column for column in _TRAIN if any(_train_cell(row, column) != ABSENT for row in record.rows)]
    rows = [[*_train_labels(row), *(_train_cell(row, column) for column in columns)] for row in record.rows]
    header = ["codec", "feedback", *(column.header for column in columns)]
    return [Grid(_train_title(record), header, rows, labels=2)]


def _train_title(record: Record) -> str:
    names = ("task", "optimizer", "world", "link", "seeds", "steps")
    task, optimizer, world, link, seeds, steps = (", ".join(distinct(record.rows, name)) for name in names)
    parts = [
        "log ratio: ln(loss / fp32's), ± its standard error",
        *_floors(record.rows[0]),
        "×plain, ×bf16, ×PowerSGD: torch's time of a step over this one's",
        "limit: compute plus bytes over the link's rate",
    ]
    shaped = any(row.get("over_limit") is not None for row in record.rows)
    runs = f"{seeds} {'seed' if seeds == '1' else 'seeds'} of {steps} steps"
    told = "; ".join(parts if shaped else parts[:-1])
    return f"{task} with {optimizer}, {world} ranks, {link}, {runs}. {told}"


def _floors(row: Row) -> list[str]:
    """What another seed does to fp32."""
    texts = [f"{fixed(row['noise_floor'], 3)} in ln(loss)"] if row["noise_floor"] is not None else []
    texts += [f"{fixed(row['val_noise_floor'], 3)} nats"] if row.get("val_noise_floor") is not None else []
    return [f"two fp32 seeds differ by {' and '.join(texts)}"] if texts else []


def _train_labels(row: Row) -> list[str]:
    mark = " (control)" if row.get("control") else " (peer)" if row.get("peer") else ""
    return [f"{text(row['codec'])}{mark}", text(row["feedback"])]


def _train_cell(row: Row, column: _Column) -> str:
    if column.name == "loss_log_ratio" and row.get("diverged"):
        return "diverged"
    return column.show(row.get(column.name))


_GRIDS: dict[str, Callable[[Record], list[Grid]]] = {
    "codec": _codec_grids,
    "kernels": kernels.grids,
    "collectives": _collectives_grids,
    "train": _train_grids,
    "qat": qat.grids,
}


_STYLES: dict[Tone, str] = {"": "", "good": "green", "bad": "bold red"}


def _rich(laid: Grid, *, ruled: bool) -> Table:
    look, gap = (box.SIMPLE_HEAD, 0) if ruled else (None, 1)
    table = Table(box=look, show_edge=False, pad_edge=False, padding=(0, gap))
    for i, name in enumerate(laid.header):
        if i < laid.labels:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for place, cells in enumerate(laid.rows):
        table.add_row(*cells, style=_STYLES[laid.tones[place]] if laid.tones else None)
    return table


def _width(table: Table, console: Console) -> int:
    """Columns of the table, were there no edge to fold it at."""
    return console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum


def _print_whole(table: Table, console: Console) -> None:
    """Every cell on its line; a terminal that is narrower breaks lines, not words."""
    options = console.options.update(max_width=_width(table, console))
    console.print(Segments(console.render(table, options)), soft_wrap=True, end="")


def _megabytes(value: Value) -> str:
    found = number(value)
    return ABSENT if found is None else significant(found / 1e6)


def _verdict(value: Value) -> str:
    return ABSENT if value is None else "yes" if value else "NO"


_TRAIN = (
    _Column("loss", "loss", significant),
    _Column("log ratio", "loss_log_ratio", signed),
    _Column("± (loss)", "loss_log_ratio_error", lambda value: fixed(value, 3)),
    _Column("val. gap", "val_gap_nats", lambda value: signed(value, 4)),
    _Column("± (val.)", "val_gap_error", lambda value: fixed(value, 4)),
    _Column("ms", "step_ms", significant),
    _Column("×plain", "speedup_plain", significant),
    _Column("×bf16", "speedup_bf16", significant),
    _Column("×PowerSGD", "speedup_powersgd", significant),
    _Column("bytes", "bytes_per_step", lambda value: fixed(value, 0)),
    _Column("over limit", "over_limit", percent),
    _Column("extra MB", "extra_bytes", _megabytes),
    _Column("identical", "identical", _verdict),
)
