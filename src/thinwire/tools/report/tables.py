"""Records as tables, for a terminal and for Markdown.

To add the tables of a kind: write a function Record -> list[Grid] and enter it in `_GRIDS`.
"""

import sys
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from thinwire.tools.bench.record import Record, Row, Value
from thinwire.tools.report import cells, kernels, qat
from thinwire.tools.report.cells import ABSENT, Column, TextGrid, counted, distinct, fixed, listed, significant, text


def grids(record: Record) -> list[TextGrid]:
    return _GRIDS[record.kind](record) if record.rows else [TextGrid(f"{record.kind}: no rows", [], [])]


def grid(record: Record) -> TextGrid:
    """The first table of a record, which for most kinds is the only one."""
    return grids(record)[0]


def show(record: Record, console: Console) -> None:
    for place, laid in enumerate(grids(record)):
        if place:
            console.print()
        show_grid(laid, console)
    console.print(conditions(record), style="dim", soft_wrap=not console.is_terminal)


def show_grid(laid: TextGrid, console: Console) -> None:
    """Print one table under its title: ruled on a terminal that is as wide, plain aligned columns elsewhere."""
    what, how = laid.told
    console.print(Text.assemble((what, "bold"), how), soft_wrap=not console.is_terminal)
    if laid.rows:
        ruled = _rich(laid, ruled=True)
        fits = console.is_terminal and _width(ruled, console) <= console.width
        _print_whole(ruled if fits else _rich(laid, ruled=False), console)


def markdown(record: Record) -> str:
    return "\n".join([*map(markdown_grid, grids(record)), conditions(record)])


def markdown_grid(laid: TextGrid) -> str:
    """One table in Markdown, its title before it and an empty line after it."""
    rule = ["---" if i < laid.labels else "--:" for i in range(len(laid.header))]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in (laid.header, rule, *laid.rows))
    return "\n".join([laid.title, "", *(f"| {' | '.join(line)} |" for line in escaped if line), ""])


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


def _codec_grids(record: Record) -> list[TextGrid]:
    names = distinct(record.rows, "distribution")
    at = {(text(row["codec"]), text(row["distribution"])): row for row in record.rows}
    scored = "gaussian" if "gaussian" in names else names[0]
    rows = []
    for codec in distinct(record.rows, "codec"):
        found: list[Row] = [at.get((codec, name), {}) for name in names]
        bits = next(row["wire_bits"] for row in found if row)
        lost = (cells.scientific(row.get("nmse")) for row in found)
        rows.append([codec, fixed(bits, 2), *lost, fixed(at.get((codec, scored), {}).get("db_above_rd"), 2)])
    title = f"NMSE by distribution. bits: all bytes of the wire; dB: above the Gaussian bound at those bits ({scored})"
    return [TextGrid(title, ["codec", "bits", *names, "dB"], rows)]


def _collectives_grids(record: Record) -> list[TextGrid]:
    threads, cores = listed(record.rows, "threads", "cores")
    title = (
        f"Ranks of {counted(threads, 'thread')} on {counted(cores, 'core')}. ×plain, ×bf16: torch's time over "
        "thinwire's; bytes: sent per rank; limit: share of the link's rate; CPU ms: per rank"
    )
    return [cells.grid(title, record.rows, _COLLECTIVES, 5)]


def _algorithm(row: Row) -> str:
    return f"auto: {text(row['algorithm'])}" if row.get("auto") else text(row["algorithm"])


def _world(row: Row) -> str:
    return f"{text(row['world'])} on {text(row['nodes'])} nodes" if row.get("nodes") else text(row["world"])


def _train_grids(record: Record) -> list[TextGrid]:
    columns = [Column("codec", _scheme), Column.of("feedback", "feedback", text), *cells.filled(_TRAIN, record.rows)]
    return [cells.grid(_train_title(record.rows), record.rows, columns, 2)]


