"""Records as tables, for a terminal and for Markdown.

To add the table of a kind: write a function Record -> Grid and enter it in `_GRIDS`; other kinds print every column.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.bench.record import Record, Row, Value, columns

ABSENT = "–"


@dataclass(frozen=True)
class Grid:
    """A table before it has a look: texts only, the first `labels` columns name the row, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]
    labels: int = 1


def grid(record: Record) -> Grid:
    """The table of a record."""
    if not record.rows:
        return Grid(f"{record.kind}: no rows", [], [])
    return _GRIDS.get(record.kind, _every_column)(record)


def show(record: Record, console: Console) -> None:
    """Print the table and the conditions: ruled on a terminal, plain aligned columns elsewhere."""
    laid = grid(record)
    console.print(laid.title, style="bold", soft_wrap=not console.is_terminal)
    if laid.rows:
        console.print(_rich(laid, ruled=console.is_terminal))
    console.print(conditions(record), style="dim", soft_wrap=not console.is_terminal)


def markdown(record: Record) -> str:
    """The same table in Markdown."""
    laid = grid(record)
    rule = ["---" if i < laid.labels else "--:" for i in range(len(laid.header))]
    lines = ["| " + " | ".join(cells) + " |" for cells in (laid.header, rule, *laid.rows) if cells]
    return "\n".join([laid.title, "", *lines, "", conditions(record)])


def conditions(record: Record) -> str:
    """One line that says where the numbers come from."""
    have = record.conditions
    device = "" if have["device"] == "cpu" else f"{have['device']}, "
    parts = [
        f"{device}{have['cpu']}, {have['threads']} threads",
        f"thinwire {have['thinwire']}, torch {have['torch']}, python {have['python']}",
        f"{have['date']}, commit {str(have['commit'] or ABSENT)[:12]}",
    ]
    return "; ".join([*parts, "interrupted"] if have.get("interrupted") else parts)


def _codec_grid(record: Record) -> Grid:
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
    return Grid(title, ["codec", "bits", *distributions, "dB"], rows)


def _nmse(row: Row | None) -> str:
    return scientific(row["nmse"]) if row else ABSENT


def _kernels_grid(record: Record) -> Grid:
    order = {value: place for place, value in enumerate(_texts(record, "op") + _texts(record, "codec"))}
    rows = sorted(record.rows, key=lambda row: (order[text(row["op"])], order[text(row["codec"])], text(row["dtype"])))
    compiled = any(row.get("times_compile") is not None for row in rows)
    header = ["op", "codec", "dtype", "threads", "ms", "×copy", "share", "×eager", *(["×compile"] if compiled else [])]
    cells = [[*_kernel_cells(row), *([significant(row.get("times_compile"))] if compiled else [])] for row in rows]
    return Grid(_kernels_title(record), header, cells, labels=3)


def _kernels_title(record: Record) -> str:
    backend, device, numel = (", ".join(_texts(record, name)) for name in ("backend", "device", "numel"))
    return (
        f"Backend {backend} on {device}, {numel} elements. ×copy: time over a copy's; share: of the copy's bandwidth; "
        "×eager: torch eager's time over the kernel's"
    )


def _kernel_cells(row: Row) -> list[str]:
    labels = [text(row[name]) for name in ("op", "codec", "dtype", "threads")]
    numbers = [significant(row[name]) for name in ("ms_p50", "times_copy")]
    return [*labels, *numbers, percent(row["copy_share"]), significant(row["times_eager"])]


def _collectives_grid(record: Record) -> Grid:
    header = ["verb", "codec", "algorithm", "world", "link", "numel", "ms", "×plain", "×bf16", "bytes", "limit"]
    rows = [_collective_cells(row) for row in record.rows]
    return Grid(_collectives_title(record), [*header, "CPU ms", "rel. error", "identical"], rows, labels=5)


def _collectives_title(record: Record) -> str:
    threads, cores = (", ".join(_texts(record, name)) for name in ("threads", "cores"))
    return (
        f"Ranks of {threads} thread on {cores} cores. ×plain, ×bf16: torch's time over thinwire's; bytes: sent by a "
        "rank; limit: share of the link's rate; CPU ms: a rank's"
    )