def _train_title(rows: Sequence[Row]) -> str:
    task, optimizer, world, link, seeds, steps = listed(rows, "task", "optimizer", "world", "link", "seeds", "steps")
    floors = [f"{fixed(rows[0]['noise_floor'], 3)} in ln(loss)"] if rows[0]["noise_floor"] is not None else []
    floors += [f"{fixed(rows[0]['val_noise_floor'], 3)} nats"] if rows[0].get("val_noise_floor") is not None else []
    parts = ["log ratio: ln(loss / fp32's), ± its standard error"]
    parts += [f"two fp32 seeds differ by {' and '.join(floors)}"] if floors else []
    parts += ["×plain, ×bf16, ×PowerSGD: torch's time per step over this one's"]
    shaped = any(row.get("over_limit") is not None for row in rows)
    parts += ["limit: compute plus bytes over the link's rate"] if shaped else []
    return (
        f"{task} with {optimizer}, {world} ranks, {link}, {counted(seeds, 'seed')} of {steps} steps. {'; '.join(parts)}"
    )


def _scheme(row: Row) -> str:
    return f"{text(row['codec'])}{' (control)' if row.get('control') else ' (peer)' if row.get('peer') else ''}"


def _log_ratio(row: Row) -> str:
    return "diverged" if row.get("diverged") else cells.signed(row.get("loss_log_ratio"))


def _verdict(value: Value) -> str:
    return ABSENT if value is None else "yes" if value else "NO"


_SPEEDUPS = (Column.of("×plain", "speedup_plain", significant), Column.of("×bf16", "speedup_bf16", significant))
_IDENTICAL = Column.of("identical", "identical", _verdict)
_COLLECTIVES = (
    *(Column.of(name, name, text) for name in ("verb", "codec")),
    Column("algorithm", _algorithm),
    Column("world", _world),
    *(Column.of(name, name, text) for name in ("link", "numel")),
    Column.of("ms", "ms_p50", significant),
    *_SPEEDUPS,
    Column.of("bytes", "bytes_per_rank", lambda value: fixed(value, 0)),
    Column.of("limit", "wire_limit_share", cells.percent),
    Column.of("CPU ms", "cpu_ms_per_rank", significant),
    Column.of("rel. error", "rel_error", cells.scientific),
    _IDENTICAL,
)
_TRAIN = (
    Column.of("loss", "loss", significant),
    Column("log ratio", _log_ratio),
    Column.of("± (loss)", "loss_log_ratio_error", lambda value: fixed(value, 3)),
    Column.of("val. gap", "val_gap_nats", lambda value: cells.signed(value, 4)),
    Column.of("± (val.)", "val_gap_error", lambda value: fixed(value, 4)),
    Column.of("ms", "step_ms", significant),
    *_SPEEDUPS,
    Column.of("×PowerSGD", "speedup_powersgd", significant),
    Column.of("bytes", "bytes_per_step", lambda value: fixed(value, 0)),
    Column.of("over limit", "over_limit", cells.percent),
    Column.of("extra MB", "extra_bytes", lambda value: significant(value, 1e-6)),
    _IDENTICAL,
)
_GRIDS: dict[str, Callable[[Record], list[TextGrid]]] = {
    "codec": _codec_grids,
    "kernels": kernels.grids,
    "collectives": _collectives_grids,
    "train": _train_grids,
    "qat": qat.grids,
}


_STYLES: dict[cells.Tone, str] = {"": "", "good": "green", "bad": "bold red"}


def _rich(laid: TextGrid, *, ruled: bool) -> Table:
    look = box.SIMPLE_HEAD if ruled else None
    table = Table(box=look, show_edge=False, pad_edge=False, padding=(0, 0 if ruled else 1))
    for i, name in enumerate(laid.header):
        if i < laid.labels:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for place, line in enumerate(laid.rows):
        table.add_row(*line, style=_STYLES[laid.tones[place]] if laid.tones else None)
    return table


def _width(table: Table, console: Console) -> int:
    """Columns of the table, were there no edge to fold it at."""
    return console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum


def _print_whole(table: Table, console: Console) -> None:
    """Every cell on its line; a terminal that is narrower breaks lines, not words."""
    options = console.options.update(max_width=_width(table, console))
    console.print(Segments(console.render(table, options)), soft_wrap=True, end="")