def _collective_cells(row: Row) -> list[str]:
    labels = [text(row[name]) for name in ("verb", "codec", "algorithm", "world", "link", "numel")]
    labels[2] = f"auto: {labels[2]}" if row.get("auto") else labels[2]
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


def _train_grid(record: Record) -> Grid:
    columns = [column for column in _TRAIN if any(_train_cell(row, column) != ABSENT for row in record.rows)]
    rows = [[*_train_labels(row), *(_train_cell(row, column) for column in columns)] for row in record.rows]
    return Grid(_train_title(record), ["codec", "feedback", *(column.header for column in columns)], rows, labels=2)


def _train_title(record: Record) -> str:
    names = ("task", "optimizer", "world", "link", "seeds", "steps")
    task, optimizer, world, link, seeds, steps = (", ".join(_texts(record, name)) for name in names)
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


def _every_column(record: Record) -> Grid:
    """Any other kind: the columns of the schema as they are."""
    header = list(dict.fromkeys(name for row in record.rows for name in columns(record.kind, row)))
    rows = [[_any(row.get(name)) for name in header] for row in record.rows]
    return Grid(record.kind, header, rows)


_GRIDS: dict[str, Callable[[Record], Grid]] = {
    "codec": _codec_grid,
    "kernels": _kernels_grid,
    "collectives": _collectives_grid,
    "train": _train_grid,
}


def _rich(laid: Grid, *, ruled: bool) -> Table:
    look, gap = (box.SIMPLE_HEAD, 0) if ruled else (None, 1)
    table = Table(box=look, show_edge=False, pad_edge=False, padding=(0, gap))
    for i, name in enumerate(laid.header):
        if i < laid.labels:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for cells in laid.rows:
        table.add_row(*cells)
    return table


def _texts(record: Record, column: str) -> list[str]:
    return list(dict.fromkeys(text(row.get(column)) for row in record.rows))


def text(value: Value) -> str:
    """A value as it is, or a dash."""
    return ABSENT if value is None else str(value)


def fixed(value: Value, decimals: int) -> str:
    """4.53."""
    return f"{value:.{decimals}f}" if isinstance(value, float | int) else ABSENT


def scientific(value: Value) -> str:
    """9.50e-3."""
    if not isinstance(value, float | int):
        return ABSENT
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def significant(value: Value) -> str:
    """Three digits: 0.0123, 1.23, 12.3, 1234."""
    if not isinstance(value, float | int):
        return ABSENT
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, decimals)}f}"


def signed(value: Value, decimals: int = 3) -> str:
    """+0.012."""
    return f"{value:+.{decimals}f}" if isinstance(value, float | int) else ABSENT


def percent(value: Value) -> str:
    """0.4%, 5.2%, 96%."""
    return f"{100 * value:.{0 if value >= 0.1 else 1}f}%" if isinstance(value, float | int) else ABSENT


def _megabytes(value: Value) -> str:
    return significant(value / 1e6) if isinstance(value, float | int) else ABSENT


def _verdict(value: Value) -> str:
    return ABSENT if value is None else "yes" if value else "NO"


def _any(value: Value) -> str:
    return significant(value) if isinstance(value, float) else text(value)


_TRAIN = (
    _Column("loss", "loss", significant),
    _Column("log ratio", "loss_log_ratio", signed),
    _Column("±", "loss_log_ratio_error", lambda value: fixed(value, 3)),
    _Column("val. gap", "val_gap_nats", lambda value: signed(value, 4)),
    _Column("±", "val_gap_error", lambda value: fixed(value, 4)),
    _Column("ms", "step_ms", significant),
    _Column("×plain", "speedup_plain", significant),
    _Column("×bf16", "speedup_bf16", significant),
    _Column("×PowerSGD", "speedup_powersgd", significant),
    _Column("bytes", "bytes_per_step", lambda value: fixed(value, 0)),
    _Column("over limit", "over_limit", percent),
    _Column(
        "extra MB", "extra_bytes", lambda value: significant(value / 1e6) if isinstance(value, float | int) else ABSENT
    ),
    _Column("identical", "identical", _verdict),
)
